// An allocator for CPU tensors under which a kernel that writes beside its output, or leaves a cell
// of it unwritten, is found out: zones of known bytes around every block, known bytes in it.
//
// Python holds it through ctypes: start, look, stop. A block may outlive stop; it is then looked at
// when it is freed, and never again.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <identity_conv/wording.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>

namespace {

constexpr size_t kZone = 256;  // bytes on either side; a multiple of what torch aligns to
constexpr unsigned char kCanary = 0xC5;

struct Guarded : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, nullptr, &free_block, c10::Device(c10::kCPU)};
    auto* block = static_cast<unsigned char*>(
        std::aligned_alloc(c10::gAlignment, (size + 2 * kZone + kZone - 1) / kZone * kZone));
    TORCH_CHECK_WITH(OutOfMemoryError, block, "no memory for a guarded tensor of ",
                     identity_conv::counted(size, "byte"));
    std::memset(block, kCanary, kZone);
    std::memset(block + kZone, poison, size);
    std::memset(block + kZone + size, kCanary, kZone);
    const std::lock_guard<std::mutex> lock(mutex);
    sizes[block + kZone] = size;
    return {block + kZone, block + kZone, &free_block, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t count) const override {
    std::memcpy(to, from, count);
  }

  // Looks at one block's zones and remembers the first byte that was written.
  void look_at(const unsigned char* data, size_t size) {
    for (size_t i = 0; i < kZone; ++i) {
      if (data[size + i] != kCanary) return report(size, static_cast<int64_t>(i), "behind");
      if (data[-1 - static_cast<int64_t>(i)] != kCanary) {
        return report(size, static_cast<int64_t>(i) + 1, "before");
      }
    }
  }
  void report(size_t size, int64_t distance, const char* side) {
    if (faults++ == 0) {
      std::snprintf(first, sizeof(first), "%s %s a block of %s",
                    identity_conv::counted(distance, "byte").c_str(), side,
                    identity_conv::counted(size, "byte").c_str());
    }
  }

  static void free_block(void* data);

  std::mutex mutex;
  std::unordered_map<unsigned char*, size_t> sizes;
  int poison = 0;
  int64_t faults = 0;
  char first[128] = "";
};

Guarded& guarded() {
  static auto* allocator = new Guarded;  // blocks may be freed after static destructors
  return *allocator;
}

void Guarded::free_block(void* data) {
  if (!data) return;
  Guarded& self = guarded();
  auto* start = static_cast<unsigned char*>(data);
  {
    const std::lock_guard<std::mutex> lock(self.mutex);
    const auto found = self.sizes.find(start);
    self.look_at(start, found->second);
    self.sizes.erase(found);
  }
  std::free(start - kZone);
}

c10::Allocator* usual = nullptr;

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// From now on blocks are guarded, with `poison` in every byte.
EXPORT void guard_start(int poison) {
  if (!usual) usual = c10::GetCPUAllocator();
  guarded().poison = poison;
  c10::SetCPUAllocator(&guarded(), /*priority=*/255);
}

// New blocks are torch's own again.
EXPORT void guard_stop() {
  if (usual) c10::SetCPUAllocator(usual, /*priority=*/255);
}

// How many blocks were written beside since the last look, the live ones among them, and of the
// first where.
EXPORT int64_t guard_look(char* where, size_t size) {
  Guarded& self = guarded();
  const std::lock_guard<std::mutex> lock(self.mutex);
  for (const auto& [data, bytes] : self.sizes) self.look_at(data, bytes);
  const int64_t faults = self.faults;
  if (faults) {
    std::snprintf(where, size, "%s", self.first);
    for (const auto& [data, bytes] : self.sizes) {  // each is told once
      std::memset(data - kZone, kCanary, kZone);
      std::memset(data + bytes, kCanary, kZone);
    }
  }
  self.faults = 0;
  return faults;
}
