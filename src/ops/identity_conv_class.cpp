// my_ops::IdentityConvClass(int channels): the identity convolution as an object with state.

#include "identity_conv/checks.h"
#include "identity_conv/state.h"
#include "identity_conv_op.h"

namespace {

class IdentityConvClass : public torch::CustomClassHolder {
 public:
  static auto state() {
    return identity_conv::state(IDENTITY_CONV_FIELD(IdentityConvClass, channels));
  }
  void check() const {
    TORCH_CHECK_VALUE(channels > 0, "IdentityConvClass: channels must be at least 1, got ",
                      channels);
  }
  at::Tensor forward(const at::Tensor& x) const {
    identity_conv::check_strided(x, "IdentityConvClass.forward", "x");
    // Symbolic sizes: under export a fake tensor arrives here, and what it leaves free stays so.
    TORCH_CHECK_VALUE(x.dim() == 4 && x.sym_size(1) == channels,
                      "IdentityConvClass.forward: x must have shape (N, ", channels,
                      ", H, W), got ", x.sym_sizes());
    return my_ops::identity_conv_op(x);
  }

 private:
  int64_t channels = 0;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(my_ops, m) {
  identity_conv::class_<IdentityConvClass>(m, "IdentityConvClass")
      .def("forward", &IdentityConvClass::forward, "", {torch::arg("x")});
}
