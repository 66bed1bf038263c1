// What a compiled model calls through the dispatcher, and which of it nothing has registered.

#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "json.h"

namespace identity_conv {

// What stands before the name of a custom class in the type that TorchScript gives it.
inline constexpr std::string_view kClassPrefix = "__torch__.torch.classes.";

// Operators and custom classes named by the extern kernel nodes that AOTInductor writes beside a
// model (`<model>.json`). Operators called through a C shim don't appear there.
struct Requirements {
  std::vector<std::string> operators;         // "my_ops::identity_conv_op", ".overload" where named
  std::vector<std::string> python_operators;  // of these, what torch.library.custom_op made
  std::vector<std::string> classes;           // "__torch__.torch.classes.my_ops.IdentityConvClass"
};

// Throws std::invalid_argument where that isn't the document's shape.
Requirements read_requirements(const Json& extern_kernel_nodes);

// What is wanted and not registered in this process, as one clause naming each and saying what to
// do; empty where nothing is missing.
std::string describe_missing(const Requirements& wanted);

}  // namespace identity_conv
