// Whether this host, this torch and this process suit a package, told before any of it is mapped.

#pragma once

#include <c10/core/DeviceType.h>

#include <string>
#include <vector>

#include "archive.h"
#include "identity_conv/package.h"
#include "json.h"
#include "libraries.h"

namespace identity_conv {

inline constexpr const char* kManifest = "extra/identity_conv/manifest.json";
inline constexpr const char* kManifestDigest = "extra/identity_conv/manifest.sha256";

// All that a package says of itself, read and of the right form.
struct Description {
  c10::DeviceType device;
  std::string manifest;  // empty in a package of stock torch
  Json document;
  std::vector<PackagedLibrary> libraries;
};

// Every cause, fatal ones among them, in the order in which they are looked at. No finding throws.
std::vector<Finding> preflight(const PackageArchive& archive, const Description& description,
                               const PackageOptions& options);

}  // namespace identity_conv
