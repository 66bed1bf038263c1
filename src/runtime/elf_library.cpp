#include "elf_library.h"

#include <elf.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <type_traits>

namespace identity_conv {
namespace {

[[noreturn]] void refuse_elf(const char* what) { throw std::invalid_argument(what); }

// The file's bytes, of which nothing outside is ever read.
class Bytes {
 public:
  explicit Bytes(std::string_view data) : data_(data) {}

  std::string_view at(std::uint64_t begin, std::uint64_t size) const {
    if (begin > data_.size() || size > data_.size() - begin)
      refuse_elf("it names bytes that it lacks");
    return data_.substr(begin, size);
  }

  template <class T>
  T read(std::uint64_t begin) const {
    static_assert(std::is_trivially_copyable_v<T>);
    T value;
    std::memcpy(&value, at(begin, sizeof(T)).data(), sizeof(T));
    return value;
  }

  // The text at `begin`, up to its NUL.
  std::string text(std::uint64_t begin) const {
    const std::string_view rest =
        at(begin, data_.size() - std::min<std::uint64_t>(begin, data_.size()));
    const std::size_t end = rest.find('\0');
    if (end == rest.npos) refuse_elf("it has a name without an end");
    return std::string(rest.substr(0, end));
  }

 private:
  std::string_view data_;
};

class Reader {
 public:
  explicit Reader(std::string_view file) : bytes_(file) {}

  ElfLibrary read() {
    if (bytes_.at(0, SELFMAG) != std::string_view(ELFMAG, SELFMAG)) refuse_elf("it is no ELF file");
    header_ = bytes_.read<Elf64_Ehdr>(0);
    if (header_.e_ident[EI_CLASS] != ELFCLASS64 || header_.e_ident[EI_DATA] != ELFDATA2LSB) {
      refuse_elf("it is no 64-bit little-endian ELF file");
    }
    if (header_.e_type != ET_DYN) refuse_elf("it is no shared library");
    library_.machine = header_.e_machine == EM_X86_64    ? "x86_64"
                       : header_.e_machine == EM_AARCH64 ? "aarch64"
                                                         : std::to_string(header_.e_machine);
    read_dynamic();
    read_sections();
    return std::move(library_);
  }

 private:
  template <class T>
  std::vector<T> table(std::uint64_t begin, std::uint64_t count) const {
    if (count > (std::uint64_t{1} << 32)) refuse_elf("it has a table that is too long");
    bytes_.at(begin, count * sizeof(T));
    std::vector<T> entries;
    for (std::uint64_t i = 0; i < count; ++i)
      entries.push_back(bytes_.read<T>(begin + i * sizeof(T)));
    return entries;
  }

  // Where in the file the byte lies that is mapped at `address`.
  std::uint64_t offset(std::uint64_t address) const {
    for (const Elf64_Phdr& segment : segments_) {
      if (segment.p_type == PT_LOAD && address >= segment.p_vaddr &&
          address - segment.p_vaddr < segment.p_filesz) {
        return segment.p_offset + (address - segment.p_vaddr);
      }
    }
    refuse_elf("it names an address that nothing is mapped at");
  }

  void read_dynamic() {
    if (header_.e_phentsize != sizeof(Elf64_Phdr)) refuse_elf("it has no program headers");
    segments_ = table<Elf64_Phdr>(header_.e_phoff, header_.e_phnum);
    std::vector<Elf64_Dyn> entries;
    for (const Elf64_Phdr& segment : segments_) {
      if (segment.p_type != PT_DYNAMIC) continue;
      entries = table<Elf64_Dyn>(segment.p_offset, segment.p_filesz / sizeof(Elf64_Dyn));
    }
    entries.erase(std::find_if(entries.begin(), entries.end(),
                               [](auto& each) { return each.d_tag == DT_NULL; }),
                  entries.end());
    const auto value = [&](Elf64_Sxword tag) -> std::uint64_t {
      for (const Elf64_Dyn& entry : entries) {
        if (entry.d_tag == tag) return entry.d_un.d_val;
      }
      return 0;
    };
    const std::uint64_t strings = value(DT_STRTAB);
    if (strings == 0) refuse_elf("it has no dynamic section");
    strings_ = offset(strings);
    for (const Elf64_Dyn& entry : entries) {
      switch (entry.d_tag) {
        case DT_NEEDED:
          library_.needed.push_back(bytes_.text(strings_ + entry.d_un.d_val));
          break;
        case DT_SONAME:
          library_.soname = bytes_.text(strings_ + entry.d_un.d_val);
          break;
        case DT_RPATH:
        case DT_RUNPATH:
          add_paths(bytes_.text(strings_ + entry.d_un.d_val));
          break;
        default:
          break;
      }
    }
    if (value(DT_VERNEED)) read_needed_versions(offset(value(DT_VERNEED)), value(DT_VERNEEDNUM));
    if (value(DT_VERDEF)) read_defined_versions(offset(value(DT_VERDEF)), value(DT_VERDEFNUM));
  }

  void add_paths(const std::string& paths) {
    for (std::size_t begin = 0; begin <= paths.size();) {
      const std::size_t end = std::min(paths.find(':', begin), paths.size());
      if (end > begin) library_.search_paths.push_back(paths.substr(begin, end - begin));
      begin = end + 1;
    }
  }

  void read_needed_versions(std::uint64_t at, std::uint64_t count) {
    for (std::uint64_t i = 0; i < count; ++i) {
      const auto need = bytes_.read<Elf64_Verneed>(at);
      const std::string file = bytes_.text(strings_ + need.vn_file);
      std::uint64_t aux = at + need.vn_aux;
      for (int j = 0; j < need.vn_cnt; ++j) {
        const auto version = bytes_.read<Elf64_Vernaux>(aux);
        if (!(version.vna_flags & VER_FLG_WEAK)) {
          library_.needed_versions.push_back({file, bytes_.text(strings_ + version.vna_name)});
        }
        if (version.vna_next == 0) break;
        aux += version.vna_next;
      }
      if (need.vn_next == 0) break;
      at += need.vn_next;
    }
  }

  void read_defined_versions(std::uint64_t at, std::uint64_t count) {
    for (std::uint64_t i = 0; i < count; ++i) {
      const auto definition = bytes_.read<Elf64_Verdef>(at);
      const auto name = bytes_.read<Elf64_Verdaux>(at + definition.vd_aux);
      library_.defined_versions.push_back(bytes_.text(strings_ + name.vda_name));
      if (definition.vd_next == 0) break;
      at += definition.vd_next;
    }
  }

  void read_sections() {
    if (header_.e_shnum == 0 || header_.e_shentsize != sizeof(Elf64_Shdr)) return;
    const auto sections = table<Elf64_Shdr>(header_.e_shoff, header_.e_shnum);
    if (header_.e_shstrndx >= sections.size()) return;
    const std::uint64_t names = sections[header_.e_shstrndx].sh_offset;
    for (const Elf64_Shdr& section : sections) {
      if (section.sh_type == SHT_DYNSYM) {
        for (const auto& symbol :
             table<Elf64_Sym>(section.sh_offset, section.sh_size / sizeof(Elf64_Sym))) {
          if (symbol.st_shndx == SHN_UNDEF && ELF64_ST_BIND(symbol.st_info) == STB_GLOBAL) {
            library_.undefined.push_back(bytes_.text(strings_ + symbol.st_name));
          }
        }
      }
      if (section.sh_type != SHT_NOBITS && bytes_.text(names + section.sh_name) == ".nv_fatbin") {
        read_fatbin(bytes_.at(section.sh_offset, section.sh_size));
      }
    }
  }

  // CUDA's container of device code: a header, and entries of one architecture each. NVIDIA doesn't
  // document it; seen in the output of nvcc 11 to 13.
  void read_fatbin(std::string_view section) {
    struct Header {
      std::uint32_t magic;
      std::uint16_t version;
      std::uint16_t size;
      std::uint64_t bytes_after;
    };
    struct Entry {
      std::uint16_t kind;  // 1 PTX, 2 machine code
      std::uint16_t unknown;
      std::uint32_t header_bytes;
      std::uint64_t bytes_after;
      std::uint32_t unknown_too[3];
      std::uint32_t architecture;
    };
    const Bytes bytes(section);
    for (std::uint64_t at = 0; at + sizeof(Header) <= section.size();) {
      const auto header = bytes.read<Header>(at);
      if (header.magic != 0xBA55ED50) {
        at += 8;  // between one unit's and the next, zeros
        continue;
      }
      const std::uint64_t begin = at + header.size;
      bytes.at(begin, header.bytes_after);
      const std::uint64_t end = begin + header.bytes_after;
      for (std::uint64_t e = begin; e + sizeof(Entry) <= end;) {
        const auto entry = bytes.read<Entry>(e);
        if (entry.header_bytes == 0) break;
        const char* kind = entry.kind == 1 ? "compute_" : "sm_";
        const std::string name = kind + std::to_string(entry.architecture);
        auto& known = library_.cuda;
        if (std::find(known.begin(), known.end(), name) == known.end()) known.push_back(name);
        bytes.at(e + entry.header_bytes, entry.bytes_after);
        e += entry.header_bytes + entry.bytes_after;
      }
      at = end;
    }
  }

  Bytes bytes_;
  Elf64_Ehdr header_{};
  std::vector<Elf64_Phdr> segments_;
  std::uint64_t strings_ = 0;
  ElfLibrary library_;
};

}  // namespace

ElfLibrary read_elf(std::string_view file) { return Reader(file).read(); }

}  // namespace identity_conv
