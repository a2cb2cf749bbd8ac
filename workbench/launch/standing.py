"""Where each rank stands: its stack down to the line of the cell, the call it is in, and who is missing there.

Nothing is asked of the rank's Python: the stack comes from a signal handler in C, the calls from the trace files, which
another process can read at any time. So it works for ranks that hang, in C++ too, and disturbs none of them.
"""

from __future__ import annotations

import linecache
import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from workbench.launch.selection import ranks_label, ranks_words
from workbench.launch.survivors import mark_lives, mark_pid
from workbench.trace import Call, Event, Trace, TraceError, pair_calls, read_directory, rendezvous_lanes

_STACK_S = 1.0
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_CELL_FILE = re.compile(r".*[/\\]ipykernel_\d+[/\\](?P<name>\w+\.py)")
_OURS = str(Path(__file__).parent)
_MOST_FRAMES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where one rank stands. `stack` leads from the line of the cell to the innermost frame, one line each.

    state: "dead", "idle" (its cell has ended), "running", or "silent" (alive, but did not even dump its stack).
    last: the call it is in, or the one it left last.
    """

    world_rank: int
    state: str
    last: str
    stack: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Where all ranks stand. `waits` tells of each collective call that somebody waits in; `missing` who never came."""

    standings: tuple[Standing, ...]
    waits: tuple[str, ...] = ()
    missing: tuple[int, ...] = ()

    def __str__(self) -> str:
        lines = list(self.waits)
        parties: dict[tuple[str, str, tuple[str, ...]], list[int]] = {}
        for s in self.standings:
            parties.setdefault((s.state, s.last, s.stack), []).append(s.world_rank)
        for (state, last, stack), ranks in parties.items():
            lines.append(f"[{ranks_label(ranks)}] {state}; {last}")
            lines += [f"      {line}" for line in stack]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """The state of a cluster at one moment. World ranks, but for `pids`, which are in their order."""

    alive: tuple[int, ...]
    busy: tuple[int, ...]
    generation: int
    pids: tuple[int, ...]


def stand(
    directory: Path,
    rank_marks: Sequence[str],
    *,
    generation: int,
    busy: Sequence[int],
    sources: Mapping[str, Sequence[str]],
) -> Diagnosis:
    """Look at every rank of the cluster in `directory`. Takes a moment, at most about a second.

    rank_marks: the ranks' processes.   busy: world ranks that are in a cell.   generation: of the cluster's groups.
    sources: the lines of cells by the name of the file that Python knows them by.
    """
    stacks = _dump_stacks(directory, rank_marks)
    last: dict[int, tuple[int, str]] = {}
    waits: list[str] = []
    missing: set[int] = set()
    now_ns = time.time_ns()
    for name in ("trace", "session"):
        trace = _read(directory / name)
        if trace is None:
            continue
        for rank, found in _last_calls(trace, now_ns).items():
            last[rank] = max(last.get(rank, found), found)
        current = (
            generation if name == "trace" else max((g.generation for r in trace.ranks for g in r.groups), default=0)
        )
        for call in rendezvous_lanes(trace, until_ns=now_ns).calls:
            if call.group.generation == current and (call.waiting or call.missing):
                waits.append(_wait_text(call))
                missing |= set(call.missing)
    standings = []
    for r, mark in enumerate(rank_marks):
        stack = _shown(stacks[r], sources) if r in stacks else ()
        state = "dead" if not mark_lives(mark) else "idle" if r not in busy else "running" if r in stacks else "silent"
        words = last.get(r, (0, "no call of torch.distributed yet"))[1]
        standings.append(Standing(world_rank=r, state=state, last=words, stack=stack if state == "running" else ()))
    return Diagnosis(standings=tuple(standings), waits=tuple(waits), missing=tuple(sorted(missing)))


def last_stack(path: Path, sources: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Where a rank was when a fault or an abort ended it, by the file of its stacks; empty if it ended otherwise."""
    try:
        _, fatal, dump = path.read_text(errors="replace").rpartition("Fatal Python error")
    except OSError:
        return ()
    return _shown(_frames(dump.partition("(most recent call first):")[2]), sources) if fatal else ()


def _read(directory: Path) -> Trace | None:
    try:
        return read_directory(directory)
    except (TraceError, OSError):
        return None


def _wait_text(call: Call) -> str:
    came = [v.world_rank for v in call.visits if v.world_rank not in (*call.missing, *call.unknown)]
    text = f"{call.op} #{call.sequence} on {call.group.key}: {ranks_words(came)} came"
    if call.waiting:
        text += f", {ranks_label(call.waiting)} still inside after {call.waited_ns / 1e9:.1f} s"
    return text + (f"; missing: {ranks_label(call.missing)}" if call.missing else "; nobody is missing")


def _last_calls(trace: Trace, now_ns: int) -> dict[int, tuple[int, str]]:
    """By rank: the time and the words for the call it is in, else for the one it left last."""
    found: dict[int, tuple[int, str]] = {}
    for call in pair_calls(trace.events):
        event = call.event
        if call.begin is not None and call.end is None:
            moment, words = now_ns, f"inside {_call_text(event)} for {(now_ns - event.time_ns) / 1e9:.1f} s"
        else:
            end = call.end or event
            failed = f", which raised {end.error.partition(':')[0]}" if end.error else ""
            moment, words = end.time_ns, f"last call: {_call_text(event)}{failed}"
        found[event.world_rank] = max(found.get(event.world_rank, (0, "")), (moment, words))
    return found


def _call_text(event: Event) -> str:
    if event.group is None:
        return f"{event.op} {event.note}".rstrip()
    if event.peer_world_rank is None:
        return f"{event.op} #{event.sequence} on {event.group.key}"
    way = "from" if "recv" in event.op else "to"
    return f"{event.op} #{event.sequence} {way} world rank {event.peer_world_rank} on {event.group.key}"


def _dump_stacks(directory: Path, rank_marks: Sequence[str]) -> dict[int, list[tuple[str, int, str]]]:
    """The frames (file, line, function) of each rank's main thread, innermost first; without ranks that give none."""
    before = {}
    for r, mark in enumerate(rank_marks):
        path = directory / f"stacks-{r}.txt"
        if mark_lives(mark) and path.exists() and _catches(mark_pid(mark), signal.SIGUSR1):
            before[r] = path.stat().st_size
            os.kill(mark_pid(mark), signal.SIGUSR1)
    found: dict[int, list[tuple[str, int, str]]] = {}
    size = dict(before)
    deadline = time.monotonic() + _STACK_S
    while len(found) < len(before) and time.monotonic() < deadline:
        time.sleep(0.02)
        for r in before.keys() - found.keys():
            text = (directory / f"stacks-{r}.txt").read_text()
            if len(text) > before[r] and len(text) == size[r]:  # and it has stopped growing
                frames = _main_frames(text[before[r] :], text.partition("\n")[0].removeprefix("main "))
                if frames:
                    found[r] = frames
            size[r] = len(text)
    return found


def _catches(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler for the signal: a cell may have taken ours away, and would be ended by it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = int(status.partition("SigCgt:")[2].split(maxsplit=1)[0], 16)
    return bool(caught >> (number - 1) & 1)


def _main_frames(dump: str, main: str) -> list[tuple[str, int, str]]:
    """The frames of the thread `main` in the dump of all threads."""
    _, _, rest = dump.rpartition(f"hread {main}")
    return _frames(rest)


def _frames(dump: str) -> list[tuple[str, int, str]]:
    """The frames below the first line, as faulthandler writes them."""
    frames = []
    for line in dump.splitlines()[1:]:
        match = _FRAME.fullmatch(line)
        if match is None:
            break
        frames.append((match["file"], int(match["line"]), match["function"]))
    return frames


def _shown(frames: Sequence[tuple[str, int, str]], sources: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """From the line of the cell inwards; without this package's own waiting frames, and without IPython's outside."""
    cell = [n for n, (file, _, _) in enumerate(frames) if _CELL_FILE.fullmatch(file)]
    if not cell:
        return ()
    inner = [f for f in frames[: cell[-1] + 1] if not f[0].startswith(_OURS)]
    told = []
    for file, line, function in reversed(inner):
        match = _CELL_FILE.fullmatch(file)
        if match is None:
            told.append(f"{_short(file)}:{line} in {function}")
            continue
        source = sources.get(match["name"], ())
        text = source[line - 1].strip() if 0 < line <= len(source) else linecache.getline(file, line).strip()
        where = "cell" if function == "<module>" else f"cell, in {function}"
        told.append(f"{where}, line {line}: {text}".rstrip(": "))
    if len(told) > _MOST_FRAMES:
        told[_MOST_FRAMES // 2 : -_MOST_FRAMES // 2] = ["..."]
    return tuple(told)


def _short(file: str) -> str:
    for part in ("site-packages/", "dist-packages/", f"python{sys.version_info[0]}.{sys.version_info[1]}/"):
        _, found, tail = file.rpartition(part)
        if found:
            return tail
    return file
