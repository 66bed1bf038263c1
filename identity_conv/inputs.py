"""The files that a build reads outside torch and the toolchain, as far as they can be told without a compiler.

They are sources; headers that are included by name, by a macro that stands for a name, or asked for by
``__has_include``; and files that flags name. What a compiler read beyond these is known after the build, by
what it wrote down (see `building`).
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

_INCLUDE = re.compile(
    rb'^[ \t]*#[ \t]*(?:include|include_next|import|embed)\b[ \t]*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE
)
# Which of them is reached, by an #include of the macro's name, only the preprocessor knows: each may be.
_NAMED_BY_MACRO = re.compile(rb'^[ \t]*#[ \t]*define[ \t]+\w+[ \t]+(?:"([^"\n]+)"|<([^>\n]+)>)', re.MULTILINE)
_ASKED_FOR = re.compile(rb'__has_(?:include|embed)(?:_next)?[ \t]*\([ \t]*(?:"([^"]+)"|<([^>]+)>)')
_ASSEMBLED = re.compile(rb'\.incbin\b[^"\n]*\\?"([^"\\\n]+)()')
_MENTIONS = (_INCLUDE, _NAMED_BY_MACRO, _ASKED_FOR, _ASSEMBLED)

#: Variables by which compilers and linkers are told of more folders.
_HEADER_PATHS = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")
_LIBRARY_PATH = "LIBRARY_PATH"

_HEADER_FOLDER = ("-I", "-isystem", "-iquote", "-idirafter", "--include-path=", "-system-include")
_DEPTH = 8  # of response files that name response files


class Inputs:
    """What the files of a build are, for sources, folders of headers, and flags."""

    def __init__(self, sources: Sequence[Path], include_dirs: Sequence[Path], flags: Sequence[str]):
        self._sources = sources
        self._words = list(_words(flags))
        self.header_folders = [*include_dirs, *self._options(_HEADER_FOLDER), *_folders(_HEADER_PATHS)]

    def files(self) -> dict[Path, str]:
        """Each file, with its name among what it was looked for in: a moved checkout leaves that the same."""
        waiting = [(source.name, source) for source in self._sources]
        waiting += [(f"flag {path.name}", path) for path in self._named_by_flags()]
        found: dict[Path, str] = {}
        while waiting:
            name, path = waiting.pop()
            if path in found:
                continue
            found[path] = name
            waiting += self._mentioned(path)
        return found

    def digests(self) -> dict[str, str]:
        """The SHA-256 of each file by its name; of several, where two folders have a file of that name."""
        found: dict[str, str] = {}
        for path, name in self.files().items():
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            found[f"source {name}"] = f"{found.get(f'source {name}', '')} {digest}".strip()
        return found

    def place(self, path: Path) -> str:
        """A name for `path` that stays right in a moved checkout: its folder's number and what follows."""
        for number, folder in enumerate(self._folders()):
            if path.is_relative_to(folder):
                return f"{number}/{path.relative_to(folder)}"
        return str(path)

    def located(self, place: str) -> Path:
        """The file that `place` names here."""
        number, _, rest = place.partition("/")
        folders = self._folders()
        return folders[int(number)] / rest if number.isdecimal() and int(number) < len(folders) else Path(place)

    def _folders(self) -> list[Path]:
        return [*dict.fromkeys(source.parent for source in self._sources), *self.header_folders]

    def is_ours(self, path: Path, toolchain: Iterable[Path]) -> bool:
        """Whether a file that a compiler read belongs to the project: given by it, or in no folder of the toolchain."""
        if any(path.is_relative_to(folder) for folder in self._folders()):
            return True
        return not any(path.is_relative_to(folder) for folder in toolchain)

    def _mentioned(self, path: Path) -> list[tuple[str, Path]]:
        if path.suffix in (".a", ".o", ".so"):
            return []
        text = path.read_bytes()
        found = []
        for pattern in _MENTIONS:
            for quoted, angled in pattern.findall(text):
                name = os.fsdecode(quoted or angled)
                folders = [path.parent, *self.header_folders] if quoted else self.header_folders
                if header := _first(folders, name):
                    found.append((name, header))
        return found

    def _named_by_flags(self) -> Iterator[Path]:
        """Files that a flag names, alone or behind a comma, an equals sign or a library's option."""
        libraries = [*self._options(("-L", "--library-path=")), *_folders([_LIBRARY_PATH])]
        for name in self._values(("-l", "--library=")):
            wanted = [name[1:]] if name.startswith(":") else [f"lib{name}.so", f"lib{name}.a"]
            yield from (folder / each for folder in libraries for each in wanted if (folder / each).is_file())
        places = [Path.cwd(), *self._folders(), *libraries]
        for word in self._words:
            for part in {word, *re.split("[=,]", word)}:
                text = part.strip("\"'<>\\").removeprefix("@")
                if found := _first(places, text) if text else None:
                    yield found

    def _options(self, options: tuple[str, ...]) -> list[Path]:
        return [Path(value).absolute() for value in self._values(options)]

    def _values(self, options: tuple[str, ...]) -> list[str]:
        """What follows an option, joined to it or as the next word."""
        found = []
        for word, following in itertools.pairwise([*self._words, ""]):
            option = next((each for each in options if word.startswith(each)), None)
            if option:
                found.append(word.removeprefix(option).removeprefix("=") or following)
        return [value for value in found if value]


def _words(flags: Iterable[str], depth: int = 0) -> Iterator[str]:
    """The words of flags as the shell, the driver and its linker see them; response files opened."""
    for flag in flags:
        try:
            words = shlex.split(flag)
        except ValueError:
            words = [flag]
        for word in words:
            if word.startswith("@") and depth < _DEPTH and os.path.isfile(word[1:]):
                yield word
                yield from _words([Path(word[1:]).read_text(errors="replace")], depth + 1)
            elif word.startswith("-Wl,"):
                yield from _words(word.split(",")[1:], depth + 1)
            elif word not in ("-Xlinker", "-Xcompiler", "-Xpreprocessor"):
                yield word


def _folders(variables: Iterable[str]) -> list[Path]:
    texts = (os.environ.get(variable, "") for variable in variables)
    return [Path(folder).absolute() for text in texts for folder in text.split(os.pathsep) if folder]


def _first(folders: Iterable[Path], name: str) -> Path | None:
    try:
        return next((folder / name for folder in folders if (folder / name).is_file()), None)
    except (OSError, ValueError):  # no name of a file
        return None
