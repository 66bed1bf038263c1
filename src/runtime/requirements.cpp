#include "requirements.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <stdexcept>

namespace identity_conv {
namespace {

// The target of the higher-order operator that calls a class method; it has no schema.
constexpr std::string_view kCallTorchbind = "call_torchbind";
void add_once(const std::string& name, std::vector<std::string>& names) {
  if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
}

bool operator_is_registered(const std::string& target) {
  const auto dot = target.find('.');
  const std::string name = target.substr(0, dot);
  const std::string overload = dot == std::string::npos ? "" : target.substr(dot + 1);
  return c10::Dispatcher::singleton().findSchema({name, overload}).has_value();
}

bool class_is_registered(const std::string& name) { return torch::getCustomClass(name) != nullptr; }

// "my_ops::IdentityConvClass", as the class was given to TORCH_LIBRARY.
std::string class_display_name(const std::string& name) {
  std::string shown = name.compare(0, kClassPrefix.size(), kClassPrefix) == 0
                          ? name.substr(kClassPrefix.size())
                          : name;
  const auto dot = shown.find('.');
  return dot == std::string::npos ? shown : shown.replace(dot, 1, "::");
}

}  // namespace

Requirements read_requirements(const Json& extern_kernel_nodes) {
  Requirements wanted;
  const Json* nodes = extern_kernel_nodes.find("nodes");
  if (!nodes) throw std::invalid_argument("no list of extern kernel nodes");
  for (const Json& entry : nodes->elements()) {
    const Json* node = entry.find("node");
    if (!node) continue;

    const std::string target = node->text("target");
    if (target != kCallTorchbind) {
      add_once(target, wanted.operators);
      const Json* metadata = node->find("metadata");
      if (metadata && metadata->text("torch_library_custom_op") == "1") {
        add_once(target, wanted.python_operators);
      }
    }

    const Json* inputs = node->find("inputs");
    if (!inputs) continue;
    for (const Json& input : inputs->elements()) {
      const Json* argument = input.find("arg");
      const Json* object = argument ? argument->find("as_custom_obj") : nullptr;
      if (object) add_once(object->text("class_fqn"), wanted.classes);
    }
  }
  return wanted;
}

std::string describe_missing(const Requirements& wanted) {
  std::string names;
  const auto add = [&](const std::string& name) { names += (names.empty() ? "" : " and ") + name; };

  for (const std::string& name : wanted.python_operators) {
    if (operator_is_registered(name)) continue;
    return "calls the operator " + name +
           ", which exists only in Python (torch.library.custom_op): import the module that "
           "defines "
           "it, or write it in C++ to run without Python";
  }
  for (const std::string& name : wanted.operators) {
    if (!operator_is_registered(name)) add("the operator " + name);
  }
  for (const std::string& name : wanted.classes) {
    if (!class_is_registered(name)) add("the class " + class_display_name(name));
  }
  if (names.empty()) return names;
  return "calls " + names +
         ", which no loaded library registers: load the operator library first (--library LIB of "
         "identity-conv-run, torch.ops.load_library in Python, dlopen in C++)";
}

}  // namespace identity_conv
