// A class with a field of every type that state.h carries.
#include <ATen/ops/add.h>
#include <identity_conv/state.h>

namespace {

using Names = c10::Dict<std::string, at::Tensor>;
using Sizes = c10::Dict<int64_t, std::vector<int64_t>>;

// A field may be a base class's.
struct Base : torch::CustomClassHolder {
  int64_t number = 0;
};

struct Fields : Base {
  static auto state() {
    return identity_conv::state(
        IDENTITY_CONV_FIELD(Fields, number), IDENTITY_CONV_FIELD(Fields, ratio),
        IDENTITY_CONV_FIELD(Fields, flag), IDENTITY_CONV_FIELD(Fields, text),
        IDENTITY_CONV_FIELD(Fields, weight), IDENTITY_CONV_FIELD(Fields, device),
        IDENTITY_CONV_FIELD(Fields, dtype), IDENTITY_CONV_FIELD(Fields, numbers),
        IDENTITY_CONV_FIELD(Fields, texts), IDENTITY_CONV_FIELD(Fields, weights),
        IDENTITY_CONV_FIELD(Fields, nested), IDENTITY_CONV_FIELD(Fields, named),
        IDENTITY_CONV_FIELD(Fields, sizes),
        IDENTITY_CONV_FIELD(Fields, bias).or_default(std::nullopt),
        IDENTITY_CONV_FIELD(Fields, limit).or_default(7),
        IDENTITY_CONV_FIELD(Fields, ratios).or_default(std::vector<double>{0.5}));
  }
  at::Tensor forward(const at::Tensor& x) const { return at::add(x, weight); }

  double ratio = 0;
  bool flag = false;
  std::string text;
  at::Tensor weight;
  at::Device device = at::kCPU;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> numbers;
  std::vector<std::string> texts;
  std::vector<at::Tensor> weights;
  std::vector<std::vector<int64_t>> nested;
  Names named;
  Sizes sizes;
  std::optional<at::Tensor> bias;
  std::optional<int64_t> limit;
  std::vector<double> ratios;
};

}  // namespace

TORCH_LIBRARY(test_fields, m) {
  identity_conv::class_<Fields>(m, "Fields")
      .def("forward", &Fields::forward, "", {torch::arg("x")});
}
