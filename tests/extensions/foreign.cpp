// Classes as people write them, without a header of ours: good ones, and ones that can't be right.
#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/stack.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <optional>
#include <tuple>
#include <vector>

namespace {

using at::Tensor;
using torch::arg;
template <class... T>
using Pairs = std::tuple<std::tuple<std::string, T>...>;

// The constructor's arguments have no names; a field is called as the fake might be tempted to call
// its own.
struct Ordered : torch::CustomClassHolder {
  Ordered(int64_t factor, int64_t shift) : factor_(factor), shift_(shift) {}
  Tensor forward(const Tensor& x) {
    return at::add(at::mul(x, at::Scalar(factor_)), at::Scalar(shift_));
  }
  Pairs<int64_t, int64_t> flatten() { return {{"_copy", factor_}, {"_real", shift_}}; }
  int64_t factor_, shift_;
};

// Flattened in another order than constructed, both of one type.
template <int kind>
struct Two : torch::CustomClassHolder {
  Two(Tensor one, Tensor other) : one_(std::move(one)), other_(std::move(other)) {}
  explicit Two(const Tensor& both) : Two(both, both) {}
  Tensor forward(const Tensor& x) { return at::add(at::mul(x, one_), other_); }
  Pairs<Tensor, Tensor> flatten() { return {{"other", other_}, {"one", one_}}; }
  Tensor one_, other_;
};
using Swapped = Two<0>;
using Stated = Two<1>;  // the same, saved by its state

struct Opaque : torch::CustomClassHolder {
  Tensor forward(const Tensor& x) { return at::sin(x); }
};

// Flattens to a value without a name.
struct Unnamed : torch::CustomClassHolder {
  explicit Unnamed(double factor) : factor_(factor) {}
  Tensor forward(const Tensor& x) { return at::mul(x, at::Scalar(factor_)); }
  std::tuple<double> flatten() { return {factor_}; }
  double factor_;
};

// Looks where a fake tensor has nothing.
struct Looking : torch::CustomClassHolder {
  Tensor sized(const Tensor& x) { return x.sizes()[0] > 2 ? at::sin(x) : x.clone(); }
  Tensor read(const Tensor& x) { return at::mul(x, at::Scalar(*x.const_data_ptr<float>())); }
  Pairs<int64_t> flatten() { return {{"unused", 0}}; }
};

// What a method may take and give.
struct Several : torch::CustomClassHolder {
  explicit Several(double factor) : factor_(factor) {}
  std::tuple<Tensor, Tensor> pair(const Tensor& x, const Tensor& y) {
    return {at::mul(x, y), at::mul(at::sin(y), at::Scalar(factor_))};
  }
  std::vector<Tensor> each(std::vector<Tensor> xs, int64_t times) {
    for (Tensor& x : xs) x = at::mul(at::mul(x, x), at::Scalar(times));
    return xs;
  }
  Tensor maybe(const Tensor& x, const std::optional<Tensor>& y) {
    return y ? at::mul(x, *y) : at::sin(x);
  }
  Tensor detached(const Tensor& x) { return at::sin(x.detach()); }
  Tensor random(const Tensor& x) {
    return at::mul(x, at::bernoulli(x.detach().clone().fill_(0.5)));
  }
  Tensor counted(const Tensor& x) {
    factor_ += 1;
    return at::mul(x, at::Scalar(factor_));
  }
  Tensor in_place(Tensor x) { return x.mul_(at::Scalar(factor_)); }
  void in_place_too(Tensor x) { x.mul_(at::Scalar(factor_)); }
  Tensor add_to(Tensor total, const Tensor& x) { return at::mul(total.add_(x.detach()), x); }
  Tensor product(const Tensor& x) { return at::mm(x, x.t()); }
  Tensor with(const c10::intrusive_ptr<Several>& other, const Tensor& x) {
    return at::mul(x, at::Scalar(factor_ * other->factor_));
  }
  c10::intrusive_ptr<Several> another() { return c10::make_intrusive<Several>(factor_); }
  c10::Dict<std::string, Tensor> named(const Tensor& x) {
    c10::Dict<std::string, Tensor> found;
    found.insert("sine", at::sin(x));
    return found;
  }
  void set(double factor) { factor_ = factor; }
  int64_t whole() { return static_cast<int64_t>(factor_); }
  Pairs<double> flatten() { return {{"factor", factor_}}; }
  double factor_;
};

// A parameter that lives in C++.
struct Learned : torch::CustomClassHolder {
  explicit Learned(Tensor weight) : weight_(std::move(weight)) {}
  Tensor forward(const Tensor& x) { return at::mul(x, weight_); }
  Tensor doubled() { return at::mul(weight_, at::Scalar(2)); }
  Pairs<Tensor> flatten() { return {{"weight", weight_}}; }
  Tensor weight_;
};

// Operators that take an object.
Tensor apply(const c10::intrusive_ptr<Learned>& obj, const Tensor& x) {
  return at::mul(at::sin(x), obj->weight_);
}

}  // namespace

TORCH_LIBRARY(test_foreign, m) {
  m.class_<Ordered>("Ordered")
      .def(torch::init<int64_t, int64_t>())
      .def("forward", &Ordered::forward)
      .def("__obj_flatten__", &Ordered::flatten);
  m.class_<Swapped>("Swapped")
      .def(torch::init<Tensor, Tensor>())
      .def("forward", &Swapped::forward)
      .def("__obj_flatten__", &Swapped::flatten);
  m.class_<Stated>("Stated")
      .def(torch::init<Tensor>())
      .def("forward", &Stated::forward)
      .def("__obj_flatten__", &Stated::flatten)
      .def_static("of",
                  [](Tensor one, Tensor other) { return c10::make_intrusive<Stated>(one, other); })
      .def_static("same", [](const c10::intrusive_ptr<Stated>& self) { return self; })
      .def_pickle(
          [](const c10::intrusive_ptr<Stated>& self) {
            return std::make_tuple(self->other_, self->one_);
          },
          [](std::tuple<Tensor, Tensor> state) {
            return c10::make_intrusive<Stated>(std::get<1>(state), std::get<0>(state));
          });
  m.class_<Opaque>("Opaque").def(torch::init<>()).def("forward", &Opaque::forward);
  m.class_<Unnamed>("Unnamed")
      .def(torch::init<double>())
      .def("forward", &Unnamed::forward)
      .def("__obj_flatten__", &Unnamed::flatten);
  m.class_<Looking>("Looking")
      .def(torch::init([](int64_t) { return c10::make_intrusive<Looking>(); }), "", {arg("unused")})
      .def("sized", &Looking::sized)
      .def("read", &Looking::read)
      .def("__obj_flatten__", &Looking::flatten);
  m.class_<Several>("Several")
      .def(torch::init<double>(), "", {arg("factor")})
      .def("pair", &Several::pair, "", {arg("x"), arg("y")})
      .def("each", &Several::each, "", {arg("xs"), arg("times")})
      .def("maybe", &Several::maybe, "", {arg("x"), arg("y") = torch::arg::none()})
      .def("detached", &Several::detached)
      .def("random", &Several::random)
      .def("counted", &Several::counted)
      .def("in_place", &Several::in_place)
      .def("in_place_too", &Several::in_place_too)
      .def("add_to", &Several::add_to)
      .def("product", &Several::product)
      .def("with", &Several::with)
      .def("another", &Several::another)
      .def("named", &Several::named)
      .def("set", &Several::set)
      .def("whole", &Several::whole)
      .def("__obj_flatten__", &Several::flatten)
      .def_pickle([](const c10::intrusive_ptr<Several>& self) { return self->factor_; },
                  [](double factor) { return c10::make_intrusive<Several>(factor); });
  m.class_<Learned>("Learned")
      .def(torch::init<Tensor>(), "", {arg("weight")})
      .def("forward", &Learned::forward)
      .def("doubled", &Learned::doubled)
      .def("__obj_flatten__", &Learned::flatten)
      .def_pickle([](const c10::intrusive_ptr<Learned>& self) { return self->weight_; },
                  [](Tensor weight) { return c10::make_intrusive<Learned>(std::move(weight)); });
  m.def("apply(__torch__.torch.classes.test_foreign.Learned obj, Tensor x) -> Tensor");
}
TORCH_LIBRARY_IMPL(test_foreign, CompositeExplicitAutograd, m) { m.impl("apply", &apply); }
