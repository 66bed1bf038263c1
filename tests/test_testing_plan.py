"""TensorPlan, calls and the programs written from them: the record says exactly what is built."""

from __future__ import annotations

import dataclasses
import doctest
import hashlib
import importlib
import itertools
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support_build import NO_COMPILER, run_python

from identity_conv.testing import Call, Context, SharedStorage, State, TensorPlan, corpus, plans, reproducer, values

GRADS = st.sampled_from(["none", "leaf", "nonleaf", "inference"])
any_plan = plans(grad=GRADS)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """These tensors are small; on a busy machine torch would wait for the other threads at each of them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def storage_bytes(x: torch.Tensor) -> bytes:
    return bytes(x.untyped_storage().cpu())


def cell_bytes(x: torch.Tensor) -> bytes:
    """The values as they are seen, conjugate and negative bit resolved, without any arithmetic."""
    halves = torch.view_as_real(x.detach().resolve_conj().resolve_neg()) if x.is_complex() else x.detach().resolve_neg()
    return bytes(halves.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).cpu().numpy())


def assert_same_tensor(x: torch.Tensor, y: torch.Tensor) -> None:
    for what in ("shape", "dtype", "requires_grad", "is_leaf"):
        assert getattr(x, what) == getattr(y, what), what
    for what in ("stride", "storage_offset", "is_conj", "is_neg", "is_inference"):
        assert getattr(x, what)() == getattr(y, what)(), what
    assert x.untyped_storage().data_ptr() % 64 == y.untyped_storage().data_ptr() % 64
    assert storage_bytes(x) == storage_bytes(y)


def assert_has_the_values_of_its_seed(plan: TensorPlan, device: str) -> None:
    cells = TensorPlan(plan._core[0], plan.dtype, seed=plan.seed, cells=plan.cells).build(device)
    if plan.windows:
        count, length = plan._order[-2:]
        cells = cells.unfold(count, plan.shape[length], plan.windows)
        cells = cells.movedim(-1, length)
    assert cell_bytes(plan.build(device)) == cell_bytes(cells.expand(plan.shape))


class TestBuilding:
    @given(plan=any_plan)
    def test_the_tensor_is_what_the_plan_says(self, device: str, plan: TensorPlan) -> None:
        x = plan.build(device)
        assert (tuple(x.shape), x.dtype, x.stride(), x.storage_offset()) == (
            plan.shape,
            plan.dtype,
            plan.strides,
            plan.offset,
        )
        assert (x.is_conj(), x.is_neg()) == (plan.conj, plan.neg)
        assert x.device.type == device
        assert x.untyped_storage().nbytes() == plan.storage_bytes
        if plan.storage_bytes:
            assert x.untyped_storage().data_ptr() % 64 == plan.misalignment
        assert x.requires_grad == (plan.grad in ("leaf", "nonleaf"))
        assert x.is_leaf == (plan.grad != "nonleaf")
        assert x.is_inference() == (plan.grad == "inference")

    @given(plan=any_plan)
    def test_values_are_the_same_in_every_layout(self, device: str, plan: TensorPlan) -> None:
        assert_has_the_values_of_its_seed(plan, device)

    def test_values_are_the_same_in_every_place_of_the_corpus(self, device: str) -> None:
        for plan in corpus.plans():
            assert_has_the_values_of_its_seed(plan, device)

    @given(plan=any_plan)
    def test_repr_is_the_constructor(self, plan: TensorPlan) -> None:
        assert eval(repr(plan)) == plan
        assert hash(eval(repr(plan))) == hash(plan)

    @given(plan=any_plan)
    def test_meta_has_the_same_metadata(self, plan: TensorPlan) -> None:
        x, meta = plan.build(), plan.build("meta")
        assert meta.device.type == "meta"
        for what in ("stride", "storage_offset", "is_conj", "is_neg", "is_inference"):
            assert getattr(meta, what)() == getattr(x, what)()
        assert (meta.shape, meta.dtype, meta.requires_grad, meta.is_leaf) == (
            x.shape,
            x.dtype,
            x.requires_grad,
            x.is_leaf,
        )
        assert meta.untyped_storage().nbytes() == plan.storage_bytes

    @pytest.mark.gpu
    @given(plan=any_plan)
    def test_cuda_has_the_same_memory(self, plan: TensorPlan) -> None:
        assert storage_bytes(plan.build("cuda")) == storage_bytes(plan.build())

    def test_layouts_are_those_of_torchs_own_views(self) -> None:
        base = TensorPlan((6, 8)).build()
        for plan, view in [
            (TensorPlan((8, 6), permutation=(1, 0)), base.t()),
            (TensorPlan((6, 5), padding=(0, 3)), base[:, :5]),
            (TensorPlan((6, 4), step=(1, 2), padding=(0, 1)), base[:, ::2]),
            (TensorPlan((6, 8), expand=(0,)), base[:1].expand(6, -1)),
            (TensorPlan((3, 4), windows=2), base.view(-1)[:8].unfold(0, 4, 2)),
            (TensorPlan((2, 3, 4, 2), memory_format=torch.channels_last), base.view(2, 3, 4, 2).to(
                memory_format=torch.channels_last)),
        ]:  # fmt: skip
            assert plan.build().stride() == view.stride()
            assert plan.shape == tuple(view.shape)

    def test_a_million_elements_take_about_a_millisecond(self) -> None:
        plan = TensorPlan((1000, 1000))
        times = []
        for _ in range(30):
            begin = time.perf_counter()
            plan.build()
            times.append(time.perf_counter() - begin)
        assert min(times) < 3e-3


class TestValues:
    def test_they_never_change(self) -> None:
        """A reproducer and a kept corpus mean the same on every torch and machine."""
        digest = hashlib.sha256()
        for dtype in values.DTYPES:
            digest.update(storage_bytes(TensorPlan((1000,), dtype, seed=3).build()))
        assert digest.hexdigest() == "1d1c32b8cb11fcf39b750974751ebfcf77a3d3855c01114567fa81fff00ed0bc"
        assert TensorPlan((3,), seed=1).build().tolist() == [-0.6152388453483582, 1.116257905960083, 1.7425559759140015]

    @pytest.mark.parametrize("dtype", values.DTYPES, ids=str)
    def test_ordinary_ones_are_of_magnitude_one(self, dtype: torch.dtype) -> None:
        x = TensorPlan((5000,), dtype).build()
        if not (dtype.is_floating_point or dtype.is_complex):
            bits = set(bytes(x.view(torch.uint8).numpy()))
            assert bits == ({0, 1} if dtype is torch.bool else set(range(256)))
            return
        x = (torch.view_as_real(x) if dtype.is_complex else x).to(torch.float64).abs()
        assert 0.25 <= x.min() < x.max() < 2

    def test_a_wrong_index_meets_another_value(self) -> None:
        x = TensorPlan((1 << 21,), torch.int32).build()
        for shift in (1, 2, 3, 255, 1 << 8, 1 << 16, 1 << 20):
            assert (x[shift:] == x[:-shift]).float().mean() < 0.001
        assert (TensorPlan((99,), seed=1).build() != TensorPlan((99,), seed=2).build()).all()

    @pytest.mark.parametrize("dtype", [each for each in values.DTYPES if each.is_floating_point], ids=str)
    def test_special_ones_are_what_their_names_say(self, dtype: torch.dtype) -> None:
        names = list(values.specials(dtype))
        x = TensorPlan((len(names),), dtype, cells=tuple(enumerate(names))).build()
        found = dict(zip(names, x.to(torch.float64).tolist(), strict=True))
        info = torch.finfo(dtype)
        subnormal = info.smallest_normal / 2 ** values._FLOATS[dtype][1]  # finfo.eps is wrong for one of fp8
        for name, value in found.items():
            if name in ("nan", "-nan", "payload", "snan"):
                assert math.isnan(value), name
            else:
                assert value == {
                    "0": 0, "-0": 0, "1": 1, "inf": math.inf, "-inf": -math.inf, "max": info.max, "min": info.min,
                    "tiny": info.tiny, "subnormal": subnormal, "-subnormal": -subnormal,
                }[name]  # fmt: skip
        assert "-0" not in found or math.copysign(1, found["-0"]) == -1
        assert len(set(values.specials(dtype).values())) == len(names)

    def test_a_payload_stays_through_every_layout_and_bit(self) -> None:
        quiet, signalling = 0x7FC00001, 0x7F800001
        for fields in ({}, {"step": (2,)}, {"neg": True}, {"misalignment": 4, "offset": 1}):
            x = TensorPlan((5,), torch.float32, cells=((0, "payload"), (-1, "snan")), **fields).build()
            assert x.clone().view(torch.int32)[[0, -1]].tolist() == [quiet, signalling]
        pair = TensorPlan((2,), torch.complex64, conj=True, cells=((3, "payload"),)).build()
        assert torch.view_as_real(pair.clone()).view(torch.int32)[1, 1] == quiet

    def test_positions_count_the_cells_there_are(self) -> None:
        assert TensorPlan((4, 2), torch.int32, expand=(0,), cells=((1, "max"),)).build()[:, 1].eq(2**31 - 1).all()
        assert TensorPlan((2, 3), torch.int32, windows=1, cells=((-1, "0"),)).build()[1, 2] == 0
        with pytest.raises(ValueError, match="positions from -2 to 1"):
            TensorPlan((4, 2), expand=(0,), cells=((2, "0"),))


class TestGuards:
    @given(plan=any_plan)
    def test_all_around_the_cells_is_poison(self, device: str, plan: TensorPlan) -> None:
        found = plan.build_guarded(device, guard=100, poison=0x5A)
        base = found.base.cpu()
        assert found.start >= 100
        assert found.base.numel() - found.stop >= 100
        assert (base[: found.start] == 0x5A).all()
        assert (base[found.stop :] == 0x5A).all()
        assert base[found.start : found.stop].numpy().tobytes() == storage_bytes(found.tensor)
        if plan.numel:
            touched = torch.full((plan.storage_bytes,), False)
            marked = touched.view(-1, plan.dtype.itemsize).all(1)
            marked.as_strided(plan.shape, plan.strides, plan.offset).fill_(True)
            outside = base[found.start : found.stop].view(-1, plan.dtype.itemsize)[~marked]
            assert (outside == 0x5A).all()
        assert cell_bytes(found.tensor) == cell_bytes(plan.build(device))

    def test_a_write_is_seen_in_the_base(self, device: str) -> None:
        found = TensorPlan((4,), torch.uint8, offset=2).build_guarded(device, guard=64)
        before = found.base.clone()
        found.tensor[1] = found.tensor[1] + 1
        assert (found.base != before).nonzero().flatten().tolist() == [found.start + 3]

    def test_the_storage_ends_where_the_guard_begins(self, device: str) -> None:
        found = TensorPlan((4,), torch.float32).build_guarded(device)
        assert found.tensor.untyped_storage().nbytes() == 16
        assert found.tensor.storage_offset() == 0


REFUSED = [
    ({"shape": (2, -1)}, r"shape must be integers of at least 0, got \(2, -1\)"),
    ({"shape": 3}, "shape must be integers of at least 0, got 3"),
    ({"shape": (2.0,)}, "shape must be integers"),
    ({"shape": (True,)}, "shape must be integers"),
    ({"dtype": torch.qint8}, "dtype must be one that torch.clone copies, got torch.qint8"),
    ({"dtype": "float32"}, "dtype must be one that torch.clone copies, got 'float32'"),
    ({"permutation": (0, 0)}, "permutation must be the dimensions 0 to 1, each once"),
    ({"permutation": (0,)}, "permutation must be"),
    ({"step": (1,)}, "step must be one number for each of 2 dimensions"),
    ({"step": (0, 1)}, "step must be integers of at least 1"),
    ({"padding": (-1, 0)}, "padding must be integers of at least 0"),
    ({"padding": (1, 1, 1)}, "padding must be one number for each of 2 dimensions"),
    ({"offset": -1}, "offset must be integers of at least 0, got -1"),
    ({"misalignment": 2}, "misalignment must be a multiple of 4 bytes below 64, got 2"),
    ({"misalignment": 64}, "misalignment must be a multiple of 4 bytes below 64"),
    ({"expand": (2,)}, "expand must be dimensions from 0 to 1, each once"),
    ({"expand": (0, 0)}, "expand must be dimensions"),
    ({"expand": (0,), "step": (2, 1)}, "step must be 1 for a dimension in expand"),
    ({"shape": (5,), "windows": 1}, "windows must be 0 at rank 1"),
    ({"windows": 3}, "windows must be below the window's length 3"),
    ({"shape": (1, 3), "windows": 1}, "windows must be .* two windows or more"),
    ({"windows": 1, "expand": (0,)}, "expand must be other dimensions than those of windows"),
    ({"windows": 1, "step": (2, 1)}, "windows must be 0 where the windows are stepped"),
    ({"memory_format": torch.channels_last}, "memory_format must be contiguous_format at rank 2"),
    ({"memory_format": torch.preserve_format}, "memory_format must be contiguous_format, channels_last or"),
    ({"shape": (1, 2, 3, 4), "memory_format": torch.channels_last, "permutation": (0, 1, 2, 3)},
     "memory_format must be contiguous_format where permutation is given"),
    ({"unit_stride": -1}, "unit_stride must be integers of at least 0"),
    ({"conj": True}, "conj must be False for torch.float32, which is not complex"),
    ({"neg": True, "dtype": torch.int32}, "neg must be False for torch.int32"),
    ({"neg": True, "conj": True, "dtype": torch.complex32}, "neg must be False for a conjugated torch.complex32"),
    ({"seed": -1}, "seed must be integers of at least 0"),
    ({"cells": ((0, "big"),)}, "cells must be of the names that torch.float32 has .*subnormal.*got"),
    ({"cells": ((6, "nan"),)}, "cells must be at positions from -6 to 5"),
    ({"cells": (0, "nan")}, "cells must be pairs of a position and a name"),
    ({"cells": ((0, "nan"),), "dtype": torch.int8}, "cells must be of the names that torch.int8 has"),
    ({"grad": "on"}, "grad must be one of none, leaf, nonleaf, inference, got 'on'"),
    ({"grad": "leaf", "dtype": torch.int8}, "grad must be none or inference for torch.int8"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "sentence"), REFUSED, ids=lambda case: str(case)[:40])
def test_a_plan_of_no_tensor_is_refused_by_name(fields: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^TensorPlan: {sentence}"):
        TensorPlan(**{"shape": (2, 3), **fields})


class TestShared:
    def test_tensors_overlap_as_planned(self, device: str) -> None:
        row, column = SharedStorage(
            (TensorPlan((6,), torch.int32), TensorPlan((3,), torch.int32, step=(2,), offset=1))
        ).build(device)
        assert torch.equal(row[1::2], column)
        row[3] = 5
        assert column[1] == 5

    @pytest.mark.parametrize(
        ("group", "sentence"),
        [
            ((), "plans must hold a plan or more"),
            ((TensorPlan(), TensorPlan(dtype=torch.int8)), "plans must agree in dtype"),
            ((TensorPlan(), TensorPlan(misalignment=4)), "plans must agree in misalignment"),
            ((TensorPlan(grad="leaf"),), "plans must be without cells and grad"),
        ],
    )
    def test_what_can_not_share_is_refused(self, group: tuple, sentence: str) -> None:
        with pytest.raises(ValueError, match=f"^SharedStorage: {sentence}"):
            SharedStorage(group)


class TestCall:
    CALL = Call((TensorPlan((2,)), [TensorPlan((), seed=1), None], 3), {"other": TensorPlan((0,), torch.int8)})

    def test_plans_are_found_everywhere_and_built_in_place(self) -> None:
        assert [plan.shape for plan in self.CALL.plans] == [(2,), (), (0,)]
        args, kwargs = self.CALL.build()
        assert (args[0].shape, args[1][0].shape, args[1][1], args[2]) == ((2,), (), None, 3)
        assert kwargs["other"].dtype is torch.int8

    def test_other_tensors_and_plans_take_their_places(self) -> None:
        args, kwargs = self.CALL.fill("abc")
        assert (args, kwargs) == (("a", ["b", None], 3), {"other": "c"})
        assert [plan.seed for plan in self.CALL.replace(TensorPlan(seed=7) for _ in range(3)).plans] == [7, 7, 7]

    def test_repr_is_the_constructor(self) -> None:
        assert eval(repr(self.CALL)) == self.CALL
        shared = Call((TensorPlan((2,)), TensorPlan((2,), offset=1)), shared=True)
        assert eval(repr(shared)) == shared

    def test_shared_tensors_lie_in_one_storage(self) -> None:
        (x, y), _ = Call((TensorPlan((2,)), TensorPlan((2,), offset=1)), shared=True).build()
        assert x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
        with pytest.raises(ValueError, match="plans must agree in dtype"):
            Call((TensorPlan(), TensorPlan(dtype=torch.int8)), shared=True)

    def test_a_state_becomes_an_object(self) -> None:
        (made,), _ = Call((State("my_ops.IdentityConvClass", {"channels": 3}),)).build()
        assert made.forward(torch.ones(1, 3, 2, 2)).shape == (1, 3, 2, 2)


class TestContext:
    def test_sets_and_resets(self) -> None:
        x = torch.ones(2, requires_grad=True)
        with Context(grad="disabled").enter():
            assert not (x * 2).requires_grad
        with Context(grad="inference", autocast=torch.bfloat16).enter():
            assert (x * 2).is_inference()
            assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype is torch.bfloat16
        assert (x * 2).requires_grad

    @pytest.mark.gpu
    def test_a_side_stream_is_joined(self) -> None:
        outside = torch.cuda.current_stream()
        with Context("cuda", side_stream=True).enter():
            assert torch.cuda.current_stream() != outside
            x = torch.ones(1 << 20, device="cuda") * 3
        assert torch.cuda.current_stream() == outside
        assert (x == 3).all()

    @pytest.mark.parametrize("fields", [{"grad": "on"}, {"autocast": torch.float32}, {"side_stream": True}])
    def test_what_is_no_context_is_refused(self, fields: dict) -> None:
        with pytest.raises(ValueError, match=f"^Context: {next(iter(fields))} must be"):
            Context(**fields)


class TestPrograms:
    @given(plan=any_plan)
    def test_python_makes_the_same_tensor_with_torch_alone(self, plan: TensorPlan) -> None:
        names: dict = {}
        exec(plan.to_code("python"), names)
        assert_same_tensor(names["x"], plan.build())

    def test_python_makes_every_tensor_of_the_corpus(self) -> None:
        for plan in itertools.islice(corpus.plans(grads=("none", "leaf", "nonleaf", "inference")), 0, None, 7):
            names: dict = {}
            exec(plan.to_code("python"), names)
            assert_same_tensor(names["x"], plan.build())

    def test_python_of_a_call_runs_in_a_process_of_its_own(self, tmp_path: Path) -> None:
        call = Call((TensorPlan((3, 40), step=(1, 2), cells=((0, "inf"),)), TensorPlan((40,))), {"alpha": -math.inf})
        program = tmp_path / "program.py"
        program.write_text(
            reproducer.python(call, "torch.add", names=("self",), after=["torch.save(result, 'result.pt')"])
        )
        assert "identity_conv" not in program.read_text()
        subprocess.run([sys.executable, program.name], cwd=tmp_path, check=True)
        args, kwargs = call.build()
        expected = torch.add(*args, **kwargs)
        assert torch.equal(torch.load(tmp_path / "result.pt").view(torch.int32), expected.view(torch.int32))

    def test_python_of_arguments_that_are_no_tensors(self) -> None:
        call = Call(([TensorPlan(seed=2)], math.nan, complex(1, -math.inf), torch.int8, {"a": 1}, "é", None))
        text = reproducer.python(call, "record")
        names: dict = {"record": lambda *args: args}
        exec(text, names)
        tensors, nan, number, *rest = names["result"]
        assert_same_tensor(tensors[0], TensorPlan(seed=2).build())
        assert math.isnan(nan)
        assert number == complex(1, -math.inf)
        assert rest == [torch.int8, {"a": 1}, "é", None]

    def test_python_of_shared_storage_and_states(self) -> None:
        call = Call((TensorPlan((2,)), TensorPlan((2,), offset=1)), shared=True)
        names: dict = {"record": lambda *args: args}
        exec(reproducer.python(call, "record", names=("first", "second")), names)
        for made, built in zip(names["result"], call.build()[0], strict=True):
            assert_same_tensor(made, built)
        assert names["first"].untyped_storage().data_ptr() == names["second"].untyped_storage().data_ptr()
        state = Call((State("my_ops.IdentityConvClass", {"channels": 3}),))
        assert "record(torch.classes.my_ops.IdentityConvClass(3))" in reproducer.python(state, "record")

    @pytest.mark.gpu
    @given(plan=any_plan)
    def test_python_makes_the_same_tensor_on_cuda(self, plan: TensorPlan) -> None:
        names: dict = {}
        exec(plan.to_code("python", device="cuda"), names)
        assert names["x"].device.type == "cuda"
        assert_same_tensor(names["x"], plan.build("cuda"))

    def test_another_language_is_refused(self) -> None:
        with pytest.raises(ValueError, match="language must be python or cpp, got 'rust'"):
            TensorPlan().to_code("rust")
        with pytest.raises(ValueError, match=r"argument x: a C\+\+ program can't be written for State"):
            reproducer.cpp(Call((State("my_ops.IdentityConvClass", {"channels": 3}),)), "a::b")

    @pytest.mark.night
    def test_cpp_makes_the_same_tensors(self, tmp_path: Path) -> None:
        listed = [
            plan for at, plan in enumerate(corpus.plans(grads=("none", "leaf", "nonleaf", "inference"))) if at % 7 == 0
        ]
        functions = [plan.to_code("cpp", f"make_{at}") for at, plan in enumerate(listed)]
        heads, bodies = zip(*(text.split("// TensorPlan", 1) for text in functions), strict=True)
        names = ", ".join(f"make_{at}" for at in range(len(listed)))
        (tmp_path / "plans.cpp").write_text(
            "#include <torch/library.h>\n"
            + max(heads, key=len)
            + "".join(f"// TensorPlan{body}" for body in bodies)
            + f"at::Tensor make(int64_t at) {{ at::Tensor (*const all[])() = {{{names}}}; return all[at](); }}\n"
            + "TORCH_LIBRARY(identity_conv_plans, m) {\n"
            + '  m.def("make(int at) -> Tensor");\n'
            + '  m.impl("make", c10::DispatchKey::CompositeImplicitAutograd, TORCH_FN(make));\n}\n'
        )
        compile_against_torch(tmp_path / "plans.cpp", tmp_path / "plans.so", "-shared", "-fPIC")
        torch.ops.load_library(str(tmp_path / "plans.so"))
        for at, plan in enumerate(listed):
            assert_same_tensor(torch.ops.identity_conv_plans.make(at), plan.build())

    @pytest.mark.night
    def test_cpp_of_a_call_prints_the_result(self, tmp_path: Path) -> None:
        call = Call((TensorPlan((3, 40), torch.int32, step=(1, 2)), [1], True), {"dtype": torch.float64})
        (tmp_path / "program.cpp").write_text(reproducer.cpp(call, "aten::sum.dim_IntList"))
        compile_against_torch(tmp_path / "program.cpp", tmp_path / "program")
        printed = subprocess.run([tmp_path / "program"], capture_output=True, text=True, check=True).stdout
        args, kwargs = call.build()
        numbers = [float(line) for line in printed.split("[")[0].replace("1e", "e").split()[-3:]]
        scale = torch.sum(*args, **kwargs).flatten() / torch.tensor(numbers, dtype=torch.float64)
        assert printed.rstrip().endswith("[ CPUDoubleType{3,1} ]")
        torch.testing.assert_close(scale, scale[:1].expand(3), rtol=1e-3, atol=0)


def compile_against_torch(source: Path, target: Path, *flags: str) -> None:
    torchs = Path(torch.__file__).parent
    include = (torchs / "include", torchs / "include" / "torch" / "csrc" / "api" / "include")
    link = (f"-L{torchs / 'lib'}", f"-Wl,-rpath,{torchs / 'lib'}", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu")
    subprocess.run(
        ["g++", "-std=c++20", *flags, *(f"-I{each}" for each in include), source, "-o", target, *link, "-lc10", "-ldl"],
        check=True,
    )


class TestImport:
    def test_needs_no_library_until_one_of_its_operators_is_asked_for(self, tmp_path: Path) -> None:
        found = run_python(
            "-c",
            "from identity_conv.testing import TensorPlan\n"
            "import sys, torch\n"
            "assert 'identity_conv.ops' not in sys.modules\n"
            "print(TensorPlan((2,)).build().shape)\n"
            "try:\n    torch.ops.my_ops.identity_conv_op\n"
            "except ImportError as error:\n    print(error)",
            IDENTITY_CONV_CACHE_DIR=tmp_path,
            **NO_COMPILER,
        )
        assert found.returncode == 0, found.stderr
        first, second = found.stdout.splitlines()
        assert first == "torch.Size([2])"
        assert second.startswith("no C++ compiler found")

    def test_the_library_is_there_when_it_is_used(self) -> None:
        found = run_python(
            "-c",
            "import identity_conv.testing\n"
            "import identity_conv, torch\n"
            "print(torch.ops.my_ops.identity_conv_op(torch.ones(2)), torch.classes.my_ops.IdentityConvClass(3))\n"
            "print(identity_conv.identity_conv(torch.ones(1)))",
        )
        assert found.returncode == 0, found.stderr
        assert found.stdout.startswith("tensor([1., 1.]) IdentityConvClass(channels=3)")

    def test_it_is_a_name_of_the_package(self) -> None:
        found = run_python(
            "-c",
            "import identity_conv\nprint(identity_conv.testing.TensorPlan((2,)))",
        )
        assert found.stdout == "TensorPlan((2,), torch.float32)\n", found.stderr

    def test_hypothesis_is_optional(self) -> None:
        found = run_python(
            "-c",
            "import sys; sys.modules['hypothesis'] = None\n"
            "from identity_conv.testing import TensorPlan, corpus\n"
            "print(len(list(corpus.calls('aten::clone', count=5))))\n"
            "try:\n    from identity_conv.testing import plans\n"
            "except ImportError as error:\n    print(error)",
        )
        assert found.stdout.splitlines() == [
            "5",
            "identity_conv.testing.strategies needs hypothesis: pip install 'identity-conv[testing]'",
        ], found.stderr


@pytest.mark.parametrize("module", ["plan", "call", "context", "state", "strategies"])
def test_examples_in_the_documentation_run(module: str) -> None:
    found = doctest.testmod(importlib.import_module(f"identity_conv.testing.{module}"))
    assert found.attempted
    assert not found.failed


def test_fields_of_a_plan_can_be_replaced() -> None:
    plan = TensorPlan([2, 3], torch.int32, cells=[[0, "max"]])
    assert plan.shape == (2, 3)
    assert dataclasses.replace(plan, permutation=(1, 0)).strides == (1, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.seed = 2  # type: ignore[misc]
