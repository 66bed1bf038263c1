// How messages say things.

#pragma once

#include <string>
#include <string_view>

namespace identity_conv {

// "1 input", "2 inputs".
template <typename Count>
std::string counted(Count count, std::string_view noun) {
  std::string text = std::to_string(count);
  text.append(" ").append(noun);
  return count == Count{1} ? text : text.append("s");
}

}  // namespace identity_conv
