#include "error_text.h"

#include <c10/util/Exception.h>

#include <cctype>

namespace identity_conv {

std::string one_line(const std::string& text) {
  std::string line;
  bool space = false;
  for (const char c : text) {
    if (c == '\0' || std::isspace(static_cast<unsigned char>(c))) {
      space = true;
      continue;
    }
    if (space && !line.empty()) line += ' ';
    space = false;
    line += c;
  }
  return line;
}

std::string error_text(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return one_line(torch_error ? torch_error->what_without_backtrace() : error.what());
}

}  // namespace identity_conv
