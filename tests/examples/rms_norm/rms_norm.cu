// The CUDA side of rms_norm.cpp: pointers, sizes and a stream, no torch header.
//
// A block takes a row: it adds and squares, sums the squares, and scales what it has just written
// or read, which is still near. Bytes: x, residual (read and written) and out once each.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
// A grid's first dimension: further rows are reached by strides.
constexpr int64_t kMostBlocks = 1 << 20;

// torch's flags take the conversions of __half and __nv_bfloat16 away: by name they are there.
__device__ float wide(float x) { return x; }
__device__ double wide(double x) { return x; }
__device__ float wide(__half x) { return __half2float(x); }
__device__ float wide(__nv_bfloat16 x) { return __bfloat162float(x); }

__device__ void assign(float& to, float x) { to = x; }
__device__ void assign(double& to, double x) { to = x; }
__device__ void assign(__half& to, float x) { to = __float2half(x); }
__device__ void assign(__nv_bfloat16& to, float x) { to = __float2bfloat16(x); }

// The sum over the block, in every thread.
__device__ double sum_of_block(double value) {
  __shared__ double of_warp[kThreads / kWarp];
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  __syncthreads();  // the sums of the row before have been read
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = value;
  __syncthreads();
  double sum = 0;
  for (double each : of_warp) sum += each;
  return sum;
}

template <class T, class Wide>
__global__ void normalize(const T* x, T* residual, const T* weight, T* out, Wide* inverse_rms,
                          int64_t rows, int64_t width, double eps) {
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const int64_t begin = row * width;
    double squares = 0;  // a row may be long, and a square large
    for (int64_t i = threadIdx.x; i < width; i += kThreads) {
      T value = x[begin + i];
      if (residual) {
        assign(value, wide(residual[begin + i]) + wide(value));
        residual[begin + i] = value;
      }
      const double term = wide(value);
      squares += term * term;
    }
    const auto scale = static_cast<Wide>(1 / sqrt(sum_of_block(squares) / width + eps));
    if (threadIdx.x == 0) inverse_rms[row] = scale;
    const T* from = residual ? residual : x;
    for (int64_t i = threadIdx.x; i < width; i += kThreads) {
      const Wide y = wide(from[begin + i]) * scale;
      assign(out[begin + i], weight ? y * wide(weight[i]) : y);
    }
  }
}

}  // namespace

template <class T, class Wide>
cudaError_t launch_rms_norm(const T* x, T* residual, const T* weight, T* out, Wide* inverse_rms,
                            int64_t rows, int64_t width, double eps, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(std::min(rows, kMostBlocks));
  normalize<<<blocks, kThreads, 0, stream>>>(x, residual, weight, out, inverse_rms, rows, width,
                                             eps);
  return cudaGetLastError();
}

template cudaError_t launch_rms_norm(const float*, float*, const float*, float*, float*, int64_t,
                                     int64_t, double, cudaStream_t);
template cudaError_t launch_rms_norm(const double*, double*, const double*, double*, double*,
                                     int64_t, int64_t, double, cudaStream_t);
template cudaError_t launch_rms_norm(const __half*, __half*, const __half*, __half*, float*,
                                     int64_t, int64_t, double, cudaStream_t);
template cudaError_t launch_rms_norm(const __nv_bfloat16*, __nv_bfloat16*, const __nv_bfloat16*,
                                     __nv_bfloat16*, float*, int64_t, int64_t, double,
                                     cudaStream_t);
