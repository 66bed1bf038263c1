#pragma once

// The depthwise causal convolution for the files that implement it. No torch header, so that nvcc
// has little to read and another framework could call the kernels.
//
//     pre[n, c, l] = bias[c] + sum over k < W of  weight[c, k] * x[n, c, l - (W - 1) + k]
//     y = silu ? pre * sigmoid(pre) : pre
//
// x at l < 0 is the initial state's [n, c, l + W - 1], or 0 where there is none. The final state is
// what the next piece of the sequence starts from: the last W - 1 of the initial state and x.

#include <cstdint>

struct CUstream_st;

namespace causal_conv1d {

enum class Dtype { kFloat, kHalf, kBFloat16 };

// What is convolved. All of its tensors have one dtype; arithmetic is in fp32.
struct Problem {
  int64_t batch, channels, steps;
  int width;  // W, from 2 to 4
  bool silu;
  // Rows: x is contiguous as (batch, channels, steps). Else columns: contiguous over the channels,
  // with strides for the other two.
  bool columns;
};

// A tensor of (batch, channels, steps). The strides, in elements, are read in columns alone.
template <class Void>
struct Plane {
  Void* data;
  int64_t batch_stride;
  int64_t step_stride;
};
using In = Plane<const void>;
using Out = Plane<void>;

// Contiguous, aligned to 16 bytes: weight (channels, W), bias (channels) or null, state (batch,
// channels, W - 1) or null.
struct Parameters {
  const void* weight;
  const void* bias;
  const void* state;
};

// The gradients; all but `partials` as their tensors. A null dbias or dstate isn't computed.
struct Gradients {
  Out dx;  // dense, aligned to 16 bytes
  void* dweight;
  void* dbias;
  void* dstate;
  float* partials;  // num_partials() of them, room for sums
};

// The kernels for tensors of one dtype. `batch`, `channels` and `steps` are at least 1 and `steps`
// at most kMostSteps. All launches go to `stream`; each function returns the first cudaError_t.
// Nothing is allocated and nothing synchronised: legal under graph capture.
template <Dtype dtype>
struct Launcher {
  // y, dense and aligned to 16 bytes, and final_state (batch, channels, W - 1). x and, below, dy
  // may have any alignment.
  static int forward(const Problem& problem, const In& x, const Parameters& parameters,
                     const Out& y, void* final_state, CUstream_st* stream);

  static int64_t num_partials(const Problem& problem);

  // The gradients of y and (unless null) of the final state. Sums are taken in an order that the
  // problem fixes: equal inputs give equal bits.
  static int backward(const Problem& problem, const In& x, const In& dy, const void* dfinal_state,
                      const Parameters& parameters, const Gradients& gradients,
                      CUstream_st* stream);
};

constexpr int64_t kMostSteps = (int64_t{1} << 31) - 4096;

}  // namespace causal_conv1d
