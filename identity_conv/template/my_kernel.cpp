// my_kernel::my_kernel(Tensor x, float factor) -> Tensor: y = factor * x.
//
// This is the file to make yours: the schema at the end, the kernel, and the reference that the
// test compares it with.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
// <backward>
#include <identity_conv/autograd.h>
// </backward>
#include <identity_conv/checks.h>
#include <identity_conv/output_like.h>
// <class>
#include <identity_conv/state.h>
// </class>
#include <torch/library.h>
// <cuda>
#ifdef IDENTITY_CONV_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

// In my_kernel.cu.
cudaError_t launch_my_kernel(const float* x, float* y, int64_t count, float factor, cudaStream_t);
cudaError_t launch_my_kernel(const double* x, double* y, int64_t count, double factor,
                             cudaStream_t);
#endif
// </cuda>

namespace {

constexpr int64_t kGrain = 1 << 15;  // elements below which a second thread isn't worth its start

void check(const at::Tensor& x) {
  identity_conv::check_strided(x, "my_kernel", "x");
  TORCH_CHECK_VALUE(x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble,
                    "my_kernel: x must be float32 or float64, got ", x.scalar_type());
}

// x in the memory order of y, which is dense: then both are one row of numbers.
at::Tensor in_order_of(const at::Tensor& y, const at::Tensor& x) {
  return x.strides() == y.strides() ? x : at::empty_like(y).copy_(x);
}

at::Tensor my_kernel_cpu(const at::Tensor& x, double factor) {
  check(x);
  at::Tensor y = at::empty_like(x);
  if (y.numel() == 0) return y;
  const at::Tensor row = in_order_of(y, x);
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "my_kernel", [&] {
    const scalar_t* from = row.const_data_ptr<scalar_t>();
    scalar_t* to = y.mutable_data_ptr<scalar_t>();
    const auto times = static_cast<scalar_t>(factor);
    at::parallel_for(0, y.numel(), kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) to[i] = times * from[i];
    });
  });
  return y;
}
// <cuda>

#ifdef IDENTITY_CONV_CUDA
at::Tensor my_kernel_cuda(const at::Tensor& x, double factor) {
  check(x);
  const c10::cuda::CUDAGuard guard(x.device());
  at::Tensor y = at::empty_like(x);
  if (y.numel() == 0) return y;
  const at::Tensor row = in_order_of(y, x);
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "my_kernel", [&] {
    C10_CUDA_CHECK(launch_my_kernel(row.const_data_ptr<scalar_t>(), y.mutable_data_ptr<scalar_t>(),
                                    y.numel(), static_cast<scalar_t>(factor),
                                    c10::cuda::getCurrentCUDAStream()));
  });
  return y;
}
#endif
// </cuda>

// What my_kernel must equal, made of torch's own operators. Its arguments are my_kernel's.
at::Tensor reference(const at::Tensor& x, double factor) {
  check(x);
  return at::mul(x, at::Scalar(factor));
}
// <backward>

struct MyKernelGradient {
  static constexpr auto kOperator = "my_kernel::my_kernel";
  using Signature = at::Tensor(const at::Tensor&, double);
  static at::Tensor backward(const at::Tensor& grad, const at::Tensor&, double factor) {
    return at::mul(grad, at::Scalar(factor));
  }
};
// </backward>
// <class>

// The operator with its factor for state.
struct MyKernel : torch::CustomClassHolder {
  static auto state() { return identity_conv::state(IDENTITY_CONV_FIELD(MyKernel, factor)); }
  at::Tensor forward(const at::Tensor& x) const {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("my_kernel::my_kernel", "")
                               .typed<at::Tensor(const at::Tensor&, double)>();
    return op.call(x, factor);
  }
  double factor = 1;
};
// </class>

}  // namespace

TORCH_LIBRARY(my_kernel, m) {
  m.def("my_kernel(Tensor x, float factor) -> Tensor");
  m.def("reference(Tensor x, float factor) -> Tensor", &reference);
  // <class>
  identity_conv::class_<MyKernel>(m, "MyKernel")
      .def("forward", &MyKernel::forward, "", {torch::arg("x")});
  // </class>
}
TORCH_LIBRARY_IMPL(my_kernel, CPU, m) { m.impl("my_kernel", &my_kernel_cpu); }
// <cuda>
#ifdef IDENTITY_CONV_CUDA
TORCH_LIBRARY_IMPL(my_kernel, CUDA, m) { m.impl("my_kernel", &my_kernel_cuda); }
#endif
// </cuda>
// For export and torch.compile. An output unlike x takes a kernel of its own (at::empty_symint);
// one whose size depends on the data takes torch.library.register_fake, in my_kernel.py.
TORCH_LIBRARY_IMPL(my_kernel, Meta, m) { identity_conv::output_like(m, "my_kernel", "x"); }
// <backward>
TORCH_LIBRARY_IMPL(my_kernel, Autograd, m) {
  m.impl("my_kernel", identity_conv::differentiable<MyKernelGradient>());
}
// </backward>
