// The identity copy on CUDA. y[i] = x[i], bit for bit, y dense, x with any strides.
//
// Reference: torch.clone. Bytes moved: numel * element_size read and as many written; the card's
// memory bandwidth is the limit.
//
// Every thread stores one aligned vector of 16 bytes of y, the widest store there is, and builds it
// from x by one of three ways, from cheap to general:
//   dense      x has y's order: one 16-byte load, or, where x starts off a 16-byte boundary, the
//              aligned 4-byte words around it and a funnel shift;
//   rows       x has contiguous rows: the same, at the row's own place, and element by element only
//              in the vectors that cross from one row to the next;
//   elements   anything else: element by element.
// Only bits move, so a kernel is made for each element size, not for each dtype.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "identity_conv_op.h"

namespace {

using identity_conv::CopyLayout;

constexpr int kVectorBytes = 16;
// One vector a thread and 512 threads a block reached 4.25 TB/s on an H200 (1 GiB; cudaMemcpyAsync
// 4.22, torch.clone 4.24); several vectors a thread or streaming hints came to 3.9.
constexpr int kThreads = 512;

// An exact division by a number fixed at launch, for 0 <= n < 2^63 and divisor >= 2, in one wide
// multiplication and a shift (Granlund and Montgomery, "Division by invariant integers using
// multiplication", 1994). It is cheap enough that 64-bit indices need no 32-bit twin.
struct Divider {
  uint64_t divisor;
  uint64_t magic;
  int shift;

  static Divider of(uint64_t divisor) {
    int bits = 1;  // the smallest with 2^bits >= divisor
    while (bits < 63 && (uint64_t{1} << bits) < divisor) ++bits;
    const auto magic = ((unsigned __int128)1 << (63 + bits)) / divisor + 1;
    return {divisor, static_cast<uint64_t>(magic), bits - 1};
  }

  __device__ uint64_t quotient(uint64_t n) const { return __umul64hi(n, magic) >> shift; }
};

// CopyLayout as a kernel reads it. Most layouts have few dimensions, and a launch copies its
// arguments, so the room is in two sizes.
template <int kRank>
struct Source {
  const unsigned char* base;
  int rank;
  Divider size[kRank];
  int64_t stride[kRank];  // in bytes
};

// Where the row or element `n` stands, counting from dimension `first`.
template <int kRank>
__device__ int64_t source_offset(const Source<kRank>& source, int first, uint64_t n) {
  int64_t offset = 0;
#pragma unroll
  for (int d = 0; d < kRank; ++d) {
    if (d < first) continue;
    if (d >= source.rank) break;
    const uint64_t quotient = source.size[d].quotient(n);
    offset += static_cast<int64_t>(n - quotient * source.size[d].divisor) * source.stride[d];
    n = quotient;
  }
  return offset;
}

// 16 bytes from any address, by aligned loads. The first and last word hold a wanted byte each, so
// no load touches memory beyond the words of the source.
__device__ uint4 load_vector(const unsigned char* src) {
  const auto address = reinterpret_cast<uintptr_t>(src);
  if ((address & (kVectorBytes - 1)) == 0) return *reinterpret_cast<const uint4*>(src);
  const auto* word = reinterpret_cast<const uint32_t*>(address & ~uintptr_t{3});
  const unsigned shift = (address & 3) * 8;
  const uint32_t w0 = word[0], w1 = word[1], w2 = word[2], w3 = word[3];
  const uint32_t w4 = shift ? word[4] : 0;
  return {__funnelshift_r(w0, w1, shift), __funnelshift_r(w1, w2, shift),
          __funnelshift_r(w2, w3, shift), __funnelshift_r(w3, w4, shift)};
}

template <class T>
union Vector {
  uint4 whole;
  T part[kVectorBytes / sizeof(T)];
};

// Stores a vector, or at the end of the destination the part of it that is there.
template <class T>
__device__ void store_vector(unsigned char* dst, const Vector<T>& vector, int64_t bytes_left) {
  if (bytes_left >= kVectorBytes) {
    *reinterpret_cast<uint4*>(dst) = vector.whole;
  } else {
#pragma unroll
    for (int i = 0; i < kVectorBytes / int(sizeof(T)); ++i) {
      if (i * int(sizeof(T)) < bytes_left) reinterpret_cast<T*>(dst)[i] = vector.part[i];
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    copy_dense(const unsigned char* __restrict__ src, unsigned char* __restrict__ dst,
               int64_t bytes) {
  const int64_t at = (blockIdx.x * int64_t{kThreads} + threadIdx.x) * kVectorBytes;
  const int64_t left = bytes - at;
  if (left <= 0) return;
  Vector<T> vector;
  if (left >= kVectorBytes) {
    vector.whole = load_vector(src + at);
  } else {
#pragma unroll
    for (int i = 0; i < kVectorBytes / int(sizeof(T)); ++i) {
      if (i * int(sizeof(T)) < left) vector.part[i] = reinterpret_cast<const T*>(src + at)[i];
    }
  }
  store_vector(dst + at, vector, left);
}

// kRows: dimension 0 has stride 1.
template <class T, int kRank, bool kRows>
__global__ void __launch_bounds__(kThreads)
    copy_strided(const Source<kRank> source, unsigned char* __restrict__ dst, int64_t numel) {
  constexpr int kParts = kVectorBytes / sizeof(T);
  const int64_t first = (blockIdx.x * int64_t{kThreads} + threadIdx.x) * kParts;
  if (first >= numel) return;

  const int64_t row_size = source.size[0].divisor;
  int64_t row = source.size[0].quotient(first);
  int64_t column = first - row * row_size;
  const unsigned char* src = source.base + source_offset(source, 1, row);
  Vector<T> vector;
  if (kRows && column + kParts <= row_size) {
    vector.whole = load_vector(src + column * sizeof(T));
  } else {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      if (first + i < numel) {
        if (column == row_size) {
          column = 0;
          src = source.base + source_offset(source, 1, ++row);
        }
        vector.part[i] = *reinterpret_cast<const T*>(src + column++ * source.stride[0]);
      }
    }
  }
  store_vector(dst + first * sizeof(T), vector, (numel - first) * int64_t{sizeof(T)});
}

struct Launch {
  const void* src;
  void* dst;
  cudaStream_t stream;

  template <class... Parameters, class... Arguments>
  int operator()(int64_t bytes, void (*kernel)(Parameters...), Arguments... arguments) const {
    // 2^31 - 1 blocks of 8 KiB: more than any card's memory.
    const int64_t blocks = (bytes + kThreads * kVectorBytes - 1) / (kThreads * kVectorBytes);
    kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(arguments...);
    return cudaGetLastError();
  }
};

template <class T, int kRank>
int launch_strided(const CopyLayout& layout, const Launch& launch) {
  Source<kRank> source;
  source.base = static_cast<const unsigned char*>(launch.src);
  source.rank = layout.rank;
  for (int d = 0; d < layout.rank; ++d) {
    source.size[d] = Divider::of(layout.size[d]);
    source.stride[d] = layout.stride[d] * int64_t{sizeof(T)};
  }
  auto* kernel =
      layout.stride[0] == 1 ? &copy_strided<T, kRank, true> : &copy_strided<T, kRank, false>;
  return launch(layout.numel * sizeof(T), kernel, source, static_cast<unsigned char*>(launch.dst),
                layout.numel);
}

template <class T>
int launch_elements(const CopyLayout& layout, const Launch& launch) {
  if (layout.is_contiguous()) {
    const int64_t bytes = layout.numel * sizeof(T);
    return launch(bytes, &copy_dense<T>, static_cast<const unsigned char*>(launch.src),
                  static_cast<unsigned char*>(launch.dst), bytes);
  }
  constexpr int kUsualRank = 5;
  return layout.rank <= kUsualRank ? launch_strided<T, kUsualRank>(layout, launch)
                                   : launch_strided<T, CopyLayout::kMaxRank>(layout, launch);
}

}  // namespace

int my_ops::launch_identity_conv(const CopyLayout& layout, int64_t element_size, const void* src,
                                 void* dst, CUstream_st* stream) {
  const Launch launch{src, dst, stream};
  // An element that doesn't start at a multiple of its size is copied in parts that do.
  int64_t part = element_size;
  while (reinterpret_cast<uintptr_t>(src) % part != 0) part /= 2;
  const CopyLayout parts = identity_conv::split_elements(layout, element_size / part);
  switch (part) {
    case 1:
      return launch_elements<uint8_t>(parts, launch);
    case 2:
      return launch_elements<uint16_t>(parts, launch);
    case 4:
      return launch_elements<uint32_t>(parts, launch);
    case 8:
      return launch_elements<uint2>(parts, launch);
    case 16:
      return launch_elements<uint4>(parts, launch);
    default:
      return cudaErrorInvalidValue;
  }
}
