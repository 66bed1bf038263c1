#include "unpacked_model.h"

#include <elf.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <string_view>
#include <utility>

#include "identity_conv/package.h"

namespace identity_conv {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kModelFolder = "data/aotinductor/model/";
constexpr std::string_view kConstantsFolder = "data/constants/";

// An ELF file of 64 bits, mapped to be changed; every access is checked against its size.
class ElfFile {
 public:
  explicit ElfFile(const std::string& path) {
    const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0) return;
    struct stat status{};
    if (fstat(fd, &status) == 0 && status.st_size > 0) {
      size_ = static_cast<std::size_t>(status.st_size);
      void* mapped = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
      if (mapped != MAP_FAILED) bytes_ = static_cast<unsigned char*>(mapped);
    }
    close(fd);
  }
  ElfFile(const ElfFile&) = delete;
  ElfFile& operator=(const ElfFile&) = delete;
  ~ElfFile() {
    if (bytes_) munmap(bytes_, size_);
  }

  // The sections; none where it is no such file.
  std::pair<const Elf64_Shdr*, std::size_t> sections() const {
    const auto* header = records<Elf64_Ehdr>(0, 1);
    if (!header || std::memcmp(header->e_ident, ELFMAG, SELFMAG) != 0 ||
        header->e_ident[EI_CLASS] != ELFCLASS64 || header->e_shentsize != sizeof(Elf64_Shdr)) {
      return {nullptr, 0};
    }
    const auto* first = records<Elf64_Shdr>(header->e_shoff, header->e_shnum);
    return {first, first ? header->e_shnum : 0};
  }

  // `count` records at `offset`; null where the file doesn't hold them.
  template <class Record>
  Record* records(std::size_t offset, std::size_t count) const {
    const bool fits = bytes_ && offset <= size_ && count <= (size_ - offset) / sizeof(Record) &&
                      offset % alignof(Record) == 0;
    return fits ? reinterpret_cast<Record*>(bytes_ + offset) : nullptr;
  }

  // Whether the string at `offset` is `text`.
  bool has_string(std::size_t offset, std::string_view text) const {
    const char* found = records<char>(offset, text.size() + 1);
    return found && std::string_view(found, text.size()) == text && found[text.size()] == '\0';
  }

 private:
  unsigned char* bytes_ = nullptr;
  std::size_t size_ = 0;
};

// Makes the library leave the process when it is closed. Two things would keep it mapped for ever:
//
// - Symbols that are unique in the process, which g++ makes of C++'s inline variables. Nothing else
//   looks for symbols in a model, so ordinary ones do.
// - Destructors of thread-local objects, which wait for the end of the thread. A model has one such
//   object, the text of a thread's last error (torch 2.13 and 2.14). The function that registers a
//   destructor becomes one that does nothing, and the text is never freed.
//
// What is no ELF file is left for dlopen to refuse.
void let_go_of_when_closed(const std::string& library) {
  const ElfFile file(library);
  const auto [sections, count] = file.sections();
  Elf64_Sym* symbols = nullptr;
  Elf64_Half* versions = nullptr;
  std::size_t num_symbols = 0;
  std::size_t names = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const Elf64_Shdr& section = sections[i];
    if (section.sh_type == SHT_DYNSYM && section.sh_link < count) {
      num_symbols = section.sh_size / sizeof(Elf64_Sym);
      symbols = file.records<Elf64_Sym>(section.sh_offset, num_symbols);
      names = sections[section.sh_link].sh_offset;
    }
  }
  for (std::size_t i = 0; symbols && i < count; ++i) {
    if (sections[i].sh_type == SHT_GNU_versym) {
      versions = file.records<Elf64_Half>(sections[i].sh_offset, num_symbols);
    }
  }
  if (!symbols || !versions) return;

  const auto imported = [&](std::string_view name) -> std::size_t {
    for (std::size_t i = 1; i < num_symbols; ++i) {
      if (symbols[i].st_shndx == SHN_UNDEF && file.has_string(names + symbols[i].st_name, name)) {
        return i;
      }
    }
    return 0;
  };
  for (std::size_t i = 0; i < num_symbols; ++i) {
    if (ELF64_ST_BIND(symbols[i].st_info) == STB_GNU_UNIQUE) {
      symbols[i].st_info = ELF64_ST_INFO(STB_GLOBAL, ELF64_ST_TYPE(symbols[i].st_info));
    }
  }
  const std::size_t registers = imported("__cxa_thread_atexit");
  const std::size_t does_nothing = imported("aoti_torch_device_type_cpu");
  if (registers && does_nothing) {
    symbols[registers].st_name = symbols[does_nothing].st_name;
    versions[registers] = versions[does_nothing];
  }
}

}  // namespace

UnpackedModel::UnpackedModel(const PackageArchive& archive)
    : folder_((fs::path(root_.path()) / kModelFolder).string()) {
  for (const std::string_view part : {kModelFolder, kConstantsFolder}) {
    for (const PackageArchive::Record& record : archive.records()) {
      if (record.name.compare(0, part.size(), part) != 0 || record.name.back() == '/') continue;
      const fs::path file = fs::path(folder_) / record.name.substr(part.size());
      const fs::path kind = file.extension();
      if (kind == ".cpp") continue;  // the generated source
      fs::create_directories(file.parent_path());
      archive.unpack(record.name, file.string());
      if (kind == ".so") library_ = file.string();
      if (kind == ".blob") weights_ = file.string();
    }
  }
  if (library_.empty()) {
    throw PackageError(PackageError::Kind::kDamaged,
                       archive.path() + ": is corrupted: it holds no library of the model");
  }
  let_go_of_when_closed(library_);
}

}  // namespace identity_conv
