"""compile_package and load_package: what comes back is what the model returned, or one sentence."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from support_package import with_manifest, without_libraries
from torch.export import Dim

import identity_conv
from identity_conv import aotinductor


def close_to(x: torch.Tensor) -> dict[str, float]:
    return {"rtol": 0, "atol": 4e-3 * float(x.abs().max())} if x.is_cuda else {"rtol": 1e-6, "atol": 1e-6}


def test_it_returns_what_the_model_returns(device: str, packages: dict[str, Path]) -> None:
    package = identity_conv.load_package(packages[device])
    for shape in [(2, 3, 8, 9), (1, 3, 5, 6), (64, 3, 2, 2)]:
        x = torch.randn(shape, device=device)
        y = package(x)
        assert isinstance(y, torch.Tensor)
        assert y.device.type == device
        torch.testing.assert_close(y, x, **close_to(x))


def test_a_fresh_process_loads_it(device: str, packages: dict[str, Path], tmp_path: Path) -> None:
    x = torch.randn(3, 3, 8, 8)
    torch.save(x, tmp_path / "x.pt")
    code = (
        "import sys, torch, identity_conv; package, x, y, device = sys.argv[1:]\n"
        "torch.save(identity_conv.load_package(package)(torch.load(x).to(device)).cpu(), y)"
    )
    command = [sys.executable, "-c", code, packages[device], tmp_path / "x.pt", tmp_path / "y.pt", device]
    subprocess.run(command, check=True)
    torch.testing.assert_close(torch.load(tmp_path / "y.pt"), x, **close_to(x.to(device)))


class Nested(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = identity_conv.IdentityModel()

    def forward(self, pair, *, scale, shift=None):
        y = self.inner(pair["a"])
        return {"sum": y + pair["b"][0], "list": [y * scale, (self.inner(pair["b"][0]),)]}


@pytest.fixture(scope="module")
def nested(tmp_path_factory: pytest.TempPathFactory) -> identity_conv.Package:
    a, b, scale = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4), torch.tensor(3.0)
    program = identity_conv.export(Nested(), ({"a": a, "b": (b,)},), {"scale": scale})
    return identity_conv.load_package(
        identity_conv.compile_package(program, tmp_path_factory.mktemp("nested") / "nested.pt2")
    )


def test_nested_and_keyword_arguments(nested: identity_conv.Package) -> None:
    a, b, scale = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4), torch.tensor(2.0)
    result = nested({"a": a, "b": (b,)}, scale=scale)
    torch.testing.assert_close(result["sum"], a + b)
    torch.testing.assert_close(result["list"][0], a * 2)
    assert isinstance(result["list"][1], tuple)
    torch.testing.assert_close(result["list"][1][0], b)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((torch.zeros(2, 3, 4, 4),), {"scale": torch.tensor(1.0)}),
        (([torch.zeros(2, 3, 4, 4)],), {"scale": torch.tensor(1.0)}),
        (({"a": torch.zeros(2, 3, 4, 4)},), {"scale": torch.tensor(1.0)}),
        (({"a": torch.zeros(2, 3, 4, 4), "b": (torch.zeros(2, 3, 4, 4),)},), {}),
        (({"a": torch.zeros(2, 3, 4, 4), "b": (torch.zeros(2, 3, 4, 4),)},), {"scal": torch.tensor(1.0)}),
        (({"a": torch.zeros(2, 3, 4, 4), "b": ("x",)},), {"scale": torch.tensor(1.0)}),
    ],
    ids=[
        "a tensor for a dict",
        "a list for a dict",
        "missing key",
        "missing keyword",
        "wrong keyword",
        "a string for a tensor",
    ],
)
def test_other_structures_are_refused(nested: identity_conv.Package, args, kwargs) -> None:
    with pytest.raises(TypeError, match=r"nested\.pt2: ") as caught:
        nested(*args, **kwargs)
    assert "\n" not in str(caught.value)


def test_arguments_by_position_and_by_keyword_are_told_apart(tmp_path: Path) -> None:
    class Difference(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a - b

    x, y = torch.ones(2), torch.zeros(2)
    positional = identity_conv.export(Difference(), (x, y))
    keyword = identity_conv.export(Difference(), (x,), {"b": y})
    must = "model.pt2: arguments must be given as in the export"
    cases = [
        (positional, (), {"a": x, "b": y}, "(a, b), got (a=a tensor, b=a tensor); give a, b by position"),
        (positional, (x,), {"b": y}, "(a, b), got (a tensor, b=a tensor); give b by position"),
        (positional, (x,), {}, "(a, b), got (a tensor)"),
        (positional, (x, y, x), {}, "(a, b), got (a tensor, a tensor, a tensor)"),
        (keyword, (x, y), {}, "(a, b=b), got (a tensor, a tensor); give b by keyword"),
    ]
    packages: dict[int, identity_conv.Package] = {}
    for program, args, kwargs, sentence in cases:
        if id(program) not in packages:
            path = identity_conv.compile_package(program, tmp_path / "model.pt2")
            packages[id(program)] = identity_conv.load_package(path)
        with pytest.raises(TypeError) as caught:
            packages[id(program)](*args, **kwargs)
        assert str(caught.value) == f"{must}, {sentence}"


def test_inputs_that_do_not_fit_are_refused(device: str, packages: dict[str, Path]) -> None:
    package = identity_conv.load_package(packages[device])
    x = torch.randn(2, 3, 8, 8, device=device)
    wrong = {
        "dtype": x.double(),
        "channels": torch.randn(2, 4, 8, 8, device=device),
        "rank": x[0],
        "batch too large": torch.randn(65, 3, 2, 2, device=device),
        "sparse": x.to_sparse(),
        "meta": x.to("meta"),
    }
    for name, other in wrong.items():
        with pytest.raises((RuntimeError, TypeError)) as caught:
            package(other)
        assert "input" in str(caught.value), name
        assert "\n" not in str(caught.value), name
    torch.testing.assert_close(package(x), x, **close_to(x))


def test_the_sentence_names_input_wanted_and_got(packages: dict[str, Path]) -> None:
    package = identity_conv.load_package(packages["cpu"])
    for x, sentence in [
        (torch.zeros(2, 3, 8, 8, dtype=torch.float64), "input x: dtype must be float32, got float64"),
        (torch.zeros(2, 4, 8, 8), "input x: size of dimension 1 must be 3, got 4"),
        (torch.zeros(65, 3, 8, 8), "input x: size of dimension 0 must be 0 to 64, got 65"),
        (torch.zeros(3, 8, 8), "input x: the number of dimensions must be 4, got 3"),
    ]:
        with pytest.raises(RuntimeError) as caught:
            package(x)
        assert str(caught.value) == sentence


def test_another_layout_is_computed_rightly(device: str, packages: dict[str, Path]) -> None:
    package = identity_conv.load_package(packages[device])
    x = torch.randn(6, 3, 8, 10, device=device)
    for view in [
        x.to(memory_format=torch.channels_last),
        x.transpose(2, 3),
        x[::2, :, 1:, ::3],
        x[:1].expand(5, 3, 8, 10),
        x[:0],
        x[:1],
        torch._neg_view(x),
    ]:
        torch.testing.assert_close(package(view), view, **close_to(x))


def test_sizes_that_must_agree(tmp_path: Path) -> None:
    class Two(torch.nn.Module):
        def forward(self, x, y, z):
            return x + y, z[: x.shape[0]] * x

    n = Dim("n", min=2, max=100)
    x = torch.randn(4, 3)
    program = identity_conv.export(Two(), (x, x, torch.randn(8, 3)), dynamic_shapes=({0: n}, {0: n}, {0: 2 * n}))
    package = identity_conv.load_package(identity_conv.compile_package(program, tmp_path / "two.pt2"))
    y, z = torch.randn(7, 3), torch.randn(14, 3)
    torch.testing.assert_close(package(y, y, z)[1], z[:7] * y)
    for arguments, sentence in [
        ((y, y[:6], z), "input y: size of dimension 0 must be 7 (given by dimension 0 of x), got 6"),
        ((y, y, z[:13]), "input z: size of dimension 0 must be 14 (given by dimension 0 of x), got 13"),
        ((y[:1], y[:1], z[:2]), "input x: size of dimension 0 must be 2 to 100, got 1"),
    ]:
        with pytest.raises(RuntimeError) as caught:
            package(*arguments)
        assert str(caught.value) == sentence


def test_arguments_that_are_compiled_in_must_stay(tmp_path: Path) -> None:
    class Scaled(torch.nn.Module):
        def forward(self, x, factor, flag=None):
            return x * factor if flag is None else x

    x = torch.randn(4, 3)
    program = identity_conv.export(Scaled(), (x, 2), {"flag": None})
    package = identity_conv.load_package(identity_conv.compile_package(program, tmp_path / "scaled.pt2"))
    torch.testing.assert_close(package(x, 2, flag=None), 2 * x)
    with pytest.raises(ValueError, match=r"factor was compiled in as 2, got 3"):
        package(x, 3, flag=None)
    with pytest.raises(TypeError, match=r"factor must be 2, got a tensor"):
        package(x, torch.tensor(2), flag=None)
    with pytest.raises(TypeError):
        package(x, 2, flag=True, more=1)


def test_a_package_of_stock_torch_keeps_the_compiler_generated_checks(tmp_path: Path) -> None:
    program = identity_conv.export(torch.nn.Linear(4, 4), (torch.randn(3, 4),))
    path = str(tmp_path / "stock.pt2")
    # Without a manifest, but linked as this machine's compiler needs it.
    compiler = aotinductor.configs(None)
    torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=compiler)
    package = identity_conv.load_package(path)
    package(torch.randn(3, 4))
    for wrong in (torch.randn(4, 4), torch.randn(4, 3).t()):
        with pytest.raises(RuntimeError):
            package(wrong)


def test_stock_torch_opens_our_package(packages: dict[str, Path]) -> None:
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(torch._inductor.aoti_load_package(str(packages["cpu"]))(x), x)


def test_an_input_that_requires_grad_runs_without(packages: dict[str, Path]) -> None:
    y = identity_conv.load_package(packages["cpu"])(torch.randn(2, 3, 8, 8, requires_grad=True))
    assert not y.requires_grad


@pytest.mark.parametrize("argument", ["text", None, 3, [torch.zeros(1)]])
def test_an_argument_that_is_no_tensor_is_refused(packages: dict[str, Path], argument) -> None:
    with pytest.raises(TypeError):
        identity_conv.load_package(packages["cpu"])(argument)


def test_nothing_is_left_behind(packages: dict[str, Path]) -> None:
    code = (
        "import os, sys, torch, identity_conv\n"
        "def unpacked():\n"
        "    maps = open('/proc/self/maps').read().split()\n"
        "    return {word for word in maps if 'aotinductor' in word and os.path.exists(word)}\n"
        "for _ in range(3):\n"
        "    package = identity_conv.load_package(sys.argv[1])\n"
        "    assert unpacked()\n"
        "    package(torch.randn(2, 3, 8, 8))\n"
        "    try: package(torch.randn(2, 4, 8, 8))\n"
        "    except RuntimeError: pass\n"
        "    del package\n"
        "    assert not unpacked()\n"
        "package = identity_conv.load_package(sys.argv[1])\n"
        "print(*unpacked(), sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", code, packages["cpu"]], check=True, stdout=subprocess.PIPE, text=True)
    left = done.stdout.splitlines()
    assert left
    assert not any(map(os.path.exists, left))


def _broken(tmp_path: Path, good: Path) -> dict[str, tuple[Path, str]]:
    data = good.read_bytes()

    def write(name: str, content: bytes) -> Path:
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    program = identity_conv.export(identity_conv.IdentityModel(), (torch.randn(1, 3, 2, 2),))
    torch.export.save(program, tmp_path / "program.pt2")
    torch.save({"w": torch.ones(2)}, tmp_path / "state.pt2")
    with zipfile.ZipFile(tmp_path / "zip.pt2", "w") as archive:
        archive.writestr("hello.txt", "hello")
    return {
        "foreign": (write("foreign.pt2", b"not a zip at all" * 99), "not a zip archive"),
        "empty": (write("empty.pt2", b""), "empty"),
        **{
            f"cut off at {at}": (
                write(f"cut{at}.pt2", data[:at]),
                f"is cut off: the central directory of the zip archive, .* after the {at} bytes that are here; copy",
            )
            # The middle, one record's own end of a zip archive and some bytes, and all but the end.
            for at in (len(data) // 2, data.index(b"PK\5\6") + 100, len(data) - 10, len(data) - 1)
        },
        "a zip": (tmp_path / "zip.pt2", "zip archive that torch did not write"),
        "a program": (tmp_path / "program.pt2", "saved ExportedProgram, not a compiled package"),
        "a state dict": (tmp_path / "state.pt2", "file of torch.save"),
        "a pickle": (write("pickle.pt2", pickle.dumps({"a": 1})), "not a zip archive"),
        "a folder": (tmp_path, "is a directory"),
    }


def test_a_file_that_is_no_package_is_told_apart(packages: dict[str, Path], tmp_path: Path) -> None:
    for name, (path, sentence) in _broken(tmp_path, packages["cpu"]).items():
        with pytest.raises(RuntimeError, match=sentence) as caught:
            identity_conv.load_package(path)
        assert str(caught.value).startswith(str(path)), name
        assert "\n" not in str(caught.value), name
    with pytest.raises(FileNotFoundError, match=r"missing\.pt2: no such file"):
        identity_conv.load_package(tmp_path / "missing.pt2")


def test_each_reader_says_that_a_file_is_cut_off(packages: dict[str, Path], program: Path, tmp_path: Path) -> None:
    path, data = tmp_path / "cut.pt2", packages["cpu"].read_bytes()
    # A record that is a zip archive has an end, the last one here.
    path.write_bytes(data[: data.index(b"PK\5\6") + 100])
    sentence = (
        f"{path}: is cut off: the central directory of the zip archive, which ends it, is missing after the "
        f"{path.stat().st_size} bytes that are here; copy it again"
    )
    for read in (identity_conv.load_package, identity_conv.inspect_package):
        with pytest.raises(identity_conv.DamagedPackageError, match=f"^{re.escape(sentence)}$"):
            read(path)
    done = subprocess.run([program, path, "--verify"], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, f"identity-conv-run: {sentence}\n")


def test_a_library_that_is_not_loaded_is_named(packages: dict[str, Path], tmp_path: Path) -> None:
    code = (
        "import sys, _identity_conv_entry, identity_conv\n"
        "try: identity_conv.load_package(sys.argv[1])\n"
        "except RuntimeError as error: print(error)"
    )
    entry = Path(identity_conv.__file__).parent / "entry"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(entry), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", code, without_libraries(packages["cpu"], tmp_path / "bare.pt2")],
        env=environment, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert "my_ops::IdentityConvClass, which no loaded library registers" in done.stdout


def test_wrong_use_of_compile_package(tmp_path: Path) -> None:
    program = identity_conv.export(identity_conv.IdentityModel(), (torch.randn(1, 3, 2, 2),))
    with pytest.raises(TypeError, match=r"program must be an ExportedProgram .*, got IdentityModel"):
        identity_conv.compile_package(identity_conv.IdentityModel(), tmp_path / "model.pt2")
    with pytest.raises(ValueError, match=r"path must end in \.pt2, got"):
        identity_conv.compile_package(program, tmp_path / "model.zip")
    with pytest.raises(FileNotFoundError, match="the folder of path isn't there"):
        identity_conv.compile_package(program, tmp_path / "no" / "model.pt2")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_compilation_keeps_the_old_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = identity_conv.export(identity_conv.IdentityModel(), (torch.randn(1, 3, 2, 2),))
    path = tmp_path / "model.pt2"
    path.write_bytes(b"old")

    def fail(*args, package_path: str, **kwargs) -> None:
        Path(package_path).write_bytes(b"half")
        raise RuntimeError("no space")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", fail)
    with pytest.raises(RuntimeError, match="no space"):
        identity_conv.compile_package(program, path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_library_of_a_package_runs_on_the_shared_cpp_runtime(packages: dict[str, Path], tmp_path: Path) -> None:
    """A second libstdc++ inside it, from a compiler without the shared one, crashes as it loads."""
    with zipfile.ZipFile(packages["cpu"]) as archive:
        (library,) = [name for name in archive.namelist() if name.endswith(".so") and "/aotinductor/" in name]
        archive.extract(library, tmp_path)
    dynamic = subprocess.run(["readelf", "-d", tmp_path / library], capture_output=True, text=True, check=True).stdout
    assert "libstdc++.so.6" in dynamic


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda m: json.dumps(m | {"format": 2}), "has a manifest of format 2, and this runtime knows 1"),
        (lambda m: json.dumps(m | {"inputs": []}), "manifest names 0 inputs, and its model takes 1"),
        (lambda m: json.dumps(m | {"inputs": m["inputs"] * 3}), "manifest names 3 inputs, and its model takes 1"),
        (lambda m: json.dumps({"format": 1}), "names no inputs"),
        (lambda m: "{", "is not JSON"),
        (lambda m: json.dumps(m | {"inputs": [m["inputs"][0] | {"dtype": "float33"}]}), "no dtype is named float33"),
        (lambda m: json.dumps(m | {"inputs": [m["inputs"][0] | {"order": [0, 1, 2, 7]}]}), "has no layout"),
        (lambda m: json.dumps(m | {"symbols": {}}), "has no range"),
    ],
)  # fmt: skip
def test_a_forged_manifest_is_refused(packages: dict[str, Path], tmp_path: Path, change, sentence: str) -> None:
    with pytest.raises(RuntimeError, match=sentence) as caught:
        identity_conv.load_package(with_manifest(packages["cpu"], tmp_path / "model.pt2", change))
    assert "\n" not in str(caught.value)


def test_the_order_of_a_dicts_keys_does_not_matter(nested: identity_conv.Package) -> None:
    a, b = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
    torch.testing.assert_close(nested({"b": (b,), "a": a}, scale=torch.tensor(2.0))["sum"], a + b)


def _package(model: torch.nn.Module, args: tuple, path: Path, **options) -> identity_conv.Package:
    program = identity_conv.export(model, args, **options)
    return identity_conv.load_package(identity_conv.compile_package(program, path / "model.pt2"))


def test_what_the_export_assumed_of_sizes_is_checked(tmp_path: Path) -> None:
    class Pairs(torch.nn.Module):
        def forward(self, x, y):
            z = identity_conv.identity_conv(x).view(-1, 2).sum(1)
            return z * 2 if x.shape[0] > y.shape[0] + 3 else z

    package = _package(
        Pairs(), (torch.randn(8), torch.randn(2)), tmp_path, dynamic_shapes=({0: Dim.AUTO}, {0: Dim.AUTO})
    )
    x = torch.randn(10)
    torch.testing.assert_close(package(x, torch.randn(3)), x.view(-1, 2).sum(1) * 2)
    for n, m, sentence in [(9, 2, r"x.size(0) % 2|Mod(x.size(0), 2)"), (10, 9, "y.size(0) + 3")]:
        with pytest.raises(RuntimeError, match="the inputs' sizes must satisfy") as caught:
            package(torch.randn(n), torch.randn(m))
        assert any(part in str(caught.value) for part in sentence.split("|"))


def test_an_input_that_the_model_changes_is_changed_or_refused(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    class Change(torch.nn.Module):
        def forward(self, x):
            x.add_(1)
            return identity_conv.identity_conv(x)

    package = _package(Change(), (torch.zeros(4, 6),), tmp_path)
    assert not [each for each in recwarn if each.category is FutureWarning]  # of torch's own doing
    x = torch.zeros(4, 6)
    assert torch.equal(package(x), torch.ones(4, 6))
    assert torch.equal(x, torch.ones(4, 6))
    for other in (torch.zeros(6, 4).t(), torch.zeros(4, 6, requires_grad=True)):
        with pytest.raises(RuntimeError, match=r"input x: .*write"):
            package(other)


def test_numbers_come_back_as_numbers(tmp_path: Path) -> None:
    class Sizes(torch.nn.Module):
        def forward(self, x):
            return identity_conv.identity_conv(x), x.shape[0], None, 5

    package = _package(Sizes(), (torch.zeros(4, 6),), tmp_path, dynamic_shapes=({0: Dim("n", max=9)},))
    y, n, none, five = package(torch.ones(7, 6))
    assert y.shape == (7, 6)
    assert (n, none, five) == (7, None, 5)
    assert type(n) is int


@pytest.mark.parametrize("kind", ["functional", "zero tensor", "storage taken", "nested"])
def test_a_tensor_without_memory_of_its_own_is_refused(packages: dict[str, Path], kind: str) -> None:
    package = identity_conv.load_package(packages["cpu"])
    x = torch.randn(2, 3, 8, 8)
    if kind == "functional":
        with pytest.raises(RuntimeError, match="input x: must be a plain tensor"):
            torch.func.functionalize(package)(x)
        return
    if kind == "zero tensor":
        x = torch._efficientzerotensor((2, 3, 8, 8))
    elif kind == "storage taken":
        x.untyped_storage().resize_(0)
    else:
        x = torch.nested.nested_tensor([x, x])
    with pytest.raises(RuntimeError, match="input x: must be a"):
        package(x)


def test_a_record_that_leads_out_of_the_archive_is_refused(packages: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(packages["cpu"].read_bytes())
    with zipfile.ZipFile(path, "a") as archive:
        folder = archive.namelist()[0].split("/")[0]
        archive.writestr(f"{folder}/data/aotinductor/model/../../../../escaped.json", "{}")
    with pytest.raises(RuntimeError, match="leads out of the archive"):
        identity_conv.load_package(path)
