#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "json.h"

#include <doctest/doctest.h>

#include <limits>
#include <stdexcept>
#include <string>

using identity_conv::Json;

TEST_CASE("values keep their kind") {
  const Json document = Json::parse(
      R"( {"int": -12, "real": 2.5e1, "yes": true, "none": null, "list": [1, "two", []]} )");
  CHECK(*document.find("int")->as<std::int64_t>() == -12);
  CHECK(*document.find("real")->as<double>() == 25.0);
  CHECK(*document.find("yes")->as<bool>());
  CHECK(document.find("none")->as<std::nullptr_t>() != nullptr);
  CHECK(document.find("list")->elements().size() == 3);
  CHECK(document.find("absent") == nullptr);
}

TEST_CASE("sizes of 64 bits are exact") {
  const Json largest = Json::parse("9223372036854775807");
  CHECK(*largest.as<std::int64_t>() == std::numeric_limits<std::int64_t>::max());
}

TEST_CASE("escapes become UTF-8") {
  CHECK(*Json::parse(R"("a\n\u00e9\u20ac\ud83d\ude00\/")").as<std::string>() ==
        "a\n\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80/");
}

TEST_CASE("a value of another kind is absent, not an error") {
  const Json number = Json::parse("1");
  CHECK(number.find("key") == nullptr);
  CHECK(number.elements().empty());
  CHECK(number.text("key").empty());
  CHECK(Json::parse(R"({"key": 1})").text("key").empty());
}

TEST_CASE("what isn't one whole document is refused") {
  for (const char* text :
       {"", " ", "{", "[1,]", "[1 2]", "{\"a\"}", "{\"a\":}", "\"open", "\"\t\"", "\"\\x\"",
        "\"\\u12\"", "\"\\ud800\"", "\"\\udc00\"", "tru", "nan", "1 2", "--1", "1e", "{} x"}) {
    CAPTURE(text);
    CHECK_THROWS_AS(Json::parse(text), std::invalid_argument);
  }
}

TEST_CASE("nesting is bounded") {
  const auto nested = [](int depth) { return std::string(depth, '[') + std::string(depth, ']'); };
  CHECK_NOTHROW(Json::parse(nested(100)));
  CHECK_THROWS_AS(Json::parse(nested(100000)), std::invalid_argument);
}

TEST_CASE("what is written reads as it was") {
  for (const char* text : {"null", "true", "-12", "2.5", "[]", "{}", R"(["a", [1, {"b": null}]])",
                           R"({"a\"\\": "\u0001", "b": [false]})"}) {
    CAPTURE(text);
    CHECK(Json::parse(text).dump() == text);
  }
}
