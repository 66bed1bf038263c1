// What cuda_graph.h needs of CUDA. Not by at::cuda::CUDAGraph: where a capture fails, that of torch
// 2.11 leaves the random number generator and the allocator as if it were still under way.

#include <ATen/cuda/CUDAGraph.h>
#include <ATen/ops/empty_strided.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <type_traits>

#include "cuda_graph.h"

namespace identity_conv {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

// Since torch 2.13 the allocator wants to know of a capture apart from its pool of memory.
template <class Allocator>
auto mark_capture(Allocator* memory, c10::DeviceIndex device, bool begins, int)
    -> decltype(memory->markCaptureBegin(device)) {
  begins ? memory->markCaptureBegin(device) : memory->markCaptureEnd(device);
}
template <class Allocator>
void mark_capture(Allocator*, c10::DeviceIndex, bool, long) {}

// One capture at a time, on a stream of its own for each device, which lives as long as the
// process: torch hands those of its pool to several users, whose work would be captured too, and
// keeps memory for cuBLAS with every stream that it has seen.
std::mutex capture_mutex;

cudaStream_t capture_stream(c10::DeviceIndex device) {
  static std::map<c10::DeviceIndex, cudaStream_t> streams;
  const auto [place, is_new] = streams.try_emplace(device, nullptr);
  if (is_new) C10_CUDA_CHECK(cudaStreamCreateWithFlags(&place->second, cudaStreamNonBlocking));
  return place->second;
}

// Memory that is handed out on one stream, and to nobody else for as long as this lives.
class PrivatePool {
 public:
  PrivatePool(c10::DeviceIndex device, cudaStream_t stream)
      : device_(device), id_(at::cuda::graph_pool_handle()) {
    allocator::beginAllocateToPool(device_, id_, [stream](cudaStream_t s) { return s == stream; });
  }
  PrivatePool(const PrivatePool&) = delete;
  PrivatePool& operator=(const PrivatePool&) = delete;
  ~PrivatePool() {
    close();
    allocator::releasePool(device_, id_);
  }

  // From here on it hands out no more.
  void close() {
    if (open_) allocator::endAllocateToPool(device_, id_);
    open_ = false;
  }

 private:
  c10::DeviceIndex device_;
  c10::MempoolId_t id_;
  bool open_ = true;
};

// A capture under way, which ends with this; of other threads' calls it forbids none.
class Capture {
 public:
  Capture(c10::DeviceIndex device, cudaStream_t stream) : device_(device), stream_(stream) {
    C10_CUDA_CHECK(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    mark_capture(allocator::get(), device_, /*begins=*/true, 0);
  }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;
  ~Capture() {
    if (!under_way_) return;
    cudaGraph_t abandoned = nullptr;
    end(&abandoned);
    if (abandoned) cudaGraphDestroy(abandoned);
    // A capture that became invalid is no error of the next call.
    (void)cudaGetLastError();
  }

  cudaGraph_t finish() {
    cudaGraph_t graph = nullptr;
    C10_CUDA_CHECK(end(&graph));
    return graph;
  }

 private:
  cudaError_t end(cudaGraph_t* graph) {
    under_way_ = false;
    mark_capture(allocator::get(), device_, /*begins=*/false, 0);
    return cudaStreamEndCapture(stream_, graph);
  }

  c10::DeviceIndex device_;
  cudaStream_t stream_;
  bool under_way_ = true;
};

struct Destroy {
  void operator()(cudaGraphExec_t graph) const { C10_CUDA_CHECK_WARN(cudaGraphExecDestroy(graph)); }
  void operator()(cudaEvent_t event) const { C10_CUDA_CHECK_WARN(cudaEventDestroy(event)); }
};
template <class Handle>
using Owned = std::unique_ptr<std::remove_pointer_t<Handle>, Destroy>;

// Whether a copy of the bytes is a copy of the tensor.
bool same_bytes(const at::Tensor& to, const at::Tensor& from) {
  return to.strides() == from.strides() && from.is_non_overlapping_and_dense();
}

void copy(const at::Tensor& to, const at::Tensor& from, cudaStream_t stream) {
  if (from.numel() == 0) return;
  if (same_bytes(to, from)) {
    C10_CUDA_CHECK(cudaMemcpyAsync(to.mutable_data_ptr(), from.const_data_ptr(), from.nbytes(),
                                   cudaMemcpyDeviceToDevice, stream));
  } else {
    to.copy_(from, /*non_blocking=*/true);
  }
}

class CudaCapturedCall : public CapturedCall {
 public:
  // Under capture_mutex.
  CudaCapturedCall(const Model& model, const std::vector<at::Tensor>& inputs)
      : device_(c10::cuda::current_device()), pool_(device_, capture_stream(device_)) {
    for (const at::Tensor& input : inputs) {
      inputs_.push_back(at::empty_strided(input.sizes(), input.strides(), input.options()));
    }
    const cudaStream_t stream = capture_stream(device_);
    const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromExternal(stream, device_));
    Capture capture(device_, stream);
    outputs_ = model(inputs_);
    cudaGraph_t graph = capture.finish();
    pool_.close();
    cudaGraphExec_t executable = nullptr;
    const cudaError_t instantiated = cudaGraphInstantiateWithFlags(&executable, graph, 0);
    C10_CUDA_CHECK_WARN(cudaGraphDestroy(graph));
    C10_CUDA_CHECK(instantiated);
    graph_.reset(executable);
    cudaEvent_t done = nullptr;
    C10_CUDA_CHECK(cudaEventCreateWithFlags(&done, cudaEventDisableTiming));
    done_.reset(done);
  }

  ~CudaCapturedCall() override { C10_CUDA_CHECK_WARN(cudaEventSynchronize(done_.get())); }

  std::vector<at::Tensor> replay(const std::vector<at::Tensor>& inputs,
                                 bool reuse_outputs) override {
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device_).stream();
    C10_CUDA_CHECK(cudaStreamWaitEvent(stream, done_.get(), 0));
    for (std::size_t i = 0; i < inputs.size(); ++i) copy(inputs_[i], inputs[i], stream);
    C10_CUDA_CHECK(cudaGraphLaunch(graph_.get(), stream));
    std::vector<at::Tensor> outputs;
    outputs.reserve(outputs_.size());
    for (const at::Tensor& output : outputs_) {
      if (reuse_outputs) {
        outputs.push_back(output);
      } else if (!output.defined() || !output.is_cuda() || !same_bytes(output, output)) {
        outputs.push_back(output.defined() ? output.clone() : output);
      } else {
        outputs.push_back(at::empty_strided(output.sizes(), output.strides(), output.options()));
        copy(outputs.back(), output, stream);
      }
    }
    C10_CUDA_CHECK(cudaEventRecord(done_.get(), stream));
    return outputs;
  }

 private:
  c10::DeviceIndex device_;
  PrivatePool pool_;
  std::vector<at::Tensor> inputs_;
  std::vector<at::Tensor> outputs_;
  Owned<cudaGraphExec_t> graph_;
  Owned<cudaEvent_t> done_;  // when the last replay, and the copies of its outputs, are through
};

}  // namespace

std::string why_no_cuda_graphs(c10::Device device) {
  return device.is_cuda() ? "" : "the package was compiled for " + device.str();
}

bool current_stream_is_captured() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

std::unique_ptr<CapturedCall> CapturedCall::capture(const Model& model,
                                                    const std::vector<at::Tensor>& inputs) {
  const std::lock_guard<std::mutex> lock(capture_mutex);
  return std::make_unique<CudaCapturedCall>(model, inputs);
}

}  // namespace identity_conv
