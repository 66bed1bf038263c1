// The CUDA side of muladd.cpp: pointers, a count and a stream, no torch header.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace {

constexpr int kThreads = 256;
// A grid's first dimension: further elements are reached by strides.
constexpr int64_t kMostBlocks = 1 << 20;

// What a T is computed in.
template <class T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

// torch's flags take the conversions of __half and __nv_bfloat16 away: by name they are there.
__device__ float wide(float x) { return x; }
__device__ double wide(double x) { return x; }
__device__ float wide(__half x) { return __half2float(x); }
__device__ float wide(__nv_bfloat16 x) { return __bfloat162float(x); }

__device__ void assign(float& to, float x) { to = x; }
__device__ void assign(double& to, double x) { to = x; }
__device__ void assign(__half& to, float x) { to = __float2half(x); }
__device__ void assign(__nv_bfloat16& to, float x) { to = __float2bfloat16(x); }

template <class T>
__global__ void multiply_add(const T* a, const T* b, T* y, int64_t count, Wide<T> c) {
  const int64_t step = int64_t{kThreads} * gridDim.x;
  for (int64_t i = int64_t{kThreads} * blockIdx.x + threadIdx.x; i < count; i += step) {
    assign(y[i], wide(a[i]) * wide(b[i]) + c);
  }
}

}  // namespace

template <class T>
cudaError_t launch_muladd(const T* a, const T* b, T* y, int64_t count, double c,
                          cudaStream_t stream) {
  const int64_t blocks = std::min((count + kThreads - 1) / kThreads, kMostBlocks);
  multiply_add<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(a, b, y, count,
                                                                       static_cast<Wide<T>>(c));
  return cudaGetLastError();
}

template cudaError_t launch_muladd(const float*, const float*, float*, int64_t, double,
                                   cudaStream_t);
template cudaError_t launch_muladd(const double*, const double*, double*, int64_t, double,
                                   cudaStream_t);
template cudaError_t launch_muladd(const __half*, const __half*, __half*, int64_t, double,
                                   cudaStream_t);
template cudaError_t launch_muladd(const __nv_bfloat16*, const __nv_bfloat16*, __nv_bfloat16*,
                                   int64_t, double, cudaStream_t);
