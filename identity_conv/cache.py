"""The folders that builds live in: one a key, used only with the stamp of a finished build.

::

    <cache>/builds/<name>/<key>/    the sources' objects, and what they were linked to
                        key.json        what the key is a digest of, part by part
                        finished.json   the stamp: the file's digest
                        build.log       the output of a build that failed
    <cache>/builds/<name>/<key>.lock    held by the process that builds
"""

from __future__ import annotations

import grp
import hashlib
import json
import os
import pwd
import re
import shutil
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import settings
from .toolchain import BuildError

#: Raised with each change to what a folder holds.
FORMAT = "2"

KEY, STAMP, LOG = "key.json", "finished.json", "build.log"

#: Parts of the key that only a machine with compilers can tell.
COMPILER_PARTS = ("C++ compiler", "nvcc", "nvcc's host compiler")

LOCK_TIMEOUT_S = 1800
LOCK_NOTE_AFTER_S = 5

#: How the system shows, in a namespace of users, one of outside.
_OVERFLOW_UID = 65534


def digest(parts: dict[str, str]) -> str:
    """The key of a build made from `parts`."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def file_digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_of(name: str, parts: dict[str, str]) -> Path:
    """Where the build of extension `name` from `parts` lives."""
    return _builds() / name / digest(parts)


def _builds() -> Path:
    return settings.cache_dir() / "builds"


def find(
    name: str, file_name: str, parts: dict[str, str], *, located: Callable[[str], Path], lacking: bool
) -> Path | None:
    """The finished build of `name` from `parts`, or None.

    Args:
        located: the file here that a place in a stamp names.
        lacking: compilers are missing here. Nothing could be built, so any build serves that agrees in
            every other part.

    Raises:
        BuildError: another user could have written it.
    """
    folders = [folder_of(name, parts)]
    if lacking and folders[0].parent.is_dir():
        folders += sorted(folder for folder in folders[0].parent.iterdir() if _agree(folder, parts))
    return next((file for folder in folders if (file := _finished(folder, file_name, located))), None)


def _finished(folder: Path, file_name: str, located: Callable[[str], Path]) -> Path | None:
    stamp, file = _read_json(folder / STAMP), folder / file_name
    if not stamp or not file.is_file():
        return None
    check_private(file)
    if file_digest(file) != stamp.get("sha256"):
        print(f"identity_conv: {file} isn't the file that was built: not used", file=sys.stderr)
        return None
    return file if not _changed(stamp, located) else None


def _changed(stamp: dict[str, Any], located: Callable[[str], Path]) -> list[str]:
    """The files that the build read and the key doesn't know, and that have another content by now."""
    others = stamp.get("others")
    if not isinstance(others, dict):
        return ["a damaged stamp"]
    files = [(located(place), known) for place, known in others.items()]
    return [str(file) for file, known in files if not file.is_file() or file_digest(file) != known]


def _agree(folder: Path, parts: dict[str, str]) -> bool:
    built = _read_json(folder / KEY)
    return built is not None and _without_compilers(built) == _without_compilers(parts)


def _without_compilers(parts: dict[str, str]) -> dict[str, str]:
    return {name: part for name, part in parts.items() if name not in COMPILER_PARTS}


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def start(folder: Path, parts: dict[str, str]) -> None:
    """Makes an empty folder for a build, in place of one that an interrupted build left.

    Compilers of a killed build may still run and write into their working folder by relative path: they
    are ended where this process can see them, and the old folder is moved away whole.
    """
    if folder.exists():
        end_processes_in(folder)
        away = folder.with_name(f"{folder.name}.abandoned-{os.getpid()}-{time.time_ns()}")
        with errors_named():
            folder.rename(away)
        shutil.rmtree(away, ignore_errors=True)
    with errors_named():
        settings.make_private(folder)
        (folder / KEY).write_text(json.dumps(parts, indent=1))


def started(folder: Path) -> int:
    """When the build in `folder` began, in nanoseconds of the system's clock for files."""
    return (folder / KEY).stat().st_ctime_ns


def finish(folder: Path, file_name: str, others: Mapping[str, Path], seconds: float) -> Path:
    """Stamps the folder: from here on the build is used, while `others` have the content they have now.

    They are files that the compilers read and the key doesn't know, by their places (see `inputs`). `seconds` is what
    the build took.
    """
    file = folder / file_name
    with errors_named():
        digests = {place: file_digest(other) for place, other in others.items()}
        stamp = {"sha256": file_digest(file), "others": digests, "seconds": seconds}
        settings.write_at_once(folder / STAMP, json.dumps(stamp))
    return file


#: The variable that marks the compilers of a build, which names its folder.
BUILDING = "IDENTITY_CONV_BUILDING"


def end_processes_in(folder: Path) -> None:
    """Kills the compilers that work in `folder`, known by their mark: an interrupt or a kill leaves them running."""
    mark, place = os.fsencode(f"{BUILDING}={folder}"), os.path.realpath(folder)
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.readlink(process / "cwd") == place and mark in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """The lock among processes on the build in `folder`; the system drops it with its holder.

    Raises:
        BuildError: the holder kept it for half an hour.
    """
    from filelock import FileLock, Timeout

    with errors_named():
        settings.make_private(folder.parent)
    check_private(folder.parent)
    held = FileLock(f"{folder}.lock")
    holder = Path(f"{folder}.holder")
    try:
        with errors_named():
            held.acquire(timeout=LOCK_NOTE_AFTER_S)
    except Timeout:
        who = _read_text(holder) or "another process"
        print(f"identity_conv: waiting for {who}, which builds {folder.parent.name}", file=sys.stderr)
        try:
            held.acquire(timeout=LOCK_TIMEOUT_S)
        except Timeout:
            raise BuildError(f"{who} has held the lock {held.lock_file} for {LOCK_TIMEOUT_S} s") from None
    try:
        with errors_named():
            holder.write_text(f"process {os.getpid()} on {os.uname().nodename}")
        yield
    finally:
        with suppress(OSError):
            holder.unlink(missing_ok=True)
        held.release()


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


@contextmanager
def errors_named() -> Iterator[None]:
    """Turns the system's refusal to write in the cache into a sentence that names it.

    Raises:
        BuildError: for an OSError, save a time-out.
    """
    try:
        yield
    except TimeoutError:
        raise
    except OSError as error:
        raise BuildError(
            f"the build cache {settings.cache_dir()} can't be written ({error.strerror}): "
            f"make it writable, or set {settings.CACHE_DIR.name} to a folder of yours"
        ) from error


def check_private(path: Path) -> None:
    """Refuses a file or folder that another user could have written, or put another in the place of.

    Raises:
        BuildError: it, or a folder above it, belongs to another user or may be written by one. A sticky
            folder, such as the system's for temporary files, may.
    """
    real = Path(os.path.realpath(path))
    for each in dict.fromkeys((real, *real.parents, *path.absolute().parents)):
        found = each.stat()
        if found.st_uid not in (0, os.geteuid()) and not _is_outside_namespace(found.st_uid):
            raise BuildError(
                f"{each} belongs to user {_user_name(found.st_uid)}, who could put code of theirs into this "
                f"process: set {settings.CACHE_DIR.name} to a folder of yours"
            )
        writable = found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and not _is_own_group(found.st_gid))
        sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
        if writable and not sticky:
            raise BuildError(
                f"{each} may be written by other users, who could put code of theirs into this process: "
                f"chmod go-w {each}, or set {settings.CACHE_DIR.name} to a folder of yours"
            )


def _is_outside_namespace(uid: int) -> bool:
    """Whether `uid` stands for users that this namespace (a container's) doesn't know, and who aren't in it."""
    everybody = ["0", "0", "4294967295"]
    return uid == _OVERFLOW_UID and Path("/proc/self/uid_map").read_text().split() != everybody


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _is_own_group(gid: int) -> bool:
    """Whether the group has no other member: many systems give each user one, and a umask of 002."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return gid == 0 or (gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name})


@dataclass(frozen=True)
class Origin:
    """Where a built file comes from, as far as its folder says."""

    key: str
    made: float  # seconds since the epoch
    seconds: float | None  # that the build took; None of one by an older version
    archs: str | None  # CUDA architectures it is for


def origin(file: Path) -> Origin | None:
    """Where `file` comes from; None where it doesn't lie in the cache, or no more."""
    folder = file.parent
    parts, stamp = _read_json(folder / KEY), _read_json(folder / STAMP)
    if parts is None or stamp is None:
        return None
    try:
        made = (folder / STAMP).stat().st_mtime
    except OSError:
        return None
    seconds = stamp.get("seconds")
    return Origin(folder.name, made, seconds if isinstance(seconds, float) else None, parts.get("CUDA architectures"))


@dataclass(frozen=True)
class Entry:
    """One folder of the cache, as `identity-conv cache list` shows it."""

    name: str
    key: str
    folder: Path
    finished: bool
    bytes: int
    made: float  # seconds since the epoch


def entries() -> list[Entry]:
    """Every build in the cache, the latest first."""
    found = []
    for record in _builds().glob(f"*/*/{KEY}"):
        folder = record.parent
        with suppress(OSError):
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            stamp = folder / STAMP
            made = (stamp if stamp.exists() else record).stat().st_mtime
            found.append(Entry(folder.parent.name, folder.name, folder, stamp.exists(), size, made))
    return sorted(found, key=lambda entry: entry.made, reverse=True)


def names() -> list[str]:
    """The extensions that have builds in the cache."""
    return sorted({entry.name for entry in entries()})


def _latest(name: str) -> Entry | None:
    return next((entry for entry in entries() if entry.name == name and entry.finished), None)


def last_seconds(name: str, file_name: str) -> float | None:
    """How long the latest finished build of `name` took that made `file_name`; None where no build says."""
    finished = (entry for entry in entries() if entry.name == name and entry.finished)
    latest = next((entry for entry in finished if (entry.folder / file_name).exists()), None)
    seconds = (_read_json(latest.folder / STAMP) or {}).get("seconds") if latest else None
    return seconds if isinstance(seconds, float) else None


def _short(part: str) -> str:
    """A digest by its first digits, which tell it from another; anything else as it is."""
    return f"{part[:12]}…" if re.fullmatch(r"[0-9a-f]{64}", part) else part


def differences(name: str, parts: dict[str, str], located: Callable[[str], Path]) -> list[str]:
    """What changed since the latest finished build of `name`, a line each; empty where nothing did.

    A cache without a build of that name gives one line that says so.
    """
    latest = _latest(name)
    if latest is None:
        return [f"there is no finished build of {name}"]
    built = _read_json(latest.folder / KEY) or {}
    return [
        f"{part}: {_short(built.get(part, 'none'))} → {_short(parts.get(part, 'none'))}"
        for part in sorted({*built, *parts})
        if built.get(part) != parts.get(part)
    ] + [f"{file}: changed since" for file in _changed(_read_json(latest.folder / STAMP) or {}, located)]


def clean(name: str | None = None) -> list[Entry]:
    """Removes the builds of extension `name`, or all, but for those that a process is building.

    A library that a process has loaded stays mapped there.
    """
    from filelock import FileLock, Timeout

    removed = []
    for entry in entries():
        if name not in (None, entry.name):
            continue
        try:
            with errors_named(), FileLock(f"{entry.folder}.lock", timeout=0):
                if entry.folder.is_symlink():
                    entry.folder.unlink()
                else:
                    shutil.rmtree(entry.folder)
        except Timeout:
            continue
        removed.append(entry)
    return removed
