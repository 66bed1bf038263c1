// What the inputs of a package must be: the "symbols" and "inputs" of its manifest.
//
//   "symbols": {"s0": {"min": 0, "max": 64}, "s1": {"min": 2, "max": null}}
//   "inputs":  [{"name": "x", "dtype": "float32", "sizes": ["s0", 3, [[2, ["s1"]], [1, []]]],
//                "order": [0, 1, 2]}]
//
// A size is a number, a symbol, or a polynomial: terms of a factor and the symbols it multiplies
// (here 2 * s1 + 1). "order" lists the dimensions from outermost to innermost of the dense layout
// that the code was compiled for; "strides" stands in its place where the example wasn't dense.

//
//   "guards":  [{"text": "x.size(0) % 2 == 0", "test": ["==", ["%", "s0", 2], 0]}]
//
// What else the exported program assumed of the sizes: an operator and its arguments, each a
// number, a symbol or such a list. "mutated" in an input says that the model writes to it.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "json.h"

namespace identity_conv {

// The inputs of a call, of which one that must be changed is replaced, and then alone copied.
class Inputs {
 public:
  explicit Inputs(const std::vector<at::Tensor>& given) : now_(&given) {}
  Inputs(const Inputs&) = delete;
  Inputs& operator=(const Inputs&) = delete;

  const std::vector<at::Tensor>& all() const { return *now_; }
  const at::Tensor& operator[](std::size_t i) const { return (*now_)[i]; }

  void replace(std::size_t i, at::Tensor by) {
    if (now_ != &own_) {
      own_ = *now_;
      now_ = &own_;
    }
    own_[i] = std::move(by);
  }

 private:
  const std::vector<at::Tensor>* now_;
  std::vector<at::Tensor> own_;
};

class Contract {
 public:
  // Throws std::invalid_argument where the manifest doesn't say what it must.
  explicit Contract(const Json& manifest);

  std::size_t num_inputs() const { return inputs_.size(); }

  const std::string& name(std::size_t input) const { return inputs_[input].name; }

  // Whether the model writes to the input; it must then be given as it is.
  bool mutates(std::size_t input) const { return inputs_[input].mutated; }

  // Checks dense tensors and gives each the strides that the code was compiled for: one that is
  // laid out otherwise is copied, or refused where the model writes to it. Throws PackageError of
  // kind kInput with one sentence.
  void fit(Inputs& inputs, c10::Device device) const;

 private:
  struct Symbol {
    std::string name;
    int64_t min = 0;
    int64_t max = std::numeric_limits<int64_t>::max();
  };
  struct Term {
    int64_t factor;
    std::vector<std::size_t> symbols;
  };
  // A number where it has no terms and no symbol, which is what most are.
  struct Size {
    int64_t number = 0;
    int symbol = -1;
    std::vector<Term> terms;

    bool is_number() const { return symbol < 0 && terms.empty(); }
  };
  struct Input {
    std::string name;
    c10::ScalarType dtype;
    std::vector<Size> sizes;
    std::vector<int64_t> order;
    std::vector<int64_t> strides;
    bool mutated = false;
  };
  struct Guard {
    std::string text;
    Json test;
  };
  class Binding;

  Size read_size(const Json& json) const;
  void check_test(const Json& test) const;
  std::size_t symbol_index(const std::string& name) const;
  void check_kind(const at::Tensor& tensor, const Input& input, c10::Device device) const;
  bool is_laid_out(const at::Tensor& tensor, const Input& input) const;
  at::Tensor laid_out(const at::Tensor& tensor, const Input& input) const;

  std::vector<Symbol> symbols_;
  std::vector<Input> inputs_;
  std::vector<Guard> guards_;
};

}  // namespace identity_conv
