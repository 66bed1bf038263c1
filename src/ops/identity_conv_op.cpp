// my_ops::identity_conv_op(Tensor x) -> Tensor: a fresh tensor with x's values, bit for bit, and
// the sizes and strides of torch.clone(x). CPU, Meta, autograd, and a composite for every other
// device.

#include "identity_conv_op.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

#include "identity_conv/autograd.h"
#include "identity_conv/checks.h"
#include "identity_conv/huge_pages.h"

namespace my_ops {
namespace {

using at::Tensor;
using identity_conv::CopyLayout;

using Vector [[gnu::vector_size(16), gnu::aligned(1), gnu::may_alias]] = int64_t;

// Any element of N bytes, at any address: only bits move, so the element size is all there is to
// dispatch on. Those that are a number inside are copied by vectors where a loop lets them.
template <size_t N>
struct Bytes {
  unsigned char number[N];
};
template <>
struct [[gnu::packed, gnu::may_alias]] Bytes<1> {
  uint8_t number;
};
template <>
struct [[gnu::packed, gnu::may_alias]] Bytes<2> {
  uint16_t number;
};
template <>
struct [[gnu::packed, gnu::may_alias]] Bytes<4> {
  uint32_t number;
};
template <>
struct Bytes<16> {
  Vector number;
};

template <size_t N>
void put(Bytes<N>& to, const Bytes<N>& from) {
  if constexpr (N == 8) {
    to = from;
  } else {
    to.number = from.number;
  }
}

// The first and the last sizeof(Word) bytes, which overlap where they must.
template <class Word>
[[gnu::always_inline]] inline void copy_ends(const unsigned char* src, unsigned char* dst,
                                             int64_t count) {
  Word first, last;
  std::memcpy(&first, src, sizeof(Word));
  std::memcpy(&last, src + count - sizeof(Word), sizeof(Word));
  std::memcpy(dst, &first, sizeof(Word));
  std::memcpy(dst + count - sizeof(Word), &last, sizeof(Word));
}

[[gnu::always_inline]] inline void copy_bytes(const unsigned char* src, unsigned char* dst,
                                              int64_t count) {
  constexpr int64_t kVector = sizeof(Vector);
  constexpr int kUnroll = 4;
  if (count >= kVector) {
    int64_t i = 0;
    for (; i + kUnroll * kVector <= count; i += kUnroll * kVector) {
      for (int v = 0; v < kUnroll; ++v) {
        reinterpret_cast<Vector*>(dst + i)[v] = reinterpret_cast<const Vector*>(src + i)[v];
      }
    }
    for (; i + kVector <= count; i += kVector) {
      *reinterpret_cast<Vector*>(dst + i) = *reinterpret_cast<const Vector*>(src + i);
    }
    if (i < count) {
      *reinterpret_cast<Vector*>(dst + count - kVector) =
          *reinterpret_cast<const Vector*>(src + count - kVector);
    }
  } else if (count >= 8) {
    copy_ends<uint64_t>(src, dst, count);
  } else if (count >= 4) {
    copy_ends<uint32_t>(src, dst, count);
  } else {
    for (int64_t i = 0; i < count; ++i) dst[i] = src[i];
  }
}

// Rows of `count` bytes, `pitch` bytes apart, by plain vector stores. The output is fresh memory
// that faults page by page, and there memcpy's string instructions and non-temporal stores lose 5
// to 15 %; on warm memory the two are alike, but for rows of a few vectors, where a call costs more
// than they do. The attribute keeps the compiler from making a call of memcpy of it.
__attribute__((optimize("no-tree-loop-distribute-patterns"))) void copy_rows_of_bytes(
    const unsigned char* src, int64_t pitch, unsigned char* dst, int64_t count, int64_t rows) {
  for (int64_t row = 0; row < rows; ++row) copy_bytes(src + row * pitch, dst + row * count, count);
}

template <class T>
void copy_dense_rows(const T* src, int64_t pitch, T* dst, int64_t count, int64_t rows) {
  constexpr int64_t kBytes = sizeof(T);
  copy_rows_of_bytes(reinterpret_cast<const unsigned char*>(src), pitch * kBytes,
                     reinterpret_cast<unsigned char*>(dst), count * kBytes, rows);
}

// Repeats the first `period` elements of dst until there are `count`. Short ones are read from the
// cache, where memcpy's wider vectors win, in pieces that are worth a call of it.
template <class T>
void repeat(T* dst, int64_t period, int64_t count) {
  constexpr int64_t kEnoughBytes = 4096;
  for (int64_t i = period; i < count;) {
    if (i * sizeof(T) <= kEnoughBytes) period = i;
    const int64_t more = std::min(period, count - i);
    std::memcpy(dst + i, dst, more * sizeof(T));
    i += more;
  }
}

// So much is stored from the source before `repeat` reads it back: what has just been stored is
// slow to load.
constexpr int64_t kStoredBytes = 512;

// Rows of one element each, `pitch` apart, which is stored `count` times.
template <class T>
void repeat_elements(const T* src, int64_t pitch, T* dst, int64_t count, int64_t rows) {
  const int64_t first = std::min<int64_t>(count, kStoredBytes / sizeof(T));
  for (int64_t row = 0; row < rows; ++row, src += pitch, dst += count) {
    const T element = *src;
    // By hand: the pragma alone puts what is left over first, by a branch for each of 7.
    int64_t i = 0;
    for (; i + 8 <= first; i += 8) {
#pragma GCC unroll 8
      for (int64_t v = 0; v < 8; ++v) put(dst[i + v], element);
    }
    for (; i < first; ++i) put(dst[i], element);
    if (first < count) repeat(dst, first, count);
  }
}

// kCount > 0 is `count` known when compiling: rows of a few elements are common (the channels of an
// image) and a loop that counts costs more than they do.
template <int kCount, class T>
void copy_row(const T* src, int64_t stride, T* dst, int64_t count) {
  if constexpr (kCount > 0) {
    for (int i = 0; i < kCount; ++i) put(dst[i], src[i * stride]);
  } else if (stride == 1) {
    copy_dense_rows(src, 0, dst, count, 1);
  } else if (stride == 0) {
    repeat_elements(src, 0, dst, count, 1);
  } else if (stride == 2) {
    // Known when compiling, it is done by vectors.
    for (int64_t i = 0; i < count; ++i) put(dst[i], src[i * 2]);
  } else {
#pragma GCC unroll 4
    for (int64_t i = 0; i < count; ++i) put(dst[i], src[i * stride]);
  }
}

template <int kCount, class T>
void copy_rows_of(const T* src, int64_t stride, int64_t pitch, T* dst, int64_t count,
                  int64_t rows) {
  for (int64_t row = 0; row < rows; ++row) {
    copy_row<kCount>(src + row * pitch, stride, dst + row * count, count);
  }
}

template <class T>
void copy_rows(const T* src, int64_t stride, int64_t pitch, T* dst, int64_t count, int64_t rows) {
  if (pitch == 0 && rows > 1) {
    const int64_t row_bytes = count * sizeof(T);
    const int64_t first = std::clamp<int64_t>(kStoredBytes / row_bytes, 1, rows);
    copy_rows_of<0>(src, stride, pitch, dst, count, first);
    return repeat(dst, first * count, rows * count);
  }
  if (stride == 0 && count > 4) return repeat_elements(src, pitch, dst, count, rows);
  if (stride == 1 && count > 4) return copy_dense_rows(src, pitch, dst, count, rows);
  switch (count) {
    case 2:
      return copy_rows_of<2>(src, stride, pitch, dst, count, rows);
    case 3:
      return copy_rows_of<3>(src, stride, pitch, dst, count, rows);
    case 4:
      return copy_rows_of<4>(src, stride, pitch, dst, count, rows);
    case 5:
      return copy_rows_of<5>(src, stride, pitch, dst, count, rows);
    case 6:
      return copy_rows_of<6>(src, stride, pitch, dst, count, rows);
    case 7:
      return copy_rows_of<7>(src, stride, pitch, dst, count, rows);
    case 8:
      return copy_rows_of<8>(src, stride, pitch, dst, count, rows);
    default:
      return copy_rows_of<0>(src, stride, pitch, dst, count, rows);
  }
}

// Copies destination elements [begin, end) in memory order.
template <class T>
void copy_range(CopyLayout layout, const T* src, T* dst, int64_t begin, int64_t end) {
  if (layout.is_contiguous()) return copy_row<0>(src + begin, 1, dst + begin, end - begin);
  if (layout.rank == 1) {
    layout.size[1] = 1;
    layout.stride[1] = 0;
    layout.rank = 2;
  }

  int64_t index[CopyLayout::kMaxRank];
  int64_t offset = 0;
  for (int64_t d = 0, rest = begin; d < layout.rank; ++d) {
    index[d] = rest % layout.size[d];
    rest /= layout.size[d];
    offset += index[d] * layout.stride[d];
  }
  // Whole rows of the two inner dimensions at once; the first and the last row may be parts.
  for (int64_t i = begin; i < end;) {
    const int64_t count = std::min(layout.size[0] - index[0], end - i);
    int64_t rows = 1;
    if (count == layout.size[0]) {
      rows = std::min(layout.size[1] - index[1], (end - i) / count);
      copy_rows(src + offset, layout.stride[0], layout.stride[1], dst + i, count, rows);
    } else {
      copy_row<0>(src + offset, layout.stride[0], dst + i, count);
    }
    i += count * rows;
    offset += rows * layout.stride[1] - index[0] * layout.stride[0];
    index[0] = 0;
    index[1] += rows;
    for (int d = 1; d + 1 < layout.rank && index[d] == layout.size[d]; ++d) {
      offset += layout.stride[d + 1] - index[d] * layout.stride[d];
      index[d] = 0;
      ++index[d + 1];
    }
  }
}

template <size_t N>
void copy_elements(const CopyLayout& layout, const void* src, void* dst) {
  using T = Bytes<N>;
  // Below this a second thread costs more than it brings. Elements in steps take longer each.
  constexpr int64_t kGrainElements = 128 * 1024 / N;
  constexpr int64_t kSteppedElements = 32 * 1024;
  const bool stepped = layout.rank > 0 && layout.stride[0] > 1;
  const int64_t grain = stepped ? std::min(kGrainElements, kSteppedElements) : kGrainElements;
  at::parallel_for(0, layout.numel, grain, [&](int64_t begin, int64_t end) {
    copy_range(layout, static_cast<const T*>(src), static_cast<T*>(dst), begin, end);
  });
}

Tensor identity_conv_cpu_impl(const Tensor& x) {
  identity_conv::check_strided(x, "identity_conv_op", "x");
  Tensor y = x.is_non_overlapping_and_dense()
                 ? Tensor(at::detail::empty_strided_cpu(x.sizes(), x.strides(), x.options()))
                 : at::empty_like(x);
  if (x.numel() == 0) return y;

  const auto layout = identity_conv::make_copy_layout(x.dim(), x.sizes().data(), x.strides().data(),
                                                      y.strides().data());
  const void* src = x.const_data_ptr();
  void* dst = y.mutable_data_ptr();
  identity_conv::prefer_huge_pages(dst, y.nbytes());
  switch (x.element_size()) {
    case 1:
      copy_elements<1>(layout, src, dst);
      break;
    case 2:
      copy_elements<2>(layout, src, dst);
      break;
    case 4:
      copy_elements<4>(layout, src, dst);
      break;
    case 8:
      copy_elements<8>(layout, src, dst);
      break;
    case 16:
      copy_elements<16>(layout, src, dst);
      break;
    default:
      TORCH_CHECK_NOT_IMPLEMENTED(
          false, "identity_conv_op: x must have elements of 1, 2, 4, 8 or 16 bytes, got ",
          x.scalar_type());
  }
  return y;
}

Tensor identity_conv_meta_impl(const Tensor& x) {
  identity_conv::check_strided(x, "identity_conv_op", "x");
  return at::empty_like(x);
}

// Devices without a kernel here, and conj and neg views: their values aren't the bytes of the
// storage, and torch's copy computes them on the way, where resolving first would need a second
// tensor.
Tensor identity_conv_composite_impl(const Tensor& x) {
  identity_conv::check_strided(x, "identity_conv_op", "x");
  return at::clone(x);
}

const auto& op_handle() {
  static const auto handle = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow("my_ops::identity_conv_op", "")
                                 .typed<Tensor(const Tensor&)>();
  return handle;
}

struct IdentityConvGradient {
  static constexpr auto kOperator = "my_ops::identity_conv_op";
  static constexpr auto kName = "IdentityConvBackward";
  using Signature = Tensor(const Tensor&);

  static void check(const Tensor& x) { identity_conv::check_strided(x, "identity_conv_op", "x"); }
  // A gradient may be sparse where x never is, as an embedding's.
  static Tensor backward(const Tensor& grad) {
    return grad.layout() == at::kStrided ? identity_conv_op(grad) : at::clone(grad);
  }
  static Tensor jvp(const Tensor& tangent) { return identity_conv_op(tangent); }
};

}  // namespace

Tensor identity_conv_op(const Tensor& x) { return op_handle().call(x); }

}  // namespace my_ops

TORCH_LIBRARY_FRAGMENT(my_ops, m) {
  m.def("identity_conv_op(Tensor x) -> Tensor", {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(my_ops, CPU, m) { m.impl("identity_conv_op", &my_ops::identity_conv_cpu_impl); }
TORCH_LIBRARY_IMPL(my_ops, Meta, m) {
  m.impl("identity_conv_op", &my_ops::identity_conv_meta_impl);
}
TORCH_LIBRARY_IMPL(my_ops, Autograd, m) {
  m.impl("identity_conv_op", identity_conv::differentiable<my_ops::IdentityConvGradient>());
}
TORCH_LIBRARY_IMPL(my_ops, CompositeExplicitAutograd, m) {
  m.impl("identity_conv_op", &my_ops::identity_conv_composite_impl);
}
TORCH_LIBRARY_IMPL(my_ops, Conjugate, m) {
  m.impl("identity_conv_op", &my_ops::identity_conv_composite_impl);
}
TORCH_LIBRARY_IMPL(my_ops, Negative, m) {
  m.impl("identity_conv_op", &my_ops::identity_conv_composite_impl);
}
// Nested tensors have a key that the composite doesn't reach, and get its sentence here.
TORCH_LIBRARY_IMPL(my_ops, NestedTensorCPU, m) {
  m.impl("identity_conv_op", &my_ops::identity_conv_composite_impl);
}
TORCH_LIBRARY_IMPL(my_ops, NestedTensorCUDA, m) {
  m.impl("identity_conv_op", &my_ops::identity_conv_composite_impl);
}
