// Operators with a kernel for the CPU alone.
#include <ATen/core/Tensor.h>
#include <ATen/ops/mul.h>
#include <identity_conv/output_like.h>

namespace {

at::Tensor times(const at::Tensor& x, double factor) { return at::mul(x, at::Scalar(factor)); }
at::Tensor twice(const at::Tensor& x) { return times(x, 2); }
at::Tensor thrice(const at::Tensor& x) { return times(x, 3); }
at::Tensor half(const at::Tensor& x) { return times(x, 0.5); }
std::tuple<at::Tensor, at::Tensor> both(const at::Tensor& x) { return {twice(x), thrice(x)}; }

}  // namespace

TORCH_LIBRARY(test_unfaked, m) {
  m.def("twice(Tensor x) -> Tensor");
  m.def("thrice(Tensor x) -> Tensor");
  m.def("half(Tensor x) -> Tensor");
  m.def("both(Tensor x) -> (Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(test_unfaked, CPU, m) {
  m.impl("twice", &twice);
  m.impl("thrice", &thrice);
  m.impl("half", &half);
  m.impl("both", &both);
}
TORCH_LIBRARY_IMPL(test_unfaked, Meta, m) { identity_conv::output_like(m, "thrice", "x"); }
