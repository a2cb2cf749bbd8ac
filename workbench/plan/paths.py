"""Paths: the ways to serve a group, in the order they are tried, and the backend behind each (tables/order.json).

A plan's choice is a path, with the algorithm that the table named for it where it has several: 'custom.fused.push'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType

from workbench.documents import Document, parse_document
from workbench.errors import ArgumentError
from workbench.settings import Settings

ROUNDINGS = ("once", "twice")
DEVICES = ("cpu", "cuda")
CUSTOM_OFF = "switched off by WORKBENCH_CUSTOM_ALL_REDUCE=0"
FUSION_OFF = "switched off by WORKBENCH_FUSION=0"
MULTICAST_OFF = "needs multicast; WORKBENCH_MULTICAST=1 allows it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """One way to serve a group.

    backend: the module of workbench.backends that runs it.   fused: one kernel does the whole operation.
    own: kernels of this package.   composed: the backend only sums; the runtime adds the residual and normalises.
    symmetric: over a library's symmetric memory, which the caller has to offer.   multicast: makes a multicast object.
    by_name_only: never chosen, only asked for.   one_host: its memory is shared within a host.
    widths: the sizes of groups it serves; any if empty.
    roundings: how often the fused operation's sum may be rounded on this path; the classes are never mixed.
    """

    name: str
    device: str
    backend: str
    fused: bool = False
    own: bool = False
    composed: bool = False
    symmetric: bool = False
    multicast: bool = False
    by_name_only: bool = False
    one_host: bool = False
    widths: tuple[int, ...] = ()
    roundings: tuple[str, ...] = ROUNDINGS


ALONE = Path(name="alone", device="", backend="alone", widths=(1,))
"""What serves a group of one rank, on any device."""


@cache
def all_paths() -> Mapping[str, Path]:
    """Every path by name, in the order they are tried; ALONE is not among them."""
    text = (files("workbench.plan") / "tables" / "order.json").read_text(encoding="utf-8")
    doc = parse_document(text, "order.json")
    doc.take_whole("schema", 1, 1)
    doc.take_text("source")
    paths = [_path(entry) for entry in doc.take_children("paths")]
    doc.end()
    return MappingProxyType({path.name: path for path in paths})


def path_order(device: str, *, backend: str | None = None) -> tuple[str, ...]:
    """The names of a device's paths in the order they are tried; those of one backend, if it is named."""
    paths = [path for path in all_paths().values() if path.device == device]
    return tuple(p.name for p in paths if (not p.by_name_only if backend is None else p.backend == backend))


def split_choice(choice: str) -> tuple[Path, str]:
    """A plan's choice as its path and its algorithm: 'custom.fused.push' is ('custom.fused', 'push'); '' if it has one.

    Raises: ArgumentError for a choice that no path gives.
    """
    if choice == ALONE.name:
        return ALONE, ""
    for name in sorted(all_paths(), key=len, reverse=True):
        if choice == name or choice.startswith(f"{name}."):
            return all_paths()[name], choice[len(name) + 1 :]
    raise ArgumentError(f"no path gives {choice!r}; known: {', '.join(all_paths())}")


def find_switch(path: Path, settings: Settings, *, fused: bool = True) -> str:
    """The setting that rules the path out, as a reason; "" if none does. `fused`: the fused operation is wanted."""
    if path.own and not settings.custom_all_reduce:
        return CUSTOM_OFF
    if path.fused and fused and not settings.fusion:
        return FUSION_OFF
    if path.multicast and not settings.multicast:
        return MULTICAST_OFF
    return ""


def find_rounding(path: Path, rounding: str) -> str:
    """Why the path does not give the rounding that is asked for, as a reason; "" if it does."""
    if rounding in path.roundings:
        return ""
    offered = " or ".join(path.roundings)
    return f"rounds {offered} between sum and residual, rounding={rounding!r} is asked for"


_FLAGS = ("fused", "own", "composed", "symmetric", "multicast", "by_name_only", "one_host")


def _path(doc: Document) -> Path:
    path = Path(
        name=doc.take_text("path", at_most=32),
        device=doc.take_text("device", pattern="|".join(DEVICES)),
        backend=doc.take_text("backend", at_most=32, pattern=r"[a-z_]+"),
        **{flag: doc.take_flag(flag, default=False) for flag in _FLAGS},
        widths=tuple(doc.take_list("widths", at_most=16, default=[])),
        roundings=doc.take_texts("roundings", default=list(ROUNDINGS)),
    )
    doc.end()
    if not all(type(width) is int and width > 1 for width in path.widths):
        doc.refuse("widths holds whole numbers above 1")
    if not path.roundings or not set(path.roundings) <= set(ROUNDINGS):
        doc.refuse(f"roundings holds one or more of {', '.join(ROUNDINGS)}")
    return path
