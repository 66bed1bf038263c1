// The compiled model inside a package, behind torch's loader and runner.
//
// This is the one module that touches what torch keeps private there: protected members of
// AOTIModelContainerRunner and the text of the generated code's errors (torch 2.11 to 2.14).

#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <atomic>
#include <cstddef>
#include <string>
#include <vector>

#include "identity_conv/package.h"

namespace identity_conv {

class CompiledModel {
 public:
  // Unpacks, maps and initializes the model. What the loader throws passes through.
  CompiledModel(const std::string& path, const PackageOptions& options);

  std::size_t num_inputs() const { return num_inputs_; }
  CallSpec call_spec();

  // Runs the model on inputs it can read: defined, dense, with storage of their own and no lazy
  // conjugation. `generated_checks` says whether the compiled code is to check them too; the first
  // call decides, and a user's own AOTI_RUNTIME_CHECK_INPUTS stands. Throws PackageError of kind
  // kInput where the generated checks refuse one, else kExecution. The references that torch's
  // runner makes to the inputs are dropped on either.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs, bool generated_checks);

 private:
  std::vector<at::Tensor> run_now(const std::vector<at::Tensor>& inputs);

  torch::inductor::AOTIModelPackageLoader loader_;
  std::size_t num_inputs_;
  std::atomic<bool> has_run_{false};
};

}  // namespace identity_conv
