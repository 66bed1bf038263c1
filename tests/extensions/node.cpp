// Operators whose gradients are a backward in C++: while a node may be alive in a graph its library
// must stay.
#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/cos.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/zeros_like.h>
#include <identity_conv/autograd.h>

#include <optional>
#include <tuple>
#include <vector>

namespace {

using at::Tensor;

Tensor copy(const Tensor& x) {
  Tensor y = at::clone(x);
  return y;
}
struct CopyGradient {
  static constexpr auto kOperator = "test_node::copy";
  using Signature = Tensor(const Tensor&);
  static Tensor backward(const Tensor& grad) { return at::clone(grad); }
};

// Tensors, an optional one and a number; no jvp: forward mode differentiates backward.
Tensor wave(const Tensor& x, const Tensor& y, const std::optional<Tensor>& z, double factor) {
  const Tensor product = at::mul(at::mul(at::sin(x), y), at::Scalar(factor));
  return z ? at::mul(product, *z) : product;
}
struct WaveGradient {
  static constexpr auto kOperator = "test_node::wave";
  static constexpr auto kName = "WaveBackward";
  using Signature = Tensor(const Tensor&, const Tensor&, const std::optional<Tensor>&, double);
  static void check(const Tensor& x, const Tensor& y, const std::optional<Tensor>&, double) {
    TORCH_CHECK_VALUE(x.sym_sizes() == y.sym_sizes(), "wave: x and y must have one shape");
  }
  static std::vector<Tensor> backward(const Tensor& grad, const Tensor& x, const Tensor& y,
                                      const std::optional<Tensor>& z, double factor) {
    const Tensor scaled = at::mul(grad, at::Scalar(factor));
    const Tensor weighed = z ? at::mul(scaled, *z) : scaled;
    return {at::mul(at::mul(weighed, y), at::cos(x)), at::mul(weighed, at::sin(x)),
            z ? at::mul(at::mul(scaled, y), at::sin(x)) : Tensor()};
  }
};

// Several outputs, one of which has no gradient.
std::tuple<Tensor, Tensor, Tensor> parts(const Tensor& x) {
  return {at::sin(x), at::mul(x, x), at::zeros_like(x, x.options().dtype(at::kLong))};
}
struct PartsGradient {
  static constexpr auto kOperator = "test_node::parts";
  using Signature = std::tuple<Tensor, Tensor, Tensor>(const Tensor&);
  static Tensor backward(const Tensor& sine, const Tensor& square, const Tensor& none,
                         const Tensor& x) {
    TORCH_CHECK(!none.defined(), "an integer output has no gradient");
    return at::add(at::mul(sine, at::cos(x)), at::mul(at::mul(square, x), at::Scalar(2)));
  }
};

// A list in, a list out.
std::vector<Tensor> squares(at::TensorList xs) {
  std::vector<Tensor> found;
  for (const Tensor& x : xs) found.push_back(at::mul(x, x));
  return found;
}
struct SquaresGradient {
  static constexpr auto kOperator = "test_node::squares";
  using Signature = std::vector<Tensor>(at::TensorList);
  static std::vector<Tensor> backward(const std::vector<Tensor>& grads, at::TensorList xs) {
    std::vector<Tensor> found;
    for (size_t i = 0; i < xs.size(); ++i) {
      found.push_back(at::mul(at::mul(grads[i], xs[i]), at::Scalar(2)));
    }
    return found;
  }
};

// A list of which some are missing.
using Optionals = c10::List<std::optional<Tensor>>;
Tensor product(const Optionals& xs) {
  Tensor found;
  for (size_t i = 0; i < xs.size(); ++i) {
    const std::optional<Tensor> x = xs.get(i);
    if (x) found = found.defined() ? at::mul(found, *x) : at::clone(*x);
  }
  return found;
}
struct ProductGradient {
  static constexpr auto kOperator = "test_node::product";
  using Signature = Tensor(const Optionals&);
  static std::vector<Tensor> backward(const Tensor& grad, const Optionals& xs) {
    std::vector<Tensor> grads(xs.size());
    for (size_t i = 0; i < xs.size(); ++i) {
      if (!std::optional<Tensor>(xs.get(i))) continue;
      grads[i] = grad;
      for (size_t j = 0; j < xs.size(); ++j) {
        const std::optional<Tensor> x = xs.get(j);
        if (x && j != i) grads[i] = at::mul(grads[i], *x);
      }
    }
    return grads;
  }
};

// What can't be right.
Tensor view(const Tensor& x) { return x.view_symint(x.sym_sizes()); }
struct ViewGradient : CopyGradient {
  static constexpr auto kOperator = "test_node::view";
};
Tensor twice_in_place(Tensor x) { return at::clone(x.mul_(at::Scalar(2))); }
struct InPlaceGradient : CopyGradient {
  static constexpr auto kOperator = "test_node::twice_in_place";
  using Signature = Tensor(Tensor);
};
Tensor same(const Tensor& x) { return x; }
struct SameGradient {
  static constexpr auto kOperator = "test_node::same";
  using Signature = Tensor(const Tensor&);
  static Tensor backward(const Tensor& grad) { return grad; }
};
struct FewGradient {
  static constexpr auto kOperator = "test_node::few";
  using Signature = Tensor(const Tensor&, const Tensor&);
  static Tensor backward(const Tensor& grad) { return grad; }
};
Tensor few(const Tensor& x, const Tensor& y) { return at::mul(x, y); }

}  // namespace

TORCH_LIBRARY(test_node, m) {
  m.def("copy(Tensor x) -> Tensor");
  m.def("wave(Tensor x, Tensor y, Tensor? z, float factor) -> Tensor");
  m.def("parts(Tensor x) -> (Tensor, Tensor, Tensor)");
  m.def("squares(Tensor[] xs) -> Tensor[]");
  m.def("product(Tensor?[] xs) -> Tensor");
  m.def("view(Tensor x) -> Tensor");
  m.def("twice_in_place(Tensor(a!) x) -> Tensor");
  m.def("same(Tensor x) -> Tensor");
  m.def("few(Tensor x, Tensor y) -> Tensor");
}
TORCH_LIBRARY_IMPL(test_node, CompositeExplicitAutograd, m) {
  m.impl("copy", &copy);
  m.impl("wave", &wave);
  m.impl("parts", &parts);
  m.impl("squares", &squares);
  m.impl("product", &product);
  m.impl("view", &view);
  m.impl("twice_in_place", &twice_in_place);
  m.impl("same", &same);
  m.impl("few", &few);
}
TORCH_LIBRARY_IMPL(test_node, Autograd, m) {
  m.impl("copy", identity_conv::differentiable<CopyGradient>());
  m.impl("wave", identity_conv::differentiable<WaveGradient>());
  m.impl("parts", identity_conv::differentiable<PartsGradient>());
  m.impl("squares", identity_conv::differentiable<SquaresGradient>());
  m.impl("product", identity_conv::differentiable<ProductGradient>());
  m.impl("view", identity_conv::differentiable<ViewGradient>());
  m.impl("twice_in_place", identity_conv::differentiable<InPlaceGradient>());
  m.impl("same", identity_conv::differentiable<SameGradient>());
  m.impl("few", identity_conv::differentiable<FewGradient>());
}
