"""Calls that once failed, kept in files: to be looked at first the next time, and by a program without Python.

``<folder>/<operator>/<digest>/call.json`` describes a call; ``inputs.pt`` beside it holds its tensors, in their
order, as ``identity-conv-run model.pt2 --input inputs.pt`` reads them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .call import Call
from .plan import TensorPlan
from .report import Violation
from .state import State

_NAMED = (torch.dtype, torch.memory_format, torch.layout)


def keep(folder: Path, subject: str, violation: Violation) -> Path | None:
    """Keeps a violation's call, once; gives its folder, or None where there is no call or none that JSON can hold."""
    if not isinstance(violation.case, Call):
        return None
    try:
        call = _data(violation.case)
    except TypeError:
        return None
    digest = hashlib.sha256(json.dumps(call, sort_keys=True).encode()).hexdigest()[:16]
    place = _home(folder, subject) / digest
    place.mkdir(parents=True, exist_ok=True)
    record = {"subject": subject, "check": violation.check, "sentence": violation.sentence, "call": call}
    # Its tensors first: a folder without call.json isn't read.
    with contextlib.suppress(Exception):  # a dtype that can't be saved
        torch.save([_readable(plan.build()) for plan in violation.case.plans], place / "inputs.pt")
    (place / "call.json").write_text(json.dumps(record, indent=1) + "\n")
    return place


def kept(folder: Path, subject: str) -> Iterator[Call]:
    """The calls of a subject that are kept.

    Raises:
        ValueError: a file isn't one of these; the sentence names it.
    """
    for file in sorted(_home(folder, subject).glob("*/call.json")):
        try:
            call = _value(json.loads(file.read_text())["call"])
            if not isinstance(call, Call):
                raise TypeError(f"it holds {type(call).__name__}")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{file} must describe a call, as the pytest plugin writes it: {error}") from error
        yield call


def _home(folder: Path, subject: str) -> Path:
    return folder / re.sub(r"[^\w.-]+", "_", subject)


def _readable(x: torch.Tensor) -> torch.Tensor:
    """What torch's C++ reader knows: it has no conjugate or negative bits."""
    return x.detach().resolve_conj().resolve_neg()


def _data(value: Any) -> Any:
    """`value` as JSON holds it: what is no number, text or list is a dictionary with its kind."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_data(each) for each in value]
    if isinstance(value, tuple):
        return {"tuple": [_data(each) for each in value]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, _NAMED):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, TensorPlan):
        fields = [each for each in dataclasses.fields(value) if getattr(value, each.name) != each.default]
        return {"plan": {each.name: _data(getattr(value, each.name)) for each in fields}}
    if isinstance(value, State):
        return {"state": value.name, "fields": {name: _data(each) for name, each in value.fields.items()}}
    if isinstance(value, Call):
        kwargs = {name: _data(each) for name, each in value.kwargs.items()}
        return {"call": [_data(each) for each in value.args], "kwargs": kwargs, "shared": value.shared}
    raise TypeError(f"{type(value).__name__} has no place in JSON")


def _value(data: Any) -> Any:
    """What `_data` was given."""
    if isinstance(data, list):
        return [_value(each) for each in data]
    if not isinstance(data, dict):
        return data
    match data:
        case {"tuple": list(items)}:
            return tuple(_value(each) for each in items)
        case {"complex": [real, imaginary]}:
            return complex(real, imaginary)
        case {"torch": str(name)} if isinstance(getattr(torch, name), _NAMED):
            return getattr(torch, name)
        case {"device": str(name)}:
            return torch.device(name)
        case {"plan": dict(fields)}:
            return TensorPlan(**{name: _value(each) for name, each in fields.items()})
        case {"state": str(name), "fields": dict(fields)}:
            return State(name, {field: _value(each) for field, each in fields.items()})
        case {"call": list(args), "kwargs": dict(kwargs), "shared": bool(shared)}:
            return Call(
                tuple(_value(each) for each in args), {name: _value(each) for name, each in kwargs.items()}, shared
            )
    raise ValueError(f"{data!r} is of no known kind")
