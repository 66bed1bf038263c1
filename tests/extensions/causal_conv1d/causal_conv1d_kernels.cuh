#pragma once

// The depthwise causal convolution on CUDA, forward and backward; causal_conv1d.h says what it is.
// Each .cu makes the kernels of one dtype, so that they compile at the same time.
//
// Reference: F.conv1d(F.pad(x), weight, bias, groups=C), then F.silu. Bytes moved: x read and y
// written; backward x and dy read and dx written. The arithmetic is some 15 instructions an element
// (30 backward), so the card's memory bandwidth is the limit as long as enough loads are in flight.
//
// Rows (steps are contiguous): a thread has one vector of 16 bytes of a row, and the W - 1 elements
// before it from the lane beside it. Vectors are counted from the last 16-byte boundary of memory
// at or before the row's start, so that a row of any length is loaded and stored by whole vectors
// but for its first and its last.
//
// Columns (channels are contiguous): a thread has a vector of channels and walks over steps with
// the last W - 1 of them in registers.
//
// On an H200 (bf16, W = 4, SiLU), at (8, 4096, 8192), forward runs at a copy's rate in both
// layouts, and backward at 0.98 of it by rows and 0.88 by columns.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline_primitives.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "causal_conv1d.h"

namespace {

using causal_conv1d::Dtype;
using causal_conv1d::Gradients;
using causal_conv1d::In;
using causal_conv1d::Out;
using causal_conv1d::Parameters;
using causal_conv1d::Problem;

constexpr int kWarp = 32;
constexpr unsigned kAll = 0xffffffff;

// --- Numbers -------------------------------------------------------------------------------------

__device__ float to_float(float v) { return v; }
__device__ float to_float(__half v) { return __half2float(v); }
__device__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

__device__ void store(float* to, float v) { *to = v; }
__device__ void store(__half* to, float v) { *to = __float2half_rn(v); }
__device__ void store(__nv_bfloat16* to, float v) { *to = __float2bfloat16_rn(v); }

__device__ unsigned pack(__half, float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const unsigned&>(pair);
}
__device__ unsigned pack(__nv_bfloat16, float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const unsigned&>(pair);
}

template <int kBytes>
struct Words;
template <>
struct Words<16> {
  using type = uint4;
};
template <>
struct Words<8> {
  using type = uint2;
};
template <>
struct Words<4> {
  using type = unsigned;
};
template <>
struct Words<2> {
  using type = unsigned short;
};

// V elements as they are loaded and stored, at once.
template <class T, int V>
using Raw = typename Words<sizeof(T) * V>::type;

template <class T, int V>
__device__ Raw<T, V> load_raw(const T* from) {
  return __ldg(reinterpret_cast<const Raw<T, V>*>(from));
}

template <class T, int V>
__device__ void unpack(const Raw<T, V>& raw, float* to) {
  if constexpr (std::is_same_v<T, __nv_bfloat16> && V > 1) {
    // A bfloat16 is the upper half of a float.
#pragma unroll
    for (int i = 0; i < V / 2; ++i) {
      const unsigned pair = reinterpret_cast<const unsigned*>(&raw)[i];
      to[2 * i] = __uint_as_float(pair << 16);
      to[2 * i + 1] = __uint_as_float(pair & 0xffff0000);
    }
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i) to[i] = to_float(reinterpret_cast<const T*>(&raw)[i]);
  }
}

template <class T, int V>
__device__ void store_vector(T* to, const float* from) {
  if constexpr (V == 1) {
    store(to, *from);
  } else {
    constexpr int kWords = V * sizeof(T) / 4;
    unsigned word[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (sizeof(T) == 4) {
        word[i] = __float_as_uint(from[i]);
      } else {
        word[i] = pack(T(), from[2 * i], from[2 * i + 1]);
      }
    }
    // Said in assembly: of an assignment the compiler may make a store for each word.
    if constexpr (kWords == 4) {
      asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(word[0]), "r"(word[1]),
                   "r"(word[2]), "r"(word[3])
                   : "memory");
    } else if constexpr (kWords == 2) {
      asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(word[0]), "r"(word[1])
                   : "memory");
    } else {
      *reinterpret_cast<unsigned*>(to) = word[0];
    }
  }
}

template <class T>
constexpr int kFull = 16 / sizeof(T);

// In two operations of the special function unit. Where exp overflows the result is 0 instead of
// something under 1e-38; tanh.approx, in one operation, would be off by 1e-4 of it all along the
// tail.
__device__ float sigmoid(float v) {
  float e, s;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(v * -1.4426950408889634f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1 + e));
  return s;
}

// A copy to shared memory that __pipeline_wait_prior waits for, if it is wide enough to be one.
// A thread looks at its own copies alone: there is no barrier. What is on its way there needs no
// register, and in registers there is room for half of what keeps the memory busy.
template <class R, class T>
__device__ void copy_ahead(R* to, const T* from) {
  if constexpr (sizeof(R) >= 4) {
    __pipeline_memcpy_async(to, from, sizeof(R));
  } else {
    *to = __ldg(reinterpret_cast<const R*>(from));
  }
}

// The same where `there` says so, else zeros.
template <class R, class T>
__device__ void copy_ahead_if(bool there, R* to, const T* from) {
  __pipeline_memcpy_async(to, from, sizeof(R), there ? 0 : sizeof(R));
}

// dy times the derivative of silu, s + v * s * (1 - s).
__device__ float silu_gradient(float dy, float v) {
  const float s = sigmoid(v);
  const float dys = dy * s;
  return dys + dys * (v - v * s);
}

// An exact division of n < 2^31 by a number fixed at launch (see identity_conv_op.cu).
struct Divider {
  uint32_t divisor, magic;
  int shift;

  static Divider of(int64_t divisor) {
    int bits = 1;
    while (bits < 31 && (int64_t{1} << bits) < divisor) ++bits;
    const uint64_t magic = (uint64_t{1} << (31 + bits)) / divisor + 1;
    // 1 is no divisor of this kind: 2n / 2 is.
    return divisor == 1
               ? Divider{1, 0, 0}
               : Divider{static_cast<uint32_t>(divisor), static_cast<uint32_t>(magic), bits - 1};
  }

  __device__ uint32_t quotient(uint32_t n) const {
    return divisor == 1 ? n : __umulhi(n, magic) >> shift;
  }
};

// Units of work in one launch: the sum of two such numbers can be divided.
constexpr int64_t kMost = (int64_t{1} << 30) - 1;

int64_t divide_up(int64_t n, int64_t by) { return (n + by - 1) / by; }

// --- Sums ----------------------------------------------------------------------------------------

// The sum of one of `parts` parts of the gradient of weight[channel][k], or of bias for k = width:
// a lone part is the gradient, others wait among the partials (parts, width + 1, channels).
template <class T>
__device__ void put_sum(const Gradients& to, int width, int64_t channels, uint32_t parts,
                        uint32_t part, int k, int64_t channel, float sum) {
  if (parts > 1) {
    to.partials[(int64_t{part} * (width + 1) + k) * channels + channel] = sum;
  } else if (k < width) {
    store(static_cast<T*>(to.dweight) + channel * width + k, sum);
  } else if (to.dbias) {
    store(static_cast<T*>(to.dbias) + channel, sum);
  }
}

// Adds up the partials: each warp every kSumWarps-th part.
constexpr int kSumWarps = 8;

template <class T>
__global__ void __launch_bounds__(kSumWarps* kWarp)
    sum_parts(uint32_t parts, int64_t channels, int width, Gradients to) {
  __shared__ float shared[kSumWarps][kWarp];
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int64_t size = channels * (width + 1);
  const int64_t at = int64_t{blockIdx.x} * kWarp + lane;
  float sum = 0;
  if (at < size) {
#pragma unroll 4
    for (uint32_t part = warp; part < parts; part += kSumWarps) {
      sum += to.partials[part * size + at];
    }
  }
  shared[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || at >= size) return;
  for (int i = 1; i < kSumWarps; ++i) sum += shared[i][lane];
  put_sum<T>(to, width, channels, 1, 0, at / channels, at % channels, sum);
}

// --- Rows ----------------------------------------------------------------------------------------

template <class T, int W>
struct Taps {
  float weight[W];
  float bias;

  __device__ Taps(const void* weights, const void* biases, int64_t channel) {
    const T* from = static_cast<const T*>(weights) + channel * W;
    if constexpr (W == 3) {
#pragma unroll
      for (int k = 0; k < W; ++k) weight[k] = to_float(__ldg(from + k));
    } else {
      unpack<T, W>(load_raw<T, W>(from), weight);
    }
    bias = biases ? to_float(__ldg(static_cast<const T*>(biases) + channel)) : 0.f;
  }

  // Of W elements of the input, the newest last.
  __device__ float operator()(const float* in) const {
    float sum = bias;
#pragma unroll
    for (int k = 0; k < W; ++k) sum += weight[k] * in[k];
    return sum;
  }
};

// A row of a tensor with `size` elements in each.
template <class T>
__device__ T* row_of(void* data, int64_t row, int size) {
  return static_cast<T*>(data) + row * size;
}
template <class T>
__device__ const T* row_of(const void* data, int64_t row, int size) {
  return static_cast<const T*>(data) + row * size;
}

// How far row `row` starts after a 16-byte boundary, in elements.
template <class T>
__device__ int head_of(int64_t row, int steps) {
  return static_cast<unsigned>(row) * static_cast<unsigned>(steps) % kFull<T>;
}

// The vectors of a row, the most that a head may make of them.
template <class T>
int64_t vectors_of(int64_t steps) {
  constexpr int V = kFull<T>;
  int step = V;  // heads are multiples of it
  while (steps % step) step /= 2;
  return divide_up(steps + V - step, V);
}

bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

// A row of x, after `state`, or of dy, after nothing; beyond that it is 0. kWhole says that every
// row is made of whole vectors.
template <class T, int W, bool kWhole>
struct Row {
  static constexpr int V = kFull<T>;

  const T* data;
  const void* state;  // of all rows; may be null
  int64_t row;
  int steps;
  bool aligned;

  __device__ T at(int l) const {
    if (l >= 0 && l < steps) return data[l];
    return l < 0 && l > -W && state ? row_of<T>(state, row, W - 1)[l + W - 1] : T{};
  }

  __device__ bool has_all(int l0) const { return kWhole ? l0 < steps : l0 >= 0 && l0 + V <= steps; }
  __device__ bool has_some(int l0) const { return l0 > -V && l0 < steps; }

  // Elements l0 ... l0 + V - 1, which lie at `from`.
  __device__ Raw<T, V> vector(const T* from, int l0) const {
    Raw<T, V> raw{};
    if (has_all(l0) && (kWhole || aligned)) {
      raw = load_raw<T, V>(from);
    } else if (!kWhole && has_some(l0)) {
#pragma unroll
      for (int i = 0; i < V; ++i) reinterpret_cast<T*>(&raw)[i] = at(l0 + i);
    }
    return raw;
  }

  // The same, to shared memory, perhaps later.
  __device__ void copy_vector(Raw<T, V>* to, const T* from, int l0) const {
    if (kWhole || (aligned && (has_all(l0) || !has_some(l0)))) {
      copy_ahead_if(has_all(l0), to, from);
    } else {
      *to = vector(from, l0);
    }
  }

  // The four elements before l0, where a vector starts.
  __device__ Raw<T, 4> before(const T* from, int l0) const {
    Raw<T, 4> raw{};
    if (kWhole ? l0 > 0 : l0 >= 4 && l0 <= steps && aligned) {
      raw = load_raw<T, 4>(from - 4);
    } else if ((!kWhole && l0 > 0) || state) {
#pragma unroll
      for (int i = 1; i < 4; ++i) reinterpret_cast<T*>(&raw)[i] = at(l0 - 4 + i);
    }
    return raw;
  }

  __device__ void store(T* to, int l0, const float* from) const {
    if (has_all(l0)) {
      store_vector<T, V>(to, from);
    } else if (!kWhole) {
#pragma unroll
      for (int i = 0; i < V; ++i) {
        if (l0 + i >= 0 && l0 + i < steps) ::store(to + i, from[i]);
      }
    }
  }
};

// The last four elements of a vector.
template <class T>
__device__ Raw<T, 4> tail_of(const Raw<T, kFull<T>>& vector) {
  return reinterpret_cast<const Raw<T, 4>*>(&vector)[sizeof(vector) / sizeof(Raw<T, 4>) - 1];
}

// in[0 ... W - 2] gets the elements before this lane's vector: those of the lane before it, or of
// `before` in a lane that is `first`; in[W - 1 ...] gets the vector.
template <class T, int W>
__device__ void join(const Raw<T, kFull<T>>& vector, const Raw<T, 4>& before, bool first,
                     float* in) {
  constexpr int kWords = sizeof(Raw<T, 4>) / 4;
  Raw<T, 4> tail{};
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    if ((kWords - i) * 4 >= (W - 1) * int{sizeof(T)} + 4) continue;  // none of those is in it
    const unsigned own = reinterpret_cast<const unsigned*>(&vector)[4 - kWords + i];
    const unsigned theirs = __shfl_up_sync(kAll, own, 1);
    reinterpret_cast<unsigned*>(&tail)[i] =
        first ? reinterpret_cast<const unsigned*>(&before)[i] : theirs;
  }
  float four[4];
  unpack<T, 4>(tail, four);
#pragma unroll
  for (int i = 0; i < W - 1; ++i) in[i] = four[4 - (W - 1) + i];
  unpack<T, kFull<T>>(vector, in + W - 1);
}

struct Rows {
  Divider channels;
  int64_t first_row;  // of this launch
  uint32_t first_channel;
  int steps;

  __device__ uint32_t channel_of(uint32_t row) const {
    const uint32_t n = row + first_channel;
    return n - channels.quotient(n) * channels.divisor;
  }
};

// One vector a thread, counted over all rows: any length of row.
constexpr int kForwardThreads = 128;

template <class T, int W, bool kSilu>
__global__ void __launch_bounds__(kForwardThreads)
    forward_rows(Rows rows, Divider vectors, uint32_t count, bool aligned, const void* x,
                 Parameters parameters, void* y, void* final_state) {
  constexpr int V = kFull<T>;
  // Lanes past the end stay for the shuffles.
  const uint32_t index = blockIdx.x * kForwardThreads + threadIdx.x;
  const uint32_t mine = min(index, count - 1);
  const uint32_t local = vectors.quotient(mine);
  const int vector = mine - local * vectors.divisor;
  const int64_t row = rows.first_row + local;
  const int l0 = vector * V - head_of<T>(row, rows.steps);
  const Row<T, W, false> in_row{row_of<T>(x, row, rows.steps), parameters.state, row, rows.steps,
                                aligned};

  // All loads before the first use of one, the long way first.
  const Raw<T, V> raw = in_row.vector(in_row.data + l0, l0);
  const bool first = threadIdx.x % kWarp == 0 || vector == 0;
  Raw<T, 4> before{};
  if (first) before = in_row.before(in_row.data + l0, l0);
  const Taps<T, W> taps(parameters.weight, parameters.bias, rows.channel_of(local));

  float in[W - 1 + V], out[V];
  join<T, W>(raw, before, first, in);
#pragma unroll
  for (int i = 0; i < V; ++i) {
    out[i] = taps(in + i);
    if (kSilu) out[i] *= sigmoid(out[i]);
  }
  if (index >= count) return;
  in_row.store(row_of<T>(y, row, rows.steps) + l0, l0, out);
  if (l0 < rows.steps && l0 + V >= rows.steps) {
    T* last = row_of<T>(final_state, row, W - 1);
#pragma unroll
    for (int i = 0; i < W - 1; ++i) last[i] = in_row.at(rows.steps - (W - 1) + i);
  }
}

// For long rows of whole vectors: a warp walks over the tiles of a piece of a row, a tile being 32
// vectors, one a lane. On an H200 three tiles reach 0.98 of a copy, and one vector a thread 0.95.
constexpr int kLongThreads = 64;
constexpr int kLongTiles = 3;  // of a piece

template <class T, int W, bool kSilu>
__global__ void __launch_bounds__(kLongThreads, 24)
    forward_long_rows(Rows rows, Divider pieces, int tiles, uint32_t count, const void* x,
                      Parameters parameters, void* y, void* final_state) {
  constexpr int V = kFull<T>;
  constexpr int kAhead = 2;
  __shared__ Raw<T, V> ring[kAhead + 1][kLongThreads];  // of tiles on their way
  const int lane = threadIdx.x % kWarp;
  const uint32_t piece = blockIdx.x * (kLongThreads / kWarp) + threadIdx.x / kWarp;
  if (piece >= count) return;
  const uint32_t local = pieces.quotient(piece);
  const int first_tile = (piece - local * pieces.divisor) * kLongTiles;
  const int end_tile = min(first_tile + kLongTiles, tiles);
  const int64_t row = rows.first_row + local;
  const Row<T, W, true> in_row{row_of<T>(x, row, rows.steps), parameters.state, row, rows.steps,
                               true};
  int l0 = (first_tile * kWarp + lane) * V;
  const T* from = in_row.data + l0;
  T* to = row_of<T>(y, row, rows.steps) + l0;

  int next_l0 = l0;
  const T* next = from;
  const auto copy = [&](int tile, int slot) {
    if (tile < end_tile) in_row.copy_vector(&ring[slot][threadIdx.x], next, next_l0);
    __pipeline_commit();
    next += kWarp * V;
    next_l0 += kWarp * V;
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) copy(first_tile + i, i);
  // In the last lane: the elements before the tile.
  Raw<T, 4> before{};
  if (lane == kWarp - 1) before = in_row.before(from - lane * V, l0 - lane * V);
  const Taps<T, W> taps(parameters.weight, parameters.bias, rows.channel_of(local));

  int slot = 0;
#pragma unroll 1
  for (int tile = first_tile; tile < end_tile; ++tile) {
    copy(tile + kAhead, slot == 0 ? kAhead : slot - 1);
    __pipeline_wait_prior(kAhead);
    const Raw<T, V> raw = ring[slot][threadIdx.x];
    slot = slot == kAhead ? 0 : slot + 1;
    float in[W - 1 + V], out[V];
    Raw<T, 4> tail{};
    constexpr int kWords = sizeof(Raw<T, 4>) / 4;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if ((kWords - i) * 4 >= (W - 1) * int{sizeof(T)} + 4) continue;
      const unsigned own = reinterpret_cast<const unsigned*>(&raw)[4 - kWords + i];
      unsigned& old = reinterpret_cast<unsigned*>(&before)[i];
      const unsigned given = lane == kWarp - 1 ? old : own;
      old = own;
      reinterpret_cast<unsigned*>(&tail)[i] = __shfl_sync(kAll, given, lane + kWarp - 1);
    }
    float four[4];
    unpack<T, 4>(tail, four);
#pragma unroll
    for (int i = 0; i < W - 1; ++i) in[i] = four[4 - (W - 1) + i];
    unpack<T, V>(raw, in + W - 1);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      out[i] = taps(in + i);
      if (kSilu) out[i] *= sigmoid(out[i]);
    }
    if (l0 < rows.steps) store_vector<T, V>(to, out);
    l0 += kWarp * V;
    to += kWarp * V;
  }
  if (end_tile == tiles && lane < W - 1) {
    row_of<T>(final_state, row, W - 1)[lane] = in_row.at(rows.steps - (W - 1) + lane);
  }
}

// A row's vectors come in tiles of 32, one a lane, and tiles in pieces. A block has one channel:
// its warps share the pieces of that channel's rows, or one slice of them, so that the weight's
// gradient is summed in registers, and in one slice to its end. A warp walks over the tiles of a
// piece from right to left, since dx needs the slopes of the steps after it.
struct RowPieces {
  int tiles;  // of a row
  int tiles_a_piece;
  uint32_t pieces;      // of a row
  uint32_t all_pieces;  // of a channel
  uint32_t slices;      // of a channel
};

constexpr int kBackwardThreads = 128;

template <class T, int W, bool kWhole, bool kSilu>
__global__ void __launch_bounds__(kBackwardThreads, kWhole ? 8 : 6)
    backward_rows(int64_t channels, int steps, RowPieces split, bool x_aligned, bool dy_aligned,
                  const void* x, const void* dy, const void* dfinal_state, Parameters parameters,
                  Gradients to) {
  constexpr int V = kFull<T>;
  constexpr int kWarps = kBackwardThreads / kWarp;
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const uint32_t slice = blockIdx.x / static_cast<uint32_t>(channels);
  const uint32_t channel = blockIdx.x - slice * static_cast<uint32_t>(channels);
  const Taps<T, W> taps(parameters.weight, parameters.bias, channel);

  // Tiles of x and dy on their way. The tile after the next has arrived when the next is worked on.
  constexpr int kSlots = 4;
  __shared__ Raw<T, V> ring[kSlots][2][kBackwardThreads];

  float sums[W + 1] = {};  // of dweight and dbias
#pragma unroll 1
  for (uint32_t each = slice * kWarps + warp; each < split.all_pieces;
       each += split.slices * kWarps) {
    const uint32_t n = each / split.pieces;
    const int first_tile = (each - n * split.pieces) * split.tiles_a_piece;
    const int end_tile = min(first_tile + split.tiles_a_piece, split.tiles);
    const int64_t row = n * channels + channel;
    const Row<T, W, kWhole> in_row{row_of<T>(x, row, steps), parameters.state, row, steps,
                                   x_aligned};
    const Row<T, W, kWhole> dy_row{row_of<T>(dy, row, steps), nullptr, row, steps, dy_aligned};
    const int head = kWhole ? 0 : head_of<T>(row, steps);
    const int first = first_tile * kWarp * V - head;  // the piece's steps, beyond the row's perhaps
    const int end = end_tile * kWarp * V - head;
    // The gradient of pre at any step, from memory.
    const auto slope_at = [&](int l) {
      if (l < 0 || l >= steps) return 0.f;
      float in[W];
#pragma unroll
      for (int k = 0; k < W; ++k) in[k] = to_float(in_row.at(l - (W - 1) + k));
      const float grad = to_float(dy_row.data[l]);
      return kSilu ? silu_gradient(grad, taps(in)) : grad;
    };
    // dx at any step, or dstate at one before the first, from memory.
    const auto dx_at = [&](int l) {
      float sum = 0;
#pragma unroll
      for (int k = 0; k < W; ++k) sum += taps.weight[k] * slope_at(l + W - 1 - k);
      const int kept = l - (steps - (W - 1));
      if (dfinal_state && kept >= 0) {
        sum += to_float(row_of<T>(dfinal_state, row, W - 1)[kept]);
      }
      return sum;
    };
    // The vector of the tile that is copied, and its place among all elements.
    int next_l0 = end - (kWarp - lane) * V;
    int64_t next_place = row * int64_t{steps} + next_l0;
    const auto copy = [&](int tile) {
      if (tile >= first_tile) {
        Raw<T, V>(*slot)[kBackwardThreads] = ring[tile % kSlots];
        in_row.copy_vector(&slot[0][threadIdx.x], static_cast<const T*>(x) + next_place, next_l0);
        dy_row.copy_vector(&slot[1][threadIdx.x], static_cast<const T*>(dy) + next_place, next_l0);
      }
      __pipeline_commit();
      next_l0 -= kWarp * V;
      next_place -= kWarp * V;
    };
    __syncwarp();
#pragma unroll
    for (int i = 1; i < kSlots; ++i) copy(end_tile - i);
    // In lane 0: the elements left of the piece.
    Raw<T, 4> left{};
    if (lane == 0) left = in_row.before(in_row.data + first, first);
    int l0 = end - (kWarp - lane) * V;
    T* to_dx = static_cast<T*>(to.dx.data) + row * int64_t{steps} + l0;
    // In lane 0: the slopes of the W - 1 steps right of the tile.
    float after[W - 1] = {};
    if (end_tile < split.tiles) {
      const float slope = lane < W - 1 ? slope_at(end + lane) : 0.f;
#pragma unroll
      for (int i = 0; i < W - 1; ++i) after[i] = __shfl_sync(kAll, slope, i);
    }
#pragma unroll 1
    for (int tile = end_tile - 1; tile >= first_tile; --tile) {
      __pipeline_wait_prior(kSlots - 3);
      __syncwarp();  // lane 0 reads what the last lane has copied
      const Raw<T, V>(*slot)[kBackwardThreads] = ring[tile % kSlots];
      const Raw<T, V> raw_x = slot[0][threadIdx.x], raw_dy = slot[1][threadIdx.x];
      Raw<T, 4> before = left;
      if (lane == 0 && tile > first_tile) {
        before = tail_of<T>(ring[(tile - 1) % kSlots][0][threadIdx.x + kWarp - 1]);
      }
      copy(tile - (kSlots - 1));
      float in[W - 1 + V], slope[V + W - 1];
      join<T, W>(raw_x, before, lane == 0, in);
      unpack<T, V>(raw_dy, slope);
      if (kSilu) {
#pragma unroll
        for (int i = 0; i < V; ++i) slope[i] = silu_gradient(slope[i], taps(in + i));
        if (!kWhole && !dy_row.has_all(l0)) {  // what stands beside the row must not count
#pragma unroll
          for (int i = 0; i < V; ++i) {
            if (l0 + i < 0 || l0 + i >= steps) slope[i] = 0;
          }
        }
      }
#pragma unroll
      for (int i = 0; i < W - 1; ++i) {
        // A circle: no other lane asks lane 0, which gives the last one what is right of the tile.
        const float given = lane == 0 ? after[i] : slope[i];
        after[i] = slope[i];
        slope[V + i] = __shfl_sync(kAll, given, lane + 1);
      }
      float out[V];
#pragma unroll
      for (int i = 0; i < V; ++i) {
        out[i] = 0;
#pragma unroll
        for (int k = 0; k < W; ++k) {
          out[i] += taps.weight[k] * slope[i + W - 1 - k];
          sums[k] += slope[i] * in[i + k];
        }
        sums[W] += slope[i];
      }
      dy_row.store(to_dx, l0, out);
      l0 -= kWarp * V;
      to_dx -= kWarp * V;
    }
    if (dfinal_state) __syncwarp();
    if (lane < W - 1) {
      if (to.dstate && first_tile == 0) {
        store(row_of<T>(to.dstate, row, W - 1) + lane, dx_at(lane - (W - 1)));
      }
      // The steps that the final state kept, once more and after the loop's stores: seldom
      // asked for, that isn't in the loop.
      const int kept = steps - (W - 1) + lane;
      if (dfinal_state && kept >= max(first, 0) && kept < end) {
        store(row_of<T>(to.dx.data, row, steps) + kept, dx_at(kept));
      }
    }
  }

  __shared__ float shared[kWarps][W + 1];
#pragma unroll
  for (int k = 0; k <= W; ++k) {
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) {
      sums[k] += __shfl_xor_sync(kAll, sums[k], step);
    }
    if (lane == 0) shared[warp][k] = sums[k];
  }
  __syncthreads();
  if (threadIdx.x <= W) {
    float sum = 0;
    for (int i = 0; i < kWarps; ++i) sum += shared[i][threadIdx.x];
    put_sum<T>(to, W, channels, split.slices, slice, threadIdx.x, channel, sum);
  }
}

// --- Columns -------------------------------------------------------------------------------------

struct Columns {
  uint32_t batch;
  int64_t channels;
  int steps;
};

template <class T, int W, int V>
struct ColumnTaps {
  float weight[W][V];
  float bias[V];

  __device__ ColumnTaps(const void* weights, const void* biases, int64_t channel) {
    const T* from = static_cast<const T*>(weights) + channel * W;
    // V * W elements, as wide as their alignment lets them be.
    constexpr int kPart = V == 1 ? 1 : (V * W * sizeof(T) % 16 == 0 ? kFull<T> : V);
    float flat[V * W];
#pragma unroll
    for (int i = 0; i < V * W; i += kPart) {
      unpack<T, kPart>(load_raw<T, kPart>(from + i), flat + i);
    }
#pragma unroll
    for (int v = 0; v < V; ++v) {
#pragma unroll
      for (int k = 0; k < W; ++k) weight[k][v] = flat[v * W + k];
    }
    if (biases) {
      unpack<T, V>(load_raw<T, V>(static_cast<const T*>(biases) + channel), bias);
    } else {
#pragma unroll
      for (int v = 0; v < V; ++v) bias[v] = 0;
    }
  }

  // The newest of the W inputs is the last.
  __device__ float operator()(const float (*in)[V], int v) const {
    float sum = bias[v];
#pragma unroll
    for (int k = 0; k < W; ++k) sum += weight[k][v] * in[k][v];
    return sum;
  }
};

// Step l < 0 of V columns: what came before them, from the first channel's `state` (may be null).
template <class T, int W, int V>
__device__ Raw<T, V> before_columns(const T* state, int l) {
  Raw<T, V> raw{};
  if (l > -W && state) {
#pragma unroll
    for (int v = 0; v < V; ++v) reinterpret_cast<T*>(&raw)[v] = state[v * (W - 1) + l + W - 1];
  }
  return raw;
}

// The first of the V columns of a plane.
template <class T, class Void>
__device__ auto column_of(const causal_conv1d::Plane<Void>& plane, int64_t n, int64_t channel) {
  using To = std::conditional_t<std::is_const_v<Void>, const T, T>;
  return static_cast<To*>(plane.data) + n * plane.batch_stride + channel;
}

// Forgets the oldest of `rows` rows; in an unrolled loop the compiler only renames.
template <int kRows, int V>
__device__ void shift(float (&rows)[kRows][V]) {
#pragma unroll
  for (int i = 0; i + 1 < kRows; ++i) {
#pragma unroll
    for (int v = 0; v < V; ++v) rows[i][v] = rows[i + 1][v];
  }
}

// A thread walks over `chunk` steps. The shorter the walk, the nearer in time neighbours read what
// both need; the longer, the less of it there is.
constexpr int kColumnThreads = 128;

template <class T, int W, int V, bool kSilu>
__global__ void __launch_bounds__(kColumnThreads, 6)
    forward_columns(Columns columns, Divider vectors, Divider chunks, int chunk, uint32_t count,
                    In x, Parameters parameters, Out y, void* final_state) {
  constexpr int kGroup = 4, kGroups = 3;
  __shared__ Raw<T, V> ring[kGroups][kGroup][kColumnThreads];  // of groups of steps on their way

  const uint32_t index = blockIdx.x * kColumnThreads + threadIdx.x;
  if (index >= count) return;
  const uint32_t rest = vectors.quotient(index);
  const int64_t channel = int64_t{index - rest * vectors.divisor} * V;
  const int64_t n = chunks.quotient(rest);
  const int first = (rest - n * chunks.divisor) * chunk;
  const int last = min(first + chunk, columns.steps);
  const int64_t row = (n * columns.channels + channel) * (W - 1);
  const T* state = parameters.state ? static_cast<const T*>(parameters.state) + row : nullptr;
  const T* from = column_of<T>(x, n, channel) + first * x.step_stride;
  T* to = column_of<T>(y, n, channel) + first * y.step_stride;

  const T* ahead = from;
  const auto fetch = [&](int l, int group) {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (l + i < last) copy_ahead(&ring[group][i][threadIdx.x], ahead + i * x.step_stride);
    }
    __pipeline_commit();
    ahead += kGroup * x.step_stride;
  };
#pragma unroll
  for (int group = 0; group + 1 < kGroups; ++group) fetch(first + group * kGroup, group);

  float in[W][V];
  {
    Raw<T, V> before[W - 1];
#pragma unroll
    for (int i = 0; i < W - 1; ++i) {
      const int back = W - 1 - i;
      before[i] = first < back ? before_columns<T, W, V>(state, first - back)
                               : load_raw<T, V>(from - back * x.step_stride);
    }
#pragma unroll
    for (int i = 0; i < W - 1; ++i) unpack<T, V>(before[i], in[i + 1]);
  }
  const ColumnTaps<T, W, V> taps(parameters.weight, parameters.bias, channel);
  const auto step = [&](const Raw<T, V>& raw, T* at) {
    shift(in);
    unpack<T, V>(raw, in[W - 1]);
    float out[V];
#pragma unroll
    for (int v = 0; v < V; ++v) {
      out[v] = taps(in, v);
      if (kSilu) out[v] *= sigmoid(out[v]);
    }
    store_vector<T, V>(at, out);
  };

  int group = 0;
#pragma unroll 1
  for (int l = first; l < last; l += kGroup) {
    fetch(l + (kGroups - 1) * kGroup, group == 0 ? kGroups - 1 : group - 1);
    __pipeline_wait_prior(kGroups - 1);
    if (l + kGroup <= last) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) step(ring[group][i][threadIdx.x], to + i * y.step_stride);
      to += kGroup * y.step_stride;
    } else {
#pragma unroll 1
      for (int i = 0; l + i < last; ++i) {
        step(ring[group][i][threadIdx.x], to);
        to += y.step_stride;
      }
    }
    group = group + 1 == kGroups ? 0 : group + 1;
  }
  if (last == columns.steps) {
    from += (last - first) * x.step_stride;
    T* kept = static_cast<T*>(final_state) + row;
#pragma unroll
    for (int i = 0; i < W - 1; ++i) {
      const int back = W - 1 - i;
      const Raw<T, V> raw = last < back ? before_columns<T, W, V>(state, last - back)
                                        : load_raw<T, V>(from - back * x.step_stride);
#pragma unroll
      for (int v = 0; v < V; ++v) kept[v * (W - 1) + i] = reinterpret_cast<const T*>(&raw)[v];
    }
  }
}

// A warp has 32 vectors of channels and walks over `steps` steps, and W - 1 more for the slopes
// that its last steps' dx needs; the sums of a block's warps are one part.
struct ColumnPieces {
  uint32_t tiles;   // of 32 vectors of channels
  uint32_t pieces;  // of the steps, one a block
  int steps;        // of a warp
};
constexpr int kColumnWarps = 4;

template <class T, int W, int V, bool kSilu>
__global__ void __launch_bounds__(kColumnWarps* kWarp, 4)
    backward_columns(Columns columns, ColumnPieces split, In x, In dy, const void* dfinal_state,
                     Parameters parameters, Gradients to) {
  constexpr int kSteps = 4;  // loaded at once, while the four before are worked on
  constexpr int kWarps = kColumnWarps;
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const uint32_t rest = blockIdx.x / split.tiles;
  const uint32_t tile = blockIdx.x - rest * split.tiles;
  const uint32_t n = rest / split.pieces;
  const uint32_t piece = rest - n * split.pieces;
  const int64_t channel = (int64_t{tile} * kWarp + lane) * V;
  const int first = (piece * kWarps + warp) * split.steps;
  const int end = min(first + split.steps, columns.steps);

  float sums[W + 1][V] = {};  // of dweight and dbias
  if (channel < columns.channels && first < end) {
    const int64_t row = (n * columns.channels + channel) * (W - 1);
    const T* from_x = column_of<T>(x, n, channel) + first * x.step_stride;
    const T* from_dy = column_of<T>(dy, n, channel) + first * dy.step_stride;
    T* dx = column_of<T>(to.dx, n, channel) + (first - (W - 1)) * to.dx.step_stride;
    const T* state = parameters.state ? static_cast<const T*>(parameters.state) + row : nullptr;
    const ColumnTaps<T, W, V> taps(parameters.weight, parameters.bias, channel);

    // The last W inputs and slopes.
    float in[W][V], slope[W][V] = {};
#pragma unroll
    for (int i = 0; i < W - 1; ++i) {
      const int back = W - 1 - i;
      unpack<T, V>(first < back ? before_columns<T, W, V>(state, first - back)
                                : load_raw<T, V>(from_x - back * x.step_stride),
                   in[i + 1]);
    }
    const auto advance = [&](const Raw<T, V>& raw_x, const Raw<T, V>& raw_dy) {
      shift(in);
      shift(slope);
      unpack<T, V>(raw_x, in[W - 1]);
      unpack<T, V>(raw_dy, slope[W - 1]);
      if (kSilu) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
          slope[W - 1][v] = silu_gradient(slope[W - 1][v], taps(in, v));
        }
      }
    };
    const auto add = [&] {
#pragma unroll
      for (int v = 0; v < V; ++v) {
#pragma unroll
        for (int k = 0; k < W; ++k) sums[k][v] += slope[W - 1][v] * in[k][v];
        sums[W][v] += slope[W - 1][v];
      }
    };
    // dx of the step that the last W - 1 steps followed.
    const auto behind = [&](float* out) {
#pragma unroll
      for (int v = 0; v < V; ++v) {
        out[v] = 0;
#pragma unroll
        for (int k = 0; k < W; ++k) out[v] += taps.weight[k][v] * slope[W - 1 - k][v];
      }
    };

    int l = first;
    Raw<T, V> next_x[kSteps], next_dy[kSteps];
    const auto load = [&](const T* at_x, const T* at_dy) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        next_x[i] = load_raw<T, V>(at_x + i * x.step_stride);
        next_dy[i] = load_raw<T, V>(at_dy + i * dy.step_stride);
      }
    };
    bool loaded = false;
#pragma unroll 1
    while (l < end + W - 1) {
      if (l >= first + W - 1 && l + kSteps <= end) {
        if (!loaded) load(from_x, from_dy);
        Raw<T, V> raw_x[kSteps], raw_dy[kSteps];
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          raw_x[i] = next_x[i];
          raw_dy[i] = next_dy[i];
        }
        l += kSteps;
        from_x += kSteps * x.step_stride;
        from_dy += kSteps * dy.step_stride;
        loaded = l + kSteps <= end;
        if (loaded) load(from_x, from_dy);
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          advance(raw_x[i], raw_dy[i]);
          add();
          float out[V];
          behind(out);
          store_vector<T, V>(dx + i * to.dx.step_stride, out);
        }
        dx += kSteps * to.dx.step_stride;
        continue;
      }
      // One step at either end.
      if (l < columns.steps) {
        advance(load_raw<T, V>(from_x), load_raw<T, V>(from_dy));
      } else {
        shift(slope);
#pragma unroll
        for (int v = 0; v < V; ++v) slope[W - 1][v] = 0;
      }
      if (l < end) add();
      const int at = l - (W - 1);
      if (at >= first || (first == 0 && to.dstate)) {
        float out[V];
        behind(out);
        const int kept = at - (columns.steps - (W - 1));
        if (dfinal_state && kept >= 0) {
#pragma unroll
          for (int v = 0; v < V; ++v) {
            out[v] += to_float(static_cast<const T*>(dfinal_state)[row + v * (W - 1) + kept]);
          }
        }
        if (at >= 0) {
          store_vector<T, V>(dx, out);
        } else {
#pragma unroll
          for (int v = 0; v < V; ++v) {
            store(static_cast<T*>(to.dstate) + row + v * (W - 1) + at + W - 1, out[v]);
          }
        }
      }
      ++l;
      from_x += x.step_stride;
      from_dy += dy.step_stride;
      dx += to.dx.step_stride;
    }
  }

  __shared__ float shared[kWarps][W + 1][kWarp * V];
#pragma unroll
  for (int k = 0; k <= W; ++k) {
#pragma unroll
    for (int v = 0; v < V; ++v) shared[warp][k][lane * V + v] = sums[k][v];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < (W + 1) * kWarp * V; i += kWarps * kWarp) {
    const int k = i / (kWarp * V);
    const int64_t c = int64_t{tile} * kWarp * V + i % (kWarp * V);
    if (c >= columns.channels) continue;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += shared[w][k][i % (kWarp * V)];
    put_sum<T>(to, W, columns.channels, columns.batch * split.pieces, rest, k, c, sum);
  }
}

// --- Launches ------------------------------------------------------------------------------------

// The columns can be read V at once.
template <class T, int V, class Void>
bool has_vectors(const Problem& problem, const causal_conv1d::Plane<Void>& plane) {
  return problem.channels % V == 0 && plane.step_stride % V == 0 && plane.batch_stride % V == 0 &&
         reinterpret_cast<uintptr_t>(plane.data) % (V * sizeof(T)) == 0;
}

template <class T, int W, bool kSilu>
class Launch {
 public:
  Launch(const Problem& problem, cudaStream_t stream)
      : problem_(problem),
        stream_(stream),
        tiles_(divide_up(vectors_of<T>(problem.steps), kWarp)) {}

  int forward(const In& x, const Parameters& parameters, const Out& y, void* final_state) const {
    if (problem_.columns) {
      return has_vectors<T, kColumnVector>(problem_, x)
                 ? forward_columns<kColumnVector>(x, parameters, y, final_state)
                 : forward_columns<1>(x, parameters, y, final_state);
    }
    if (tiles_ >= kLongTiles && has_whole_rows(x)) {
      const int64_t pieces = divide_up(tiles_, kLongTiles);
      return by_rows(pieces, [&](const Rows& rows, int64_t count) {
        forward_long_rows<T, W, kSilu>
            <<<divide_up(count, kLongThreads / kWarp), kLongThreads, 0, stream_>>>(
                rows, Divider::of(pieces), tiles_, count, x.data, parameters, y.data, final_state);
      });
    }
    const int64_t vectors = vectors_of<T>(problem_.steps);
    return by_rows(vectors, [&](const Rows& rows, int64_t count) {
      forward_rows<T, W, kSilu><<<divide_up(count, kForwardThreads), kForwardThreads, 0, stream_>>>(
          rows, Divider::of(vectors), count, is_aligned(x.data), x.data, parameters, y.data,
          final_state);
    });
  }

  int64_t num_partials() const {
    const int64_t parts =
        problem_.columns ? problem_.batch * column_pieces().pieces : row_pieces().slices;
    return parts == 1 ? 0 : parts * (W + 1) * problem_.channels;
  }

  int backward(const In& x, const In& dy, const void* dfinal_state, const Parameters& parameters,
               const Gradients& to) const {
    if (problem_.columns) {
      return has_vectors<T, kColumnVector>(problem_, x) &&
                     has_vectors<T, kColumnVector>(problem_, dy)
                 ? backward_columns<kColumnVector>(x, dy, dfinal_state, parameters, to)
                 : backward_columns<1>(x, dy, dfinal_state, parameters, to);
    }
    return has_whole_rows(x) && has_whole_rows(dy)
               ? backward_rows<true>(x, dy, dfinal_state, parameters, to)
               : backward_rows<false>(x, dy, dfinal_state, parameters, to);
  }

 private:
  // More channels a thread need more registers than there are for enough threads.
  static constexpr int kColumnVector = 4;

  bool has_whole_rows(const In& x) const {
    return problem_.steps % kFull<T> == 0 && is_aligned(x.data);
  }

  // Calls `launch` for as many rows at once as one launch takes, `units` of work in each.
  template <class F>
  int by_rows(int64_t units, const F& launch) const {
    const int64_t all = problem_.batch * problem_.channels;
    if (units > kMost || problem_.channels > kMost) return cudaErrorInvalidValue;
    const int64_t most = kMost / units;
    for (int64_t first = 0; first < all; first += most) {
      const Rows rows{Divider::of(problem_.channels), first,
                      static_cast<uint32_t>(first % problem_.channels),
                      static_cast<int>(problem_.steps)};
      launch(rows, std::min(all - first, most) * units);
      if (const auto error = cudaGetLastError()) return error;
    }
    return cudaSuccess;
  }

  Columns columns() const {
    return {static_cast<uint32_t>(problem_.batch), problem_.channels,
            static_cast<int>(problem_.steps)};
  }

  template <int V>
  int forward_columns(const In& x, const Parameters& parameters, const Out& y,
                      void* final_state) const {
    // H200: 16 to 20 steps reach 0.98 of a copy, 32 reach 0.95, 8 reach 0.89.
    constexpr int kChunk = 16;
    const int64_t vectors = problem_.channels / V;
    const int64_t chunks = divide_up(problem_.steps, kChunk);
    const int64_t count = problem_.batch * chunks * vectors;
    if (count > kMost) return cudaErrorInvalidValue;
    ::forward_columns<T, W, V, kSilu>
        <<<divide_up(count, kColumnThreads), kColumnThreads, 0, stream_>>>(
            columns(), Divider::of(vectors), Divider::of(chunks), kChunk, count, x, parameters, y,
            final_state);
    return cudaGetLastError();
  }

  RowPieces row_pieces() const {
    constexpr int64_t kWarps = kBackwardThreads / kWarp;
    // Enough warps for any card, each with something to do, and not much to do, so that few wait
    // for the last of them. Tiles a warp on an H200, beside a copy: 64 reach 0.94, 16 0.97 and
    // more, 4 0.84.
    constexpr int64_t kManyWarps = 8192, kMostWarps = 1 << 17;
    constexpr int64_t kTilesAWarp = 16;
    const int64_t warps = problem_.channels * kWarps;  // of a slice
    const int64_t all_tiles = problem_.batch * tiles_;
    const int64_t short_walks =
        std::min(divide_up(all_tiles, kTilesAWarp * kWarps), divide_up(kMostWarps, warps));
    const int64_t slices = std::clamp<int64_t>(std::max(divide_up(kManyWarps, warps), short_walks),
                                               1, divide_up(all_tiles, 2 * kWarps));
    const int64_t wanted = divide_up(slices * kWarps, problem_.batch);  // pieces of a row
    const int64_t tiles_a_piece = divide_up(tiles_, wanted);
    const int64_t pieces = divide_up(tiles_, tiles_a_piece);
    return {static_cast<int>(tiles_), static_cast<int>(tiles_a_piece),
            static_cast<uint32_t>(pieces), static_cast<uint32_t>(problem_.batch * pieces),
            static_cast<uint32_t>(slices)};
  }

  template <bool kWhole>
  int backward_rows(const In& x, const In& dy, const void* dfinal_state,
                    const Parameters& parameters, const Gradients& to) const {
    const RowPieces split = row_pieces();
    const int64_t blocks = problem_.channels * split.slices;
    if (blocks > kMost || split.pieces * problem_.batch > kMost) return cudaErrorInvalidValue;
    ::backward_rows<T, W, kWhole, kSilu><<<blocks, kBackwardThreads, 0, stream_>>>(
        problem_.channels, problem_.steps, split, is_aligned(x.data), is_aligned(dy.data), x.data,
        dy.data, dfinal_state, parameters, to);
    if (const auto error = cudaGetLastError()) return error;
    return sum(split.slices, to);
  }

  // As long a walk as leaves enough warps for any card: its ends are read twice.
  ColumnPieces column_pieces() const {
    // Steps on an H200, beside a copy: 256 reach 0.84, 1024 0.88.
    constexpr int64_t kManyWarps = 2048;
    // Of narrow vectors there are more tiles; as many pieces do.
    const int64_t tiles = divide_up(problem_.channels, kColumnVector * kWarp);
    int64_t steps = 1024;
    const auto walks = [&] { return divide_up(problem_.steps, steps); };
    while (steps > 16 && problem_.batch * tiles * walks() < kManyWarps) steps /= 2;
    return {static_cast<uint32_t>(tiles), static_cast<uint32_t>(divide_up(walks(), kColumnWarps)),
            static_cast<int>(steps)};
  }

  template <int V>
  int backward_columns(const In& x, const In& dy, const void* dfinal_state,
                       const Parameters& parameters, const Gradients& to) const {
    ColumnPieces split = column_pieces();
    split.tiles = divide_up(problem_.channels, V * kWarp);
    const int64_t parts = problem_.batch * split.pieces;
    if (parts * split.tiles > kMost) return cudaErrorInvalidValue;
    ::backward_columns<T, W, V, kSilu><<<parts * split.tiles, kColumnWarps * kWarp, 0, stream_>>>(
        columns(), split, x, dy, dfinal_state, parameters, to);
    if (const auto error = cudaGetLastError()) return error;
    return sum(parts, to);
  }

  int sum(int64_t parts, const Gradients& to) const {
    if (parts == 1) return cudaSuccess;
    sum_parts<T><<<divide_up(problem_.channels * (W + 1), kWarp), kSumWarps * kWarp, 0, stream_>>>(
        parts, problem_.channels, W, to);
    return cudaGetLastError();
  }

  const Problem& problem_;
  cudaStream_t stream_;
  int64_t tiles_;  // of a row
};

template <Dtype>
struct Element;
template <>
struct Element<Dtype::kFloat> {
  using type = float;
};
template <>
struct Element<Dtype::kHalf> {
  using type = __half;
};
template <>
struct Element<Dtype::kBFloat16> {
  using type = __nv_bfloat16;
};

// f(the Launch of the problem's kernels).
template <Dtype dtype, class F>
auto with_kernels(const Problem& problem, cudaStream_t stream, const F& f) {
  using T = typename Element<dtype>::type;
  const auto with_width = [&](auto width) {
    return problem.silu ? f(Launch<T, width, true>(problem, stream))
                        : f(Launch<T, width, false>(problem, stream));
  };
  switch (problem.width) {
    case 2:
      return with_width(std::integral_constant<int, 2>());
    case 3:
      return with_width(std::integral_constant<int, 3>());
    default:
      return with_width(std::integral_constant<int, 4>());
  }
}

}  // namespace

template <Dtype dtype>
int causal_conv1d::Launcher<dtype>::forward(const Problem& problem, const In& x,
                                            const Parameters& parameters, const Out& y,
                                            void* final_state, CUstream_st* stream) {
  return with_kernels<dtype>(problem, stream, [&](const auto& launch) {
    return launch.forward(x, parameters, y, final_state);
  });
}

template <Dtype dtype>
int64_t causal_conv1d::Launcher<dtype>::num_partials(const Problem& problem) {
  return with_kernels<dtype>(problem, nullptr,
                             [](const auto& launch) { return launch.num_partials(); });
}

template <Dtype dtype>
int causal_conv1d::Launcher<dtype>::backward(const Problem& problem, const In& x, const In& dy,
                                             const void* dfinal_state, const Parameters& parameters,
                                             const Gradients& gradients, CUstream_st* stream) {
  return with_kernels<dtype>(problem, stream, [&](const auto& launch) {
    return launch.backward(x, dy, dfinal_state, parameters, gradients);
  });
}
