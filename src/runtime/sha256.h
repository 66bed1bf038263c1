// SHA-256 (FIPS 180-4), by which records, libraries and whole packages are known.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace identity_conv {

class Sha256 {
 public:
  Sha256();

  void update(std::string_view data);

  // The digest of everything given, in 64 hexadecimal digits; ends the object's use.
  std::string hex();

  // The digest of `data`.
  static std::string of(std::string_view data);

 private:
  void blocks(const unsigned char* data, std::size_t count);

  std::array<std::uint32_t, 8> state_;
  std::array<unsigned char, 64> waiting_;
  std::size_t num_waiting_ = 0;
  std::uint64_t num_bytes_ = 0;
};

}  // namespace identity_conv
