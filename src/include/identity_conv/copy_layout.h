#pragma once

#include <algorithm>
#include <cstdint>

namespace identity_conv {

// How the elements of a strided source stand against a dense destination, with as few dimensions as
// can say it. Element i of the destination, counted in memory order, comes from the source offset
//
//     sum over d of  ((i / (size[0] * ... * size[d-1])) % size[d]) * stride[d]
//
// Dimension 0 is the innermost. No size is 1, and no two neighbours could be one dimension, so a
// source that is dense in the destination's order has rank 0 (one element) or rank 1 with stride 1.
struct CopyLayout {
  // The product of the sizes fits int64_t and each size kept is at least 2: 62 dimensions at most;
  // the rest is room for `split_elements` and to spare.
  static constexpr int kMaxRank = 64;

  int rank = 0;
  int64_t numel = 1;
  int64_t size[kMaxRank];
  int64_t stride[kMaxRank];  // of the source, in elements

  bool is_contiguous() const { return rank == 0 || (rank == 1 && stride[0] == 1); }
};

// The layout of a copy from `src_strides` into a destination that is dense in some order of its
// dimensions (`dst_strides`), as `torch.empty_like` makes it. All in elements; sizes are positive.
inline CopyLayout make_copy_layout(int64_t rank, const int64_t* sizes, const int64_t* src_strides,
                                   const int64_t* dst_strides) {
  CopyLayout layout;
  int64_t dst_stride[CopyLayout::kMaxRank];
  int kept = 0;
  for (int64_t d = 0; d < rank; ++d) {
    layout.numel *= sizes[d];
    if (sizes[d] == 1) continue;
    // Insertion keeps the dimensions in the destination's order, innermost first. Row-major input,
    // the usual one, arrives outermost first and walks to the front each time: still a few steps.
    int at = kept++;
    for (; at > 0 && dst_stride[at - 1] > dst_strides[d]; --at) {
      dst_stride[at] = dst_stride[at - 1];
      layout.size[at] = layout.size[at - 1];
      layout.stride[at] = layout.stride[at - 1];
    }
    dst_stride[at] = dst_strides[d];
    layout.size[at] = sizes[d];
    layout.stride[at] = src_strides[d];
  }
  for (int d = 0; d < kept; ++d) {
    const int last = layout.rank - 1;
    if (last >= 0 && layout.stride[d] == layout.stride[last] * layout.size[last]) {
      layout.size[last] *= layout.size[d];
    } else {
      layout.size[layout.rank] = layout.size[d];
      layout.stride[layout.rank] = layout.stride[d];
      ++layout.rank;
    }
  }
  return layout;
}

// The same copy in elements `parts` times smaller, for a source that isn't aligned to its element.
inline CopyLayout split_elements(const CopyLayout& layout, int64_t parts) {
  if (parts == 1) return layout;
  CopyLayout split;
  split.numel = layout.numel * parts;
  split.rank = 1;
  split.size[0] = parts;
  split.stride[0] = 1;
  for (int d = 0; d < layout.rank; ++d) {
    const int64_t stride = layout.stride[d] * parts;
    if (d == 0 && stride == parts) {
      split.size[0] *= layout.size[0];
    } else {
      split.size[split.rank] = layout.size[d];
      split.stride[split.rank++] = stride;
    }
  }
  return split;
}

}  // namespace identity_conv
