#include "sample.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/isclose.h>

#include <cmath>
#include <cstring>
#include <sstream>
#include <stdexcept>

#include "dtype.h"
#include "identity_conv/wording.h"

namespace identity_conv {
namespace {

[[noreturn]] void refuse_sample(const std::string& what) {
  throw std::invalid_argument("not a manifest: its sample " + what);
}

int64_t integer(const Json& json) {
  const auto* value = json.as<int64_t>();
  if (!value) refuse_sample("has a size that is none");
  return *value;
}

double real(const Json& json, const char* name) {
  const Json* found = json.find(name);
  if (!found) return 0;
  if (const auto* value = found->as<double>()) return *value;
  return static_cast<double>(integer(*found));
}

// The tensors that `list` describes, of the bytes in `data`.
class TensorReader {
 public:
  TensorReader(std::string data, c10::Device device) : data_(std::move(data)), device_(device) {}

  at::Tensor next(const Json& json) {
    const c10::ScalarType dtype = read_dtype(json.text("dtype"));
    const Json* sizes = json.find("sizes");
    const Json* strides = json.find("strides");
    const Json* bytes = json.find("bytes");
    if (!sizes || !strides || !bytes || sizes->elements().size() != strides->elements().size()) {
      refuse_sample("lacks sizes or strides");
    }
    std::vector<int64_t> shape;
    std::vector<int64_t> steps;
    __int128 last = 0;
    bool empty = false;
    for (std::size_t d = 0; d < sizes->elements().size(); ++d) {
      shape.push_back(integer(sizes->elements()[d]));
      steps.push_back(integer(strides->elements()[d]));
      if (shape[d] < 0 || steps[d] < 0) refuse_sample("has a negative size or stride");
      empty |= shape[d] == 0;
      last += static_cast<__int128>(shape[d] - 1) * steps[d];
      // Each product fits in 128 bits, and so does the sum of as many as a tensor has dimensions.
      if (last > (static_cast<__int128>(1) << 62)) refuse_sample("has bytes beyond its record");
    }
    const auto itemsize = static_cast<int64_t>(c10::elementSize(dtype));
    const int64_t span = empty ? 0 : static_cast<int64_t>(last) + 1;
    if (span > static_cast<int64_t>(data_.size()) / itemsize ||
        integer(*bytes) != span * itemsize ||
        static_cast<std::size_t>(span * itemsize) > data_.size() - done_) {
      refuse_sample("has bytes beyond its record");
    }
    at::Tensor storage = at::empty({span}, at::TensorOptions(dtype));
    if (span > 0)
      std::memcpy(storage.data_ptr(), data_.data() + done_,
                  static_cast<std::size_t>(span * itemsize));
    done_ += static_cast<std::size_t>(span * itemsize);
    return storage.to(device_).as_strided(shape, steps);
  }

 private:
  std::string data_;
  std::size_t done_ = 0;
  c10::Device device_;
};

std::string number(double value) {
  std::ostringstream stream;
  stream << value;
  return stream.str();
}

std::string difference(const at::Tensor& wanted, const at::Tensor& given,
                       const Sample::Output& output) {
  if (!given.defined()) return "is none";
  if (given.scalar_type() != wanted.scalar_type()) {
    return "is of dtype " + dtype_name(given.scalar_type()) + ", and was " +
           dtype_name(wanted.scalar_type());
  }
  if (given.sizes() != wanted.sizes())
    return "is of sizes " + c10::str(given.sizes()) + ", and was " + c10::str(wanted.sizes());
  if (wanted.numel() == 0) return {};
  const c10::ScalarType dtype = wanted.scalar_type();
  if (!c10::isFloatingType(dtype) && !c10::isComplexType(dtype)) {
    return at::equal(given, wanted) ? std::string() : "differs";
  }
  const c10::ScalarType wide = c10::isComplexType(dtype) ? at::kComplexDouble : at::kDouble;
  const at::Tensor a = given.to(wide);
  const at::Tensor b = wanted.to(wide);
  const at::Tensor close = at::isclose(a, b, output.rtol, output.atol, /*equal_nan=*/true);
  const int64_t count = close.logical_not().sum().item<int64_t>();
  if (count == 0) return {};
  const double largest = a.sub(b).abs().nan_to_num(INFINITY, INFINITY).max().item<double>();
  return "differs in " + std::to_string(count) + " of " + counted(wanted.numel(), "element") +
         ", by up to " + number(largest) + " (allowed: rtol " + number(output.rtol) + ", atol " +
         number(output.atol) + ")";
}

}  // namespace

std::optional<Sample> read_sample(const PackageArchive& archive, const Json& manifest,
                                  c10::Device device) {
  const Json* described = manifest.find("sample");
  if (!described || !described->as<Json::Object>()) return std::nullopt;
  const Json* inputs = described->find("inputs");
  const Json* outputs = described->find("outputs");
  if (!inputs || !outputs) refuse_sample("lacks inputs or outputs");
  Sample sample;
  TensorReader given(archive.read("data/identity_conv/sample/inputs"), device);
  for (const Json& json : inputs->elements()) sample.inputs.push_back(given.next(json));
  TensorReader wanted(archive.read("data/identity_conv/sample/outputs"), device);
  for (const Json& json : outputs->elements()) {
    Sample::Output output;
    if (json.as<Json::Object>())
      output = {wanted.next(json), real(json, "rtol"), real(json, "atol")};
    sample.outputs.push_back(std::move(output));
  }
  return sample;
}

std::string difference(const Sample& sample, const std::vector<at::Tensor>& outputs) {
  if (outputs.size() != sample.outputs.size()) {
    return counted(outputs.size(), "output") + ", not " + std::to_string(sample.outputs.size());
  }
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (!sample.outputs[i].value.defined()) continue;
    const std::string differs = difference(sample.outputs[i].value, outputs[i], sample.outputs[i]);
    if (!differs.empty()) return "output " + std::to_string(i) + " " + differs;
  }
  return {};
}

}  // namespace identity_conv
