#include "json.h"

#include <charconv>
#include <cstddef>
#include <limits>
#include <locale>
#include <sstream>
#include <stdexcept>

namespace identity_conv {
namespace {

constexpr int kMaxDepth = 128;

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Json document() {
    Json value = this->value(0);
    skip_space();
    if (at_ != text_.size()) fail();
    return value;
  }

 private:
  [[noreturn]] void fail() const {
    throw std::invalid_argument("not JSON from byte " + std::to_string(at_) + " on");
  }

  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }

  void skip_space() {
    while (at_ < text_.size() && std::string_view(" \t\r\n").find(text_[at_]) != text_.npos) ++at_;
  }

  bool accept(std::string_view token) {
    if (text_.substr(at_, token.size()) != token) return false;
    at_ += token.size();
    return true;
  }

  void expect(std::string_view token) {
    if (!accept(token)) fail();
  }

  Json value(int depth) {
    if (depth > kMaxDepth) fail();
    skip_space();
    switch (peek()) {
      case '{':
        return object(depth);
      case '[':
        return array(depth);
      case '"':
        return Json(string());
      case 't':
        expect("true");
        return Json(true);
      case 'f':
        expect("false");
        return Json(false);
      case 'n':
        expect("null");
        return Json(nullptr);
      default:
        return number();
    }
  }

  Json object(int depth) {
    Json::Object members;
    expect("{");
    skip_space();
    if (accept("}")) return Json(std::move(members));
    do {
      skip_space();
      std::string key = string();
      skip_space();
      expect(":");
      members.emplace_back(std::move(key), value(depth + 1));
      skip_space();
    } while (accept(","));
    expect("}");
    return Json(std::move(members));
  }

  Json array(int depth) {
    Json::Array elements;
    expect("[");
    skip_space();
    if (accept("]")) return Json(std::move(elements));
    do {
      elements.push_back(value(depth + 1));
      skip_space();
    } while (accept(","));
    expect("]");
    return Json(std::move(elements));
  }

  std::string string() {
    std::string result;
    expect("\"");
    while (!accept("\"")) {
      const char c = peek();
      if (static_cast<unsigned char>(c) < 0x20) fail();  // also the end of the text
      if (c == '\\') {
        escape(result);
      } else {
        result += c;
        ++at_;
      }
    }
    return result;
  }

  void escape(std::string& out) {
    constexpr std::string_view kNames = "\"\\/bfnrt";
    constexpr std::string_view kValues = "\"\\/\b\f\n\r\t";
    expect("\\");
    if (accept("u")) return append_utf8(code_point(), out);
    const std::size_t which = kNames.find(peek());
    if (which == kNames.npos) fail();
    out += kValues[which];
    ++at_;
  }

  std::uint32_t hex4() {
    std::uint32_t unit = 0;
    const std::string_view digits = text_.substr(at_, 4);
    const auto parsed = std::from_chars(digits.data(), digits.data() + digits.size(), unit, 16);
    if (digits.size() != 4 || parsed.ptr != digits.data() + 4) fail();
    at_ += 4;
    return unit;
  }

  std::uint32_t code_point() {
    const std::uint32_t first = hex4();
    if (first < 0xD800 || first > 0xDFFF) return first;
    if (first > 0xDBFF) fail();
    expect("\\u");
    const std::uint32_t second = hex4();
    if (second < 0xDC00 || second > 0xDFFF) fail();
    return 0x10000 + ((first - 0xD800) << 10) + (second - 0xDC00);
  }

  static void append_utf8(std::uint32_t code, std::string& out) {
    const auto tail = [&](int shift) { out += static_cast<char>(0x80 | ((code >> shift) & 0x3F)); };
    if (code < 0x80) {
      out += static_cast<char>(code);
    } else if (code < 0x800) {
      out += static_cast<char>(0xC0 | (code >> 6));
      tail(0);
    } else if (code < 0x10000) {
      out += static_cast<char>(0xE0 | (code >> 12));
      tail(6);
      tail(0);
    } else {
      out += static_cast<char>(0xF0 | (code >> 18));
      tail(12);
      tail(6);
      tail(0);
    }
  }

  Json number() {
    const std::size_t begin = at_;
    while (std::string_view("+-.eE0123456789").find(peek()) != text_.npos) ++at_;
    const char* const first = text_.data() + begin;
    const char* const last = text_.data() + at_;
    std::int64_t integer = 0;
    if (std::from_chars(first, last, integer).ptr == last && first != last) return Json(integer);
    // A stream, for g++ 9 has no std::from_chars of double; its own locale, for the user's may have
    // another decimal point.
    std::istringstream stream(std::string(first, last));
    stream.imbue(std::locale::classic());
    double real = 0;
    if (!(stream >> real) || stream.peek() != std::istringstream::traits_type::eof()) {
      at_ = begin;
      fail();
    }
    return Json(real);
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

void write_string(const std::string& text, std::string& out) {
  out += '"';
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      constexpr std::string_view kDigits = "0123456789abcdef";
      out += "\\u00";
      out += kDigits[static_cast<unsigned char>(c) >> 4];
      out += kDigits[c & 15];
    } else {
      out += c;
    }
  }
  out += '"';
}

void write_json(const Json& value, std::string& out) {
  if (const auto* flag = value.as<bool>()) {
    out += *flag ? "true" : "false";
  } else if (const auto* integer = value.as<std::int64_t>()) {
    out += std::to_string(*integer);
  } else if (const auto* real = value.as<double>()) {
    std::ostringstream stream;
    stream.imbue(std::locale::classic());
    stream.precision(std::numeric_limits<double>::max_digits10);
    stream << *real;
    out += stream.str();
  } else if (const auto* text = value.as<std::string>()) {
    write_string(*text, out);
  } else if (const auto* array = value.as<Json::Array>()) {
    const char* separator = "[";
    for (const Json& element : *array) {
      out += std::exchange(separator, ", ");
      write_json(element, out);
    }
    out += array->empty() ? "[]" : "]";
  } else if (const auto* object = value.as<Json::Object>()) {
    const char* separator = "{";
    for (const auto& [name, member] : *object) {
      out += std::exchange(separator, ", ");
      write_string(name, out);
      out += ": ";
      write_json(member, out);
    }
    out += object->empty() ? "{}" : "}";
  } else {
    out += "null";
  }
}

}  // namespace

std::string Json::dump() const {
  std::string out;
  write_json(*this, out);
  return out;
}

Json Json::parse(std::string_view text) { return Parser(text).document(); }

const Json* Json::find(std::string_view key) const {
  if (const auto* members = as<Object>()) {
    for (const auto& [name, value] : *members) {
      if (name == key) return &value;
    }
  }
  return nullptr;
}

const Json::Array& Json::elements() const {
  static const Array none;
  const auto* array = as<Array>();
  return array ? *array : none;
}

std::string Json::text(std::string_view key) const {
  const Json* member = find(key);
  const auto* string = member ? member->as<std::string>() : nullptr;
  return string ? *string : std::string();
}

}  // namespace identity_conv
