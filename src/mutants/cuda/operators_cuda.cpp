// Operators on CUDA that copy their input, each right but for the one bug that stands above it.
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <map>
#include <sstream>
#include <utility>

#include "../mutants.h"
#include "launchers.h"

namespace mutants {
namespace {

using Launch = void (*)(const char* from, char* to, int64_t size, CUstream_st* stream);

// A copy by `launch` on the current stream of x's device.
template <class F>
Tensor launched(const Tensor& x, F&& launch) {
  const c10::cuda::CUDAGuard guard(x.device());
  return by_bytes(x, [&](const char* from, char* to, size_t size) {
    launch(from, to, static_cast<int64_t>(size), c10::cuda::getCurrentCUDAStream().stream());
  });
}

// The same, where a failed launch is seen.
Tensor seen(const Tensor& x, Launch launch) {
  return launched(x, [&](const char* from, char* to, int64_t size, cudaStream_t stream) {
    launch(from, to, size, stream);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

Tensor right(const Tensor& x) { return seen(x, &copy_bytes); }

// Strides are ignored.
Tensor strides_ignored(const Tensor& x) {
  const c10::cuda::CUDAGuard guard(x.device());
  Tensor y = at::empty_like(x);
  if (x.numel()) {
    copy_bytes(const_bytes(x), bytes(y), static_cast<int64_t>(x.nbytes()),
               c10::cuda::getCurrentCUDAStream().stream());
  }
  return y;
}

// The offset into the storage is ignored.
Tensor offset_ignored(const Tensor& x) {
  return right(x.as_strided(x.sizes(), x.strides(), /*storage_offset=*/0));
}

// What a vector of 16 bytes doesn't fill is never written.
Tensor tail_lost(const Tensor& x) { return seen(x, &copy_whole_vectors); }

// Vectors of 16 bytes, whatever the alignment.
Tensor unaligned(const Tensor& x) { return seen(x, &copy_vectors); }

// Subnormal float32 numbers become zero.
Tensor subnormal(const Tensor& x) {
  return seen(x, x.scalar_type() == at::kFloat ? &copy_floats_flushed : &copy_bytes);
}

// A float32 NaN loses its payload.
Tensor nan_payload(const Tensor& x) {
  return seen(x, x.scalar_type() == at::kFloat ? &copy_floats_one_nan : &copy_bytes);
}

// The grid lies over a dimension with 65 535 blocks at most.
Tensor grid_y(const Tensor& x) { return seen(x, &copy_by_grid_y); }

// There are 64 blocks of 256 bytes, whatever the size.
Tensor few_blocks(const Tensor& x) { return seen(x, &copy_by_64_blocks); }

// Elements are counted in 32 bits.
Tensor overflow_32(const Tensor& x) { return seen(x, &copy_by_int); }

// A launch with too many threads isn't seen to fail.
Tensor block_too_large(const Tensor& x) { return launched(x, &copy_by_one_block); }

// A launch with too much shared memory isn't seen to fail.
Tensor shared_too_large(const Tensor& x) { return launched(x, &copy_by_shared_memory); }

// A launch that does nothing fails, and nobody looks: the next one is blamed.
Tensor unseen(const Tensor& x) {
  return launched(x, [](const char* from, char* to, int64_t size, cudaStream_t stream) {
    if (size > 4096) launch_too_large(stream);
    cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToDevice, stream);
  });
}

// There is no barrier between writing shared memory and reading it.
Tensor no_barrier(const Tensor& x) { return seen(x, &copy_without_barrier); }

// The stream is the default one, whichever is current.
Tensor default_stream(const Tensor& x) {
  return launched(x, [](const char* from, char* to, int64_t size, cudaStream_t) {
    copy_bytes(from, to, size, nullptr);
  });
}

// The last byte is copied on the default stream, whichever is current.
Tensor tail_on_default_stream(const Tensor& x) {
  return launched(x, [](const char* from, char* to, int64_t size, cudaStream_t stream) {
    if (size > 1) copy_bytes(from, to, size - 1, stream);
    copy_bytes(from + size - 1, to + size - 1, 1, nullptr);
  });
}

// The host waits for the GPU.
Tensor waits(const Tensor& x) {
  return launched(x, [](const char* from, char* to, int64_t size, cudaStream_t stream) {
    copy_bytes(from, to, size, stream);
    cudaStreamSynchronize(stream);
  });
}

// The first byte takes the way through the host, which waits for it.
Tensor through_host(const Tensor& x) {
  return launched(x, [](const char* from, char* to, int64_t size, cudaStream_t stream) {
    char first = 0;
    copy_bytes(from, to, size, stream);
    C10_CUDA_CHECK(cudaMemcpyAsync(&first, from, 1, cudaMemcpyDeviceToHost, stream));
    C10_CUDA_CHECK(cudaStreamSynchronize(stream));
    C10_CUDA_CHECK(cudaMemcpyAsync(to, &first, 1, cudaMemcpyHostToDevice, stream));
  });
}

// The current device isn't set to the input's.
Tensor no_guard(const Tensor& x) {
  return by_bytes(x, [&](const char* from, char* to, size_t size) {
    copy_bytes(from, to, static_cast<int64_t>(size), c10::cuda::getCurrentCUDAStream().stream());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

// The input's device stays the current one.
Tensor device_left(const Tensor& x) {
  C10_CUDA_CHECK(c10::cuda::SetDevice(x.device().index()));
  return right(x);
}

// A byte behind the output is written.
Tensor writes_behind(const Tensor& x) { return seen(x, &copy_and_write_behind); }

// A byte behind the input is read, with no effect.
Tensor reads_behind(const Tensor& x) { return seen(x, &copy_and_read_behind); }

// The last of several bytes is never written.
Tensor unwritten(const Tensor& x) {
  return launched(x, [](const char* from, char* to, int64_t size, cudaStream_t stream) {
    copy_bytes(from, to, size > 16 ? size - 1 : size, stream);
  });
}

// Calls on several streams share memory.
Tensor shared_scratch(const Tensor& x) {
  return launched(x, [](const char* from, char* to, int64_t size, cudaStream_t stream) {
    constexpr int64_t kRoom = 16 << 20;
    static char* const scratch = [] {
      void* memory = nullptr;
      cudaMalloc(&memory, kRoom);
      return static_cast<char*>(memory);
    }();
    if (size > kRoom) return copy_bytes(from, to, size, stream);
    copy_bytes(from, scratch, size, stream);
    copy_bytes(scratch, to, size, stream);
  });
}

// An input at the address of an earlier one is taken for it.
Tensor cache_by_address(const Tensor& x) {
  static std::map<std::pair<const void*, std::string>, Tensor> seen_before;
  if (x.numel() == 0) return right(x);
  std::ostringstream like;
  like << x.sizes() << x.strides() << x.scalar_type() << x.is_inference();
  auto [entry, is_new] = seen_before.try_emplace({x.const_data_ptr(), like.str()});
  if (is_new) entry->second = right(x);
  return right(entry->second);
}

// Memory isn't given back.
Tensor leak(const Tensor& x) {
  return launched(x, [](const char* from, char* to, int64_t size, cudaStream_t stream) {
    void* kept = nullptr;
    if (size > 4096) cudaMallocAsync(&kept, size, stream);
    copy_bytes(from, to, size, stream);
  });
}

}  // namespace
}  // namespace mutants

TORCH_LIBRARY(identity_conv_mutants_cuda, m) {
  using namespace mutants;
  define(m,
         {
             {"right", &right},
             {"strides_ignored", &strides_ignored},
             {"offset_ignored", &offset_ignored},
             {"tail_lost", &tail_lost},
             {"unaligned", &unaligned},
             {"subnormal", &subnormal},
             {"nan_payload", &nan_payload},
             {"grid_y", &grid_y},
             {"few_blocks", &few_blocks},
             {"overflow_32", &overflow_32},
             {"block_too_large", &block_too_large},
             {"shared_too_large", &shared_too_large},
             {"unseen", &unseen},
             {"no_barrier", &no_barrier},
             {"default_stream", &default_stream},
             {"tail_on_default_stream", &tail_on_default_stream},
             {"waits", &waits},
             {"through_host", &through_host},
             {"no_guard", &no_guard},
             {"device_left", &device_left},
             {"writes_behind", &writes_behind},
             {"reads_behind", &reads_behind},
             {"unwritten", &unwritten},
             {"shared_scratch", &shared_scratch},
             {"cache_by_address", &cache_by_address},
             {"leak", &leak},
         },
         c10::DispatchKey::CUDA);
}
