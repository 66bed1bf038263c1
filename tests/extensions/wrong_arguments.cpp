// Operators of other arguments than one tensor, each right but for the one bug that stands above
// it. Those of one tensor are in src/mutants.
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <cstring>
#include <tuple>

namespace {

using at::Tensor;

char* bytes(const Tensor& x) { return static_cast<char*>(x.mutable_data_ptr()); }

// Of two tensors.

Tensor sum_right(const Tensor& x, const Tensor& y) { return at::add(x, y); }

// The same memory for both is taken for two that differ.
Tensor sum_same_memory(const Tensor& x, const Tensor& y) {
  const bool same = x.numel() && y.numel() && x.const_data_ptr() == y.const_data_ptr();
  return same ? at::add(x, at::zeros_like(y)) : at::add(x, y);
}

// Where the second is broadcast over rows, it is left out.
Tensor sum_broadcast(const Tensor& x, const Tensor& y) {
  const bool rows = y.dim() == 2 && y.size(0) == 1 && x.dim() == 2 && x.size(0) > 1;
  return rows ? at::add(x, at::zeros_like(x)) : at::add(x, y);
}

// The flag is ignored.
Tensor flag(const Tensor& x, bool /*negative*/) { return at::clone(x); }

// The second of two outputs is a view of the first.
std::tuple<Tensor, Tensor> shared_outputs(const Tensor& x) {
  const Tensor y = at::clone(x);
  return {y, y.view(y.sizes())};
}

// Into memory that is given.

Tensor& twice_right(Tensor& x) { return x.mul_(2); }

// Where cells lie apart, one between them is written.
Tensor& twice_between(Tensor& x) {
  x.mul_(2);
  if (x.dim() == 1 && x.size(0) > 1 && x.stride(0) > 1) {
    bytes(x)[x.element_size()] ^= 1;
  }
  return x;
}

// Three dimensions are left as they were.
Tensor& twice_seldom(Tensor& x) { return x.dim() == 3 ? x : x.mul_(2); }

// The output's strides are ignored.
Tensor& copy_out(const Tensor& x, Tensor& out) {
  const Tensor dense = x.contiguous();
  if (dense.numel()) std::memcpy(bytes(out), dense.const_data_ptr(), dense.nbytes());
  return out;
}

// Subnormals are flushed from now on.
Tensor flushes(const Tensor& x) {
  at::globalContext().setFlushDenormal(true);
  return at::clone(x);
}

}  // namespace

TORCH_LIBRARY(test_wrong_arguments, m) {
  const auto composed = c10::DispatchKey::CompositeImplicitAutograd;
  m.def("sum_right(Tensor x, Tensor y) -> Tensor", torch::dispatch(composed, &sum_right));
  m.def("sum_same_memory(Tensor x, Tensor y) -> Tensor",
        torch::dispatch(composed, &sum_same_memory));
  m.def("sum_broadcast(Tensor x, Tensor y) -> Tensor", torch::dispatch(composed, &sum_broadcast));
  m.def("flag(Tensor x, bool negative=False) -> Tensor", torch::dispatch(composed, &flag));
  m.def("shared_outputs(Tensor x) -> (Tensor, Tensor)", torch::dispatch(composed, &shared_outputs));
  m.def("flushes(Tensor x) -> Tensor", torch::dispatch(composed, &flushes));
  m.def("twice_right(Tensor(a!) x) -> Tensor(a!)");
  m.def("twice_between(Tensor(a!) x) -> Tensor(a!)");
  m.def("twice_seldom(Tensor(a!) x) -> Tensor(a!)");
  m.def("copy_out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)");
}
TORCH_LIBRARY_IMPL(test_wrong_arguments, CPU, m) {
  m.impl("twice_right", &twice_right);
  m.impl("twice_between", &twice_between);
  m.impl("twice_seldom", &twice_seldom);
  m.impl("copy_out", &copy_out);
}
