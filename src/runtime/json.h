// JSON as the records of a package have it: what torch writes with `json.dumps`, and the manifest.

#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace identity_conv {

// One value of a parsed document. Objects keep the order of their members.
class Json {
 public:
  using Array = std::vector<Json>;
  using Object = std::vector<std::pair<std::string, Json>>;
  using Value =
      std::variant<std::nullptr_t, bool, std::int64_t, double, std::string, Array, Object>;

  // Parses a whole document (RFC 8259, at most 128 levels deep). Throws std::invalid_argument with
  // the byte at which the text stops being JSON.
  static Json parse(std::string_view text);

  explicit Json(Value value) : value_(std::move(value)) {}

  // The document, on one line.
  std::string dump() const;

  // The value as one of Value's alternatives, or null where it is another one.
  template <class T>
  const T* as() const {
    return std::get_if<T>(&value_);
  }

  // The member `key` of an object; null where there is none, or this is no object.
  const Json* find(std::string_view key) const;

  // The elements of an array; none where this is no array.
  const Array& elements() const;

  // The string member `key` of an object; empty where there is none.
  std::string text(std::string_view key) const;

 private:
  Value value_;
};

}  // namespace identity_conv
