// causal_conv1d::forward and backward on the CPU; causal_conv1d.h says what they compute.
//
// A thread takes a block of steps of a row, or of channels of a column, into buffers of floats that
// stay in its first-level cache, and there the loops are the compiler's to vectorise: each is over
// lanes that stand side by side, steps or channels.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "causal_conv1d_op.h"
#include "identity_conv/huge_pages.h"

namespace causal_conv1d {
namespace {

using at::Tensor;

// The library runs on any x86-64 and uses what the machine has.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define VECTORISED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define VECTORISED
#endif
// Floating-point exceptions aren't looked at. While they might be, the compiler makes no choice
// between two lanes (a clamp) without a branch.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-trapping-math")
#endif
// Into each of the clones.
#define INLINED [[gnu::always_inline]] inline

constexpr int kMostWidth = 4;
// Of steps of a row: its buffers fit the cache with room to spare.
constexpr int kRowBlock = 1024;
// Of channels of a column: a few cache lines of a step.
constexpr int kColumnBlock = 128;
// Steps of a column that a thread walks over.
constexpr int64_t kColumnSteps = 256;

// --- Numbers -------------------------------------------------------------------------------------

// exp to 2e-7 of itself, in operations that vectorise: 2^n by the exponent's bits and a polynomial
// of Cephes' expf for the rest. Infinite from 88.4 on, where n is 128.
INLINED float exp_of(float v) {
  v = v > 89.f ? 89.f : v;
  v = v < -87.f ? -87.f : v;
  const float shifted = v * 1.44269504f + 12582912.f;  // 1.5 * 2^23: rounds to the nearest integer
  const float n = shifted - 12582912.f;
  const float r = (v - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.f;
  int32_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits - 0x4B400000 + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return p * power;
}

INLINED float sigmoid(float v) { return 1.f / (1.f + exp_of(-v)); }

VECTORISED void widen(const at::BFloat16* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = uint32_t{from[i].x} << 16;
    std::memcpy(&to[i], &bits, sizeof bits);
  }
}
VECTORISED void widen(const at::Half* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = c10::detail::fp16_ieee_to_fp32_value(from[i].x);
}
void widen(const float* from, float* to, int64_t count) {
  std::memcpy(to, from, count * sizeof(float));
}

VECTORISED void narrow(const float* from, at::BFloat16* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, &from[i], sizeof bits);
    const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    to[i].x = from[i] != from[i] ? 0x7FC0 : static_cast<uint16_t>(rounded);
  }
}
VECTORISED void narrow(const float* from, at::Half* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i].x = c10::detail::fp16_ieee_from_fp32_value(from[i]);
}
void narrow(const float* from, float* to, int64_t count) {
  std::memcpy(to, from, count * sizeof(float));
}

// --- Lanes ---------------------------------------------------------------------------------------

// W inputs of each lane, the newest last, and the weights: those of the lane's own channel, or, in
// a row, of the one channel that there is.
struct Taps {
  int width;
  bool row;
  const float* in[kMostWidth];
  const float* weight[kMostWidth];
  const float* bias;
};

template <int W, bool kRow>
INLINED float before_activation(const Taps& taps, int64_t i) {
  float sum = taps.bias[kRow ? 0 : i];
  for (int k = 0; k < W; ++k) sum += taps.weight[k][kRow ? 0 : i] * taps.in[k][i];
  return sum;
}

// f(W, whether a row) with both known to the compiler.
template <class F>
INLINED void with_width(int width, bool row, const F& f) {
  const auto with_row = [&](auto w) __attribute__((always_inline)) {
    row ? f(w, std::true_type()) : f(w, std::false_type());
  };
  width == 2   ? with_row(std::integral_constant<int, 2>())
  : width == 3 ? with_row(std::integral_constant<int, 3>())
               : with_row(std::integral_constant<int, 4>());
}

VECTORISED void convolve(const Taps& given, bool silu, float* __restrict out, int64_t count) {
  with_width(given.width, given.row, [&](auto w, auto row) __attribute__((always_inline)) {
    const Taps taps = given;
    if (silu) {
      for (int64_t i = 0; i < count; ++i) {
        const float pre = before_activation<w, row>(taps, i);
        out[i] = pre * sigmoid(pre);
      }
    } else {
      for (int64_t i = 0; i < count; ++i) out[i] = before_activation<w, row>(taps, i);
    }
  });
}

// slope: the gradient of y, and then of what is before the activation.
VECTORISED void through_silu(const Taps& given, float* __restrict slope, int64_t count) {
  with_width(given.width, given.row, [&](auto w, auto row) __attribute__((always_inline)) {
    const Taps taps = given;
    for (int64_t i = 0; i < count; ++i) {
      const float pre = before_activation<w, row>(taps, i);
      const float s = sigmoid(pre);
      slope[i] *= s + pre * s * (1.f - s);
    }
  });
}

// The sum of weight * in, without a bias: of slopes it is the gradient of the oldest input.
VECTORISED void spread(const Taps& given, float* __restrict out, int64_t count) {
  with_width(given.width, given.row, [&](auto w, auto row) __attribute__((always_inline)) {
    const Taps taps = given;
    for (int64_t i = 0; i < count; ++i) {
      float sum = 0;
      for (int k = 0; k < w; ++k) sum += taps.weight[k][row ? 0 : i] * taps.in[k][i];
      out[i] = sum;
    }
  });
}

VECTORISED float dot(const float* a, const float* b, int64_t count) {
  constexpr int kLanes = 16;
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) lanes[j] += a[i + j] * b[i + j];
  }
  float sum = 0;
  for (; i < count; ++i) sum += a[i] * b[i];
  for (float lane : lanes) sum += lane;
  return sum;
}

VECTORISED void add_products(const float* __restrict a, const float* __restrict b,
                             float* __restrict to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] += a[i] * b[i];
}

VECTORISED void add(const float* __restrict a, float* __restrict to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] += a[i];
}

// --- The problem ---------------------------------------------------------------------------------

template <class T>
struct Plane {
  T* data;
  int64_t batch_stride, channel_stride, step_stride;

  T* at(int64_t n, int64_t c, int64_t l) const {
    return data + n * batch_stride + c * channel_stride + l * step_stride;
  }
};

template <class T>
Plane<const T> plane(const Tensor& x) {
  return {x.const_data_ptr<T>(), x.stride(0), x.stride(1), x.stride(2)};
}
template <class T>
Plane<T> plane_of(const Tensor& y) {
  return {y.mutable_data_ptr<T>(), y.stride(0), y.stride(1), y.stride(2)};
}

// Weight and bias as floats: weight[k * channels + c].
template <class T>
struct Parameters {
  Parameters(const Tensor& given_weight, const OptionalTensor& given_bias)
      : channels(given_weight.size(0)),
        width(static_cast<int>(given_weight.size(1))),
        weight(channels * width),
        bias(channels) {
    const Tensor dense = given_weight.contiguous();
    const T* from = dense.const_data_ptr<T>();
    for (int64_t c = 0; c < channels; ++c) {
      for (int k = 0; k < width; ++k) weight[k * channels + c] = from[c * width + k];
    }
    if (given_bias) widen(given_bias->contiguous().const_data_ptr<T>(), bias.data(), channels);
  }

  Taps taps(int64_t c, bool row) const {
    Taps taps{width, row, {}, {}, &bias[c]};
    for (int k = 0; k < width; ++k) taps.weight[k] = &weight[k * channels + c];
    return taps;
  }

  int64_t channels;
  int width;
  std::vector<float> weight, bias;
};

// x and what came before it.
template <class T>
struct Input {
  Plane<const T> x;
  const T* state;  // (N, C, W - 1) or null
  int64_t channels, steps;
  int width;

  T at(int64_t n, int64_t c, int64_t l) const {
    if (l >= 0) return *x.at(n, c, l);
    return state ? state[(n * channels + c) * (width - 1) + l + width - 1] : T(0.f);
  }

  // Steps [begin, end) of a row.
  void row(int64_t n, int64_t c, int64_t begin, int64_t end, float* to) const {
    for (; begin < end && begin < 0; ++begin) *to++ = at(n, c, begin);
    if (begin < end) widen(x.at(n, c, begin), to, end - begin);
  }

  // Step l of `count` channels.
  void column(int64_t n, int64_t c, int64_t l, int64_t count, float* to) const {
    if (l >= 0) {
      widen(x.at(n, c, l), to, count);
    } else {
      for (int64_t i = 0; i < count; ++i) to[i] = at(n, c + i, l);
    }
  }
};

int64_t blocks_of(int64_t size, int64_t block) { return (size + block - 1) / block; }

// Calls f(n, c, begin, end) for every block of steps of every row, on all threads.
template <class F>
void each_row_block(int64_t batch, int64_t channels, int64_t steps, int64_t block, const F& f) {
  const int64_t blocks = blocks_of(steps, block);
  // Below this a second thread costs more than it brings.
  const int64_t grain = std::max<int64_t>(16384 / std::min(steps, block), 1);
  at::parallel_for(0, batch * channels * blocks, grain, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) {
      const int64_t row = i / blocks, begin = i % blocks * block;
      f(row / channels, row % channels, begin, std::min(begin + block, steps));
    }
  });
}

// --- Forward -------------------------------------------------------------------------------------

template <class T>
void forward_rows(const Input<T>& input, const Parameters<T>& parameters, int64_t batch, bool silu,
                  const Plane<T>& y) {
  const int before = input.width - 1;
  each_row_block(batch, input.channels, input.steps, kRowBlock,
                 [&](int64_t n, int64_t c, int64_t begin, int64_t end) {
                   float in[kRowBlock + kMostWidth], out[kRowBlock];
                   input.row(n, c, begin - before, end, in);
                   Taps taps = parameters.taps(c, true);
                   for (int k = 0; k < input.width; ++k) taps.in[k] = in + k;
                   convolve(taps, silu, out, end - begin);
                   narrow(out, y.at(n, c, begin), end - begin);
                 });
}

template <class T>
void forward_columns(const Input<T>& input, const Parameters<T>& parameters, int64_t batch,
                     bool silu, const Plane<T>& y) {
  const int width = input.width;
  const int64_t blocks = blocks_of(input.channels, kColumnBlock);
  const int64_t pieces = blocks_of(input.steps, kColumnSteps);
  at::parallel_for(0, batch * pieces * blocks, 1, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) {
      const int64_t c = i % blocks * kColumnBlock, n = i / blocks / pieces;
      const int64_t begin = i / blocks % pieces * kColumnSteps;
      const int64_t end = std::min(begin + kColumnSteps, input.steps);
      const int64_t count = std::min<int64_t>(kColumnBlock, input.channels - c);
      float in[kMostWidth][kColumnBlock], out[kColumnBlock];  // in: a ring
      const auto step = [&](int64_t l) { return in[(l + width) % width]; };
      Taps taps = parameters.taps(c, false);
      for (int64_t l = begin - (width - 1); l < begin; ++l) input.column(n, c, l, count, step(l));
      for (int64_t l = begin; l < end; ++l) {
        input.column(n, c, l, count, step(l));
        for (int k = 0; k < width; ++k) taps.in[k] = step(l - (width - 1) + k);
        convolve(taps, silu, out, count);
        narrow(out, y.at(n, c, l), count);
      }
    }
  });
}

// --- Backward ------------------------------------------------------------------------------------

template <class T>
struct Gradients {
  Plane<const T> dy;
  const T* dfinal_state;  // or null
  Plane<T> dx;
  T* dstate;                    // or null
  std::vector<double> dweight;  // as Parameters has them
  std::vector<double> dbias;

  // Puts the gradient of step l < 0, a state's, or adds to one that the final state kept.
  void put(const Input<T>& input, int64_t n, int64_t c, int64_t l, float value) const {
    const int64_t before = input.width - 1, row = (n * input.channels + c) * before;
    const int64_t kept = l - (input.steps - before);
    if (dfinal_state && kept >= 0) value += static_cast<float>(dfinal_state[row + kept]);
    if (l >= 0) {
      *dx.at(n, c, l) = value;
    } else if (dstate) {
      dstate[row + l + before] = value;
    }
  }
};

template <class T>
void backward_rows(const Input<T>& input, const Parameters<T>& parameters, int64_t batch, bool silu,
                   Gradients<T>& to) {
  const int width = input.width, before = width - 1;
  const int64_t steps = input.steps;
  at::parallel_for(0, input.channels, std::max<int64_t>(16384 / (batch * steps), 1),
                   [&](int64_t first, int64_t last) {
                     for (int64_t c = first; c < last; ++c) {
                       for (int64_t n = 0; n < batch; ++n) {
                         for (int64_t begin = 0; begin < steps; begin += kRowBlock) {
                           const int64_t end = std::min<int64_t>(begin + kRowBlock, steps);
                           // The slopes of the steps that the block's last are behind, computed
                           // here too. At the end of the row they are 0.
                           const int64_t stop = std::min<int64_t>(end + before, steps);
                           float in[kRowBlock + 2 * kMostWidth], out[kRowBlock + kMostWidth];
                           float padded[kRowBlock + 3 * kMostWidth];
                           float* slope = padded + before;
                           input.row(n, c, begin - before, stop, in);
                           widen(to.dy.at(n, c, begin), slope, stop - begin);
                           std::fill(slope + (stop - begin), slope + (end - begin) + before, 0.f);
                           Taps taps = parameters.taps(c, true);
                           for (int k = 0; k < width; ++k) taps.in[k] = in + k;
                           if (silu) through_silu(taps, slope, stop - begin);
                           for (int k = 0; k < width; ++k) {
                             to.dweight[k * input.channels + c] += dot(slope, in + k, end - begin);
                           }
                           for (int64_t i = 0; i < end - begin; ++i) to.dbias[c] += slope[i];
                           // From `before` steps earlier at the start of the row: the state's.
                           const int64_t from = begin == 0 ? -before : begin;
                           std::fill(padded, slope, 0.f);
                           for (int k = 0; k < width; ++k)
                             taps.in[k] = slope + (from - begin) + before - k;
                           spread(taps, out, end - from);
                           int64_t l = from;
                           for (; l < std::min<int64_t>(0, end); ++l)
                             to.put(input, n, c, l, out[l - from]);
                           const int64_t kept = std::clamp(steps - before, l, end);
                           if (kept > l) narrow(out + (l - from), to.dx.at(n, c, l), kept - l);
                           for (l = kept; l < end; ++l) to.put(input, n, c, l, out[l - from]);
                         }
                       }
                     }
                   });
}

template <class T>
void backward_columns(const Input<T>& input, const Parameters<T>& parameters, int64_t batch,
                      bool silu, Gradients<T>& to) {
  const int width = input.width, before = width - 1;
  const int64_t steps = input.steps;
  at::parallel_for(0, blocks_of(input.channels, kColumnBlock), 1, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block) {
      const int64_t c = block * kColumnBlock;
      const int64_t count = std::min<int64_t>(kColumnBlock, input.channels - c);
      float in[kMostWidth][kColumnBlock], slope[kMostWidth][kColumnBlock], out[kColumnBlock];
      float sums[kMostWidth + 1][kColumnBlock] = {};
      const auto flush = [&] {
        for (int64_t i = 0; i < count; ++i) {
          for (int k = 0; k < width; ++k) {
            to.dweight[k * input.channels + c + i] += sums[k][i];
            sums[k][i] = 0;
          }
          to.dbias[c + i] += sums[width][i];
          sums[width][i] = 0;
        }
      };
      Taps taps = parameters.taps(c, false);
      for (int64_t n = 0; n < batch; ++n) {
        for (int64_t l = -before; l < 0; ++l) {
          input.column(n, c, l, count, in[(l + width) % width]);
          std::fill_n(slope[(l + width) % width], count, 0.f);
        }
        for (int64_t l = 0; l < steps + before; ++l) {
          float* now = slope[l % width];
          if (l < steps) {
            input.column(n, c, l, count, in[l % width]);
            widen(to.dy.at(n, c, l), now, count);
            for (int k = 0; k < width; ++k) taps.in[k] = in[(l + 1 + k) % width];
            if (silu) through_silu(taps, now, count);
            for (int k = 0; k < width; ++k) add_products(now, taps.in[k], sums[k], count);
            add(now, sums[width], count);
          } else {
            std::fill_n(now, count, 0.f);
          }
          // All slopes that step l - before is behind are known now.
          for (int k = 0; k < width; ++k) taps.in[k] = slope[(l + width - k) % width];
          spread(taps, out, count);
          const int64_t at = l - before;
          if (at >= 0 && at < steps - before) {
            narrow(out, to.dx.at(n, c, at), count);
          } else {
            for (int64_t i = 0; i < count; ++i) to.put(input, n, c + i, at, out[i]);
          }
          if (l % kColumnSteps == kColumnSteps - 1) flush();
        }
      }
      flush();
    }
  });
}

// --- The operators -------------------------------------------------------------------------------

template <class F>
void with_type(const Tensor& x, const F& f) {
  switch (x.scalar_type()) {
    case at::kFloat:
      return f(float());
    case at::kHalf:
      return f(at::Half());
    default:
      return f(at::BFloat16());
  }
}

template <class T>
Input<T> input_of(const Tensor& x, const Tensor& weight, const Tensor& state) {
  return {plane<T>(x), state.defined() ? state.const_data_ptr<T>() : nullptr, x.size(1), x.size(2),
          static_cast<int>(weight.size(1))};
}

void prefer_huge_pages(const Tensor& y) {
  identity_conv::prefer_huge_pages(y.mutable_data_ptr(), y.nbytes());
}

Forward forward_cpu(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                    const OptionalTensor& initial_state, bool silu) {
  check_forward(x, weight, bias, initial_state);
  if (needs_composite(x)) return composite_forward(x, weight, bias, initial_state, silu);
  const bool columns = is_columns(x);
  const Tensor in = readable(x, columns);
  const Tensor state = initial_state ? initial_state->contiguous() : Tensor();
  Forward results = empty_forward(x, weight);
  prefer_huge_pages(std::get<0>(results));
  with_type(x, [&](auto zero) {
    using T = decltype(zero);
    const Input<T> input = input_of<T>(in, weight, state);
    const Parameters<T> parameters(weight, bias);
    const Plane<T> y = plane_of<T>(std::get<0>(results));
    if (columns) {
      forward_columns(input, parameters, x.size(0), silu, y);
    } else {
      forward_rows(input, parameters, x.size(0), silu, y);
    }
    T* last = std::get<1>(results).template mutable_data_ptr<T>();
    for (int64_t n = 0; n < x.size(0); ++n) {
      for (int64_t c = 0; c < x.size(1); ++c) {
        for (int k = input.width - 1; k > 0; --k) *last++ = input.at(n, c, input.steps - k);
      }
    }
  });
  return results;
}

Backward backward_cpu(const Tensor& grad, const OptionalTensor& grad_final_state, const Tensor& x,
                      const Tensor& weight, const OptionalTensor& bias,
                      const OptionalTensor& initial_state, bool silu) {
  check_backward(grad, grad_final_state, x, weight, bias, initial_state);
  if (needs_composite(x)) {
    return composite_backward(grad, grad_final_state, x, weight, bias, initial_state, silu);
  }
  const bool columns = is_columns(x);
  const Tensor in = readable(x, columns), dy = readable(grad, columns);
  const Tensor state = initial_state ? initial_state->contiguous() : Tensor();
  const Tensor dfinal = grad_final_state ? grad_final_state->contiguous() : Tensor();
  Backward results = empty_backward(x, weight, bias, initial_state);
  prefer_huge_pages(std::get<0>(results));
  with_type(x, [&](auto zero) {
    using T = decltype(zero);
    const auto& [dx, dweight, dbias, dstate] = results;
    const Input<T> input = input_of<T>(in, weight, state);
    const Parameters<T> parameters(weight, bias);
    Gradients<T> to{plane<T>(dy),
                    dfinal.defined() ? dfinal.const_data_ptr<T>() : nullptr,
                    plane_of<T>(dx),
                    initial_state ? dstate.template mutable_data_ptr<T>() : nullptr,
                    std::vector<double>(weight.numel()),
                    std::vector<double>(input.channels)};
    if (columns) {
      backward_columns(input, parameters, x.size(0), silu, to);
    } else {
      backward_rows(input, parameters, x.size(0), silu, to);
    }
    for (int64_t c = 0; c < input.channels; ++c) {
      for (int k = 0; k < input.width; ++k) {
        dweight.template mutable_data_ptr<T>()[c * input.width + k] =
            static_cast<float>(to.dweight[k * input.channels + c]);
      }
      if (bias) dbias.template mutable_data_ptr<T>()[c] = static_cast<float>(to.dbias[c]);
    }
  });
  return results;
}

}  // namespace
}  // namespace causal_conv1d

TORCH_LIBRARY_IMPL(causal_conv1d, CPU, m) {
  m.impl("forward", &causal_conv1d::forward_cpu);
  m.impl("backward", &causal_conv1d::backward_cpu);
}
