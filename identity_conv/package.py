"""From an exported program to `model.pt2`, and back to a callable."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from . import __version__, aotinductor, errors, loading, manifest, progress, targets, toolchain
from . import libraries as finding
from . import sample as samples
from .registry import Registrations


def compile_package(
    program: ExportedProgram,
    path: str | os.PathLike[str],
    *,
    libraries: Iterable[str | os.PathLike[str]] = (),
    sample: bool = True,
    inductor_configs: Mapping[str, Any] | None = None,
) -> Path:
    """Compiles `program` with AOTInductor into one file that carries the operator libraries it needs.

    The libraries are those of the operators and classes in the graph, and of the operators that the example
    reaches inside class methods. The program is run twice on its example inputs for that; the package is
    loaded and, where it carries the example, verified.

    Args:
        program: what :func:`identity_conv.export` returns.
        path: where the package goes; its name ends in ``.pt2``. An older file is replaced only by a
            finished one.
        libraries: more libraries to carry, by path: those that can't be found in this process.
        sample: whether the package carries the program's example inputs and outputs, for verify. Leave
            them out where the data must stay.
        inductor_configs: more settings of ``torch._inductor.config``, by name.

    Returns:
        `path`.

    Raises:
        TypeError: `program` isn't an ``ExportedProgram``.
        ValueError: `path` doesn't end in ``.pt2``; an input has a size or a layout that no manifest can tell
            (see :mod:`identity_conv.manifest`); an operator exists only in Python; or the library of one isn't
            found, or needs Python.
        FileNotFoundError: the folder of `path`, or one of `libraries`, isn't there.
        ToolchainError: the machine has no compiler that torch's headers accept.
        PackageError: what was compiled doesn't load here, or doesn't give the program's outputs.

    Example::

        >>> path = compile_package(export(IdentityModel(), (torch.randn(2, 3, 8, 8),)), "model.pt2")
    """
    target = Path(path)
    if not isinstance(program, ExportedProgram):
        raise TypeError(
            "compile_package: program must be an ExportedProgram (see identity_conv.export), "
            f"got {type(program).__name__}"
        )
    if target.suffix != ".pt2":
        raise ValueError(f"compile_package: path must end in .pt2, got {str(target)!r}")
    if not target.absolute().parent.is_dir():
        raise FileNotFoundError(f"compile_package: the folder of path isn't there: {target.absolute().parent}")
    if isinstance(libraries, str | os.PathLike):
        raise TypeError(f"compile_package: libraries must be a list of paths, got {libraries!r}")

    needed = finding.refuse_python_only(finding.named(program))
    described = manifest.describe(program)
    example = samples.run(program)
    if example:
        needed |= finding.refuse_python_only(example.names)
    runtime = _runtime()
    found = finding.find(needed, [Path(each) for each in libraries], runtime)
    configs = aotinductor.configs(inductor_configs)
    # The archive's inner folder has the file's name: the scratch file keeps it, in a folder of its own.
    with tempfile.TemporaryDirectory(prefix=f".{target.stem}-", dir=target.absolute().parent) as scratch:
        unfinished = Path(scratch) / target.name
        with manifest.without_warnings_of_specs():
            aotinductor.compile_program(program, unfinished, configs)
        records: dict[str, bytes] = {}
        described["libraries"] = []
        for library in found:
            record = f"{manifest.LIBRARIES}/{library.path.name}"
            if record in records:
                record = f"{manifest.LIBRARIES}/{library.sha256[:8]}-{library.path.name}"
            records[record] = finding.carried(library)
            described["libraries"].append(finding.describe(library, record, records[record]))
        if sample and example and example.repeatable:
            described["sample"], more = samples.describe(example)
            records |= more
        described |= {
            "host": manifest.describe_host(unfinished, configs),
            "torch": manifest.describe_torch(),
            "provenance": {"identity_conv": __version__, "compiler": str(toolchain.compiler())},
        }
        manifest.add(unfinished, described, records)
        if described["host"]["device"] == "cpu" or torch.cuda.is_available():
            package = runtime.Package.open(os.fspath(unfinished))
            if "sample" in described:
                package.verify()
            package.close()
        unfinished.replace(target)
    return target


@functools.cache
def _runtime() -> ModuleType:
    """The C++ runtime's Python module, built and imported once."""
    extension = targets.binding()
    spec = importlib.util.spec_from_file_location(extension.name, extension.build())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.set_errors(errors.BY_KIND)
    return module


#: What `load_package` takes for `cuda_graph`, as the binding has it.
_CUDA_GRAPH = {False: 0, True: 1, "reuse outputs": 2}


class Package:
    """A loaded `model.pt2`, called as the model was; it may be used in a ``with`` block.

    :func:`load_package` makes it, and says what its arguments are. An input that requires grad is run without
    grad; one with a forward-mode tangent is refused. Modes of the calling thread (fake tensors, autocast) take no
    part in a call. Calls from several threads are safe; a process that was forked opens a package of its own. On
    CUDA a call is queued on the current stream.

    Attributes:
        path: the file.

    Example::

        >>> with load_package("model.pt2") as package:
        ...     y = package(torch.randn(2, 3, 8, 8))
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        device: str | int | torch.device | None = None,
        num_runners: int = 1,
        cuda_graph: bool | Literal["reuse outputs"] = False,
        expected_sha256: str | None = None,
    ):
        if cuda_graph not in _CUDA_GRAPH:
            raise ValueError(f"load_package: cuda_graph must be False, True or 'reuse outputs', got {cuda_graph!r}")
        self.path = Path(path)
        where = None if device is None else str(torch.device(device))
        self._package = _runtime().Package.open(
            os.fspath(path), where, num_runners, _CUDA_GRAPH[cuda_graph], expected_sha256
        )
        manifest = json.loads(self._package.manifest or "{}")
        _adopt_libraries(manifest)
        for note in self._package.warnings:
            _say_once(f"{self.path.name}: {note}")
        in_spec, out_spec = self._package.call_spec
        self._in_spec = pytree.treespec_loads(in_spec)
        self._out_spec = pytree.treespec_loads(out_spec)
        # By the position among the flattened arguments: the name, and what it was compiled in as.
        self._constants = {position: (name, value) for position, name, value in manifest.get("constants", [])}
        names = iter(each["name"] for each in manifest.get("inputs", ()))
        self._names = [
            self._constants[position][0] if position in self._constants else next(names, f"argument {position}")
            for position in range(self._in_spec.num_leaves)
        ]
        self._numbers = manifest.get("number outputs", [])
        self._has_manifest = bool(manifest)
        self._run = self._package.run
        # How many tensors are all that a call takes; -1 where its structure is richer.
        count = len(self._in_spec.children()[0].children())
        plain = not self._constants and self._in_spec == pytree.tree_structure(((0,) * count, {}))
        self._plain = count if plain else -1
        self._one_output = not self._numbers and self._out_spec.is_leaf()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model on `args` and `kwargs`, structured as in the export; returns what it returned.

        Raises:
            TypeError: the arguments have another structure than the exported ones.
            ValueError: an argument that isn't a tensor has another value than in the export, where it
                was compiled in; or the package is closed.
            InputError: a tensor has another shape, dtype, device or layout than the package takes.
            ExecutionError: the inputs are right and the model failed.
        """
        if len(args) == self._plain and not kwargs:
            outputs = self._run(*args)
        else:
            outputs = self._run(*self._flatten(args, kwargs))
        return outputs[0] if self._one_output else self._unflatten(outputs)

    def _flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors of a call."""
        expected = self._in_spec.children()[1].context
        if set(kwargs) == set(expected):
            kwargs = {name: kwargs[name] for name in expected}
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != self._in_spec:
            try:
                # The same but for the order of a dict's keys.
                leaves = self._in_spec.flatten_up_to((args, kwargs))
            except ValueError:
                raise TypeError(self._other_structure(args, kwargs)) from None
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if self._has_manifest and (self._constants or len(tensors) != len(leaves)):
            self._check_constants(leaves)
        return tensors

    def _other_structure(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The sentence for arguments that aren't structured as in the export."""
        positional, keyword = pytree.tree_unflatten(map(_Word, self._names), self._in_spec)
        given = pytree.tree_map(lambda leaf: _Word(_short(leaf)), (args, kwargs))
        text = (
            f"{self.path.name}: arguments must be given as in the export, {_as_written(positional, keyword)}, "
            f"got {_as_written(*given)}"
        )
        by_position = [name for name in kwargs if name in map(repr, positional)]
        by_keyword = [name for name in keyword if name not in kwargs] if len(args) > len(positional) else []
        for names, how in ((by_position, "position"), (by_keyword, "keyword")):
            text += f"; give {', '.join(names)} by {how}" if names else ""
        return text

    def _unflatten(self, outputs: tuple[torch.Tensor, ...]) -> Any:
        """What the model returned, from its tensors."""
        leaves = [value.item() if i in self._numbers else value for i, value in enumerate(outputs)]
        return pytree.tree_unflatten(leaves, self._out_spec)

    @property
    def device(self) -> torch.device:
        """Where the model was loaded."""
        return torch.device(self._package.device)

    @property
    def cuda_graph_fallback(self) -> str:
        """Why calls run without the CUDA graph that was asked for; empty while none did."""
        return self._package.cuda_graph_fallback

    def constant_names(self) -> list[str]:
        """The names of the weights and buffers, as the model's state dict has them."""
        return self._package.constant_names

    def constants(self) -> dict[str, torch.Tensor]:
        """Copies of the weights and buffers by name, on the package's device."""
        return self._package.constants()

    def load_constants(self, constants: Mapping[str, torch.Tensor]) -> None:
        """Replaces the weights and buffers that `constants` names, all at once; the others stay.

        Other threads may call the package meanwhile: each call sees all of the old ones or all of the
        new ones.

        Args:
            constants: tensors of the old ones' sizes and dtypes, on any device; they are copied. The
                state dict of the model does, without what the export left out.

        Raises:
            InputError: a name isn't the package's, or a tensor has another dtype or other sizes; all
                the old ones are then as they were.
            TypeError: `constants` is no mapping, or a value isn't a tensor.
            ValueError: the package is closed.

        Example::

            >>> package = load_package("model.pt2")
            >>> package.load_constants({"native1.weight": torch.zeros(3, 3, 1, 1)})
        """
        if not isinstance(constants, Mapping):
            raise TypeError(f"load_constants: constants must be a mapping of names to tensors, got {_short(constants)}")
        self._package.load_constants(dict(constants))

    def close(self) -> None:
        """Unloads the model, after the calls under way; closing twice does nothing."""
        self._package.close()

    def __enter__(self) -> Package:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_constants(self, leaves: list[Any]) -> None:
        """Arguments that aren't tensors were compiled in: they must be what they were then."""
        for position, leaf in enumerate(leaves):
            name, value = self._constants.get(position, (self._names[position], None))
            if isinstance(leaf, torch.Tensor) != (value is None):
                raise TypeError(f"{self.path.name}: {name} must be {value or 'a tensor'}, got {_short(leaf)}")
            if value is not None and repr(leaf) != value:
                raise ValueError(f"{self.path.name}: {name} was compiled in as {value}, got {_short(leaf)}")

    def verify(self) -> str:
        """Runs the example that the package carries and compares the outputs with the recorded ones.

        Returns:
            A sentence that says what was compared.

        Raises:
            NoSampleError: the package carries none.
            VerificationError: an output differs by more than the manifest allows.
        """
        return self._package.verify()

    def __repr__(self) -> str:
        try:
            return f"Package({str(self.path)!r}, device={self._package.device!r})"
        except ValueError:
            return f"Package({str(self.path)!r}, closed)"

    def _repr_html_(self) -> str:
        from . import display, inspection

        try:
            text = self._package.manifest
            found = {"path": display.place(self.path), "manifest": json.loads(text or "null")}
            found |= {"device": self._package.device, "weights": self._package.constant_names}
        except ValueError:
            return display.page(display.heading(repr(self)))
        found |= manifest.sizes(self.path, text)
        return display.page(*(display.table(*section) for section in inspection.sections(found)))


def _short(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return "a tensor"
    text = repr(leaf)
    return text if len(text) <= 60 else f"{text[:57]}..."


class _Word:
    """What stands for an argument in a sentence."""

    def __init__(self, text: str):
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _as_written(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Arguments as one would write them: ``(x, {'a': y}, scale=scale)``."""
    return f"({', '.join([*map(repr, args), *(f'{name}={value!r}' for name, value in kwargs.items())])})"


def _adopt_libraries(manifest: Mapping[str, Any]) -> None:
    loaded = _runtime().loaded_libraries()
    for library in manifest.get("libraries", ()):
        if library["sha256"] in loaded:
            classes = frozenset(name.replace("::", ".", 1) for name in library["classes"])
            registrations = Registrations(
                dict(library["operators"]), classes, frozenset(library["owned"]), frozenset(library["namespaces"])
            )
            loading.adopt(library["record"].rpartition("/")[2], library["sha256"], registrations)


@functools.cache
def _say_once(note: str) -> None:
    progress.say(note)


def inspect_package(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of the package at `path`, the sizes of its records, and whether it can be loaded here.

    Nothing of it is mapped. ``identity-conv inspect`` prints it.

    Args:
        path: the file.

    Returns:
        "path", "bytes" and "sha256" of the file; "manifest", None for a package of stock torch; "records", the
        bytes of each; "findings", each with "check", "verdict" and "text"; and "verdict", the worst of these: "ok",
        "warning" or "fatal".

    Raises:
        PackageError: the file is no package, or one of an unknown format.

    Example::

        >>> inspect_package("model.pt2")["verdict"]
        'ok'
    """
    return json.loads(_runtime().Package.inspect(os.fspath(path)))


def load_package(
    path: str | os.PathLike[str],
    *,
    device: str | int | torch.device | None = None,
    num_runners: int = 1,
    cuda_graph: bool | Literal["reuse outputs"] = False,
    expected_sha256: str | None = None,
) -> Package:
    """Loads the package at `path`, and the operator libraries that it carries.

    Where this process has registered the same operators and classes, those are used. A package is native
    code: load only what you trust.

    Args:
        path: the file.
        device: where to load it, of the type that it was compiled for; by default the current device
            of that type.
        num_runners: how many calls from several threads may execute at once, 1 to 1024; a further one
            waits. The weights are shared.
        cuda_graph: capture the calls on a GPU and replay them. Each combination of input sizes has a
            graph, captured on its second call, for the first 16 that come back; where capture is
            illegal calls run without, with a warning that says why, and one is queued at a time.
            Results are copied out of the graph; with ``"reuse outputs"`` they are its own memory, which
            the next call with inputs of these sizes overwrites.
        expected_sha256: what the file's SHA-256 must be, in 64 hexadecimal digits.

    Raises:
        PackageNotFoundError: there is no file at `path` (a ``FileNotFoundError`` too).
        ValueError: `device` is of another type than the package, or another option is out of range.
        PackageError: the file is no package, is damaged, doesn't suit this machine or this torch, or needs
            operators that this process has registered otherwise; the subclass and its `kind` say which.

    Example::

        >>> package = load_package("model.pt2")
        >>> y = package(torch.randn(2, 3, 8, 8))
    """
    return Package(path, device=device, num_runners=num_runners, cuda_graph=cuda_graph, expected_sha256=expected_sha256)
