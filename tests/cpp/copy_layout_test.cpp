#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "identity_conv/copy_layout.h"

#include <doctest/doctest.h>

#include <random>
#include <vector>

using identity_conv::CopyLayout;
using identity_conv::make_copy_layout;
using identity_conv::split_elements;
using Ints = std::vector<int64_t>;

namespace {

CopyLayout layout_of(const Ints& sizes, const Ints& src, const Ints& dst) {
  return make_copy_layout(sizes.size(), sizes.data(), src.data(), dst.data());
}

// The source offset of destination element i, by the header's own formula.
int64_t source_offset(const CopyLayout& layout, int64_t i) {
  int64_t offset = 0;
  for (int d = 0; d < layout.rank; ++d) {
    offset += i % layout.size[d] * layout.stride[d];
    i /= layout.size[d];
  }
  return offset;
}

// The same by coordinates: source offsets in the order of the destination's memory.
Ints expected_offsets(const Ints& sizes, const Ints& src, const Ints& dst) {
  int64_t numel = 1;
  for (int64_t size : sizes) numel *= size;
  Ints offsets(numel, -1);
  for (int64_t i = 0; i < numel; ++i) {
    int64_t from = 0, to = 0;
    for (int64_t rest = i, d = sizes.size(); d-- > 0; rest /= sizes[d]) {
      from += rest % sizes[d] * src[d];
      to += rest % sizes[d] * dst[d];
    }
    offsets[to] = from;
  }
  return offsets;
}

Ints dense_strides(const Ints& sizes, const Ints& inner_to_outer) {
  Ints strides(sizes.size());
  int64_t stride = 1;
  for (int64_t d : inner_to_outer) {
    strides[d] = stride;
    stride *= sizes[d];
  }
  return strides;
}

}  // namespace

TEST_CASE("a dense source is one run") {
  CHECK(layout_of({2, 3, 4}, {12, 4, 1}, {12, 4, 1}).is_contiguous());
  CHECK(layout_of({2, 3, 4}, {1, 8, 2}, {1, 8, 2}).is_contiguous());
  CHECK(layout_of({}, {}, {}).rank == 0);
  CHECK(layout_of({1, 1}, {7, 9}, {1, 1}).is_contiguous());
}

TEST_CASE("rows with padding keep two dimensions, whatever the rank") {
  const CopyLayout layout = layout_of({2, 3, 4, 5}, {3 * 4 * 8, 4 * 8, 8, 1}, {60, 20, 5, 1});
  CHECK(layout.rank == 2);
  CHECK(layout.size[0] == 5);
  CHECK(layout.stride[0] == 1);
  CHECK(layout.size[1] == 24);
  CHECK(layout.stride[1] == 8);
}

TEST_CASE("expanded dimensions merge") {
  const CopyLayout layout = layout_of({4, 5, 6}, {0, 0, 1}, {30, 6, 1});
  CHECK(layout.rank == 2);
  CHECK(layout.stride[1] == 0);
  CHECK(layout.size[1] == 20);
}

TEST_CASE("the most dimensions that can be") {
  Ints sizes(70, 1), strides(70, 1);
  for (int d = 0; d < 62; ++d) sizes[d] = 2;
  Ints dst(70, 1), src(70, 0);
  for (int d = 0; d < 62; ++d) dst[d] = int64_t{1} << d;
  for (int d = 0; d < 62; d += 2) src[d] = 3;
  CHECK(layout_of(sizes, src, dst).rank == 62);
}

TEST_CASE("any strides give the offsets that coordinates give, also in split elements") {
  std::mt19937 random(0);
  auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  for (int round = 0; round < 2000; ++round) {
    const int64_t rank = draw(0, 5);
    Ints sizes(rank), src(rank), order(rank);
    for (int64_t d = 0; d < rank; ++d) {
      sizes[d] = draw(1, 5);
      src[d] = draw(0, 7);
      order[d] = d;
    }
    std::shuffle(order.begin(), order.end(), random);
    const Ints dst = dense_strides(sizes, order);
    if (draw(0, 1)) src = dst;
    const Ints expected = expected_offsets(sizes, src, dst);
    const CopyLayout layout = layout_of(sizes, src, dst);
    REQUIRE(layout.numel == static_cast<int64_t>(expected.size()));
    for (int d = 0; d < layout.rank; ++d) CHECK(layout.size[d] > 1);
    const int64_t parts = int64_t{1} << draw(0, 4);
    const CopyLayout split = split_elements(layout, parts);
    for (int64_t i = 0; i < layout.numel; ++i) {
      REQUIRE(source_offset(layout, i) == expected[i]);
      for (int64_t p = 0; p < parts; ++p) {
        REQUIRE(source_offset(split, i * parts + p) == expected[i] * parts + p);
      }
    }
  }
}
