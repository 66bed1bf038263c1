"""`identity-conv build --prefix`: an installation that import uses as it is, or refuses by name."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from support_build import MODULE, NO_COMPILER, ROOT, TINY, environment, listing, run_python

from identity_conv import BuildError, Extension, ops
from identity_conv.installation import RECORD, Built, install

HEADERS = sorted(path.name for path in (ROOT / "src" / "include" / "identity_conv").glob("*.h"))


@pytest.fixture(scope="module")
def laid_down(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `identity-conv build --prefix` makes; the builds themselves are those of the other tests."""
    folder = tmp_path_factory.mktemp("installation") / "prefix"
    done = run_python(*MODULE, "build", "--prefix", folder)
    assert done.returncode == 0, done.stderr
    assert {Path(line) for line in done.stdout.splitlines()} == {folder / name for name in listing(folder)}
    return folder


@pytest.fixture
def installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation of the operator library alone, which this process is told to use."""
    folder = tmp_path / "prefix"
    assert ops.extension.library is not None
    install(folder, [Built("library", ops.extension.library, ops.targets.operators().sources_digest())])
    monkeypatch.setenv("IDENTITY_CONV_PREFIX", str(folder))
    monkeypatch.setenv("IDENTITY_CONV_CACHE_DIR", str(tmp_path / "cache"))
    return folder


def change_record(folder: Path, **changes: object) -> None:
    record = folder / RECORD
    record.write_text(json.dumps({**json.loads(record.read_text()), **changes}))


class TestLaidDown:
    def test_holds_program_libraries_and_headers(self, laid_down: Path) -> None:
        assert set(listing(laid_down)) == {
            "bin/identity-conv-run",
            "lib/libidentity_conv_ops.so",
            "lib/identity_conv/identity_conv_runtime.so",
            "lib/identity_conv/prefix.json",
            *(f"include/identity_conv/{name}" for name in HEADERS),
        }

    def test_import_and_load_package_use_it_and_never_compile(self, laid_down: Path, tmp_path: Path) -> None:
        before = listing(laid_down)
        done = run_python(
            "-c",
            "import identity_conv, torch\n"
            "from identity_conv import ops\n"
            "assert torch.equal(identity_conv.identity_conv(torch.arange(3)), torch.arange(3))\n"
            "print(ops.extension.library)\n"
            "try:\n    identity_conv.load_package('gone.pt2')\nexcept FileNotFoundError as error:\n    print(error)\n",
            IDENTITY_CONV_PREFIX=laid_down,
            IDENTITY_CONV_CACHE_DIR=tmp_path / "cache",
            **NO_COMPILER,
        )
        assert (done.returncode, done.stderr) == (0, "")
        library, missing = done.stdout.splitlines()
        assert library == str(laid_down / "lib" / "libidentity_conv_ops.so")
        assert "gone.pt2" in missing
        assert not (tmp_path / "cache").exists()
        assert listing(laid_down) == before

    def test_the_program_needs_no_environment(self, laid_down: Path) -> None:
        program = laid_down / "bin" / "identity-conv-run"
        done = subprocess.run([program, "--help"], env={}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "identity-conv-run" in done.stdout

    def test_is_built_whatever_prefix_is_in_use(self, laid_down: Path, tmp_path: Path) -> None:
        done = run_python(*MODULE, "build", "--prefix", tmp_path / "new", IDENTITY_CONV_PREFIX=tmp_path / "old")
        assert done.returncode == 0, done.stderr
        assert set(listing(tmp_path / "new")) == set(listing(laid_down))

    def test_a_folder_that_can_not_be_written(self, laid_down: Path, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        done = run_python(*MODULE, "build", "--prefix", tmp_path / "file" / "prefix")
        assert done.returncode == 1
        assert done.stderr.startswith("identity-conv: ")
        assert str(tmp_path / "file") in done.stderr
        assert done.stderr.count("\n") == 1


class TestUse:
    def test_finds_the_library_there(self, installation: Path) -> None:
        assert ops.extension.build() == installation / "lib" / "libidentity_conv_ops.so"

    def test_what_it_lacks_of_a_user_is_built_as_ever(self, installation: Path, tmp_path: Path) -> None:
        (tmp_path / "tiny.cpp").write_text(TINY)
        assert Extension("tiny", [tmp_path / "tiny.cpp"]).build().is_relative_to(tmp_path / "cache")

    def test_what_it_has_of_a_user_is_used_and_never_compiled(self, tmp_path: Path) -> None:
        source = tmp_path / "tiny.cpp"
        source.write_text(TINY)
        (tmp_path / "authors.py").write_text(
            f"from identity_conv import Extension\next = Extension('tiny', [{str(source)!r}])\n"
        )
        prefix = tmp_path / "prefix"
        path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), environment({})["PYTHONPATH"]])}
        done = run_python(*MODULE, "build", "--prefix", prefix, "authors:ext", **path)
        assert done.returncode == 0, done.stderr
        code = "import authors; print(authors.ext.build())"
        use = {**path, **NO_COMPILER, "IDENTITY_CONV_PREFIX": prefix, "IDENTITY_CONV_CACHE_DIR": tmp_path / "cache"}
        done = run_python("-c", code, **use)
        assert done.stdout == f"{prefix / 'lib' / 'libtiny.so'}\n", done.stderr
        source.write_text(f"{TINY}// edited\n")
        assert "that was made from other sources than those here" in run_python("-c", code, **use).stderr

    def test_a_new_one_leaves_the_old_library_to_who_has_it_open(self, installation: Path, tmp_path: Path) -> None:
        library = installation / "lib" / "libidentity_conv_ops.so"
        with library.open("rb") as opened:
            before = opened.read()
            new = tmp_path / "new" / library.name
            new.parent.mkdir()
            new.write_bytes(b"new")
            install(installation, [Built("library", new, "sources")])
            opened.seek(0)
            assert opened.read() == before
        assert library.read_bytes() == b"new"


class TestRefusal:
    def test_made_from_other_sources(self, installation: Path) -> None:
        change_record(installation, sources={"libidentity_conv_ops.so": "another"})
        with pytest.raises(BuildError, match=r"has a libidentity_conv_ops\.so that was made from other sources"):
            ops.extension.build()

    @pytest.mark.parametrize("fact", ["torch", "torch git", "C++11 ABI", "platform", "Python"])
    def test_made_for_another(self, installation: Path, fact: str) -> None:
        change_record(installation, **{fact: "another"})
        with pytest.raises(BuildError) as refused:
            ops.extension.build()
        assert f"IDENTITY_CONV_PREFIX={installation} was made for {fact} another, and this is {fact} " in str(
            refused.value
        )
        assert f"identity-conv build --prefix {installation}" in str(refused.value)

    def test_import_fails_with_the_reason(self, installation: Path) -> None:
        change_record(installation, torch="1.0")
        code = "try:\n    import identity_conv\nexcept ImportError as error:\n    print(error)"
        done = run_python("-c", code, IDENTITY_CONV_PREFIX=installation)
        assert "was made for torch 1.0, and this is torch 2." in done.stdout

    def test_no_installation(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("IDENTITY_CONV_PREFIX", str(tmp_path))
        with pytest.raises(BuildError, match=f"IDENTITY_CONV_PREFIX={tmp_path} holds no installation"):
            ops.extension.build()

    @pytest.mark.parametrize("text", ["", "{}", "[]", "\udcff"])
    def test_a_damaged_record(self, installation: Path, text: str) -> None:
        (installation / RECORD).write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(BuildError, match=r"damaged record lib/identity_conv/prefix\.json"):
            ops.extension.build()

    def test_one_whose_making_was_interrupted(self, installation: Path, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            install(installation, [Built("library", tmp_path / "gone.so", "sources")])
        with pytest.raises(BuildError, match="holds no installation"):
            ops.extension.build()

    def test_a_library_that_is_gone(self, installation: Path) -> None:
        (installation / "lib" / "libidentity_conv_ops.so").unlink()
        with pytest.raises(BuildError, match=r"has no libidentity_conv_ops\.so: lay it down with"):
            ops.extension.build()
