// The identity copy on CUDA. y[i] = x[i], bit for bit, y dense, x with any strides.
//
// Reference: torch.clone. Bytes moved: numel * element_size read and as many written; the card's
// memory bandwidth is the limit.
//
// Every thread stores one aligned vector of 16 bytes of y, the widest store there is, and builds it
// from x by the cheapest way that serves. Where x is contiguous over the vector that is one load,
// or, off a 16-byte boundary, the aligned 4-byte words around it and a funnel shift. Where x's rows
// are stepped, or end within the vector, it is element by element, by coordinates that are counted
// on. Only bits move, so a kernel is made for each element size, not for each dtype.

#include <cuda_runtime_api.h>

#include <cstdint>

#include "identity_conv_op.h"

namespace {

using identity_conv::CopyLayout;

constexpr int kVectorBytes = 16;
// One vector a thread and 128 to 512 threads a block reach 4.27 TB/s on an H200 (1 GiB;
// cudaMemcpyAsync 4.26); 1024 threads, several vectors a thread, a grid that strides or streaming
// hints 3.8 to 4.16.
constexpr int kThreads = 256;

// An exact division by a number fixed at launch, for n below half of Index's range and a divisor of
// at least 2, in one high multiplication and a shift (Granlund and Montgomery, "Division by
// invariant integers using multiplication", 1994).
template <class Index>
struct Divider {
  Index divisor;
  Index magic;
  int shift;

  static Divider of(uint64_t divisor) {
    constexpr int kBits = 8 * sizeof(Index) - 1;
    int bits = 1;  // the smallest with 2^bits >= divisor
    while (bits < kBits && (uint64_t{1} << bits) < divisor) ++bits;
    const auto magic = ((unsigned __int128)1 << (kBits + bits)) / divisor + 1;
    return {static_cast<Index>(divisor), static_cast<Index>(magic), bits - 1};
  }

  __device__ Index quotient(Index n) const { return high_product(n, magic) >> shift; }

  static __device__ uint32_t high_product(uint32_t a, uint32_t b) { return __umulhi(a, b); }
  static __device__ uint64_t high_product(uint64_t a, uint64_t b) { return __umul64hi(a, b); }
};

// Most layouts have few dimensions, and a launch copies its arguments: the room is in two sizes.
constexpr int kUsualRank = 5;

// CopyLayout as a kernel reads it; Index counts elements.
template <class Index, int kRank>
struct Source {
  const unsigned char* base;
  int rank;
  Divider<Index> size[kRank];
  int64_t stride[kRank];  // in bytes
};

// The source address of element `n` and then of the next, again and again. Past the last element
// the address means nothing, and nothing is loaded there.
template <class Index, int kRank>
struct Walk {
  const Source<Index, kRank>& source;
  const unsigned char* src;
  Index index[kRank];

  __device__ Walk(const Source<Index, kRank>& from, Index n) : source(from), src(from.base) {
#pragma unroll
    for (int d = 0; d < kRank; ++d) {
      if (d >= source.rank) break;
      const Index quotient = source.size[d].quotient(n);
      index[d] = n - quotient * source.size[d].divisor;
      src += static_cast<int64_t>(index[d]) * source.stride[d];
      n = quotient;
    }
  }

  __device__ Index left_in_row() const { return source.size[0].divisor - index[0]; }

  __device__ void step() {
    src += source.stride[0];
    ++index[0];
#pragma unroll
    for (int d = 0; d + 1 < kRank; ++d) {
      if (d + 1 >= source.rank || index[d] < source.size[d].divisor) break;
      src += source.stride[d + 1] - static_cast<int64_t>(index[d]) * source.stride[d];
      index[d] = 0;
      ++index[d + 1];
    }
  }
};

// With many dimensions the indices would fill the registers: each address is found anew.
template <class Index>
struct Walk<Index, CopyLayout::kMaxRank> {
  const Source<Index, CopyLayout::kMaxRank>& source;
  const unsigned char* src;
  Index n;

  __device__ Walk(const Source<Index, CopyLayout::kMaxRank>& from, Index first)
      : source(from), n(first) {
    find();
  }

  __device__ void find() {
    src = source.base;
    Index rest = n;
#pragma unroll 1
    for (int d = 0; d < source.rank; ++d) {
      const Index quotient = source.size[d].quotient(rest);
      src += static_cast<int64_t>(rest - quotient * source.size[d].divisor) * source.stride[d];
      rest = quotient;
    }
  }

  __device__ Index left_in_row() const {
    return source.size[0].divisor - n % source.size[0].divisor;
  }

  __device__ void step() {
    ++n;
    find();
  }
};

// 16 bytes from any address, by aligned loads. The first and the last word each hold a wanted byte:
// beside it up to 3 that belong to a neighbour are read and shifted out, never across the end of an
// allocation, which CUDA makes in multiples of 256 bytes.
__device__ uint4 load_vector(const unsigned char* src) {
  const auto address = reinterpret_cast<uintptr_t>(src);
  if (address % kVectorBytes == 0) return *reinterpret_cast<const uint4*>(src);
  const auto* word = reinterpret_cast<const uint32_t*>(address & ~uintptr_t{3});
  const unsigned shift = (address & 3) * 8;
  const uint32_t w0 = word[0], w1 = word[1], w2 = word[2], w3 = word[3];
  const uint32_t w4 = shift ? word[4] : 0;
  return {__funnelshift_r(w0, w1, shift), __funnelshift_r(w1, w2, shift),
          __funnelshift_r(w2, w3, shift), __funnelshift_r(w3, w4, shift)};
}

template <class T>
union Vector {
  static constexpr int kParts = kVectorBytes / sizeof(T);

  uint4 whole;
  T part[kParts];
};

// Stores a vector, or at the end of the destination the `count` parts of it that are there.
template <class T>
__device__ void store_vector(T* dst, const Vector<T>& vector, int64_t count) {
  if (count >= Vector<T>::kParts) {
    *reinterpret_cast<uint4*>(dst) = vector.whole;
  } else {
#pragma unroll
    for (int i = 0; i < Vector<T>::kParts; ++i) {
      if (i < count) dst[i] = vector.part[i];
    }
  }
}

// The destination element that this thread's vector starts at.
template <class T>
__device__ int64_t first_element() {
  return (blockIdx.x * int64_t{kThreads} + threadIdx.x) * Vector<T>::kParts;
}

__global__ void __launch_bounds__(kThreads)
    copy_dense(const unsigned char* __restrict__ src, unsigned char* __restrict__ dst,
               int64_t numel) {
  using Bytes = Vector<unsigned char>;
  const int64_t first = first_element<unsigned char>();
  const int64_t left = numel - first;
  if (left <= 0) return;
  Bytes vector;
  if (left >= Bytes::kParts) {
    vector.whole = load_vector(src + first);
  } else {
#pragma unroll
    for (int i = 0; i < Bytes::kParts; ++i) {
      if (i < left) vector.part[i] = src[first + i];
    }
  }
  store_vector(dst + first, vector, left);
}

template <class T, class Index, int kRank>
__global__ void __launch_bounds__(kThreads)
    copy_strided(const Source<Index, kRank> source, T* __restrict__ dst, int64_t numel) {
  const int64_t first = first_element<T>();
  const int64_t left = numel - first;
  if (left <= 0) return;
  Walk<Index, kRank> walk(source, static_cast<Index>(first));
  Vector<T> vector;
  if (source.stride[0] == sizeof(T) && walk.left_in_row() >= Vector<T>::kParts) {
    vector.whole = load_vector(walk.src);
  } else {
#pragma unroll
    for (int i = 0; i < Vector<T>::kParts; ++i) {
      if (i < left) vector.part[i] = *reinterpret_cast<const T*>(walk.src);
      walk.step();
    }
  }
  store_vector(dst + first, vector, left);
}

struct Launch {
  const void* src;
  void* dst;
  cudaStream_t stream;

  template <class From, class T>
  int operator()(void (*kernel)(From, T*, int64_t), From from, int64_t numel) const {
    constexpr int64_t kBlock = kThreads * Vector<T>::kParts;
    // 2^31 - 1 blocks of 4 KiB: more than any card's memory.
    const auto blocks = static_cast<unsigned>((numel + kBlock - 1) / kBlock);
    kernel<<<blocks, kThreads, 0, stream>>>(from, static_cast<T*>(dst), numel);
    return cudaGetLastError();
  }
};

template <class T, class Index, int kRank>
int launch_strided(const CopyLayout& layout, const Launch& launch) {
  Source<Index, kRank> source;
  source.base = static_cast<const unsigned char*>(launch.src);
  source.rank = layout.rank;
  for (int d = 0; d < layout.rank; ++d) {
    source.size[d] = Divider<Index>::of(layout.size[d]);
    source.stride[d] = layout.stride[d] * int64_t{sizeof(T)};
  }
  return launch(&copy_strided<T, Index, kRank>, source, layout.numel);
}

template <class T>
int launch_elements(const CopyLayout& layout, const Launch& launch) {
  // A vector may begin before and count past the last element.
  constexpr int64_t kMost32 = (int64_t{1} << 31) - Vector<T>::kParts;
  if (layout.rank > kUsualRank) {
    return launch_strided<T, uint64_t, CopyLayout::kMaxRank>(layout, launch);
  }
  return layout.numel <= kMost32 ? launch_strided<T, uint32_t, kUsualRank>(layout, launch)
                                 : launch_strided<T, uint64_t, kUsualRank>(layout, launch);
}

}  // namespace

int my_ops::launch_identity_conv(const CopyLayout& layout, int64_t element_size, const void* src,
                                 void* dst, CUstream_st* stream) {
  const Launch launch{src, dst, stream};
  if (layout.is_contiguous()) {
    return launch(&copy_dense, static_cast<const unsigned char*>(src), layout.numel * element_size);
  }
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
