"""A call as a program that needs torch and the operator alone, in Python or C++.

Values of a tensor with few numbers stand in the text; those of a larger one come from the function
that `values` computes them with, written out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from . import values
from .call import Call
from .plan import SharedStorage, TensorPlan
from .state import State

_FEW = 32

_PYTHON_BITS = f'''

def bits(count, number, seed, keep, put):
    """Numbers from a seed: a hash of their place, with some bits kept and some set."""
    words = (count * number.itemsize + 7) // 8 * 2
    word = ((seed + 1) * {values.SPREAD} % {values.PERIOD} * 4 + torch.arange(words)) % {values.PERIOD * 4}
    word = (word ^ word >> 16) * {values.MULTIPLIER} & 0xFFFFFFFF
    word = (word ^ word >> 16) * {values.MULTIPLIER} & 0xFFFFFFFF
    word = (word ^ word >> 16).view(torch.int32)[::2].contiguous()
    return (word.view(number)[:count] & keep) | put

'''

_CPP_BITS = f"""
// Numbers from a seed: a hash of their place, with some bits kept and some set.
template <class Number>
std::vector<Number> bits(uint64_t count, uint64_t seed, Number keep, Number put) {{
  std::vector<uint32_t> words((count * sizeof(Number) + 3) / 4);
  for (uint64_t i = 0; i < words.size(); ++i) {{
    uint64_t word = ((seed + 1) % {values.PERIOD} * {values.SPREAD} % {values.PERIOD} * 4 + i) % {values.PERIOD * 4};
    word = (word ^ word >> 16) * {values.MULTIPLIER} & 0xFFFFFFFF;
    word = (word ^ word >> 16) * {values.MULTIPLIER} & 0xFFFFFFFF;
    words[i] = static_cast<uint32_t>(word ^ word >> 16);
  }}
  std::vector<Number> numbers(count);
  std::memcpy(numbers.data(), words.data(), count * sizeof(Number));
  for (Number& number : numbers) number = (number & keep) | put;
  return numbers;
}}
"""

_CPP_DTYPES = {
    torch.bool: "kBool", torch.uint8: "kByte", torch.int8: "kChar", torch.int16: "kShort", torch.int32: "kInt",
    torch.int64: "kLong", torch.uint16: "kUInt16", torch.uint32: "kUInt32", torch.uint64: "kUInt64",
    torch.float16: "kHalf", torch.bfloat16: "kBFloat16", torch.float32: "kFloat", torch.float64: "kDouble",
    torch.complex32: "kComplexHalf", torch.complex64: "kComplexFloat", torch.complex128: "kComplexDouble",
    torch.float8_e4m3fn: "kFloat8_e4m3fn", torch.float8_e5m2: "kFloat8_e5m2",
    torch.float8_e4m3fnuz: "kFloat8_e4m3fnuz", torch.float8_e5m2fnuz: "kFloat8_e5m2fnuz",
    torch.float8_e8m0fnu: "kFloat8_e8m0fnu",
}  # fmt: skip


def tensor(plan: TensorPlan, language: str, name: str, device: str) -> str:
    """What ``TensorPlan.to_code`` gives."""
    if language == "python":
        return _text(["import torch", *_python_bits([plan]), *_python_tensor(plan, name, device)])
    if language == "cpp":
        return _text(
            [
                "#include <cstring>",
                "#include <vector>",
                "",
                "#include <ATen/ATen.h>",
                "#include <c10/core/InferenceMode.h>",
                *_cpp_bits([plan]),
                "",
                *_cpp_function(plan, name, device),
            ]
        )
    raise ValueError(f"TensorPlan.to_code: language must be python or cpp, got {language!r}")


def python(
    call: Call,
    op: str,
    *,
    names: Sequence[str] = (),
    device: str = "cpu",
    before: Iterable[str] = (),
    after: Iterable[str] = (),
    result: str = "result",
) -> str:
    """A Python program that makes a call.

    Args:
        call: the arguments.
        op: an expression for what is called, such as ``torch.ops.my_ops.identity_conv_op``.
        names: of the positional arguments, as many as are known.
        device: where Tensors are.
        before: lines behind ``import torch``, such as what loads the operator.
        after: lines behind the call.
        result: the name that holds what the call returns.
    """
    rows = [SharedStorage(call.plans).row] if call.shared else list(_plans(call))
    lines = ["import torch", *before, *_python_bits(rows)]
    if call.shared:
        lines += _python_tensor(rows[0], "row", device)

    def made(plan: TensorPlan, name: str) -> None:
        lines.extend(_python_view(plan, name, "row", device) if call.shared else _python_tensor(plan, name, device))

    given = [_python_value(value, name, made) for name, value in _named(call.args, names)]
    given += [f"{name}={_python_value(value, name, made)}" for name, value in call.kwargs.items()]
    return _text([*lines, f"{result} = {op}({', '.join(given)})", *after])


def expression(value: Any, name: str) -> str:
    """The expression of an argument of this name in such a program, behind the lines that make its Tensors."""
    return _python_value(value, name, lambda plan, name: None)


#: By the check: of outputs `y` that need gradients and of inputs, what is printed.
_DERIVATIVES = {
    "grad": """\
    dense = [torch.linspace(1, 2, each.numel()).to(each).view(each.shape) for each in y]
    expanded = [torch.ones((), dtype=each.dtype, device=each.device).expand(each.shape) for each in y]
    return [torch.autograd.grad(y, inputs, incoming, retain_graph=True, allow_unused=True)
            for incoming in (dense, expanded)]""",
    "second_order": """\
    first = torch.autograd.grad([(each * each).sum() for each in y], inputs, create_graph=True, allow_unused=True)
    first = [each for each in first if each is not None and each.requires_grad]
    return torch.autograd.grad([each.sum() for each in first], inputs, allow_unused=True)""",
}


def derivatives(check: str, functions: Mapping[str, str], given: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Lines that print derivatives of a call.

    Args:
        check: which: "grad", "second_order", or forward ones.
        functions: an expression for each function, by the name that its results are printed under.
        given: the arguments as they stand in the call.
        wanted: the names of the tensors to differentiate by.
    """
    names = ", ".join(wanted)
    outputs = [
        "    y = y if isinstance(y, (tuple, list)) else [y]",
        "    y = [each for each in y if each.requires_grad]",
    ]
    if check in _DERIVATIVES:
        body = [
            f"inputs = [each.detach().requires_grad_() for each in ({names},)]",
            "",
            "def derivative(function):",
            f"    {names}{',' if len(wanted) == 1 else ''} = inputs",
            f"    y = function({', '.join(given)})",
            *outputs,
            *_DERIVATIVES[check].splitlines(),
        ]
    else:
        body = [
            f"inputs = ({names},)",
            "",
            "def derivative(function):",
            "    ones = tuple(torch.ones_like(each) for each in inputs)",
            f"    return torch.func.jvp(lambda {names}: function({', '.join(given)}), inputs, ones)[1]",
        ]
    return [*body, "", *(f'print("derivative of {name}", derivative({each}))' for name, each in functions.items())]


def cpp(
    call: Call,
    op: str,
    *,
    library: str | None = None,
    names: Sequence[str] = (),
    device: str = "cpu",
    after: Iterable[str] = ("  for (const auto& value : stack) std::cout << value << std::endl;",),
) -> str:
    """A C++ program that makes a call through the dispatcher; it links to libtorch alone.

    Args:
        call: the arguments.
        op: the operator, as ``namespace::name`` or ``namespace::name.overload``.
        library: the operator library that the program opens first.
        names: of the positional arguments, as many as are known.
        device: where Tensors are.
        after: lines behind the call, which leaves its results in `stack`; they are printed by default.

    Raises:
        ValueError: `call` holds an object of a class, which this program can't make.
    """
    rows = [SharedStorage(call.plans).row] if call.shared else list(_plans(call))
    functions: list[str] = []
    if call.shared:
        functions += ["", *_cpp_function(rows[0], "row", device)]
    main: list[str] = []

    def made(plan: TensorPlan, name: str) -> None:
        if call.shared:
            main.extend(_cpp_view(plan, name, "storage", device))
        else:
            functions.extend(["", *_cpp_function(plan, f"make_{name}", device)])
            main.append(f"  const at::Tensor {name} = make_{name}();")

    args = [_cpp_value(value, name, made) for name, value in _named(call.args, names)]
    kwargs = [f'{{"{name}", {_cpp_value(value, name, made)}}}' for name, value in call.kwargs.items()]
    name, _, overload = op.partition(".")
    opened = [
        f'  if (!dlopen("{library}", RTLD_NOW | RTLD_GLOBAL)) {{',
        "    std::cerr << dlerror() << std::endl;",
        "    return 1;",
        "  }",
    ]
    return _text(
        [
            "#include <dlfcn.h>",
            "",
            "#include <cstring>",
            "#include <iostream>",
            "#include <limits>",
            "#include <map>",
            "#include <string>",
            "#include <vector>",
            "",
            "#include <ATen/ATen.h>",
            "#include <ATen/core/dispatch/Dispatcher.h>",
            "#include <c10/core/InferenceMode.h>",
            *_cpp_bits(rows),
            *functions,
            *_CPP_LIST.splitlines(),
            "int main() {",
            *(opened if library else []),
            f'  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("{name}", "{overload}");',
            "  const auto& arguments = op.schema().arguments();",
            *(["  const at::Tensor storage = row();"] if call.shared else []),
            *main,
            f"  torch::jit::Stack stack = {{{', '.join(args)}}};",
            f"  const std::map<std::string, c10::IValue> named = {{{', '.join(kwargs)}}};",
            "  for (size_t i = 0; i < arguments.size(); ++i) {",
            "    const auto found = named.find(arguments[i].name());",
            "    if (i >= stack.size()) {",
            "      stack.push_back(found != named.end() ? found->second : arguments[i].default_value().value());",
            "    }",
            "    stack[i] = typed(stack[i], arguments[i].type());",
            "  }",
            "  op.callBoxed(&stack);",
            *after,
            "}",
        ]
    )


def _text(lines: Iterable[str]) -> str:
    return "\n".join(lines) + "\n"


def _named(args: Sequence[Any], names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for index, value in enumerate(args):
        yield (names[index] if index < len(names) else "x" if len(args) == 1 else f"x{index}"), value


def _plans(value: Any) -> Iterator[TensorPlan]:
    """Every plan in a value, those in states too."""
    if isinstance(value, TensorPlan):
        yield value
    elif isinstance(value, Call):
        yield from _plans((*value.args, *value.kwargs.values()))
    elif isinstance(value, State):
        yield from _plans(tuple(value.fields.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _plans(item)
    elif isinstance(value, Mapping):
        yield from _plans(tuple(value.values()))


def _has_few(plan: TensorPlan) -> bool:
    return plan.numbers <= _FEW


def _is_plain(plan: TensorPlan) -> bool:
    """Whether the storage holds the tensor's numbers in order, and nothing else."""
    sizes, strides = plan.shape, plan.strides
    dense = tuple(math.prod(max(size, 1) for size in sizes[dim + 1 :]) for dim in range(len(sizes)))
    return strides == dense and plan.storage_bytes == plan.numel * plan.dtype.itemsize and not plan.misalignment


def _python_bits(plans: Iterable[TensorPlan]) -> list[str]:
    return [_PYTHON_BITS] if not all(map(_has_few, plans)) else [""]


def _cpp_bits(plans: Iterable[TensorPlan]) -> list[str]:
    return _CPP_BITS.splitlines() if not all(map(_has_few, plans)) else []


def _ordinary(plan: TensorPlan) -> torch.Tensor:
    """The numbers that the seed gives, flat."""
    flat = torch.empty(plan.numbers, dtype=values.number(plan.dtype))
    values.fill(flat.numpy(), plan.dtype, plan.seed)
    return flat


def _masks(plan: TensorPlan) -> tuple[int, int]:
    width = values.number(plan.dtype).itemsize * 8
    keep, put = values.masks(plan.dtype)
    return values.signed(keep, width), values.signed(put, width)


def _python_tensor(plan: TensorPlan, name: str, device: str) -> list[str]:
    number, real = values.number(plan.dtype), plan.dtype.to_real()
    lines = []
    if not plan.numel:
        lines.append(f"memory = torch.full(({plan.storage_bytes + plan.misalignment},), 255, dtype=torch.uint8)")
    elif _has_few(plan):
        listed = _ordinary(plan).view(real).tolist()
        lines.append(f"numbers = torch.tensor({listed}, dtype={real}).view({number})")
    else:
        keep, put = _masks(plan)
        lines.append(f"numbers = bits({plan.numbers}, {number}, seed={plan.seed}, keep={keep}, put={put})")
    for position, special in plan.cells:
        lines.append(f"numbers[{position}] = {values.specials(plan.dtype)[special]}  # {special}")
    sign = -(1 << (number.itemsize * 8 - 1))
    if plan.numel and plan.neg:
        lines.append(f"numbers ^= {sign}")
    if plan.numel and plan.conj:
        lines.append(f"numbers[1::2] ^= {sign}")
    moved = "" if device == "cpu" else f".to({device!r})"
    if _is_plain(plan) and plan.numel:
        lines.append(f"{name} = numbers.view({plan.dtype}).view({plan.shape}){moved}")
        lines += _python_bits_of_view(plan, name)
    else:
        if plan.numel:
            sizes, strides = plan.number_layout
            first = plan.misalignment + plan.offset * plan.dtype.itemsize
            lines += [
                f"memory = torch.full(({plan.misalignment + plan.storage_bytes},), 255, dtype=torch.uint8)",
                f"memory[{first}:].view({number}).as_strided({sizes}, {strides}).copy_(numbers.view({sizes}))",
            ]
        if moved:
            lines.append(f"memory = memory{moved}")
        if plan.misalignment:
            lines.append(f"memory = torch.from_dlpack(memory[{plan.misalignment}:])")
        lines += _python_view(plan, name, "memory", device)
    if plan.grad == "leaf":
        lines.append(f"{name}.requires_grad_()")
    elif plan.grad == "nonleaf":
        lines.append(f"{name} = torch.ops.aten.alias({name}.requires_grad_())")
    elif plan.grad == "inference":
        lines = ["with torch.inference_mode():", *(f"    {line}" for line in lines)]
    return [f"# {plan}", *lines]


def _python_view(plan: TensorPlan, name: str, memory: str, device: str) -> list[str]:
    where = "" if device == "cpu" else f", device={device!r}"
    return [
        f"{name} = torch.empty(0, dtype={plan.dtype}{where})",
        f"{name} = {name}.set_({memory}.untyped_storage(), {plan.offset}, {plan.shape}, {plan.strides})",
        *_python_bits_of_view(plan, name),
    ]


def _python_bits_of_view(plan: TensorPlan, name: str) -> list[str]:
    return [
        *([f"{name} = {name}.conj()"] if plan.conj else []),
        *([f"{name} = torch._neg_view({name})"] if plan.neg else []),
    ]


def _python_value(value: Any, name: str, made: Callable[[TensorPlan, str], None]) -> str:
    """The expression of an argument; what a Tensor needs is told to `made`."""
    if isinstance(value, TensorPlan):
        made(value, name)
        return name
    if isinstance(value, State):
        fields = [_python_value(field, f"{name}_{key}", made) for key, field in value.fields.items()]
        return f"torch.classes.{value.name}({', '.join(fields)})"
    if isinstance(value, (list, tuple)):
        items = [_python_value(item, f"{name}_{index}", made) for index, item in enumerate(value)]
        return f"[{', '.join(items)}]"
    if isinstance(value, Mapping):
        items = [f"{key!r}: {_python_value(item, f'{name}_{key}', made)}" for key, item in value.items()]
        return f"{{{', '.join(items)}}}"
    if isinstance(value, complex):
        return f"complex({_python_value(value.real, name, made)}, {_python_value(value.imag, name, made)})"
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    return repr(value)


_CPP_LIST = """
c10::IValue list(std::vector<c10::IValue> items) {
  c10::impl::GenericList made(c10::AnyType::get());
  for (auto& item : items) made.push_back(std::move(item));
  return made;
}

// A list takes the type that the operator's schema gives it; an empty one has none of its own.
c10::IValue typed(const c10::IValue& value, c10::TypePtr type) {
  if (!value.isList()) return value;
  if (const auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  const auto element = type->expectRef<c10::ListType>().getElementType();
  c10::impl::GenericList made(element);
  for (const c10::IValue& item : value.toListRef()) made.push_back(typed(item, element));
  return made;
}

"""


def _cpp_sizes(numbers: Sequence[int]) -> str:
    return f"at::IntArrayRef({{{', '.join(map(str, numbers))}}})" if numbers else "at::IntArrayRef()"


def _cpp_function(plan: TensorPlan, name: str, device: str) -> list[str]:
    number = values.number(plan.dtype)
    width = number.itemsize * 8
    unsigned, dtype = f"uint{width}_t", {1: "kByte", 2: "kShort", 4: "kInt", 8: "kLong"}[number.itemsize]

    def bits(value: int) -> str:
        return f"0x{value & (1 << width) - 1:0{width // 4}x}{'ull' if width == 64 else ''}"

    size, first = plan.misalignment + plan.storage_bytes, plan.misalignment + plan.offset * plan.dtype.itemsize
    lines = [f"// {plan}", f"at::Tensor {name}() {{"]
    if plan.grad == "inference":
        lines.append("  c10::InferenceMode inference;")
    lines.append(f"  at::Tensor memory = at::full({{{size}}}, 255, at::kByte);")
    if plan.numel:
        if _has_few(plan):
            listed = ", ".join(bits(value) for value in _ordinary(plan).tolist())
            lines.append(f"  std::vector<{unsigned}> numbers = {{{listed}}};")
        else:
            keep, put = map(bits, _masks(plan))
            lines.append(f"  auto numbers = bits<{unsigned}>({plan.numbers}, {plan.seed}, {keep}, {put});")
        for position, special in plan.cells:
            value = bits(values.specials(plan.dtype)[special])
            lines.append(f"  numbers[{position % plan.numbers}] = {value};  // {special}")
        sign = bits(1 << width - 1)
        if plan.neg:
            lines.append(f"  for (auto& number : numbers) number ^= {sign};")
        if plan.conj:
            lines.append(f"  for (size_t i = 1; i < numbers.size(); i += 2) numbers[i] ^= {sign};")
        sizes, strides = map(_cpp_sizes, plan.number_layout)
        lines += [
            f"  memory.slice(0, {first}).view(at::{dtype}).as_strided({sizes}, {strides}, {first // number.itemsize})",
            f"      .copy_(at::from_blob(numbers.data(), {sizes}, at::{dtype}));",
        ]
    if device != "cpu":
        lines.append(f'  memory = memory.to(at::Device("{device}"));')
    if plan.misalignment:
        lines += [
            f"  memory = at::from_blob(memory.data_ptr<uint8_t>() + {plan.misalignment}, {{{plan.storage_bytes}}},",
            "                         [memory](void*) {}, memory.options());",
        ]
    lines += _cpp_view(plan, "built", "memory", device)
    if plan.grad in ("leaf", "nonleaf"):
        lines.append("  built.set_requires_grad(true);")
    return [*lines, f"  return {'at::alias(built)' if plan.grad == 'nonleaf' else 'built'};", "}"]


def _cpp_view(plan: TensorPlan, name: str, memory: str, device: str) -> list[str]:
    lines = [
        f"  at::Tensor {name} = at::empty({{0}}, {memory}.options().dtype(at::{_CPP_DTYPES[plan.dtype]}));",
        f"  {name}.set_({memory}.storage(), {plan.offset}, {_cpp_sizes(plan.shape)}, {_cpp_sizes(plan.strides)});",
    ]
    if plan.conj:
        lines.append(f"  {name} = {name}.conj();")
    if plan.neg:
        lines.append(f"  {name} = {name}._neg_view();")
    return lines


def _cpp_value(value: Any, name: str, made: Callable[[TensorPlan, str], None]) -> str:
    """The expression of an argument; what a Tensor needs is told to `made`."""
    if isinstance(value, TensorPlan):
        made(value, name)
        return name
    if value is None:
        return "c10::IValue()"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"int64_t{{{value}}}"
    if isinstance(value, float):
        limits = "std::numeric_limits<double>"
        if math.isnan(value):
            return f"{limits}::quiet_NaN()"
        return repr(value) if math.isfinite(value) else f"{'-' if value < 0 else ''}{limits}::infinity()"
    if isinstance(value, complex):
        return f"c10::complex<double>({_cpp_value(value.real, name, made)}, {_cpp_value(value.imag, name, made)})"
    if isinstance(value, str):
        return f"std::string({json.dumps(value)})"
    if isinstance(value, torch.dtype):
        return f"static_cast<int64_t>(at::{_CPP_DTYPES[value]})"
    if isinstance(value, (list, tuple)):
        return f"list({{{', '.join(_cpp_value(item, f'{name}_{at}', made) for at, item in enumerate(value))}}})"
    raise ValueError(f"argument {name}: a C++ program can't be written for {value!r}")
