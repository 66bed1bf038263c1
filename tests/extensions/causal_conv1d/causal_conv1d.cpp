// causal_conv1d::forward(x, weight, bias, initial_state, silu) -> (y, final_state), the depthwise
// causal convolution that causal_conv1d.h describes, and its gradient: schemas, Meta, autograd and
// composites.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <string>
#include <vector>

#include "causal_conv1d_op.h"
#include "identity_conv/autograd.h"
#include "identity_conv/checks.h"

namespace causal_conv1d {

using at::Tensor;

namespace {

int64_t width_of(const Tensor& weight) { return weight.sym_size(1).guard_int(__FILE__, __LINE__); }

void check_like_x(const char* op, const char* argument, const Tensor& tensor, const Tensor& x,
                  at::SymIntArrayRef sizes, const char* shape) {
  identity_conv::check_strided(tensor, op, argument);
  TORCH_CHECK_VALUE(tensor.sym_sizes() == sizes, op, ": ", argument, " must have shape ", shape,
                    " = ", sizes, ", got ", tensor.sym_sizes());
  TORCH_CHECK_VALUE(tensor.scalar_type() == x.scalar_type(), op, ": ", argument,
                    " must have the dtype of x, ", x.scalar_type(), ", got ", tensor.scalar_type());
  TORCH_CHECK_VALUE(tensor.device() == x.device(), op, ": ", argument,
                    " must be on the device of x, ", x.device(), ", got ", tensor.device());
}

void check(const char* op, const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
           const OptionalTensor& initial_state) {
  identity_conv::check_strided(x, op, "x");
  identity_conv::check_strided(weight, op, "weight");
  TORCH_CHECK_VALUE(x.dim() == 3, op, ": x must have shape (N, C, L), got ", x.sym_sizes());
  const auto dtype = x.scalar_type();
  TORCH_CHECK_VALUE(
      dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kDouble,
      op, ": x must have the dtype Float, Half, BFloat16 or Double, got ", dtype);
  TORCH_CHECK_VALUE(weight.dim() == 2, op, ": weight must have shape (C, W), got ",
                    weight.sym_sizes());
  const int64_t width = width_of(weight);
  TORCH_CHECK_VALUE(width >= 2 && width <= 4, op, ": weight must have a width W from 2 to 4, got ",
                    width);
  const c10::SymInt batch = x.sym_size(0), channels = x.sym_size(1);
  check_like_x(op, "weight", weight, x, {channels, width}, "(C, W)");
  if (bias) check_like_x(op, "bias", *bias, x, {channels}, "(C,)");
  if (initial_state) {
    check_like_x(op, "initial_state", *initial_state, x, {batch, channels, width - 1},
                 "(N, C, W - 1)");
  }
}

// What half types are computed in.
at::ScalarType arithmetic(const Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

Tensor in_layout_of(const Tensor& x, const Tensor& y) {
  return is_columns(x) ? y.transpose(1, 2).contiguous().transpose(1, 2) : y.contiguous();
}

// The initial state and x, (N, C, W - 1 + L).
Tensor with_state(const Tensor& x, const OptionalTensor& initial_state, int64_t width) {
  const Tensor state =
      initial_state ? *initial_state
                    : at::zeros_symint({x.sym_size(0), x.sym_size(1), width - 1}, x.options());
  return at::cat({state, x}, 2).to(arithmetic(x));
}

Tensor before_activation(const Tensor& in, const Tensor& weight, const OptionalTensor& bias,
                         const c10::SymInt& steps) {
  Tensor pre = bias ? bias->unsqueeze(1).to(in.scalar_type()) : Tensor();
  for (int64_t k = 0; k < width_of(weight); ++k) {
    const Tensor part =
        in.narrow_symint(2, k, steps).mul(weight.select(1, k).unsqueeze(1).to(in.scalar_type()));
    pre = pre.defined() ? pre.add(part) : part;
  }
  return pre;
}

}  // namespace

void check_forward(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                   const OptionalTensor& initial_state) {
  check("causal_conv1d::forward", x, weight, bias, initial_state);
}

void check_backward(const Tensor& grad, const OptionalTensor& grad_final_state, const Tensor& x,
                    const Tensor& weight, const OptionalTensor& bias,
                    const OptionalTensor& initial_state) {
  constexpr auto kOp = "causal_conv1d::backward";
  check(kOp, x, weight, bias, initial_state);
  check_like_x(kOp, "grad", grad, x, x.sym_sizes(), "(N, C, L)");
  if (grad_final_state) {
    check_like_x(kOp, "grad_final_state", *grad_final_state, x,
                 {x.sym_size(0), x.sym_size(1), weight.sym_size(1) - 1}, "(N, C, W - 1)");
  }
}

bool is_columns(const Tensor& x) { return !x.is_contiguous() && x.sym_stride(1) == 1; }

Tensor empty_output(const Tensor& x) {
  const c10::SymInt n = x.sym_size(0), c = x.sym_size(1), l = x.sym_size(2);
  return is_columns(x) ? at::empty_symint({n, l, c}, x.options()).transpose(1, 2)
                       : at::empty_symint({n, c, l}, x.options());
}

Tensor readable(const Tensor& x, bool columns) {
  if (!columns) return x.contiguous();
  return x.stride(1) == 1 ? x : x.transpose(1, 2).contiguous().transpose(1, 2);
}

Forward empty_forward(const Tensor& x, const Tensor& weight) {
  return {empty_output(x),
          at::empty_symint({x.sym_size(0), x.sym_size(1), width_of(weight) - 1}, x.options())};
}

Backward empty_backward(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                        const OptionalTensor& initial_state) {
  const auto like = [&](const OptionalTensor& given) {
    return given ? at::empty_symint(given->sym_sizes(), x.options()) : at::empty({0}, x.options());
  };
  return {empty_output(x), at::empty_symint(weight.sym_sizes(), x.options()), like(bias),
          like(initial_state)};
}

Forward composite_forward(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                          const OptionalTensor& initial_state, bool silu) {
  check_forward(x, weight, bias, initial_state);
  const int64_t width = width_of(weight);
  const c10::SymInt steps = x.sym_size(2);
  const Tensor in = with_state(x, initial_state, width);
  const Tensor pre = before_activation(in, weight, bias, steps);
  const Tensor y = (silu ? pre.mul(pre.sigmoid()) : pre).to(x.scalar_type());
  // A copy: it outlives `in`.
  const Tensor last = in.narrow_symint(2, steps, width - 1).to(x.scalar_type()).clone();
  return {in_layout_of(x, y), last.contiguous()};
}

Backward composite_backward(const Tensor& grad, const OptionalTensor& grad_final_state,
                            const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                            const OptionalTensor& initial_state, bool silu) {
  check_backward(grad, grad_final_state, x, weight, bias, initial_state);
  const int64_t width = width_of(weight);
  const c10::SymInt steps = x.sym_size(2);
  const auto dtype = x.scalar_type();
  const Tensor in = with_state(x, initial_state, width);
  Tensor slope = grad.to(in.scalar_type());  // the gradient of pre
  if (silu) {
    const Tensor pre = before_activation(in, weight, bias, steps);
    const Tensor s = pre.sigmoid();
    slope = slope.mul(s.add(pre.mul(s).mul(s.neg().add(1))));
  }
  const Tensor padded = at::constant_pad_nd(slope, {width - 1, width - 1});
  Tensor din;
  std::vector<Tensor> dweight;
  for (int64_t k = 0; k < width; ++k) {
    const Tensor part = padded.narrow_symint(2, width - 1 - k, steps + width - 1)
                            .mul(weight.select(1, k).unsqueeze(1).to(in.scalar_type()));
    din = din.defined() ? din.add(part) : part;
    dweight.push_back(slope.mul(in.narrow_symint(2, k, steps)).sum(at::IntArrayRef({0, 2})));
  }
  if (grad_final_state) {
    din = din.add(at::constant_pad_nd_symint(grad_final_state->to(in.scalar_type()), {steps, 0}));
  }
  din = din.to(dtype);
  const Tensor none = at::empty({0}, x.options());
  return {in_layout_of(x, din.narrow_symint(2, width - 1, steps)), at::stack(dweight, 1).to(dtype),
          bias ? slope.sum(at::IntArrayRef({0, 2})).to(dtype) : none,
          initial_state ? din.narrow(2, 0, width - 1).clone().contiguous() : none};
}

Forward forward(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                const OptionalTensor& initial_state, bool silu) {
  static const auto handle = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow("causal_conv1d::forward", "")
                                 .typed<Forward(const Tensor&, const Tensor&, const OptionalTensor&,
                                                const OptionalTensor&, bool)>();
  return handle.call(x, weight, bias, initial_state, silu);
}

namespace {

const auto& backward_handle() {
  static const auto handle =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("causal_conv1d::backward", "")
          .typed<Backward(const Tensor&, const OptionalTensor&, const Tensor&, const Tensor&,
                          const OptionalTensor&, const OptionalTensor&, bool)>();
  return handle;
}

Forward forward_meta(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                     const OptionalTensor& initial_state, bool /*silu*/) {
  check_forward(x, weight, bias, initial_state);
  return empty_forward(x, weight);
}

Backward backward_meta(const Tensor& grad, const OptionalTensor& grad_final_state, const Tensor& x,
                       const Tensor& weight, const OptionalTensor& bias,
                       const OptionalTensor& initial_state, bool /*silu*/) {
  check_backward(grad, grad_final_state, x, weight, bias, initial_state);
  return empty_backward(x, weight, bias, initial_state);
}

struct ForwardGradient {
  static constexpr auto kOperator = "causal_conv1d::forward";
  static constexpr auto kName = "CausalConv1dBackward";
  using Signature = Forward(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                            const OptionalTensor& initial_state, bool silu);

  static Backward backward(const Tensor& grad, const Tensor& grad_final_state, const Tensor& x,
                           const Tensor& weight, const OptionalTensor& bias,
                           const OptionalTensor& initial_state, bool silu) {
    auto [dx, dweight, dbias, dstate] =
        backward_handle().call(grad, grad_final_state, x, weight, bias, initial_state, silu);
    return {dx, dweight, bias ? dbias : Tensor(), initial_state ? dstate : Tensor()};
  }
};

// The gradient's own gradient is that of torch's operators.
Backward backward_autograd(c10::DispatchKeySet keys, const Tensor& grad,
                           const OptionalTensor& grad_final_state, const Tensor& x,
                           const Tensor& weight, const OptionalTensor& bias,
                           const OptionalTensor& initial_state, bool silu) {
  const auto differentiated = [](const Tensor& tensor) {
    return (at::GradMode::is_enabled() && tensor.requires_grad()) ||
           tensor._fw_grad(/*level=*/0).defined();
  };
  bool any = differentiated(grad) || differentiated(x) || differentiated(weight);
  for (const OptionalTensor* each : {&grad_final_state, &bias, &initial_state}) {
    any = any || (*each && differentiated(**each));
  }
  if (any) {
    return composite_backward(grad, grad_final_state, x, weight, bias, initial_state, silu);
  }
  at::AutoDispatchBelowADInplaceOrView below;
  return backward_handle().redispatch(keys & c10::after_autograd_keyset, grad, grad_final_state, x,
                                      weight, bias, initial_state, silu);
}

}  // namespace
}  // namespace causal_conv1d

TORCH_LIBRARY(causal_conv1d, m) {
  m.def(
      "forward(Tensor x, Tensor weight, Tensor? bias=None, Tensor? initial_state=None, "
      "bool silu=False) -> (Tensor y, Tensor final_state)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "backward(Tensor grad, Tensor? grad_final_state, Tensor x, Tensor weight, Tensor? bias, "
      "Tensor? initial_state, bool silu) -> (Tensor, Tensor, Tensor, Tensor)",
      {at::Tag::pt2_compliant_tag});
}
TORCH_LIBRARY_IMPL(causal_conv1d, Meta, m) {
  m.impl("forward", &causal_conv1d::forward_meta);
  m.impl("backward", &causal_conv1d::backward_meta);
}
TORCH_LIBRARY_IMPL(causal_conv1d, Autograd, m) {
  m.impl("forward", identity_conv::differentiable<causal_conv1d::ForwardGradient>());
  m.impl("backward", &causal_conv1d::backward_autograd);
}
TORCH_LIBRARY_IMPL(causal_conv1d, CompositeExplicitAutograd, m) {
  m.impl("forward", &causal_conv1d::composite_forward);
  m.impl("backward", &causal_conv1d::composite_backward);
}
