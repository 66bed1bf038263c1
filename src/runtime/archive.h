// A package file as an archive: which kind it is, and its records, read without mapping its code.

#pragma once

#include <caffe2/serialize/inline_container.h>

#include <string>
#include <string_view>
#include <vector>

namespace identity_conv {

// The archive of one AOTInductor package (`archive_format` pt2, one model named "model").
class PackageArchive {
 public:
  // Throws PackageError of kind kNoSuchFile or kNotAPackage; the sentence says what the file is.
  explicit PackageArchive(const std::string& path);

  // The record at `name`, whole; throws PackageError where it can't be read.
  std::string read(const std::string& name);

  bool has(const std::string& name) const;

  // Writes the record into a new file; throws PackageError where it can't be read or written.
  void unpack(const std::string& name, const std::string& file);

  // The records below `folder`, which ends in a slash.
  std::vector<std::string> records_in(std::string_view folder) const;

  // Records of the compiled model whose name ends in `suffix`.
  std::vector<std::string> model_records(std::string_view suffix) const;

  // Throws PackageError of kind kNotAPackage: the path, and what the file is.
  [[noreturn]] void refuse(const std::string& what) const;

 private:
  // Looks at each record's own header: torch's loader, where it fails, leaves its files behind.
  void check_headers();

  std::string path_;
  caffe2::serialize::PyTorchStreamReader reader_;
  std::vector<std::string> records_;
};

}  // namespace identity_conv
