#pragma once

// A C++ autograd node for an operator's Autograd kernel, the way torch's own generated code sets
// one up: with `set_history`, and `_set_fw_grad` for forward mode, reverse mode, higher orders and
// torch.func follow (see identity_conv_op.cpp).

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <memory>
#include <type_traits>

namespace identity_conv {

// A new node of type T (derived from torch::autograd::Node) with edges to the inputs that require
// grad, or null where none does. Seen in torch 2.11, which holds nodes by shared_ptr, and in 2.13
// and 2.14, which hold them by intrusive_ptr.
template <class T, class... Inputs>
auto make_node(const Inputs&... inputs) {
  using torch::autograd::Node;
  constexpr bool kIntrusive = std::is_base_of_v<c10::intrusive_ptr_target, Node>;
  auto create = [] {
    if constexpr (kIntrusive) {
      return c10::make_intrusive<T>();
    } else {
      // Unqualified: the deleter exists only where this branch is taken.
      return std::shared_ptr<T>(new T(), [](T* node) { deleteNode(node); });
    }
  };
  decltype(create()) node;
  if (torch::autograd::compute_requires_grad(inputs...)) {
    node = create();
    node->set_next_edges(torch::autograd::collect_next_edges(inputs...));
  }
  return node;
}

}  // namespace identity_conv
