"""Pins that a controller's ports are its own from their choice on, and that a start which cannot end says so soon."""

from __future__ import annotations

import json
import socket
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import zmq

from workbench import Cluster
from workbench.errors import ResourceError
from workbench.launch.directory import connection_file, directories
from workbench.launch.ports import reserve_ports
from workbench.launch.processes import Processes
from workbench.launch.spec import EngineSpec
from workbench.launch.survivors import mark_pid


def test_a_reserved_port_is_refused_to_others_and_given_to_who_names_it_as_zeromq_does() -> None:
    (held,) = reserve_ports(1)
    address, port = held.getsockname()
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind((address, port))
    with zmq.Context() as context, context.socket(zmq.REP) as answers, context.socket(zmq.REQ) as asks:
        answers.bind(f"tcp://{address}:{port}")
        asks.connect(f"tcp://{address}:{port}")
        asks.send(b"reached")
        assert answers.poll(5000), "the socket that reserves the port takes no connection"
        assert answers.recv() == b"reached"
    held.close()


def test_nobody_who_asks_for_any_port_is_given_a_reserved_one() -> None:
    held = reserve_ports(200)
    mine = {s.getsockname()[1] for s in held}
    assert len(mine) == 200
    others = [socket.create_server(("127.0.0.1", 0)) for _ in range(400)]
    assert mine.isdisjoint(s.getsockname()[1] for s in others)
    for s in (*held, *others):
        s.close()


def test_ports_that_are_not_free_are_told_with_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    (held,) = reserve_ports(1)

    class Narrow(socket.socket):
        """A machine with a single port, which is taken."""

        def bind(self, address: tuple[str, int]) -> None:  # type: ignore[override]
            super().bind((address[0], held.getsockname()[1]))

    monkeypatch.setattr(socket, "socket", Narrow)
    held.listen()
    with pytest.raises(ResourceError, match=r"3 ports of 127\.0\.0\.1 were asked for and 0 are free \(Address already"):
        reserve_ports(3)
    held.close()


def test_a_controller_takes_no_port_beyond_those_it_reserved() -> None:
    with Cluster(ranks=1, device="cpu") as cluster:
        controller = psutil.Process(mark_pid(cluster._crew.record.controller))
        processes = [controller, *controller.children()]
        sockets = [c for p in processes for c in p.net_connections("tcp")]
        listening = {c.laddr.port for c in sockets if c.status == psutil.CONN_LISTEN}
        told: set[int] = set()
        for kind in ("client", "engine"):
            values = json.loads(connection_file(cluster.directory, kind).read_text()).values()
            told |= {port for v in values for port in (v if isinstance(v, list) else [v]) if isinstance(port, int)}
        log = (cluster.directory / "controller.log").read_text()
    assert len(told) >= 14
    assert told <= listening
    assert "Exhausted" not in log, "ipyparallel takes more ports than are reserved: raise _PORTS"


def test_a_heart_monitor_that_dies_while_the_ranks_come_up_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    start_agent = Processes.start_agent

    def kill_monitor_and_start(self: Processes, spec: EngineSpec) -> None:
        controller = psutil.Process(mark_pid(self.controller))
        deadline = time.monotonic() + 60
        while not controller.children() and time.monotonic() < deadline:
            time.sleep(0.01)
        controller.children()[0].kill()
        start_agent(self, spec)

    monkeypatch.setattr(Processes, "start_agent", kill_monitor_and_start)
    with pytest.raises(ResourceError, match=r"did not come up: the controller, or its heart monitor, ended: "):
        Cluster(ranks=2, device="cpu")


NO_PORT = """
import socket, sys
if "workbench.launch.controller" in sys.orig_argv:
    def bind(*_):
        raise OSError(98, "Address already in use")
    socket.socket.bind = bind
"""


def test_a_controller_that_cannot_start_is_told_with_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_PORT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(
        ResourceError, match=r"the controller ended at once: [\s\S]* 18 ports of 127.0.0.1 were asked for"
    ):
        Cluster(ranks=1, device="cpu")
    assert not list(directories().iterdir())
