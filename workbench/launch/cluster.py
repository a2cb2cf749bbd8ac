"""Cluster: real ranks that live between the cells of a notebook, on this host."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

import ipyparallel

from workbench.errors import ArgumentError, ClosedError, LayoutError, UnsupportedPlatformError
from workbench.launch.asked import count_ranks, place_ranks
from workbench.launch.cell import Cell
from workbench.launch.crew import Crew
from workbench.launch.current import enter_notebook
from workbench.launch.directory import claim_directory, connection_file, find_record, find_records
from workbench.launch.failure import CellDeadlineError, RanksFailedError
from workbench.launch.interrupts import interrupts_later
from workbench.launch.open_files import check_open_files
from workbench.launch.processes import Processes
from workbench.launch.selection import Ranks, ranks_label, ranks_words, select_ranks
from workbench.launch.show import choose_display
from workbench.launch.spec import EngineSpec
from workbench.launch.standing import ClusterStatus, Diagnosis
from workbench.ranks import GroupMap
from workbench.settings import Settings, check_timeout


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
        place = place_ranks(device, settings.device, num_ranks, share=settings.share_gpus)
        check_open_files(num_ranks)
        directory = claim_directory(num_ranks)
        spec = EngineSpec(
            ranks=num_ranks,
            connection_file=str(connection_file(directory, "engine")),
            directory=str(directory),
            device=place,
            timeout_s=timeout_s,
            group_map=group_map.to_json() if group_map is not None else None,
        )
        self._hold(Crew(Processes(directory, keep=keep), spec), group_map)
        try:
            self._crew.start()
            enter_notebook(self)
        except BaseException:
            self.close()
            raise

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
        record = find_record(name)
        self = cls.__new__(cls)
        group_map = GroupMap.from_json(record.group_map) if record.group_map is not None else None
        processes = Processes(record.directory, keep=record.keep, controller=record.controller)
        self._hold(Crew(processes, EngineSpec.load(record.engines_file)), group_map)
        self._finalizer.detach()  # whoever started it, or nobody, ends it
        try:
            self._crew.attach(record)
            enter_notebook(self)
        except BaseException:
            self.detach()
            raise
        return self

    def _hold(self, crew: Crew, group_map: GroupMap | None) -> None:
        self._crew = crew
        self._group_map = group_map
        self._closed = False
        self._finalizer = weakref.finalize(self, crew.processes.stop, ())
        if crew.processes.keep:
            self._finalizer.atexit = False

    @property
    def name(self) -> str:
        """What Cluster.attach calls it."""
        return self._crew.processes.directory.name

    @property
    def closed(self) -> bool:
        """Whether this object has let go of its ranks."""
        return self._closed

    @property
    def num_ranks(self) -> int:
        return self._crew.spec.ranks

    @property
    def group_map(self) -> GroupMap | None:
        return self._group_map

    @property
    def device(self) -> str:
        """Where the ranks' tensors are: "cpu" or "cuda"."""
        self._check_open()
        return self._crew.record.device

    @property
    def directory(self) -> Path:
        """The private directory with logs (`*.log`) and traces (`trace`, `session`)."""
        return self._crew.processes.directory

    @property
    def client(self) -> ipyparallel.Client:
        """ipyparallel's client, for what this class does not offer. Engine id = world rank."""
        self._check_open()
        return self._crew.engines.client

    @property
    def status(self) -> ClusterStatus:
        """Who lives, who is in a cell, the generation of the groups, the pids."""
        return self._crew.status

    def view(self, kind: str | None = None, index: int | None = None) -> Any:
        """ipyparallel views. Of a kind: a tuple with one for each group in creation order, or the one at `index`.

        Without a kind, one view of all ranks. Raises: LayoutError for a kind or index that is not there.
        """
        self._check_open()
        if kind is None:
            return self._crew.engines.client[:]
        if self._group_map is None:
            raise LayoutError(
                f"view({kind!r}): this cluster has no group map; start it with group_map=GroupMap.build(...)"
            )
        keys = self._group_map.keys(kind)
        if index is None:
            return tuple(self._crew.engines.client[list(key.world_ranks)] for key in keys)
        if not 0 <= index < len(keys):
            raise LayoutError(f"view({kind!r}, {index}): {kind} has {len(keys)} groups, numbered 0..{len(keys) - 1}")
        return self._crew.engines.client[list(keys[index].world_ranks)]

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
            cell = self._crew.send(work, args, kwargs, chosen)
        except KeyboardInterrupt:  # some ranks may have it: the hub knows which
            self._crew.ask_who_is_busy()
            raise
        try:
            cell.watch(display, self._crew.raise_if_dead, deadline_s=deadline_s)
        except TimeoutError:
            raise self._deadline_error(cell, deadline_s or 0.0) from None
        except KeyboardInterrupt:
            raise self._interrupted(cell) from None
        self._crew.answered(cell)
        errors = cell.errors()
        if errors:
            echoes = len({str(error) for error in errors}) > 1
            raise RanksFailedError(errors, self.where().waits if echoes else ())
        return cell.values

    def where(self) -> Diagnosis:
        """Where each rank stands: stack down to the line of the cell, last call, who is missing. Disturbs nobody."""
        self._check_open()
        return self._crew.where()

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
        self._check_open()
        return self._crew.interrupt(chosen, wait_s)

    def rebuild(self) -> None:
        """Make all process groups anew in the same processes: what ranks hold stays, and the next collective is right.

        Interrupts what still runs. The default group, and `session` with all it had prepared, are usable at once; a
        session that a cell closed is another one, with nothing prepared. Groups made by cells with dist.new_group are
        gone. For after an interrupt or a deadline inside a collective, or a rebuild that did not succeed.
        Raises: DeadlineError if a rank does not come back, which then waits in C++; RankDiedError.
        """
        self._check_open()
        self._crew.rebuild()

    def restart(self) -> None:
        """New processes with the same world ranks; what the old ones held is gone. Also after a rank has died."""
        self._check_open()
        self._crew.restart()

    def close(self) -> None:
        """End all processes of the cluster, and clear its directory away. Twice is fine.

        Takes at most some seconds; Ctrl-C meanwhile is raised when all is done.
        """
        if not self._closed:
            with interrupts_later():
                self._closed = True
                self._finalizer.detach()
                self._crew.stop()

    def detach(self) -> None:
        """Let go of the cluster without ending it; it is found again while its owner lives, or if it is kept."""
        self._closed = True
        self._finalizer.detach()
        self._crew.let_go()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._closed:
            return f"Cluster({self.name}, closed)"
        status = self.status
        dead = sorted(set(range(self.num_ranks)) - set(status.alive))
        state = f"dead: {ranks_label(dead)}" if dead else f"busy: {ranks_label(status.busy)}" if status.busy else "idle"
        return (
            f"Cluster({self.name}, {self.num_ranks} ranks on {self.device}, {state}, generation {status.generation}, "
            f"pids {', '.join(map(str, status.pids))})"
        )

    # --- checks ---------------------------------------------------------------------------------------------------

    def _interrupted(self, cell: Cell) -> KeyboardInterrupt:
        """Pass a Ctrl-C on to the ranks; another one, of an impatient user, is one with it. Gives what to raise."""
        inside = stuck = cell.running
        with contextlib.suppress(KeyboardInterrupt), interrupts_later():
            stuck = self.interrupt(cell.world_ranks)
        if stuck:
            return KeyboardInterrupt(
                f"not back yet: {ranks_words(stuck)}; a wait in C++ ends at its deadline, or with cluster.restart()"
            )
        if not inside:
            return KeyboardInterrupt("it came when every rank had ended the cell already")
        return KeyboardInterrupt(
            f"interrupted: {ranks_words(inside)}; if in a collective, cluster.rebuild() comes next"
        )

    def _deadline_error(self, cell: Cell, deadline_s: float) -> CellDeadlineError:
        inside = cell.running or cell.world_ranks  # they may come back at this very moment
        where = self.where()
        return CellDeadlineError(
            f"{deadline_s:g} s have passed; still in {cell.text}, alive and going on: {ranks_words(inside)}\n"
            f"{where}\nnext: cluster.interrupt(), then cluster.rebuild() if they were in a collective",
            missing=where.missing,
        )

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"cluster {self.name} is closed; start another: Cluster(ranks={self.num_ranks})")

    def _check_ready(self, ranks: tuple[int, ...]) -> None:
        self._check_open()
        self._crew.raise_if_dead()
        busy = [r for r in self._crew.busy() if r in ranks]
        if busy:
            raise ClosedError(
                f"still in an earlier cell: {ranks_words(busy)}; cluster.where() shows where, cluster.interrupt() "
                f"ends it; or choose other ranks"
            )
