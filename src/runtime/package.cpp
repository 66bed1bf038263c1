#include "identity_conv/package.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner.h>

#include <algorithm>
#include <cctype>
#include <optional>
#include <stdexcept>
#include <utility>

#include "archive.h"
#include "compiled_model.h"
#include "contract.h"
#include "cuda_graph.h"
#include "error_text.h"
#include "forked_process.h"
#include "identity_conv/wording.h"
#include "json.h"
#include "libraries.h"
#include "plain_dispatch.h"
#include "plain_tensor.h"
#include "preflight.h"
#include "requirements.h"
#include "sample.h"

namespace identity_conv {
namespace {

using Kind = PackageError::Kind;

// What operators are called in, whatever the thread and the process had been up to.
struct Surroundings {
  const PlainDispatch plain;
  const OpenMPOfFork serial;
};

// What `read` makes of the JSON document in a record; refuses one of which it makes nothing.
template <class Read>
auto read_json(PackageArchive& archive, const std::string& path, const std::string& record,
               Read&& read) {
  try {
    return read(Json::parse(archive.read(record)));
  } catch (const std::invalid_argument& error) {
    throw PackageError(Kind::kDamaged,
                       path + ": is corrupted: its record " + record + " is " + error.what());
  }
}

c10::DeviceType read_device_type(PackageArchive& archive, const std::string& path) {
  for (const std::string& record : archive.model_records("_metadata.json")) {
    const std::string name = read_json(archive, path, record, [](const Json& metadata) {
      return metadata.text("AOTI_DEVICE_KEY");
    });
    if (name.empty()) continue;
    try {
      return c10::Device(name).type();
    } catch (const c10::Error&) {
      throw PackageError(Kind::kNotAPackage, path + ": was compiled for \"" + one_line(name) +
                                                 "\", which is no device");
    }
  }
  throw PackageError(Kind::kNotAPackage, path + ": does not say for which device it was compiled");
}

void check_operators_are_registered(PackageArchive& archive, const std::string& path) {
  const std::vector<std::string> documents = archive.model_records(".json");
  for (const std::string& library : archive.model_records(".so")) {
    const std::string nodes = library.substr(0, library.size() - 3) + ".json";
    if (std::find(documents.begin(), documents.end(), nodes) == documents.end()) continue;
    const std::string missing =
        describe_missing(read_json(archive, path, nodes, read_requirements));
    if (!missing.empty()) throw PackageError(Kind::kLibraryNotLoaded, path + ": " + missing);
  }
}

void check_options(const std::string& path, c10::DeviceType type, const PackageOptions& options) {
  if (options.num_runners < 1 || options.num_runners > 1024) {
    throw std::invalid_argument("num_runners must be 1 to 1024, got " +
                                std::to_string(static_cast<std::ptrdiff_t>(options.num_runners)));
  }
  const auto is_hex = [](unsigned char c) { return std::isxdigit(c) != 0; };
  if (const auto& digest = options.expected_sha256;
      digest && !(digest->size() == 64 && std::all_of(digest->begin(), digest->end(), is_hex))) {
    throw std::invalid_argument("expected_sha256 must be 64 hexadecimal digits, got \"" +
                                one_line(*digest) + '"');
  }
  if (options.device && options.device->type() != type) {
    throw std::invalid_argument(
        path + ": device must be of type " + c10::DeviceTypeName(type, /*lower_case=*/true) +
        ", for which the package was compiled, got " + options.device->str());
  }
}

// The device of that type that the options ask for; the current one where they don't.
c10::Device choose_device(c10::DeviceType type, const PackageOptions& options) {
  if (type == c10::DeviceType::CPU) return type;
  if (options.device && options.device->has_index()) return *options.device;
  return c10::impl::VirtualGuardImpl(type).getDevice();
}

constexpr int64_t kManifestFormat = 1;

void check_format(const Json& manifest, const std::string& path) {
  const Json* format = manifest.find("format");
  const int64_t* number = format ? format->as<int64_t>() : nullptr;
  if (!number) throw std::invalid_argument("not a manifest: it has no format");
  if (*number != kManifestFormat) {
    throw PackageError(Kind::kFormat, path + ": has a manifest of format " +
                                          std::to_string(*number) + ", and this runtime knows " +
                                          std::to_string(kManifestFormat) +
                                          ": use a newer identity_conv");
  }
}

Description describe(PackageArchive& archive, const std::string& path) {
  Description description{read_device_type(archive, path), {}, Json{Json::Object()}, {}};
  if (!archive.has(kManifest)) return description;
  description.manifest = archive.read(kManifest);
  read_json(archive, path, kManifest, [&](const Json& manifest) {
    check_format(manifest, path);
    Contract{manifest};
    description.document = manifest;
    description.libraries = read_libraries(manifest);
    return true;
  });
  return description;
}

// One error for all fatal findings, of the kind of the first.
void refuse_fatal(const std::vector<Finding>& findings, const std::string& path) {
  std::string text;
  std::optional<Kind> kind;
  for (const Finding& finding : findings) {
    if (finding.verdict != Finding::Verdict::kFatal) continue;
    text += (text.empty() ? "" : "; ") + finding.text;
    if (!kind) kind = finding.kind;
  }
  if (kind) throw PackageError(*kind, path + ": " + text);
}

void load_libraries(PackageArchive& archive, const Description& description,
                    const std::string& path) {
  for (const PackagedLibrary& library : description.libraries) {
    const std::string bytes = archive.read(library.record);
    if (standing(library, bytes.size()).kind != Standing::Kind::kAbsent) continue;
    try {
      load_library(library, bytes);
    } catch (const std::runtime_error& error) {
      throw PackageError(Kind::kHost, path + ": its operator library " + library.name +
                                          " cannot be loaded: " + error.what());
    }
  }
}

const char* verdict_name(Finding::Verdict verdict) {
  switch (verdict) {
    case Finding::Verdict::kOk:
      return "ok";
    case Finding::Verdict::kWarning:
      return "warning";
    default:
      return "fatal";
  }
}

std::unique_ptr<CompiledModel> load_model(PackageArchive& archive, const std::string& path,
                                          c10::Device device, std::size_t num_runners,
                                          bool capturable) {
  const c10::DeviceGuard guard(device);
  try {
    return std::make_unique<CompiledModel>(archive, device, num_runners, capturable);
  } catch (const PackageError&) {
    throw;
  } catch (const std::exception& error) {
    const std::string text = error_text(error);
    const Kind kind =
        text.find("undefined symbol") != std::string::npos ? Kind::kLibraryNotLoaded : Kind::kHost;
    throw PackageError(kind, path + ": cannot be loaded (" + text + ")");
  }
}

// The compiled code reads an input's memory through its data pointer, sizes and strides alone.
void make_readable(Inputs& inputs, std::size_t index, const Contract* contract) {
  const at::Tensor& given = inputs[index];
  const auto refuse = [&](const std::string& what) {
    const std::string name = contract ? contract->name(index) : std::to_string(index);
    throw PackageError(Kind::kInput, "input " + name + ": " + what);
  };
  const std::string unusable = describe_unusable(given);
  if (!unusable.empty()) refuse(unusable);
  const bool is_plain = !given.requires_grad() && !given.is_conj() && !given.is_neg();
  if (!is_plain && contract && contract->mutates(index)) {
    refuse(
        "must be a tensor that the model can write to, got one that requires grad, or a conj or "
        "neg view");
  }
  if (given.unsafeGetTensorImpl()->autograd_meta() && given._fw_grad(/*level=*/0).defined()) {
    refuse(
        "must have no forward-mode tangent, which a compiled model would drop: call it on "
        "torch.autograd.forward_ad.unpack_dual(x).primal");
  }
  if (!is_plain) inputs.replace(index, given.detach().resolve_conj().resolve_neg());
}

}  // namespace

class Package::Loaded {
 public:
  explicit Loaded(const std::string& path) : path(path), archive(path) {}

  std::string path;
  int num_forks_at_open = num_forks;
  PackageArchive archive;  // open as long as the package, for verify
  std::string manifest;
  std::vector<Finding> findings;
  std::optional<Contract> contract;
  c10::Device device = c10::kCPU;
  std::unique_ptr<CompiledModel> model;
  std::unique_ptr<GraphedModel> graphs;  // null where calls run without
  std::string no_graphs;                 // why, where they were asked for
};

Package::Package(std::unique_ptr<Loaded> loaded) : loaded_(std::move(loaded)) {}
Package::Package(Package&&) noexcept = default;
Package& Package::operator=(Package&&) noexcept = default;
Package::~Package() = default;

Package Package::open(const std::string& path, Options options) {
  const Surroundings surroundings;
  auto loaded = std::make_unique<Loaded>(path);
  PackageArchive& archive = loaded->archive;
  const Description description = describe(archive, path);
  check_options(path, description.device, options);
  loaded->manifest = description.manifest;
  loaded->findings = identity_conv::preflight(archive, description, options);
  refuse_fatal(loaded->findings, path);
  load_libraries(archive, description, path);
  check_operators_are_registered(archive, path);
  if (!description.manifest.empty()) loaded->contract.emplace(description.document);
  loaded->device = choose_device(description.device, options);
  if (options.cuda_graph != CudaGraph::kOff) {
    loaded->no_graphs = why_no_cuda_graphs(loaded->device);
    if (loaded->no_graphs.empty() && !loaded->contract) {
      loaded->no_graphs = "a package without a manifest doesn't say what its model writes to";
    }
    for (std::size_t i = 0; loaded->contract && i < loaded->contract->num_inputs(); ++i) {
      if (loaded->contract->mutates(i)) {
        loaded->no_graphs = "the model writes to its input " + std::to_string(i);
      }
    }
  }
  const bool graphs = options.cuda_graph != CudaGraph::kOff && loaded->no_graphs.empty();
  loaded->model = load_model(archive, path, loaded->device, options.num_runners, graphs);
  if (graphs) {
    loaded->graphs = std::make_unique<GraphedModel>(*loaded->model,
                                                    options.cuda_graph == CudaGraph::kReuseOutputs);
  }
  if (loaded->contract && loaded->contract->num_inputs() != loaded->model->num_inputs()) {
    throw PackageError(Kind::kDamaged, path + ": is corrupted: its manifest names " +
                                           counted(loaded->contract->num_inputs(), "input") +
                                           ", and its model takes " +
                                           std::to_string(loaded->model->num_inputs()));
  }
  return Package(std::move(loaded));
}

std::vector<Finding> Package::preflight(const std::string& path, const Options& options) {
  PackageArchive archive(path);
  return identity_conv::preflight(archive, describe(archive, path), options);
}

std::string Package::inspect(const std::string& path, const Options& options) {
  PackageArchive archive(path);
  const Description description = describe(archive, path);
  auto worst = Finding::Verdict::kOk;
  Json::Array findings;
  for (const Finding& finding : identity_conv::preflight(archive, description, options)) {
    worst = std::max(worst, finding.verdict);
    findings.emplace_back(
        Json::Object{{"check", Json(finding.check)},
                     {"verdict", Json(std::string(verdict_name(finding.verdict)))},
                     {"text", Json(finding.text)}});
  }
  Json::Object records;
  for (const auto& record : archive.records()) {
    records.emplace_back(record.name, Json(static_cast<int64_t>(record.size)));
  }
  return Json(Json::Object{{"path", Json(path)},
                           {"bytes", Json(static_cast<int64_t>(archive.num_bytes()))},
                           {"sha256", Json(archive.sha256())},
                           {"verdict", Json(std::string(verdict_name(worst)))},
                           {"findings", Json(std::move(findings))},
                           {"records", Json(std::move(records))},
                           {"manifest",
                            description.manifest.empty() ? Json(nullptr) : description.document}})
      .dump();
}

std::vector<at::Tensor> Package::run(const std::vector<at::Tensor>& given) {
  const Surroundings surroundings;
  if (loaded_->num_forks_at_open != num_forks.load(std::memory_order_relaxed)) {
    throw PackageError(Kind::kExecution,
                       "the package was opened before this process was forked, and what other "
                       "threads did in it then is lost: open it in the new process");
  }
  if (given.size() != num_inputs()) {
    throw PackageError(Kind::kInput, "the number of input tensors must be " +
                                         std::to_string(num_inputs()) + ", got " +
                                         std::to_string(given.size()));
  }
  const Contract* contract = loaded_->contract ? &*loaded_->contract : nullptr;
  Inputs inputs(given);
  for (std::size_t i = 0; i < given.size(); ++i) make_readable(inputs, i, contract);
  // The model's work goes to the current stream of the current device; the CPU has neither.
  c10::OptionalDeviceGuard guard;
  if (!loaded_->device.is_cpu()) guard.reset_device(loaded_->device);
  if (contract) contract->fit(inputs, loaded_->device);
  if (loaded_->graphs) return loaded_->graphs->run(inputs.all());
  return loaded_->model->run(inputs.all(), /*generated_checks=*/!contract);
}

std::string Package::verify() {
  const Surroundings surroundings;
  const std::string& path = loaded_->path;
  std::optional<Sample> sample;
  if (!manifest().empty()) {
    sample = read_json(loaded_->archive, path, kManifest, [&](const Json& manifest) {
      return read_sample(loaded_->archive, manifest, device());
    });
  }
  if (!sample) {
    throw PackageError(
        Kind::kNoSample,
        path + ": carries no recorded example to verify by: compile it with sample=True");
  }
  const std::string differs = difference(*sample, run(sample->inputs));
  if (!differs.empty()) {
    throw PackageError(Kind::kVerification,
                       path + ": the recorded example gives another result here: " + differs);
  }
  return "the recorded example gives the recorded outputs here (" +
         counted(sample->inputs.size(), "input") + ", " +
         counted(sample->outputs.size(), "output") + ")";
}

std::size_t Package::num_inputs() const { return loaded_->model->num_inputs(); }

CallSpec Package::call_spec() const { return loaded_->model->call_spec(); }

std::string Package::cuda_graph_fallback() const {
  return loaded_->graphs ? loaded_->graphs->fallback() : loaded_->no_graphs;
}

std::vector<std::string> Package::constant_names() const {
  return loaded_->model->constant_names();
}

ConstantMap Package::constants() const {
  const Surroundings surroundings;
  const c10::DeviceGuard guard(loaded_->device);
  return loaded_->graphs ? loaded_->graphs->constants() : loaded_->model->constants();
}

void Package::load_constants(const ConstantMap& replacements) {
  const Surroundings surroundings;
  const c10::DeviceGuard guard(loaded_->device);
  if (loaded_->graphs) return loaded_->graphs->load_constants(replacements);
  loaded_->model->load_constants(replacements);
}

const std::vector<Finding>& Package::findings() const { return loaded_->findings; }

const std::string& Package::manifest() const { return loaded_->manifest; }

c10::Device Package::device() const { return loaded_->device; }

}  // namespace identity_conv
