// A private folder that leaves nothing behind.

#pragma once

#include <string>

namespace identity_conv {

// A new folder among the system's temporary ones (TMPDIR is honoured), for its owner alone. It is
// removed with its files when this is destroyed, and when the process exits; what a crashed process
// left, the next one that makes such a folder removes. A child of fork leaves its parent's alone.
class TemporaryFolder {
 public:
  // Throws PackageError of kind kHost where none can be made.
  TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder();

  const std::string& path() const { return path_; }

 private:
  std::string path_;
  int lock_;  // the folder, open and locked while it is in use
};

}  // namespace identity_conv
