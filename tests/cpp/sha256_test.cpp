#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "sha256.h"

#include <doctest/doctest.h>

#include <string>

using identity_conv::Sha256;

TEST_CASE("the examples of the standard") {
  CHECK(Sha256::of("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(Sha256::of("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(Sha256::of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq") ==
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK(Sha256::of(std::string(1000000, 'a')) ==
        "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST_CASE("pieces of any size give the digest of the whole") {
  std::string text;
  for (int i = 0; i < 300; ++i) text += static_cast<char>(i * 7);
  const std::string whole = Sha256::of(text);
  for (std::size_t piece = 1; piece < 130; ++piece) {
    Sha256 digest;
    for (std::size_t at = 0; at < text.size(); at += piece) digest.update(text.substr(at, piece));
    CHECK(digest.hex() == whole);
  }
}
