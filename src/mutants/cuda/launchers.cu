// Kernels that copy bytes, right and wrong: see launchers.h.
#include <cuda_runtime_api.h>

#include "launchers.h"

namespace mutants {
namespace {

constexpr int kThreads = 256;

// What stands behind an output that was written beyond its end.
constexpr char kMark = '\x9d';

__device__ int64_t here() { return blockIdx.x * int64_t{kThreads} + threadIdx.x; }

unsigned blocks_for(int64_t count) {
  return static_cast<unsigned>((count + kThreads - 1) / kThreads);
}

__global__ void bytes(const char* from, char* to, int64_t size) {
  if (here() < size) to[here()] = from[here()];
}

__global__ void vectors(const char* from, char* to, int64_t size, bool rest_too) {
  const int64_t count = size / sizeof(uint4);
  if (here() < count) {
    reinterpret_cast<uint4*>(to)[here()] = reinterpret_cast<const uint4*>(from)[here()];
  }
  if (here() == 0 && rest_too) {
    for (int64_t rest = count * sizeof(uint4); rest < size; ++rest) to[rest] = from[rest];
  }
}

__global__ void along_y(const char* from, char* to, int64_t size) {
  const int64_t i = blockIdx.y * int64_t{kThreads} + threadIdx.x;
  if (i < size) to[i] = from[i];
}

__global__ void by_fours(const char* from, char* to, int64_t size) {
  for (int64_t i = threadIdx.x * 4; i < threadIdx.x * 4 + 4 && i < size; ++i) to[i] = from[i];
}

__global__ void by_shared(const char* from, char* to, int64_t size) {
  extern __shared__ char held[];
  for (int64_t i = threadIdx.x; i < size; i += kThreads) held[i] = from[i];
  __syncthreads();
  for (int64_t i = threadIdx.x; i < size; i += kThreads) to[i] = held[i];
}

__global__ void by_int(const char* from, char* to, int64_t size) {
  const int step = static_cast<int>(gridDim.x) * kThreads;
  const int count = size > INT32_MAX ? INT32_MAX - step : static_cast<int>(size);
  for (int i = static_cast<int>(here()); i < count; i += step) to[i] = from[i];
}

__global__ void and_read_behind(const char* from, char* to, int64_t size) {
  if (here() < size) to[here()] = from[here()];
  if (here() == 0) (void)*static_cast<const volatile char*>(from + size);
}

__global__ void and_write_behind(const char* from, char* to, int64_t size) {
  if (here() < size) to[here()] = from[here()];
  if (here() == 0) to[size] = kMark;
}

// A warp that is late reads what another has not written yet: the first one waits.
__global__ void without_barrier(const char* from, char* to, int64_t size) {
  __shared__ volatile char held[kThreads];
  const int turned = kThreads - 1 - static_cast<int>(threadIdx.x);
  held[threadIdx.x] = 0;
  __syncthreads();
  const int64_t i = blockIdx.x * int64_t{kThreads} + turned;
  if (threadIdx.x < 32) {
    for (int64_t start = clock64(); clock64() - start < 2000;) {
    }
  }
  if (i < size) held[threadIdx.x] = from[i];
  if (here() < size) to[here()] = held[turned];
}

__global__ void flushed(const float* from, float* to, int64_t count) {
  if (here() >= count) return;
  asm("mul.ftz.f32 %0, %1, 0f3F800000;" : "=f"(to[here()]) : "f"(from[here()]));
}

__global__ void one_nan(const unsigned* from, unsigned* to, int64_t count) {
  if (here() >= count) return;
  const unsigned bits = from[here()];
  to[here()] = (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : bits;
}

__global__ void nothing() {}

}  // namespace

void copy_bytes(const char* from, char* to, int64_t size, CUstream_st* stream) {
  bytes<<<blocks_for(size), kThreads, 0, stream>>>(from, to, size);
}

void copy_vectors(const char* from, char* to, int64_t size, CUstream_st* stream) {
  vectors<<<blocks_for(size / 16 + 1), kThreads, 0, stream>>>(from, to, size, true);
}

void copy_whole_vectors(const char* from, char* to, int64_t size, CUstream_st* stream) {
  vectors<<<blocks_for(size / 16 + 1), kThreads, 0, stream>>>(from, to, size, false);
}

void copy_by_grid_y(const char* from, char* to, int64_t size, CUstream_st* stream) {
  along_y<<<dim3(1, blocks_for(size)), kThreads, 0, stream>>>(from, to, size);
}

void copy_by_64_blocks(const char* from, char* to, int64_t size, CUstream_st* stream) {
  bytes<<<64, kThreads, 0, stream>>>(from, to, size);
}

void copy_by_one_block(const char* from, char* to, int64_t size, CUstream_st* stream) {
  by_fours<<<1, static_cast<unsigned>((size + 3) / 4), 0, stream>>>(from, to, size);
}

void copy_by_shared_memory(const char* from, char* to, int64_t size, CUstream_st* stream) {
  by_shared<<<1, kThreads, static_cast<size_t>(size), stream>>>(from, to, size);
}

void copy_by_int(const char* from, char* to, int64_t size, CUstream_st* stream) {
  by_int<<<1024, kThreads, 0, stream>>>(from, to, size);
}

void copy_and_read_behind(const char* from, char* to, int64_t size, CUstream_st* stream) {
  and_read_behind<<<blocks_for(size), kThreads, 0, stream>>>(from, to, size);
}

void copy_and_write_behind(const char* from, char* to, int64_t size, CUstream_st* stream) {
  and_write_behind<<<blocks_for(size), kThreads, 0, stream>>>(from, to, size);
}

void copy_without_barrier(const char* from, char* to, int64_t size, CUstream_st* stream) {
  without_barrier<<<blocks_for(size), kThreads, 0, stream>>>(from, to, size);
}

void copy_floats_flushed(const char* from, char* to, int64_t size, CUstream_st* stream) {
  flushed<<<blocks_for(size / 4), kThreads, 0, stream>>>(reinterpret_cast<const float*>(from),
                                                         reinterpret_cast<float*>(to), size / 4);
}

void copy_floats_one_nan(const char* from, char* to, int64_t size, CUstream_st* stream) {
  one_nan<<<blocks_for(size / 4), kThreads, 0, stream>>>(reinterpret_cast<const unsigned*>(from),
                                                         reinterpret_cast<unsigned*>(to), size / 4);
}

void launch_too_large(CUstream_st* stream) { nothing<<<1, 4096, 0, stream>>>(); }

}  // namespace mutants
