// Many at once, or one alone.

#pragma once

#include <atomic>
#include <mutex>
#include <shared_mutex>

namespace identity_conv {

// A shared mutex on which whoever wants to be alone doesn't starve: newcomers wait behind it, where
// std::shared_mutex lets them in as long as others are.
class Gate {
 public:
  void lock_shared() {
    if (closing_.load(std::memory_order_acquire)) const std::lock_guard<std::mutex> queue(turn_);
    inside_.lock_shared();
  }
  void unlock_shared() { inside_.unlock_shared(); }

  void lock() {
    turn_.lock();
    closing_.store(true, std::memory_order_release);
    inside_.lock();
  }
  void unlock() {
    closing_.store(false, std::memory_order_release);
    inside_.unlock();
    turn_.unlock();
  }

 private:
  std::atomic<bool> closing_{false};
  std::mutex turn_;
  std::shared_mutex inside_;
};

}  // namespace identity_conv
