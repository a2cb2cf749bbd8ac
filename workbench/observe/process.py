"""This process as it is recorded: its rank once that is known, its trace file, its groups."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from dataclasses import dataclass

from workbench.errors import WorkbenchError
from workbench.observe.environment import DIRECTORY, claim_rank
from workbench.observe.jobs import claim_job
from workbench.observe.stacks import register_stack_dump
from workbench.ranks import GroupKey, GroupMap
from workbench.trace import BY_HAND, Lane, Recorder, Token, TraceError, read_progress

OPAQUE = "a call of its own"

_MOST_EARLY = 256  # events kept until the rank is known


class _Here(threading.local):
    """What this thread is inside: "" or the function of torch.distributed whose inner calls are recorded too.

    OPAQUE inside any other: what it calls is its own affair. reduce_op: of the functional collective it is inside.
    """

    inside = ""
    reduce_op: str | None = None


@dataclass(frozen=True, slots=True)
class _Early:
    """An event of a process that did not know its rank yet."""

    time_ns: int
    op: str
    note: str
    error: str
    is_end: bool


class Process:
    """The recording of one process. There is one, `this_process`; a forked child starts afresh."""

    def __init__(self) -> None:
        self.here = _Here()
        self._start()

    def _start(self) -> None:
        self.recorder = Recorder.off()
        self.live = False  # whether the recorder writes; read once a call
        self.generation = -1
        self.num_groups = 0
        self.capturing = 0
        self.exit_status: int | None = None
        self.exit_by = ""  # what asked for it, in words
        self._failed = False
        self._by_hand = False
        self._early: list[_Early] = []
        self._declared: list[str] = []
        self._kinds: dict[tuple[int, ...], str] = {}
        self._lock = threading.Lock()

    def start_rank(self) -> None:
        """Open the trace file if a launcher gave this process a rank. Called when torch.distributed is imported."""
        world_rank = claim_rank(os.environ)
        if world_rank is not None:
            self.become(world_rank)

    def forget(self) -> None:
        """In a forked child: it is another rank, or none."""
        self._start()

    def become(self, world_rank: int, place: str | None = None, *, by_hand: bool = False) -> bool:
        """Open the file of this rank, and write what happened before; gives whether it was not this rank already.

        A file that cannot be is told once on stderr.
        place: where the rank meets the others of its job, unless a launcher made it this rank. See claim_job.
        by_hand: a rank of a group made by hand, until init_process_group gives it a world.
        """
        with self._lock:
            if self.recorder.enabled:
                if self.recorder.world_rank == world_rank and not self._by_hand:
                    return False
                self._leave()
            self._by_hand = by_hand
            directory = os.environ[DIRECTORY]
            try:
                restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") or 0)
                job = claim_job(directory, os.environ, world_rank, place=place)
                self.recorder = Recorder.open(job, world_rank, first_attempt=restarts)
                register_stack_dump(directory)
            except (WorkbenchError, OSError, ValueError) as e:
                sys.stderr.write(f"workbench: world rank {world_rank} is not recorded: {e}\n")
                return True
            self.live = True
            self.recorder.share()
            for document in self._declared:
                self.recorder.declare(document)
            tokens: dict[str, Token | None] = {}
            for event in self._early:
                with self.recorder.at(event.time_ns):
                    if event.is_end:
                        self.recorder.end(tokens.pop(event.op, None), note=event.note, error=event.error)
                    elif event.error:
                        self.recorder.instant(event.op, note=event.note, error=event.error)
                    else:
                        tokens[event.op] = self.recorder.begin(event.op, note=event.note)
            self._early.clear()
        return True

    def _leave(self) -> None:
        """Close the file of the rank it was so far, and take it away if nothing happened as that rank."""
        self.generation, self.num_groups = -1, 0
        path = self.recorder.path
        self.recorder.close()
        with contextlib.suppress(OSError, TraceError):
            if path is not None and read_progress(path) == 0:
                path.unlink()

    def fail(self, error: Exception) -> None:
        """Recording a call failed, which is our fault: say so once on stderr, and let the program go on."""
        if not self._failed:
            self._failed = True
            sys.stderr.write(f"workbench: a call was not recorded: {type(error).__name__}: {error}\n")
            self.recorder.instant("unrecorded", error=f"{type(error).__name__}: {error}")

    def early(self, op: str, *, note: str = "", error: str = "", is_end: bool = False) -> None:
        """Keep an event until the rank is known; beyond a few hundred, forget it."""
        if len(self._early) < _MOST_EARLY:
            self._early.append(_Early(time.monotonic_ns(), op, note, error, is_end))

    def start_generation(self) -> None:
        """A default group is being made: groups are counted from the start again."""
        self.generation += 1
        self.num_groups = 0

    def new_lane(self, ranks: tuple[int, ...], label: str, kind: str = "") -> Lane:
        """The lane of a group that this process makes now, with the next ordinal."""
        key = GroupKey(kind or self._kinds.get(tuple(sorted(ranks)), "group"), ranks)
        lane = self.recorder.group(key, label=label, ordinal=self.num_groups, generation=max(self.generation, 0))
        self.num_groups += 1
        return lane

    def lane_by_hand(self, ranks: tuple[int, ...], place: str, own_rank: int) -> Lane:
        """The lane of a group made by hand: `ranks` are numbers in that group. See GroupInfo."""
        key = GroupKey(BY_HAND, ranks)
        return self.recorder.group(key, label=place, ordinal=own_rank, generation=max(self.generation, 0))

    def declare(self, group_map: GroupMap) -> None:
        """See workbench.observe.declare."""
        document = json.dumps(group_map.to_json())
        self._declared.append(document)
        for kind, lists in group_map.groups.items():
            for ranks in lists:
                self._kinds.setdefault(tuple(sorted(ranks)), kind)
        self.recorder.declare(document)


this_process = Process()
os.register_at_fork(after_in_child=this_process.forget)
