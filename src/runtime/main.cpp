// identity-conv-run: runs a compiled package on tensors from files, without Python.

#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <getopt.h>
#include <torch/version.h>

#include <unistd.h>
#include <algorithm>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "error_text.h"
#include "identity_conv/package.h"
#include "identity_conv/version.h"
#include "identity_conv/wording.h"
#include "tensor_file.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kHelp =
    R"(usage: identity-conv-run PACKAGE [--input FILE]... [--output FILE] [--repeat N] [--verify]
                         [--library LIB]...

Runs a model compiled by AOTInductor (model.pt2) on tensors from files. The operator libraries that it
needs come out of the package.

  --input FILE    a tensor, or a list or tuple of tensors, as torch.save writes it; may be
                  repeated: the inputs are all their tensors, in order, moved to the package's
                  device
  --output FILE   write what the model returns for torch.load: one tensor, or a tuple of several
  --repeat N      time N further calls, and print the first result's time since start and
                  the median and spread of a call; N is a positive integer
  --verify        run the example that the package carries and compare with what it recorded
  --library LIB   load an operator library before the package, for one that carries none; may be
                  repeated
  --help          print this
  --version       print the version, and that of the torch that it was built for

At least one of --output, --repeat and --verify is needed. A package is native code: run only what you
trust.

Exit status: 0 done; 1 refused or failed, with the reason on stderr; 2 wrong usage.

Example:
  identity-conv-run model.pt2 --verify
  identity-conv-run model.pt2 --input x.pt --output y.pt
)";

enum ExitStatus { kDone = 0, kFailed = 1, kWrongUsage = 2 };

struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Arguments {
  bool help = false;
  bool version = false;
  bool verify = false;
  std::string package;
  std::vector<std::string> libraries;
  std::vector<std::string> inputs;
  std::optional<std::string> output;
  std::optional<int> repeat;
};

int positive_integer(const std::string& option, std::string_view text) {
  int value = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), value);
  if (parsed.ec != std::errc() || parsed.ptr != text.data() + text.size() || value < 1) {
    throw UsageError(option + " must be a positive integer, got '" + std::string(text) + "'");
  }
  return value;
}

Arguments parse_arguments(int argc, char** argv) {
  const option options[] = {
      {"library", required_argument, nullptr, 'l'}, {"input", required_argument, nullptr, 'i'},
      {"output", required_argument, nullptr, 'o'},  {"repeat", required_argument, nullptr, 'r'},
      {"verify", no_argument, nullptr, 'v'},        {"help", no_argument, nullptr, 'h'},
      {"version", no_argument, nullptr, 'V'},       {nullptr, 0, nullptr, 0}};
  Arguments arguments;
  // The leading ':' keeps getopt from printing, and tells a missing value from an unknown option.
  for (int option; (option = getopt_long(argc, argv, ":h", options, nullptr)) != -1;) {
    switch (option) {
      case 'l':
        arguments.libraries.emplace_back(optarg);
        break;
      case 'i':
        arguments.inputs.emplace_back(optarg);
        break;
      case 'o':
        if (*optarg == '\0') throw UsageError("--output must name a file, got ''");
        if (arguments.output) {
          throw UsageError("--output is one file, which holds every output: give it once, got '" +
                           *arguments.output + "' and '" + optarg + "'");
        }
        arguments.output = optarg;
        break;
      case 'r':
        arguments.repeat = positive_integer("--repeat", optarg);
        break;
      case 'v':
        arguments.verify = true;
        break;
      case 'h':
        arguments.help = true;
        return arguments;
      case 'V':
        arguments.version = true;
        return arguments;
      case ':':
        throw UsageError(std::string(argv[optind - 1]) + " needs a value");
      default:
        throw UsageError(std::string("there is no option ") + argv[optind - 1]);
    }
  }
  if (optind == argc) throw UsageError("a package is needed");
  if (optind + 1 < argc) {
    throw UsageError(std::string("one package is taken, got '") + argv[optind] + "' and '" +
                     argv[optind + 1] + "'");
  }
  if (!arguments.output && !arguments.repeat && !arguments.verify) {
    throw UsageError("--output, --repeat or --verify is needed");
  }
  arguments.package = argv[optind];
  return arguments;
}

// Loads the library for good, with its symbols global: a package may call them as a C shim.
std::string library_being_loaded;

// A library that registers a second time what another has throws as it is mapped, which nothing can
// catch: the process ends, with a sentence all the same.
[[noreturn]] void end_with_a_sentence() {
  std::string reason = "it ends the process as it loads";
  try {
    if (const std::exception_ptr error = std::current_exception()) std::rethrow_exception(error);
  } catch (const std::exception& error) {
    reason = identity_conv::error_text(error);
  }
  std::fprintf(stderr, "identity-conv-run: cannot load the operator library %s: %s\n",
               library_being_loaded.c_str(), reason.c_str());
  std::_Exit(1);
}

void load_library(const std::string& library) {
  library_being_loaded = library;
  const std::terminate_handler before = std::set_terminate(end_with_a_sentence);
  // dlopen looks a name without a slash up in the system's folders, not in the current one.
  const bool is_file = std::filesystem::exists(library);
  const std::string path = is_file ? std::filesystem::absolute(library).string() : library;
  const bool loaded = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL) != nullptr;
  std::set_terminate(before);
  if (loaded) return;

  const std::string reason = identity_conv::one_line(dlerror());
  const bool wants_python = reason.find("undefined symbol: Py") != std::string::npos ||
                            reason.find("undefined symbol: _Py") != std::string::npos;
  throw std::runtime_error(
      "cannot load the operator library " + library + ": " + reason +
      (wants_python ? " (it needs Python: build it without torch/extension.h)" : ""));
}

std::vector<at::Tensor> read_inputs(const std::vector<std::string>& files, c10::Device device) {
  std::vector<at::Tensor> inputs;
  for (const std::string& file : files) {
    for (const at::Tensor& tensor : identity_conv::read_tensors(file)) {
      inputs.push_back(tensor.to(device));
    }
  }
  return inputs;
}

class CerrRedirection {
 public:
  explicit CerrRedirection(std::ostream& target) : before_(std::cerr.rdbuf(target.rdbuf())) {}
  CerrRedirection(const CerrRedirection&) = delete;
  CerrRedirection& operator=(const CerrRedirection&) = delete;
  ~CerrRedirection() { std::cerr.rdbuf(before_); }

 private:
  std::streambuf* before_;
};

// Compiled models print on std::cerr what they throw. That is kept back, and shown only where the
// exception doesn't say it: packages of torch 2.11 can't.
std::vector<at::Tensor> run_quietly(identity_conv::Package& package,
                                    const std::vector<at::Tensor>& inputs) {
  std::ostringstream printed;
  try {
    const CerrRedirection to_printed(printed);
    return package.run(inputs);
  } catch (const std::exception& error) {
    if (std::strstr(error.what(), "API call failed")) std::cerr << printed.str();
    throw;
  }
}

double microseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

// Waits for what was queued on the device.
void synchronize(c10::Device device) {
  if (device.is_cpu()) return;
  const c10::impl::VirtualGuardImpl guard(device.type());
  guard.synchronizeStream(guard.getStream(device));
}

volatile std::sig_atomic_t interrupted = 0;

// Ends by the usual way out, which removes the package's temporary folder.
void throw_if_interrupted() {
  if (interrupted) throw std::runtime_error("interrupted");
}

void run_and_wait(identity_conv::Package& package, const std::vector<at::Tensor>& inputs) {
  throw_if_interrupted();
  package.run(inputs);
  synchronize(package.device());
}

std::vector<double> time_calls(identity_conv::Package& package,
                               const std::vector<at::Tensor>& inputs, int count) {
  for (int i = 0; i < std::min(count, 10); ++i) run_and_wait(package, inputs);
  std::vector<double> times;
  times.reserve(count);
  for (int i = 0; i < count; ++i) {
    const auto start = Clock::now();
    run_and_wait(package, inputs);
    times.push_back(microseconds_since(start));
  }
  return times;
}

void print_times(double first_result_s, std::vector<double> times) {
  std::sort(times.begin(), times.end());
  const auto quantile = [&](double q) {
    return times[static_cast<std::size_t>(q * static_cast<double>(times.size() - 1) + 0.5)];
  };
  std::printf(
      "first result %.2f s after start; median %.1f us a call over %s "
      "(min %.1f, p25 %.1f, p75 %.1f)\n",
      first_result_s, quantile(0.5), identity_conv::counted(times.size(), "call").c_str(),
      times.front(), quantile(0.25), quantile(0.75));
}

// How long this process has lived, loading its libraries included, in steps of the kernel's 10 ms;
// 0 where /proc doesn't tell.
double seconds_since_process_start() {
  std::ifstream stat("/proc/self/stat");
  const std::string text((std::istreambuf_iterator<char>(stat)), std::istreambuf_iterator<char>());
  // After the name, in brackets and with anything in it, the 20th field is the start in clock
  // ticks.
  std::istringstream fields(
      text.substr(text.rfind(')') == text.npos ? text.size() : text.rfind(')') + 1));
  std::string skipped;
  for (int i = 0; i < 19; ++i) fields >> skipped;
  double ticks = 0;
  timespec now{};
  if (!(fields >> ticks) || clock_gettime(CLOCK_BOOTTIME, &now) != 0) return 0;
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9 -
         ticks / static_cast<double>(sysconf(_SC_CLK_TCK));
}

void run(const Arguments& arguments) {
  for (int signal : {SIGINT, SIGTERM}) std::signal(signal, [](int) { interrupted = 1; });
  for (const std::string& library : arguments.libraries) load_library(library);
  auto package = identity_conv::Package::open(arguments.package);
  for (const identity_conv::Finding& finding : package.findings()) {
    if (finding.verdict == identity_conv::Finding::Verdict::kWarning) {
      std::fprintf(stderr, "identity-conv-run: note: %s\n", finding.text.c_str());
    }
  }
  if (arguments.verify) std::printf("%s\n", package.verify().c_str());
  if (!arguments.output && !arguments.repeat) return;

  const std::vector<at::Tensor> inputs = read_inputs(arguments.inputs, package.device());

  const std::vector<at::Tensor> outputs = run_quietly(package, inputs);
  synchronize(package.device());
  const double first_result = seconds_since_process_start();

  if (arguments.output) identity_conv::write_tensors(*arguments.output, outputs);
  if (arguments.repeat) {
    print_times(first_result, time_calls(package, inputs, *arguments.repeat));
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Arguments arguments = parse_arguments(argc, argv);
    if (arguments.help) {
      std::fputs(kHelp, stdout);
    } else if (arguments.version) {
      std::printf("identity-conv-run, version %s, torch %s\n", IDENTITY_CONV_VERSION,
                  TORCH_VERSION);
    } else {
      run(arguments);
    }
    if (std::fflush(stdout) != 0) throw std::runtime_error("stdout cannot be written");
    return kDone;
  } catch (const UsageError& error) {
    std::fprintf(stderr, "identity-conv-run: %s (see --help)\n", error.what());
    return kWrongUsage;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "identity-conv-run: %s\n", identity_conv::error_text(error).c_str());
    return kFailed;
  }
}
