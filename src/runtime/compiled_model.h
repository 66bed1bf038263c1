// The compiled model inside a package, behind torch's runner.
//
// This is the one module that touches what torch keeps private there: protected members of
// AOTIModelContainerRunner and the text of the generated code's errors (torch 2.11 to 2.14).
// torch's own loader in front of the runner (AOTIModelPackageLoader) isn't used: it leaves its
// unpacked files behind where a process crashes or a load fails, and compiles what a package lacks.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "gate.h"
#include "identity_conv/package.h"
#include "unpacked_model.h"

namespace identity_conv {

class CompiledModel {
 public:
  // Unpacks, maps and initializes the model on `device`. What torch's runner throws passes through.
  // A `capturable` model may be run under the capture of a CUDA graph, and takes one call of run or
  // load_constants at a time; any other takes `num_runners` runs at a time, and lets more wait.
  CompiledModel(const PackageArchive& archive, c10::Device device, std::size_t num_runners,
                bool capturable);
  ~CompiledModel();

  std::size_t num_inputs() const { return num_inputs_; }
  CallSpec call_spec() const;

  // Runs the model on inputs it can read: defined, dense, with storage of their own and no lazy
  // conjugation. `generated_checks` says whether the compiled code is to check them too; the first
  // call decides, and a user's own AOTI_RUNTIME_CHECK_INPUTS stands. Throws PackageError of kind
  // kInput where the generated checks refuse one, else kExecution. The references that torch's
  // runner makes to the inputs are dropped on either.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs, bool generated_checks);

  // As Package has them.
  std::vector<std::string> constant_names() const;
  ConstantMap constants() const;
  void load_constants(const ConstantMap& replaced);

 private:
  std::vector<at::Tensor> run_now(const std::vector<at::Tensor>& inputs);
  void synchronize() const;

  c10::Device device_;
  UnpackedModel files_;
  std::unique_ptr<torch::inductor::AOTIModelContainerRunner> runner_;
  std::size_t num_inputs_;
  mutable std::mutex constants_mutex_;  // one reader or writer of them beside the runs
  Gate runs_;                           // closed while they are swapped, and for the first run
  bool prepared_ = false;               // whether a run with the present constants has succeeded
};

}  // namespace identity_conv
