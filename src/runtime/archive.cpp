#include "archive.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "error_text.h"
#include "identity_conv/package.h"

namespace identity_conv {
namespace {

using caffe2::serialize::PyTorchStreamReader;
using Kind = PackageError::Kind;

constexpr std::string_view kModelsDirectory = "data/aotinductor/";
constexpr std::string_view kModelDirectory = "data/aotinductor/model/";
constexpr std::string_view kLocalHeader = "PK\x03\x04";
constexpr std::string_view kEndOfDirectory = "PK\x05\x06";
constexpr std::size_t kEndOfDirectorySize = 22;

[[noreturn]] void refuse(const std::string& path, const std::string& what) {
  throw PackageError(Kind::kNotAPackage, path + ": " + what);
}

bool starts_with(std::string_view text, std::string_view prefix) {
  return text.substr(0, prefix.size()) == prefix;
}

bool ends_with(std::string_view text, std::string_view suffix) {
  return text.size() >= suffix.size() && text.substr(text.size() - suffix.size()) == suffix;
}

void check_is_file(const std::string& path) {
  struct stat status;
  if (stat(path.c_str(), &status) != 0) {
    const int error = errno;
    if (error == ENOENT || error == ENOTDIR) {
      throw PackageError(Kind::kNoSuchFile, path + ": no such file");
    }
    refuse(path, std::string("cannot be read (") + std::strerror(error) + ")");
  }
  if (S_ISDIR(status.st_mode)) refuse(path, "is a directory, not a model package");
  if (!S_ISREG(status.st_mode)) refuse(path, "is not a regular file");
  if (status.st_size == 0) refuse(path, "is empty, not a model package");
}

// A zip archive begins with a local header, and ends with the record that says where its directory
// is (torch writes no archive comment after it, other tools up to 64 KiB).
void check_is_whole_zip(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) refuse(path, std::string("cannot be read (") + std::strerror(errno) + ")");

  std::array<char, kLocalHeader.size()> head{};
  file.read(head.data(), head.size());
  if (std::string_view(head.data(), file.gcount()) != kLocalHeader) {
    refuse(path, "is not a model package (not a zip archive)");
  }

  constexpr std::streamoff kLongestEnd = kEndOfDirectorySize + 0xFFFF;
  file.seekg(0, std::ios::end);
  const std::streamoff length = std::min<std::streamoff>(file.tellg(), kLongestEnd);
  std::string tail(static_cast<std::size_t>(length), '\0');
  file.seekg(-length, std::ios::end);
  file.read(tail.data(), length);
  const std::size_t end = tail.rfind(kEndOfDirectory);
  if (end == std::string::npos || tail.size() - end < kEndOfDirectorySize) {
    refuse(path, "is truncated: the end of its zip archive is missing");
  }
}

// Reads the archive's directory. Record contents aren't compared with their checksums (torch's
// reader is built without that).
PyTorchStreamReader open_reader(const std::string& path) {
  check_is_file(path);
  check_is_whole_zip(path);
  try {
    return PyTorchStreamReader(path);
  } catch (const std::exception& error) {
    const std::string text = error_text(error);
    if (starts_with(text, "PytorchStreamReader failed")) refuse(path, "is a corrupted zip archive");
    refuse(path, "is not a model package (a zip archive that torch did not write)");
  }
}

std::vector<std::string> compiled_model_names(const std::vector<std::string>& records) {
  std::vector<std::string> names;
  for (std::string_view record : records) {
    if (!starts_with(record, kModelsDirectory)) continue;
    record.remove_prefix(kModelsDirectory.size());
    std::string name(record.substr(0, record.find('/')));
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  return names;
}

// What a torch archive without a compiled model is, judged by the records that each kind has.
std::string describe_other_archive(const std::vector<std::string>& records) {
  const auto any = [&](auto&& is) { return std::any_of(records.begin(), records.end(), is); };
  if (any([](auto& name) {
        return starts_with(name, "models/") || name == "serialized_exported_program.json";
      })) {
    return "is a saved ExportedProgram, not a compiled package: load it with torch.export.load and "
           "compile it with identity_conv.compile_package";
  }
  if (any([](auto& name) { return name == "constants.pkl"; })) {
    return "is a TorchScript archive, not a model package";
  }
  if (any([](auto& name) { return name == "data.pkl"; })) {
    return "is a file of torch.save (tensors or a state dict), not a model package";
  }
  return "is a torch archive without a compiled model";
}

// torch's loader writes each record to the path it is named by.
bool leads_outside(const std::string& record) {
  const std::filesystem::path path(record);
  return path.is_absolute() ||
         std::any_of(path.begin(), path.end(), [](auto& part) { return part == ".."; });
}

}  // namespace

PackageArchive::PackageArchive(const std::string& path)
    : path_(path), reader_(open_reader(path)), records_(reader_.getAllRecords()) {
  const std::vector<std::string> models = compiled_model_names(records_);
  if (models.empty()) refuse(describe_other_archive(records_));
  if (std::find(models.begin(), models.end(), "model") == models.end()) {
    refuse("holds no compiled model named \"model\", but \"" + models.front() + "\"");
  }
  for (const std::string& record : records_) {
    if (leads_outside(record)) {
      refuse("is corrupted: its record " + one_line(record) + " leads out of the archive");
    }
  }
  check_headers();
}

void PackageArchive::check_headers() {
  std::ifstream file(path_, std::ios::binary);
  for (const std::string& record : records_) {
    std::array<char, kLocalHeader.size()> head{};
    file.seekg(static_cast<std::streamoff>(reader_.getRecordHeaderOffset(record)));
    file.read(head.data(), head.size());
    if (!file || std::string_view(head.data(), head.size()) != kLocalHeader) {
      refuse("is corrupted: its record " + record + " has no header");
    }
  }
}

std::string PackageArchive::read(const std::string& name) {
  try {
    const auto [data, size] = reader_.getRecord(name);
    return std::string(static_cast<const char*>(data.get()), size);
  } catch (const std::exception&) {
    refuse("is corrupted: its record " + name + " cannot be read");
  }
}

bool PackageArchive::has(const std::string& name) const {
  return std::find(records_.begin(), records_.end(), name) != records_.end();
}

void PackageArchive::unpack(const std::string& name, const std::string& file) {
  const int fd = open(file.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, S_IRUSR | S_IWUSR);
  const auto fail = [&](int error) {
    if (fd >= 0) close(fd);
    throw PackageError(Kind::kHost, path_ + ": its record " + name + " cannot be written to " +
                                        file + " (" + std::strerror(error) + ")");
  };
  if (fd < 0) fail(errno);

  std::vector<char> chunk(std::size_t{1} << 20);
  int error = 0;
  std::size_t written = 0;
  std::size_t size = 0;
  bool read = true;
  try {
    size = reader_.getRecordSize(name);
    reader_.getRecord(name, nullptr, size, chunk.size(), chunk.data(),
                      [&](void*, const void* data, std::size_t count) {
                        for (std::size_t done = 0; error == 0 && done < count;) {
                          const ssize_t n =
                              write(fd, static_cast<const char*>(data) + done, count - done);
                          if (n < 0 && errno != EINTR) error = errno;
                          if (n > 0) done += static_cast<std::size_t>(n);
                        }
                        written += count;
                      });
  } catch (const std::exception&) {
    read = false;
  }
  if (error != 0) fail(error);
  if (close(fd) != 0) {
    throw PackageError(Kind::kHost, file + " cannot be written (" + std::strerror(errno) + ")");
  }
  if (!read || written != size) refuse("is corrupted: its record " + name + " cannot be read");
}

std::vector<std::string> PackageArchive::records_in(std::string_view folder) const {
  std::vector<std::string> names;
  for (const std::string& record : records_) {
    if (starts_with(record, folder) && record.back() != '/') names.push_back(record);
  }
  return names;
}

void PackageArchive::refuse(const std::string& what) const { identity_conv::refuse(path_, what); }

std::vector<std::string> PackageArchive::model_records(std::string_view suffix) const {
  std::vector<std::string> names;
  for (const std::string& record : records_) {
    if (starts_with(record, kModelDirectory) && ends_with(record, suffix)) names.push_back(record);
  }
  return names;
}

}  // namespace identity_conv
