#include "cuda_graph.h"

#include <algorithm>
#include <exception>
#include <iterator>

#include "error_text.h"

namespace identity_conv {
namespace {

constexpr std::size_t kMostSignatures = 16;
constexpr int kTries = 3;

bool has_sizes(const std::vector<at::Tensor>& inputs, const std::vector<int64_t>& sizes) {
  auto size = sizes.begin();
  for (const at::Tensor& input : inputs) {
    if (!std::equal(input.sizes().begin(), input.sizes().end(), size)) return false;
    size += input.dim();
  }
  return true;
}

}  // namespace

#ifndef IDENTITY_CONV_CUDA
std::string why_no_cuda_graphs(c10::Device device) {
  return device.is_cuda() ? "this runtime was built without CUDA"
                          : "the package was compiled for " + device.str();
}

bool current_stream_is_captured() { return false; }

std::unique_ptr<CapturedCall> CapturedCall::capture(const Model&, const std::vector<at::Tensor>&) {
  return nullptr;
}
#endif

std::vector<at::Tensor> GraphedModel::run(const std::vector<at::Tensor>& inputs) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const CapturedCall::Model model = [this](const std::vector<at::Tensor>& given) {
    return model_.run(given, /*generated_checks=*/false);
  };
  if (current_stream_is_captured()) return model(inputs);

  Signature* signature = find(inputs);
  if (!signature) {
    if (!remember(inputs)) {
      fallback_ = "there are graphs for " + std::to_string(kMostSignatures) +
                  " combinations of input sizes already";
    }
    return model(inputs);
  }
  if (!signature->graph) {
    if (signature->failures == kTries) return model(inputs);
    try {
      signature->graph = CapturedCall::capture(model, inputs);
    } catch (const std::exception& error) {
      // Tried again: what this thread lacked, such as a handle of cuBLAS, the run below makes.
      ++signature->failures;
      fallback_ = "the call can't be captured (" + error_text(error) + ")";
      return model(inputs);
    }
  }
  return signature->graph->replay(inputs, reuse_outputs_);
}

std::string GraphedModel::fallback() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return fallback_;
}

ConstantMap GraphedModel::constants() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return model_.constants();
}

void GraphedModel::load_constants(const ConstantMap& replacements) {
  const std::lock_guard<std::mutex> lock(mutex_);
  model_.load_constants(replacements);
  signatures_.clear();
}

GraphedModel::Signature* GraphedModel::find(const std::vector<at::Tensor>& inputs) {
  const auto found =
      std::find_if(signatures_.begin(), signatures_.end(),
                   [&](const Signature& each) { return has_sizes(inputs, each.sizes); });
  if (found == signatures_.end()) return nullptr;
  signatures_.splice(signatures_.begin(), signatures_, found);
  return &signatures_.front();
}

// False where every signature that is known has a graph, and there are as many as there may be.
bool GraphedModel::remember(const std::vector<at::Tensor>& inputs) {
  if (signatures_.size() == kMostSignatures) {
    const auto oldest = std::find_if(signatures_.rbegin(), signatures_.rend(),
                                     [](const Signature& each) { return !each.graph; });
    if (oldest == signatures_.rend()) return false;
    signatures_.erase(std::prev(oldest.base()));
  }
  Signature& signature = signatures_.emplace_front();
  for (const at::Tensor& input : inputs) {
    signature.sizes.insert(signature.sizes.end(), input.sizes().begin(), input.sizes().end());
  }
  return true;
}

}  // namespace identity_conv
