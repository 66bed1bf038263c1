// Tensors whose memory may be read through their data pointer, sizes and strides alone.

#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace identity_conv {

// Why that isn't so of a tensor, as the end of a sentence ("must be a plain tensor, got ...");
// empty where it is. Lazy conjugation and negation don't count.
std::string describe_unusable(const at::Tensor& tensor);

}  // namespace identity_conv
