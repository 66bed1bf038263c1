#include "preflight.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <link.h>
#include <sys/utsname.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner.h>
#include <torch/version.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <fstream>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <sstream>
#include <stdexcept>

#include "elf_library.h"
#include "error_text.h"
#include "identity_conv/wording.h"

namespace identity_conv {
namespace {

using Kind = PackageError::Kind;
using Verdict = Finding::Verdict;

Finding ok(const std::string& check, const std::string& text) {
  return {check, Verdict::kOk, text, Kind::kHost};
}

Finding warning(const std::string& check, const std::string& text) {
  return {check, Verdict::kWarning, text, Kind::kHost};
}

Finding fatal(const std::string& check, const std::string& text, Kind kind = Kind::kHost) {
  return {check, Verdict::kFatal, text, kind};
}

std::string join(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

std::vector<std::string> texts(const Json* list) {
  std::vector<std::string> found;
  if (!list) return found;
  for (const Json& element : list->elements()) {
    if (const auto* text = element.as<std::string>()) found.push_back(*text);
  }
  return found;
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  std::string bytes(file ? static_cast<std::size_t>(file.tellg()) : 0, '\0');
  file.seekg(0);
  file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  return bytes;
}

// --- the package itself -------------------------------------------------------------------------

// Each record has the digest that the manifest gives it, and there is no other.
Finding check_records(const PackageArchive& archive, const Json& manifest) {
  const std::string check = "records";
  const auto damaged = [&](const std::string& text) {
    return fatal(check, "is corrupted: " + text, Kind::kDamaged);
  };
  if (!archive.has(kManifestDigest)) return damaged("its manifest has no digest");
  try {
    if (one_line(archive.read(kManifestDigest)) != archive.sha256(kManifest)) {
      return damaged("its manifest isn't the one it was made with");
    }
    const Json* listed = manifest.find("records");
    const auto* records = listed ? listed->as<Json::Object>() : nullptr;
    if (!records) return damaged("its manifest names no records");
    std::map<std::string_view, std::string> digests;
    for (const auto& [name, digest] : *records) {
      if (!archive.has(name)) return damaged("it lacks the record " + one_line(name));
      digests[name] = digest.as<std::string>() ? *digest.as<std::string>() : "";
    }
    for (const auto& record : archive.records()) {
      if (record.name == kManifest || record.name == kManifestDigest) continue;
      const auto digest = digests.find(record.name);
      if (digest == digests.end())
        return damaged("its manifest knows no record " + one_line(record.name));
      if (archive.sha256(record.name) != digest->second) {
        return damaged("its record " + one_line(record.name) + " differs from its digest");
      }
    }
  } catch (const PackageError& error) {
    return fatal(check, error.what(), error.kind());
  }
  return ok(check, counted(archive.records().size(), "record") + ", each of its digest");
}

// Without a manifest there are the archive's checksums.
Finding check_checksums(const PackageArchive& archive) {
  try {
    for (const auto& record : archive.records()) archive.read(record.name);
  } catch (const PackageError& error) {
    std::string text = error.what();
    const auto begin = text.find("is corrupted");
    return fatal("records", begin == text.npos ? text : text.substr(begin), error.kind());
  }
  return ok("records",
            counted(archive.records().size(), "record") + ", each of its checksum (no manifest)");
}

// --- the host -----------------------------------------------------------------------------------

Finding check_platform(const Json& host) {
  const std::string wanted = host.text("platform");
  utsname name{};
  uname(&name);
  std::string system = name.sysname;
  std::transform(system.begin(), system.end(), system.begin(),
                 [](unsigned char c) { return std::tolower(c); });
  const std::string here = system + " " + name.machine;
  if (wanted == here) return ok("platform", here);
  return fatal("platform", "was compiled for " + wanted + ", and this is " + here);
}

// "2.13.0" of "2.13.0+cu130".
std::string release(const std::string& version) { return version.substr(0, version.find('+')); }

std::vector<int> numbers(const std::string& version) {
  std::vector<int> parts;
  std::istringstream stream(release(version));
  for (std::string part; std::getline(stream, part, '.');) {
    int value = 0;
    std::from_chars(part.data(), part.data() + part.size(), value);
    parts.push_back(value);
  }
  return parts;
}

Finding check_torch(const Json& manifest, bool has_libraries) {
  const Json* torch = manifest.find("torch");
  const std::string wanted = torch ? torch->text("version") : std::string();
  const std::string here = TORCH_VERSION;
  const Json* abi = torch ? torch->find("cxx11 abi") : nullptr;
  const bool new_abi = abi && abi->as<bool>() && *abi->as<bool>();
#if defined(_GLIBCXX_USE_CXX11_ABI) && _GLIBCXX_USE_CXX11_ABI
  constexpr bool kNewAbi = true;
#else
  constexpr bool kNewAbi = false;
#endif
  const std::string both = "torch " + wanted + ", and this is torch " + here;
  if (has_libraries && new_abi != kNewAbi) {
    return fatal("torch", std::string("has libraries of the C++11 ABI ") + (new_abi ? "1" : "0") +
                              ", and this torch has " + (kNewAbi ? "1" : "0"));
  }
  if (release(wanted) == release(here))
    return ok("torch", "compiled by torch " + wanted + ", run by " + here);
  if (has_libraries)
    return fatal("torch",
                 "has operator libraries for " + both + ": compile the package with this one");
  if (numbers(wanted) > numbers(here)) {
    return fatal("torch", "was compiled by " + both + ": use that or a newer one");
  }
  return warning("torch", "was compiled by " + both);
}

// The processor's instruction sets by Linux's names; empty where they can't be read.
std::set<std::string> instruction_sets() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, 5, "flags") != 0 && line.compare(0, 8, "Features") != 0) continue;
    std::istringstream words(line.substr(std::min(line.find(':') + 1, line.size())));
    return {std::istream_iterator<std::string>(words), {}};
  }
  return {};
}

Finding check_instruction_sets(const Json& host) {
  const std::vector<std::string> wanted = texts(host.find("instruction sets"));
  const std::set<std::string> here = instruction_sets();
  if (here.empty() && !wanted.empty()) {
    return warning(
        "CPU", "/proc/cpuinfo doesn't tell this processor's instruction sets: the package needs " +
                   join(wanted));
  }
  std::vector<std::string> missing;
  for (const std::string& each : wanted) {
    if (!here.count(each)) missing.push_back(each);
  }
  if (!missing.empty()) {
    return fatal("CPU", "uses instructions that this processor lacks: " + join(missing));
  }
  return ok("CPU", wanted.empty() ? "no particular instruction sets" : "has " + join(wanted));
}

// --- devices ------------------------------------------------------------------------------------

Finding check_device(c10::DeviceType type, const PackageOptions& options) {
  const std::string check = "device";
  const std::string name = c10::DeviceTypeName(type, /*lower_case=*/true);
  if (torch::inductor::getAOTIModelRunnerRegistry().count(name) == 0) {
    return fatal(check, "was compiled for " + name + ", which this build of torch lacks");
  }
  if (type == c10::DeviceType::CPU) return ok(check, "cpu");
  const int count =
      c10::impl::hasDeviceGuardImpl(type) ? c10::impl::VirtualGuardImpl(type).deviceCount() : 0;
  if (count == 0) {
    return fatal(check, "was compiled for " + name + ", and no such device is visible here");
  }
  if (options.device && options.device->index() >= count) {
    return fatal(check, "device " + options.device->str() + " was asked for, and " + name +
                            " has " + counted(count, "device"));
  }
  return ok(check, std::to_string(count) + " of " + name);
}

// Compute capability of the visible GPU `index` as 10 * major + minor; none where the driver, which
// torch has loaded by now, doesn't tell.
std::optional<int> compute_capability(int index) {
  constexpr int kMajor = 75;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, and MINOR
  constexpr int kMinor = 76;
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (!driver) return std::nullopt;
  using Get = int (*)(int*, int);
  using Attribute = int (*)(int*, int, int);
  const auto get = reinterpret_cast<Get>(dlsym(driver, "cuDeviceGet"));
  const auto attribute = reinterpret_cast<Attribute>(dlsym(driver, "cuDeviceGetAttribute"));
  int device = 0;
  int major = 0;
  int minor = 0;
  const bool told = get && attribute && get(&device, index) == 0 &&
                    attribute(&major, kMajor, device) == 0 &&
                    attribute(&minor, kMinor, device) == 0;
  dlclose(driver);
  if (!told) return std::nullopt;
  return 10 * major + minor;
}

// Machine code runs on its own major version and the same minor or a later one; PTX on anything as
// new, compiled by the driver.
bool runs_on(const std::string& code, int capability) {
  const auto digits = code.find('_');
  int compiled_for = 0;
  const char* begin = code.data() + std::min(digits == code.npos ? 0 : digits + 1, code.size());
  std::from_chars(begin, code.data() + code.size(), compiled_for);
  const bool is_ptx = code.compare(0, 8, "compute_") == 0;
  return compiled_for <= capability && (is_ptx || compiled_for / 10 == capability / 10);
}

Finding check_gpu_code(const std::string& what, const std::vector<std::string>& code,
                       std::optional<int> capability) {
  const std::string check = "GPU code";
  if (!capability)
    return warning(check, what + " has code for " + join(code) +
                              ", and the driver doesn't tell which this GPU needs");
  const std::string here =
      std::to_string(*capability / 10) + "." + std::to_string(*capability % 10);
  if (std::any_of(code.begin(), code.end(),
                  [&](auto& each) { return runs_on(each, *capability); })) {
    return ok(check, what + " has code for " + join(code) +
                         ", and this GPU is of compute capability " + here);
  }
  return fatal(check, what + " has GPU code for " + join(code) +
                          " alone, and this GPU is of compute capability " + here);
}

// --- what the code is linked against ------------------------------------------------------------

// The files mapped into this process, by the name that others need them by.
std::map<std::string, std::string> mapped_libraries() {
  std::map<std::string, std::string> found;
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* found) {
        const std::string path = info->dlpi_name ? info->dlpi_name : "";
        if (!path.empty()) {
          static_cast<std::map<std::string, std::string>*>(found)->emplace(
              path.substr(path.rfind('/') + 1), path);
        }
        return 0;
      },
      &found);
  return found;
}

// Whether the dynamic linker has, or would find, a library of that name.
bool can_be_found(const std::string& name, const ElfLibrary& wanted_by) {
  if (void* loaded = dlopen(name.c_str(), RTLD_LAZY | RTLD_NOLOAD)) {
    dlclose(loaded);
    return true;
  }
  std::vector<std::string> folders = wanted_by.search_paths;
  if (const char* more = std::getenv("LD_LIBRARY_PATH")) {
    std::istringstream stream(more);
    for (std::string folder; std::getline(stream, folder, ':');) folders.push_back(folder);
  }
  for (const char* folder : {"/lib64", "/usr/lib64", "/lib", "/usr/lib"})
    folders.emplace_back(folder);
  if (std::any_of(folders.begin(), folders.end(),
                  [&](auto& folder) { return access((folder + "/" + name).c_str(), R_OK) == 0; })) {
    return true;
  }
  // The linker's index of other folders holds the names of their libraries, each with a NUL.
  const std::string index = read_file("/etc/ld.so.cache");
  const std::string entry = "/" + name + '\0';
  return index.find(entry) != std::string::npos;
}

// The version that is the latest of its series ("GLIBC_2.36" of the GLIBC_ ones), where numbers
// tell.
std::string latest(const std::vector<std::string>& versions, const std::string& like) {
  const std::string series = like.substr(0, like.find('_') + 1);
  std::string best;
  for (const std::string& version : versions) {
    if (version.compare(0, series.size(), series) != 0 ||
        !std::isdigit(static_cast<unsigned char>(version[series.size()])))
      continue;
    if (best.empty() ||
        numbers(version.substr(series.size())) > numbers(best.substr(series.size())))
      best = version;
  }
  return best;
}

class LinkCheck {
 public:
  explicit LinkCheck(std::vector<std::string> in_package) : in_package_(std::move(in_package)) {}

  // Every cause for which the library `name` could not be linked here.
  std::vector<std::string> causes(const std::string& name, const ElfLibrary& library) {
    std::vector<std::string> found;
    utsname host{};
    uname(&host);
    if (library.machine != host.machine) found.push_back(name + " is code for " + library.machine);
    for (const std::string& needed : library.needed) {
      const bool own =
          std::find(in_package_.begin(), in_package_.end(), needed) != in_package_.end();
      if (own || can_be_found(needed, library)) continue;
      const bool python = needed.find("python") != std::string::npos;
      found.push_back(name + " needs " + needed + ", which isn't here" +
                      (python ? " (build it without Python: see identity_conv.Extension)" : ""));
    }
    for (const auto& needed : library.needed_versions) {
      const std::vector<std::string>* defined = versions_of(needed.library);
      if (!defined || std::find(defined->begin(), defined->end(), needed.version) != defined->end())
        continue;
      const std::string have = latest(*defined, needed.version);
      found.push_back(name + " needs " + needed.version + " of " + needed.library +
                      ", and this one's latest is " + (have.empty() ? "of another kind" : have));
    }
    return found;
  }

 private:
  // None where the library isn't mapped: then it is looked for by its name alone.
  const std::vector<std::string>* versions_of(const std::string& library) {
    const auto known = versions_.find(library);
    if (known != versions_.end()) return &known->second;
    const auto mapped = mapped_.find(library);
    if (mapped == mapped_.end()) return nullptr;
    try {
      return &(versions_[library] = read_elf(read_file(mapped->second)).defined_versions);
    } catch (const std::invalid_argument&) {
      return nullptr;
    }
  }

  std::vector<std::string> in_package_;
  std::map<std::string, std::string> mapped_ = mapped_libraries();
  std::map<std::string, std::vector<std::string>> versions_;
};

struct NamedElf {
  std::string name;
  ElfLibrary elf;
};

// The package's own libraries and the model's, each read as ELF.
std::vector<NamedElf> read_code(const PackageArchive& archive, const Description& description,
                                std::vector<Finding>& findings) {
  std::vector<NamedElf> code;
  const auto add = [&](const std::string& record, const std::string& name) {
    try {
      code.push_back({name, read_elf(archive.read(record))});
    } catch (const std::invalid_argument& error) {
      findings.push_back(fatal("libraries",
                               "is corrupted: its record " + one_line(record) + ": " + error.what(),
                               Kind::kDamaged));
    } catch (const PackageError&) {
      // check_records has said it.
    }
  };
  for (const PackagedLibrary& library : description.libraries) add(library.record, library.name);
  for (const std::string& record : archive.model_records(".so")) add(record, "the model");
  return code;
}

void check_code(const PackageArchive& archive, const Description& description,
                std::vector<Finding>& findings) {
  const std::vector<NamedElf> code = read_code(archive, description, findings);
  std::vector<std::string> own;
  for (const NamedElf& each : code) own.push_back(each.elf.soname);
  LinkCheck links(std::move(own));
  std::vector<std::string> causes;
  for (const NamedElf& each : code) {
    for (const std::string& cause : links.causes(each.name, each.elf)) causes.push_back(cause);
  }
  for (const std::string& cause : causes) findings.push_back(fatal("linking", cause));
  if (causes.empty())
    findings.push_back(ok("linking", "every library and symbol version that it needs is here"));
}

void check_gpu(const PackageArchive& archive, const Description& description,
               const PackageOptions& options, std::vector<Finding>& findings) {
  const c10::impl::VirtualGuardImpl guard(description.device);
  const int index = options.device && options.device->has_index() ? options.device->index()
                                                                  : guard.getDevice().index();
  const std::optional<int> capability = compute_capability(index);
  if (const Json* host = description.document.find("host")) {
    const std::vector<std::string> code = texts(host->find("cuda"));
    if (!code.empty()) findings.push_back(check_gpu_code("the model", code, capability));
  }
  std::vector<Finding> said_elsewhere;
  for (const NamedElf& each : read_code(archive, description, said_elsewhere)) {
    if (!each.elf.cuda.empty())
      findings.push_back(check_gpu_code(each.name, each.elf.cuda, capability));
  }
}

void check_libraries(const PackageArchive& archive, const Description& description,
                     std::vector<Finding>& findings) {
  for (const PackagedLibrary& library : description.libraries) {
    std::uint64_t num_bytes = 0;
    for (const auto& record : archive.records()) {
      if (record.name == library.record) num_bytes = record.size;
    }
    const Standing stands = standing(library, num_bytes);
    const std::string text = library.name + ": " + stands.text;
    switch (stands.kind) {
      case Standing::Kind::kConflict:
        findings.push_back(fatal("registration", text, Kind::kLibraryConflict));
        break;
      case Standing::Kind::kAgreeing:
        findings.push_back(warning("registration", text));
        break;
      default:
        findings.push_back(ok("registration", text));
    }
  }
}

}  // namespace

std::vector<Finding> preflight(const PackageArchive& archive, const Description& description,
                               const PackageOptions& options) {
  std::vector<Finding> findings;
  const bool has_manifest = !description.manifest.empty();
  findings.push_back(has_manifest ? check_records(archive, description.document)
                                  : check_checksums(archive));
  if (options.expected_sha256) {
    std::string expected = *options.expected_sha256;
    std::transform(expected.begin(), expected.end(), expected.begin(),
                   [](unsigned char c) { return std::tolower(c); });
    const std::string digest = archive.sha256();
    findings.push_back(
        digest == expected
            ? ok("digest", digest)
            : fatal("digest", "has the SHA-256 " + digest + ", and " + expected + " was expected",
                    Kind::kDamaged));
  }
  if (has_manifest) {
    static const Json none{Json::Object()};
    const Json* host = description.document.find("host");
    findings.push_back(check_platform(host ? *host : none));
    findings.push_back(check_torch(description.document, !description.libraries.empty()));
    findings.push_back(check_instruction_sets(host ? *host : none));
  }
  const Finding device = check_device(description.device, options);
  findings.push_back(device);
  if (device.verdict == Verdict::kOk && description.device == c10::DeviceType::CUDA) {
    check_gpu(archive, description, options, findings);
  }
  check_code(archive, description, findings);
  check_libraries(archive, description, findings);
  return findings;
}

}  // namespace identity_conv
