#pragma once

// Gradients of an operator from a forward and a backward in C++.
//
// The author's kernels are the forward. The backward is a struct:
//
//   struct ScaleGradient {
//     static constexpr auto kOperator = "my_ops::scale";  // that it is registered for
//     using Signature = at::Tensor(const at::Tensor& x, double factor);  // as the kernels have it
//     static at::Tensor backward(const at::Tensor& grad, const at::Tensor& x, double factor) {
//       return scale(grad, factor);  // through the dispatcher: higher orders follow
//     }
//   };
//   TORCH_LIBRARY_IMPL(my_ops, Autograd, m) {
//     m.impl("scale", identity_conv::differentiable<ScaleGradient>());
//   }
//
// and reverse mode, forward mode, higher orders, torch.func, torch.compile and export follow.
//
// backward takes the gradient of each output (zeros where it isn't used; undefined for an output
// that is not floating point or complex), then the operator's arguments, and returns a tensor, a
// tuple or a vector: one gradient for each tensor among the arguments, in their order, undefined
// where there is none. It must be linear in the gradients, made of operators that have gradients
// where second order is wanted. One that takes the gradients alone keeps nothing for backward.
//
// Optional members:
//   static void check(arguments...): refuses arguments before anything else.
//   static R jvp(tangents..., arguments...), or jvp(tangents...): forward mode, the tangent of the
//     outputs; the tangent of a tensor that has none is undefined. Without it forward mode
//     differentiates backward, which costs a backward of that.
//   static constexpr auto kName: the node's name in a graph, for people.
//
// Tensors among the arguments are an at::Tensor, a std::optional of it, an at::TensorList
// (Tensor[]) or a c10::List<std::optional<at::Tensor>> (Tensor?[]). Outputs are at::Tensor, a
// std::tuple of it, or a std::vector of it, fresh memory all: an operator that returns its
// argument, or a view of it, or changes one, needs torch's own view machinery, and is refused. An
// object among the arguments gets no gradient: tensors that learn are arguments of their own.
//
// What is private in torch is seen in 2.11, which holds nodes by shared_ptr, and in 2.13 and 2.14,
// which hold them by intrusive_ptr.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/StringUtil.h>
#include <identity_conv/wording.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace identity_conv {
namespace detail {

using at::Tensor;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using OptionalTensors = c10::List<std::optional<Tensor>>;  // Tensor?[]

// --- arguments and outputs, tensor by tensor ---

template <class F>
void each_tensor(const Tensor& x, F&& f) {
  f(x);
}
template <class F>
void each_tensor(const std::optional<Tensor>& x, F&& f) {
  f(x ? *x : Tensor());
}
template <class F>
void each_tensor(at::ArrayRef<Tensor> xs, F&& f) {
  for (const Tensor& x : xs) f(x);
}
template <class F>
void each_tensor(const std::vector<Tensor>& xs, F&& f) {
  for (const Tensor& x : xs) f(x);
}
template <class F>
void each_tensor(const OptionalTensors& xs, F&& f) {
  for (size_t i = 0; i < xs.size(); ++i) each_tensor(std::optional<Tensor>(xs.get(i)), f);
}
template <class... Ts, class F>
void each_tensor(const std::tuple<Ts...>& xs, F&& f) {
  std::apply([&](const auto&... x) { (each_tensor(x, f), ...); }, xs);
}
template <class T, class F,
          class = std::enable_if_t<!std::is_convertible_v<T, at::ArrayRef<Tensor>>>>
void each_tensor(const T&, F&&) {}  // a number, a string: none

template <class... Ts>
variable_list tensors_of(const Ts&... xs) {
  variable_list all;
  (each_tensor(xs, [&](const Tensor& x) { all.push_back(x); }), ...);
  return all;
}

template <class T>
struct HasTensor : std::is_same<T, Tensor> {};
template <template <class...> class Container, class... Ts>
struct HasTensor<Container<Ts...>> : std::disjunction<HasTensor<Ts>...> {};

// Whether each_tensor finds every tensor of an argument.
template <class T>
constexpr bool is_looked_into =
    !HasTensor<T>::value || std::is_same_v<T, Tensor> || std::is_same_v<T, std::optional<Tensor>> ||
    std::is_same_v<T, at::ArrayRef<Tensor>> || std::is_same_v<T, OptionalTensors>;

inline bool share_memory(const Tensor& x, const Tensor& y) {
  if (!x.defined() || !y.defined()) return false;
  // Tensors of transforms have none, or none that may be asked for.
  const auto* storage = x.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  return x.is_same(y) ||
         (storage && storage == y.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
}

// --- what a node keeps of an argument ---

template <class T>
struct Saved {
  explicit Saved(const T& x) : value(x) {}
  const T& unpack() const { return value; }
  void release() {}
  T value;
};
template <>
struct Saved<Tensor> {
  explicit Saved(const Tensor& x) : saved(x, /*is_output=*/false) {}
  Tensor unpack() const { return saved.unpack(); }
  void release() { saved.reset_data(); }
  SavedVariable saved;
};
template <>
struct Saved<std::optional<Tensor>> {
  explicit Saved(const std::optional<Tensor>& x)
      : has(x.has_value()), saved(x ? *x : Tensor(), /*is_output=*/false) {}
  std::optional<Tensor> unpack() const {
    return has ? std::optional<Tensor>(saved.unpack()) : std::nullopt;
  }
  void release() { saved.reset_data(); }
  bool has;
  SavedVariable saved;
};
template <>
struct Saved<at::ArrayRef<Tensor>> {
  explicit Saved(at::ArrayRef<Tensor> xs) {
    for (const Tensor& x : xs) saved.emplace_back(x, /*is_output=*/false);
  }
  std::vector<Tensor> unpack() const {
    std::vector<Tensor> xs;
    for (const SavedVariable& x : saved) xs.push_back(x.unpack());
    return xs;
  }
  void release() {
    for (SavedVariable& x : saved) x.reset_data();
  }
  std::vector<SavedVariable> saved;
};
template <>
struct Saved<OptionalTensors> {
  explicit Saved(const OptionalTensors& xs) {
    for (size_t i = 0; i < xs.size(); ++i) saved.emplace_back(std::optional<Tensor>(xs.get(i)));
  }
  OptionalTensors unpack() const {
    OptionalTensors xs;
    for (const auto& x : saved) xs.push_back(x.unpack());
    return xs;
  }
  void release() {
    for (auto& x : saved) x.release();
  }
  std::vector<Saved<std::optional<Tensor>>> saved;
};
template <class T>
struct Saved<at::ArrayRef<T>> {
  explicit Saved(at::ArrayRef<T> xs) : values(xs.vec()) {}
  const std::vector<T>& unpack() const { return values; }
  void release() {}
  std::vector<T> values;
};
template <>
struct Saved<std::string_view> {
  explicit Saved(std::string_view x) : value(x) {}
  std::string_view unpack() const { return value; }
  void release() {}
  std::string value;
};

// --- calls of the author's functions ---

// Calls f(grads..., arguments...), or f(grads...) where f wants no arguments.
template <class F, size_t... I, class... Args>
decltype(auto) call_with(F&& f, const variable_list& grads, std::index_sequence<I...>,
                         const Args&... args) {
  if constexpr (std::is_invocable_v<F, decltype((void)I, grads[0])...>) {
    return f(grads[I]...);
  } else {
    return f(grads[I]..., args...);
  }
}

template <class R>
struct Outputs {
  static_assert(!sizeof(std::decay_t<R>*),
                "identity_conv::differentiable: an operator returns an at::Tensor, a std::tuple of "
                "it or a std::vector of it, by value and fresh");
};
template <>
struct Outputs<Tensor> {
  static constexpr size_t count = 1;
};
template <class... Ts>
struct Outputs<std::tuple<Ts...>> {
  static_assert((std::is_same_v<Ts, Tensor> && ...),
                "identity_conv::differentiable: an operator's outputs must all be tensors");
  static constexpr size_t count = sizeof...(Ts);
};

template <class G, class = void>
struct HasCheck : std::false_type {};
template <class G>
struct HasCheck<G, std::void_t<decltype(&G::check)>> : std::true_type {};
template <class G, class = void>
struct HasJvp : std::false_type {};
template <class G>
struct HasJvp<G, std::void_t<decltype(&G::jvp)>> : std::true_type {};
template <class G, class = void>
struct HasName : std::false_type {};
template <class G>
struct HasName<G, std::void_t<decltype(G::kName)>> : std::true_type {};

template <class G, class Signature>
struct Differentiable;

template <class G, class R, class... Args>
struct Differentiable<G, R(Args...)> {
  static_assert((is_looked_into<std::decay_t<Args>> && ...),
                "identity_conv::differentiable: tensors among the arguments are an at::Tensor, a "
                "std::optional<at::Tensor>, an at::TensorList (Tensor[]) or a "
                "c10::List<std::optional<at::Tensor>> (Tensor?[]): in other containers their "
                "gradients would be lost");
  static constexpr bool is_list = std::is_same_v<R, std::vector<Tensor>>;

  // Whether backward wants the arguments, that is, whether the node keeps them.
  static constexpr bool wants_arguments() {
    if constexpr (is_list) {
      return !std::is_invocable_v<decltype(G::backward), const variable_list&>;
    } else {
      return wants_arguments(std::make_index_sequence<Outputs<R>::count>());
    }
  }
  template <size_t... I>
  static constexpr bool wants_arguments(std::index_sequence<I...>) {
    return !std::is_invocable_v<decltype(G::backward),
                                decltype((void)I, std::declval<const Tensor&>())...>;
  }

  // Whether backward can be called with the arguments, where it wants them.
  static constexpr bool takes_arguments() {
    if constexpr (is_list) {
      return std::is_invocable_v<decltype(G::backward), const variable_list&,
                                 const std::decay_t<Args>&...>;
    } else {
      return takes_arguments(std::make_index_sequence<Outputs<R>::count>());
    }
  }
  template <size_t... I>
  static constexpr bool takes_arguments(std::index_sequence<I...>) {
    return std::is_invocable_v<decltype(G::backward),
                               decltype((void)I, std::declval<const Tensor&>())...,
                               const std::decay_t<Args>&...>;
  }

  template <class... As>
  static variable_list backward(const variable_list& grads, const As&... args) {
    static_assert(!wants_arguments() || takes_arguments(),
                  "identity_conv::differentiable: backward must take the gradient of each output, "
                  "and after them nothing, or every argument of Signature");
    if constexpr (is_list) {
      if constexpr (wants_arguments()) {
        return tensors_of(G::backward(grads, args...));
      } else {
        return tensors_of(G::backward(grads));
      }
    } else {
      return tensors_of(
          call_with(G::backward, grads, std::make_index_sequence<Outputs<R>::count>(), args...));
    }
  }

  struct Backward : Node {
    variable_list apply(variable_list&& grads) override {
      bool any = false;
      for (const Tensor& grad : grads) any = any || grad.defined();
      const size_t inputs = this->num_outputs();
      if (!any) return variable_list(inputs);
      for (size_t i = 0; i < grads.size(); ++i) {
        if (!grads[i].defined() && !this->input_metadata(i).was_default_constructed()) {
          grads[i] = this->input_metadata(i).zeros_like();
        }
      }
      variable_list found;
      if constexpr (wants_arguments()) {
        TORCH_INTERNAL_ASSERT(saved);
        found = std::apply(
            [&](const auto&... each) {
              return Differentiable::backward(grads,
                                              static_cast<const std::decay_t<Args>&>(each)...);
            },
            unpack());
      } else {
        found = Differentiable::backward(grads);
      }
      TORCH_CHECK(found.size() == inputs, G::kOperator, ": backward must return ",
                  counted(inputs, "gradient"), ", one for each tensor argument, got ",
                  found.size());
      return found;
    }
    std::string name() const override {
      if constexpr (HasName<G>::value) {
        return G::kName;
      } else {
        return std::string(G::kOperator) + " backward";
      }
    }
    void release_variables() override {
      if (saved) std::apply([](auto&... each) { (each.release(), ...); }, *saved);
    }
    auto unpack() {
      return std::apply([](const auto&... each) { return std::make_tuple(each.unpack()...); },
                        *saved);
    }
    std::optional<std::tuple<Saved<std::decay_t<Args>>...>> saved;
  };

  static auto make_node() {
    if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, Node>) {
      return c10::make_intrusive<Backward>();
    } else {
      // By a dependent name: the deleter exists only where this branch is taken.
      return std::shared_ptr<Backward>(new Backward(), [](Backward* node) { deleteNode(node); });
    }
  }

  static const auto& handle() {
    static const auto handle = [] {
      const std::string name = G::kOperator;
      const size_t dot = name.find('.');
      const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(
          name.substr(0, dot).c_str(),
          dot == std::string::npos ? "" : name.substr(dot + 1).c_str());
      for (const auto& argument : op.schema().arguments()) {
        TORCH_CHECK_NOT_IMPLEMENTED(
            !argument.alias_info(), G::kOperator,
            ": an operator with this gradient must leave its arguments alone and return fresh "
            "tensors, got ",
            op.schema());
      }
      return op.template typed<R(Args...)>();
    }();
    return handle;
  }

  // The kernel for the Autograd key.
  static R call(c10::DispatchKeySet keys, Args... args) {
    if constexpr (HasCheck<G>::value) G::check(args...);
    bool requires_grad = false;
    bool has_tangent = false;
    const auto look = [&](const Tensor& x) {
      if (!x.defined()) return;
      requires_grad = requires_grad || x.requires_grad();
      has_tangent = has_tangent || x._fw_grad(/*level=*/0).defined();
    };
    (each_tensor(args, look), ...);

    decltype(make_node()) node;
    if (requires_grad && at::GradMode::is_enabled()) {
      node = make_node();
      torch::autograd::edge_list edges;
      const auto edge = [&](const Tensor& x) {
        if (x.defined()) {
          edges.push_back(torch::autograd::impl::gradient_edge(x));
        } else {
          edges.emplace_back();
        }
      };
      (each_tensor(args, edge), ...);
      node->set_next_edges(std::move(edges));
      if constexpr (wants_arguments()) node->saved.emplace(Saved<std::decay_t<Args>>(args)...);
    }
    R result = [&] {
      at::AutoDispatchBelowADInplaceOrView below;
      return handle().redispatch(keys & c10::after_autograd_keyset, args...);
    }();
    if (node) {
      each_tensor(result, [&](const Tensor& y) {
        const auto same = [&](const Tensor& x) {
          TORCH_CHECK(!share_memory(x, y), G::kOperator,
                      " returns one of its arguments, or a view of it: return a fresh tensor");
        };
        (each_tensor(args, same), ...);
        if (y.defined() && torch::autograd::isDifferentiableType(y.scalar_type())) {
          torch::autograd::set_history(y, node);
        } else {
          node->add_input_metadata(Node::undefined_input());
        }
      });
    }
    if (has_tangent) set_tangents(result, args...);
    return result;
  }

  static void set_tangents(const R& result, const Args&... args) {
    const variable_list outputs = tensors_of(result);
    const variable_list tangents = jvp(outputs, args...);
    TORCH_CHECK(tangents.size() == outputs.size(), G::kOperator, ": jvp must return ",
                counted(outputs.size(), "tangent"), ", one for each output, got ", tangents.size());
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (tangents[i].defined())
        outputs[i]._set_fw_grad(tangents[i], /*level=*/0, /*is_inplace_op=*/false);
    }
  }

  static variable_list jvp(const variable_list& outputs, const Args&... args) {
    variable_list tangents;
    (each_tensor(args,
                 [&](const Tensor& x) {
                   tangents.push_back(x.defined() ? x._fw_grad(/*level=*/0) : Tensor());
                 }),
     ...);
    if constexpr (HasJvp<G>::value) {
      constexpr size_t count = (size_t{0} + ... +
                                (std::is_same_v<std::decay_t<Args>, Tensor> ||
                                 std::is_same_v<std::decay_t<Args>, std::optional<Tensor>>));
      return tensors_of(call_with(G::jvp, tangents, std::make_index_sequence<count>(), args...));
    } else {
      return jvp_of_backward(outputs, tangents, primal(args)...);
    }
  }

  static Tensor primal(const Tensor& x) {
    return x.defined() && x._fw_grad(/*level=*/0).defined() ? x._fw_primal(/*level=*/0) : x;
  }
  static std::optional<Tensor> primal(const std::optional<Tensor>& x) {
    return x ? std::optional<Tensor>(primal(*x)) : std::nullopt;
  }
  static OptionalTensors primal(const OptionalTensors& xs) {
    OptionalTensors primals;
    for (size_t i = 0; i < xs.size(); ++i)
      primals.push_back(primal(std::optional<Tensor>(xs.get(i))));
    return primals;
  }
  static std::vector<Tensor> primal(at::ArrayRef<Tensor> xs) {
    std::vector<Tensor> primals;
    for (const Tensor& x : xs) primals.push_back(primal(x));
    return primals;
  }
  template <class T>
  static std::enable_if_t<!std::is_convertible_v<T, at::ArrayRef<Tensor>>, const T&> primal(
      const T& x) {
    return x;
  }

  // backward is linear in the gradients u, and its transpose is the forward mode: the gradient by u
  // of <backward(u), tangents>.
  template <class... As>
  static variable_list jvp_of_backward(const variable_list& outputs, const variable_list& tangents,
                                       const As&... args) {
    at::AutoGradMode grad_mode(true);
    variable_list u;
    variable_list sources;
    std::vector<size_t> where;
    for (const Tensor& y : outputs) {
      if (y.defined() && torch::autograd::isDifferentiableType(y.scalar_type())) {
        u.push_back(at::zeros_like(y.detach()._fw_primal(/*level=*/0)).requires_grad_());
        where.push_back(sources.size());
        sources.push_back(u.back());
      } else {
        u.emplace_back();
        where.push_back(outputs.size());
      }
    }
    const variable_list grads = backward(u, static_cast<const std::decay_t<Args>&>(args)...);
    variable_list ends;
    variable_list weights;
    for (size_t i = 0; i < grads.size(); ++i) {
      if (tangents[i].defined() && grads[i].defined() && grads[i].requires_grad()) {
        ends.push_back(grads[i]);
        weights.push_back(tangents[i]);
      }
    }
    variable_list found(sources.size());
    if (!ends.empty()) {
      found = torch::autograd::grad(ends, sources, weights, /*retain_graph=*/true,
                                    /*create_graph=*/true, /*allow_unused=*/true);
    }
    variable_list all;
    for (size_t i = 0; i < outputs.size(); ++i) {
      all.push_back(where[i] < found.size() ? found[where[i]] : Tensor());
    }
    return all;
  }
};

}  // namespace detail

// The kernel for the Autograd key of the operator that G describes (see above). It is registered
// with G's kOperator beside file and line, which identity_conv.Extension compares with the operator
// that has it, as it loads the library.
template <class G>
torch::CppFunction differentiable(const char* file = __builtin_FILE(),
                                  int line = __builtin_LINE()) {
  return torch::CppFunction(&detail::Differentiable<G, typename G::Signature>::call)
      .debug(c10::str("registered at ", file, ":", line, ", identity_conv::differentiable(",
                      G::kOperator, ")"));
}

}  // namespace identity_conv
