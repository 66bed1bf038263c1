// muladd::muladd(Tensor a, Tensor b, float c) -> Tensor: y = a * b + c, where a and b broadcast.
//
// float32, float64, float16 and bfloat16, both tensors alike. Computed in float where the dtype is
// narrower, and rounded once.
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <identity_conv/autograd.h>
#include <identity_conv/checks.h>
#include <torch/library.h>
#ifdef IDENTITY_CONV_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// In muladd.cu, for float, double, __half and __nv_bfloat16.
template <class T>
cudaError_t launch_muladd(const T* a, const T* b, T* y, int64_t count, double c, cudaStream_t);
#endif

namespace {

void check(const at::Tensor& a, const at::Tensor& b) {
  identity_conv::check_strided(a, "muladd", "a");
  identity_conv::check_strided(b, "muladd", "b");
  const auto dtype = a.scalar_type();
  TORCH_CHECK_VALUE(
      dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16,
      "muladd: a must be float32, float64, float16 or bfloat16, got ", dtype);
  TORCH_CHECK_VALUE(b.scalar_type() == dtype, "muladd: b must have the dtype of a, ", dtype,
                    ", got ", b.scalar_type());
  TORCH_CHECK_VALUE(b.device() == a.device(), "muladd: b must be on the device of a, ", a.device(),
                    ", got ", b.device());
}

// y is made by it, in the order of memory that torch's own operators choose.
at::TensorIterator iterator(const at::Tensor& a, const at::Tensor& b) {
  return at::TensorIteratorConfig()
      .add_owned_output(at::Tensor())
      .add_const_input(a)
      .add_const_input(b)
      .build();
}

at::Tensor muladd_cpu(const at::Tensor& a, const at::Tensor& b, double c) {
  check(a, b);
  at::TensorIterator iter = iterator(a, b);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, iter.dtype(), "muladd", [&] {
    using wide_t = at::opmath_type<scalar_t>;
    const auto plus = static_cast<wide_t>(c);
    iter.for_each([&](char** data, const int64_t* strides, int64_t count) {
      for (int64_t i = 0; i < count; ++i) {
        const auto x =
            static_cast<wide_t>(*reinterpret_cast<const scalar_t*>(data[1] + i * strides[1]));
        const auto y =
            static_cast<wide_t>(*reinterpret_cast<const scalar_t*>(data[2] + i * strides[2]));
        *reinterpret_cast<scalar_t*>(data[0] + i * strides[0]) =
            static_cast<scalar_t>(x * y + plus);
      }
    });
  });
  return iter.output();
}

#ifdef IDENTITY_CONV_CUDA
template <class T>
struct OnDevice {
  using type = T;
};
template <>
struct OnDevice<at::Half> {
  using type = __half;
};
template <>
struct OnDevice<at::BFloat16> {
  using type = __nv_bfloat16;
};

at::Tensor muladd_cuda(const at::Tensor& a, const at::Tensor& b, double c) {
  check(a, b);
  const c10::cuda::CUDAGuard guard(a.device());
  const at::Tensor y = iterator(a, b).output();
  if (y.numel() == 0) return y;
  const auto in_order_of_y = [&](const at::Tensor& x) {
    return x.sizes() == y.sizes() && x.strides() == y.strides() ? x : at::empty_like(y).copy_(x);
  };
  const at::Tensor rows[] = {in_order_of_y(a), in_order_of_y(b)};
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, y.scalar_type(), "muladd", [&] {
    using T = typename OnDevice<scalar_t>::type;
    C10_CUDA_CHECK(launch_muladd(static_cast<const T*>(rows[0].const_data_ptr()),
                                 static_cast<const T*>(rows[1].const_data_ptr()),
                                 static_cast<T*>(y.mutable_data_ptr()), y.numel(), c,
                                 c10::cuda::getCurrentCUDAStream()));
  });
  return y;
}
#endif

struct Gradient {
  static constexpr auto kOperator = "muladd::muladd";
  using Signature = at::Tensor(const at::Tensor&, const at::Tensor&, double);
  // Here, before a device is chosen, a sparse tensor comes by too.
  static void check(const at::Tensor& a, const at::Tensor& b, double) { ::check(a, b); }
  static std::tuple<at::Tensor, at::Tensor> backward(const at::Tensor& grad, const at::Tensor& a,
                                                     const at::Tensor& b, double) {
    return {at::mul(grad, b).sum_to_size_symint(a.sym_sizes()),
            at::mul(grad, a).sum_to_size_symint(b.sym_sizes())};
  }
};

}  // namespace

TORCH_LIBRARY(muladd, m) { m.def("muladd(Tensor a, Tensor b, float c) -> Tensor"); }
TORCH_LIBRARY_IMPL(muladd, CPU, m) { m.impl("muladd", &muladd_cpu); }
#ifdef IDENTITY_CONV_CUDA
TORCH_LIBRARY_IMPL(muladd, CUDA, m) { m.impl("muladd", &muladd_cuda); }
#endif
TORCH_LIBRARY_IMPL(muladd, Autograd, m) {
  m.impl("muladd", identity_conv::differentiable<Gradient>());
}
