#include "compiled_model.h"

#include <ATen/DynamicLibrary.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner.h>
#include <torch/csrc/inductor/aoti_torch/tensor_converter.h>
#if __has_include(<torch/csrc/shim_exception_state.h>)
#include <torch/csrc/shim_exception_state.h>
#define IDENTITY_CONV_HAS_SHIM_EXCEPTION 1
#endif

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string_view>
#include <unordered_map>

#include "dtype.h"
#include "error_text.h"
#include "identity_conv/wording.h"
#include "plain_tensor.h"

namespace identity_conv {
namespace {

using Kind = PackageError::Kind;
using torch::inductor::AOTIModelContainerRunner;

// Never constructed: as a derived class it may name its base's protected members.
struct Runner : AOTIModelContainerRunner {
  // The handles that the model takes over are null afterwards, also when it throws.
  static std::vector<at::Tensor> run(AOTIModelContainerRunner& runner,
                                     std::vector<AtenTensorHandle>& inputs) {
    return (runner.*(&Runner::run_impl))(inputs, nullptr);
  }

  static std::size_t num_inputs(AOTIModelContainerRunner& runner) {
    const auto get = reinterpret_cast<decltype(&AOTInductorModelContainerGetNumInputs)>(
        (runner.*(&Runner::model_so_))->sym("AOTInductorModelContainerGetNumInputs"));
    std::size_t count = 0;
    AOTI_RUNTIME_ERROR_CODE_CHECK(get(runner.*(&Runner::container_handle_), &count));
    return count;
  }

  // What the model threw last on this thread; empty where the package was compiled by a torch that
  // has no way to say it, and prints it only (2.11).
  static std::string last_error(AOTIModelContainerRunner& runner) {
    using GetLastError = AOTIRuntimeError (*)(const char**);
    GetLastError get = nullptr;
    try {
      get = reinterpret_cast<GetLastError>(
          (runner.*(&Runner::model_so_))->sym("AOTInductorGetLastError"));
    } catch (const std::exception&) {
      return {};
    }
    const char* text = nullptr;
    return get(&text) == AOTI_RUNTIME_SUCCESS && text ? one_line(text) : std::string();
  }
};

// Owns the references to the inputs that the model hasn't taken over: the generated checks run, and
// throw, before it takes any.
class InputHandles {
 public:
  explicit InputHandles(const std::vector<at::Tensor>& inputs)
      : handles_(torch::aot_inductor::unsafe_alloc_new_handles_from_tensors(inputs)) {}
  InputHandles(const InputHandles&) = delete;
  InputHandles& operator=(const InputHandles&) = delete;
  ~InputHandles() {
    for (AtenTensorHandle handle : handles_) delete reinterpret_cast<at::Tensor*>(handle);
  }

  std::vector<AtenTensorHandle>& get() { return handles_; }

 private:
  std::vector<AtenTensorHandle> handles_;
};

// The text between `before` and `after` (the end where there is none) in `text`.
std::string_view between(std::string_view text, std::string_view before, std::string_view after) {
  const std::size_t found = text.find(before);
  if (found == text.npos) return {};
  const std::size_t begin = found + before.size();
  const std::size_t end = text.find(after, begin);
  return text.substr(begin, end == text.npos ? end : end - begin);
}

int leading_int(std::string_view text) {
  int value = -1;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

c10::ScalarType dtype_of(std::string_view number) {
  return static_cast<c10::ScalarType>(leading_int(number));
}

std::string device_name(std::string_view number) {
  return c10::DeviceTypeName(static_cast<c10::DeviceType>(leading_int(number)), true);
}

// Rewrites what a generated input check throws, such as "input_handles[0]: unmatched dim value at
// 1, expected: 3, but got: 4"; empty where `text` comes from elsewhere.
std::string describe_refused_input(std::string_view text, const std::vector<at::Tensor>& inputs) {
  const std::string index(between(text, "input_handles[", "]"));
  if (index.empty()) return {};
  const at::Tensor& input = inputs.at(static_cast<std::size_t>(leading_int(index)));
  const std::string_view what = between(text, "]: ", ",");
  std::string_view wanted = between(text, "expected: ", ", but got: ");
  if (wanted.empty()) wanted = between(text, "expected to be ", ", but got: ");
  if (wanted.empty()) wanted = between(text, "expected it to be ", ", but got: ");
  const std::string_view got = between(text, "but got: ", " ");
  const std::string dimension(between(text, " at ", ","));

  const auto sentence = [&](const std::string& property, const std::string& want,
                            const std::string& came) {
    return "input " + index + ": " + property + " must be " + want + ", got " + came;
  };
  // The generated check reads sizes without looking at the rank.
  if (leading_int(dimension) >= input.dim()) {
    return sentence("the number of dimensions", "more than " + dimension,
                    std::to_string(input.dim()));
  }
  if (what == "unmatched dtype")
    return sentence("dtype", dtype_name(dtype_of(wanted)), dtype_name(dtype_of(got)));
  if (what == "unmatched device type") {
    return sentence("device", std::string(between(wanted, "(", ")")), device_name(got));
  }
  if (what.substr(0, 16) == "unmatched stride") {
    return sentence("stride of dimension " + dimension, std::string(wanted), std::string(got)) +
           " (the package was compiled for this memory layout)";
  }
  if (!wanted.empty() && !dimension.empty()) {
    return sentence("size of dimension " + dimension, std::string(wanted), std::string(got));
  }
  return "input " + index + ": " + std::string(what);
}

// Rewrites the second check of the inputs, which compares ranks and symbolic sizes and doesn't say
// which input it is at; empty where `text` comes from elsewhere.
std::string describe_disagreeing_input(std::string_view text) {
  const std::size_t end = text.find(" Error in op: input");
  if (end == text.npos) return {};
  const std::string what(text.substr(0, end));
  const std::string rank(between(what, "expected ndim ", " "));
  if (rank.empty()) return "an input does not fit the others: " + what;
  return "an input must have " + counted(leading_int(rank), "dimension") + ", got " +
         std::string(between(what, "but got ", " "));
}

// What an operator called by the model threw: the generated code only says that a call failed.
std::string operator_error(const std::string& model_error) {
#ifdef IDENTITY_CONV_HAS_SHIM_EXCEPTION
  if (model_error.find("API call failed") != std::string::npos) {
    return one_line(torch::csrc::shim::details::get_torch_exception_what_without_backtrace());
  }
#endif
  return {};
}

PackageError describe_failure(const std::string& model_error,
                              const std::vector<at::Tensor>& inputs) {
  std::string refused = describe_refused_input(model_error, inputs);
  if (refused.empty()) refused = describe_disagreeing_input(model_error);
  if (!refused.empty()) return PackageError(Kind::kInput, refused);

  const std::string cause = operator_error(model_error);
  return PackageError(Kind::kExecution,
                      "the model failed: " + (cause.empty() ? model_error : cause));
}

// Generated code reads this variable once, in a model's first run, and checks where it is 1. While
// this lives, and `on`, it is, unless the user has set it; models run for the first time one after
// the other.
class CheckSetting {
 public:
  explicit CheckSetting(bool on) : lock_(mutex()), mine_(on && std::getenv(kName) == nullptr) {
    if (mine_) setenv(kName, "1", /*overwrite=*/0);
  }
  CheckSetting(const CheckSetting&) = delete;
  CheckSetting& operator=(const CheckSetting&) = delete;
  ~CheckSetting() {
    if (mine_) unsetenv(kName);
  }

 private:
  static constexpr const char* kName = "AOTI_RUNTIME_CHECK_INPUTS";

  static std::mutex& mutex() {
    static std::mutex one;
    return one;
  }

  std::lock_guard<std::mutex> lock_;
  bool mine_;
};

void check_constant(const std::string& name, const at::Tensor& value,
                    const std::unordered_map<std::string, at::Tensor>& current) {
  const auto refuse = [&](const std::string& what) {
    throw PackageError(Kind::kInput, "constant " + one_line(name) + ": " + what);
  };
  const auto found = current.find(name);
  if (found == current.end()) refuse("the package has none of this name");
  const std::string unusable = describe_unusable(value);
  if (!unusable.empty()) refuse(unusable);
  const at::Tensor& old = found->second;
  if (value.scalar_type() != old.scalar_type()) {
    refuse("dtype must be " + dtype_name(old.scalar_type()) + ", got " +
           dtype_name(value.scalar_type()));
  }
  if (value.sizes() != old.sizes()) {
    refuse("size must be " + c10::str(old.sizes()) + ", got " + c10::str(value.sizes()));
  }
}

}  // namespace

CompiledModel::CompiledModel(const PackageArchive& archive, c10::Device device,
                             std::size_t num_runners, bool capturable)
    : device_(device), files_(archive) {
  const auto& registry = torch::inductor::getAOTIModelRunnerRegistry();
  const std::string type = c10::DeviceTypeName(device.type(), /*lower_case=*/true);
  runner_ = registry.at(type)(files_.library(), num_runners, device.str(), files_.folder(),
                              /*run_single_threaded=*/capturable);
  if (!files_.weights().empty()) runner_->update_constant_buffer_from_blob(files_.weights());
  num_inputs_ = Runner::num_inputs(*runner_);
  if (capturable) {
    // In torch 2.11 a single-threaded run on swapped constants wants the first ones folded too.
    runner_->run_const_fold(/*use_inactive=*/false);
    synchronize();
  }
}

CompiledModel::~CompiledModel() {
  try {
    synchronize();  // what still runs on the device reads the constants
  } catch (const std::exception&) {
    // The device has failed, and runs nothing.
  }
}

CallSpec CompiledModel::call_spec() const {
  std::vector<std::string> spec = runner_->get_call_spec();
  return {std::move(spec.at(0)), std::move(spec.at(1))};
}

std::vector<at::Tensor> CompiledModel::run(const std::vector<at::Tensor>& inputs,
                                           bool generated_checks) {
  {
    const std::shared_lock<Gate> with_others(runs_);
    if (prepared_) return run_now(inputs);
  }
  // The first run computes the constants that follow from others, on its own stream, where those of
  // other threads wouldn't wait for it (and, in torch 2.11, in a deadlock with them).
  const std::lock_guard<Gate> alone(runs_);
  const CheckSetting setting(generated_checks);
  std::vector<at::Tensor> outputs = run_now(inputs);
  if (!prepared_) synchronize();
  prepared_ = true;
  return outputs;
}

std::vector<at::Tensor> CompiledModel::run_now(const std::vector<at::Tensor>& inputs) {
  InputHandles handles(inputs);
  try {
    return Runner::run(*runner_, handles.get());
  } catch (const std::exception& error) {
    const std::string model_error = Runner::last_error(*runner_);
    throw describe_failure(model_error.empty() ? error_text(error) : model_error, inputs);
  }
}

std::vector<std::string> CompiledModel::constant_names() const {
  const std::lock_guard<std::mutex> lock(constants_mutex_);
  std::vector<std::string> names;
  for (const auto& [name, value] : runner_->extract_constants_map(/*use_inactive=*/false)) {
    names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

ConstantMap CompiledModel::constants() const {
  const std::lock_guard<std::mutex> lock(constants_mutex_);
  ConstantMap copies;
  for (const auto& [name, value] : runner_->extract_constants_map(/*use_inactive=*/false)) {
    copies.emplace(name, value.clone());
  }
  return copies;
}

void CompiledModel::load_constants(const ConstantMap& replacements) {
  const std::lock_guard<std::mutex> lock(constants_mutex_);
  const auto current = runner_->extract_constants_map(/*use_inactive=*/false);
  for (const auto& [name, value] : replacements) check_constant(name, value, current);

  // The model copies a tensor's whole storage over its own, so that each gets the layout it had. It
  // is given all: to one left out it would give no memory.
  std::unordered_map<std::string, at::Tensor> next;
  for (const auto& [internal_name, name] : runner_->getConstantNamesToOriginalFQNs()) {
    const auto old = current.find(name);
    if (old == current.end()) continue;  // folded: computed from the others
    const auto found = replacements.find(name);
    const at::Tensor& value = found == replacements.end() ? old->second : found->second;
    at::Tensor copy =
        at::empty_strided(old->second.sizes(), old->second.strides(), old->second.options());
    copy.copy_(value.detach());
    next.emplace(internal_name, std::move(copy));
  }

  // What was queued before the last swap may still read the memory that this writes to.
  synchronize();
  runner_->update_constant_buffer(next, /*use_inactive=*/true, /*validate_full_updates=*/true);
  synchronize();
  const std::lock_guard<Gate> alone(runs_);
  runner_->swap_constant_buffer();
  prepared_ = false;
}

void CompiledModel::synchronize() const {
  if (device_.is_cpu()) return;
  c10::impl::VirtualGuardImpl(device_.type()).synchronizeDevice(device_.index());
}

}  // namespace identity_conv
