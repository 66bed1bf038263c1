#include "contract.h"

#include <ATen/ops/empty_strided.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <stdexcept>

#include "dtype.h"
#include "identity_conv/package.h"

namespace identity_conv {
namespace {

[[noreturn]] void refuse_input(const std::string& name, const std::string& what) {
  throw PackageError(PackageError::Kind::kInput, "input " + name + ": " + what);
}

std::vector<int64_t> read_ints(const Json* json) {
  std::vector<int64_t> ints;
  if (!json) return ints;
  for (const Json& element : json->elements()) {
    const auto* value = element.as<int64_t>();
    if (!value)
      throw std::invalid_argument("not a manifest: a list of integers holds another thing");
    ints.push_back(*value);
  }
  return ints;
}

// Sizes multiply: a product of three can leave 64 bits, and none can leave 128 unseen.
using Wide = __int128;

[[noreturn]] void refuse_overflow() {
  throw PackageError(PackageError::Kind::kInput, "the inputs' sizes are too large to be checked");
}

Wide add(Wide a, Wide b) {
  Wide sum;
  if (__builtin_add_overflow(a, b, &sum)) refuse_overflow();
  return sum;
}

Wide multiply(Wide a, Wide b) {
  Wide product;
  if (__builtin_mul_overflow(a, b, &product)) refuse_overflow();
  return product;
}

// Division and remainder as Python has them: towards minus infinity.
Wide floor_divide(Wide a, Wide b) {
  if (b == 0) refuse_overflow();
  const Wide quotient = a / b;
  return quotient - ((a % b != 0) && ((a < 0) != (b < 0)));
}

bool is_one_of(const std::string& word, std::initializer_list<const char*> words) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

std::string range_text(int64_t min, int64_t max) {
  return max == std::numeric_limits<int64_t>::max()
             ? "at least " + std::to_string(min)
             : std::to_string(min) + " to " + std::to_string(max);
}

// "2 * n + 1" for a size that is linear in one unknown.
std::string linear_text(int64_t factor, Wide known) {
  const std::string product = factor == 1 ? "n" : std::to_string(factor) + " * n";
  return known == 0 ? product : product + " + " + std::to_string(static_cast<int64_t>(known));
}

}  // namespace

// The symbols' values in one call, each with the place that gave it.
class Contract::Binding {
 public:
  explicit Binding(const Contract& contract)
      : contract_(contract), values_(contract.symbols_.size()) {}

  // The value of `size`, or none while a symbol of it has no value.
  std::optional<Wide> value(const Size& size) const {
    if (size.is_number()) return size.number;
    if (size.symbol >= 0) return value_of(static_cast<std::size_t>(size.symbol));
    Wide sum = 0;
    for (const Term& term : size.terms) {
      const std::optional<Wide> value = this->value(term);
      if (!value) return std::nullopt;
      sum = add(sum, *value);
    }
    return sum;
  }

  // The value of a guard's test, or of a part of it; a truth is 1 or 0.
  Wide value(const Json& test) const {
    if (const auto* number = test.as<int64_t>()) return *number;
    if (const auto* name = test.as<std::string>()) return *value_of(contract_.symbol_index(*name));
    const Json::Array& parts = test.elements();
    const std::string& op = *parts[0].as<std::string>();
    Wide result = value(parts[1]);
    if (op == "not") return result == 0;
    for (std::size_t i = 2; i < parts.size(); ++i) {
      const Wide next = value(parts[i]);
      if (op == "+") result = add(result, next);
      if (op == "*") result = multiply(result, next);
      if (op == "//") result = floor_divide(result, next);
      if (op == "%") result = add(result, -multiply(floor_divide(result, next), next));
      if (op == "min") result = std::min(result, next);
      if (op == "max") result = std::max(result, next);
      if (op == "and") result = result != 0 && next != 0;
      if (op == "or") result = result != 0 || next != 0;
      if (op == "==") return result == next;
      if (op == "!=") return result != next;
      if (op == "<") return result < next;
      if (op == "<=") return result <= next;
    }
    return result;
  }

  // Gives the one unknown symbol of a size that is linear in it the value that `got` implies, where
  // there is one.
  void solve(const Size& size, int64_t got, std::size_t input, std::size_t dimension) {
    if (size.is_number()) return;
    if (size.symbol >= 0) {
      const auto symbol = static_cast<std::size_t>(size.symbol);
      if (!values_[symbol].known) give(symbol, got, 1, 0, got, input, dimension);
      return;
    }
    const Term* unknown = nullptr;
    Wide known = 0;
    for (const Term& term : size.terms) {
      if (const auto value = this->value(term)) {
        known = add(known, *value);
      } else if (unknown || term.symbols.size() != 1) {
        return;
      } else {
        unknown = &term;
      }
    }
    if (!unknown) return;
    const Wide value = (got - known) / unknown->factor;
    const bool fits = value * unknown->factor == got - known;
    give(unknown->symbols[0], fits ? std::optional<Wide>(value) : std::nullopt, unknown->factor,
         known, got, input, dimension);
  }

  // Where the value of `size` comes from; empty where it is a constant.
  std::string origin(const Size& size) const {
    if (size.symbol >= 0) return giver(static_cast<std::size_t>(size.symbol));
    for (const Term& term : size.terms) {
      if (!term.symbols.empty()) return giver(term.symbols[0]);
    }
    return {};
  }

 private:
  struct Value {
    bool known = false;
    int64_t value = 0;
    std::size_t input = 0;
    std::size_t dimension = 0;
  };

  std::optional<Wide> value_of(std::size_t symbol) const {
    return values_[symbol].known ? std::optional<Wide>(values_[symbol].value) : std::nullopt;
  }

  std::optional<Wide> value(const Term& term) const {
    Wide product = term.factor;
    for (std::size_t symbol : term.symbols) {
      if (!values_[symbol].known) return std::nullopt;
      product = multiply(product, values_[symbol].value);
    }
    return product;
  }

  // `value` is what the size that came, factor * symbol + known, implies of the symbol.
  void give(std::size_t index, std::optional<Wide> value, int64_t factor, Wide known, int64_t got,
            std::size_t input, std::size_t dimension) {
    const Symbol& symbol = contract_.symbols_[index];
    if (!value || *value < symbol.min || *value > symbol.max) {
      const std::string range = range_text(symbol.min, symbol.max);
      const bool plain = factor == 1 && known == 0;
      refuse_input(contract_.inputs_[input].name,
                   "size of dimension " + std::to_string(dimension) + " must be " +
                       (plain ? range : linear_text(factor, known) + " with n " + range) +
                       ", got " + std::to_string(got));
    }
    values_[index] = {true, static_cast<int64_t>(*value), input, dimension};
  }

  std::string giver(std::size_t symbol) const {
    return " (given by dimension " + std::to_string(values_[symbol].dimension) + " of " +
           contract_.inputs_[values_[symbol].input].name + ")";
  }

  const Contract& contract_;
  c10::SmallVector<Value, 8> values_;
};

Contract::Contract(const Json& manifest) {
  const Json* symbols = manifest.find("symbols");
  const Json* inputs = manifest.find("inputs");
  if (!symbols || !symbols->as<Json::Object>() || !inputs || !inputs->as<Json::Array>()) {
    throw std::invalid_argument("not a manifest: it names no inputs");
  }
  for (const auto& [name, range] : *symbols->as<Json::Object>()) {
    Symbol symbol{name};
    if (const Json* min = range.find("min"))
      symbol.min = min->as<int64_t>() ? *min->as<int64_t>() : 0;
    if (const Json* max = range.find("max"); max && max->as<int64_t>())
      symbol.max = *max->as<int64_t>();
    if (symbol.min > symbol.max) {
      throw std::invalid_argument("not a manifest: symbol " + name + " has an empty range");
    }
    symbols_.push_back(symbol);
  }
  for (const Json& json : inputs->elements()) {
    Input input{json.text("name"), read_dtype(json.text("dtype")), {}, {}, {}};
    const Json* sizes = json.find("sizes");
    if (!sizes || !sizes->as<Json::Array>()) {
      throw std::invalid_argument("not a manifest: input " + input.name + " has no sizes");
    }
    for (const Json& size : sizes->elements()) input.sizes.push_back(read_size(size));
    input.order = read_ints(json.find("order"));
    input.strides = read_ints(json.find("strides"));
    const std::size_t rank = input.sizes.size();
    std::vector<int64_t> sorted = input.order;
    std::sort(sorted.begin(), sorted.end());
    bool fits = (input.strides.empty() ? sorted.size() : input.strides.size()) == rank;
    for (std::size_t d = 0; d < sorted.size(); ++d) fits &= sorted[d] == static_cast<int64_t>(d);
    if (!fits)
      throw std::invalid_argument("not a manifest: input " + input.name + " has no layout");
    const Json* mutated = json.find("mutated");
    input.mutated = mutated && mutated->as<bool>() && *mutated->as<bool>();
    inputs_.push_back(std::move(input));
  }
  if (const Json* guards = manifest.find("guards")) {
    for (const Json& guard : guards->elements()) {
      const Json* test = guard.find("test");
      if (!test) throw std::invalid_argument("not a manifest: a guard has no test");
      check_test(*test);
      guards_.push_back({guard.text("text"), *test});
    }
  }
}

void Contract::check_test(const Json& test) const {
  if (test.as<int64_t>()) return;
  if (const auto* name = test.as<std::string>()) {
    const std::size_t symbol = symbol_index(*name);
    // A guard is tested when the sizes have given every symbol its value.
    for (const Input& input : inputs_) {
      for (const Size& size : input.sizes) {
        if (size.symbol == static_cast<int>(symbol)) return;
        for (const Term& term : size.terms) {
          if (std::count(term.symbols.begin(), term.symbols.end(), symbol)) return;
        }
      }
    }
    throw std::invalid_argument("not a manifest: a guard is about " + *name +
                                ", which no size has");
  }
  const Json::Array& parts = test.elements();
  const std::string* op = parts.size() >= 2 ? parts[0].as<std::string>() : nullptr;
  if (!op || !is_one_of(*op, {"+", "*", "//", "%", "min", "max", "and", "or", "not",
                              "==", "!=", "<", "<="})) {
    throw std::invalid_argument("not a manifest: a guard's test can't be read");
  }
  for (std::size_t i = 1; i < parts.size(); ++i) check_test(parts[i]);
}

std::size_t Contract::symbol_index(const std::string& name) const {
  for (std::size_t i = 0; i < symbols_.size(); ++i) {
    if (symbols_[i].name == name) return i;
  }
  throw std::invalid_argument("not a manifest: symbol " + name + " has no range");
}

Contract::Size Contract::read_size(const Json& json) const {
  Size size;
  if (const auto* number = json.as<int64_t>()) {
    size.number = *number;
    return size;
  }
  if (const auto* symbol = json.as<std::string>()) {
    size.symbol = static_cast<int>(symbol_index(*symbol));
    return size;
  }
  if (!json.as<Json::Array>()) throw std::invalid_argument("not a manifest: a size is no size");
  for (const Json& pair : json.elements()) {
    const Json::Array& parts = pair.elements();
    const int64_t* factor = parts.size() == 2 ? parts[0].as<int64_t>() : nullptr;
    if (!factor || *factor == 0) {
      throw std::invalid_argument("not a manifest: a size is no polynomial");
    }
    Term term{*factor, {}};
    for (const Json& name : parts[1].elements()) {
      const auto* symbol = name.as<std::string>();
      if (!symbol) throw std::invalid_argument("not a manifest: a symbol has no name");
      term.symbols.push_back(symbol_index(*symbol));
    }
    size.terms.push_back(std::move(term));
  }
  return size;
}

void Contract::check_kind(const at::Tensor& tensor, const Input& input, c10::Device device) const {
  if (tensor.scalar_type() != input.dtype) {
    refuse_input(input.name, "dtype must be " + dtype_name(input.dtype) + ", got " +
                                 dtype_name(tensor.scalar_type()));
  }
  if (tensor.device() != device) {
    refuse_input(input.name, "device must be " + device.str() + ", got " + tensor.device().str());
  }
  if (tensor.dim() != static_cast<int64_t>(input.sizes.size())) {
    refuse_input(input.name, "the number of dimensions must be " +
                                 std::to_string(input.sizes.size()) + ", got " +
                                 std::to_string(tensor.dim()));
  }
}

void Contract::fit(Inputs& inputs, c10::Device device) const {
  Binding binding(*this);
  for (std::size_t i = 0; i < inputs_.size(); ++i) check_kind(inputs[i], inputs_[i], device);
  // First the sizes that give a symbol its value, in order, then all against what they must be.
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    const auto sizes = inputs[i].sizes();
    for (std::size_t d = 0; d < sizes.size(); ++d) {
      binding.solve(inputs_[i].sizes[d], sizes[d], i, d);
    }
  }
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    const auto sizes = inputs[i].sizes();
    for (std::size_t d = 0; d < sizes.size(); ++d) {
      const Size& size = inputs_[i].sizes[d];
      if (size.is_number() && size.number == sizes[d]) continue;
      const auto wanted = binding.value(size);
      if (wanted && *wanted == sizes[d]) continue;
      refuse_input(inputs_[i].name, "size of dimension " + std::to_string(d) + " must be " +
                                        (wanted ? std::to_string(static_cast<int64_t>(*wanted)) +
                                                      binding.origin(size)
                                                : "of a known form") +
                                        ", got " + std::to_string(sizes[d]));
    }
  }
  for (const Guard& guard : guards_) {
    if (binding.value(guard.test) == 0) {
      throw PackageError(PackageError::Kind::kInput, "the inputs' sizes must satisfy " +
                                                         guard.text + ", which the export assumed");
    }
  }
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    if (!is_laid_out(inputs[i], inputs_[i])) inputs.replace(i, laid_out(inputs[i], inputs_[i]));
  }
}

// A dimension of one element, or none, may have any stride.
bool Contract::is_laid_out(const at::Tensor& tensor, const Input& input) const {
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  bool fits = true;
  if (!input.strides.empty()) {
    for (std::size_t d = 0; d < sizes.size(); ++d) {
      fits &= sizes[d] <= 1 || strides[d] == input.strides[d];
    }
  } else {
    int64_t stride = 1;
    for (auto d = input.order.rbegin(); d != input.order.rend(); ++d) {
      fits &= sizes[*d] <= 1 || strides[*d] == stride;
      stride *= std::max<int64_t>(sizes[*d], 1);
    }
  }
  return fits || tensor.numel() == 0;
}

at::Tensor Contract::laid_out(const at::Tensor& tensor, const Input& input) const {
  const auto sizes = tensor.sizes();
  c10::SmallVector<int64_t, 8> wanted(input.strides.begin(), input.strides.end());
  if (input.strides.empty()) {
    wanted.resize(sizes.size());
    int64_t stride = 1;
    for (auto d = input.order.rbegin(); d != input.order.rend(); ++d) {
      wanted[*d] = stride;
      stride *= std::max<int64_t>(sizes[*d], 1);
    }
  }
  if (input.mutated) {
    refuse_input(input.name, "strides must be " + c10::str(at::IntArrayRef(wanted)) + ", got " +
                                 c10::str(tensor.strides()) + " (the model writes to it)");
  }
  if (!input.strides.empty()) {
    refuse_input(input.name, "strides must be " + c10::str(at::IntArrayRef(input.strides)) +
                                 ", got " + c10::str(tensor.strides()) +
                                 " (the package was compiled for a layout that isn't dense)");
  }
  at::Tensor copy = at::empty_strided(sizes, wanted, tensor.options());
  copy.copy_(tensor);
  return copy;
}

}  // namespace identity_conv
