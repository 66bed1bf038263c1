// Right kernels of various sorts, which a checker must let pass.
#include <ATen/Parallel.h>
#include <ATen/ops/add.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/sum.h>

#include <tuple>

#include "identity_conv/autograd.h"
#include "mutants.h"

namespace mutants {
namespace {

// By bytes, by several threads.
Tensor copied_by_threads(const Tensor& x) {
  const int64_t width = x.element_size();
  return by_bytes(x, [&](const char* from, char* to, size_t size) {
    at::parallel_for(0, size / width, 4096, [&](int64_t begin, int64_t end) {
      std::memcpy(to + begin * width, from + begin * width, (end - begin) * width);
    });
  });
}

// Element by element, wherever strides say that it lies.
Tensor copied_by_strides(const Tensor& x) {
  const int64_t width = x.element_size();
  Tensor y = at::empty_like(x);
  const int64_t rank = x.dim();
  std::vector<int64_t> index(rank);
  for (int64_t i = 0; i < x.numel(); ++i) {
    int64_t from = 0;
    int64_t to = 0;
    for (int64_t d = 0; d < rank; ++d) {
      from += index[d] * x.stride(d);
      to += index[d] * y.stride(d);
    }
    std::memcpy(bytes(y) + to * width, const_bytes(x) + from * width, width);
    for (int64_t d = rank - 1; d >= 0 && ++index[d] == x.size(d); --d) index[d] = 0;
  }
  return y;
}

// Made of torch's operators, with a gradient of its own.
Tensor scaled(const Tensor& x, double factor) { return at::mul(x, at::Scalar(factor)); }

struct ScaledGradient {
  static constexpr auto kOperator = "identity_conv_mutants::scaled";
  using Signature = Tensor(const Tensor&, double);
  static Tensor backward(const Tensor& grad, const Tensor&, double factor) {
    return at::mul(grad, at::Scalar(factor));
  }
};

// Of two tensors and an optional one, made of torch's operators: torch derives the rest.
Tensor sum_of(const Tensor& x, const Tensor& y, const std::optional<Tensor>& z) {
  const Tensor both = at::add(x, y);
  return z ? at::add(both, *z) : both;
}

// Two outputs.
std::tuple<Tensor, Tensor> with_negative(const Tensor& x) { return {at::clone(x), at::neg(x)}; }

// A sum over the last dimension.
Tensor row_sums(const Tensor& x) { return at::sum(x, {-1}); }

}  // namespace
}  // namespace mutants

TORCH_LIBRARY_FRAGMENT(identity_conv_mutants, m) {
  using namespace mutants;
  constexpr auto kComposite = c10::DispatchKey::CompositeImplicitAutograd;
  define(m, {
                {"copied", &copied},
                {"copied_by_threads", &copied_by_threads},
                {"copied_by_strides", &copied_by_strides},
            });
  m.def("composed(Tensor x) -> Tensor",
        torch::dispatch(kComposite, [](const Tensor& x) { return at::empty_like(x).copy_(x); }));
  m.def("scaled(Tensor x, float factor) -> Tensor");
  m.impl("scaled", torch::dispatch(c10::DispatchKey::CPU, &scaled));
  m.impl("scaled", torch::dispatch(c10::DispatchKey::Meta, &scaled));
  m.impl("scaled", torch::dispatch(c10::DispatchKey::Autograd,
                                   identity_conv::differentiable<ScaledGradient>()));
  m.def("sum_of(Tensor x, Tensor y, Tensor? z=None) -> Tensor",
        torch::dispatch(kComposite, &sum_of));
  m.def("with_negative(Tensor x) -> (Tensor, Tensor)", torch::dispatch(kComposite, &with_negative));
  m.def("row_sums(Tensor x) -> Tensor", torch::dispatch(kComposite, &row_sums));
}
