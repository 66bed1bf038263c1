// The names of dtypes, as torch's Python has them.

#pragma once

#include <c10/core/ScalarType.h>

#include <stdexcept>
#include <string>

namespace identity_conv {

// "float32".
inline std::string dtype_name(c10::ScalarType dtype) {
  return std::string(c10::getDtypeNames(dtype).first);
}

// Throws std::invalid_argument where no dtype has that name.
inline c10::ScalarType read_dtype(const std::string& name) {
  for (int i = 0; i < static_cast<int>(c10::ScalarType::NumOptions); ++i) {
    const auto dtype = static_cast<c10::ScalarType>(i);
    if (dtype != c10::ScalarType::Undefined && dtype_name(dtype) == name) return dtype;
  }
  throw std::invalid_argument("not a manifest: no dtype is named " + name);
}

}  // namespace identity_conv
