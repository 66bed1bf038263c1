// causal_conv1d::CausalConv1d(Tensor weight, Tensor? bias=None, bool silu=False): the convolution
// as an object that holds its parameters.

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "causal_conv1d_op.h"
#include "identity_conv/state.h"

namespace causal_conv1d {
namespace {

class CausalConv1d : public torch::CustomClassHolder {
 public:
  static auto state() {
    return identity_conv::state(IDENTITY_CONV_FIELD(CausalConv1d, weight),
                                IDENTITY_CONV_FIELD(CausalConv1d, bias).or_default(std::nullopt),
                                IDENTITY_CONV_FIELD(CausalConv1d, silu).or_default(false));
  }

  // y alone: torch (seen in 2.13) can't compile a method that returns several tensors.
  at::Tensor forward(const at::Tensor& x, const OptionalTensor& initial_state) const {
    return std::get<0>(forward_with_state(x, initial_state));
  }

  // y and the final state.
  Forward forward_with_state(const at::Tensor& x, const OptionalTensor& initial_state) const {
    return causal_conv1d::forward(x, weight, bias, initial_state, silu);
  }

 private:
  at::Tensor weight;
  OptionalTensor bias;
  bool silu = false;
};

}  // namespace
}  // namespace causal_conv1d

TORCH_LIBRARY_FRAGMENT(causal_conv1d, m) {
  identity_conv::class_<causal_conv1d::CausalConv1d>(m, "CausalConv1d")
      .def("forward", &causal_conv1d::CausalConv1d::forward, "",
           {torch::arg("x"), torch::arg("initial_state") = c10::IValue()})
      .def("forward_with_state", &causal_conv1d::CausalConv1d::forward_with_state, "",
           {torch::arg("x"), torch::arg("initial_state") = c10::IValue()});
}
