#include "archive.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <unordered_set>

#include "error_text.h"
#include "identity_conv/package.h"
#include "identity_conv/wording.h"
#include "sha256.h"

namespace identity_conv {
namespace {

using Kind = PackageError::Kind;

constexpr std::string_view kModelsDirectory = "data/aotinductor/";
constexpr std::string_view kModelDirectory = "data/aotinductor/model/";

// The parts of a zip archive (PKWARE's APPNOTE 6.3, sections 4.3.7 to 4.3.16): signature and size.
constexpr std::string_view kLocalHeader("PK\x03\x04", 4);
constexpr std::string_view kDirectoryEntry("PK\x01\x02", 4);
constexpr std::string_view kEnd("PK\x05\x06", 4);
constexpr std::string_view kEnd64("PK\x06\x06", 4);
constexpr std::string_view kEnd64Locator("PK\x06\x07", 4);
constexpr std::size_t kLocalHeaderSize = 30;
constexpr std::size_t kDirectoryEntrySize = 46;
constexpr std::size_t kEndSize = 22;
constexpr std::size_t kEnd64Size = 56;
constexpr std::size_t kEnd64LocatorSize = 20;
constexpr std::uint64_t kIn64 = 0xFFFFFFFF;
constexpr std::uint16_t kZip64Extra = 1;

constexpr std::size_t kPiece = 1 << 20;

bool starts_with(std::string_view text, std::string_view prefix) {
  return text.substr(0, prefix.size()) == prefix;
}

bool ends_with(std::string_view text, std::string_view suffix) {
  return text.size() >= suffix.size() && text.substr(text.size() - suffix.size()) == suffix;
}

[[noreturn]] void refuse_archive(const std::string& path, const std::string& what) {
  throw PackageError(Kind::kNotAPackage, path + ": " + what);
}

[[noreturn]] void refuse_damaged(const std::string& path, const std::string& what) {
  throw PackageError(Kind::kDamaged, path + ": is corrupted: " + what);
}

// A little-endian number of `size` bytes at `at`, which the caller has made sure are there.
std::uint64_t number(std::string_view bytes, std::size_t at, std::size_t size) {
  std::uint64_t value = 0;
  for (std::size_t i = size; i-- > 0;) {
    value = value << 8 | static_cast<unsigned char>(bytes[at + i]);
  }
  return value;
}

constexpr std::array<std::uint32_t, 256> make_crc_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ (value & 1 ? 0xEDB88320 : 0);
    table[i] = value;
  }
  return table;
}

std::uint32_t crc32(std::string_view data) {
  static constexpr auto kTable = make_crc_table();
  std::uint32_t value = ~std::uint32_t{0};
  for (const char c : data)
    value = kTable[(value ^ static_cast<unsigned char>(c)) & 0xFF] ^ (value >> 8);
  return ~value;
}

// The descriptor of the regular file at `path`.
int open_file(const std::string& path) {
  // O_NONBLOCK: a FIFO without a writer would hold the open for ever.
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor >= 0) return descriptor;
  const int error = errno;
  if (error == ENOENT || error == ENOTDIR) {
    throw PackageError(Kind::kNoSuchFile, path + ": no such file");
  }
  refuse_archive(path, std::string("cannot be read (") + std::strerror(error) + ")");
}

std::uint64_t regular_size(const std::string& path, int descriptor) {
  struct stat status;
  if (fstat(descriptor, &status) != 0) {
    refuse_archive(path, std::string("cannot be read (") + std::strerror(errno) + ")");
  }
  if (S_ISDIR(status.st_mode)) refuse_archive(path, "is a directory, not a model package");
  if (!S_ISREG(status.st_mode)) refuse_archive(path, "is not a regular file");
  if (status.st_size == 0) refuse_archive(path, "is empty, not a model package");
  return static_cast<std::uint64_t>(status.st_size);
}

std::vector<std::string> compiled_model_names(const std::vector<PackageArchive::Record>& records) {
  std::vector<std::string> names;
  for (const auto& record : records) {
    std::string_view rest = record.name;
    if (!starts_with(rest, kModelsDirectory)) continue;
    rest.remove_prefix(kModelsDirectory.size());
    std::string name(rest.substr(0, rest.find('/')));
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  return names;
}

// What a torch archive without a compiled model is, judged by the records that each kind has.
std::string describe_other_archive(const std::vector<PackageArchive::Record>& records) {
  const auto any = [&](auto&& is) {
    return std::any_of(records.begin(), records.end(), [&](auto& each) { return is(each.name); });
  };
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

// Records are written to the path that they are named by.
bool leads_outside(const std::string& record) {
  const std::filesystem::path path(record);
  return path.is_absolute() || record.find('\0') != std::string::npos ||
         std::any_of(path.begin(), path.end(), [](auto& part) { return part == ".."; });
}

}  // namespace

PackageArchive::PackageArchive(const std::string& path)
    : path_(path), descriptor_(open_file(path)) {
  try {
    num_bytes_ = regular_size(path, descriptor_);
    read_records();
    const std::vector<std::string> models = compiled_model_names(records_);
    if (models.empty()) refuse_archive(path_, describe_other_archive(records_));
    if (std::find(models.begin(), models.end(), "model") == models.end()) {
      refuse_archive(path_, "holds no compiled model named \"model\", but \"" +
                                one_line(models.front()) + "\"");
    }
    check_regions();
  } catch (...) {
    close(descriptor_);
    throw;
  }
}

PackageArchive::~PackageArchive() { close(descriptor_); }

std::string PackageArchive::bytes(std::uint64_t begin, std::uint64_t size) const {
  if (begin > num_bytes_ || size > num_bytes_ - begin)
    refuse_damaged(path_, "it names bytes beyond its end");
  std::string data(size, '\0');
  for (std::uint64_t done = 0; done < size;) {
    const ssize_t got =
        pread(descriptor_, data.data() + done, size - done, static_cast<off_t>(begin + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0)
      refuse_archive(path_, std::string("cannot be read (") + std::strerror(errno) + ")");
    if (got == 0) refuse_damaged(path_, "it became shorter while it was read");
    done += static_cast<std::uint64_t>(got);
  }
  return data;
}

// The archive's directory: the entries of all records, one after the other.
std::string PackageArchive::read_directory() {
  if (bytes(0, std::min<std::uint64_t>(num_bytes_, kLocalHeader.size())) != kLocalHeader) {
    refuse_archive(path_, "is not a model package (not a zip archive)");
  }
  // torch writes no comment after the end, other tools up to 64 KiB.
  const std::uint64_t length = std::min<std::uint64_t>(num_bytes_, kEndSize + 0xFFFF);
  const std::string tail = bytes(num_bytes_ - length, length);
  const std::size_t end = tail.rfind(kEnd);
  const bool has_end = end != std::string::npos && tail.size() - end >= kEndSize;
  // A record may be a zip archive itself, whose end is the last one here where the rest is cut off.
  const bool is_whole = has_end && tail.size() - end - kEndSize == number(tail, end + 20, 2);
  const auto refuse = [&] {
    if (is_whole) refuse_damaged(path_, "its directory isn't where its end says");
    throw PackageError(Kind::kDamaged,
                       path_ +
                           ": is cut off: the central directory of the zip archive, which ends "
                           "it, is missing after the " +
                           counted(num_bytes_, "byte") + " that are here; copy it again");
  };
  if (!has_end) refuse();
  std::uint64_t size = number(tail, end + 12, 4);
  std::uint64_t begin = number(tail, end + 16, 4);
  std::uint64_t after = num_bytes_ - length + end;
  if (end >= kEnd64LocatorSize && tail.compare(end - kEnd64LocatorSize, 4, kEnd64Locator) == 0) {
    const std::uint64_t place = number(tail, end - kEnd64LocatorSize + 8, 8);
    const std::string end64 = bytes(place, kEnd64Size);
    if (end64.compare(0, 4, kEnd64) != 0) refuse();
    size = number(end64, 40, 8);
    begin = number(end64, 48, 8);
    after = place;
  }
  if (begin > after || size != after - begin) refuse();
  directory_begin_ = begin;
  return bytes(begin, size);
}

void PackageArchive::read_records() {
  const std::string directory = read_directory();
  std::string folder;
  std::unordered_set<std::string> names;
  for (std::size_t at = 0; at < directory.size();) {
    if (directory.size() - at < kDirectoryEntrySize ||
        directory.compare(at, 4, kDirectoryEntry) != 0) {
      refuse_damaged(path_, "its directory can't be read");
    }
    const std::size_t name_size = number(directory, at + 28, 2);
    const std::size_t extra_size = number(directory, at + 30, 2);
    const std::size_t whole =
        kDirectoryEntrySize + name_size + extra_size + number(directory, at + 32, 2);
    if (directory.size() - at < whole) refuse_damaged(path_, "its directory can't be read");
    const std::string full_name = directory.substr(at + kDirectoryEntrySize, name_size);
    const std::string shown = one_line(full_name);

    const std::uint64_t method = number(directory, at + 10, 2);
    std::uint64_t packed = number(directory, at + 20, 4);
    std::uint64_t size = number(directory, at + 24, 4);
    std::uint64_t header = number(directory, at + 42, 4);
    // What doesn't fit in 32 bits stands in the extra field, in this order.
    const std::string_view extra(directory.data() + at + kDirectoryEntrySize + name_size,
                                 extra_size);
    for (std::size_t e = 0; e + 4 <= extra.size();) {
      const std::size_t field_size = number(extra, e + 2, 2);
      std::string_view field = extra.substr(e + 4, field_size);
      if (number(extra, e, 2) == kZip64Extra) {
        for (std::uint64_t* value : {&size, &packed, &header}) {
          if (*value != kIn64 || field.size() < 8) continue;
          *value = number(field, 0, 8);
          field.remove_prefix(8);
        }
      }
      e += 4 + field_size;
    }

    const std::size_t slash = full_name.find('/');
    if (records_.empty()) folder = full_name.substr(0, slash);
    if (slash == std::string::npos || full_name.substr(0, slash) != folder) {
      refuse_archive(path_, "is not a model package (a zip archive that torch did not write)");
    }
    if (method != 0 || packed != size) {
      refuse_damaged(path_, "its record " + shown + " is compressed, which torch never writes");
    }
    Record record{full_name.substr(slash + 1), 0, size,
                  static_cast<std::uint32_t>(number(directory, at + 16, 4))};
    if (leads_outside(record.name) || leads_outside(full_name)) {
      refuse_damaged(path_, "its record " + shown + " leads out of the archive");
    }
    if (!names.insert(record.name).second) refuse_damaged(path_, "it has two records " + shown);

    const std::string local = bytes(header, kLocalHeaderSize);
    if (local.compare(0, 4, kLocalHeader) != 0)
      refuse_damaged(path_, "its record " + shown + " has no header");
    if (number(local, 26, 2) != name_size ||
        bytes(header + kLocalHeaderSize, name_size) != full_name) {
      refuse_damaged(path_, "its record " + shown + " has the header of another");
    }
    record.begin = header + kLocalHeaderSize + name_size + number(local, 28, 2);
    records_.push_back(std::move(record));
    at += whole;
  }
  if (!has(".data/version") && !has("version") && !has("archive_format")) {
    refuse_archive(path_, "is not a model package (a zip archive that torch did not write)");
  }
}

void PackageArchive::check_regions() const {
  std::vector<const Record*> in_file;
  for (const Record& record : records_) in_file.push_back(&record);
  std::sort(in_file.begin(), in_file.end(), [](auto* a, auto* b) { return a->begin < b->begin; });
  std::uint64_t free_from = 0;
  for (const Record* record : in_file) {
    if (record->begin < free_from || record->begin > directory_begin_ ||
        record->size > directory_begin_ - record->begin) {
      refuse_damaged(path_,
                     "its record " + one_line(record->name) + " reaches into another part of it");
    }
    free_from = record->begin + record->size;
  }
}

const PackageArchive::Record* PackageArchive::find(std::string_view name) const {
  const auto found =
      std::find_if(records_.begin(), records_.end(), [&](auto& each) { return each.name == name; });
  return found == records_.end() ? nullptr : &*found;
}

std::string PackageArchive::read(std::string_view name) const {
  const Record* record = find(name);
  if (!record) refuse_damaged(path_, "it has no record " + std::string(name));
  std::string data = bytes(record->begin, record->size);
  if (crc32(data) != record->crc32) {
    refuse_damaged(path_, "its record " + one_line(record->name) + " differs from its checksum");
  }
  return data;
}

void PackageArchive::unpack(std::string_view name, const std::string& file) const {
  const std::string data = read(name);
  const int fd = open(file.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, S_IRUSR | S_IWUSR);
  int error = fd < 0 ? errno : 0;
  for (std::size_t done = 0; error == 0 && done < data.size();) {
    const ssize_t written = write(fd, data.data() + done, data.size() - done);
    if (written < 0 && errno != EINTR) error = errno;
    if (written > 0) done += static_cast<std::size_t>(written);
  }
  if (fd >= 0 && close(fd) != 0 && error == 0) error = errno;
  if (error != 0) {
    throw PackageError(Kind::kHost, path_ + ": its record " + one_line(std::string(name)) +
                                        " cannot be written to " + file + " (" +
                                        std::strerror(error) + ")");
  }
}

std::string PackageArchive::digest(std::uint64_t begin, std::uint64_t size) const {
  Sha256 digest;
  for (std::uint64_t done = 0; done < size;) {
    const std::string piece = bytes(begin + done, std::min<std::uint64_t>(kPiece, size - done));
    digest.update(piece);
    done += piece.size();
  }
  return digest.hex();
}

std::string PackageArchive::sha256(std::string_view name) const {
  const Record* record = find(name);
  if (!record) refuse_damaged(path_, "it has no record " + std::string(name));
  return digest(record->begin, record->size);
}

std::string PackageArchive::sha256() const { return digest(0, num_bytes_); }

std::string PackageArchive::descriptor_path() const {
  const std::string path = "/proc/self/fd/" + std::to_string(descriptor_);
  // A machine may have no /proc.
  return access(path.c_str(), R_OK) == 0 ? path : path_;
}

std::vector<std::string> PackageArchive::model_records(std::string_view suffix) const {
  std::vector<std::string> names;
  for (const Record& record : records_) {
    if (starts_with(record.name, kModelDirectory) && ends_with(record.name, suffix))
      names.push_back(record.name);
  }
  return names;
}

}  // namespace identity_conv
