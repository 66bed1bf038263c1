// Wrong fakes and wrong derivatives of a right kernel.
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>

#include "mutants.h"

namespace mutants {
namespace {

// The fake says float32.
Tensor fake_dtype(const Tensor& x) { return at::empty_like(x, x.options().dtype(at::kFloat)); }

// The fake of float16 says float32.
Tensor fake_dtype_half(const Tensor& x) {
  return x.scalar_type() == at::kHalf ? fake_dtype(x) : like(x);
}

// The fake is always row-major.
Tensor fake_row_major(const Tensor& x) { return at::empty_symint(x.sym_sizes(), x.options()); }

// The fake has one dimension.
Tensor fake_flat(const Tensor& x) { return at::empty_symint({x.sym_numel()}, x.options()); }

// The fake has a row more than there is.
Tensor fake_row_more(const Tensor& x) {
  if (x.dim() == 0) return like(x);
  auto sizes = x.sym_sizes().vec();
  sizes[0] = sizes[0] + 1;
  return at::empty_symint(sizes, x.options());
}

// The fake fixes sizes.
Tensor fake_fixed(const Tensor& x) {
  for (const auto& size : x.sym_sizes()) size.guard_int(__FILE__, __LINE__);
  return like(x);
}

// The fake shares its input's memory.
Tensor fake_alias(const Tensor& x) { return x.view_symint(x.sym_sizes()); }

template <class Function>
variable_list one(const variable_list& grads, Function&& function) {
  return {grads[0].defined() ? function(grads[0]) : Tensor()};
}

Tensor twice(const Tensor& x) { return at::mul(x, at::Scalar(2)); }

// The gradient is twice the right one.
struct Twice : Node {
  variable_list apply(variable_list&& grads) override { return one(grads, &twice); }
};

// The gradient is wrong where it comes in expanded.
struct Expanded : Node {
  variable_list apply(variable_list&& grads) override {
    return one(grads, [](const Tensor& grad) {
      bool expanded = false;
      for (int64_t d = 0; d < grad.dim(); ++d) expanded |= grad.size(d) > 1 && grad.stride(d) == 0;
      return expanded ? twice(grad) : at::clone(grad);
    });
  }
};

// The gradient's own strides are ignored.
struct Dense : Node {
  variable_list apply(variable_list&& grads) override {
    return one(grads, [](const Tensor& grad) {
      if (grad.is_contiguous() || grad.numel() == 0) return at::clone(grad);
      return at::clone(grad.as_strided(grad.sizes(), grad.contiguous().strides().vec()));
    });
  }
};

// The gradient of a tensor of no dimension is wrong.
struct Scalar : Node {
  variable_list apply(variable_list&& grads) override {
    return one(grads,
               [](const Tensor& grad) { return grad.dim() ? at::clone(grad) : twice(grad); });
  }
};

// The gradient of bfloat16 is wrong.
struct Bfloat16 : Node {
  variable_list apply(variable_list&& grads) override {
    return one(grads, [](const Tensor& grad) {
      return grad.scalar_type() == at::kBFloat16 ? twice(grad) : at::clone(grad);
    });
  }
};

// The gradient of a complex number is conjugated.
struct Conjugated : Node {
  variable_list apply(variable_list&& grads) override {
    return one(grads, [](const Tensor& grad) { return at::clone(grad.conj()); });
  }
};

// An undefined gradient is taken for one.
struct Undefined : Node {
  variable_list apply(variable_list&& grads) override { return {at::clone(grads[0])}; }
};

// The gradient has no gradient.
struct Once : Node {
  variable_list apply(variable_list&& grads) override {
    return one(grads, [](const Tensor& grad) { return at::clone(grad.detach()); });
  }
};

// A second backward of the same graph is wrong.
struct Again : Node {
  variable_list apply(variable_list&& grads) override {
    const bool again = calls++ > 0;
    return one(grads, [&](const Tensor& grad) { return again ? twice(grad) : at::clone(grad); });
  }
  int calls = 0;
};

// The incoming gradient is zero afterwards.
struct Zeroing : Node {
  variable_list apply(variable_list&& grads) override {
    return one(grads, [](const Tensor& grad) {
      Tensor copy = at::clone(grad);
      if (grad.numel() && grad.is_contiguous() && grad.has_storage()) {
        std::memset(bytes(grad), 0, grad.nbytes());
      }
      return copy;
    });
  }
};

}  // namespace
}  // namespace mutants

TORCH_LIBRARY_FRAGMENT(identity_conv_mutants, m) {
  using namespace mutants;
  define(m, {
                {"fake_missing", &copied, nullptr},
                {"fake_dtype", &copied, &fake_dtype},
                {"fake_dtype_half", &copied, &fake_dtype_half},
                {"fake_row_major", &copied, &fake_row_major},
                {"fake_flat", &copied, &fake_flat},
                {"fake_row_more", &copied, &fake_row_more},
                {"fake_fixed", &copied, &fake_fixed},
                {"fake_alias", &copied, &fake_alias},
                {"grad_missing", &copied, &like, nullptr},
                {"grad_twice", &copied, &like, &gradient<Twice>},
                {"grad_expanded", &copied, &like, &gradient<Expanded>},
                {"grad_dense", &copied, &like, &gradient<Dense>},
                {"grad_scalar", &copied, &like, &gradient<Scalar>},
                {"grad_bfloat16", &copied, &like, &gradient<Bfloat16>},
                {"grad_conjugated", &copied, &like, &gradient<Conjugated>},
                {"grad_undefined", &copied, &like, &gradient<Undefined>},
                {"grad_once", &copied, &like, &gradient<Once>},
                {"grad_again", &copied, &like, &gradient<Again>},
                {"grad_zeroing", &copied, &like, &gradient<Zeroing>},
                {"tangent_lost", &copied, &like, &gradient<Right, Tangent::kLost>},
                {"tangent_zero", &copied, &like, &gradient<Right, Tangent::kZero>},
            });
}
