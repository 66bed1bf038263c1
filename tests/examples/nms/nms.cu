// The CUDA side of nms.cpp: pointers, a count and a stream, no torch header.
//
// Boxes come by rank. First every pair is looked at, 64 to a word, then one block goes down the
// ranks and takes what no kept box overlaps. Bytes: N^2 / 8 are written and, of the kept rows,
// read.
#include <cuda_runtime_api.h>

#include <cstdint>

namespace {

constexpr int kBits = 64;
constexpr int kThreads = 256;

template <class T>
__device__ bool overlap(const T* a, const T* b, T iou_threshold) {
  const T width = (a[2] < b[2] ? a[2] : b[2]) - (a[0] > b[0] ? a[0] : b[0]);
  const T height = (a[3] < b[3] ? a[3] : b[3]) - (a[1] > b[1] ? a[1] : b[1]);
  if (!(width > 0 && height > 0)) return false;
  const T common = width * height;
  const T areas = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]);
  return common / (areas - common) > iou_threshold;
}

// overlaps[i][w] has a bit for each box of the w-th 64 that comes behind box i and that box i
// overlaps. A block has 64 boxes against 64: those below the diagonal are nobody's.
template <class T>
__global__ void compare(const T* boxes, int64_t count, T iou_threshold,
                        unsigned long long* overlaps) {
  if (blockIdx.x < blockIdx.y) return;
  __shared__ T others[kBits][4];
  const int64_t first = int64_t{kBits} * blockIdx.x;
  const int64_t other = first + threadIdx.x;
  for (int side = 0; other < count && side < 4; ++side)
    others[threadIdx.x][side] = boxes[4 * other + side];
  __syncthreads();
  const int64_t i = int64_t{kBits} * blockIdx.y + threadIdx.x;
  if (i >= count) return;
  unsigned long long word = 0;
  for (int bit = 0; bit < kBits && first + bit < count; ++bit) {
    if (first + bit > i && overlap(boxes + 4 * i, others[bit], iou_threshold)) word |= 1ull << bit;
  }
  overlaps[i * gridDim.x + blockIdx.x] = word;
}

// `hidden` has a bit for each box, all zero at first.
__global__ void take(const unsigned long long* overlaps, int64_t count, int64_t words,
                     unsigned long long* hidden, bool* kept) {
  for (int64_t i = 0; i < count; ++i) {
    const bool is_kept = !(hidden[i / kBits] >> (i % kBits) & 1);
    __syncthreads();  // all have read before any writes
    if (is_kept) {
      for (int64_t word = i / kBits + threadIdx.x; word < words; word += kThreads) {
        hidden[word] |= overlaps[i * words + word];
      }
    }
    if (threadIdx.x == 0) kept[i] = is_kept;
    __syncthreads();
  }
}

}  // namespace

template <class T>
cudaError_t launch_nms(const T* boxes, int64_t count, double iou_threshold, int64_t* overlaps,
                       int64_t* hidden, bool* kept, cudaStream_t stream) {
  const auto words = static_cast<unsigned>((count + kBits - 1) / kBits);
  auto* bits = reinterpret_cast<unsigned long long*>(overlaps);
  compare<<<dim3(words, words), kBits, 0, stream>>>(boxes, count, static_cast<T>(iou_threshold),
                                                    bits);
  take<<<1, kThreads, 0, stream>>>(bits, count, words,
                                   reinterpret_cast<unsigned long long*>(hidden), kept);
  return cudaGetLastError();
}

template cudaError_t launch_nms(const float*, int64_t, double, int64_t*, int64_t*, bool*,
                                cudaStream_t);
template cudaError_t launch_nms(const double*, int64_t, double, int64_t*, int64_t*, bool*,
                                cudaStream_t);
