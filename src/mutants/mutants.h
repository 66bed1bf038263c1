#pragma once

// What the mutants have in common: operators `name(Tensor x) -> Tensor` that copy their input, each
// right but for the one bug that stands above it. The table of them all, with a witness for each,
// is identity_conv/testing/mutants/table.py.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

namespace mutants {

using at::Tensor;
using torch::autograd::Node;
using torch::autograd::variable_list;

inline char* bytes(const Tensor& x) { return static_cast<char*>(x.mutable_data_ptr()); }
inline const char* const_bytes(const Tensor& x) {
  return static_cast<const char*>(x.const_data_ptr());
}

// A right copy, in the strides of torch.empty_like.
inline Tensor copied(const Tensor& x) {
  at::AutoDispatchBelowADInplaceOrView below;
  return at::empty_like(x).copy_(x);
}

// A right copy by a kernel that takes x as row-major bytes and fills y, more than none.
template <class Kernel>
Tensor by_bytes(const Tensor& x, Kernel&& kernel) {
  at::AutoDispatchBelowADInplaceOrView below;
  const Tensor from = x.contiguous();
  Tensor to = at::empty_like(from);
  if (from.numel()) kernel(const_bytes(from), bytes(to), from.nbytes());
  return x.is_contiguous() ? to : at::empty_like(x).copy_(to);
}

// A right copy, but with one bit of the element `at` changed (from the end if negative), in
// row-major order, where `wrong` holds and there is such an element.
inline Tensor spoilt(const Tensor& x, bool wrong, int64_t at = 0) {
  Tensor y = copied(x);
  const int64_t index = at < 0 ? y.numel() + at : at;
  if (!wrong || index < 0 || index >= y.numel()) return y;
  const int64_t width = y.element_size();
  return at::empty_like(y).copy_(by_bytes(y, [&](const char* from, char* to, size_t size) {
    std::memcpy(to, from, size);
    to[index * width] ^= 1;
  }));
}

// The right fake.
inline Tensor like(const Tensor& x) { return at::empty_like(x); }

// The right backward.
struct Right : Node {
  variable_list apply(variable_list&& grads) override {
    return {grads[0].defined() ? at::clone(grads[0]) : Tensor()};
  }
};

enum class Tangent { kRight, kLost, kZero };

// As torch's own generated code does, in torch 2.11 (shared_ptr) and later (intrusive_ptr).
template <class Backward>
auto make_node(const Tensor& x) {
  auto create = [] {
    if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, Node>) {
      return c10::make_intrusive<Backward>();
    } else {
      return std::shared_ptr<Backward>(new Backward(), [](Backward* node) { deleteNode(node); });
    }
  };
  decltype(create()) node;
  if (torch::autograd::compute_requires_grad(x)) {
    node = create();
    node->set_next_edges(torch::autograd::collect_next_edges(x));
  }
  return node;
}

// An Autograd kernel for any of the operators: the dispatcher says for which.
template <class Backward, Tangent kTangent>
void differentiate(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                   torch::jit::Stack* stack) {
  const Tensor x = stack->back().toTensor();
  auto node = make_node<Backward>(x);
  Tensor y;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    y = op.typed<Tensor(const Tensor&)>().redispatch(keys & c10::after_autograd_keyset, x);
  }
  if (node) torch::autograd::set_history(y, node);
  const Tensor& tangent = x._fw_grad(/*level=*/0);
  if (kTangent != Tangent::kLost && tangent.defined()) {
    y._set_fw_grad(kTangent == Tangent::kZero ? at::zeros_like(tangent) : at::clone(tangent),
                   /*level=*/0, /*is_inplace_op=*/false);
  }
  stack->back() = y;
}

template <class Backward, Tangent kTangent = Tangent::kRight>
torch::CppFunction gradient() {
  return torch::CppFunction::makeFromBoxedFunction<&differentiate<Backward, kTangent>>();
}

struct Operator {
  const char* name;
  Tensor (*kernel)(const Tensor&);
  Tensor (*fake)(const Tensor&) = &like;                         // none: no Meta kernel
  torch::CppFunction (*gradient)() = &mutants::gradient<Right>;  // none: no Autograd kernel
};

inline void define(torch::Library& m, const std::vector<Operator>& operators,
                   c10::DispatchKey device = c10::DispatchKey::CPU) {
  for (const Operator& op : operators) {
    m.def((std::string(op.name) + "(Tensor x) -> Tensor").c_str());
    m.impl(op.name, torch::dispatch(device, op.kernel));
    if (op.fake) m.impl(op.name, torch::dispatch(c10::DispatchKey::Meta, op.fake));
    if (op.gradient) m.impl(op.name, torch::dispatch(c10::DispatchKey::Autograd, op.gradient()));
  }
}

}  // namespace mutants
