// What an exception says, on one line.

#pragma once

#include <exception>
#include <string>

namespace identity_conv {

// `text` with line ends and the spaces around them folded to one space, and none at its ends.
std::string one_line(const std::string& text);

// The exception's message on one line, without torch's C++ backtrace.
std::string error_text(const std::exception& error);

}  // namespace identity_conv
