// An author's operator, as one writes it first: several outputs, an optional tensor, a list.
#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <vector>

namespace {

constexpr double kFactor = 2.0;

at::Tensor scale(const at::Tensor& x, const std::optional<at::Tensor>& shift) {
  const at::Tensor y = at::mul(x, at::Scalar(kFactor));
  return shift ? at::add(y, *shift) : y;
}

std::tuple<at::Tensor, at::Tensor> both(const at::Tensor& x) {
  return {scale(x, {}), at::mul(x, x)};
}

std::vector<at::Tensor> each(at::TensorList xs) {
  std::vector<at::Tensor> scaled;
  for (const at::Tensor& x : xs) scaled.push_back(scale(x, {}));
  return scaled;
}

}  // namespace

TORCH_LIBRARY(test_scale, m) {
  m.def("scale(Tensor x, Tensor? shift=None) -> Tensor");
  m.def("both(Tensor x) -> (Tensor, Tensor)");
  m.def("each(Tensor[] xs) -> Tensor[]");
}
TORCH_LIBRARY_IMPL(test_scale, CompositeExplicitAutograd, m) {
  m.impl("scale", &scale);
  m.impl("both", &both);
  m.impl("each", &each);
}
