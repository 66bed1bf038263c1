// Calls of a model as CUDA graphs: captured once for each combination of input sizes, then
// replayed.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "compiled_model.h"
#include "identity_conv/package.h"

namespace identity_conv {

// One captured call.
class CapturedCall {
 public:
  using Model = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

  // Captures `model`, which mustn't write to its inputs, on inputs of the sizes and strides of
  // `inputs`; nothing is computed. Where that is illegal, what the model throws passes through.
  static std::unique_ptr<CapturedCall> capture(const Model& model,
                                               const std::vector<at::Tensor>& inputs);
  virtual ~CapturedCall() = default;

  // Queues copies of the inputs and the graph on the current stream; calls of several streams wait
  // for one another there. Returns copies of the outputs, or with `reuse_outputs` the graph's own.
  virtual std::vector<at::Tensor> replay(const std::vector<at::Tensor>& inputs,
                                         bool reuse_outputs) = 0;
};

// Why there can be no graphs on this device in this build; empty where there can.
std::string why_no_cuda_graphs(c10::Device device);

// Whether the current stream is being captured, by somebody else.
bool current_stream_is_captured();

// A model whose calls become graphs. A combination of sizes is run as it is the first time, which
// loads and tunes what it needs, and captured the second time.
class GraphedModel {
 public:
  // `model` must be a capturable one, and outlive this.
  GraphedModel(CompiledModel& model, bool reuse_outputs)
      : model_(model), reuse_outputs_(reuse_outputs) {}

  // As CompiledModel::run, on inputs that were laid out as the code expects them.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs);

  // Why the last call that ran without a graph, when one was due, did; empty where none did.
  std::string fallback() const;

  ConstantMap constants() const;
  // Drops the graphs, which hold the old constants.
  void load_constants(const ConstantMap& replacements);

 private:
  struct Signature {
    std::vector<int64_t> sizes;
    int failures = 0;
    std::unique_ptr<CapturedCall> graph;
  };

  Signature* find(const std::vector<at::Tensor>& inputs);
  bool remember(const std::vector<at::Tensor>& inputs);

  CompiledModel& model_;
  const bool reuse_outputs_;
  mutable std::mutex mutex_;
  std::list<Signature> signatures_;  // the latest first
  std::string fallback_;
};

}  // namespace identity_conv
