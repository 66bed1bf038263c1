#include "temporary_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>
#include <system_error>

#include "identity_conv/package.h"

namespace identity_conv {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void refuse_parent(const fs::path& parent, int error) {
  throw PackageError(PackageError::Kind::kHost,
                     "the folder for temporary files " + parent.string() + " can't be used (" +
                         std::strerror(error) + "): set TMPDIR to another");
}

fs::path parent_folder() {
  std::error_code error;
  const fs::path parent = fs::temp_directory_path(error);
  if (error) {
    const char* named = std::getenv("TMPDIR");
    refuse_parent(named ? named : "", error.value());
  }
  return fs::absolute(parent);
}

// One user's folders, told by name from those of others.
std::string name_prefix() { return "identity_conv-" + std::to_string(geteuid()) + "-"; }

// The folder, open and locked; -1 where another has the lock, or it is no folder of this user.
int lock_folder(const fs::path& folder, int flags) {
  const int fd = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  struct stat status;
  if (fd >= 0 && fstat(fd, &status) == 0 && status.st_uid == geteuid() &&
      flock(fd, LOCK_EX | flags) == 0) {
    return fd;
  }
  if (fd >= 0) close(fd);
  return -1;
}

// Removes the folders that nobody has locked: their processes have crashed.
void remove_abandoned(const fs::path& parent) {
  const std::string prefix = name_prefix();
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(parent, ignored)) {
    if (entry.path().filename().string().compare(0, prefix.size(), prefix) != 0) continue;
    const int lock = lock_folder(entry.path(), LOCK_NB);
    if (lock < 0) continue;
    fs::remove_all(entry.path(), ignored);
    close(lock);
  }
}

// The folders of this process, so that its exit removes those still in use. A forked process has
// its parent's among them, and leaves those alone.
class InUse {
 public:
  static InUse& of_process() {
    static InUse in_use;
    return in_use;
  }
  ~InUse() {
    for (const auto& [folder, owner] : folders_) remove_files(folder, owner);
  }

  void add(const std::string& folder) {
    const std::lock_guard<std::mutex> lock(mutex_);
    folders_.emplace(folder, getpid());
  }

  void remove(const std::string& folder) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = folders_.find(folder);
    if (found == folders_.end()) return;
    remove_files(folder, found->second);
    folders_.erase(found);
  }

 private:
  static void remove_files(const std::string& folder, pid_t owner) {
    std::error_code ignored;
    if (getpid() == owner) fs::remove_all(folder, ignored);
  }

  std::mutex mutex_;
  std::map<std::string, pid_t> folders_;
};

}  // namespace

TemporaryFolder::TemporaryFolder() {
  const fs::path parent = parent_folder();
  remove_abandoned(parent);
  for (;;) {
    path_ = (parent / (name_prefix() + "XXXXXX")).string();
    if (!mkdtemp(path_.data())) refuse_parent(parent, errno);
    lock_ = lock_folder(path_, 0);
    const int error = errno;
    // Until it was locked, another process may have taken the new folder for an abandoned one.
    const bool is_there = access(path_.c_str(), F_OK) == 0;
    if (lock_ >= 0 && is_there) break;
    if (lock_ >= 0) close(lock_);
    if (is_there) {
      rmdir(path_.c_str());
      refuse_parent(parent, error);
    }
  }
  InUse::of_process().add(path_);
}

TemporaryFolder::~TemporaryFolder() {
  InUse::of_process().remove(path_);
  close(lock_);
}

}  // namespace identity_conv
