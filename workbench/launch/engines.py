"""The ranks as ipyparallel knows them: a client of the controller, an engine for each world rank, and work for them."""

from __future__ import annotations

import contextlib
import json
import socket
import textwrap
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ipyparallel
import zmq
from ipykernel.compiler import get_file_name
from jupyter_client.session import Session as MessageSession

from workbench.errors import DeadlineError, ResourceError
from workbench.launch.cell import Cell
from workbench.launch.directory import connection_file
from workbench.launch.failure import RanksFailedError
from workbench.launch.processes import Processes
from workbench.launch.selection import ranks_words
from workbench.launch.survivors import mark_lives

_START_S = 120.0
_CONNECT_S = 10.0
_LOOK_S = 1.0
_MOST_SOURCES = 500


class Engines:
    """The engines behind one controller. Engine id = world rank."""

    def __init__(self, processes: Processes) -> None:
        """Connect, once the controller of `processes` has written where it listens. Raises: ResourceError."""
        self._processes = processes
        self._info: dict[str, Any] = {}
        self._sources: OrderedDict[str, list[str]] = OrderedDict()
        path = connection_file(processes.directory, "client")
        deadline = time.monotonic() + _START_S
        while not self._info:
            if not mark_lives(processes.controller):
                raise ResourceError(f"the controller ended at once: {processes.log_tail('controller.log')}")
            if time.monotonic() > deadline:
                raise ResourceError(f"no controller after {_START_S:g} s: {processes.log_tail('controller.log')}")
            with contextlib.suppress(FileNotFoundError, ValueError):
                self._info = json.loads(path.read_text())
            time.sleep(0.02)
        address = self._info["interface"].removeprefix("tcp://")
        try:
            socket.create_connection((address, self._info["registration"]), timeout=_CONNECT_S).close()
        except OSError as e:
            raise ResourceError(
                f"the controller cannot be reached at {address}: {e.strerror or e}; the loopback interface must be up "
                f"(ip link set lo up)"
            ) from e
        try:
            home = str(processes.directory / "ipython")  # the user's may not be writable, and nothing in it is needed
            self.client = _Client(self._info, ipython_dir=home, timeout=_START_S)
        except TimeoutError as e:
            raise ResourceError(
                f"the controller runs and does not answer in {_START_S:g} s: {processes.log_tail('controller.log')}"
            ) from e

    @property
    def sources(self) -> Mapping[str, Sequence[str]]:
        """The lines of the latest cells, by the name of the file that Python knows each by."""
        return self._sources

    def await_all(self, num_ranks: int, *, log: str, why_ended: Callable[[], str]) -> None:
        """Return once every rank is registered under its own number.

        Raises: ResourceError if the agent ends before, or the controller cannot take up ranks.
        """
        wanted = list(range(num_ranks))
        deadline = time.monotonic() + _START_S
        look_at = time.monotonic()
        while sorted(self.client.ids) != wanted:
            if not mark_lives(self._processes.agent):
                raise ResourceError(f"the ranks did not come up: {why_ended()}")
            if time.monotonic() > look_at:  # not every time: it reads the state of every process of this host
                look_at = time.monotonic() + _LOOK_S
                self._check_controller()
            if time.monotonic() > deadline:
                missing = sorted(set(wanted) - set(self.client.ids))
                told = self._processes.log_tail(log)
                raise ResourceError(f"{ranks_words(missing)} did not come up in {_START_S:g} s: {told}")
            time.sleep(0.02)

    def _check_controller(self) -> None:
        if not self._processes.can_register():
            told = self._processes.log_tail("controller.log")
            raise ResourceError(f"the ranks did not come up: the controller, or its heart monitor, ended: {told}")

    def send(
        self, work: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], ranks: Sequence[int]
    ) -> Cell:
        """Have `ranks` run code, or a function with these arguments. Does not wait."""
        if isinstance(work, str):
            code = textwrap.dedent(work).lstrip("\n")  # IPython counts lines without leading blank ones
            self._remember(code)
            results = {r: self.client[r].execute(code, silent=False, block=False) for r in ranks}
            return Cell(results, "a cell")
        results = {r: self.client[r].apply_async(work, *args, **kwargs) for r in ranks}
        return Cell(results, getattr(work, "__name__", "a function"))

    def await_groups(self, cell: Cell, *, timeout_s: float, why_ended: Callable[[], str]) -> tuple[Any, ...]:
        """What the ranks give back of making their groups.

        Raises: ResourceError if a rank ended, DeadlineError, RanksFailedError.
        """
        deadline = time.monotonic() + timeout_s
        while cell.running and time.monotonic() < deadline:
            if not mark_lives(self._processes.agent):
                raise ResourceError(f"a rank ended while groups were made: {why_ended()}")
            time.sleep(0.005)
        if cell.running:
            raise DeadlineError(
                f"still making groups after {timeout_s:g} s: {ranks_words(cell.running)}", missing=cell.running
            )
        errors = cell.errors()
        if errors:
            raise RanksFailedError(errors)
        return cell.values

    def busy(self) -> set[int]:
        """World ranks that the hub has work for, whoever sent it."""
        queues = self.client.queue_status()
        return {r for r, queue in queues.items() if isinstance(r, int) and queue["queue"]}

    def unregister(self, num_ranks: int) -> None:
        """Tell the hub that the engines are gone: it would keep their numbers from those that come next."""
        session = MessageSession(key=self._info["key"].encode(), signature_scheme=self._info["signature_scheme"])
        dealer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        dealer.linger = 1000
        dealer.curve_serverkey = self._info["curve_serverkey"].encode()
        dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
        try:
            dealer.connect(f"{self._info['interface']}:{self._info['registration']}")
            for r in range(num_ranks):
                session.send(dealer, "unregistration_request", content={"id": r})
        finally:
            dealer.close()
        deadline = time.monotonic() + 5
        while self.client.ids and time.monotonic() < deadline:
            time.sleep(0.01)

    def close(self) -> None:
        """Let go of the controller; the ranks go on."""
        self.client.close()

    def _remember(self, code: str) -> None:
        name = Path(get_file_name(code)).name  # type: ignore[no-untyped-call]  # ipykernel's
        self._sources[name] = code.splitlines()
        if len(self._sources) > _MOST_SOURCES:
            self._sources.popitem(last=False)


class _Client(ipyparallel.Client):  # type: ignore[misc]  # ipyparallel is untyped
    """A client for which an answer that cannot be read here is that rank's error; ipyparallel would wait for ever."""

    def _handle_apply_reply(self, message: Mapping[str, Any]) -> None:
        try:
            super()._handle_apply_reply(message)
        except BaseException as e:  # reading runs what the rank sent, in a thread that must go on
            words = f"{e}; return what can be unpickled outside the ranks: plain data, tensors, arrays"
            error = ipyparallel.RemoteError(type(e).__name__, f"the answer cannot be read here: {words}", "", None)
            request = message["parent_header"]["msg_id"]
            self.results[request] = error
            future = self._futures.get(request)
            if future is not None:
                future.set_result(error)
