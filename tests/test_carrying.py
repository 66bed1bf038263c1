"""What a package carries: every operator library that its program needs, and an example to be verified by."""

from __future__ import annotations

import hashlib
import json
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from support_build import MARK_AS_COMMAND, run_python
from support_package import Records, rewrite, sign, with_manifest, without_libraries

import identity_conv
from identity_conv import Extension, manifest, ops

FIXTURES = Path(__file__).parent / "extensions"

#: Loads a package in a process that has registered nothing, and runs it on x as it was saved.
FRESH = MARK_AS_COMMAND + (
    "import sys, torch, identity_conv\n"
    "package = identity_conv.load_package(sys.argv[1])\n"
    "print(package.verify())\n"
    "if sys.argv[2:]: print(package(torch.load(sys.argv[2])).tolist())\n"
)


def libraries(package: Path) -> dict[str, Any]:
    """The libraries of the manifest, by their file names."""
    listed = identity_conv.inspect_package(package)["manifest"]["libraries"]
    return {each["record"].rpartition("/")[2]: each for each in listed}


def compiled(model: torch.nn.Module, args: tuple, path: Path, **options: Any) -> Path:
    return identity_conv.compile_package(identity_conv.export(model, args), path, **options)


class Plain(torch.nn.Module):
    def forward(self, x):
        return x * 2


class TestLibraries:
    def test_of_the_graphs_operators_and_classes(self, packages: dict[str, Path]) -> None:
        (name,) = found = libraries(packages["cpu"])
        assert name == "libidentity_conv_ops.so"
        assert found[name]["operators"] == {"my_ops::identity_conv_op": "my_ops::identity_conv_op(Tensor x) -> Tensor"}
        assert list(found[name]["classes"]) == ["my_ops::IdentityConvClass"]
        with zipfile.ZipFile(packages["cpu"]) as archive:
            (record,) = [record for record in archive.namelist() if record.endswith(name)]
            assert archive.read(record) == ops.extension.library.read_bytes()

    def test_of_operators_called_inside_a_class_method(self, tmp_path: Path) -> None:
        Extension("test_scale", [FIXTURES / "scale.cpp"]).load()
        relay = Extension("test_relay", [FIXTURES / "relay.cpp"]).load()

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.relay = relay.classes.Relay(0)

            def forward(self, x):
                return self.relay.forward(x)

        x = torch.tensor([1.0, 2.0])
        package = compiled(Model(), (x,), tmp_path / "model.pt2")
        assert set(libraries(package)) == {"libtest_scale.so", "libtest_relay.so"}
        torch.save(x + 1, tmp_path / "x.pt")
        done = run_python("-c", FRESH, package, tmp_path / "x.pt")
        assert done.stdout.splitlines()[-1:] == ["[4.0, 6.0]"], done.stderr
        # The operators of a package are the process's own afterwards.
        again = run_python("-c", FRESH + (
            "from identity_conv import Extension\n"
            f"ext = Extension('test_scale', [{str(FIXTURES / 'scale.cpp')!r}]).load()\n"
            "print(ext.ops.scale(torch.ones(1)).item())\n"
        ), package)  # fmt: skip
        assert again.stdout.splitlines()[-1:] == ["2.0"], again.stderr

    def test_of_one_that_no_extension_has_loaded(self, tmp_path: Path) -> None:
        """Loaded by torch.ops.load_library, or by a linker alone, or given by path."""
        library = Extension("test_scale", [FIXTURES / "scale.cpp"]).build()
        code = (
            "import ctypes, sys, torch, identity_conv\n"
            "how, library, path = sys.argv[1:]\n"
            "torch.ops.load_library(library) if how == 'torch' else ctypes.CDLL(library)\n"
            "class Model(torch.nn.Module):\n"
            "    def forward(self, x): return torch.ops.test_scale.scale(x)\n"
            "program = identity_conv.export(Model(), (torch.ones(3),))\n"
            "options = {'libraries': [library]} if how == 'path' else {}\n"
            "print(identity_conv.compile_package(program, path, **options))\n"
        )
        torch.save(torch.ones(1), tmp_path / "x.pt")
        for how in ("torch", "linker", "path"):
            package = tmp_path / f"{how}.pt2"
            done = run_python("-c", code, how, library, package)
            assert done.returncode == 0, done.stderr
            assert list(libraries(package)) == ["libtest_scale.so"]
        done = run_python("-c", FRESH, package)
        assert "gives the recorded outputs" in done.stdout, done.stderr

    def test_given_by_path_is_carried_though_nothing_needs_it(self, tmp_path: Path) -> None:
        library = Extension("test_scale", [FIXTURES / "scale.cpp"]).build()
        package = compiled(Plain(), (torch.ones(3),), tmp_path / "model.pt2", libraries=[library])
        assert list(libraries(package)) == ["libtest_scale.so"]
        with pytest.raises(FileNotFoundError, match=r"no\.so is not there"):
            compiled(Plain(), (torch.ones(3),), tmp_path / "other.pt2", libraries=[tmp_path / "no.so"])
        with pytest.raises(TypeError, match="must be a list of paths"):
            compiled(Plain(), (torch.ones(3),), tmp_path / "other.pt2", libraries=str(library))

    def test_the_manifest_names_no_path_of_this_machine(self, packages: dict[str, Path]) -> None:
        text = json.dumps(identity_conv.inspect_package(packages["cpu"])["manifest"])
        for path in (str(Path.home()), str(Path(torch.__file__).parent), "/tmp", "/usr/"):
            assert path not in text


class TestPythonOnly:
    @pytest.fixture
    def in_python(self) -> Any:
        @torch.library.custom_op("test_python_only::sine", mutates_args=())
        def sine(x: torch.Tensor) -> torch.Tensor:
            return x.sin()

        @sine.register_fake
        def _(x):
            return torch.empty_like(x)

        return sine

    def test_is_refused_by_name(self, in_python: Any, tmp_path: Path) -> None:
        class Model(torch.nn.Module):
            def forward(self, x):
                return in_python(x)

        with pytest.raises(ValueError, match=r"test_python_only::sine exists only in Python .*: write it in C\+\+"):
            compiled(Model(), (torch.ones(3),), tmp_path / "model.pt2")
        assert list(tmp_path.iterdir()) == []

    def test_an_operator_that_is_compiled_in_passes(self, tmp_path: Path) -> None:
        @torch.library.triton_op("test_python_only::twice", mutates_args=())
        def twice(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        class Model(torch.nn.Module):
            def forward(self, x):
                return twice(x)

        package = identity_conv.load_package(compiled(Model(), (torch.ones(3),), tmp_path / "model.pt2"))
        assert torch.equal(package(torch.full((3,), 4.0)), torch.full((3,), 8.0))

    def test_a_library_that_needs_python_is_refused(self, tmp_path: Path) -> None:
        source = tmp_path / "needs.cpp"
        source.write_text(
            "#include <torch/library.h>\n"
            'extern "C" int Py_IsInitialized();\n'
            "static at::Tensor twice(const at::Tensor& x) { return Py_IsInitialized() ? x : x; }\n"
            'TORCH_LIBRARY(test_needs_python, m) { m.def("twice(Tensor x) -> Tensor", &twice); }\n'
        )
        library = Extension("test_needs_python", [source]).build()
        with pytest.raises(ValueError, match=r"libtest_needs_python\.so needs Python \(its symbol Py_IsInitialized\)"):
            compiled(Plain(), (torch.ones(3),), tmp_path / "model.pt2", libraries=[library])


class TestBesideWhatIsRegistered:
    """Of a namespace that this process has, what agrees is used, and what doesn't is refused."""

    def with_another_library(self, package: Path, target: Path, **changes: str) -> Path:
        """The package with a library of other bytes, and with an operator of another schema."""

        def change(records: Records) -> None:
            described = json.loads(records[manifest.RECORD])
            (library,) = described["libraries"]
            records[library["record"]] += b"built with other flags"
            library["sha256"] = hashlib.sha256(records[library["record"]]).hexdigest()
            library["operators"] |= changes
            records[manifest.RECORD] = json.dumps(described).encode()
            sign(records)

        return rewrite(package, target, change)

    def test_agreeing(self, packages: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        other = self.with_another_library(packages["cpu"], tmp_path / "other.pt2")
        package = identity_conv.load_package(other)
        said = capfd.readouterr().err
        assert "other.pt2: libidentity_conv_ops.so: the process has registered the" in said
        assert "what is registered is used" in said
        assert "gives the recorded outputs" in package.verify()
        identity_conv.load_package(packages["cpu"])
        assert capfd.readouterr().err == ""

    def made_elsewhere(self, source: Path, path: Path, *cflags: str) -> Path:
        """A package of test_scale's operator, by a process that builds `source` with flags of its own."""
        code = MARK_AS_COMMAND + (
            "import sys, torch, identity_conv\n"
            "source, path, *cflags = sys.argv[1:]\n"
            "identity_conv.Extension('test_scale', [source], cflags=cflags).load()\n"
            "class Model(torch.nn.Module):\n"
            "    def forward(self, x): return torch.ops.test_scale.scale(x)\n"
            "identity_conv.compile_package(identity_conv.export(Model(), (torch.ones(3),)), path)\n"
        )
        done = run_python("-c", code, source, path, *cflags)
        assert done.returncode == 0, done.stderr
        return path

    def test_a_library_built_with_other_flags(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        ours = Extension("test_scale", [FIXTURES / "scale.cpp"])
        ours.load()
        path = self.made_elsewhere(FIXTURES / "scale.cpp", tmp_path / "model.pt2", "-O1")
        (carried,) = libraries(path).values()
        assert carried["sha256"] != hashlib.sha256(ours.library.read_bytes()).hexdigest()
        package = identity_conv.load_package(path)
        assert "model.pt2: libtest_scale.so: the process has registered the" in capfd.readouterr().err
        assert torch.equal(package(torch.full((3,), 4.0)), torch.full((3,), 8.0))
        assert "gives the recorded outputs" in package.verify()
        torch.save(torch.full((3,), 4.0), tmp_path / "x.pt")
        done = run_python("-c", FRESH, path, tmp_path / "x.pt")
        assert done.stdout.splitlines()[-1:] == ["[8.0, 8.0, 8.0]"], done.stderr

    def test_a_library_of_another_schema(self, tmp_path: Path) -> None:
        Extension("test_scale", [FIXTURES / "scale.cpp"]).load()
        source = tmp_path / "scale.cpp"
        text = (FIXTURES / "scale.cpp").read_text()
        source.write_text(text.replace("both(Tensor x) -> (Tensor, Tensor)", "both(Tensor y) -> (Tensor, Tensor)"))
        path = self.made_elsewhere(source, tmp_path / "model.pt2")
        with pytest.raises(identity_conv.LibraryConflictError) as caught:
            identity_conv.load_package(path)
        assert "has the operator test_scale::both(Tensor x) -> (Tensor, Tensor), and the package" in str(caught.value)
        assert "gives the recorded outputs" in run_python("-c", FRESH, path).stdout

    @pytest.mark.night
    def test_the_worked_example_built_with_other_flags(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        code = MARK_AS_COMMAND + (
            "import sys, torch\n"
            "from identity_conv import building\n"
            "building.CFLAGS = ('-O1', *building.CFLAGS[1:])\n"
            "import identity_conv as ic\n"
            "ic.compile_package(ic.export(ic.IdentityModel(), (torch.randn(2, 3, 8, 9),)), sys.argv[1])\n"
        )
        done = run_python("-c", code, tmp_path / "model.pt2")
        assert done.returncode == 0, done.stderr
        (carried,) = libraries(tmp_path / "model.pt2").values()
        assert carried["sha256"] != hashlib.sha256(ops.extension.library.read_bytes()).hexdigest()
        package, x = identity_conv.load_package(tmp_path / "model.pt2"), torch.randn(2, 3, 8, 9)
        assert "libidentity_conv_ops.so: the process has registered the" in capfd.readouterr().err
        torch.testing.assert_close(package(x), x, rtol=1e-5, atol=1e-5)
        assert "gives the recorded outputs" in run_python("-c", FRESH, tmp_path / "model.pt2").stdout

    def test_disagreeing(self, packages: dict[str, Path], tmp_path: Path) -> None:
        changed = {"my_ops::identity_conv_op": "my_ops::identity_conv_op(Tensor x, int y) -> Tensor"}
        other = self.with_another_library(packages["cpu"], tmp_path / "other.pt2", **changed)
        with pytest.raises(identity_conv.LibraryConflictError) as caught:
            identity_conv.load_package(other)
        assert "has the operator my_ops::identity_conv_op(Tensor x) -> Tensor, and the package" in str(caught.value)
        assert "(Tensor x, int y)" in str(caught.value)
        assert caught.value.kind == "library conflict"

    def test_one_that_lacks_an_operator(self, packages: dict[str, Path], tmp_path: Path) -> None:
        other = self.with_another_library(
            packages["cpu"], tmp_path / "other.pt2", **{"my_ops::more": "my_ops::more() -> ()"}
        )
        with pytest.raises(identity_conv.LibraryConflictError, match="lacks the operator my_ops::more"):
            identity_conv.load_package(other)

    def test_in_the_program(self, packages: dict[str, Path], program: Path, library: Path, tmp_path: Path) -> None:
        def run(package: Path) -> subprocess.CompletedProcess[str]:
            command = [program, package, "--verify", "--library", library]
            return subprocess.run(command, capture_output=True, text=True, check=False, env={})

        done = run(packages["cpu"])
        assert (done.returncode, done.stderr) == (0, "")
        done = run(without_libraries(packages["cpu"], tmp_path / "bare.pt2"))
        assert (done.returncode, done.stderr) == (0, "")
        done = run(self.with_another_library(packages["cpu"], tmp_path / "other.pt2"))
        assert done.returncode == 0
        assert "note: libidentity_conv_ops.so: the process has registered the" in done.stderr
        changed = {"my_ops::identity_conv_op": "my_ops::identity_conv_op(Tensor x, int y) -> Tensor"}
        done = run(self.with_another_library(packages["cpu"], tmp_path / "third.pt2", **changed))
        assert done.returncode == 1
        assert "has the operator my_ops::identity_conv_op(Tensor x) -> Tensor, and the package" in done.stderr

    def test_the_same_import_afterwards(self, packages: dict[str, Path]) -> None:
        code = FRESH + "print(identity_conv.identity_conv(torch.arange(3)).tolist())\n"
        done = run_python("-c", code, packages["cpu"])
        assert done.stdout.splitlines()[-1:] == ["[0, 1, 2]"], done.stderr


class TestExample:
    def test_verify_in_both_languages_says_the_same(self, packages: dict[str, Path], program: Path) -> None:
        sentence = identity_conv.load_package(packages["cpu"]).verify()
        done = subprocess.run(
            [program, packages["cpu"], "--verify"], capture_output=True, text=True, check=True, env={}
        )
        assert done.stdout == f"{sentence}\n"

    def test_another_result_is_named(self, packages: dict[str, Path], program: Path, tmp_path: Path) -> None:
        def change(records: Records) -> None:
            data = bytearray(records["data/identity_conv/sample/outputs"])
            data[3] ^= 0x40
            records["data/identity_conv/sample/outputs"] = bytes(data)
            sign(records)

        other = rewrite(packages["cpu"], tmp_path / "other.pt2", change)
        with pytest.raises(identity_conv.VerificationError, match=r"output 0 differs in 1 of 432 elements, by up to"):
            identity_conv.load_package(other).verify()
        done = subprocess.run([program, other, "--verify"], capture_output=True, text=True, check=False, env={})
        assert done.returncode == 1
        assert "output 0 differs in 1 of 432 elements" in done.stderr
        command = run_python("-m", "identity_conv", "verify", other)
        assert (command.returncode, command.stdout) == (1, "")
        assert "output 0 differs in 1 of 432 elements" in command.stderr

    def test_left_out_on_request(self, tmp_path: Path) -> None:
        path = compiled(Plain(), (torch.full((3,), 7.0),), tmp_path / "model.pt2", sample=False)
        assert not [name for name in identity_conv.inspect_package(path)["records"] if "sample" in name]
        with pytest.raises(identity_conv.NoSampleError, match="carries no recorded example"):
            identity_conv.load_package(path).verify()

    def test_of_every_kind_of_output(self, tmp_path: Path) -> None:
        class Model(torch.nn.Module):
            def forward(self, x, flags):
                return x.to(torch.bfloat16), flags.sum(), {"none": None, "half": x.t().half()}, x + torch.nan

        x = torch.randn(4, 6).t()
        path = compiled(Model(), (x, torch.tensor([True, False])), tmp_path / "model.pt2")
        assert "2 inputs" in identity_conv.load_package(path).verify()

    def test_a_model_that_is_random_has_none(self, tmp_path: Path) -> None:
        class Model(torch.nn.Module):
            def forward(self, x):
                return x + torch.rand_like(x)

        path = compiled(Model(), (torch.ones(8),), tmp_path / "model.pt2")
        with pytest.raises(identity_conv.NoSampleError):
            identity_conv.load_package(path).verify()


def test_the_digest_asked_for(packages: dict[str, Path]) -> None:
    digest = hashlib.sha256(packages["cpu"].read_bytes()).hexdigest()
    for asked in (digest, digest.upper()):
        identity_conv.load_package(packages["cpu"], expected_sha256=asked)
    zeros = "0" * 64
    with pytest.raises(identity_conv.DamagedPackageError, match=f"has the SHA-256 {digest}, and {zeros} was expected"):
        identity_conv.load_package(packages["cpu"], expected_sha256=zeros)


def test_a_missing_library_is_named(packages: dict[str, Path], tmp_path: Path) -> None:
    """An operator of a library that no file of this process has."""
    code = FRESH + (
        "class Model(torch.nn.Module):\n"
        "    def forward(self, x): return torch.ops.my_ops.identity_conv_op(x)\n"
        "program = identity_conv.export(Model(), (torch.ones(3),))\n"
        f"identity_conv.compile_package(program, {str(tmp_path / 'new.pt2')!r})\n"
    )
    done = run_python("-c", code, packages["cpu"])
    assert done.stderr.splitlines()[-1].endswith(
        "no library was found that registers the operator my_ops::identity_conv_op, which the program needs: "
        "pass its path in libraries="
    )


def test_changes_the_manifest_knows_nothing_of(packages: dict[str, Path], tmp_path: Path) -> None:
    def change(described: dict[str, Any]) -> None:
        del described["records"]["byteorder"]

    other = with_manifest(packages["cpu"], tmp_path / "other.pt2", change)
    with pytest.raises(identity_conv.DamagedPackageError, match="knows no record byteorder"):
        identity_conv.load_package(other)
