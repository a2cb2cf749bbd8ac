"""Sizes as callers give them: checked by name and type, and the nearest legal choice when they do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from math import log
from typing import Any, TypeGuard

from workbench.errors import LayoutError
from workbench.ranks.engine_names import find_engine_name, find_remark

MAX_WORLD_SIZE = 1 << 17
"""The widest world a GroupMap describes: 131,072 ranks. A map holds every rank once for every kind in memory."""

Sizes = dict[str, Any]
Problem = Callable[[Sizes], str | None]

_NEAREST_REACH = 512


class Form(Enum):
    """What a size may be. The value is the text that error messages show."""

    WIDTH = f"a whole number from 1 to {MAX_WORLD_SIZE}"
    OPTIONAL_WIDTH = f"None or a whole number from 1 to {MAX_WORLD_SIZE}"
    LOOSE = f"a whole number from -{MAX_WORLD_SIZE} to {MAX_WORLD_SIZE}"
    OPTIONAL_LOOSE = f"None or a whole number from -{MAX_WORLD_SIZE} to {MAX_WORLD_SIZE}"
    FLAG = "True or False"
    TEXT = "a text of at most 64 characters"
    WIDTHS = f"None or a list of at most 16 whole numbers from 1 to {MAX_WORLD_SIZE}"
    ENGRAM = "None or a mapping with the flags cpu_offload and across_dp"


@dataclass(frozen=True, slots=True)
class SizeSpec:
    """One size name of a system: its form and the value that leaving it out means."""

    form: Form
    default: Any = 1


def parse_sizes(system: str, specs: Mapping[str, SizeSpec], given: Mapping[str, Any]) -> Sizes:
    """Every size of `specs`, as given or by default. Raises LayoutError for unknown names and values of wrong form."""
    for name in given:
        if name not in specs:
            raise LayoutError(f"{system} has no size {show(name)}; {known_names(name, specs, 'sizes', system)}")
    return {
        name: _parse(system, name, spec, given[name]) if name in given else spec.default for name, spec in specs.items()
    }


def is_whole(value: object) -> TypeGuard[int]:
    """True for an int that is not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def known_names(asked: object, known: Iterable[str], what: str, system: str = "") -> str:
    """'known sizes: ...; nearest name: ...' for an unknown name. What the system's own arguments mean by it goes
    before likeness of letters."""
    names = list(known)
    nearest = ""
    if isinstance(asked, str) and len(asked) <= 64:
        close = get_close_matches(asked.lower(), names, n=1, cutoff=0.5)
        nearest = find_engine_name(system, asked, names) or (close[0] if close else "")
    remark = find_remark(system, nearest)
    hint = f"; nearest name: {nearest!r}{f' ({remark})' if remark else ''}" if nearest else ""
    return f"known {what}: {', '.join(names)}{hint}"


def show(value: object) -> str:
    """A short text for any value, hostile ones included."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, str):
        return repr(value) if len(value) <= 40 else f"{value[:40]!r}..."
    return f"a {type(value).__name__}"


def find_nearest(specs: Mapping[str, SizeSpec], sizes: Sizes, problem: Problem) -> tuple[tuple[str, object], ...]:
    """Changes of one size that remove `problem`: (name, value), at most three, the smallest relative change first."""
    found: list[tuple[float, str, object]] = []
    for name, spec in specs.items():
        for candidate in _candidates(spec, sizes[name]):
            if problem({**sizes, name: candidate}) is None:
                found.append((_distance(sizes[name], candidate), name, candidate))
                break
    return tuple((name, value) for _, name, value in sorted(found, key=lambda entry: entry[0])[:3])


def show_nearest(nearest: Iterable[tuple[str, object]], sizes: Sizes) -> str:
    """'nearest legal choice: attn_cp=3 (asked 4), or tp=8 (asked 6)'."""
    texts = [f"{name}={value} (asked {_plain(sizes[name])})" for name, value in nearest]
    if not texts:
        return "no change of one size helps; leave sizes out until the rest is legal"
    return f"nearest legal choice: {', or '.join(texts)}"


def _parse(system: str, name: str, spec: SizeSpec, value: object) -> Any:
    form = spec.form
    parsed: Any = _REFUSED
    if form is Form.WIDTH:
        parsed = _whole(value, 1)
    elif form is Form.OPTIONAL_WIDTH:
        parsed = None if value is None else _whole(value, 1)
    elif form is Form.LOOSE:
        parsed = _whole(value, -MAX_WORLD_SIZE)
    elif form is Form.OPTIONAL_LOOSE:
        parsed = None if value is None else _whole(value, -MAX_WORLD_SIZE)
    elif form is Form.FLAG:
        parsed = value if isinstance(value, bool) else _REFUSED
    elif form is Form.TEXT:
        parsed = value if isinstance(value, str) and len(value) <= 64 else _REFUSED
    elif form is Form.WIDTHS:
        parsed = _widths(value)
    elif form is Form.ENGRAM:
        parsed = _engram(value)
    if parsed is _REFUSED:
        legal = _clamp(spec, value)
        raise LayoutError(
            f"{system} size {name}={show(value)} is not legal; allowed: {form.value}; "
            f"nearest legal choice: {name}={_plain(legal)}",
            nearest=((name, legal),),
        )
    return parsed


_REFUSED = object()


def _whole(value: object, low: int) -> object:
    return value if is_whole(value) and low <= value <= MAX_WORLD_SIZE else _REFUSED


def _clamp(spec: SizeSpec, value: object) -> Any:
    """The legal value closest to a refused one; its default where closeness has no meaning."""
    low = {Form.WIDTH: 1, Form.OPTIONAL_WIDTH: 1}.get(spec.form, -MAX_WORLD_SIZE)
    if is_whole(value) and spec.form in (Form.WIDTH, Form.OPTIONAL_WIDTH, Form.LOOSE, Form.OPTIONAL_LOOSE):
        return max(low, min(value, MAX_WORLD_SIZE))
    return spec.default


def _widths(value: object) -> object:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) > 16:
        return _REFUSED
    widths = tuple(_whole(width, 1) for width in value)
    if _REFUSED in widths:
        return _REFUSED
    return widths or None


def _engram(value: object) -> object:
    if value is None:
        return None
    if not isinstance(value, Mapping) or not set(value) <= {"cpu_offload", "across_dp"}:
        return _REFUSED
    flags = {"cpu_offload": value.get("cpu_offload", True), "across_dp": value.get("across_dp", False)}
    return flags if all(isinstance(flag, bool) for flag in flags.values()) else _REFUSED


def _candidates(spec: SizeSpec, asked: Any) -> Iterable[Any]:
    if is_whole(asked):
        near = [asked + sign * step for step in range(1, _NEAREST_REACH + 1) for sign in (-1, 1)]
        return [value for value in near if 1 <= value <= MAX_WORLD_SIZE] + ([1] if asked > _NEAREST_REACH + 1 else [])
    if isinstance(asked, bool):
        return [not asked]
    return [] if asked == spec.default else [spec.default]


def _distance(asked: Any, candidate: Any) -> float:
    if is_whole(asked) and is_whole(candidate) and asked > 0:
        return abs(log(candidate / asked))
    return 1.0


def _plain(value: object) -> str:
    return show(value) if not isinstance(value, Mapping | tuple) else repr(value)
