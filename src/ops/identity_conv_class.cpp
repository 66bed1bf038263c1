// my_ops::IdentityConvClass(int channels): the identity convolution as an object with state.

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <string>
#include <tuple>

#include "identity_conv/checks.h"
#include "identity_conv_op.h"

namespace my_ops {
namespace {

class IdentityConvClass : public torch::CustomClassHolder {
 public:
  explicit IdentityConvClass(int64_t channels) : channels_(channels) {
    TORCH_CHECK_VALUE(channels > 0, "IdentityConvClass: channels must be at least 1, got ",
                      channels);
  }

  int64_t channels() const { return channels_; }

  at::Tensor forward(const at::Tensor& x) const {
    identity_conv::check_strided(x, "IdentityConvClass.forward", "x");
    // Symbolic sizes: under export a fake tensor arrives here, and the sizes it leaves free stay
    // so.
    TORCH_CHECK_VALUE(x.dim() == 4 && x.sym_size(1) == channels_,
                      "IdentityConvClass.forward: x must have shape (N, ", channels_,
                      ", H, W), got ", x.sym_sizes());
    return identity_conv_op(x);
  }

  std::tuple<std::tuple<std::string, int64_t>> obj_flatten() const {
    return {{"channels", channels_}};
  }

 private:
  int64_t channels_;
};

}  // namespace
}  // namespace my_ops

TORCH_LIBRARY_FRAGMENT(my_ops, m) {
  using my_ops::IdentityConvClass;
  using Self = c10::intrusive_ptr<IdentityConvClass>;
  m.class_<IdentityConvClass>("IdentityConvClass")
      .def(torch::init<int64_t>(), "", {torch::arg("channels")})
      .def_property("channels", &IdentityConvClass::channels)
      .def("forward", &IdentityConvClass::forward, "", {torch::arg("x")})
      .def("__obj_flatten__", &IdentityConvClass::obj_flatten)
      .def("__eq__", [](const Self& self,
                        const Self& other) { return self->channels() == other->channels(); })
      .def("__ne__", [](const Self& self,
                        const Self& other) { return self->channels() != other->channels(); })
      .def_pickle(
          [](const Self& self) { return self->channels(); },
          [](int64_t channels) { return c10::make_intrusive<IdentityConvClass>(channels); });
}
