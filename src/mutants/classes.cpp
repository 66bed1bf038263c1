// Classes with the state (int count, Tensor weight), each right but for one bug.
#include <torch/custom_class.h>

#include "mutants.h"

namespace mutants {
namespace {

using State = std::tuple<int64_t, Tensor>;

struct Kept : torch::CustomClassHolder {
  Kept(int64_t count, Tensor weight) : count(count), weight(std::move(weight)) {}
  Tensor forward(const Tensor& x) { return at::clone(x); }
  State flattened() { return {count, weight}; }
  State pickled() { return {count, weight}; }
  int64_t count;
  Tensor weight;
};

// Pickling loses the count.
struct Forgets : Kept {
  using Kept::Kept;
  State pickled() { return {0, weight}; }
};

// Pickling changes the object.
struct PickledOnce : Kept {
  using Kept::Kept;
  State pickled() { return {count++, weight}; }
};

// Flattening, as tracing does it, changes the object.
struct Counts : Kept {
  using Kept::Kept;
  State flattened() { return {++count, weight}; }
};

// Pickling gives the weight's numbers as float32.
struct Rounds : Kept {
  using Kept::Kept;
  State pickled() { return {count, weight.to(at::kFloat)}; }
};

// All objects have one weight: that of the latest.
struct Shared : Kept {
  Shared(int64_t count, Tensor weight) : Kept(count, std::move(weight)) { latest() = this->weight; }
  State flattened() { return {count, latest()}; }
  State pickled() { return {count, latest()}; }
  static Tensor& latest() {
    static auto* tensor = new Tensor();  // outlives everything at exit
    return *tensor;
  }
};

// The method ignores strides.
struct Strides : Kept {
  using Kept::Kept;
  Tensor forward(const Tensor& x) { return at::clone(x, at::MemoryFormat::Contiguous); }
};

template <class T>
void define_class(torch::Library& m, const char* name) {
  using Self = c10::intrusive_ptr<T>;
  using Fields = std::tuple<std::tuple<std::string, int64_t>, std::tuple<std::string, Tensor>>;
  m.class_<T>(name)
      .def(torch::init<int64_t, Tensor>(), "", {torch::arg("count"), torch::arg("weight")})
      .def("forward", [](const Self& self, const Tensor& x) { return self->forward(x); }, "",
           {torch::arg("x")})
      .def("__obj_flatten__",
           [](const Self& self) -> Fields {
             auto [count, weight] = self->flattened();
             return {{"count", count}, {"weight", weight}};
           })
      .def_pickle([](const Self& self) { return self->pickled(); },
                  [](State state) {
                    return c10::make_intrusive<T>(std::get<0>(state), std::get<1>(state));
                  });
}

}  // namespace
}  // namespace mutants

TORCH_LIBRARY_FRAGMENT(identity_conv_mutants, m) {
  using namespace mutants;
  define_class<Kept>(m, "Kept");
  define_class<Forgets>(m, "Forgets");
  define_class<PickledOnce>(m, "PickledOnce");
  define_class<Counts>(m, "Counts");
  define_class<Rounds>(m, "Rounds");
  define_class<Shared>(m, "Shared");
  define_class<Strides>(m, "Strides");
}
