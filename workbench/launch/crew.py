"""The ranks of one cluster as its driver holds them: started, attached to, begun anew, interrupted, ended.

Cluster is the face of this: it checks what the user asks for and shows what comes back.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from workbench.errors import ClosedError, DeadlineError
from workbench.launch import engine_calls
from workbench.launch.cell import Cell
from workbench.launch.directory import ClusterRecord
from workbench.launch.engines import Engines
from workbench.launch.failure import RankDiedError
from workbench.launch.interrupts import interrupts_later
from workbench.launch.processes import Processes
from workbench.launch.selection import ranks_words
from workbench.launch.spec import EngineSpec
from workbench.launch.standing import ClusterStatus, Diagnosis, last_stack, stand
from workbench.launch.survivors import mark_lives, mark_pid, run_tag

_INTERRUPT_S = {"cpu": 1.0, "cuda": 3.0}  # NCCL takes a moment to abort
_END_S = 1.0


class Crew:
    """Processes, engines, the record by which another driver finds them, and the cells that ranks are in.

    Nothing runs before `start` or `attach`. `spec` is what the ranks were told when they were started last.
    """

    def __init__(self, processes: Processes, spec: EngineSpec) -> None:
        self.processes = processes
        self.spec = spec
        self._record: ClusterRecord | None = None
        self._connected: Engines | None = None
        self._cells: list[Cell] = []
        self._left_busy: set[int] = set()  # busy with what an earlier driver sent
        self._death: RankDiedError | None = None  # told again until a restart
        self._lives = threading.RLock()

    @property
    def everybody(self) -> tuple[int, ...]:
        return tuple(range(self.spec.ranks))

    @property
    def record(self) -> ClusterRecord:
        """The record of ranks that have come up."""
        assert self._record is not None
        return self._record

    @property
    def engines(self) -> Engines:
        assert self._connected is not None
        return self._connected

    @property
    def status(self) -> ClusterStatus:
        """Who lives, who is in a cell; of nobody before the ranks have come up."""
        marks = self._record.rank_marks if self._record is not None else ()
        return ClusterStatus(
            alive=tuple(r for r, mark in enumerate(marks) if mark_lives(mark)),
            busy=self.busy(),
            generation=self._record.generation if self._record is not None else 0,
            pids=tuple(map(mark_pid, marks)),
        )

    # --- lives ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start controller, agent and ranks, and have them make their groups. Raises: ResourceError."""
        self.processes.start_controller()
        self.spec = replace(self.spec, owner=self.processes.controller, mark=self.processes.controller)
        self.processes.start_agent(self.spec)
        self._connected = Engines(self.processes)
        self._await_engines()
        self.begin(0)

    def attach(self, record: ClusterRecord) -> None:
        """Take over what another driver has started; ranks of which one has died can still be restarted."""
        self._take_over(record)
        self._connected = Engines(self.processes)
        if all(map(mark_lives, record.rank_marks)):
            self._await_engines()
            self.ask_who_is_busy()

    def begin(self, generation: int) -> None:
        """Have the ranks make their groups, and write down what a later driver needs."""
        with interrupts_later():  # ranks that half of them left would wait for these in C++
            cell = self.send(engine_calls.begin, (generation,), {}, self.everybody)
            cell.wait(_END_S)
        told = self.engines.await_groups(cell, timeout_s=self.spec.timeout_s + 30, why_ended=self._why_ended)
        self.answered(cell)
        self._record = ClusterRecord(
            name=self.processes.directory.name,
            ranks=self.spec.ranks,
            device=told[0][1],
            timeout_s=self.spec.timeout_s,
            keep=self.processes.keep,
            controller=self.processes.controller,
            agent=self.processes.agent,
            rank_marks=tuple(run_tag(pid) for pid, _ in told),
            group_map=self.spec.group_map,
            generation=generation,
            attempt=self.spec.attempt,
            started_s=self._record.started_s if self._record is not None else time.time(),
        )
        self._record.save()
        self._death = None

    def next_generation(self) -> int:
        """A number that no attempt has used, of any driver: the store keeps what a failed one left."""
        self._record = replace(self.record, generation=self.record.load(self.processes.directory).generation + 1)
        self._record.save()
        return self._record.generation

    def restart(self) -> None:
        """End the ranks and start others in their place. Raises: ClosedError if the controller has ended."""
        with self._lives:
            self._restart()

    def _restart(self) -> None:
        self._follow_restart()
        if not self.processes.can_register():
            state = "lost its heart monitor" if mark_lives(self.record.controller) else "ended"
            raise ClosedError(
                f"the controller of cluster {self.record.name} has {state}, so no rank can come up; close() it and "
                f"start another"
            )
        generation = self.next_generation()
        self._death = RankDiedError(
            "a restart of the ranks was broken off; cluster.restart() starts them again", dead=self.everybody
        )
        self.processes.stop_agent(self.record.rank_marks)
        self.engines.unregister(self.spec.ranks)
        for old in self.processes.directory.glob("*/*.wbtrace"):
            old.unlink()
        self._cells.clear()
        self._left_busy.clear()
        self.spec = replace(self.spec, attempt=self.spec.attempt + 1)
        self.processes.start_agent(self.spec)
        self._await_engines()
        self.begin(generation)

    def stop(self) -> None:
        """End everything: idle ranks may first close what holds memory of others."""
        marks = self._record.rank_marks if self._record is not None else ()
        if self._connected is not None and marks and not self.busy() and all(map(mark_lives, marks)):
            with contextlib.suppress(Exception):  # whatever it is, the processes end now
                self.send(engine_calls.end, (), {}, self.everybody).wait(_END_S)
        self.let_go()
        self.processes.stop(marks)

    def let_go(self) -> None:
        """Disconnect from the engines; they go on."""
        if self._connected is not None:
            self._connected.close()
            self._connected = None

    def raise_if_dead(self) -> None:
        """Raise RankDiedError if a rank's process has ended, with what is known of the first one."""
        if all(map(mark_lives, self.record.rank_marks)):
            return
        with self._lives:  # a restart in another thread has its own reasons to end them
            marks = self.record.rank_marks
            dead = tuple(r for r, mark in enumerate(marks) if not mark_lives(mark))
            if not dead or self._follow_restart():
                return
            if self._death is None:
                self._death = self._bury(dead)
            raise RankDiedError(str(self._death), dead=self._death.dead)

    def _bury(self, dead: tuple[int, ...]) -> RankDiedError:
        """End what is left of the ranks, and say why the first of them ended."""
        failure = self.processes.await_failure(self.spec)
        orphaned = not mark_lives(self.processes.agent)
        headless = not mark_lives(self.record.controller)
        self._cells.clear()
        self.processes.stop_agent(self.record.rank_marks)  # torchrun lets the others live after a rank of status 0
        if failure is not None:
            told, dead = self._why_ended(), (failure.world_rank,)
        elif headless:
            told = (
                f"the controller was killed: {ranks_words(dead)} ended with it\nclose() this cluster and start another"
            )
            return RankDiedError(told, dead=dead)
        elif orphaned:
            told = f"the torchrun agent that holds the ranks was killed: {ranks_words(dead)} ended with it"
        else:
            told = f"{ranks_words(dead)} ended, with status 0 or unseen"
        return RankDiedError(
            f"{told}\nthe other ranks were ended with it; cluster.restart() starts all of them again", dead=dead
        )

    # --- cells ----------------------------------------------------------------------------------------------------

    def send(
        self, work: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], ranks: Sequence[int]
    ) -> Cell:
        """Have `ranks` run code, or a function with these arguments. Does not wait."""
        cell = self.engines.send(work, args, kwargs, ranks)
        self._cells.append(cell)
        return cell

    def answered(self, cell: Cell) -> None:
        """Forget a cell that every rank has answered; a restart in another thread has forgotten it before."""
        self._cells = [other for other in self._cells if other is not cell]

    def busy(self) -> tuple[int, ...]:
        """World ranks inside a cell, of this driver or of one before it."""
        busy = {r for cell in self._cells for r in cell.running}
        if self._left_busy and self._connected is not None:
            self._left_busy &= self._connected.busy()
        return tuple(sorted(busy | self._left_busy))

    def ask_who_is_busy(self) -> None:
        """For ranks that may be in a cell of which this driver does not know: the hub does."""
        self._left_busy = self.engines.busy()

    def interrupt(self, chosen: Sequence[int], wait_s: float | None) -> tuple[int, ...]:
        """Send SIGINT to those of `chosen` that are busy; gives the world ranks still busy after `wait_s`."""
        busy = [r for r in self.busy() if r in chosen]
        for r in busy:
            if mark_lives(self.record.rank_marks[r]):
                os.kill(mark_pid(self.record.rank_marks[r]), signal.SIGINT)
        deadline = time.monotonic() + (_INTERRUPT_S[self.record.device] if wait_s is None else wait_s)
        while (still := set(busy) & set(self.busy())) and time.monotonic() < deadline:
            time.sleep(0.01)
        self._cells = [cell for cell in self._cells if cell.running]
        return tuple(sorted(still))

    def rebuild(self) -> None:
        """Interrupt what runs; the same processes make all groups anew. Raises: DeadlineError, RankDiedError."""
        self.raise_if_dead()
        stuck = self.interrupt(self.everybody, None)
        if stuck:
            raise DeadlineError(
                f"rebuild: {ranks_words(stuck)} did not come back from an interrupt "
                f"(waiting in C++, or ignoring it); wait for the deadline of their call, or cluster.restart()",
                missing=stuck,
            )
        self.begin(self.next_generation())

    def where(self) -> Diagnosis:
        """Where each rank stands."""
        return stand(
            self.processes.directory,
            self.record.rank_marks,
            generation=self.record.generation,
            busy=self.busy(),
            sources=self.engines.sources,
        )

    # --- helpers --------------------------------------------------------------------------------------------------

    def _await_engines(self) -> None:
        """Return once every rank is registered under its own number."""
        log = f"agent-{self.spec.attempt}.log"
        self.engines.await_all(self.spec.ranks, log=log, why_ended=self._why_ended)

    def _follow_restart(self) -> bool:
        """Whether another driver has restarted the ranks meanwhile; then its ranks are this one's as well."""
        with contextlib.suppress(FileNotFoundError):
            record = ClusterRecord.load(self.processes.directory)
            if record.attempt != self.record.attempt and all(map(mark_lives, record.rank_marks)):
                self._take_over(record)
                self._cells.clear()
                return True
        return False

    def _take_over(self, record: ClusterRecord) -> None:
        self._record = record
        self._death = None
        self.processes.agent = record.agent
        self.spec = EngineSpec.load(record.engines_file)

    def _why_ended(self) -> str:
        """The first failure in words; of a rank that a signal killed, the lines of Python it was in."""
        failure = self.processes.first_failure(self.spec)
        sources = self._connected.sources if self._connected is not None else {}
        stack = last_stack(self.spec.stacks_file(failure.world_rank), sources) if failure is not None else ()
        if failure is not None and stack:
            return "\n".join([f"world rank {failure.world_rank}: {failure.message}", *(f"      {s}" for s in stack)])
        return self.processes.why_ended(self.spec)
