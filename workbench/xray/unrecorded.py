"""Processes of a running job that use torch and are not recorded: no hang of theirs is noticed, so they are told of."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import psutil

from workbench.observe import DIRECTORY, STARTUP

_EVERY_S = 3.0
_OLD_S = 5.0  # helpers of a launch script are gone by then


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why a Python process does not record itself, and what to do about it."""

    says: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unrecorded:
    """A process that uses torch and is not recorded. rank: its RANK, "" where no launcher gave it one."""

    pid: int
    rank: str
    reason: Reason

    def __str__(self) -> str:
        return f"process {self.pid}{f' (RANK={self.rank})' if self.rank else ''}"


class Lookout:
    """Looks at the job's processes every few seconds. `found`: what it said, of each reason; "" if nothing."""

    def __init__(self, family: Callable[[], Iterable[psutil.Process]]) -> None:
        self.found = ""
        self.is_rank = False  # whether one of them has a rank
        self._family = family
        self._told: set[Reason] = set()
        self._seen: set[int] = set()
        self._next = time.monotonic() + _EVERY_S

    def look(self) -> str:
        """What is to be told now; "" mostly. Each reason is told once."""
        if time.monotonic() < self._next:
            return ""
        by_reason: dict[Reason, list[Unrecorded]] = {}
        seen = find_unrecorded(self._family())
        for one in seen:
            self.is_rank = self.is_rank or bool(one.rank)
            if one.reason not in self._told and (one.rank or one.pid in self._seen):
                by_reason.setdefault(one.reason, []).append(one)
        self._seen = {one.pid for one in seen}  # a launcher is not told of before its ranks
        self._told |= by_reason.keys()
        self._next = time.monotonic() + _EVERY_S
        self.found = "; ".join(filter(None, (self.found, *(_final_words(r, ones) for r, ones in by_reason.items()))))
        return "\n".join(_words(reason, ones) for reason, ones in by_reason.items())


def find_unrecorded(family: Iterable[psutil.Process]) -> list[Unrecorded]:
    """Those of these processes that run Python, have torch loaded and do not record themselves; ranks first. Local."""
    found = []
    for process in family:
        try:
            if time.time() - process.create_time() < _OLD_S or "python" not in os.path.basename(process.exe()):
                continue
            environ = process.environ()
            reason = why_unrecorded(process.cmdline(), environ)
        except (psutil.Error, OSError):  # gone, or another user's
            continue
        if reason is not None and _has_torch(process.pid):
            found.append(Unrecorded(pid=process.pid, rank=environ.get("RANK", ""), reason=reason))
    return sorted(found, key=lambda one: (not one.rank, one.pid))


def why_unrecorded(arguments: Sequence[str], environ: Mapping[str, str]) -> Reason | None:
    """Why a Python process that was started so does not record itself; None if it does. Pure, but for what lies in the
    directories of PYTHONPATH.
    """
    ignoring = sorted(set("ISE") & set(_options(arguments)))
    if ignoring:
        return Reason(
            says=f"python -{ignoring[0]} takes no notice of PYTHONPATH or of what it says",
            fix=f"start it without -{ignoring[0]}",
        )
    path = environ.get("PYTHONPATH", "").split(os.pathsep)
    if STARTUP not in path:
        if DIRECTORY not in environ:
            return Reason(
                says=f"the environment that `workbench trace` gave was taken from it (env -i, sudo, srun --export): "
                f"{DIRECTORY} and PYTHONPATH are not in it",
                fix=f"pass {DIRECTORY} and PYTHONPATH on",
            )
        own = os.pathsep.join(filter(None, path))
        return Reason(
            says=f"its PYTHONPATH, {own or 'unset or empty'}, leaves out the directory that `workbench trace` had put "
            f"there",
            fix=f"export PYTHONPATH={own}${{PYTHONPATH:+:$PYTHONPATH}}" if own else "leave PYTHONPATH as it is",
        )
    if not environ.get(DIRECTORY):
        return Reason(says=f"{DIRECTORY} is not in its environment", fix=f"pass {DIRECTORY} on")
    before = path[: path.index(STARTUP)]
    shadow = next((p for p in before if os.path.isfile(os.path.join(p, "sitecustomize.py"))), None)
    if shadow is not None:
        return Reason(
            says=f"the sitecustomize.py of {shadow} runs in place of the recording's",
            fix=f"put {shadow} behind what PYTHONPATH holds: export PYTHONPATH=$PYTHONPATH:{shadow}",
        )
    return None


def _options(arguments: Sequence[str]) -> str:
    """The letters of the interpreter's own options, which end where the program begins."""
    letters, rest = "", iter(arguments[1:])
    for argument in rest:
        if not argument.startswith("-") or argument == "-":
            break
        for place, letter in enumerate(argument[1:], start=2):
            if letter in "cm-":
                return letters
            if letter in "WX":  # takes a value: the rest, or what follows
                if place == len(argument):
                    next(rest, None)
                break
            letters += letter
    return letters


def _has_torch(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as lines:
            return any("/libtorch" in line for line in lines)
    except OSError:
        return False


def _words(reason: Reason, ones: Sequence[Unrecorded]) -> str:
    first, is_one = ones[0], len(ones) == 1
    look = f"; workbench diagnose --pid {first.pid} looks into it as it is" if first.rank else ""
    return (
        f"{_who(ones)} of this command {'uses torch and is' if is_one else 'use torch and are'} not recorded, so a "
        f"hang there is not noticed: {reason.says}. Try: {reason.fix}{look}"
    )


def _final_words(reason: Reason, ones: Sequence[Unrecorded]) -> str:
    was = "was" if len(ones) == 1 else "were"
    return f"{_who(ones)} used torch and {was} not recorded: {reason.says}. Try: {reason.fix}"


def _who(ones: Sequence[Unrecorded]) -> str:
    return f"{ones[0]}{f' and {len(ones) - 1} more' if ones[1:] else ''}"
