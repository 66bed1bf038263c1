// Kernels of a tensor and a number, a truth value or a list of integers, each right but for some of
// these values, and right ones beside them.
#include <ATen/ops/clamp.h>
#include <ATen/ops/expand_copy.h>
#include <ATen/ops/flip.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/roll.h>
#include <ATen/ops/sum.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "identity_conv/autograd.h"
#include "mutants.h"

namespace mutants {
namespace {

// --- scaled: x * factor ---

Tensor scaled(const Tensor& x, double factor) { return at::mul(x, at::Scalar(factor)); }

// The factor's sign is ignored.
Tensor scaled_unsigned(const Tensor& x, double factor) { return scaled(x, std::abs(factor)); }

// The factor's fraction is lost.
Tensor scaled_whole(const Tensor& x, double factor) { return scaled(x, std::trunc(factor)); }

// The factor is kept as a float32.
Tensor scaled_by_float32(const Tensor& x, double factor) {
  return scaled(x, static_cast<float>(factor));
}

// A factor of 0 gives 0, of infinity and NaN too.
Tensor scaled_by_zero(const Tensor& x, double factor) {
  Tensor y = scaled(x, factor);
  return factor == 0 ? at::zeros_like(y) : y;
}

// A factor of infinity is taken for the largest number.
Tensor scaled_by_infinity(const Tensor& x, double factor) {
  constexpr double kLargest = std::numeric_limits<float>::max();
  return scaled(x, std::isinf(factor) ? std::copysign(kLargest, factor) : factor);
}

template <double (*kNumber)(double)>
struct ScaledGradient {
  using Signature = Tensor(const Tensor&, double);
  static Tensor backward(const Tensor& grad, const Tensor&, double factor) {
    return scaled(grad, kNumber(factor));
  }
};

double one(double) { return 1; }
double positive(double factor) { return std::abs(factor); }

// The gradient forgets the factor.
struct Forgotten : ScaledGradient<one> {
  static constexpr auto kOperator = "identity_conv_mutants::scaled_gradient";
};

// The gradient ignores the factor's sign.
struct Unsigned : ScaledGradient<positive> {
  static constexpr auto kOperator = "identity_conv_mutants::scaled_gradient_unsigned";
};

// --- clipped: x between two bounds, the upper one where the lower is above it ---

Tensor clipped(const Tensor& x, double low, double high) {
  return at::clamp(x, at::Scalar(low), at::Scalar(high));
}

// Bounds in the wrong order are swapped.
Tensor clipped_swapped(const Tensor& x, double low, double high) {
  return low > high ? clipped(x, high, low) : clipped(x, low, high);
}

// A bound of NaN is taken for none.
Tensor clipped_nan(const Tensor& x, double low, double high) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  return clipped(x, std::isnan(low) ? -kInfinity : low, std::isnan(high) ? kInfinity : high);
}

// --- rolled: each element `by` places on, the last ones first ---

Tensor rolled(const Tensor& x, int64_t by) { return at::roll(x, by); }

// It is never rolled backwards.
Tensor rolled_forward(const Tensor& x, int64_t by) { return rolled(x, std::abs(by)); }

// The places are counted in 32 bits.
Tensor rolled_32(const Tensor& x, int64_t by) { return rolled(x, static_cast<int32_t>(by)); }

// --- flipped: some dimensions turned round ---

Tensor flipped(const Tensor& x, at::IntArrayRef dims) { return at::flip(x, dims); }

// Of several dimensions the first alone is turned.
Tensor flipped_first(const Tensor& x, at::IntArrayRef dims) {
  return flipped(x, dims.slice(0, std::min<size_t>(dims.size(), 1)));
}

// A dimension counted from the end isn't turned.
Tensor flipped_negative(const Tensor& x, at::IntArrayRef dims) {
  std::vector<int64_t> kept;
  for (const int64_t dim : dims) {
    if (dim >= 0) kept.push_back(dim);
  }
  return flipped(x, kept);
}

// --- summed: over the last dimension, which is kept on request ---

Tensor summed(const Tensor& x, bool keepdim) { return at::sum(x, {-1}, keepdim); }

// The fake never keeps it.
Tensor summed_fake(const Tensor& x, bool) { return summed(x, false); }

struct SummedGradient {
  using Signature = Tensor(const Tensor&, bool);
  static Tensor backward(const Tensor& grad, const Tensor& x, bool keepdim) {
    const Tensor column = keepdim || x.dim() == 0 ? grad : grad.unsqueeze(-1);
    return at::expand_copy_symint(column, x.sym_sizes());
  }
};

struct Summed : SummedGradient {
  static constexpr auto kOperator = "identity_conv_mutants::summed";
};
struct SummedFake : SummedGradient {
  static constexpr auto kOperator = "identity_conv_mutants::summed_fake";
};

// An operator with a kernel, a fake and a gradient.
template <class Gradient, class Kernel>
void define_each(torch::Library& m, const char* schema, Kernel* kernel, Kernel* fake) {
  const std::string name(schema, std::strchr(schema, '('));
  m.def(schema);
  m.impl(name.c_str(), torch::dispatch(c10::DispatchKey::CPU, kernel));
  m.impl(name.c_str(), torch::dispatch(c10::DispatchKey::Meta, fake));
  m.impl(name.c_str(),
         torch::dispatch(c10::DispatchKey::Autograd, identity_conv::differentiable<Gradient>()));
}

// An operator made of torch's: torch derives the rest.
template <class Kernel>
void compose(torch::Library& m, const char* schema, Kernel* kernel) {
  m.def(schema, torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd, kernel));
}

}  // namespace
}  // namespace mutants

TORCH_LIBRARY_FRAGMENT(identity_conv_mutants, m) {
  using namespace mutants;
  compose(m, "scaled_unsigned(Tensor x, float factor) -> Tensor", &scaled_unsigned);
  compose(m, "scaled_whole(Tensor x, float factor) -> Tensor", &scaled_whole);
  compose(m, "scaled_by_float32(Tensor x, float factor) -> Tensor", &scaled_by_float32);
  compose(m, "scaled_by_zero(Tensor x, float factor) -> Tensor", &scaled_by_zero);
  compose(m, "scaled_by_infinity(Tensor x, float factor) -> Tensor", &scaled_by_infinity);
  define_each<Forgotten>(m, "scaled_gradient(Tensor x, float factor) -> Tensor", &scaled, &scaled);
  define_each<Unsigned>(m, "scaled_gradient_unsigned(Tensor x, float factor) -> Tensor", &scaled,
                        &scaled);
  compose(m, "clipped(Tensor x, float low, float high) -> Tensor", &clipped);
  compose(m, "clipped_swapped(Tensor x, float low, float high) -> Tensor", &clipped_swapped);
  compose(m, "clipped_nan(Tensor x, float low, float high) -> Tensor", &clipped_nan);
  compose(m, "rolled(Tensor x, int by) -> Tensor", &rolled);
  compose(m, "rolled_forward(Tensor x, int by) -> Tensor", &rolled_forward);
  compose(m, "rolled_32(Tensor x, int by) -> Tensor", &rolled_32);
  compose(m, "flipped(Tensor x, int[] dims) -> Tensor", &flipped);
  compose(m, "flipped_first(Tensor x, int[] dims) -> Tensor", &flipped_first);
  compose(m, "flipped_negative(Tensor x, int[] dims) -> Tensor", &flipped_negative);
  define_each<Summed>(m, "summed(Tensor x, bool keepdim) -> Tensor", &summed, &summed);
  define_each<SummedFake>(m, "summed_fake(Tensor x, bool keepdim) -> Tensor", &summed,
                          &summed_fake);
}
