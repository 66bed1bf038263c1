// A package file as an archive: which kind it is, and its records, read without mapping its code.
//
// The zip archives that torch writes, and no others: records that are stored, under one folder. All
// is read through one descriptor, so a file that takes the package's place meanwhile doesn't mix
// in.

#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace identity_conv {

// The archive of one AOTInductor package (`archive_format` pt2, one model named "model").
class PackageArchive {
 public:
  struct Record {
    std::string name;  // below the archive's one folder
    std::uint64_t begin;
    std::uint64_t size;
    std::uint32_t crc32;
  };

  // Throws PackageError of kind kNoSuchFile, kNotAPackage or kDamaged; the sentence says what the
  // file is. No record leads out of the archive, has another's name or shares bytes with one.
  explicit PackageArchive(const std::string& path);
  PackageArchive(const PackageArchive&) = delete;
  PackageArchive& operator=(const PackageArchive&) = delete;
  ~PackageArchive();

  const std::string& path() const { return path_; }

  const std::vector<Record>& records() const { return records_; }

  bool has(std::string_view name) const { return find(name) != nullptr; }

  // The record at `name`, whole and of the checksum that the archive has for it; throws
  // PackageError of kind kDamaged.
  std::string read(std::string_view name) const;

  // Writes the record, checked like that, into a new file.
  void unpack(std::string_view name, const std::string& file) const;

  // Records of the compiled model whose name ends in `suffix`.
  std::vector<std::string> model_records(std::string_view suffix) const;

  // SHA-256 of the record at `name`, and of the whole file.
  std::string sha256(std::string_view name) const;
  std::string sha256() const;

  std::uint64_t num_bytes() const { return num_bytes_; }

  // By which others open the same file, whatever has taken its place; valid while this lives.
  std::string descriptor_path() const;

 private:
  const Record* find(std::string_view name) const;
  std::string bytes(std::uint64_t begin, std::uint64_t size) const;
  std::string digest(std::uint64_t begin, std::uint64_t size) const;
  std::string read_directory();
  void read_records();
  void check_regions() const;

  std::string path_;
  int descriptor_;
  std::uint64_t num_bytes_ = 0;
  std::uint64_t directory_begin_ = 0;
  std::vector<Record> records_;
};

}  // namespace identity_conv
