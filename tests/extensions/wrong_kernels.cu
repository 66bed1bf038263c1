// Kernels that copy bytes, right and wrong: see wrong_kernels.h.
#include <cuda_runtime_api.h>

#include "wrong_kernels.h"

namespace {

constexpr int kThreads = 256;

using Byte = unsigned char;

unsigned blocks_for(int64_t count) {
  return static_cast<unsigned>((count + kThreads - 1) / kThreads);
}

__global__ void copy(const Byte* from, Byte* to, int64_t count) {
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (i < count) to[i] = from[i];
}

__global__ void copy_whole(const Byte* from, Byte* to, int64_t count) {
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  const int64_t vectors = count / sizeof(uint4);
  if (i < vectors) reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
  if (i == 0) {
    for (int64_t rest = vectors * sizeof(uint4); rest < count; ++rest) to[rest] = from[rest];
  }
}

__global__ void copy_along_y(const Byte* from, Byte* to, int64_t count) {
  const int64_t i = blockIdx.y * int64_t{kThreads} + threadIdx.x;
  if (i < count) to[i] = from[i];
}

__global__ void copy_and_look(const Byte* from, Byte* to, int64_t count) {
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (i < count) to[i] = from[i];
  if (i == 0) (void)*static_cast<const volatile Byte*>(from + count);
}

__global__ void nothing() {}

const Byte* bytes(const void* memory) { return static_cast<const Byte*>(memory); }
Byte* bytes(void* memory) { return static_cast<Byte*>(memory); }

}  // namespace

void copy_bytes(const void* from, void* to, int64_t count, CUstream_st* stream) {
  copy<<<blocks_for(count), kThreads, 0, stream>>>(bytes(from), bytes(to), count);
}

void copy_vectors(const void* from, void* to, int64_t count, CUstream_st* stream) {
  const int64_t vectors = count / static_cast<int64_t>(sizeof(uint4)) + 1;
  copy_whole<<<blocks_for(vectors), kThreads, 0, stream>>>(bytes(from), bytes(to), count);
}

void copy_by_grid_y(const void* from, void* to, int64_t count, CUstream_st* stream) {
  copy_along_y<<<dim3(1, blocks_for(count)), kThreads, 0, stream>>>(bytes(from), bytes(to), count);
}

void copy_and_look_beyond(const void* from, void* to, int64_t count, CUstream_st* stream) {
  copy_and_look<<<blocks_for(count), kThreads, 0, stream>>>(bytes(from), bytes(to), count);
}

void launch_too_large(CUstream_st* stream) { nothing<<<1, 4096, 0, stream>>>(); }
