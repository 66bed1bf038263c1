// The files of a compiled model, unpacked for as long as it is loaded.

#pragma once

#include <string>

#include "archive.h"
#include "temporary_folder.h"

namespace identity_conv {

class UnpackedModel {
 public:
  // Throws PackageError where the archive is damaged or holds no library, or where its files can't
  // be written.
  explicit UnpackedModel(const PackageArchive& archive);

  // The compiled model's library, and the folder that it lies in, with what it reads.
  const std::string& library() const { return library_; }
  const std::string& folder() const { return folder_; }

  // The weights that lie beside the library; empty where they are in it.
  const std::string& weights() const { return weights_; }

 private:
  TemporaryFolder root_;
  std::string folder_;
  std::string library_;
  std::string weights_;
};

}  // namespace identity_conv
