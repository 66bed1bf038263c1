"""Extension with authors' own operators and classes: loaded once, replaced where they can be, never twice."""

from __future__ import annotations

import os
import re
import shutil
import textwrap
from pathlib import Path

import pytest
from support_build import TINY, run_python

FIXTURES = Path(__file__).parent / "extensions"


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all: each fixture compiles once."""
    return tmp_path_factory.mktemp("cache")


def run(script: str, cache: Path, *arguments: object):
    """Runs a script in a process of its own: what goes wrong here ends a process."""
    prologue = """
        import shutil, sys, threading
        from pathlib import Path
        import torch
        import _identity_conv_entry
        from identity_conv import BuildError, Extension
        fixtures, folder = Path(sys.argv[1]), Path(sys.argv[2])
        def edited(name, *changes):
            text = (fixtures / f"{name}.cpp").read_text()
            for old, new in changes:
                assert old in text
                text = text.replace(old, new)
            copy = folder / f"{name}.cpp"
            copy.write_text(text)
            return copy
        def refused(call):
            try:
                call()
            except BuildError as error:
                print(error)
            else:
                raise SystemExit("not refused")
        x = torch.arange(3.0)
    """
    code = textwrap.dedent(prologue) + textwrap.dedent(script)
    work = cache / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(mode=0o700)
    done = run_python("-c", code, FIXTURES, work, *map(str, arguments), IDENTITY_CONV_CACHE_DIR=cache)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_an_operator_with_optional_list_and_several_outputs(cache: Path) -> None:
    run(
        """
        ext = Extension("test_scale", [fixtures / "scale.cpp"]).load()
        assert ext.ops is torch.ops.test_scale
        assert ext.library.name == "libtest_scale.so"
        assert torch.equal(ext.ops.scale(x), 2 * x)
        assert torch.equal(ext.ops.scale(x, x), 3 * x)
        assert torch.equal(ext.ops.both(x)[1], x * x)
        assert torch.equal(ext.ops.each([x, x])[1], 2 * x)
        assert ext.explain().startswith("test_scale: built, ")
        """,
        cache,
    )


def test_the_wide_headers(cache: Path) -> None:
    run(
        """
        ext = Extension("test_wide", [fixtures / "wide.cpp"]).load()
        assert torch.equal(ext.ops.twice(x), 2 * x)
        # It would load where there is no Python, too.
        import subprocess
        undefined = subprocess.run(["nm", "-D", "--undefined-only", ext.library], capture_output=True, text=True).stdout
        assert "THPVariable" not in undefined and " Py" not in undefined and " _Py" not in undefined
        """,
        cache,
    )


def test_a_class_with_a_tensor(cache: Path) -> None:
    run(
        """
        ext = Extension("test_affine", [fixtures / "affine.cpp"]).load()
        affine = ext.classes.Affine(weight=x, shift=1)
        assert torch.equal(affine.forward(x), x * x + 1)
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.affine = affine
            def forward(self, x):
                return 2 * self.affine.forward(x)
        program = torch.export.export(Model(), (x,))
        assert "call_torchbind" in str(program.graph)
        assert torch.equal(program.module()(x), 2 * (x * x + 1))
        """,
        cache,
    )


def test_tracing_leaves_the_real_object_alone(cache: Path) -> None:
    run(
        """
        ext = Extension("test_affine", [fixtures / "affine.cpp"]).load()
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.affine = ext.classes.Affine(weight=x, shift=1)
            def forward(self, x):
                self.affine.move(5)
                return self.affine.forward(x)
        model = Model()
        torch.export.export(model, (x,))
        assert dict(model.affine.__obj_flatten__())["shift"] == 1
        assert torch.equal(model(x), x * x + 6)
        assert dict(model.affine.__obj_flatten__())["shift"] == 6
        """,
        cache,
    )


def test_a_fake_written_by_hand_wins_whenever_it_comes(cache: Path) -> None:
    run(
        """
        from torch._library.fake_class_registry import global_fake_class_registry, register_fake_class
        ext = Extension("test_affine", [fixtures / "affine.cpp"]).load()
        @register_fake_class("test_affine::Affine")
        class Mine:
            def __init__(self, weight, shift):
                self.weight, self.shift = weight, shift
            @classmethod
            def __obj_unflatten__(cls, flat):
                return cls(**dict(flat))
            def forward(self, x):
                return torch.empty_like(x)
        ext.load()
        assert global_fake_class_registry.get_impl("__torch__.torch.classes.test_affine.Affine") is Mine
        """,
        cache,
    )


def test_changed_sources_take_the_place_of_the_loaded_library(cache: Path) -> None:
    run(
        """
        first = Extension("test_scale", [fixtures / "scale.cpp"]).load()
        compiled = torch.compile(lambda t: torch.ops.test_scale.scale(t), backend="eager")
        with torch.no_grad():
            assert torch.equal(torch.ops.test_scale.scale(x), 2 * x)
        second = Extension("test_scale", [edited("scale", ("kFactor = 2.0", "kFactor = 5.0"))]).load()
        assert second.library != first.library
        assert torch.equal(torch.ops.test_scale.scale(x), 5 * x)
        assert torch.equal(second.ops.each([x])[0], 5 * x)
        third = Extension("test_scale", [fixtures / "scale.cpp"]).load()
        assert torch.equal(torch.ops.test_scale.scale(x), 2 * x)
        """,
        cache,
    )


def test_the_new_code_runs_under_an_older_compiled_function(cache: Path) -> None:
    run(
        """
        Extension("test_scale", [fixtures / "scale.cpp"]).load()
        compiled = torch.compile(lambda t: torch.ops.test_scale.scale(t) + 1, backend="aot_eager")
        torch.library.register_fake("test_scale::scale", lambda x, shift=None: torch.empty_like(x))
        assert torch.equal(compiled(x), 2 * x + 1)
        Extension("test_scale", [edited("scale", ("kFactor = 2.0", "kFactor = 5.0"))]).load()
        assert torch.equal(compiled(x), 5 * x + 1)
        """,
        cache,
    )


@pytest.mark.parametrize(
    ("name", "old", "new", "keeps"),
    [
        ("affine", "at::Scalar(shift_)", "at::Scalar(shift_ + 1)", "a custom class"),
        ("node", "y = at::clone(x)", "y = at::clone(at::clone(x))", "C++ autograd nodes"),
    ],
)
def test_a_library_that_cannot_leave_says_so(cache: Path, name: str, old: str, new: str, keeps: str) -> None:
    done = run(
        """
        name, *change = sys.argv[3:]
        Extension(f"test_{name}", [fixtures / f"{name}.cpp"]).load()
        refused(Extension(f"test_{name}", [edited(name, change)]).load)
        """,
        cache,
        name,
        old,
        new,
    )
    assert f"which has {keeps}: restart Python (in a notebook, the kernel)" in done.stdout
    assert done.stdout.count("\n") == 1


def test_the_same_content_twice_is_harmless(cache: Path) -> None:
    run(
        """
        first = Extension("test_scale", [fixtures / "scale.cpp"]).load()
        again = Extension("test_scale", [fixtures / ".." / "extensions" / "scale.cpp"]).load()
        moved = Extension("test_scale", [shutil.copy(fixtures / "scale.cpp", folder)]).load()
        assert first.library == again.library == moved.library
        from identity_conv import loading
        copy = Path(shutil.copy(first.library, folder / "libcopy.so"))
        assert loading.load(copy) == first.library
        """,
        cache,
    )


def test_a_second_registration_is_refused_by_name(cache: Path) -> None:
    done = run(
        """
        Extension("test_scale", [fixtures / "scale.cpp"]).build()
        torch.ops.load_library(str(Extension("test_scale", [fixtures / "scale.cpp"]).build()))  # behind our back
        refused(Extension("test_scale", [edited("scale", ("kFactor = 2.0", "kFactor = 5.0"))]).load)
        library = torch.library.Library("test_node", "DEF")
        library.define("copy(Tensor x) -> Tensor")
        refused(Extension("test_node", [fixtures / "node.cpp"]).load)
        """,
        cache,
    )
    assert "registers the operator test_scale::both" in done.stdout
    assert "registers the operator test_node::copy" in done.stdout


def test_threads_load_it_once(cache: Path) -> None:
    run(
        """
        Extension("test_scale", [fixtures / "scale.cpp"]).build()
        found = []
        def load():
            found.append(Extension("test_scale", [fixtures / "scale.cpp"]).load().library)
        threads = [threading.Thread(target=load) for _ in range(8)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert len(found) == 8 and len(set(found)) == 1
        assert torch.equal(torch.ops.test_scale.scale(x), 2 * x)
        """,
        cache,
    )


def test_what_changed_is_explained(cache: Path) -> None:
    done = run(
        """
        Extension("test_scale", [fixtures / "scale.cpp"]).build()
        changed = edited("scale", ("kFactor = 2.0", "kFactor = 7.0"))
        print(Extension("test_scale", [changed], cflags=["-g"]).explain())
        print(Extension("test_other", [changed]).explain())
        """,
        cache,
    )
    assert "test_scale: will be built, because\n  flags: " in done.stdout
    assert "\n  source scale.cpp: " in done.stdout
    assert "there is no finished build of test_other" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ({"sources": []}, ValueError, "sources must be a list of files, got []"),
        ({"sources": "a.cpp"}, ValueError, "sources must be a list of files, got 'a.cpp'"),
        ({"sources": ["gone.cpp"]}, FileNotFoundError, "gone.cpp is not there"),
        ({"name": "no-name"}, ValueError, "name must be an identifier of up to 200 letters, got 'no-name'"),
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments, error: type[Exception], sentence: str) -> None:
    from identity_conv import Extension

    with pytest.raises(error) as caught:
        Extension(**({"name": "tiny", "sources": [FIXTURES / "scale.cpp"]} | arguments))
    assert sentence in str(caught.value)


def test_two_sources_of_one_stem(tmp_path: Path) -> None:
    from identity_conv import Extension

    other = Path(shutil.copy(FIXTURES / "scale.cpp", tmp_path))
    with pytest.raises(ValueError, match="two sources have the stem 'scale'"):
        Extension("tiny", [FIXTURES / "scale.cpp", other])


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
def test_what_another_user_could_have_written_is_refused(cache: Path) -> None:
    done = run(
        """
        import os
        library = Extension("test_scale", [fixtures / "scale.cpp"]).build()
        for path in (library, library.parent):
            os.chown(path, 12345, -1)
            refused(Extension("test_scale", [fixtures / "scale.cpp"]).load)
            os.chown(path, 0, -1)
            path.chmod(0o777)
            refused(Extension("test_scale", [fixtures / "scale.cpp"]).load)
            path.chmod(0o700)
        os.chown(library, 65534, -1)  # the user nobody, who may well be somebody
        refused(Extension("test_scale", [fixtures / "scale.cpp"]).load)
        os.chown(library, 0, -1)
        # A link to the cache in another user's folder could be made to lead elsewhere.
        cache, theirs = os.environ["IDENTITY_CONV_CACHE_DIR"], folder / "theirs"
        theirs.mkdir()
        (theirs / "cache").symlink_to(cache)
        os.chown(theirs, 12346, -1)
        os.environ["IDENTITY_CONV_CACHE_DIR"] = str(theirs / "cache")
        refused(Extension("test_scale", [fixtures / "scale.cpp"]).load)
        os.environ["IDENTITY_CONV_CACHE_DIR"] = cache
        Extension("test_scale", [fixtures / "scale.cpp"]).load()
        """,
        cache,
    )
    assert done.stdout.count("belongs to user 12345") == 2
    assert "belongs to user nobody" in done.stdout
    assert "belongs to user 12346" in done.stdout
    assert done.stdout.count("may be written by other users") == 2


@pytest.mark.parametrize("damage", ["truncated", "one byte changed"])
def test_a_damaged_library_is_built_anew(cache: Path, damage: str) -> None:
    done = run(
        """
        library = Extension("test_scale", [fixtures / "scale.cpp"]).build()
        data = bytearray(library.read_bytes())
        if sys.argv[3] == "truncated":
            data = data[: len(data) // 2]
        else:
            data[len(data) // 2] ^= 1
        library.write_bytes(data)
        assert torch.equal(Extension("test_scale", [fixtures / "scale.cpp"]).load().ops.scale(x), 2 * x)
        """,
        cache,
        damage,
    )
    assert "isn't the file that was built: not used" in done.stderr
    assert "compiling libtest_scale.so" in done.stderr


def test_a_source_edited_while_it_is_compiled_is_compiled_again(cache: Path) -> None:
    run(
        """
        import os
        source = edited("scale", ("kFactor = 2.0", "kFactor = 3.0"))
        compiler = folder / "g++"
        # The first compilation finds the source edited since its digest was taken: once.
        edit = f"[ -e {folder}/once ] || {{ touch {folder}/once; sed -i 's/kFactor = 3.0/kFactor = 4.0/' {source}; }}"
        compiler.write_text(f'#!/bin/sh\\ncase "$*" in *" -c "*) {edit};; esac\\nexec g++ "$@"\\n')
        compiler.chmod(0o755)
        os.environ["CXX"] = str(compiler)
        assert torch.equal(Extension("test_scale", [source]).load().ops.scale(x), 4 * x)
        source.write_text(source.read_text().replace("4.0", "3.0"))
        assert torch.equal(Extension("test_scale", [source]).load().ops.scale(x), 3 * x)
        """,
        cache,
    )


ONE_OP = """
#include <ATen/core/Tensor.h>
#include <torch/library.h>
static int64_t f(const at::Tensor& t, int64_t a) { return a + 1; }
TORCH_LIBRARY(test_one, m) { m.def("foo(Tensor t, int a) -> int", &f); }
"""


def test_the_smallest_library_is_replaced_and_what_was_saved_follows(cache: Path) -> None:
    done = run(
        f"""
        source = folder / "one.cpp"
        source.write_text({ONE_OP!r})
        Extension("test_one", [source]).load()
        saved, packet = torch.ops.test_one.foo.default, torch.ops.test_one.foo
        assert torch.ops.test_one.foo(x, 1) == 2
        source.write_text(source.read_text().replace("a + 1", "a + 2"))
        Extension("test_one", [source]).load()
        assert torch.ops.test_one.foo(x, 1) == 3
        assert saved(x, 1) == packet(x, 1) == 3
        # Another extension with the same registrations is refused, and nothing is unloaded.
        source.write_text(source.read_text().replace("a + 2", "a + 3"))
        refused(Extension("test_other", [source]).load)
        assert torch.ops.test_one.foo(x, 1) == 3
        # What would end the process is an error.
        source.write_text(source.read_text().replace("-> int", "-> Tensor"))
        refused(Extension("test_wrong", [source]).load)
        """,
        cache,
    )
    assert "registers the operator test_one::foo, which this process has from " in done.stdout
    assert "libtest_wrong.so doesn't load: " in done.stdout


def test_a_kernel_that_disagrees_with_anothers_schema_is_an_error(cache: Path) -> None:
    done = run(
        f"""
        source, other = folder / "one.cpp", folder / "impl.cpp"
        source.write_text({ONE_OP!r})
        Extension("test_one", [source]).load()
        other.write_text(
            "#include <ATen/core/Tensor.h>\\n#include <torch/library.h>\\n"
            "static int64_t g(const at::Tensor& t) {{ return 0; }}\\n"
            'TORCH_LIBRARY_IMPL(test_one, Meta, m) {{ m.impl("foo", &g); }}\\n'
        )
        refused(Extension("test_impl", [other]).load)
        assert torch.ops.test_one.foo(x, 1) == 2
        """,
        cache,
    )
    assert "libtest_impl.so doesn't load: " in done.stdout


WITH_IMPL = """
#include <torch/library.h>
static int64_t f() { return 1; }
TORCH_LIBRARY(test_typo, m) { m.def("count() -> int"); }
TORCH_LIBRARY_IMPL(test_typo, CompositeExplicitAutograd, m) { m.impl("KERNEL", &f); }
"""


def test_a_kernel_of_a_name_without_schema_is_an_error(cache: Path) -> None:
    done = run(
        f"""
        source, text = folder / "typo.cpp", {WITH_IMPL!r}
        source.write_text(text.replace("KERNEL", "cuont"))
        extension = Extension("typo", [source], cflags=["-O0"])
        refused(extension.load)
        # Nothing of it is in this process: corrected, it loads.
        source.write_text(text.replace("KERNEL", "count"))
        assert extension.load().ops.count() == 1
        # Nor does the loaded one lend its schema to the one that takes its place.
        source.write_text(text.replace("count()", "sum()").replace("KERNEL", "count"))
        refused(extension.load)
        assert torch.ops.test_typo.count() == 1
        """,
        cache,
    )
    misspelt, left = done.stdout.splitlines()
    define = "which has no schema: define it (m.def)"
    assert misspelt.endswith(f"libtypo.so has a kernel for test_typo::cuont, {define}, or is test_typo::count meant?")
    assert left.endswith(f"libtypo.so has a kernel for test_typo::count, {define}")


GRADIENT = """
#include <ATen/ops/clone.h>
#include <identity_conv/autograd.h>
static at::Tensor copy(const at::Tensor& x) { return at::clone(x); }
struct Gradient {
  static constexpr auto kOperator = "test_said::OPERATOR";
  using Signature = at::Tensor(const at::Tensor&);
  static at::Tensor backward(const at::Tensor& grad) { return grad; }
};
TORCH_LIBRARY_IMPL(test_said, Autograd, m) {
  m.impl("copy", identity_conv::differentiable<Gradient>());
}
TORCH_LIBRARY(test_said, m) {
  m.def("copy(Tensor x) -> Tensor", torch::dispatch(c10::DispatchKey::CPU, &copy));
  m.def("other(Tensor x) -> Tensor", torch::dispatch(c10::DispatchKey::CPU, &copy));
}
"""


def test_a_gradient_of_another_operator_than_it_says_is_refused(cache: Path) -> None:
    done = run(
        f"""
        source = folder / "said.cpp"
        def extension(operator):
            source.write_text({GRADIENT!r}.replace("OPERATOR", operator))
            return Extension("said", [source], cflags=["-O0"])
        for wrong in ("cpoy", "other"):
            refused(extension(wrong).load)
            refused(extension(wrong).load)  # as it is remembered, too
        # Nothing of them is in this process: corrected, it loads. Where the kernel stands is said as ever.
        assert torch.equal(extension("copy").load().ops.copy(x), x)
        assert f"registered at {{source}}:11, " in torch._C._dispatch_dump("test_said::copy")
        """,
        cache,
    )
    for line, said in zip(done.stdout.splitlines(), ("cpoy", "cpoy", "other", "other"), strict=True):
        where, _, what = line.partition(" for test_said::copy ")
        assert re.search(r"libsaid\.so doesn't fit: the gradient registered at \S+/said\.cpp:11$", where)
        assert what == f"has the kOperator test_said::{said}"


LIKE = """
#include <identity_conv/output_like.h>
static at::Tensor scale(const at::Tensor& x, const at::Tensor& weight, double) { return x; }
static int64_t size(const at::Tensor& x) { return x.dim(); }
TORCH_LIBRARY_IMPL(test_like, Meta, m) { identity_conv::output_like(m, "scale", "weight"); }
TORCH_LIBRARY(test_like, m) {
  m.def("scale(Tensor x, Tensor weight, float factor) -> Tensor", torch::dispatch(c10::DispatchKey::CPU, &scale));
  m.def("size(Tensor x) -> int", torch::dispatch(c10::DispatchKey::CPU, &size));
}
"""


def test_an_output_like_what_is_no_argument_is_refused(cache: Path) -> None:
    done = run(
        f"""
        source = folder / "like.cpp"
        def extension(call):
            source.write_text({LIKE!r}.replace('"scale", "weight"', call))
            return Extension("like", [source], cflags=["-O0"])
        for wrong in ('"scale", "wieght"', '"scale", "factor"', '"size", "x"'):
            refused(extension(wrong).load)
        assert extension('"scale", "weight"').load().ops.scale(x.to("meta"), x[:2].to("meta"), 1.0).shape == (2,)
        assert f"registered at {{source}}:5, " in torch._C._dispatch_dump("test_like::scale")
        """,
        cache,
    )
    said = [
        re.sub(r"^.*liblike\.so doesn't fit: output_like registered at \S+/like\.cpp:5 for test_like::", "", line)
        for line in done.stdout.splitlines()
    ]
    there = "scale: argument must be one of its tensors, x, weight; got"
    assert said[:2] == [f"{there} 'wieght', or is weight meant?", f"{there} 'factor'"]
    assert said[2].startswith("size: only an operator that returns one tensor has an output like an argument")


def test_an_output_may_be_like_an_argument_of_anothers_schema(cache: Path) -> None:
    done = run(
        """
        def extension(name, text):
            source = folder / f"{name}.cpp"
            source.write_text(f"#include <identity_conv/output_like.h>\\n{text}")
            return Extension(name, [source], cflags=["-O0"])
        like = 'TORCH_LIBRARY_IMPL(test_schema, Meta, m) { identity_conv::output_like(m, "f", "ARGUMENT"); }'
        extension("unknown", like.replace("test_schema", "test_nowhere")).load()
        extension("schema", 'TORCH_LIBRARY(test_schema, m) { m.def("f(Tensor? x) -> Tensor"); }').load()
        refused(extension("like", like.replace("ARGUMENT", "y")).load)
        extension("like", like.replace("ARGUMENT", "x")).load()
        assert torch.ops.test_schema.f(x.to("meta")).is_meta
        """,
        cache,
    )
    sentence = r"like\.cpp:2 for test_schema::f: argument must be one of its tensors, x; got 'y'\n"
    assert re.search(rf"liblike\.so doesn't fit: output_like registered at \S+/{sentence}", done.stdout)


HIDDEN = """
#include <torch/custom_class.h>
#include <torch/library.h>
struct Kept : torch::CustomClassHolder { int64_t one() { return 1; } };
static int64_t f() { return 1; }
"""


def test_names_that_torch_has_for_itself_are_refused(cache: Path) -> None:
    done = run(
        f"""
        def extension(space, registered):
            source = folder / "hidden.cpp"
            source.write_text({HIDDEN!r} + f"TORCH_LIBRARY({{space}}, m) {{{{ {{registered}} }}}}")
            return Extension("hidden", [source], cflags=["-O0"])
        for space, operator in (
            ("test_hidden", "name"), ("test_hidden", "__doc__"), ("test_hidden", "__origin__"),
            ("test_hidden", "f.overloads"), ("load_library", "f"),
        ):
            refused(extension(space, f'm.def("{{operator}}() -> int", &f);').load)
        of_class = 'm.class_<Kept>("NAME").def("one", &Kept::one);'
        refused(extension("test_hidden", of_class.replace("NAME", "name")).load)
        # Nothing of them is in this process, and no other name is refused.
        import warnings
        warnings.simplefilter("ignore")  # the class has no __obj_flatten__
        right = extension("test_hidden", of_class.replace("NAME", "Kept") + 'm.def("names.name() -> int", &f);').load()
        assert right.classes.Kept and right.ops.names.name() == 1
        """,
        cache,
    )
    refused = [line.partition(" registers the ")[2] for line in done.stdout.splitlines()]
    starts = [
        "operator test_hidden::name, which can't be reached, since torch.ops has something of its own by that name: "
        "an operator can't be called _dir, name, or as Python's own attributes are (__doc__)",
        "operator test_hidden::__doc__, which",
        "operator test_hidden::__origin__, which",
        "operator test_hidden::f.overloads, which",
        "operator load_library::f, which",
        "class test_hidden::name, which can't be reached, since torch.classes has something of its own by that name: "
        "a class can't be called name, or as Python's own attributes are (__doc__)",
    ]
    assert [line[: len(start)] for line, start in zip(refused, starts, strict=True)] == starts


def test_a_package_may_bring_names_that_python_can_not_reach(cache: Path) -> None:
    run(
        f"""
        from identity_conv import cache, loading, rehearsal
        source = folder / "brought.cpp"
        source.write_text({HIDDEN!r} + '''
            static int64_t dim(const at::Tensor& x) {{ return x.dim(); }}
            TORCH_LIBRARY(test_brought, m) {{
              m.def("name() -> int", &f);
              m.def("dim(Tensor x) -> int", &dim);
              m.class_<Kept>("name").def("one", &Kept::one);
            }}
        ''')
        library = Extension("brought", [source], cflags=["-O0"]).build()
        digest = cache.file_digest(library)
        torch.ops.load_library(str(library))  # as the runtime does, which knows nothing of Python
        loading.adopt(library.name, digest, rehearsal.rehearse(library, digest, ()).registrations)
        rules = torch._library.simple_registry.singleton.find("test_brought::dim").torch_dispatch_rules
        assert rules.find(torch._subclasses.FakeTensorMode) is not None
        """,
        cache,
    )


def test_a_kernel_may_wait_for_a_schema_from_elsewhere(cache: Path) -> None:
    done = run(
        """
        source = folder / "waits.cpp"
        source.write_text('''
            #include <torch/library.h>
            static int64_t f() { return 1; }
            TORCH_LIBRARY_IMPL(test_elsewhere, CompositeExplicitAutograd, m) { m.impl("f", &f); }
        ''')
        Extension("waits", [source], cflags=["-O0"]).load()
        torch.library.define("test_elsewhere::f", "() -> int")
        assert torch.ops.test_elsewhere.f() == 1
        """,
        cache,
    )
    note = "libwaits.so has a kernel for test_elsewhere::f, which can't be called before its schema is defined\n"
    assert note in done.stderr


TINY_OP = (
    "#include <torch/library.h>\nstatic int64_t f() {{ return {value}; }}\nTORCH_LIBRARY({space}, m) {{ {more} }}\n"
)
DEFINES_F = 'm.def("f() -> int", &f);'


def test_an_edit_may_add_change_and_remove_operators(cache: Path) -> None:
    done = run(
        """
        source = folder / "edited.cpp"
        def load(functions, registered):
            library = f"TORCH_LIBRARY(test_edit, m) {{ {registered} }}"
            source.write_text(f"#include <torch/library.h>\\n{functions}\\n{library}")
            return Extension("edited", [source], cflags=["-O0"]).load().ops
        f, g = "static int64_t f() { return 1; }", "static double g(double a, int64_t b) { return a + b; }"
        assert load(f, 'm.def("f() -> int", &f);').f() == 1
        first = torch.ops.test_edit.f.default
        ops = load(f + g, 'm.def("f() -> int", &f); m.def("g(float a, int b) -> float", &g);')
        assert (ops.f(), first(), ops.g(0.5, 2)) == (1, 1, 2.5)
        saved = torch.ops.test_edit.f.default
        # Another signature: what was saved of the old one says so.
        changed = load("static double f(double a) { return 2 * a; }", 'm.def("f(float a) -> float", &f);')
        assert changed.f(2.5) == 5.0
        assert not hasattr(changed, "g")
        for old in (saved, first):
            try:
                old()
            except RuntimeError as error:
                print(error)
        assert load(f, 'm.def("f() -> int", &f);').f() == 1
        """,
        cache,
    )
    assert done.stdout.count("this operator has been replaced") == 2


def test_extensions_of_one_name_that_register_other_things_stay_side_by_side(cache: Path) -> None:
    run(
        f"""
        def load(space, value):
            source = folder / space / "kernels.cpp"
            source.parent.mkdir(exist_ok=True)
            source.write_text({TINY_OP!r}.format(space=space, value=value, more={DEFINES_F!r}))
            return Extension("kernels", [source], cflags=["-O0"]).load()
        one, other = load("test_one", 1), load("test_other", 2)
        assert (one.ops.f(), other.ops.f()) == (1, 2)
        assert (load("test_one", 3).ops.f(), other.ops.f()) == (3, 2)
        """,
        cache,
    )


def test_a_header_that_the_key_does_not_know_is_edited(cache: Path) -> None:
    run(
        f"""
        source, header = folder / "edited.cpp", folder / "value.h"
        text = "#define QUOTED(n) #n\\n#define HEADER(n) QUOTED(n)\\n#include HEADER(value.h)\\n"
        source.write_text(text + {TINY_OP!r}.format(space="test_edit", value="VALUE", more={DEFINES_F!r}))
        for value in (1, 2):
            header.write_text(f"#define VALUE {{value}}\\n")
            assert Extension("edited", [source], cflags=["-O0"]).load().ops.f() == value
        """,
        cache,
    )


def test_memory_that_outlives_its_library(cache: Path) -> None:
    run(
        """
        source = folder / "lent.cpp"
        source.write_text('''
            #include <ATen/ops/from_blob.h>
            #include <torch/library.h>
            static at::Tensor lend() {
              float* memory = new float[16]();
              return at::from_blob(memory, {16}, [](void* p) { delete[] static_cast<float*>(p); });
            }
            TORCH_LIBRARY(test_lend, m) { m.def("lend() -> Tensor", &lend); }
        ''')
        kept = Extension("lent", [source]).load().ops.lend()
        source.write_text(source.read_text().replace("16", "8"))
        assert Extension("lent", [source]).load().ops.lend().numel() == 8
        assert kept.sum() == 0
        del kept  # its deleter is code of the library that has left
        """,
        cache,
    )


def test_a_library_beside_those_that_it_needs_or_contradicts(cache: Path) -> None:
    done = run(
        """
        def extension(name, text):
            source = folder / f"{name}.cpp"
            source.write_text("#include <torch/custom_class.h>\\n#include <torch/library.h>\\n" + text)
            return Extension(name, [source], cflags=["-O0"])
        owner = "struct State : torch::CustomClassHolder {};\\n"
        extension("owner", owner + '''
            static c10::intrusive_ptr<State> make() { return c10::make_intrusive<State>(); }
            TORCH_LIBRARY(test_owner, m) { m.class_<State>("State"); m.def("make", &make); }
        ''').load()
        user = extension("user", '''
            TORCH_LIBRARY(test_user, m) { m.def("take(__torch__.torch.classes.test_owner.State s) -> int"); }
        ''').load()
        assert "State" in str(user.ops.take.default._schema)
        refused(extension("empty", "TORCH_LIBRARY(test_owner, m) {}").load)
        torch.library.define("test_python::f", "(Tensor x) -> Tensor")
        refused(extension("wrong", '''
            static int64_t f(int64_t a) { return a; }
            TORCH_LIBRARY_IMPL(test_python, CPU, m) { m.impl("f", &f); }
        ''').load)
        fallback = "TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }"
        extension("fallback", fallback).load()
        refused(extension("second", fallback).load)
        # A class without a method is one too.
        source = folder / "owner.cpp"
        source.write_text(source.read_text().replace('m.def("make", &make);', 'm.def("make2", &make);'))
        refused(Extension("owner", [source], cflags=["-O0"]).load)
        """,
        cache,
    )
    assert "libempty.so registers the namespace test_owner, which this process has from" in done.stdout
    assert "libwrong.so doesn't load: Inferred operator schema" in done.stdout
    assert "libsecond.so doesn't load: Tried to register multiple backend fallbacks" in done.stdout
    assert "libowner.so has changed and can't take the place of the loaded one, which has a custom class" in done.stdout


@pytest.mark.parametrize(
    ("constructor", "refused"),
    [
        ('A() { puts("hello"); } ~A() { puts("bye"); }', ""),
        ("~A() { abort(); }", ""),
        ('A() { ssize_t n = write(2, "\\\\xf6\\\\n", 2); (void)n; }', ""),
        ("A() { if (!fork()) { sleep(2); _exit(0); } }", ""),
        ("A() { exit(0); }", "doesn't load: it ends the process"),
        ('A() { throw std::runtime_error("no device"); }', "doesn't load: no device"),
        ("A() { for (;;) sleep(1); }", "doesn't load: loading it takes more than 20 s"),
    ],
    ids=["prints", "aborts at exit", "writes no UTF-8", "forks", "exits", "throws", "hangs"],
)
def test_a_library_that_does_more_than_register(cache: Path, constructor: str, refused: str) -> None:
    done = run(
        f"""
        import ctypes, os
        from identity_conv import rehearsal
        rehearsal.TIMEOUT_S = 20
        (folder / "random.py").write_text("raise RuntimeError('not this one')")
        os.chdir(folder)  # a module there is none of the rehearsal's
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        source = folder / "acts.cpp"
        source.write_text('''
            #include <cstdio>
            #include <cstdlib>
            #include <stdexcept>
            #include <unistd.h>
            struct A {{ {constructor} }} a;
        ''' + {TINY!r})
        load = Extension("acts", [source]).load
        if {refused!r}:
            refused(load)
        else:
            assert ctypes.CDLL(str(load().library)).answer() == 42
        sys.stdout.flush()
        os._exit(0)
        """,
        cache,
    )
    assert refused in done.stdout


def test_what_torch_has_loaded_itself(cache: Path) -> None:
    run(
        f"""
        source = folder / "tiny.cpp"
        source.write_text({TINY_OP!r}.format(space="test_own", value=1, more={DEFINES_F!r}))
        torch.ops.load_library(str(Extension("tiny", [source]).build()))
        assert Extension("tiny", [source]).load().ops.f() == 1
        """,
        cache,
    )


def test_a_damaged_record_is_made_again(cache: Path) -> None:
    run(
        f"""
        import subprocess
        source = folder / "tiny.cpp"
        source.write_text({TINY!r})
        library = Extension("tiny", [source]).load().library
        code = "import _identity_conv_entry; from identity_conv import Extension as E; "
        code += f"E('tiny', [{{str(source)!r}}]).load()"
        for damage in ("", "{{}}", "[]", '"a"', '{{"registrations": {{}}, "rivals": [], "error": ""}}'):
            for record in [*library.parent.glob("*.so.*.json"), library.parent / "finished.json",
                           library.parent.parent.parent.parent / "compilers.json"]:
                record.write_text(damage)
            subprocess.run([sys.executable, "-c", code], check=True)
        """,
        cache,
    )


@pytest.mark.night
def test_two_classes_of_one_cpp_name_are_refused_by_both_names(cache: Path) -> None:
    code = '''
        source = """
            #include <torch/custom_class.h>
            #include <torch/library.h>
            struct Same : torch::CustomClassHolder { int64_t one() { return 1; } };
            TORCH_LIBRARY(same_NAME, m) { m.class_<Same>("Same").def("one", &Same::one); }
        """
        for name in ("a", "b"):
            (folder / f"same_{name}.cpp").write_text(source.replace("NAME", name))
        Extension("same_a", [folder / "same_a.cpp"]).load()
        refused(Extension("same_b", [folder / "same_b.cpp"]).load)
    '''
    done = run(code, cache)
    assert "its class same_b::Same has the C++ name of the loaded same_a::Same" in done.stdout, done.stderr
    assert "put it in an unnamed namespace" in done.stdout
