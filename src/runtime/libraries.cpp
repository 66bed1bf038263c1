#include "libraries.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <torch/custom_class.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <mutex>
#include <sstream>
#include <stdexcept>

#include "elf_library.h"
#include "error_text.h"
#include "requirements.h"
#include "sha256.h"

namespace identity_conv {
namespace {

const Json::Object& members(const Json& library, const char* name) {
  const Json* found = library.find(name);
  const auto* object = found ? found->as<Json::Object>() : nullptr;
  if (!object) throw std::invalid_argument(std::string("not a manifest: a library has no ") + name);
  return *object;
}

const std::string& as_text(const Json& json) {
  const auto* text = json.as<std::string>();
  if (!text) throw std::invalid_argument("not a manifest: a library's schema is no text");
  return *text;
}

std::vector<std::string> as_texts(const Json* json) {
  std::vector<std::string> texts;
  if (!json || !json->as<Json::Array>()) {
    throw std::invalid_argument("not a manifest: a library lacks a list");
  }
  for (const Json& element : json->elements()) texts.push_back(as_text(element));
  return texts;
}

// Whether a library, or Python, has taken the namespace by TORCH_LIBRARY: a trial of it, undone.
bool is_owned(const std::string& space) {
  try {
    const auto trial = c10::Dispatcher::singleton().registerLibrary(space, "a trial");
    return false;
  } catch (const c10::Error&) {
    return true;
  }
}

std::mutex& loading() {
  static std::mutex one;
  return one;
}

std::set<std::string>& loaded_digests() {
  static std::set<std::string> digests;
  return digests;
}

// Whether a file of that content is mapped, however it came to be.
bool is_mapped(const std::string& sha256, std::uint64_t num_bytes) {
  std::vector<std::string> paths;
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t, void* paths) {
        if (info->dlpi_name)
          static_cast<std::vector<std::string>*>(paths)->emplace_back(info->dlpi_name);
        return 0;
      },
      &paths);
  return std::any_of(paths.begin(), paths.end(), [&](const std::string& path) {
    struct stat status;
    if (stat(path.c_str(), &status) != 0 || static_cast<std::uint64_t>(status.st_size) != num_bytes)
      return false;
    std::ifstream file(path, std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    return Sha256::of(bytes) == sha256;
  });
}

void write_all(int descriptor, const std::string& bytes) {
  for (std::size_t done = 0; done < bytes.size();) {
    const ssize_t wrote = write(descriptor, bytes.data() + done, bytes.size() - done);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0)
      throw std::runtime_error(std::string("it can't be written (") + std::strerror(errno) + ")");
    done += static_cast<std::size_t>(wrote);
  }
}

void open_library(const std::string& path) {
  if (!dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL)) throw std::runtime_error(one_line(dlerror()));
}

// From memory. The descriptor stays open: the linker knows a library by its path too, and another
// would get this one's.
bool load_from_memory(const std::string& name, const std::string& bytes) {
  const int descriptor = memfd_create(name.c_str(), MFD_CLOEXEC);
  if (descriptor < 0) return false;
  const std::string path = "/proc/self/fd/" + std::to_string(descriptor);
  try {
    if (access(path.c_str(), R_OK) != 0) {  // no /proc
      close(descriptor);
      return false;
    }
    write_all(descriptor, bytes);
    open_library(path);
  } catch (...) {
    close(descriptor);
    throw;
  }
  return true;
}

// From a file that is gone again when it is mapped.
void load_from_file(const std::string& bytes) {
  const char* folder = std::getenv("TMPDIR");
  std::string path = std::string(folder && *folder ? folder : "/tmp") + "/identity_conv.XXXXXX";
  const int descriptor = mkostemp(path.data(), O_CLOEXEC);
  if (descriptor < 0)
    throw std::runtime_error(path + " can't be made (" + std::strerror(errno) + ")");
  try {
    write_all(descriptor, bytes);
    open_library(path);
  } catch (...) {
    close(descriptor);
    unlink(path.c_str());
    throw;
  }
  close(descriptor);
  unlink(path.c_str());
}

// The first way in which what is registered differs from the library's own; empty where it agrees.
std::string difference(const PackagedLibrary& library) {
  for (const auto& [name, schema] : library.operators) {
    const std::string registered = operator_schema(name);
    if (registered.empty()) return "lacks the operator " + name;
    if (registered != schema)
      return "has the operator " + registered + ", and the package " + schema;
  }
  for (const auto& [name, schemas] : library.classes) {
    const std::vector<std::string> registered = class_schemas(name);
    if (registered.empty()) return "lacks the class " + name;
    if (registered == schemas) continue;
    for (const std::string& schema : schemas) {
      if (!std::binary_search(registered.begin(), registered.end(), schema)) {
        return "has a class " + name + " without the package's " + schema;
      }
    }
    return "has a class " + name + " with more methods";
  }
  return {};
}

}  // namespace

std::vector<PackagedLibrary> read_libraries(const Json& manifest) {
  std::vector<PackagedLibrary> libraries;
  const Json* listed = manifest.find("libraries");
  if (!listed) return libraries;
  for (const Json& json : listed->elements()) {
    PackagedLibrary library{json.text("record"),         {}, json.text("sha256"), {}, {},
                            as_texts(json.find("owned"))};
    if (library.record.empty())
      throw std::invalid_argument("not a manifest: a library has no record");
    library.name = library.record.substr(library.record.rfind('/') + 1);
    for (const auto& [name, schema] : members(json, "operators")) {
      library.operators.emplace_back(name, as_text(schema));
    }
    for (const auto& [name, schemas] : members(json, "classes")) {
      library.classes.emplace_back(name, as_texts(&schemas));
    }
    libraries.push_back(std::move(library));
  }
  return libraries;
}

std::string operator_schema(const std::string& name) {
  const auto dot = name.find('.');
  const std::string overload = dot == std::string::npos ? "" : name.substr(dot + 1);
  const auto found = c10::Dispatcher::singleton().findSchema({name.substr(0, dot), overload});
  return found ? c10::str(found->schema()) : std::string();
}

std::vector<std::string> class_schemas(const std::string& name) {
  std::string qualified = std::string(kClassPrefix) + name;
  if (const auto colons = qualified.find("::"); colons != std::string::npos)
    qualified.replace(colons, 2, ".");
  std::vector<std::string> schemas;
  const auto type = torch::getCustomClass(qualified);
  if (!type) return schemas;
  for (const torch::jit::Function* method : type->methods())
    schemas.push_back(c10::str(method->getSchema()));
  std::sort(schemas.begin(), schemas.end());
  return schemas;
}

std::string describe_code(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const ElfLibrary code =
      read_elf(std::string{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()});
  const auto list = [](const std::vector<std::string>& texts) {
    Json::Array array;
    for (const std::string& text : texts) array.emplace_back(text);
    return Json(std::move(array));
  };
  return Json(Json::Object{{"soname", Json(code.soname)},
                           {"needed", list(code.needed)},
                           {"undefined", list(code.undefined)},
                           {"cuda", list(code.cuda)}})
      .dump();
}

Standing standing(const PackagedLibrary& library, std::uint64_t num_bytes) {
  {
    const std::lock_guard<std::mutex> lock(loading());
    if (loaded_digests().count(library.sha256)) return {Standing::Kind::kLoaded, "is loaded"};
  }
  std::string taken;
  for (const auto& [name, schema] : library.operators) {
    if (taken.empty() && !operator_schema(name).empty()) taken = "operator " + name;
  }
  for (const auto& [name, schemas] : library.classes) {
    if (taken.empty() && !class_schemas(name).empty()) taken = "class " + name;
  }
  for (const std::string& space : library.owned) {
    if (is_owned(space)) taken = "namespace " + space;
  }
  if (is_mapped(library.sha256, num_bytes)) return {Standing::Kind::kLoaded, "is loaded"};
  if (taken.empty()) return {Standing::Kind::kAbsent, "will be loaded from the package"};
  const std::string differs = difference(library);
  if (differs.empty()) {
    return {Standing::Kind::kAgreeing,
            "the process has registered the " + taken +
                " already, with the same schemas and classes: what is registered is used"};
  }
  return {Standing::Kind::kConflict,
          "the process has registered the " + taken + " already, but " + differs};
}

void load_library(const PackagedLibrary& library, const std::string& bytes) {
  const std::lock_guard<std::mutex> lock(loading());
  if (loaded_digests().count(library.sha256)) return;
  if (!load_from_memory(library.name, bytes)) load_from_file(bytes);
  loaded_digests().insert(library.sha256);
}

std::set<std::string> loaded_libraries() {
  const std::lock_guard<std::mutex> lock(loading());
  return loaded_digests();
}

}  // namespace identity_conv
