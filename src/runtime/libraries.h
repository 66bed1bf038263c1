// The operator libraries that a package carries: what they register, and how they enter a process.
//
//   "libraries": [{"record": "data/identity_conv/lib/libmine.so", "sha256": "...",
//                  "operators": {"mine::scale": "mine::scale(Tensor x) -> Tensor"},
//                  "classes": {"mine::Shift": ["__init__(...) -> NoneType", ...]},
//                  "owned": ["mine"]}]
//
// "owned" are the namespaces of TORCH_LIBRARY, which a process takes from one library only: a
// second one ends it.

#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "json.h"

namespace identity_conv {

struct PackagedLibrary {
  std::string record;
  std::string name;  // the file's own name
  std::string sha256;
  std::vector<std::pair<std::string, std::string>> operators;  // with their schemas
  std::vector<std::pair<std::string, std::vector<std::string>>> classes;
  std::vector<std::string> owned;
};

// Throws std::invalid_argument where the manifest doesn't say what it must.
std::vector<PackagedLibrary> read_libraries(const Json& manifest);

// The schema of an operator that is registered in this process; empty where none is.
std::string operator_schema(const std::string& name);

// The schemas of a registered class's methods, the state's among them, in alphabetical order.
std::vector<std::string> class_schemas(const std::string& name);

// What the library at `path` says of itself, as JSON, without mapping it: the libraries it needs,
// the Python symbols, and the CUDA architectures. Throws std::invalid_argument where it is none.
std::string describe_code(const std::string& path);

// How a library stands to what this process has registered.
struct Standing {
  enum class Kind {
    kAbsent,    // nothing of it is registered: it can be loaded
    kLoaded,    // its very content is loaded
    kAgreeing,  // another library has registered the same schemas, classes and state
    kConflict,  // something else is registered under its names
  };
  Kind kind;
  std::string text;  // one clause
};

Standing standing(const PackagedLibrary& library, std::uint64_t num_bytes);

// Loads the library from its bytes, once per process by its digest and for good, with its symbols
// global, which packages that call it as a C shim need. Only for one that is absent: a second
// registration ends the process. Throws std::runtime_error with what the dynamic linker says.
void load_library(const PackagedLibrary& library, const std::string& bytes);

// The SHA-256 of each library that load_library() has loaded.
std::set<std::string> loaded_libraries();

}  // namespace identity_conv
