// Tensors in files, as torch.save and torch.load of Python have them.

#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace identity_conv {

// Reads the tensor at `path`, or the tensors of a list or tuple there, onto the CPU. Throws
// std::runtime_error with one sentence.
std::vector<at::Tensor> read_tensors(const std::string& path);

// Writes one tensor as itself, and any other number as a tuple, for torch.load with
// weights_only=True; they may be on any device and are written as CPU tensors. The file appears
// whole or not at all. Throws std::runtime_error with one sentence.
void write_tensors(const std::string& path, const std::vector<at::Tensor>& tensors);

}  // namespace identity_conv
