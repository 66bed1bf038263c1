#pragma once

// A custom class from its fields, named once.
//
//   class Affine : public torch::CustomClassHolder {
//    public:
//     static auto state() {
//       return identity_conv::state(IDENTITY_CONV_FIELD(Affine, weight),
//                                   IDENTITY_CONV_FIELD(Affine, shift).or_default(0));
//     }
//     void check() const { ... }  // optional: throws where the fields make no object
//     at::Tensor forward(const at::Tensor& x) const { ... }
//
//    private:
//     at::Tensor weight;
//     int64_t shift = 0;
//   };
//   TORCH_LIBRARY(my_ops, m) {
//     identity_conv::class_<Affine>(m, "Affine").def("forward", &Affine::forward, "",
//     {torch::arg("x")});
//   }
//
// gives the class a constructor with keywords, in the order of the fields; a read-only accessor of
// each; __obj_flatten__, pairs of name and value, from which fakes are derived; __getstate__ and
// __setstate__, by names; __eq__ and __ne__, by value, false and true for anything of another type;
// __repr__ and __str__; and a truth value, true (by __len__, the number of fields).
//
// Put the class in an unnamed namespace, as everything of a library that only its registrations
// need: torch knows classes by their C++ names, and two libraries with one name end the process.
//
// An object is made by the default constructor; then its fields are set and check() is called.
// Where the state changes, methods do it.
//
// A field is an int64_t, double, bool, std::string, at::Tensor, at::Device or at::ScalarType (which
// Python gives as torch.dtype and reads as a number: torchbind has no type for it); a std::vector
// or std::optional of these; a c10::Dict from int64_t or std::string to these; or such of such.
// Anything else doesn't compile, with a sentence.
//
// Kept state (pickle, torch.save, deepcopy, packages) goes by names. An added field with a default
// is set to it where an older state lacks it; a field that the class doesn't have is refused by
// name; where the meaning of the fields changes, `identity_conv::state(...).version(2)` refuses
// what was kept under another version. Without a call of version() it is 1; the static method
// state_version says it.

#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

// The field `member` of the class, by its own name; usable inside the class for private members.
// The member may be a base class's.
#define IDENTITY_CONV_FIELD(Class, member) identity_conv::field<Class>(#member, &Class::member)

namespace identity_conv {

// A field with its name, and a default where it has one. Made by IDENTITY_CONV_FIELD.
template <class Class, class T, bool has_default = false>
struct Field {
  const char* name;
  T Class::* member;
  std::optional<T> value = std::nullopt;

  Field<Class, T, true> or_default(T default_value) const {
    return {name, member, std::move(default_value)};
  }
};

template <class Class, class T, class Base>
Field<Class, T> field(const char* name, T Base::* member) {
  static_assert(std::is_base_of_v<Base, Class>);
  return {name, member};
}

namespace detail {

// --- which types a field may have ---

template <class T>
struct Element : std::false_type {};
#define IDENTITY_CONV_ELEMENT(T) \
  template <>                    \
  struct Element<T> : std::true_type {}
IDENTITY_CONV_ELEMENT(int64_t);
IDENTITY_CONV_ELEMENT(double);
IDENTITY_CONV_ELEMENT(bool);
IDENTITY_CONV_ELEMENT(std::string);
IDENTITY_CONV_ELEMENT(at::Tensor);
IDENTITY_CONV_ELEMENT(at::Device);
IDENTITY_CONV_ELEMENT(at::ScalarType);
#undef IDENTITY_CONV_ELEMENT
template <class T>
struct Element<std::vector<T>> : Element<T> {};
template <class T>
struct Element<std::optional<T>> : Element<T> {};
template <class K>
constexpr bool is_key = std::is_same_v<K, int64_t> || std::is_same_v<K, std::string>;
template <class K, class V>
struct Element<c10::Dict<K, V>> : std::bool_constant<is_key<K> && Element<V>::value> {};

// --- values that can be kept ---
//
// Lists, dicts and optionals are kept as tuples: an empty list read back in Python has no type by
// which torchbind would take it.

inline c10::IValue tuple(std::vector<c10::IValue> values) {
  return c10::ivalue::Tuple::create(std::move(values));
}

template <class T>
struct Kept {
  static c10::IValue pack(const T& value) { return value; }
  static T unpack(const c10::IValue& kept) { return kept.to<T>(); }
  static bool equal(const T& one, const T& other) { return one == other; }
  static void show(std::ostream& out, const T& value) { out << value; }
};
template <>
inline void Kept<bool>::show(std::ostream& out, const bool& value) {
  out << (value ? "True" : "False");
}
template <>
inline void Kept<std::string>::show(std::ostream& out, const std::string& value) {
  out << '\'' << value << '\'';
}
template <>
inline bool Kept<at::Tensor>::equal(const at::Tensor& one, const at::Tensor& other) {
  if (!one.defined() || !other.defined() || one.is_same(other)) return one.is_same(other);
  return one.scalar_type() == other.scalar_type() && one.device() == other.device() &&
         one.layout() == other.layout() && one.sizes() == other.sizes() && at::equal(one, other);
}
template <>
inline void Kept<at::Tensor>::show(std::ostream& out, const at::Tensor& value) {
  if (!value.defined()) {
    out << "None";
    return;
  }
  out << "Tensor(" << value.sym_sizes() << ", " << value.scalar_type() << ", " << value.device()
      << ')';
}
template <>
inline c10::IValue Kept<at::ScalarType>::pack(const at::ScalarType& value) {
  return static_cast<int64_t>(value);
}
template <>
inline at::ScalarType Kept<at::ScalarType>::unpack(const c10::IValue& kept) {
  return static_cast<at::ScalarType>(kept.toInt());
}

template <class T>
struct Kept<std::vector<T>> {
  static c10::IValue pack(const std::vector<T>& values) {
    std::vector<c10::IValue> kept;
    for (const T& value : values) kept.push_back(Kept<T>::pack(value));
    return tuple(std::move(kept));
  }
  static std::vector<T> unpack(const c10::IValue& kept) {
    std::vector<T> values;
    for (const c10::IValue& each : kept.toTupleRef().elements()) {
      values.push_back(Kept<T>::unpack(each));
    }
    return values;
  }
  static bool equal(const std::vector<T>& one, const std::vector<T>& other) {
    if (one.size() != other.size()) return false;
    for (size_t i = 0; i < one.size(); ++i) {
      if (!Kept<T>::equal(one[i], other[i])) return false;
    }
    return true;
  }
  static void show(std::ostream& out, const std::vector<T>& values) {
    out << '[';
    for (size_t i = 0; i < values.size(); ++i) {
      out << (i ? ", " : "");
      Kept<T>::show(out, values[i]);
    }
    out << ']';
  }
};

template <class T>
struct Kept<std::optional<T>> {
  static c10::IValue pack(const std::optional<T>& value) {
    std::vector<c10::IValue> kept;
    if (value) kept.push_back(Kept<T>::pack(*value));
    return tuple(std::move(kept));
  }
  static std::optional<T> unpack(const c10::IValue& kept) {
    const auto& elements = kept.toTupleRef().elements();
    return elements.empty() ? std::nullopt : std::optional<T>(Kept<T>::unpack(elements[0]));
  }
  static bool equal(const std::optional<T>& one, const std::optional<T>& other) {
    return one && other ? Kept<T>::equal(*one, *other) : !one && !other;
  }
  static void show(std::ostream& out, const std::optional<T>& value) {
    if (value) {
      Kept<T>::show(out, *value);
    } else {
      out << "None";
    }
  }
};

template <class K, class V>
struct Kept<c10::Dict<K, V>> {
  static c10::IValue pack(const c10::Dict<K, V>& dict) {
    std::vector<c10::IValue> kept;
    for (const auto& entry : dict) {
      kept.push_back(tuple({Kept<K>::pack(entry.key()), Kept<V>::pack(entry.value())}));
    }
    return tuple(std::move(kept));
  }
  static c10::Dict<K, V> unpack(const c10::IValue& kept) {
    c10::Dict<K, V> dict;
    for (const c10::IValue& each : kept.toTupleRef().elements()) {
      const auto& pair = each.toTupleRef().elements();
      TORCH_CHECK_VALUE(pair.size() == 2, "a dict must be kept as pairs of key and value");
      dict.insert(Kept<K>::unpack(pair[0]), Kept<V>::unpack(pair[1]));
    }
    return dict;
  }
  static bool equal(const c10::Dict<K, V>& one, const c10::Dict<K, V>& other) {
    if (one.size() != other.size()) return false;
    for (const auto& entry : one) {
      const auto found = other.find(entry.key());
      if (found == other.end() || !Kept<V>::equal(entry.value(), found->value())) return false;
    }
    return true;
  }
  static void show(std::ostream& out, const c10::Dict<K, V>& dict) {
    out << '{';
    const char* between = "";
    for (const auto& entry : dict) {
      out << between;
      Kept<K>::show(out, entry.key());
      out << ": ";
      Kept<V>::show(out, entry.value());
      between = ", ";
    }
    out << '}';
  }
};

// The object of a custom class in what Python gave, or in what C++ gave; None where it is anything
// else.
inline c10::IValue object_in(const c10::IValue& anything) {
  if (!anything.isPyObject()) return anything;
  // By an interface without methods, which every such object has: torch would infer a type for Any
  // by looking into lists and dicts, and throws at what it doesn't know.
  static const auto any_object = c10::InterfaceType::create("__torch__.identity_conv.Object");
  try {
    return anything.toPyObjectHolder()->toIValue(any_object);
  } catch (const std::exception&) {
    return {};
  }
}

// A method (self, other) -> bool, where Python may give anything for other.
template <class Class, class F>
void def_comparison(torch::class_<Class>& cls, const char* name, F&& compare) {
  using Self = c10::intrusive_ptr<Class>;
  c10::FunctionSchema schema(name, "",
                             {c10::Argument("self", c10::getCustomClassType<Self>()),
                              c10::Argument("other", c10::PyObjectType::get())},
                             {c10::Argument("", c10::BoolType::get())});
  cls._def_unboxed(
      name,
      [compare](torch::jit::Stack& stack) {
        const c10::IValue other = torch::jit::pop(stack);
        const Self self = torch::jit::pop(stack).toCustomClass<Class>();
        torch::jit::push(stack, static_cast<bool>(compare(self, other)));
      },
      std::move(schema));
}

template <class Class, class = void>
struct ChecksState : std::false_type {};
template <class Class>
struct ChecksState<Class, std::void_t<decltype(std::declval<const Class&>().check())>>
    : std::true_type {};

// "Affine", as registered.
template <class Class>
std::string name_of() {
  return c10::getCustomClassType<c10::intrusive_ptr<Class>>()->name()->name();
}

}  // namespace detail

template <class Class, class... Fields>
struct State {
  std::tuple<Fields...> fields;
  int64_t number = 1;

  State version(int64_t version) const { return {fields, version}; }
};

// The fields of a class, in the order of its constructor's arguments.
template <class Class, class... T, bool... has_default>
State<Class, Field<Class, T, has_default>...> state(Field<Class, T, has_default>... fields) {
  static_assert(
      (detail::Element<T>::value && ...),
      "identity_conv/state.h: a field must be an int64_t, double, bool, std::string, at::Tensor, "
      "at::Device or at::ScalarType, or a std::vector, std::optional or c10::Dict of these: this "
      "type can't be carried to Python and back");
  constexpr bool defaults[] = {has_default..., true};
  constexpr auto in_order = [](const bool* has) {
    for (size_t i = 1; i < sizeof...(T); ++i) {
      if (has[i - 1] && !has[i]) return false;
    }
    return true;
  };
  static_assert(in_order(defaults),
                "identity_conv/state.h: a field without a default must come before those with one");
  return {{std::move(fields)...}};
}

namespace detail {

template <class Class, class States>
struct Declared {
  static_assert(!sizeof(Class),
                "identity_conv/state.h: state() must be the class's own and name fields of it, "
                "inherited ones too: IDENTITY_CONV_FIELD(Class, member)");
  static torch::class_<Class> define(torch::Library& m, const char* name);
};

template <class Class, class... T, bool... has_default>
struct Declared<Class, State<Class, Field<Class, T, has_default>...>> {
  static_assert(std::is_default_constructible_v<Class>,
                "identity_conv/state.h: the class must have a default constructor: an object is "
                "made first and its fields are set then");
  using Self = c10::intrusive_ptr<Class>;

  template <class F>
  static void each(F&& f) {
    std::apply([&](const auto&... field) { (f(field), ...); }, Class::state().fields);
  }

  static Self checked(Self self) {
    if constexpr (ChecksState<Class>::value) self->check();
    return self;
  }

  static Self make(T... values) {
    auto self = c10::make_intrusive<Class>();
    const auto declared = Class::state();
    std::apply(
        [&](const auto&... field) { ((self.get()->*field.member = std::move(values)), ...); },
        declared.fields);
    return checked(std::move(self));
  }

  static std::tuple<std::tuple<std::string, T>...> flatten(const Self& self) {
    return std::apply(
        [&](const auto&... field) {
          return std::tuple<std::tuple<std::string, T>...>(
              std::tuple<std::string, T>(field.name, self.get()->*field.member)...);
        },
        Class::state().fields);
  }

  // (version, (name, value), ...)
  static c10::IValue keep(const Self& self) {
    std::vector<c10::IValue> kept{Class::state().number};
    each([&](const auto& field) {
      using Value = std::decay_t<decltype(self.get()->*field.member)>;
      kept.push_back(
          tuple({std::string(field.name), Kept<Value>::pack(self.get()->*field.member)}));
    });
    return tuple(std::move(kept));
  }

  static Self restore(const c10::IValue& state) {
    const std::string cls = name_of<Class>();
    const auto is_pair = [](const c10::IValue& each) {
      return each.isTuple() && each.toTupleRef().elements().size() == 2 &&
             each.toTupleRef().elements()[0].isString();
    };
    bool well_formed = state.isTuple() && !state.toTupleRef().elements().empty() &&
                       state.toTupleRef().elements()[0].isInt();
    std::unordered_map<std::string, c10::IValue> kept;
    if (well_formed) {
      const auto& elements = state.toTupleRef().elements();
      const int64_t version = elements[0].toInt();
      const int64_t wanted = Class::state().number;
      TORCH_CHECK_VALUE(version == wanted, cls, ": kept under state version ", version,
                        ", and this library's is ", wanted);
      for (size_t i = 1; i < elements.size(); ++i) {
        well_formed = well_formed && is_pair(elements[i]);
        if (!well_formed) break;
        const auto& pair = elements[i].toTupleRef().elements();
        kept.emplace(pair[0].toStringRef(), pair[1]);
      }
    }
    TORCH_CHECK_VALUE(well_formed, cls,
                      ": kept state must be its version and pairs of name and value");

    auto self = c10::make_intrusive<Class>();
    each([&](const auto& field) {
      using Value = std::decay_t<decltype(self.get()->*field.member)>;
      const auto found = kept.find(field.name);
      if (found == kept.end()) {
        TORCH_CHECK_VALUE(field.value, cls, ": kept state lacks the field ", field.name,
                          ", which has no default");
        self.get()->*field.member = *field.value;
        return;
      }
      try {
        self.get()->*field.member = Kept<Value>::unpack(found->second);
      } catch (const c10::Error&) {
        TORCH_CHECK_VALUE(false, cls, ": kept state has the field ", field.name, " as ",
                          found->second.tagKind(), ", which isn't its type");
      }
      kept.erase(found);
    });
    for (const auto& [name, value] : kept) {
      TORCH_CHECK_VALUE(false, cls, ": kept state has the field ", name,
                        ", which the class doesn't have");
    }
    return checked(std::move(self));
  }

  static bool equal(const Self& self, const c10::IValue& anything) {
    const c10::IValue other = object_in(anything);
    if (!other.isObject() ||
        *other.type() != *c10::getCustomClassType<c10::intrusive_ptr<Class>>()) {
      return false;
    }
    const Self its = other.toCustomClass<Class>();
    bool same = true;
    each([&](const auto& field) {
      using Value = std::decay_t<decltype(self.get()->*field.member)>;
      same = same && Kept<Value>::equal(self.get()->*field.member, its.get()->*field.member);
    });
    return same;
  }

  static std::string show(const Self& self) {
    std::ostringstream out;
    out << name_of<Class>() << '(';
    const char* between = "";
    each([&](const auto& field) {
      using Value = std::decay_t<decltype(self.get()->*field.member)>;
      out << between << field.name << '=';
      Kept<Value>::show(out, self.get()->*field.member);
      between = ", ";
    });
    out << ')';
    return out.str();
  }

  template <class Field>
  static torch::arg argument(const Field& field) {
    torch::arg argument(field.name);
    if (field.value) argument = c10::IValue(*field.value);
    return argument;
  }

  static torch::class_<Class> define(torch::Library& m, const char* name) {
    auto cls = m.class_<Class>(name);
    std::apply(
        [&](const auto&... field) {
          cls.def(torch::init(&make), "", {argument(field)...});
          (cls.def_readonly(field.name, field.member), ...);
        },
        Class::state().fields);
    cls.def("__obj_flatten__", &flatten)
        .def("__repr__", &show)
        .def("__str__", &show)
        // torchbind asks no __bool__: without a length a truth value is an error.
        .def("__len__",
             [](const Self&) { return static_cast<int64_t>(sizeof...(T) ? sizeof...(T) : 1); })
        .def_static("state_version", []() { return Class::state().number; })
        .def_pickle([](const Self& self) { return keep(self); },
                    [](const c10::IValue& state) { return restore(state); });
    def_comparison(cls, "__eq__", &equal);
    def_comparison(cls, "__ne__",
                   [](const Self& self, const c10::IValue& other) { return !equal(self, other); });
    return cls;
  }
};

}  // namespace detail

// Registers the class in m's namespace and returns what its methods are defined on. To be called in
// TORCH_LIBRARY or TORCH_LIBRARY_FRAGMENT.
template <class Class>
torch::class_<Class> class_(torch::Library& m, const char* name) {
  return detail::Declared<Class, decltype(Class::state())>::define(m, name);
}

}  // namespace identity_conv
