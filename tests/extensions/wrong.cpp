// Operators that copy their input, each right but for the one bug that stands above it.
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/add.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros_like.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "identity_conv/autograd.h"

namespace {

using at::Tensor;
using torch::autograd::variable_list;

Tensor copied(const Tensor& x) { return at::empty_like(x).copy_(x); }

Tensor fake(const Tensor& x) { return at::empty_like(x); }

char* bytes(const Tensor& x) { return static_cast<char*>(x.mutable_data_ptr()); }

// Where `wrong` holds, one byte is another.
Tensor spoilt(const Tensor& x, bool wrong) {
  Tensor y = copied(x);
  if (wrong && x.numel()) bytes(y)[0] ^= 1;
  return y;
}

// Strides are ignored.
Tensor strides(const Tensor& x) {
  Tensor y = at::empty_like(x);
  if (x.numel()) std::memcpy(bytes(y), x.const_data_ptr(), x.nbytes());
  return y;
}

// The offset into the storage is ignored.
Tensor offset(const Tensor& x) {
  return copied(x.as_strided(x.sizes(), x.strides(), /*storage_offset=*/0));
}

// What a vector of 32 bytes doesn't fill is lost.
Tensor tail(const Tensor& x) {
  const Tensor dense = x.contiguous();
  Tensor y = at::zeros_like(dense);
  const size_t whole = dense.nbytes() / 32 * 32;
  if (whole) std::memcpy(bytes(y), dense.const_data_ptr(), whole);
  return copied(y);
}

// A NaN loses its payload.
Tensor nan(const Tensor& x) {
  Tensor y = copied(x);
  if (x.scalar_type() != at::kFloat) return y;
  Tensor dense = y.contiguous();
  float* number = dense.mutable_data_ptr<float>();
  for (int64_t i = 0; i < dense.numel(); ++i) {
    if (std::isnan(number[i])) number[i] = NAN;
  }
  return y.copy_(dense);
}

// One dtype is copied through another.
Tensor dtype_path(const Tensor& x) {
  return x.scalar_type() == at::kLong ? x.to(at::kDouble).to(at::kLong) : copied(x);
}

// An empty tensor ends the process.
Tensor empty(const Tensor& x) {
  if (x.numel() == 0) std::abort();
  return copied(x);
}

// One size never returns.
Tensor hang(const Tensor& x) {
  while (x.numel() == 13) std::this_thread::sleep_for(std::chrono::seconds(1));
  return copied(x);
}

// It is wrong from 4097 elements on.
Tensor size(const Tensor& x) { return spoilt(x, x.numel() > 4096); }

// The second call is wrong.
Tensor second_call(const Tensor& x) {
  static int calls = 0;
  return spoilt(x, ++calls == 2);
}

// Calls from several threads share memory.
Tensor scratch(const Tensor& x) {
  static std::vector<char> shared(1 << 20);
  const Tensor dense = x.contiguous();
  if (dense.nbytes() == 0 || dense.nbytes() > shared.size()) return copied(x);
  std::memcpy(shared.data(), dense.const_data_ptr(), dense.nbytes());
  Tensor y = at::empty_like(dense);
  std::memcpy(bytes(y), shared.data(), y.nbytes());
  return at::empty_like(x).copy_(y);
}

// A byte behind the input is read, with no effect.
Tensor reads_beyond(const Tensor& x) {
  if (x.numel() && x.is_contiguous()) {
    const volatile char* end = static_cast<const char*>(x.const_data_ptr()) + x.nbytes();
    (void)*end;
  }
  return copied(x);
}

// An element behind the output is written.
Tensor writes_beyond(const Tensor& x) {
  Tensor y = copied(x);
  if (x.numel()) std::memset(bytes(y) + y.nbytes(), 0, y.element_size());
  return y;
}

// The last of several elements is never written.
Tensor unwritten(const Tensor& x) {
  const Tensor dense = x.contiguous();
  Tensor y = at::empty_like(dense);
  const int64_t count = dense.numel() - (dense.numel() > 3);
  if (count) std::memcpy(bytes(y), dense.const_data_ptr(), count * dense.element_size());
  return at::empty_like(x).copy_(y);
}

// A single element is given back, not copied.
Tensor alias(const Tensor& x) { return x.numel() == 1 ? x.view(x.sizes()) : copied(x); }

// The input's first element is changed.
Tensor writes_input(const Tensor& x) {
  Tensor y = copied(x);
  if (x.numel() > 8) bytes(x)[0] ^= 1;
  return y;
}

// A tensor with a conjugate bit is taken for one without.
Tensor conj(const Tensor& x) { return x.is_conj() ? at::clone(x.conj()) : copied(x); }

// The output is row-major.
Tensor row_major(const Tensor& x) { return at::empty(x.sizes(), x.options()).copy_(x); }

// Memory isn't given back.
Tensor leak(const Tensor& x) {
  if (void* kept = std::malloc(x.nbytes())) std::memset(kept, 1, x.nbytes());
  return copied(x);
}

// An int8 tensor is refused without a word.
Tensor silent(const Tensor& x) {
  if (x.scalar_type() == at::kChar) throw std::runtime_error("");
  return copied(x);
}

// The fake is always row-major.
Tensor fake_row_major(const Tensor& x) { return at::empty_symint(x.sym_sizes(), x.options()); }

// The fake says float32.
Tensor fake_dtype(const Tensor& x) { return at::empty_like(x, x.options().dtype(at::kFloat)); }

// The fake fixes sizes.
Tensor fake_fixed(const Tensor& x) {
  for (const auto& size : x.sym_sizes()) size.guard_int(__FILE__, __LINE__);
  return at::empty_like(x);
}

// Of two tensors.

Tensor sum_right(const Tensor& x, const Tensor& y) { return at::add(x, y); }

// The same memory for both is taken for two that differ.
Tensor sum_same_memory(const Tensor& x, const Tensor& y) {
  const bool same = x.numel() && y.numel() && x.const_data_ptr() == y.const_data_ptr();
  return same ? at::add(x, at::zeros_like(y)) : at::add(x, y);
}

// Where the second is broadcast over rows, it is left out.
Tensor sum_broadcast(const Tensor& x, const Tensor& y) {
  const bool rows = y.dim() == 2 && y.size(0) == 1 && x.dim() == 2 && x.size(0) > 1;
  return rows ? at::add(x, at::zeros_like(x)) : at::add(x, y);
}

// The flag is ignored.
Tensor flag(const Tensor& x, bool /*negative*/) { return at::clone(x); }

// The second of two outputs is a view of the first.
std::tuple<Tensor, Tensor> shared_outputs(const Tensor& x) {
  const Tensor y = copied(x);
  return {y, y.view(y.sizes())};
}

// Into memory that is given.

Tensor& twice_right(Tensor& x) { return x.mul_(2); }

// Where cells lie apart, one between them is written.
Tensor& twice_between(Tensor& x) {
  x.mul_(2);
  if (x.dim() == 1 && x.size(0) > 1 && x.stride(0) > 1) {
    bytes(x)[x.element_size()] ^= 1;
  }
  return x;
}

// Three dimensions are left as they were.
Tensor& twice_seldom(Tensor& x) { return x.dim() == 3 ? x : x.mul_(2); }

// The output's strides are ignored.
Tensor& copy_out(const Tensor& x, Tensor& out) {
  const Tensor dense = x.contiguous();
  if (dense.numel()) std::memcpy(bytes(out), dense.const_data_ptr(), dense.nbytes());
  return out;
}

// Subnormals are flushed from now on.
Tensor flushes(const Tensor& x) {
  at::globalContext().setFlushDenormal(true);
  return copied(x);
}

struct Right : torch::autograd::Node {
  variable_list apply(variable_list&& grads) override {
    return {grads[0].defined() ? at::clone(grads[0]) : Tensor()};
  }
};

// The gradient is wrong where it comes in expanded.
struct Expanded : torch::autograd::Node {
  variable_list apply(variable_list&& grads) override {
    const Tensor& grad = grads[0];
    if (!grad.defined()) return {Tensor()};
    bool expanded = false;
    for (int64_t d = 0; d < grad.dim(); ++d) expanded |= grad.size(d) > 1 && grad.stride(d) == 0;
    return {expanded ? at::mul(grad, at::Scalar(2)) : at::clone(grad)};
  }
};

// An undefined gradient is taken for one.
struct Undefined : torch::autograd::Node {
  variable_list apply(variable_list&& grads) override { return {at::clone(grads[0])}; }
};

// The gradient has no gradient.
struct Once : torch::autograd::Node {
  variable_list apply(variable_list&& grads) override {
    return {grads[0].defined() ? at::clone(grads[0].detach()) : Tensor()};
  }
};

// As torch's own generated code does, in torch 2.11 (shared_ptr) and later (intrusive_ptr).
template <class T>
auto make_node(const Tensor& x) {
  using torch::autograd::Node;
  auto create = [] {
    if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, Node>) {
      return c10::make_intrusive<T>();
    } else {
      return std::shared_ptr<T>(new T(), [](T* node) { deleteNode(node); });
    }
  };
  decltype(create()) node;
  if (torch::autograd::compute_requires_grad(x)) {
    node = create();
    node->set_next_edges(torch::autograd::collect_next_edges(x));
  }
  return node;
}

enum class Tangent { kRight, kLost, kZero };

template <class Node, Tangent kTangent>
Tensor autograd(const c10::OperatorHandle& op, c10::DispatchKeySet keys, const Tensor& x) {
  auto node = make_node<Node>(x);
  Tensor y;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    y = op.typed<Tensor(const Tensor&)>().redispatch(keys & c10::after_autograd_keyset, x);
  }
  if (node) torch::autograd::set_history(y, node);
  const Tensor& tangent = x._fw_grad(/*level=*/0);
  if (kTangent != Tangent::kLost && tangent.defined()) {
    y._set_fw_grad(kTangent == Tangent::kZero ? at::zeros_like(tangent) : at::clone(tangent),
                   /*level=*/0, /*is_inplace_op=*/false);
  }
  return y;
}

// An Autograd kernel for any of the operators: the dispatcher says for which.
template <class Node, Tangent kTangent>
void boxed(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const Tensor x = stack->back().toTensor();
  stack->back() = autograd<Node, kTangent>(op, keys, x);
}

template <class Node, Tangent kTangent>
torch::CppFunction gradient() {
  return torch::CppFunction::makeFromBoxedFunction<&boxed<Node, kTangent>>();
}

struct Operator {
  const char* name;
  Tensor (*kernel)(const Tensor&);
  Tensor (*fake)(const Tensor&);
  torch::CppFunction (*gradient)();
};

constexpr auto kRight = &gradient<Right, Tangent::kRight>;

const Operator kOperators[] = {
    {"right", &copied, &fake, kRight},
    {"strides", &strides, &fake, kRight},
    {"offset", &offset, &fake, kRight},
    {"tail", &tail, &fake, kRight},
    {"nan", &nan, &fake, kRight},
    {"dtype_path", &dtype_path, &fake, kRight},
    {"empty", &empty, &fake, kRight},
    {"hang", &hang, &fake, kRight},
    {"size", &size, &fake, kRight},
    {"second_call", &second_call, &fake, kRight},
    {"scratch", &scratch, &fake, kRight},
    {"reads_beyond", &reads_beyond, &fake, kRight},
    {"writes_beyond", &writes_beyond, &fake, kRight},
    {"unwritten", &unwritten, &fake, kRight},
    {"alias", &alias, &fake, kRight},
    {"writes_input", &writes_input, &fake, kRight},
    {"conj", &copied, &fake, kRight},
    {"row_major", &row_major, &fake, kRight},
    {"leak", &leak, &fake, kRight},
    {"silent", &silent, &fake, kRight},
    {"flushes", &flushes, &fake, kRight},
    {"fake_row_major", &copied, &fake_row_major, kRight},
    {"fake_dtype", &copied, &fake_dtype, kRight},
    {"fake_fixed", &copied, &fake_fixed, kRight},
    {"fake_missing", &copied, nullptr, kRight},
    {"grad_missing", &copied, &fake, nullptr},
    {"grad_expanded", &copied, &fake, &gradient<Expanded, Tangent::kRight>},
    {"grad_undefined", &copied, &fake, &gradient<Undefined, Tangent::kRight>},
    {"grad_once", &copied, &fake, &gradient<Once, Tangent::kRight>},
    {"tangent_lost", &copied, &fake, &gradient<Right, Tangent::kLost>},
    {"tangent_zero", &copied, &fake, &gradient<Right, Tangent::kZero>},
};

// Classes with the state (int count, Tensor weight).
struct State : torch::CustomClassHolder {
  State(int64_t count, Tensor weight) : count_(count), weight_(std::move(weight)) {}
  Tensor forward(const Tensor& x) { return at::clone(x); }
  int64_t count() { return count_; }
  int64_t count_;
  Tensor weight_;
};

struct Kept : State {
  using State::State;
};

// Pickling loses the count.
struct Forgets : State {
  using State::State;
};

// Looking at the state changes it, as tracing does.
struct Counts : State {
  using State::State;
  int64_t count() { return ++count_; }
};

template <class T, bool kForgets = false>
void define(torch::Library& m, const char* name) {
  using Self = c10::intrusive_ptr<T>;
  using Fields = std::tuple<std::tuple<std::string, int64_t>, std::tuple<std::string, Tensor>>;
  m.class_<T>(name)
      .def(torch::init<int64_t, Tensor>(), "", {torch::arg("count"), torch::arg("weight")})
      .def("forward", [](const Self& self, const Tensor& x) { return self->forward(x); }, "",
           {torch::arg("x")})
      .def("__obj_flatten__",
           [](const Self& self) -> Fields {
             return {{"count", self->count()}, {"weight", self->weight_}};
           })
      .def_pickle(
          [](const Self& self) {
            return std::make_tuple(kForgets ? int64_t{0} : self->count_, self->weight_);
          },
          [](std::tuple<int64_t, Tensor> state) {
            return c10::make_intrusive<T>(std::get<0>(state), std::get<1>(state));
          });
}

}  // namespace

TORCH_LIBRARY(test_wrong, m) {
  for (const auto& op : kOperators) {
    m.def((std::string(op.name) + "(Tensor x) -> Tensor").c_str());
  }
  m.def("composed(Tensor x) -> Tensor",
        torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd, &copied));
  const auto composed = c10::DispatchKey::CompositeImplicitAutograd;
  m.def("sum_right(Tensor x, Tensor y) -> Tensor", torch::dispatch(composed, &sum_right));
  m.def("sum_same_memory(Tensor x, Tensor y) -> Tensor",
        torch::dispatch(composed, &sum_same_memory));
  m.def("sum_broadcast(Tensor x, Tensor y) -> Tensor", torch::dispatch(composed, &sum_broadcast));
  m.def("flag(Tensor x, bool negative=False) -> Tensor", torch::dispatch(composed, &flag));
  m.def("shared_outputs(Tensor x) -> (Tensor, Tensor)", torch::dispatch(composed, &shared_outputs));
  m.def("twice_right(Tensor(a!) x) -> Tensor(a!)");
  m.def("twice_between(Tensor(a!) x) -> Tensor(a!)");
  m.def("twice_seldom(Tensor(a!) x) -> Tensor(a!)");
  m.def("copy_out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)");
  define<Kept>(m, "Kept");
  define<Forgets, /*kForgets=*/true>(m, "Forgets");
  define<Counts>(m, "Counts");
}
TORCH_LIBRARY_IMPL(test_wrong, CPU, m) {
  for (const auto& op : kOperators) m.impl(op.name, op.kernel);
  m.impl("twice_right", &twice_right);
  m.impl("twice_between", &twice_between);
  m.impl("twice_seldom", &twice_seldom);
  m.impl("copy_out", &copy_out);
}
TORCH_LIBRARY_IMPL(test_wrong, Meta, m) {
  for (const auto& op : kOperators) {
    if (op.fake) m.impl(op.name, op.fake);
  }
}
TORCH_LIBRARY_IMPL(test_wrong, Autograd, m) {
  for (const auto& op : kOperators) {
    if (op.gradient) m.impl(op.name, op.gradient());
  }
}
TORCH_LIBRARY_IMPL(test_wrong, Conjugate, m) { m.impl("conj", &conj); }
