#include "tensor_file.h"

#include <ATen/core/ivalue.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>

#include "error_text.h"

namespace identity_conv {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const std::string& path, const std::string& what) {
  throw std::runtime_error(path + ": " + what);
}

std::vector<char> read_bytes(const std::string& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (fs::is_directory(status)) fail(path, "is a directory, not a file of tensors");
  // A FIFO without a writer would hold the open for ever.
  if (fs::exists(status) && !fs::is_regular_file(status)) fail(path, "is not a regular file");
  std::ifstream file(path, std::ios::binary);
  if (!file) fail(path, std::string("cannot be read (") + std::strerror(errno) + ")");
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

c10::IValue unpickle(const std::string& path) {
  try {
    return torch::jit::pickle_load(read_bytes(path));
  } catch (const c10::Error& error) {
    const std::string text = error_text(error);
    // torch's C++ reader knows neither fp8, uint16 to uint64, complex32 nor sparse tensors.
    if (text.find("_rebuild_tensor_v3") != std::string::npos) {
      fail(path, "holds a dtype that torch reads in Python only (such as float8 or uint16)");
    }
    const bool is_archive = text.compare(0, 9, "Unpickler") == 0;
    fail(path, "is not a file of tensors as torch.save writes it" +
                   (is_archive ? " (" + text + ")" : std::string()));
  }
}

at::Tensor as_tensor(const std::string& path, const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor();
  fail(path, "must hold a tensor, or a list or tuple of tensors, got " + value.tagKind());
}

// A tensor's own elements only: a view would otherwise be written with its whole storage.
at::Tensor for_writing(const at::Tensor& tensor) {
  at::Tensor dense = tensor.detach().cpu().resolve_conj().resolve_neg();
  const auto bytes = static_cast<std::size_t>(dense.numel()) * dense.element_size();
  return dense.storage().nbytes() == bytes ? dense : dense.clone();
}

// A name beside the file it will become, removed again unless it did.
class Unfinished {
 public:
  explicit Unfinished(const fs::path& target)
      : target_(target), path_(target.string() + ".unfinished." + std::to_string(getpid())) {}
  Unfinished(const Unfinished&) = delete;
  Unfinished& operator=(const Unfinished&) = delete;
  ~Unfinished() {
    std::error_code ignored;
    fs::remove(path_, ignored);
  }

  const fs::path& path() const { return path_; }
  void finish() { fs::rename(path_, target_); }

 private:
  fs::path target_;
  fs::path path_;
};

}  // namespace

std::vector<at::Tensor> read_tensors(const std::string& path) {
  const c10::IValue value = unpickle(path);
  std::vector<at::Tensor> tensors;
  if (value.isTuple()) {
    for (const c10::IValue& element : value.toTupleRef().elements()) {
      tensors.push_back(as_tensor(path, element));
    }
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      tensors.push_back(as_tensor(path, element));
    }
  } else {
    tensors.push_back(as_tensor(path, value));
  }
  return tensors;
}

void write_tensors(const std::string& path, const std::vector<at::Tensor>& tensors) {
  std::vector<c10::IValue> values;
  for (const at::Tensor& tensor : tensors) values.emplace_back(for_writing(tensor));
  const std::vector<char> bytes = torch::jit::pickle_save(
      values.size() == 1 ? values.front() : c10::ivalue::Tuple::create(std::move(values)));

  const fs::path target = fs::weakly_canonical(path);  // a link stays, what it names is written
  if (fs::exists(target) && !fs::is_regular_file(target)) fail(path, "is not a regular file");
  Unfinished unfinished(target);
  std::ofstream file(unfinished.path(), std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  file.close();
  if (!file) fail(path, std::string("cannot be written (") + std::strerror(errno) + ")");
  unfinished.finish();
}

}  // namespace identity_conv
