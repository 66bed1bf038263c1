#pragma once

// Argument checks of operators and classes. Each throws with one sentence that names the operator,
// the argument, what is allowed and what came.

#include <ATen/core/Tensor.h>
#include <c10/core/Layout.h>

namespace identity_conv {

// What Python calls the tensor's layout, or the property that makes it other than strided.
inline const char* layout_name(const at::Tensor& x) {
  if (x.is_nested()) return "nested";
  if (x.is_quantized()) return "quantized";
  switch (x.layout()) {
    case at::kStrided:
      return "strided";
    case at::kSparse:
      return "sparse_coo";
    case at::kSparseCsr:
      return "sparse_csr";
    case at::kSparseCsc:
      return "sparse_csc";
    case at::kSparseBsr:
      return "sparse_bsr";
    case at::kSparseBsc:
      return "sparse_bsc";
    case at::kMkldnn:
      return "mkldnn";
    case at::kJagged:
      return "jagged";
    default:
      return "of an unknown layout";
  }
}

// Refuses a sparse, quantized, nested or mkldnn tensor, and an undefined one.
inline void check_strided(const at::Tensor& x, const char* op, const char* argument) {
  TORCH_CHECK_VALUE(x.defined(), op, ": ", argument, " must be a tensor, got None");
  TORCH_CHECK_VALUE(x.layout() == at::kStrided && !x.is_nested() && !x.is_quantized(), op, ": ",
                    argument, " must be a dense (strided) tensor, got ", layout_name(x));
}

}  // namespace identity_conv
