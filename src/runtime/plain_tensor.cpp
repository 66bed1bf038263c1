#include "plain_tensor.h"

#include "identity_conv/checks.h"

namespace identity_conv {
namespace {

// Whether every element of a strided tensor lies in memory that its storage has.
bool lies_in_storage(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return true;
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  int64_t last = tensor.storage_offset();
  for (std::size_t d = 0; d < sizes.size(); ++d) last += (sizes[d] - 1) * strides[d];
  const c10::Storage& storage = tensor.storage();
  return storage.data() != nullptr &&
         static_cast<std::size_t>(last + 1) * tensor.itemsize() <= storage.nbytes();
}

}  // namespace

std::string describe_unusable(const at::Tensor& tensor) {
  if (!tensor.defined()) return "must be a tensor, got an undefined one";
  if (tensor.layout() != c10::kStrided || tensor.is_nested()) {
    return std::string("must be a dense (strided) tensor, got ") + layout_name(tensor);
  }
  if (!tensor.has_storage() || tensor.unsafeGetTensorImpl()->is_python_dispatch() ||
      !lies_in_storage(tensor)) {
    return "must be a plain tensor, got one whose data is elsewhere (a subclass, a wrapper, or one "
           "whose storage was taken)";
  }
  return {};
}

}  // namespace identity_conv
