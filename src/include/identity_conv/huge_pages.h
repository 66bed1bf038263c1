#pragma once

// Huge pages for a large output.
//
// A large allocation is fresh memory: its pages are given one by one as they are first written, and
// that takes longer than the copy of 4 KiB. Linux gives 2 MiB at a time where it is asked to (where
// /sys/kernel/mm/transparent_hugepage/enabled is "madvise", as distributions have it).

#include <cstddef>
#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace identity_conv {

// Asks for huge pages for the CPU memory from `begin`, which is about to be written whole. It is an
// advice: what it can't be taken for, or a small output, is left as it is.
inline void prefer_huge_pages(void* begin, size_t bytes) {
#ifdef __linux__
  constexpr std::uintptr_t kHugePage = std::uintptr_t{2} << 20;
  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  const std::uintptr_t first = (address + kHugePage - 1) / kHugePage * kHugePage;
  const std::uintptr_t last = (address + bytes) / kHugePage * kHugePage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

}  // namespace identity_conv
