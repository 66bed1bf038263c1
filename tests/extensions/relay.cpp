// A class that reaches an operator of another library from inside its method: no graph names it.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <optional>

namespace {

struct Relay : torch::CustomClassHolder {
  at::Tensor forward(const at::Tensor& x) {
    using Scale = at::Tensor(const at::Tensor&, const std::optional<at::Tensor>&);
    const auto found = c10::Dispatcher::singleton().findSchemaOrThrow("test_scale::scale", "");
    return found.typed<Scale>().call(x, std::nullopt);
  }
  std::tuple<std::tuple<std::string, int64_t>> flatten() { return {{"nothing", 0}}; }
};

}  // namespace

TORCH_LIBRARY(test_relay, m) {
  m.class_<Relay>("Relay")
      .def(torch::init([](int64_t) { return c10::make_intrusive<Relay>(); }), "",
           {torch::arg("nothing")})
      .def("forward", &Relay::forward, "", {torch::arg("x")})
      .def("__obj_flatten__", &Relay::flatten)
      .def_pickle([](const c10::intrusive_ptr<Relay>&) { return int64_t{0}; },
                  [](int64_t) { return c10::make_intrusive<Relay>(); });
}
