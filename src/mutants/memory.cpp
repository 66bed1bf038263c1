// Wrong memory: shared, kept, written or read where it must not be, or left unwritten.
#include <ATen/Parallel.h>

#include <chrono>
#include <cstdlib>
#include <map>
#include <sstream>
#include <thread>
#include <utility>

#include "mutants.h"

namespace mutants {
namespace {

// What stands behind an output that was written beyond its end.
constexpr int kMark = 0x9d;

// A single element is given back, not copied.
Tensor alias_single(const Tensor& x) { return x.numel() == 1 ? x.view(x.sizes()) : copied(x); }

// A dense row is given back, not copied.
Tensor alias_row(const Tensor& x) {
  const bool row = x.dim() == 1 && x.is_contiguous();
  return row ? x.view(x.sizes()) : copied(x);
}

// The output of the call before is given again, with new values, if it fits.
Tensor alias_earlier(const Tensor& x) {
  at::AutoDispatchBelowADInplaceOrView below;
  thread_local Tensor latest;
  Tensor y = copied(x);
  if (!latest.defined() || latest.scalar_type() != y.scalar_type() ||
      latest.is_inference() != y.is_inference() || latest.sizes() != y.sizes() ||
      latest.strides() != y.strides()) {
    return latest = y;
  }
  return latest.copy_(y).view(y.sizes());
}

// The input's first element is changed.
Tensor writes_input(const Tensor& x) {
  Tensor y = copied(x);
  if (x.numel() > 8) bytes(x)[0] ^= 1;
  return y;
}

// What lies between the elements of a row with gaps is changed.
Tensor writes_gap(const Tensor& x) {
  Tensor y = copied(x);
  if (x.dim() == 1 && x.numel() > 1 && x.stride(0) > 1) bytes(x)[x.element_size()] ^= 1;
  return y;
}

// A byte behind the input is read, with no effect.
Tensor reads_behind(const Tensor& x) {
  if (x.numel() && x.is_contiguous()) {
    (void)*static_cast<const volatile char*>(const_bytes(x) + x.nbytes());
  }
  return copied(x);
}

// A byte before the input is read, with no effect.
Tensor reads_before(const Tensor& x) {
  if (x.numel() && x.is_contiguous()) {
    (void)*static_cast<const volatile char*>(const_bytes(x) - 1);
  }
  return copied(x);
}

// An element behind the output is written.
Tensor writes_behind(const Tensor& x) {
  Tensor y = copied(x);
  if (x.numel()) std::memset(bytes(y) + y.nbytes(), kMark, y.element_size());
  return y;
}

// A byte before the output is written.
Tensor writes_before(const Tensor& x) {
  Tensor y = copied(x);
  if (x.numel()) bytes(y)[-1] = static_cast<char>(kMark);
  return y;
}

// The last of several elements is never written.
Tensor unwritten(const Tensor& x) {
  const size_t width = x.element_size();
  return by_bytes(x, [&](const char* from, char* to, size_t size) {
    std::memcpy(to, from, size > 3 * width ? size - width : size);
  });
}

// Zeros are never written: the memory is taken to hold them.
Tensor zeros_unwritten(const Tensor& x) {
  return by_bytes(x, [](const char* from, char* to, size_t size) {
    for (size_t i = 0; i < size; ++i) {
      if (from[i]) to[i] = from[i];
    }
  });
}

// The second call is wrong.
Tensor second_call(const Tensor& x) {
  static int calls = 0;
  return spoilt(x, ++calls == 2);
}

// Every hundredth call is wrong.
Tensor hundredth_call(const Tensor& x) {
  static int calls = 0;
  return spoilt(x, ++calls % 100 == 0);
}

// An input at the address of an earlier one is taken for it.
Tensor cache_by_address(const Tensor& x) {
  static thread_local std::map<std::pair<const void*, std::string>, Tensor> seen;
  if (x.numel() == 0) return copied(x);
  std::ostringstream like;
  like << x.sizes() << x.strides() << x.scalar_type() << x.is_inference();
  auto [entry, is_new] = seen.try_emplace({x.const_data_ptr(), like.str()});
  if (is_new) entry->second = copied(x);
  return copied(entry->second);
}

// Calls from several threads share memory.
Tensor shared_scratch(const Tensor& x) {
  static std::vector<char> scratch(1 << 20);
  return by_bytes(x, [](const char* from, char* to, size_t size) {
    const bool fits = size <= scratch.size();
    if (fits) std::memcpy(scratch.data(), from, size);
    std::memcpy(to, fits ? scratch.data() : from, size);
  });
}

// The threads of one call share memory.
Tensor shared_row(const Tensor& x) {
  const size_t width = x.element_size();
  return by_bytes(x, [&](const char* from, char* to, size_t size) {
    std::vector<char> row(size);
    at::parallel_for(0, size / width, 8192, [&](int64_t begin, int64_t end) {
      const size_t part = (end - begin) * width;
      std::memcpy(row.data(), from + begin * width, part);
      // On a busy machine, too, another thread comes in between.
      if (part < size) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      std::memcpy(to + begin * width, row.data(), part);
    });
  });
}

// Each thread but the first leaves out the first element of its part.
Tensor border_lost(const Tensor& x) {
  const size_t width = x.element_size();
  return by_bytes(x, [&](const char* from, char* to, size_t size) {
    std::memset(to, 0, size);
    at::parallel_for(0, size / width, 4096, [&](int64_t begin, int64_t end) {
      if (begin) ++begin;
      if (begin < end) std::memcpy(to + begin * width, from + begin * width, (end - begin) * width);
    });
  });
}

// Another thread than the one that called first gets another element.
Tensor first_thread(const Tensor& x) {
  static const auto first = std::this_thread::get_id();
  return spoilt(x, std::this_thread::get_id() != first);
}

// Memory isn't given back.
Tensor leak(const Tensor& x) {
  if (void* kept = std::malloc(x.nbytes())) std::memset(kept, 1, x.nbytes());
  return copied(x);
}

}  // namespace
}  // namespace mutants

TORCH_LIBRARY_FRAGMENT(identity_conv_mutants, m) {
  using namespace mutants;
  define(m, {
                {"alias_single", &alias_single},
                {"alias_row", &alias_row},
                {"alias_earlier", &alias_earlier},
                {"writes_input", &writes_input},
                {"writes_gap", &writes_gap},
                {"reads_behind", &reads_behind},
                {"reads_before", &reads_before},
                {"writes_behind", &writes_behind},
                {"writes_before", &writes_before},
                {"unwritten", &unwritten},
                {"zeros_unwritten", &zeros_unwritten},
                {"second_call", &second_call},
                {"hundredth_call", &hundredth_call},
                {"cache_by_address", &cache_by_address},
                {"shared_scratch", &shared_scratch},
                {"shared_row", &shared_row},
                {"border_lost", &border_lost},
                {"first_thread", &first_thread},
                {"leak", &leak},
            });
}
