// rms_norm::rms_norm(Tensor x, Tensor(a!)? residual=None, Tensor? weight=None, float eps=1e-6)
//   -> (Tensor out, Tensor inverse_rms)
//
// x [..., H]; where there is a residual, of x's shape, it becomes residual + x, and that is what is
// normalized. Along the last dimension out = x / sqrt(mean(x^2) + eps) * weight, and inverse_rms
// [...] is 1 / sqrt(mean(x^2) + eps). All are float32, float64, float16 or bfloat16, alike;
// inverse_rms is float32, or float64 with x. For inference: no gradients.
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <optional>
#include <tuple>
#ifdef IDENTITY_CONV_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// In rms_norm.cu, for float, double, __half and __nv_bfloat16: dense rows; residual and weight may
// be null.
template <class T, class Wide>
cudaError_t launch_rms_norm(const T* x, T* residual, const T* weight, T* out, Wide* inverse_rms,
                            int64_t rows, int64_t width, double eps, cudaStream_t);
#endif

namespace {

constexpr int64_t kGrain = 1 << 15;  // elements below which a second thread isn't worth its start
constexpr int64_t kLanes = 32;

void check_like_x(const at::Tensor& x, const at::Tensor& other, const char* name) {
  TORCH_CHECK_VALUE(other.scalar_type() == x.scalar_type(), "rms_norm: ", name,
                    " must have the dtype of x, ", x.scalar_type(), ", got ", other.scalar_type());
  TORCH_CHECK_VALUE(other.device() == x.device(), "rms_norm: ", name,
                    " must be on the device of x, ", x.device(), ", got ", other.device());
}

void check(const at::Tensor& x, const std::optional<at::Tensor>& residual,
           const std::optional<at::Tensor>& weight, double eps) {
  const auto dtype = x.scalar_type();
  TORCH_CHECK_VALUE(
      dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16,
      "rms_norm: x must be float32, float64, float16 or bfloat16, got ", dtype);
  TORCH_CHECK_VALUE(x.dim() > 0, "rms_norm: x must have a dimension at least, got []");
  TORCH_CHECK_VALUE(eps >= 0, "rms_norm: eps must be 0 or more, got ", eps);
  if (residual) {
    check_like_x(x, *residual, "residual");
    TORCH_CHECK_VALUE(residual->sym_sizes() == x.sym_sizes(),
                      "rms_norm: residual must have the shape of x, ", x.sym_sizes(), ", got ",
                      residual->sym_sizes());
  }
  if (weight) {
    check_like_x(x, *weight, "weight");
    TORCH_CHECK_VALUE(weight->dim() == 1 && weight->sym_size(0) == x.sym_size(-1),
                      "rms_norm: weight must have the shape [", x.sym_size(-1), "], got ",
                      weight->sym_sizes());
  }
}

using Outputs = std::tuple<at::Tensor, at::Tensor>;

// The outputs, not yet filled.
Outputs outputs(const at::Tensor& x) {
  auto rows = x.sym_sizes().vec();
  rows.pop_back();
  const auto statistics = x.options().dtype(at::toOpMathType(x.scalar_type()));
  return {at::empty_symint(x.sym_sizes(), x.options()), at::empty_symint(rows, statistics)};
}

// In lanes, which a compiler makes vectors of, and in double: a row may be long, and a square
// large.
template <class T>
double mean_of_squares(const T* x, int64_t count) {
  std::array<double, kLanes> sums{};
  for (int64_t i = 0; i < count; i += kLanes) {
    const auto some = std::min(kLanes, count - i);
    for (int64_t lane = 0; lane < some; ++lane) {
      const auto wide = static_cast<double>(x[i + lane]);
      sums[lane] += wide * wide;
    }
  }
  return std::accumulate(sums.begin(), sums.end(), 0.0) / static_cast<double>(count);
}

Outputs rms_norm_meta(const at::Tensor& x, const std::optional<at::Tensor>& residual,
                      const std::optional<at::Tensor>& weight, double eps) {
  check(x, residual, weight, eps);
  return outputs(x);
}

Outputs rms_norm_cpu(const at::Tensor& x, const std::optional<at::Tensor>& residual,
                     const std::optional<at::Tensor>& weight, double eps) {
  check(x, residual, weight, eps);
  auto [out, inverse_rms] = outputs(x);
  if (residual) residual->add_(x);
  const at::Tensor from = (residual ? *residual : x).contiguous();
  const at::Tensor factors = weight ? weight->contiguous() : at::Tensor();
  const int64_t width = x.size(-1);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "rms_norm", [&] {
    using wide_t = at::opmath_type<scalar_t>;
    const scalar_t* in = from.const_data_ptr<scalar_t>();
    const scalar_t* factor = weight ? factors.const_data_ptr<scalar_t>() : nullptr;
    scalar_t* to = out.mutable_data_ptr<scalar_t>();
    wide_t* inverse = inverse_rms.mutable_data_ptr<wide_t>();
    at::parallel_for(
        0, inverse_rms.numel(), std::max<int64_t>(1, kGrain / std::max<int64_t>(1, width)),
        [&](int64_t begin, int64_t end) {
          for (int64_t row = begin; row < end; ++row) {
            const scalar_t* x = in + row * width;
            const auto scale = static_cast<wide_t>(1 / std::sqrt(mean_of_squares(x, width) + eps));
            inverse[row] = scale;
            for (int64_t i = 0; i < width; ++i) {
              const wide_t y = static_cast<wide_t>(x[i]) * scale;
              to[row * width + i] =
                  static_cast<scalar_t>(factor ? y * static_cast<wide_t>(factor[i]) : y);
            }
          }
        });
  });
  return {out, inverse_rms};
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

Outputs rms_norm_cuda(const at::Tensor& x, const std::optional<at::Tensor>& residual,
                      const std::optional<at::Tensor>& weight, double eps) {
  check(x, residual, weight, eps);
  const c10::cuda::CUDAGuard guard(x.device());
  const auto [out, inverse_rms] = outputs(x);
  if (inverse_rms.numel() == 0) return {out, inverse_rms};
  const at::Tensor from = x.contiguous();
  const at::Tensor sum = residual ? residual->contiguous() : at::Tensor();
  const at::Tensor factors = weight ? weight->contiguous() : at::Tensor();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "rms_norm", [&] {
    using T = typename OnDevice<scalar_t>::type;
    C10_CUDA_CHECK(
        launch_rms_norm(static_cast<const T*>(from.const_data_ptr()),
                        residual ? static_cast<T*>(sum.mutable_data_ptr()) : nullptr,
                        weight ? static_cast<const T*>(factors.const_data_ptr()) : nullptr,
                        static_cast<T*>(out.mutable_data_ptr()),
                        inverse_rms.mutable_data_ptr<at::opmath_type<scalar_t>>(),
                        inverse_rms.numel(), x.size(-1), eps, c10::cuda::getCurrentCUDAStream()));
  });
  if (residual && !sum.is_same(*residual)) residual->copy_(sum);
  return {out, inverse_rms};
}
#endif

}  // namespace

TORCH_LIBRARY(rms_norm, m) {
  m.def(
      "rms_norm(Tensor x, Tensor(a!)? residual=None, Tensor? weight=None, float eps=1e-6) -> "
      "(Tensor out, Tensor inverse_rms)");
}
TORCH_LIBRARY_IMPL(rms_norm, CPU, m) { m.impl("rms_norm", &rms_norm_cpu); }
TORCH_LIBRARY_IMPL(rms_norm, Meta, m) { m.impl("rms_norm", &rms_norm_meta); }
#ifdef IDENTITY_CONV_CUDA
TORCH_LIBRARY_IMPL(rms_norm, CUDA, m) { m.impl("rms_norm", &rms_norm_cuda); }
#endif
