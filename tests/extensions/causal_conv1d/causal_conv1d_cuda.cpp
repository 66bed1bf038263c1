// The CUDA side of causal_conv1d::forward and backward. The build leaves this file and the .cu out
// where there is no CUDA.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "causal_conv1d.h"
#include "causal_conv1d_op.h"

namespace causal_conv1d {
namespace {

using at::Tensor;

// Contiguous and aligned to 16 bytes, as the kernels read parameters.
Tensor aligned(const Tensor& tensor) {
  const Tensor dense = tensor.contiguous();
  return reinterpret_cast<uintptr_t>(dense.const_data_ptr()) % 16 == 0 ? dense : dense.clone();
}

// What the kernels are given, and the tensors that it points into.
struct Given {
  Given(const Tensor& input, const Tensor& weights, const OptionalTensor& biases,
        const OptionalTensor& initial_state, bool silu)
      : problem{input.size(0), input.size(1),    input.size(2), static_cast<int>(weights.size(1)),
                silu,          is_columns(input)},
        x(readable(input, problem.columns)),
        weight(aligned(weights)) {
    if (biases) bias = aligned(*biases);
    if (initial_state) state = initial_state->contiguous();
  }

  Parameters parameters() const {
    return {weight.const_data_ptr(), bias.defined() ? bias.const_data_ptr() : nullptr,
            state.defined() ? state.const_data_ptr() : nullptr};
  }

  Problem problem;
  Tensor x, weight, bias, state;
};

In plane(const Tensor& x) { return {x.const_data_ptr(), x.stride(0), x.stride(2)}; }
Out plane_of(const Tensor& y) { return {y.mutable_data_ptr(), y.stride(0), y.stride(2)}; }

// f(the Launcher of a dtype), which returns a cudaError_t.
template <class F>
void launch(const Tensor& x, const char* op, const F& f) {
  TORCH_CHECK_VALUE(x.size(2) <= kMostSteps, op, ": x may have at most ", kMostSteps,
                    " steps on CUDA, got ", x.size(2));
  int error;
  switch (x.scalar_type()) {
    case at::kFloat:
      error = f(Launcher<Dtype::kFloat>());
      break;
    case at::kHalf:
      error = f(Launcher<Dtype::kHalf>());
      break;
    default:
      error = f(Launcher<Dtype::kBFloat16>());
  }
  C10_CUDA_CHECK(static_cast<cudaError_t>(error));
}

Forward forward_cuda(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                     const OptionalTensor& initial_state, bool silu) {
  check_forward(x, weight, bias, initial_state);
  const c10::cuda::CUDAGuard guard(x.device());
  if (needs_composite(x)) return composite_forward(x, weight, bias, initial_state, silu);
  const Given given(x, weight, bias, initial_state, silu);
  Forward results = empty_forward(x, weight);
  auto& [y, final_state] = results;
  launch(x, "causal_conv1d::forward", [&, &y = y, &final_state = final_state](auto launcher) {
    return launcher.forward(given.problem, plane(given.x), given.parameters(), plane_of(y),
                            final_state.mutable_data_ptr(), c10::cuda::getCurrentCUDAStream());
  });
  return results;
}

Backward backward_cuda(const Tensor& grad, const OptionalTensor& grad_final_state, const Tensor& x,
                       const Tensor& weight, const OptionalTensor& bias,
                       const OptionalTensor& initial_state, bool silu) {
  check_backward(grad, grad_final_state, x, weight, bias, initial_state);
  const c10::cuda::CUDAGuard guard(x.device());
  if (needs_composite(x)) {
    return composite_backward(grad, grad_final_state, x, weight, bias, initial_state, silu);
  }
  const Given given(x, weight, bias, initial_state, silu);
  const Tensor dy = readable(grad, given.problem.columns);
  const Tensor dfinal = grad_final_state ? grad_final_state->contiguous() : Tensor();
  Backward results = empty_backward(x, weight, bias, initial_state);
  launch(x, "causal_conv1d::backward", [&](auto launcher) {
    const auto& [dx, dweight, dbias, dstate] = results;
    const Tensor partials =
        at::empty({launcher.num_partials(given.problem)}, x.options().dtype(at::kFloat));
    const Gradients gradients{
        plane_of(dx), dweight.mutable_data_ptr(), bias ? dbias.mutable_data_ptr() : nullptr,
        initial_state ? dstate.mutable_data_ptr() : nullptr, partials.mutable_data_ptr<float>()};
    return launcher.backward(given.problem, plane(given.x), plane(dy),
                             dfinal.defined() ? dfinal.const_data_ptr() : nullptr,
                             given.parameters(), gradients, c10::cuda::getCurrentCUDAStream());
  });
  return results;
}

}  // namespace
}  // namespace causal_conv1d

TORCH_LIBRARY_IMPL(causal_conv1d, CUDA, m) {
  m.impl("forward", &causal_conv1d::forward_cuda);
  m.impl("backward", &causal_conv1d::backward_cuda);
}
