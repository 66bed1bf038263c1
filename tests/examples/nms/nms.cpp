// nms::nms(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor: non-maximum suppression.
//
// boxes [N, 4] as (x1, y1, x2, y2), scores [N], both float32 or float64. Gives the indices (int64)
// of the boxes that no kept box of a higher score overlaps by an intersection over union of more
// than iou_threshold, from the highest score down; of equal scores the first box comes first. A NaN
// counts as the highest score, and overlaps with nothing.
#include <ATen/Dispatch.h>
#include <ATen/ops/argsort.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>
#ifdef IDENTITY_CONV_CUDA
#include <ATen/ops/index_select.h>
#include <ATen/ops/masked_select.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

// In nms.cu, for float and double: boxes by rank, and room for a bit for each pair and for each
// box.
template <class T>
cudaError_t launch_nms(const T* boxes, int64_t count, double iou_threshold, int64_t* overlaps,
                       int64_t* hidden, bool* kept, cudaStream_t);
#endif

namespace {

void check(const at::Tensor& boxes, const at::Tensor& scores) {
  TORCH_CHECK_VALUE(boxes.dim() == 2 && boxes.size(1) == 4,
                    "nms: boxes must have shape [N, 4], got ", boxes.sizes());
  TORCH_CHECK_VALUE(scores.dim() == 1 && scores.size(0) == boxes.size(0),
                    "nms: scores must have shape [N] = [", boxes.size(0), "], got ",
                    scores.sizes());
  const auto dtype = boxes.scalar_type();
  TORCH_CHECK_VALUE(dtype == at::kFloat || dtype == at::kDouble,
                    "nms: boxes must be float32 or float64, got ", dtype);
  TORCH_CHECK_VALUE(scores.scalar_type() == dtype, "nms: scores must have the dtype of boxes, ",
                    dtype, ", got ", scores.scalar_type());
  TORCH_CHECK_VALUE(scores.device() == boxes.device(),
                    "nms: scores must be on the device of boxes, ", boxes.device(), ", got ",
                    scores.device());
}

template <class T>
struct Box {
  T x1, y1, x2, y2;
  T area() const { return (x2 - x1) * (y2 - y1); }
};

template <class T>
bool overlap(const Box<T>& a, const Box<T>& b, T iou_threshold) {
  const T width = std::min(a.x2, b.x2) - std::max(a.x1, b.x1);
  const T height = std::min(a.y2, b.y2) - std::max(a.y1, b.y1);
  if (!(width > 0 && height > 0)) return false;
  const T common = width * height;
  return common / (a.area() + b.area() - common) > iou_threshold;
}

at::Tensor by_score(const at::Tensor& scores) {
  return at::argsort(scores, /*stable=*/true, 0, /*descending=*/true);
}

at::Tensor nms_cpu(const at::Tensor& boxes, const at::Tensor& scores, double iou_threshold) {
  check(boxes, scores);
  const int64_t count = boxes.size(0);
  const at::Tensor order = by_score(scores);
  const int64_t* ranked = order.const_data_ptr<int64_t>();
  std::vector<int64_t> kept;
  AT_DISPATCH_FLOATING_TYPES(boxes.scalar_type(), "nms", [&] {
    const auto x = boxes.contiguous();
    const auto* all = reinterpret_cast<const Box<scalar_t>*>(x.const_data_ptr<scalar_t>());
    const auto threshold = static_cast<scalar_t>(iou_threshold);
    for (int64_t i = 0; i < count; ++i) {
      const auto hidden = [&](int64_t by) { return overlap(all[by], all[ranked[i]], threshold); };
      if (std::none_of(kept.begin(), kept.end(), hidden)) kept.push_back(ranked[i]);
    }
  });
  at::Tensor y = at::empty({static_cast<int64_t>(kept.size())}, boxes.options().dtype(at::kLong));
  std::copy(kept.begin(), kept.end(), y.mutable_data_ptr<int64_t>());
  return y;
}

#ifdef IDENTITY_CONV_CUDA
at::Tensor nms_cuda(const at::Tensor& boxes, const at::Tensor& scores, double iou_threshold) {
  check(boxes, scores);
  const c10::cuda::CUDAGuard guard(boxes.device());
  const int64_t count = boxes.size(0);
  const at::Tensor order = by_score(scores);
  if (count == 0) return order;
  const int64_t words = (count + 63) / 64;
  const at::Tensor ranked = at::index_select(boxes, 0, order).contiguous();
  const at::Tensor overlaps = at::empty({count, words}, order.options());
  const at::Tensor hidden = at::zeros({words}, order.options());
  const at::Tensor kept = at::empty({count}, order.options().dtype(at::kBool));
  AT_DISPATCH_FLOATING_TYPES(boxes.scalar_type(), "nms", [&] {
    C10_CUDA_CHECK(launch_nms(ranked.const_data_ptr<scalar_t>(), count, iou_threshold,
                              overlaps.mutable_data_ptr<int64_t>(),
                              hidden.mutable_data_ptr<int64_t>(), kept.mutable_data_ptr<bool>(),
                              c10::cuda::getCurrentCUDAStream()));
  });
  return at::masked_select(order, kept);
}
#endif

}  // namespace

TORCH_LIBRARY(nms, m) { m.def("nms(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor"); }
TORCH_LIBRARY_IMPL(nms, CPU, m) { m.impl("nms", &nms_cpu); }
#ifdef IDENTITY_CONV_CUDA
TORCH_LIBRARY_IMPL(nms, CUDA, m) { m.impl("nms", &nms_cuda); }
#endif
