"""How a cell on ranks fails: the first cause first, in the rank's own words, and its echoes below it."""

from __future__ import annotations

import linecache
import re
from dataclasses import dataclass
from pathlib import Path

from workbench.errors import DeadlineError, PeerDeadError, WorkbenchError
from workbench.launch.selection import ranks_words

_OF_A_GROUP = (
    "KeyboardInterrupt",
    "DistBackendError",
    "DistStoreError",
    "DeadlineError",
    "PeerDeadError",
    "CallFailedError",
    "ClosedError",
)
_OURS = str(Path(__file__).parent)
_SENT_BY = "File <string>:1"  # the line by which ipyparallel calls a function
_CELL_FRAME = re.compile(r"File (?P<file>\S*[/\\]ipykernel_\d+[/\\]\w+\.py):(?P<line>\d+)(?P<function>.*)")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankError:
    """What one rank raised. `when_s` orders the ranks' errors: seconds since 1970 on the rank's clock."""

    world_rank: int
    name: str
    message: str
    traceback: str
    when_s: float

    @property
    def is_of_a_group(self) -> bool:
        """Whether it came out of a wait for other ranks, after which the group cannot be trusted."""
        return self.name in _OF_A_GROUP or (self.name == "RuntimeError" and "gloo" in self.message)

    def __str__(self) -> str:
        return f"{self.name}: {self.message}".rstrip(": ")


class _Told:
    """An error whose text says everything: IPython shows it without the driver's own frames."""

    def _render_traceback_(self) -> list[str]:
        return [type(self).__name__, *str(self).splitlines()]


class RanksFailedError(_Told, WorkbenchError):
    """A cell raised on some ranks. `errors` holds what they raised, the earliest first.

    `waits` tells of the collective calls that somebody did not come to.
    """

    def __init__(self, errors: tuple[RankError, ...], waits: tuple[str, ...] = ()) -> None:
        self.errors = errors
        first, *others = errors
        alike: dict[str, list[int]] = {}
        for error in others:
            alike.setdefault(str(error), []).append(error.world_rank)
        same = alike.pop(str(first), None)
        if same:
            lines = [f"{ranks_words([first.world_rank, *same])} failed: {first}"]
        else:
            lines = [f"world rank {first.world_rank} failed{' first' if others else ''}: {first}"]
        lines.append(first.traceback)
        lines += [f"then {ranks_words(ranks)}: {text}" for text, ranks in alike.items()]
        lines += waits
        if any(error.is_of_a_group for error in errors):
            lines.append("a process group may be lost by this: cluster.rebuild() makes all of them anew")
        super().__init__("\n".join(lines))


class CellDeadlineError(_Told, DeadlineError):
    """A cell's deadline passed. The text says where each rank stands; the ranks live and go on."""


class RankDiedError(_Told, PeerDeadError):
    """A rank's process ended. The others were ended with it."""


def shown_traceback(text: str) -> str:
    """IPython's plain traceback of a rank: no colours, no frames of this package's waits, no made-up names of files.

    A function that was sent from a notebook stands in a cell there, of which only this process knows the text.
    """
    blocks = _ANSI.sub("", text).rstrip().split("\n\n")
    kept = [block for block in blocks if not block.lstrip().startswith((f"File {_OURS}", _SENT_BY))]
    return "\n".join(_CELL_FRAME.sub(_cell_frame, block) for block in kept)


def _cell_frame(match: re.Match[str]) -> str:
    source = linecache.getline(match["file"], int(match["line"])).strip()
    return f"cell, line {match['line']}{match['function']}" + (f"\n    {source}" if source else "")
