#pragma once

// The Meta kernel of an operator whose output is like one of its arguments, in one line:
//
//   TORCH_LIBRARY_IMPL(my_ops, Meta, m) { identity_conv::output_like(m, "scale", "x"); }
//
// The output has the argument's sizes (symbolic ones too), dtype and device, and the strides of
// torch.empty_like. The operator must return one tensor.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/StringUtil.h>
#include <torch/library.h>

#include <memory>
#include <string>
#include <utility>

namespace identity_conv {

// Registers it for the operator `op` of m's namespace. A wrong `argument` is an error, which names
// the operator, as identity_conv.Extension loads the library, and else at the first call: it stands
// in the registration beside file and line.
inline void output_like(torch::Library& m, const char* op, std::string argument,
                        const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  class Kernel : public c10::OperatorKernel {
   public:
    explicit Kernel(std::string argument) : argument_(std::move(argument)) {}
    void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
      const auto& schema = op.schema();
      const auto index = schema.argumentIndexWithName(argument_);
      TORCH_CHECK_VALUE(index, op.operator_name(), ": output_like: there is no argument ",
                        argument_, " in ", schema);
      const size_t count = schema.arguments().size();
      const c10::IValue& x = torch::jit::peek(*stack, *index, count);
      TORCH_CHECK_VALUE(x.isTensor() && schema.returns().size() == 1, op.operator_name(),
                        ": output_like: ", argument_,
                        " must be a tensor and the operator must return one, got ", schema);
      at::Tensor y = at::empty_like(x.toTensor());
      torch::jit::drop(*stack, count);
      torch::jit::push(*stack, std::move(y));
    }

   private:
    std::string argument_;
  };
  auto said =
      c10::str("registered at ", file, ":", line, ", identity_conv::output_like(", argument, ")");
  m.impl(op, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(std::move(argument)))
                 .debug(std::move(said)));
}

}  // namespace identity_conv
