// The identity copy on CUDA. y[i] = x[i], bit for bit, y dense, x with any strides.
//
// Reference: torch.clone. Bytes moved: numel * element_size read and as many written; the card's
// memory bandwidth is the limit.
//
// Every thread stores one aligned vector of y, of 16 bytes, the widest store there is, and builds
// it from x by the cheapest way that serves. Where x is contiguous over the vector that is one
// load, or, off a 16-byte boundary, the aligned 4-byte words around it and a funnel shift. Where
// x's rows are stepped, or end within the vector, it is element by element, by coordinates that are
// counted on; and where those elements lie far apart, each warp gathers what its vectors are made
// of in the order of memory. Of little, a thread stores 4 bytes. Only bits move, so a kernel is
// made for each element size, not for each dtype.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "identity_conv_op.h"

namespace {

using identity_conv::CopyLayout;

constexpr int kVectorBytes = 16;
// One vector a thread and 128 to 512 threads a block reach 4.27 TB/s on an H200 (1 GiB;
// cudaMemcpyAsync 4.26); 1024 threads, several vectors a thread, a grid that strides or streaming
// hints 3.8 to 4.16.
constexpr int kThreads = 256;
constexpr int kWarp = 32;

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

// Most layouts have few dimensions, and a launch copies its arguments: the room is in three sizes.
// Up to kManyRank the loops over dimensions are unrolled, and what they count is in registers.
constexpr int kUsualRank = 5;
constexpr int kManyRank = 10;

// CopyLayout as a kernel reads it; Index counts elements.
template <class Index, int kRank>
struct Source {
  const unsigned char* base;
  int rank;
  Divider<Index> size[kRank];
  int64_t stride[kRank];  // in bytes
};

// The source address of element `n`, and its coordinate in each dimension to `coordinate`. Past the
// last element both mean nothing, and nothing is loaded there.
template <class Index, int kRank, class F>
__device__ const unsigned char* locate(const Source<Index, kRank>& source, Index n,
                                       F&& coordinate) {
  const unsigned char* src = source.base;
  const auto take = [&](int d) {
    // What is left of n is the outermost coordinate.
    const Index quotient = d + 1 < source.rank ? source.size[d].quotient(n) : 0;
    const Index index = n - quotient * source.size[d].divisor;
    coordinate(d, index);
    src += static_cast<int64_t>(index) * source.stride[d];
    n = quotient;
  };
  if constexpr (kRank <= kManyRank) {
#pragma unroll
    for (int d = 0; d < kRank; ++d) {
      if (d >= source.rank) break;
      take(d);
    }
  } else {
#pragma unroll 1
    for (int d = 0; d < source.rank; ++d) take(d);
  }
  return src;
}

// The source address of element `n` and then of the next, again and again.
template <class Index, int kRank>
struct Walk {
  const Source<Index, kRank>& source;
  const unsigned char* src;
  Index index[kRank];

  __device__ Walk(const Source<Index, kRank>& from, Index n) : source(from) {
    src = locate(source, n, [&](int d, Index at) { index[d] = at; });
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
    src = locate(source, n, [](int, Index) {});
  }

  __device__ Index left_in_row() const {
    return source.size[0].divisor - n % source.size[0].divisor;
  }

  __device__ void step() {
    ++n;
    find();
  }
};

// 16 bytes from an address at a multiple of kAligned, by aligned loads. For bytes and pairs of them
// the first and the last word each hold a wanted byte: beside it up to 3 that belong to a neighbour
// are read and shifted out, never across the end of an allocation, which CUDA makes in multiples of
// 256 bytes.
template <int kAligned>
__device__ uint4 load_vector(const unsigned char* src) {
  const auto address = reinterpret_cast<uintptr_t>(src);
  if (address % kVectorBytes == 0) return *reinterpret_cast<const uint4*>(src);
  if constexpr (kAligned >= 8) {
    const auto* half = reinterpret_cast<const uint2*>(src);
    const uint2 low = half[0], high = half[1];
    return {low.x, low.y, high.x, high.y};
  } else {
    const auto* word = reinterpret_cast<const uint32_t*>(address & ~uintptr_t{3});
    const unsigned shift = (address & 3) * 8;
    const uint32_t w0 = word[0], w1 = word[1], w2 = word[2], w3 = word[3];
    const uint32_t w4 = shift ? word[4] : 0;
    return {__funnelshift_r(w0, w1, shift), __funnelshift_r(w1, w2, shift),
            __funnelshift_r(w2, w3, shift), __funnelshift_r(w3, w4, shift)};
  }
}

template <class T, class Whole = uint4>
union Vector {
  static constexpr int kParts = sizeof(Whole) / sizeof(T);

  Whole whole;
  T part[kParts];
};

// Stores a vector, or at the end of the destination the `count` parts of it that are there.
template <class T, class Whole>
__device__ void store_vector(T* dst, const Vector<T, Whole>& vector, int64_t count) {
  constexpr int kParts = Vector<T, Whole>::kParts;
  if (count >= kParts) {
    *reinterpret_cast<Whole*>(dst) = vector.whole;
  } else {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      if (i < count) dst[i] = vector.part[i];
    }
  }
}

// The destination element that this thread's vector starts at.
template <class T, class Whole = uint4>
__device__ int64_t first_element() {
  return (blockIdx.x * int64_t{kThreads} + threadIdx.x) * Vector<T, Whole>::kParts;
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
    vector.whole = load_vector<1>(src + first);
  } else {
#pragma unroll
    for (int i = 0; i < Bytes::kParts; ++i) {
      if (i < left) vector.part[i] = src[first + i];
    }
  }
  store_vector(dst + first, vector, left);
}

template <class T, class Whole, class Index, int kRank>
__global__ void __launch_bounds__(kThreads)
    copy_strided(const Source<Index, kRank> source, T* __restrict__ dst, int64_t numel) {
  constexpr int kParts = Vector<T, Whole>::kParts;
  const int64_t first = first_element<T, Whole>();
  const int64_t left = numel - first;
  if (left <= 0) return;
  Walk<Index, kRank> walk(source, static_cast<Index>(first));
  Vector<T, Whole> vector;
  if constexpr (sizeof(Whole) == kVectorBytes) {
    if (source.stride[0] == sizeof(T) && walk.left_in_row() >= kParts) {
      vector.whole = load_vector<sizeof(T)>(walk.src);
      return store_vector(dst + first, vector, left);
    }
  }
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    if (i < left) vector.part[i] = *reinterpret_cast<const T*>(walk.src);
    walk.step();
  }
  store_vector(dst + first, vector, left);
}

// The same where the elements of a vector lie far apart: the lanes of a warp load neighbours, which
// share lines of the cache, and hand them to each other through shared memory.
template <class T, class Index, int kRank>
__global__ void __launch_bounds__(kThreads)
    copy_gathered(const Source<Index, kRank> source, T* __restrict__ dst, int64_t numel) {
  constexpr int kParts = Vector<T>::kParts;
  __shared__ uint4 staged[kThreads];
  const int lane = threadIdx.x % kWarp;
  const int64_t first = first_element<T>();
  const int64_t warp_first = first - lane * kParts;
  T part[kParts];
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const int64_t n = warp_first + i * kWarp + lane;
    const auto* from =
        reinterpret_cast<const T*>(locate(source, static_cast<Index>(n), [](int, Index) {}));
    if (n < numel) part[i] = *from;
  }
  T* to = reinterpret_cast<T*>(staged + threadIdx.x - lane) + lane;
#pragma unroll
  for (int i = 0; i < kParts; ++i) to[i * kWarp] = part[i];
  __syncwarp();
  if (first >= numel) return;
  Vector<T> vector;
  vector.whole = staged[threadIdx.x];
  store_vector(dst + first, vector, numel - first);
}

// Elements of 16 bytes that are read again and again, from the cache: the writes are the limit, and
// two of them a thread hide more of what comes before.
constexpr int kRepeated = 2;
template <class Index, int kRank>
__global__ void __launch_bounds__(kThreads)
    copy_repeated(const Source<Index, kRank> source, uint4* __restrict__ dst, int64_t numel) {
  const int64_t first = blockIdx.x * int64_t{kRepeated * kThreads} + threadIdx.x;
  uint4 element[kRepeated];
#pragma unroll
  for (int i = 0; i < kRepeated; ++i) {
    const int64_t n = first + i * kThreads;
    const unsigned char* from = locate(source, static_cast<Index>(n), [](int, Index) {});
    if (n < numel) element[i] = *reinterpret_cast<const uint4*>(from);
  }
#pragma unroll
  for (int i = 0; i < kRepeated; ++i) {
    const int64_t n = first + i * kThreads;
    if (n < numel) dst[n] = element[i];
  }
}

// The lines of the cache, of 128 bytes, in which `count` elements lie that follow each other.
int64_t lines_of(const CopyLayout& layout, int64_t element_size, int64_t count) {
  constexpr int64_t kLine = 128;
  int64_t lines = 1, reach = 0;
  for (int d = 0; d < layout.rank && count > 1; ++d) {
    if (layout.stride[d] != 0) {
      const int64_t along = std::min(count, layout.size[d]);
      reach += (along - 1) * std::abs(layout.stride[d]) * element_size;
      lines = std::min(lines * along, 1 + reach / kLine);
    }
    count = (count + layout.size[d] - 1) / layout.size[d];
  }
  return lines;
}

// Whether neighbours should be gathered: where a warp that loads one element of each of its vectors
// touches many lines, and the lines of all don't stay in the cache. Gathering costs a division by
// every size for each element, which two elements in few dimensions bear sooner. On an H200, of
// torch.clone's time: 1 of 16 bytes 0.98, 1.60 by a walk; 5 of 8 bytes 0.85, 0.53 by a walk.
template <class T>
bool gathers(const CopyLayout& layout) {
  constexpr int64_t kCached = 1024;
  const int many = Vector<T>::kParts == 2 && layout.rank <= 3 ? 7 : 12;
  return lines_of(layout, sizeof(T), kWarp * Vector<T>::kParts) >= many &&
         lines_of(layout, sizeof(T), layout.numel) > kCached;
}

// Vectors of 4 bytes, put together element by element: what they save is time, not loads. They
// serve where those of 16 are too few to fill a card, and where small elements of many dimensions
// would be gathered: their divisions take longer than a short walk. On an H200, of torch.clone's
// time: for few bytes 0.64 to 1.00, with 16 0.72 to 2.1; beyond those, and with many dimensions,
// 0.52 to 0.85, gathered 0.99 to 1.24.
using Narrow = uint32_t;

template <class T>
bool is_few(const CopyLayout& layout) {
  constexpr int64_t kFewBytes = int64_t{sizeof(T) < sizeof(Narrow) ? 2 : 1} << 20;
  return layout.numel * int64_t{sizeof(T)} <= kFewBytes;
}

struct Launch {
  const void* src;
  void* dst;
  cudaStream_t stream;

  // Of a kernel whose threads write `elements` elements each.
  template <class From, class T>
  int operator()(void (*kernel)(From, T*, int64_t), From from, int64_t numel,
                 int elements = Vector<T>::kParts) const {
    const int64_t block = int64_t{kThreads} * elements;
    // 2^31 - 1 blocks of 1 KiB and more: more than any card's memory.
    const auto blocks = static_cast<unsigned>((numel + block - 1) / block);
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
  if constexpr (kRank <= kManyRank && Vector<T>::kParts == 1) {
    if (std::count(layout.stride, layout.stride + layout.rank, 0)) {
      return launch(&copy_repeated<Index, kRank>, source, layout.numel, kRepeated);
    }
  } else if constexpr (kRank <= kManyRank) {
    // More than 2^31 elements fill any card by wide vectors.
    constexpr bool kMayBeNarrow = sizeof(T) <= sizeof(Narrow) && sizeof(Index) == 4;
    constexpr bool kWalks = kMayBeNarrow && sizeof(T) < sizeof(Narrow) && kRank > kUsualRank;
    if constexpr (kMayBeNarrow) {
      if (is_few<T>(layout) || (kWalks && gathers<T>(layout))) {
        return launch(&copy_strided<T, Narrow, Index, kRank>, source, layout.numel,
                      Vector<T, Narrow>::kParts);
      }
    }
    if constexpr (!kWalks) {
      if (gathers<T>(layout)) {
        return launch(&copy_gathered<T, Index, kRank>, source, layout.numel);
      }
    }
  }
  return launch(&copy_strided<T, uint4, Index, kRank>, source, layout.numel);
}

template <class T>
int launch_elements(const CopyLayout& layout, const Launch& launch) {
  // A vector may begin before and count past the last element.
  constexpr int64_t kMost32 = (int64_t{1} << 31) - Vector<T>::kParts;
  if (layout.rank > kManyRank) {
    return launch_strided<T, uint64_t, CopyLayout::kMaxRank>(layout, launch);
  }
  if (layout.numel > kMost32) return launch_strided<T, uint64_t, kManyRank>(layout, launch);
  return layout.rank > kUsualRank ? launch_strided<T, uint32_t, kManyRank>(layout, launch)
                                  : launch_strided<T, uint32_t, kUsualRank>(layout, launch);
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
