// Operators on CUDA that copy their input, each right but for the one bug that stands above it.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <torch/library.h>

#include "wrong_kernels.h"

namespace {

using at::Tensor;

// A dense copy by `launch`, on the stream that it is given.
template <class Launch>
Tensor copied(const Tensor& x, Launch launch) {
  const c10::cuda::CUDAGuard guard(x.device());
  const Tensor dense = x.contiguous();
  Tensor y = at::empty_like(dense);
  if (dense.numel()) {
    launch(dense.const_data_ptr(), y.mutable_data_ptr(), static_cast<int64_t>(dense.nbytes()),
           c10::cuda::getCurrentCUDAStream().stream());
  }
  return x.is_contiguous() ? y : at::empty_like(x).copy_(y);
}

Tensor right(const Tensor& x) { return copied(x, &copy_bytes); }

// The stream is the default one, whichever is current.
Tensor default_stream(const Tensor& x) {
  return copied(x, [](const void* from, void* to, int64_t count, cudaStream_t) {
    copy_bytes(from, to, count, nullptr);
  });
}

// The work is done on the current device, whichever the input is on.
Tensor unguarded(const Tensor& x) {
  const Tensor dense = x.contiguous();
  Tensor y = at::empty_like(dense);
  if (dense.numel()) {
    copy_bytes(dense.const_data_ptr(), y.mutable_data_ptr(), static_cast<int64_t>(dense.nbytes()),
               c10::cuda::getCurrentCUDAStream().stream());
  }
  return x.is_contiguous() ? y : at::empty_like(x).copy_(y);
}

// The host waits for the GPU.
Tensor synchronises(const Tensor& x) {
  return copied(x, [](const void* from, void* to, int64_t count, cudaStream_t stream) {
    copy_bytes(from, to, count, stream);
    cudaStreamSynchronize(stream);
  });
}

// Vectors of 16 bytes, whatever the alignment.
Tensor unaligned(const Tensor& x) { return copied(x, &copy_vectors); }

// Each block has 256 bytes, and the grid lies over a dimension with 65 535 blocks at most.
Tensor grid(const Tensor& x) { return copied(x, &copy_by_grid_y); }

// A launch that fails is not looked at; another copy does the work.
Tensor unseen(const Tensor& x) {
  return copied(x, [](const void* from, void* to, int64_t count, cudaStream_t stream) {
    if (count > 4096) launch_too_large(stream);
    cudaMemcpyAsync(to, from, count, cudaMemcpyDeviceToDevice, stream);
  });
}

// A byte behind the output is written.
Tensor writes_beyond(const Tensor& x) {
  return copied(x, [](const void* from, void* to, int64_t count, cudaStream_t stream) {
    copy_bytes(from, to, count, stream);
    cudaMemsetAsync(static_cast<char*>(to) + count, 0, 1, stream);
  });
}

// A byte behind the input is read, with no effect.
Tensor reads_beyond(const Tensor& x) { return copied(x, &copy_and_look_beyond); }

// Calls on several streams share memory.
Tensor scratch(const Tensor& x) {
  return copied(x, [](const void* from, void* to, int64_t count, cudaStream_t stream) {
    constexpr int64_t kRoom = 16 << 20;
    static void* const shared = [] {
      void* memory = nullptr;
      cudaMalloc(&memory, kRoom);
      return memory;
    }();
    if (count > kRoom) return copy_bytes(from, to, count, stream);
    copy_bytes(from, shared, count, stream);
    copy_bytes(shared, to, count, stream);
  });
}

// Memory isn't given back.
Tensor leak(const Tensor& x) {
  return copied(x, [](const void* from, void* to, int64_t count, cudaStream_t stream) {
    void* kept = nullptr;
    if (count > 4096) cudaMallocAsync(&kept, count, stream);
    copy_bytes(from, to, count, stream);
  });
}

Tensor fake(const Tensor& x) { return at::empty_like(x); }

struct Operator {
  const char* name;
  Tensor (*kernel)(const Tensor&);
};

const Operator kOperators[] = {
    {"right", &right},
    {"default_stream", &default_stream},
    {"unguarded", &unguarded},
    {"synchronises", &synchronises},
    {"unaligned", &unaligned},
    {"grid", &grid},
    {"unseen", &unseen},
    {"writes_beyond", &writes_beyond},
    {"reads_beyond", &reads_beyond},
    {"scratch", &scratch},
    {"leak", &leak},
};

}  // namespace

TORCH_LIBRARY(test_wrong_cuda, m) {
  for (const auto& op : kOperators) {
    m.def((std::string(op.name) + "(Tensor x) -> Tensor").c_str());
  }
}
TORCH_LIBRARY_IMPL(test_wrong_cuda, CUDA, m) {
  for (const auto& op : kOperators) m.impl(op.name, op.kernel);
}
TORCH_LIBRARY_IMPL(test_wrong_cuda, Meta, m) {
  for (const auto& op : kOperators) m.impl(op.name, &fake);
}
