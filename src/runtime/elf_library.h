// What a shared library says of itself, read from its bytes without mapping it: 64-bit
// little-endian ELF.

#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace identity_conv {

struct ElfLibrary {
  struct Version {
    std::string library;  // "libc.so.6"
    std::string version;  // "GLIBC_2.34"
  };

  std::string machine;                    // "x86_64", "aarch64", or ELF's number of another
  std::string soname;                     // empty where it has none
  std::vector<std::string> needed;        // DT_NEEDED
  std::vector<std::string> search_paths;  // the folders of DT_RUNPATH or DT_RPATH
  std::vector<Version> needed_versions;   // symbol versions that others must define
  std::vector<std::string> defined_versions;
  std::vector<std::string> undefined;  // symbols that others must define, weak ones left out
  std::vector<std::string> cuda;       // "sm_90" for machine code, "compute_90" for PTX
};

// Throws std::invalid_argument where `file` is no such library, or names bytes that it lacks.
ElfLibrary read_elf(std::string_view file);

}  // namespace identity_conv
