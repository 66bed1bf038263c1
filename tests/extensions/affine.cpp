// A stateful class with a tensor and a number, on the narrow headers.
#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/mul.h>
#include <torch/custom_class.h>
#include <torch/library.h>

namespace {

struct Affine : torch::CustomClassHolder {
  Affine(at::Tensor weight, int64_t shift) : weight_(std::move(weight)), shift_(shift) {}
  at::Tensor forward(const at::Tensor& x) {
    return at::add(at::mul(x, weight_), at::Scalar(shift_));
  }
  void move(int64_t by) { shift_ += by; }
  std::tuple<std::tuple<std::string, at::Tensor>, std::tuple<std::string, int64_t>> flatten() {
    return {{"weight", weight_}, {"shift", shift_}};
  }
  at::Tensor weight_;
  int64_t shift_;
};

}  // namespace

TORCH_LIBRARY(test_affine, m) {
  m.class_<Affine>("Affine")
      .def(torch::init<at::Tensor, int64_t>(), "", {torch::arg("weight"), torch::arg("shift")})
      .def("forward", &Affine::forward, "", {torch::arg("x")})
      .def("move", &Affine::move, "", {torch::arg("by")})
      .def("__obj_flatten__", &Affine::flatten)
      .def_pickle(
          [](const c10::intrusive_ptr<Affine>& self) {
            return std::make_tuple(self->weight_, self->shift_);
          },
          [](std::tuple<at::Tensor, int64_t> state) {
            return c10::make_intrusive<Affine>(std::get<0>(state), std::get<1>(state));
          });
}
