// Loading and running a compiled package (`model.pt2`) from C++, without Python.
//
//   identity_conv::Package package = identity_conv::Package::open("model.pt2");
//   std::vector<at::Tensor> outputs = package.run({x});
//
// A package is native code: open only files that you trust.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace identity_conv {

// Why a package was refused or a run failed; what() is one sentence for the user.
class PackageError : public std::runtime_error {
 public:
  enum class Kind {
    kNoSuchFile,        // there is no file at the path
    kNotAPackage,       // the file is foreign, or another kind of torch archive
    kDamaged,           // the file was a package, and isn't whole any more
    kFormat,            // the manifest has a format that this runtime doesn't know
    kHost,              // this machine, or this build of torch, lacks what the package needs
    kLibraryNotLoaded,  // an operator or a class of the package is not registered
    kLibraryConflict,   // the process has registered something else under the package's names
    kInput,             // the inputs are not those that the package was compiled for
    kExecution,         // the model was given right inputs and failed
    kNoSample,          // the package carries no example to be verified by
    kVerification,      // the recorded example gives another result here
  };

  PackageError(Kind kind, const std::string& sentence)
      : std::runtime_error(sentence), kind_(kind) {}

  Kind kind() const noexcept { return kind_; }

 private:
  Kind kind_;
};

// Whether calls on a GPU are captured into CUDA graphs and replayed. Each combination of input
// sizes has a graph of its own, captured on its second call, for the first 16 that come back.
enum class CudaGraph {
  kOff,
  kOn,
  // run() returns the graph's own memory, without a copy: the next call with inputs of the same
  // sizes overwrites it.
  kReuseOutputs,
};

// One thing that was looked at before a package is loaded, and what came of it.
struct Finding {
  enum class Verdict { kOk, kWarning, kFatal };

  std::string check;  // "platform", "torch", "CPU", ...
  Verdict verdict;
  std::string text;
  PackageError::Kind kind;  // of the error that a fatal one gives
};

struct PackageOptions {
  // Where to load the model: a device of the type that the package was compiled for. Without an
  // index, or not given, it is the current one of that type.
  std::optional<c10::Device> device;
  // How many calls of run() may execute at once, 1 to 1024; a further one waits.
  std::size_t num_runners = 1;
  // With graphs one call at a time is queued on the GPU, whatever num_runners says.
  CudaGraph cuda_graph = CudaGraph::kOff;
  // What the file's SHA-256 must be, in 64 hexadecimal digits; anything where not given.
  std::optional<std::string> expected_sha256;
};

// Constants of a model (weights and buffers) by the names that they had in it.
using ConstantMap = std::map<std::string, at::Tensor>;

// How the flat lists of run() fold into what the model took and returned: two pytree specs, in the
// JSON of `torch.utils._pytree.treespec_dumps`.
struct CallSpec {
  std::string inputs;
  std::string outputs;
};

// A model loaded from its package. Movable, not copyable; a moved-from Package may only be
// destroyed or assigned to. The unpacked files live in a temporary folder until destruction.
class Package {
 public:
  using Options = PackageOptions;

  // Loads the package at `path`, and the operator libraries in it. Nothing is mapped where a
  // finding is fatal: the error then tells all that are. A library whose names the process has
  // registered isn't loaded: what is registered is used where it agrees, and else the package is
  // refused. A package without libraries needs its operators and classes registered before. Throws
  // PackageError, never of kind kInput, kExecution, kNoSample or kVerification; and
  // std::invalid_argument for options that are out of range, or a device of another type.
  static Package open(const std::string& path, Options options = Options());

  // What open() would find, fatal or not, without mapping anything. Throws PackageError where the
  // file is no package, or one that this runtime can't read.
  static std::vector<Finding> preflight(const std::string& path,
                                        const Options& options = Options());

  // The package's manifest, the sizes of its records, and the findings, as one JSON document.
  // Throws as preflight() does.
  static std::string inspect(const std::string& path, const Options& options = Options());

  Package(Package&&) noexcept;
  Package& operator=(Package&&) noexcept;
  ~Package();

  // Runs the model. `inputs` are the tensors of the flattened arguments, in order, on device(),
  // with the dtypes and sizes that the manifest says; one that is laid out otherwise than the code
  // expects is copied first. Without a manifest (a package of stock torch) the checks that the
  // compiler generated are all there is. Inputs that require grad are run without it; one with a
  // forward-mode tangent is refused. The calling thread's modes (fake tensors, autocast,
  // transforms) take no part in it. On CUDA the work is queued on the current stream of device().
  // Safe to call from several threads. A process that was forked opens a package of its own. Throws
  // PackageError of kind kInput or kExecution, and holds on to no input after it.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs);

  // Runs the example that the package carries and compares the outputs with the recorded ones:
  // exactly, or within the manifest's tolerance. Returns a sentence that says what was compared.
  // Throws PackageError of kind kNoSample where it carries none, kVerification where an output
  // differs, and what run() throws.
  std::string verify();

  // What was found before loading.
  const std::vector<Finding>& findings() const;

  // How many tensors run() takes.
  std::size_t num_inputs() const;

  CallSpec call_spec() const;

  // Why calls run without a CUDA graph though one was asked for; empty while none did.
  std::string cuda_graph_fallback() const;

  // The names of the model's constants, sorted.
  std::vector<std::string> constant_names() const;

  // Copies of the constants, on device().
  ConstantMap constants() const;

  // Replaces the constants that are named; the others stay. Each must have the dtype and the sizes
  // of the old one, on any device, and is copied. Other threads may run the model meanwhile: each
  // call sees all of the old ones or all of the new ones. Throws PackageError of kind kInput where
  // one doesn't fit, and leaves the old ones then and on any other failure.
  void load_constants(const ConstantMap& replacements);

  // The manifest's JSON; empty in a package without one.
  const std::string& manifest() const;

  // Where the model was loaded.
  c10::Device device() const;

 private:
  class Loaded;
  explicit Package(std::unique_ptr<Loaded> loaded);

  std::unique_ptr<Loaded> loaded_;
};

}  // namespace identity_conv
