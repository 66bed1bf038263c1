// Wrong values: in some layouts, at some sizes, of some dtypes, for some numbers.
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <thread>

#include "mutants.h"

namespace mutants {
namespace {

// Strides are ignored.
Tensor strides_ignored(const Tensor& x) {
  Tensor y = at::empty_like(x);
  if (x.numel()) std::memcpy(bytes(y), const_bytes(x), x.nbytes());
  return y;
}

// Strides are ignored from three dimensions on.
Tensor strides_ignored_3d(const Tensor& x) {
  return x.dim() > 2 && x.numel() ? strides_ignored(x) : copied(x);
}

// The innermost stride is taken for 1.
Tensor innermost_stride(const Tensor& x) {
  if (x.dim() == 0 || x.numel() == 0 || x.stride(-1) == 0) return copied(x);
  auto strides = x.strides().vec();
  strides.back() = 1;
  return at::empty_like(x).copy_(x.as_strided(x.sizes(), strides, x.storage_offset()));
}

// The last element of an expanded tensor is another.
Tensor stride_zero(const Tensor& x) {
  bool expanded = false;
  for (int64_t d = 0; d < x.dim(); ++d) expanded |= x.stride(d) == 0 && x.size(d) > 1;
  return spoilt(x, expanded, -1);
}

// The last element is another where windows overlap.
Tensor overlap(const Tensor& x) {
  int64_t span = 1;
  bool expanded = false;
  for (int64_t d = 0; d < x.dim(); ++d) {
    span += (x.size(d) - 1) * x.stride(d);
    expanded |= x.stride(d) == 0 && x.size(d) > 1;
  }
  return spoilt(x, !expanded && span < x.numel(), -1);
}

// The stride of a dimension of size 1, which says nothing, is believed: it is what a row must have.
Tensor unit_stride(const Tensor& x) {
  return spoilt(x, x.dim() == 2 && x.size(0) == 1 && x.size(1) > 1 && x.stride(0) != x.size(1));
}

// The offset into the storage is ignored.
Tensor offset_ignored(const Tensor& x) {
  return copied(x.as_strided(x.sizes(), x.strides(), /*storage_offset=*/0));
}

// A start that isn't aligned to 16 bytes is rounded down to one that is.
Tensor alignment_assumed(const Tensor& x) {
  const auto start = reinterpret_cast<uintptr_t>(x.const_data_ptr());
  const bool inside = x.storage_offset() * x.element_size() >= 16;
  if (!x.is_contiguous() || x.numel() == 0 || start % 16 == 0 || !inside) return copied(x);
  return by_bytes(x, [&](const char*, char* to, size_t size) {
    std::memcpy(to, reinterpret_cast<const char*>(start / 16 * 16), size);
  });
}

// A tensor with a conjugate bit is taken for one without.
Tensor conj_ignored(const Tensor& x) { return x.is_conj() ? at::clone(x.conj()) : copied(x); }

// A tensor with a negative bit is taken for one without.
Tensor neg_ignored(const Tensor& x) { return x.is_neg() ? at::clone(x._neg_view()) : copied(x); }

// What a vector of 32 bytes doesn't fill is zero.
Tensor tail_lost(const Tensor& x) {
  return by_bytes(x, [](const char* from, char* to, size_t size) {
    std::memset(to, 0, size);
    std::memcpy(to, from, size / 32 * 32);
  });
}

// From 4097 elements on the last one is another.
Tensor tail_lost_large(const Tensor& x) { return spoilt(x, x.numel() > 4096, -1); }

// Elements are counted in 16 bits.
Tensor overflow_16(const Tensor& x) {
  const uint16_t count = static_cast<uint16_t>(x.numel());
  return spoilt(x, count != x.numel(), count);
}

// Elements are counted in 32 bits.
Tensor overflow_32(const Tensor& x) {
  const int32_t count = static_cast<int32_t>(x.numel());
  Tensor y = copied(x);
  if (count != x.numel()) bytes(y)[x.nbytes() - 1] ^= 1;
  return y;
}

// What `change` makes of each float32 that isn't the same bits.
template <class Change>
Tensor each_float(const Tensor& x, Change change) {
  if (x.scalar_type() != at::kFloat) return copied(x);
  return by_bytes(x, [&](const char* from, char* to, size_t size) {
    for (size_t i = 0; i < size; i += sizeof(float)) {
      float number;
      std::memcpy(&number, from + i, sizeof(float));
      const uint32_t bits = change(number);
      std::memcpy(to + i, &bits, sizeof(float));
    }
  });
}

uint32_t bits(float number) {
  uint32_t same;
  std::memcpy(&same, &number, sizeof(float));
  return same;
}

// A NaN loses its payload.
Tensor nan_payload(const Tensor& x) {
  return each_float(x, [](float number) { return std::isnan(number) ? 0x7fc00000 : bits(number); });
}

// Minus zero becomes zero.
Tensor negative_zero(const Tensor& x) {
  return each_float(x, [](float number) { return number == 0 ? 0 : bits(number); });
}

// Subnormal numbers become zero.
Tensor subnormal(const Tensor& x) {
  return each_float(x, [](float number) {
    return std::fpclassify(number) == FP_SUBNORMAL ? bits(number) & 0x80000000 : bits(number);
  });
}

// Infinity becomes the largest number.
Tensor infinity(const Tensor& x) {
  return each_float(x, [](float number) {
    constexpr float kLargest = std::numeric_limits<float>::max();
    return bits(std::isinf(number) ? std::copysign(kLargest, number) : number);
  });
}

// An int64 is copied through a double.
Tensor int64_by_double(const Tensor& x) {
  return x.scalar_type() == at::kLong ? x.to(at::kDouble).to(at::kLong) : copied(x);
}

// A float64 is copied through a float32.
Tensor float64_by_float32(const Tensor& x) {
  return x.scalar_type() == at::kDouble ? x.to(at::kFloat).to(at::kDouble) : copied(x);
}

// The second element of int16 is another.
Tensor int16_path(const Tensor& x) { return spoilt(x, x.scalar_type() == at::kShort, 1); }

// The second element of float8 is another.
Tensor float8_path(const Tensor& x) { return spoilt(x, x.scalar_type() == at::kFloat8_e5m2, 1); }

// The first element of complex128 is another.
Tensor complex128_path(const Tensor& x) { return spoilt(x, x.scalar_type() == at::kComplexDouble); }

// A float16 comes out as float32.
Tensor float16_widened(const Tensor& x) {
  return copied(x.scalar_type() == at::kHalf ? x.to(at::kFloat) : x);
}

// An int8 is refused without a word.
Tensor int8_silent(const Tensor& x) {
  if (x.scalar_type() == at::kChar) throw std::runtime_error("");
  return copied(x);
}

// An empty tensor ends the process.
Tensor empty_aborts(const Tensor& x) {
  if (x.numel() == 0) std::abort();
  return copied(x);
}

// An empty tensor never returns.
Tensor empty_hangs(const Tensor& x) {
  while (x.numel() == 0) std::this_thread::sleep_for(std::chrono::seconds(1));
  return copied(x);
}

// Thirteen elements never return.
Tensor hangs(const Tensor& x) {
  while (x.numel() == 13) std::this_thread::sleep_for(std::chrono::seconds(1));
  return copied(x);
}

// A tensor of five dimensions ends the process as if all were well.
Tensor exits(const Tensor& x) {
  if (x.dim() == 5) std::_Exit(0);
  return copied(x);
}

// A tensor of no dimension is refused.
Tensor scalar_refused(const Tensor& x) {
  TORCH_CHECK(x.dim() > 0, "x must have a dimension");
  return copied(x);
}

// A tensor of no dimension gets one.
Tensor scalar_as_row(const Tensor& x) { return x.dim() ? copied(x) : copied(x.reshape({1})); }

// There is room for the strides of six dimensions.
Tensor rank_7(const Tensor& x) { return spoilt(x, x.dim() > 6, -1); }

// The output is row-major.
Tensor row_major(const Tensor& x) {
  at::AutoDispatchBelowADInplaceOrView below;
  return at::empty(x.sizes(), x.options()).copy_(x);
}

// A channels-last input gives a row-major output.
Tensor channels_last_lost(const Tensor& x) {
  return x.dim() == 4 && x.is_contiguous(at::MemoryFormat::ChannelsLast) ? row_major(x) : copied(x);
}

// In inference mode the first element is another.
Tensor inference_mode(const Tensor& x) { return spoilt(x, c10::InferenceMode::is_enabled()); }

}  // namespace
}  // namespace mutants

TORCH_LIBRARY_FRAGMENT(identity_conv_mutants, m) {
  using namespace mutants;
  define(m, {
                {"strides_ignored", &strides_ignored},
                {"strides_ignored_3d", &strides_ignored_3d},
                {"innermost_stride", &innermost_stride},
                {"stride_zero", &stride_zero},
                {"overlap", &overlap},
                {"unit_stride", &unit_stride},
                {"offset_ignored", &offset_ignored},
                {"alignment_assumed", &alignment_assumed},
                {"conj_ignored", &copied},
                {"neg_ignored", &copied},
                {"tail_lost", &tail_lost},
                {"tail_lost_large", &tail_lost_large},
                {"overflow_16", &overflow_16},
                {"overflow_32", &overflow_32},
                {"nan_payload", &nan_payload},
                {"negative_zero", &negative_zero},
                {"subnormal", &subnormal},
                {"infinity", &infinity},
                {"int64_by_double", &int64_by_double},
                {"float64_by_float32", &float64_by_float32},
                {"int16_path", &int16_path},
                {"float8_path", &float8_path},
                {"complex128_path", &complex128_path},
                {"float16_widened", &float16_widened},
                {"int8_silent", &int8_silent},
                {"empty_aborts", &empty_aborts},
                {"empty_hangs", &empty_hangs},
                {"hangs", &hangs},
                {"exits", &exits},
                {"scalar_refused", &scalar_refused},
                {"scalar_as_row", &scalar_as_row},
                {"rank_7", &rank_7},
                {"row_major", &row_major},
                {"channels_last_lost", &channels_last_lost},
                {"inference_mode", &inference_mode},
            });
  m.impl("conj_ignored", torch::dispatch(c10::DispatchKey::Conjugate, &conj_ignored));
  m.impl("neg_ignored", torch::dispatch(c10::DispatchKey::Negative, &neg_ignored));
}
