// What a process that was made by fork() must mind: it has the memory of its parent's threads, and
// none of the threads.

#pragma once

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>

namespace identity_conv {

// How many forks lie between the process that loaded this code and this one.
inline std::atomic<int> num_forks{0};
inline const int counts_forks = pthread_atfork(nullptr, nullptr, [] { ++num_forks; });

// While this lives in a forked process, OpenMP works with the calling thread alone: its own
// threads, of which libgomp thinks it still has them, would be waited for for ever.
class OpenMPOfFork {
 public:
  OpenMPOfFork() {
    if (num_forks.load(std::memory_order_relaxed) == 0) return;
    using Get = int (*)();
    const auto get = reinterpret_cast<Get>(dlsym(RTLD_DEFAULT, "omp_get_max_active_levels"));
    set_ = reinterpret_cast<Set>(dlsym(RTLD_DEFAULT, "omp_set_max_active_levels"));
    if (!get || !set_) return;
    before_ = get();
    set_(0);
  }
  OpenMPOfFork(const OpenMPOfFork&) = delete;
  OpenMPOfFork& operator=(const OpenMPOfFork&) = delete;
  ~OpenMPOfFork() {
    if (before_ > 0) set_(before_);
  }

 private:
  using Set = void (*)(int);

  Set set_ = nullptr;
  int before_ = 0;
};

}  // namespace identity_conv
