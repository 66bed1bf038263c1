// An operator with a C++ autograd node: while one may be alive in a graph its library must stay.
#include <ATen/core/Tensor.h>
#include <ATen/ops/clone.h>
#include <torch/library.h>

#include "identity_conv/autograd.h"

namespace {

struct CopyBackward : torch::autograd::Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    return {grads[0].defined() ? at::clone(grads[0]) : at::Tensor()};
  }
};

at::Tensor copy(const at::Tensor& x) {
  auto node = identity_conv::make_node<CopyBackward>(x);
  at::Tensor y;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    y = at::clone(x);
  }
  if (node) torch::autograd::set_history(y, node);
  return y;
}

}  // namespace

TORCH_LIBRARY(test_node, m) { m.def("copy(Tensor x) -> Tensor"); }
TORCH_LIBRARY_IMPL(test_node, CompositeImplicitAutograd, m) { m.impl("copy", &copy); }
