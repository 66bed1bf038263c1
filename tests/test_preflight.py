"""Before anything of a package is mapped: every cause for which it can't run here, in one answer."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support_build import MARK_AS_COMMAND, MODULE, run_python
from support_package import Records, rewrite, sign, with_manifest

import identity_conv
from identity_conv.instruction_sets import compiled_for

LIBRARY = "data/identity_conv/lib/libidentity_conv_ops.so"


def fatal(package: Path) -> list[str]:
    """The texts of the fatal findings, which every way of asking must give."""
    found = identity_conv.inspect_package(package)
    return [each["text"] for each in found["findings"] if each["verdict"] == "fatal"]


def in_library(before: bytes, after: bytes) -> Callable[[Records], None]:
    """Replaces bytes of the operator library by as many others, with the right digest."""
    assert len(before) == len(after)

    def change(records: Records) -> None:
        assert before in records[LIBRARY]
        records[LIBRARY] = records[LIBRARY].replace(before, after)
        sign(records)

    return change


def test_a_package_made_here_has_nothing_to_say_against(packages: dict[str, Path]) -> None:
    found = identity_conv.inspect_package(packages["cpu"])
    assert found["verdict"] == "ok", found["findings"]
    checks = {each["check"] for each in found["findings"]}
    assert {"records", "platform", "torch", "CPU", "device", "linking", "registration"} <= checks


def other_platform(manifest: dict[str, Any]) -> None:
    manifest["host"]["platform"] = "linux riscv64"


def newer_torch(manifest: dict[str, Any]) -> None:
    manifest["torch"]["version"] = "2.99.0+cpu"


def more_instructions(manifest: dict[str, Any]) -> None:
    manifest["host"]["instruction sets"] += ["avx1024f"]


def fewer_instructions(manifest: dict[str, Any]) -> None:
    manifest["host"]["instruction sets"] = manifest["host"]["instruction sets"][:1]


def other_abi(manifest: dict[str, Any]) -> None:
    manifest["torch"]["cxx11 abi"] = False


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (other_platform, "was compiled for linux riscv64, and this is linux "),
        (newer_torch, "has operator libraries for torch 2.99.0+cpu, and this is torch 2."),
        (more_instructions, "uses instructions that this processor lacks: avx1024f"),
        (other_abi, "has libraries of the C++11 ABI 0, and this torch has 1"),
    ],
)
def test_a_host_that_does_not_suit(packages: dict[str, Path], tmp_path: Path, change: Any, sentence: str) -> None:
    package = with_manifest(packages["cpu"], tmp_path / "other.pt2", change)
    (text,) = fatal(package)
    assert sentence in text
    with pytest.raises(identity_conv.HostError) as caught:
        identity_conv.load_package(package)
    assert str(caught.value) == f"{package}: {text}"


def test_a_host_with_more_suits(packages: dict[str, Path], tmp_path: Path) -> None:
    package = with_manifest(packages["cpu"], tmp_path / "other.pt2", fewer_instructions)
    assert fatal(package) == []
    identity_conv.load_package(package).verify()


class TestInstructionSets:
    """What is recorded is what the compiler may use, whatever else the machine that it is on has."""

    for_another_machine = pytest.mark.skipif(
        not hasattr(torch._inductor.config.cpp, "march") or platform.machine() != "x86_64",
        reason="torch 2.11 compiles for the machine that it is on",
    )

    @for_another_machine
    def test_of_the_flags(self) -> None:
        older, newer = (
            set(compiled_for({"cpp.march": f"x86-64-v{level}", "cpp.simdlen": 1}, device="cpu")) for level in (2, 4)
        )
        assert {"sse4_2", "popcnt"} <= older
        assert not older & {"avx", "avx2", "fma", "avx512f"}
        assert {"avx2", "fma", "bmi2", "avx512f", "avx512vl"} <= newer
        without_avx512 = compiled_for({"cpp.march": "x86-64-v3", "cpp.simdlen": 256}, device="cpu")
        assert "avx2" in without_avx512
        assert not [name for name in without_avx512 if name.startswith("avx512")]

    def test_of_a_package(self, packages: dict[str, Path]) -> None:
        recorded = identity_conv.inspect_package(packages["cpu"])["manifest"]["host"]["instruction sets"]
        assert recorded == compiled_for({}, device="cpu")
        assert set(recorded) <= set(Path("/proc/cpuinfo").read_text().split())

    @pytest.mark.night
    @for_another_machine
    def test_more_than_this_processor_may_have(self, tmp_path: Path) -> None:
        def compile_it() -> Path:
            program = identity_conv.export(torch.nn.ReLU(), (torch.randn(3),))
            options = {"cpp.march": "x86-64-v4"}
            return identity_conv.compile_package(program, tmp_path / "model.pt2", inductor_configs=options)

        if "avx512vl" in Path("/proc/cpuinfo").read_text():
            assert "avx512vl" in identity_conv.inspect_package(compile_it())["manifest"]["host"]["instruction sets"]
            return
        with pytest.raises(identity_conv.HostError, match=r"uses instructions that this processor lacks: avx512bw, "):
            compile_it()
        assert list(tmp_path.iterdir()) == []


def test_all_causes_in_one_answer_the_same_everywhere(packages: dict[str, Path], program: Path, tmp_path: Path) -> None:
    def all_of_them(manifest: dict[str, Any]) -> None:
        for change in (other_platform, newer_torch, more_instructions):
            change(manifest)

    package = with_manifest(packages["cpu"], tmp_path / "other.pt2", all_of_them)
    causes = fatal(package)
    assert len(causes) == 3
    sentence = f"{package}: {'; '.join(causes)}"
    with pytest.raises(identity_conv.PackageError) as caught:
        identity_conv.load_package(package)
    assert str(caught.value) == sentence
    done = subprocess.run([program, package, "--verify"], capture_output=True, text=True, check=False, env={})
    assert (done.returncode, done.stderr) == (1, f"identity-conv-run: {sentence}\n")
    command = run_python(*MODULE, "inspect", package, "--json")
    assert command.returncode == 1
    assert [e["text"] for e in json.loads(command.stdout)["findings"] if e["verdict"] == "fatal"] == causes


def test_a_device_that_this_torch_lacks(packages: dict[str, Path], tmp_path: Path) -> None:
    def change(records: Records) -> None:
        for name in [name for name in records if name.endswith("_metadata.json")]:
            records[name] = records[name].replace(b'"cpu"', b'"xpu"')
        sign(records)

    package = rewrite(packages["cpu"], tmp_path / "other.pt2", change)
    assert fatal(package) == ["was compiled for xpu, which this build of torch lacks"]


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        (b"libc10.so\0", b"libq10.so\0", "libidentity_conv_ops.so needs libq10.so, which isn't here"),
        (b"GLIBC_2.14\0", b"GLIBC_2.99\0", "needs GLIBC_2.99 of libc.so.6, and this one's latest is GLIBC_2."),
        (b"GLIBCXX_3.4.21\0", b"GLIBCXX_3.4.99\0", "needs GLIBCXX_3.4.99 of libstdc++.so.6, and this one's latest"),
        (b"\x7fELF", b"\x7fELG", "LIBRARY: it is no ELF file"),
    ],
)
def test_what_the_library_is_linked_against(
    packages: dict[str, Path], tmp_path: Path, before: bytes, after: bytes, sentence: str
) -> None:
    package = rewrite(packages["cpu"], tmp_path / "other.pt2", in_library(before, after))
    (text,) = fatal(package)
    assert sentence.replace("LIBRARY", LIBRARY) in text


def test_code_for_another_machine(packages: dict[str, Path], tmp_path: Path) -> None:
    def change(records: Records) -> None:
        data = bytearray(records[LIBRARY])
        data[18] = 0xB7  # e_machine: aarch64
        records[LIBRARY] = bytes(data)
        sign(records)

    package = rewrite(packages["cpu"], tmp_path / "other.pt2", change)
    assert any("libidentity_conv_ops.so is code for aarch64" in text for text in fatal(package))


def test_a_refusal_maps_nothing(packages: dict[str, Path], tmp_path: Path) -> None:
    package = with_manifest(packages["cpu"], tmp_path / "other.pt2", newer_torch)
    code = MARK_AS_COMMAND + (
        "import sys, torch, identity_conv\n"
        "identity_conv.inspect_package(sys.argv[1])\n"
        "try: identity_conv.load_package(sys.argv[1])\n"
        "except identity_conv.HostError: pass\n"
        "maps = open('/proc/self/maps').read()\n"
        "print('memfd' in maps, 'aotinductor' in maps, hasattr(torch.ops.my_ops, 'identity_conv_op'))\n"
    )
    assert run_python("-c", code, package).stdout == "False False False\n"


def test_inspect_prints_schemas_sizes_and_verdict(packages: dict[str, Path]) -> None:
    done = run_python(*MODULE, "inspect", packages["cpu"])
    assert done.returncode == 0, done.stderr
    for part in ("my_ops::identity_conv_op(Tensor x) -> Tensor", "my_ops::IdentityConvClass", "platform", "float32",
                 f"{packages['cpu'].stat().st_size:,}", "registration"):  # fmt: skip
        assert part in done.stdout


def test_inspect_of_what_is_no_package(tmp_path: Path) -> None:
    (tmp_path / "text.pt2").write_text("text")
    done = run_python(*MODULE, "inspect", tmp_path / "text.pt2", "--json")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1].endswith("text.pt2: is not a model package (not a zip archive)")


def test_every_kind_of_error_is_a_package_error() -> None:
    from identity_conv import errors

    kinds = {each.kind for each in errors.BY_KIND}
    assert len(kinds) == len(errors.BY_KIND)
    assert all(issubclass(each, identity_conv.PackageError) for each in errors.BY_KIND)
    with pytest.raises(identity_conv.PackageNotFoundError) as caught:
        identity_conv.load_package("gone.pt2")
    assert isinstance(caught.value, FileNotFoundError)


@pytest.mark.gpu
def test_gpu_code_for_another_generation(packages: dict[str, Path], tmp_path: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["host"]["cuda"] = ["sm_52"]

    (text,) = fatal(with_manifest(packages["cuda"], tmp_path / "other.pt2", change))
    major, minor = torch.cuda.get_device_capability()
    assert text == f"the model has GPU code for sm_52 alone, and this GPU is of compute capability {major}.{minor}"
