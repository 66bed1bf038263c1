// A gradient of tensors that it would not find: it doesn't compile, and says why.
#include <identity_conv/autograd.h>

struct Lost {
  static constexpr auto kOperator = "test_bad_gradient::sum";
  using Signature = at::Tensor(const c10::List<at::Tensor>&);
  static at::Tensor backward(const at::Tensor& grad) { return grad; }
};
TORCH_LIBRARY_IMPL(test_bad_gradient, Autograd, m) {
  m.impl("sum", identity_conv::differentiable<Lost>());
}
