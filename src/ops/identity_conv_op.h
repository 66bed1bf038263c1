#pragma once

// The operator my_ops::identity_conv_op for the files that implement it. No torch header, so that
// nvcc has little to read and another framework could call the kernels.

#include <cstdint>

#include "identity_conv/copy_layout.h"

namespace at {
class Tensor;
}
struct CUstream_st;

namespace my_ops {

// Calls the operator through the dispatcher: fakes, autograd and every backend follow.
at::Tensor identity_conv_op(const at::Tensor& x);

// Launches the copy of `layout.numel` elements of `element_size` bytes (1, 2, 4, 8 or 16) from
// `src` on `stream` and returns the launch's cudaError_t. `dst` is dense and aligned to 16 bytes;
// `src` may have any alignment. Allocates nothing and doesn't synchronise: legal under graph
// capture.
int launch_identity_conv(const identity_conv::CopyLayout& layout, int64_t element_size,
                         const void* src, void* dst, CUstream_st* stream);

}  // namespace my_ops
