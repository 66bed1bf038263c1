// AOTInductor's runtime reads a device's name with std::regex, in every package. That takes as long
// to compile as the rest of a wrapper: here it is said to be compiled elsewhere, once (regex.cpp).
//
// The names are libstdc++'s own, of the releases named; with any other nothing is said.

#pragma once

#include <regex>
#include <string>

#if defined(_GLIBCXX_RELEASE) && _GLIBCXX_RELEASE >= 12 && _GLIBCXX_RELEASE <= 15
#define IDENTITY_CONV_REGEX(EXTERN)                                                              \
  EXTERN template class std::__detail::_Scanner<char>;                                           \
  EXTERN template class std::__detail::_NFA<std::regex_traits<char>>;                            \
  EXTERN template class std::__detail::_Compiler<std::regex_traits<char>>;                       \
  EXTERN template bool std::__detail::__regex_algo_impl(                                         \
      std::string::const_iterator, std::string::const_iterator, std::smatch&, const std::regex&, \
      std::regex_constants::match_flag_type, std::__detail::_RegexExecutorPolicy, bool);
#else
#define IDENTITY_CONV_REGEX(EXTERN)
#endif

IDENTITY_CONV_REGEX(extern)
