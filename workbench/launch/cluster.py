"""Cluster: real ranks that live between the cells of a notebook, on this host."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

import ipyparallel

from workbench.errors import (
    ArgumentError,
    ClosedError,
    DeadlineError,
    LayoutError,
    ResourceError,
    UnsupportedPlatformError,
)
from workbench.launch import engine_calls
from workbench.launch.asked import count_ranks, place_ranks
from workbench.launch.cell import Cell
from workbench.launch.current import enter_notebook
from workbench.launch.directory import ClusterRecord, claim_directory, connection_file, find_records
from workbench.launch.engines import Engines
from workbench.launch.failure import CellDeadlineError, RankDiedError, RanksFailedError
from workbench.launch.interrupts import interrupts_later
from workbench.launch.processes import Processes
from workbench.launch.selection import Ranks, ranks_label, ranks_words, select_ranks
from workbench.launch.show import choose_display
from workbench.launch.spec import EngineSpec
from workbench.launch.standing import ClusterStatus, Diagnosis, stand
from workbench.launch.survivors import mark_lives, mark_pid, run_tag
from workbench.ranks import GroupMap
from workbench.settings import Settings, check_timeout

_INTERRUPT_S = {"cpu": 1.0, "cuda": 3.0}  # NCCL takes a moment to abort
_END_S = 1.0


class Cluster:
    """`ranks` processes under torchrun, each an ipyparallel engine whose id is its world rank.

    with Cluster(ranks=4) as cluster:
        cluster.run("x = torch.full((2,), 10.0 ** rank); dist.all_reduce(x); print(x)")

    In IPython, `%%ranks` runs a cell on them. Ranks know the names rank, world_size, device, torch, dist and group_map,
    and `session`, a Session, if there is a group map. The default process group is made.
    ranks: default 4, or the world of the group map.
    device: "cpu" or "cuda", which needs a GPU for each rank; default WORKBENCH_DEVICE, else cuda if they suffice.
    WORKBENCH_DEVICE=cuda with fewer GPUs than ranks gives CPU ranks, and says so.
    timeout_s: how long a rank waits for another inside a call; default WORKBENCH_TIMEOUT_S, else 60.
    keep: whether the ranks go on when this process ends, to be found with Cluster.attach(). By default nothing does.
    Everything listens on the loopback interface alone; messages are signed; files are private to this user.
    Interrupting a cell ends waits inside collectives, on CPU in well under a second, on CUDA in about one, and keeps
    the ranks. On CPU what waits in C++ by itself (DistributedDataParallel) ends at its process group's timeout; on CUDA
    the kernels of a Session end at timeout_s, and NCCL ends a rank whose collective nobody interrupts for timeout_s.
    Raises: ResourceError if the ranks do not come up, with the first rank's own traceback.
    """

    _spec: EngineSpec
    _connected: Engines | None

    def __init__(
        self,
        ranks: int | None = None,
        *,
        device: str | None = None,
        timeout_s: float | None = None,
        group_map: GroupMap | None = None,
        keep: bool = False,
    ) -> None:
        if sys.platform != "linux":
            raise UnsupportedPlatformError(f"a Cluster needs Linux (/proc, pidfds, prctl); this is {sys.platform}")
        settings = Settings.read()
        num_ranks = count_ranks(ranks, group_map)
        timeout_s = settings.timeout_s if timeout_s is None else check_timeout(timeout_s)
        directory = claim_directory()
        processes = Processes(directory, keep=keep)
        self._init(processes, group_map)
        self._spec = EngineSpec(
            ranks=num_ranks,
            connection_file=str(connection_file(directory, "engine")),
            directory=str(directory),
            device=place_ranks(device, settings.device, num_ranks),
            timeout_s=timeout_s,
            group_map=group_map.to_json() if group_map is not None else None,
        )
        try:
            processes.start_controller()
            self._spec = replace(self._spec, owner=processes.controller)
            processes.start_agent(self._spec)
            self._connected = Engines(processes)
            self._await_engines()
            self._begin(0)
        except BaseException:
            self.close()
            raise
        enter_notebook(self)

    @classmethod
    def find(cls) -> tuple[str, ...]:
        """The names of this user's running clusters on this host, oldest first."""
        return tuple(record.name for record in find_records())

    @classmethod
    def attach(cls, name: str | None = None) -> Cluster:
        """The running cluster of this name (default: the only one), as it was left; its ranks keep what they hold.

        It still ends when its owner does, unless it was started with keep=True.
        Raises: ResourceError if there is none, or several and no name.
        """
        records = [r for r in find_records() if name in (None, r.name)]
        if len(records) != 1:
            there = ", ".join(r.name for r in records) or "none"
            asked = f"cluster {name!r}" if name is not None else "the running cluster"
            raise ResourceError(
                f"{asked} cannot be attached; running: {there}; name one of them, or start one: Cluster(keep=True)"
            )
        self = cls.__new__(cls)
        record = records[0]
        group_map = GroupMap.from_json(record.group_map) if record.group_map is not None else None
        processes = Processes(record.directory, keep=record.keep, controller=record.controller)
        self._init(processes, group_map)
        self._finalizer.detach()  # whoever started it, or nobody, ends it
        self._take_over(record)
        self._connected = Engines(processes)
        if all(map(mark_lives, record.rank_marks)):  # else it can still be restarted
            self._await_engines()
            self._left_busy = self._engines.busy()
        enter_notebook(self)
        return self

    def _init(self, processes: Processes, group_map: GroupMap | None) -> None:
        self._processes = processes
        self._group_map = group_map
        self._record: ClusterRecord | None = None
        self._connected = None
        self._cells: list[Cell] = []
        self._left_busy: set[int] = set()  # busy with what an earlier driver sent
        self._closed = False
        self._finalizer = weakref.finalize(self, processes.stop, ())
        if processes.keep:
            self._finalizer.atexit = False

    @property
    def name(self) -> str:
        """What Cluster.attach calls it."""
        return self._processes.directory.name

    @property
    def closed(self) -> bool:
        """Whether this object has let go of its ranks."""
        return self._closed

    @property
    def num_ranks(self) -> int:
        return self._spec.ranks

    @property
    def group_map(self) -> GroupMap | None:
        return self._group_map

    @property
    def device(self) -> str:
        """Where the ranks' tensors are: "cpu" or "cuda"."""
        return self._known().device

    @property
    def directory(self) -> Path:
        """The private directory with logs (`*.log`) and traces (`trace`, `session`)."""
        return self._processes.directory

    @property
    def client(self) -> ipyparallel.Client:
        """ipyparallel's client, for what this class does not offer. Engine id = world rank."""
        self._check_open()
        return self._engines.client

    @property
    def status(self) -> ClusterStatus:
        """Who lives, who is in a cell, the generation of the groups, the pids."""
        marks = self._record.rank_marks if self._record is not None else ()
        return ClusterStatus(
            alive=tuple(r for r, mark in enumerate(marks) if mark_lives(mark)),
            busy=self._busy(),
            generation=self._record.generation if self._record is not None else 0,
            pids=tuple(map(mark_pid, marks)),
        )

    def view(self, kind: str | None = None, index: int | None = None) -> Any:
        """ipyparallel views. Of a kind: a tuple with one for each group in creation order, or the one at `index`.

        Without a kind, one view of all ranks. Raises: LayoutError for a kind or index that is not there.
        """
        self._check_open()
        if kind is None:
            return self._engines.client[:]
        if self._group_map is None:
            raise LayoutError(
                f"view({kind!r}): this cluster has no group map; start it with group_map=GroupMap.build(...)"
            )
        keys = self._group_map.keys(kind)
        if index is None:
            return tuple(self._engines.client[list(key.world_ranks)] for key in keys)
        if not 0 <= index < len(keys):
            raise LayoutError(f"view({kind!r}, {index}): {kind} has {len(keys)} groups, numbered 0..{len(keys) - 1}")
        return self._engines.client[list(keys[index].world_ranks)]

    def run(
        self,
        work: str | Callable[..., Any],
        *args: Any,
        ranks: Ranks = None,
        deadline_s: float | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """Run code, or a function with these arguments, on `ranks`, and show what they print.

        Gives what the function returned, by world rank; for code None each.
        ranks: all by default; "0,2", "1-3", "tp", "tp:0", a number or numbers.
        deadline_s: past it CellDeadlineError says where each rank stands; the ranks live and go on.
        Ctrl-C interrupts the ranks, and is raised here once they are back.
        Raises: RanksFailedError with the first cause first; RankDiedError if a rank's process ended; ClosedError if
        one of the ranks is still in an earlier cell.
        """
        chosen = select_ranks(ranks, self.num_ranks, self._group_map)
        if not isinstance(work, str) and not callable(work):
            raise ArgumentError(f"run({work!r}); allowed: code as text, or a function")
        if deadline_s is not None:
            deadline_s = check_timeout(deadline_s, "deadline_s")
        display = choose_display()
        self._check_ready(chosen)
        try:
            cell = self._send(work, args, kwargs, chosen)
        except KeyboardInterrupt:  # some ranks may have it: the hub knows which
            self._left_busy = self._engines.busy()
            raise
        try:
            cell.watch(display, self._raise_if_dead, deadline_s=deadline_s)
        except TimeoutError:
            raise self._deadline_error(cell, deadline_s or 0.0) from None
        except KeyboardInterrupt:
            inside = cell.running
            stuck = self.interrupt(cell.world_ranks)
            raise KeyboardInterrupt(
                f"not back yet: {ranks_words(stuck)}; a wait in C++ ends at its deadline, or with cluster.restart()"
                if stuck
                else f"interrupted: {ranks_words(inside)}; if in a collective, cluster.rebuild() comes next"
            ) from None
        self._cells.remove(cell)
        errors = cell.errors()
        if errors:
            echoes = len({str(error) for error in errors}) > 1
            raise RanksFailedError(errors, self.where().waits if echoes else ())
        return cell.values

    def where(self) -> Diagnosis:
        """Where each rank stands: stack down to the line of the cell, last call, who is missing. Disturbs nobody."""
        record = self._known()
        return stand(
            self.directory,
            record.rank_marks,
            generation=record.generation,
            busy=self._busy(),
            sources=self._engines.sources,
        )

    def xray(self) -> Any:
        """What went wrong, as a workbench.xray.ClusterXray: findings, where each rank stands, who waits for whom.

        Disturbs nobody. A rank that is not in a call while others wait for it there counts as missing from it.
        """
        self._check_open()
        return import_module("workbench.xray").xray_cluster(self.directory)  # by name: it stands above this room

    def interrupt(self, ranks: Ranks = None, *, wait_s: float | None = None) -> tuple[int, ...]:
        """Interrupt what runs on `ranks`, as Ctrl-C would. Gives the world ranks still busy after `wait_s`.

        wait_s: default 1 on cpu; 3 on cuda, where NCCL's communicators are aborted if a rank waits for its GPU.
        A rank interrupted inside a collective has lost step with its peers: call rebuild() next.
        """
        chosen = select_ranks(ranks, self.num_ranks, self._group_map)
        record = self._known()
        busy = [r for r in self._busy() if r in chosen]
        for r in busy:
            if mark_lives(record.rank_marks[r]):
                os.kill(mark_pid(record.rank_marks[r]), signal.SIGINT)
        deadline = time.monotonic() + (_INTERRUPT_S[record.device] if wait_s is None else wait_s)
        while (still := set(busy) & set(self._busy())) and time.monotonic() < deadline:
            time.sleep(0.01)
        self._cells = [cell for cell in self._cells if cell.running]
        return tuple(sorted(still))

    def rebuild(self) -> None:
        """Make all process groups anew in the same processes: what ranks hold stays, and the next collective is right.

        Interrupts what still runs. The default group, and `session` with all it had prepared, are usable at once; a
        session that a cell closed is another one, with nothing prepared. Groups made by cells with dist.new_group are
        gone. For after an interrupt or a deadline inside a collective, or a rebuild that did not succeed.
        Raises: DeadlineError if a rank does not come back, which then waits in C++; RankDiedError.
        """
        self._raise_if_dead()
        stuck = self.interrupt()
        if stuck:
            raise DeadlineError(
                f"rebuild: {ranks_words(stuck)} did not come back from an interrupt "
                f"(waiting in C++, or ignoring it); wait for the deadline of their call, or cluster.restart()",
                missing=stuck,
            )
        self._begin(self._next_generation())

    def restart(self) -> None:
        """New processes with the same world ranks; what the old ones held is gone. Also after a rank has died."""
        self._follow_restart()
        record = self._known()
        if not mark_lives(record.controller):
            raise ClosedError(f"the controller of cluster {self.name} has ended; close() it and start another")
        generation = self._next_generation()
        self._processes.stop_agent(record.rank_marks)
        self._engines.unregister(self.num_ranks)
        for old in self.directory.glob("*/*.wbtrace"):
            old.unlink()
        self._cells.clear()
        self._left_busy.clear()
        self._spec = replace(self._spec, attempt=self._spec.attempt + 1)
        self._processes.start_agent(self._spec)
        self._await_engines()
        self._begin(generation)

    def close(self) -> None:
        """End all processes of the cluster, and clear its directory away. Twice is fine.

        Takes at most some seconds; Ctrl-C meanwhile is raised when all is done.
        """
        if not self._closed:
            with interrupts_later():
                self._close()

    def _close(self) -> None:
        marks = self._record.rank_marks if self._record is not None else ()
        if self._connected is not None and marks and not self._busy() and all(map(mark_lives, marks)):
            with contextlib.suppress(Exception):  # whatever it is, the processes end now
                self._send(engine_calls.end, (), {}, tuple(range(self.num_ranks))).wait(_END_S)
        self._closed = True
        self._finalizer.detach()
        if self._connected is not None:
            self._connected.close()
        self._processes.stop(marks)

    def detach(self) -> None:
        """Let go of the cluster without ending it; it is found again while its owner lives, or if it is kept."""
        self._closed = True
        self._finalizer.detach()
        if self._connected is not None:
            self._connected.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._closed or self._record is None:
            return f"Cluster({self.name}, closed)"
        status = self.status
        dead = sorted(set(range(self.num_ranks)) - set(status.alive))
        state = f"dead: {ranks_label(dead)}" if dead else f"busy: {ranks_label(status.busy)}" if status.busy else "idle"
        return (
            f"Cluster({self.name}, {self.num_ranks} ranks on {self.device}, {state}, generation {status.generation}, "
            f"pids {', '.join(map(str, status.pids))})"
        )

    # --- starting -------------------------------------------------------------------------------------------------

    @property
    def _engines(self) -> Engines:
        assert self._connected is not None
        return self._connected

    def _await_engines(self) -> None:
        """Return once every rank is registered under its own number."""
        self._engines.await_all(self.num_ranks, log=f"agent-{self._spec.attempt}.log", why_ended=self._why_ended)

    def _begin(self, generation: int) -> None:
        """Have the ranks make their groups, and write down what a later driver needs."""
        everybody = tuple(range(self.num_ranks))
        with interrupts_later():  # ranks that half of them left would wait for these in C++
            cell = self._send(engine_calls.begin, (generation,), {}, everybody)
            cell.wait(_END_S)
        told = self._engines.await_groups(cell, timeout_s=self._spec.timeout_s + 30, why_ended=self._why_ended)
        self._cells.remove(cell)
        self._record = ClusterRecord(
            name=self.name,
            ranks=self.num_ranks,
            device=told[0][1],
            timeout_s=self._spec.timeout_s,
            keep=self._processes.keep,
            controller=self._processes.controller,
            agent=self._processes.agent,
            rank_marks=tuple(run_tag(pid) for pid, _ in told),
            group_map=self._spec.group_map,
            generation=generation,
            attempt=self._spec.attempt,
            started_s=self._record.started_s if self._record is not None else time.time(),
        )
        self._record.save()

    def _next_generation(self) -> int:
        """A number that no attempt has used, of any driver: the store keeps what a failed one left."""
        record = self._known()
        self._record = replace(record, generation=record.load(self.directory).generation + 1)
        self._record.save()
        return self._record.generation

    # --- cells ----------------------------------------------------------------------------------------------------

    def _send(
        self, work: str | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], ranks: tuple[int, ...]
    ) -> Cell:
        cell = self._engines.send(work, args, kwargs, ranks)
        self._cells.append(cell)
        return cell

    def _busy(self) -> tuple[int, ...]:
        """World ranks inside a cell, of this driver or of one before it."""
        busy = {r for cell in self._cells for r in cell.running}
        if self._left_busy and not self._closed:
            self._left_busy &= self._engines.busy()
        return tuple(sorted(busy | self._left_busy))

    def _deadline_error(self, cell: Cell, deadline_s: float) -> CellDeadlineError:
        inside = cell.running or cell.world_ranks  # they may come back at this very moment
        where = self.where()
        return CellDeadlineError(
            f"{deadline_s:g} s have passed; still in {cell.text}, alive and going on: {ranks_words(inside)}\n"
            f"{where}\nnext: cluster.interrupt(), then cluster.rebuild() if they were in a collective",
            missing=where.missing,
        )

    # --- checks ---------------------------------------------------------------------------------------------------

    def _known(self) -> ClusterRecord:
        self._check_open()
        assert self._record is not None
        return self._record

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"cluster {self.name} is closed; start another: Cluster(ranks={self.num_ranks})")

    def _check_ready(self, ranks: tuple[int, ...]) -> None:
        self._check_open()
        self._raise_if_dead()
        busy = [r for r in self._busy() if r in ranks]
        if busy:
            raise ClosedError(
                f"still in an earlier cell: {ranks_words(busy)}; cluster.where() shows where, cluster.interrupt() "
                f"ends it; or choose other ranks"
            )

    def _raise_if_dead(self) -> None:
        """Raise RankDiedError if a rank's process has ended, with what the agent says of the first one."""
        record = self._known()
        dead = tuple(r for r, mark in enumerate(record.rank_marks) if not mark_lives(mark))
        if not dead:
            return
        if self._follow_restart():
            return
        failure = self._processes.await_failure(self._spec)
        self._cells.clear()
        self._processes.stop_agent(record.rank_marks)  # torchrun lets the others live after a rank of status 0
        told = self._why_ended() if failure is not None else f"{ranks_words(dead)} ended, with status 0 or unseen"
        raise RankDiedError(
            f"{told}\nthe other ranks were ended with it; cluster.restart() starts all of them again",
            dead=dead if failure is None else (failure.world_rank,),
        )

    def _follow_restart(self) -> bool:
        """Whether another driver has restarted the ranks meanwhile; then its ranks are this one's as well."""
        with contextlib.suppress(FileNotFoundError):
            record = ClusterRecord.load(self.directory)
            if record.attempt != self._known().attempt and all(map(mark_lives, record.rank_marks)):
                self._take_over(record)
                self._cells.clear()
                return True
        return False

    def _take_over(self, record: ClusterRecord) -> None:
        self._record = record
        self._processes.agent = record.agent
        self._spec = EngineSpec.load(record.directory / f"engines-{record.attempt}.json")

    def _why_ended(self) -> str:
        return self._processes.why_ended(self._spec)
