#pragma once

// The operators causal_conv1d::forward and causal_conv1d::backward for the torch-facing files:
// checks, layouts, and the composites that serve where there is no kernel.

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace causal_conv1d {

using OptionalTensor = std::optional<at::Tensor>;

// y (N, C, L), final_state (N, C, W - 1).
using Forward = std::tuple<at::Tensor, at::Tensor>;

// The gradients of x, weight, bias and initial_state; (0,) for the last two where there is none.
using Backward = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// Calls the operator through the dispatcher: fakes, autograd and every backend follow.
Forward forward(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
                const OptionalTensor& initial_state, bool silu);

// Throw ValueError with a sentence that names the argument unless the arguments fit each other.
void check_forward(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
                   const OptionalTensor& initial_state);
void check_backward(const at::Tensor& grad, const OptionalTensor& grad_final_state,
                    const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
                    const OptionalTensor& initial_state);

// Whether x's channels lie side by side and its steps don't: y and x's gradient then are so too,
// and else contiguous.
bool is_columns(const at::Tensor& x);

// A new tensor of x's sizes, in the layout that y has.
at::Tensor empty_output(const at::Tensor& x);

// The same values where the kernels can read them: x contiguous, or its channels side by side.
at::Tensor readable(const at::Tensor& x, bool columns);

// New tensors for the results.
Forward empty_forward(const at::Tensor& x, const at::Tensor& weight);
Backward empty_backward(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
                        const OptionalTensor& initial_state);

// By torch's operators: for any device, dtype and size. The second is differentiable.
Forward composite_forward(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias,
                          const OptionalTensor& initial_state, bool silu);
Backward composite_backward(const at::Tensor& grad, const OptionalTensor& grad_final_state,
                            const at::Tensor& x, const at::Tensor& weight,
                            const OptionalTensor& bias, const OptionalTensor& initial_state,
                            bool silu);

// Whether the composites must serve although there are kernels.
inline bool needs_composite(const at::Tensor& x) {
  return x.numel() == 0 || x.scalar_type() == at::kDouble;
}

}  // namespace causal_conv1d
