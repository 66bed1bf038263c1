// The CUDA side of my_kernel.cpp: pointers, a count and a stream, no torch header.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

namespace {

constexpr int kThreads = 256;
// A grid's first dimension: further elements are reached by strides.
constexpr int64_t kMostBlocks = 1 << 20;

template <class T>
__global__ void multiply(const T* x, T* y, int64_t count, T factor) {
  const int64_t step = int64_t{kThreads} * gridDim.x;
  for (int64_t i = int64_t{kThreads} * blockIdx.x + threadIdx.x; i < count; i += step) {
    y[i] = factor * x[i];
  }
}

template <class T>
cudaError_t launch(const T* x, T* y, int64_t count, T factor, cudaStream_t stream) {
  const int64_t blocks = std::min((count + kThreads - 1) / kThreads, kMostBlocks);
  multiply<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(x, y, count, factor);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_my_kernel(const float* x, float* y, int64_t count, float factor,
                             cudaStream_t stream) {
  return launch(x, y, count, factor, stream);
}
cudaError_t launch_my_kernel(const double* x, double* y, int64_t count, double factor,
                             cudaStream_t stream) {
  return launch(x, y, count, factor, stream);
}
