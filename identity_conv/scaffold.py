"""`identity-conv new`: a small project around one kernel, made from the files in `template`.

The template is the whole project, and compiles as it stands. Parts of it stand between lines such as ``// <cuda>``
and ``// </cuda>``, also ``<not cuda>``, in the comments of the file's language: each is kept or left out.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import keyword
import re
from collections.abc import Collection
from pathlib import Path

_TEMPLATE = Path(__file__).parent / "template"
_NAME, _CLASS = "my_kernel", "MyKernel"
#: The parts that can be asked for.
PARTS = ("class", "cuda", "backward")
_MARK = re.compile(r"^\s*(?://|#|<!--)\s*<(/?)((?:not )?\w+)>(?:\s*-->)?\s*$")
# C++'s own words beside Python's, namespaces that torch's headers have at the top, and macros that compilers define.
_CPPS = frozenset({
    "alignas", "alignof", "and_eq", "asm", "auto", "bitand", "bitor", "bool", "case", "catch", "char", "char16_t",
    "char32_t", "char8_t", "compl", "concept", "const", "const_cast", "consteval", "constexpr", "constinit",
    "co_await", "co_return", "co_yield", "decltype", "default", "delete", "do", "double", "dynamic_cast", "enum",
    "explicit", "export", "extern", "float", "friend", "goto", "inline", "int", "long", "mutable", "namespace",
    "new", "noexcept", "not_eq", "nullptr", "operator", "or_eq", "private", "protected", "public", "register",
    "reinterpret_cast", "requires", "short", "signed", "sizeof", "static", "static_assert", "static_cast", "struct",
    "switch", "template", "this", "thread_local", "throw", "true", "typedef", "typeid", "typename", "union",
    "unsigned", "using", "virtual", "void", "volatile", "wchar_t", "xor", "xor_eq", "at", "c10", "caffe2", "cub",
    "cuda", "identity_conv", "std", "thrust", "linux", "unix", "errno",
})  # fmt: skip
_OTHERS = {"reference", "test"}  # names in the project


def new(name: str, parts: Collection[str] = (), *, folder: Path | None = None) -> list[Path]:
    """Lays down a project that builds, and whose test passes.

    Args:
        name: of the operator, its namespace, its library, its module and its folder.
        parts: any of "class", "cuda" and "backward".
        folder: where the project's folder is made; the working folder by default.

    Returns:
        The files.

    Raises:
        ValueError: `name` can't be a name in Python, C++ and torch, or is taken.
        FileExistsError: the folder is there.
    """
    project = (folder or Path()).absolute() / name
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
        raise ValueError(f"new: NAME must be letters, digits and underscores, with a letter at first, got {name!r}")
    if project.exists():
        raise FileExistsError(f"new: NAME must be that of a folder that isn't there yet, and {project} is")
    _check_is_free(name)
    project.mkdir(parents=True)
    written = []
    for source in sorted(path for path in _TEMPLATE.iterdir() if path.is_file()):
        if source.suffix == ".cu" and "cuda" not in parts:
            continue
        text = _kept(source.read_text(), parts).replace(_NAME, name).replace(_CLASS, _class_name(name))
        written.append(project / source.name.replace(_NAME, name))
        written[-1].write_text(text)
    return written


def _check_is_free(name: str) -> None:
    if importlib.util.find_spec(name) is not None:
        raise ValueError(f"new: NAME must not be that of a module that Python finds already, got {name!r}")
    own = keyword.iskeyword(name) or keyword.issoftkeyword(name) or hasattr(builtins, name) or name in _CPPS | _OTHERS
    if own or name in _names_in_python():
        raise ValueError(f"new: NAME must not be a word with a meaning of its own here, got {name!r}")
    import torch

    from .libraries import TORCHS, TORCHS_CLASSES
    from .registry import attributes_of_namespaces, operators

    taken = {operator.split("::")[0] for operator in operators()} | TORCHS | TORCHS_CLASSES | {"my_ops"}
    if name in taken | {*dir(torch.ops)} | attributes_of_namespaces():
        raise ValueError(f"new: NAME must not be one that torch.ops or torch.classes has already, got {name!r}")


def _names_in_python() -> set[str]:
    """The names that the project's Python gives or uses, one of which the module would hide, or be hidden by."""
    found = {path.stem for path in _TEMPLATE.glob("*.py")}
    for path in _TEMPLATE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Name | ast.alias):
                found.add(node.id if isinstance(node, ast.Name) else node.asname or node.name)
    return found - {_NAME}


def _class_name(name: str) -> str:
    return "".join(word[:1].upper() + word[1:] for word in name.split("_"))


def _kept(text: str, parts: Collection[str]) -> str:
    """The text without marks, and without what stands between those of parts that weren't asked for."""
    lines: list[str] = []
    within: list[bool] = []
    for line in text.splitlines(keepends=True):
        if mark := _MARK.match(line):
            if mark[1]:
                within.pop()
            else:
                within.append((mark[2].removeprefix("not ") in parts) != mark[2].startswith("not "))
        elif all(within):
            lines.append(line)
    return re.sub(r"\n{4,}", "\n\n\n", "".join(lines)).rstrip("\n") + "\n"
