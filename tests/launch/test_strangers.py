"""Pins that whoever connects to a cluster's ports without its key costs nobody a cell, and what open files it needs.

Symptom elsewhere: one frame in an old version of ZeroMQ's protocol, which any bytes may happen to be, and ipyparallel's
queue takes the first part of the next cell for the rest of it. The rank never gets that cell.
"""

from __future__ import annotations

import contextlib
import resource
import socket
import time
from collections.abc import Iterator

import psutil
import pytest
import zmq

from tests.forked import run_ranks
from tests.launch import bodies
from workbench import Cluster
from workbench.errors import ResourceError
from workbench.launch.survivors import mark_pid

EVERYBODY = (1111.0,) * 4
ONE_FRAME = b"\x01\x00\x06\x00hello"  # ZMTP 1.0: an empty identity, then five bytes and no more to come
BYTES = (
    ONE_FRAME,
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nUser-Agent: a\r\nAccept: */*\r\n\r\n" * 30,
    bytes(range(256)) * 20,
)


def _ports(cluster: Cluster) -> set[int]:
    """Where the controller, the agent and the ranks listen."""
    crew = cluster._crew
    pids = (mark_pid(crew.processes.controller), mark_pid(crew.processes.agent), *cluster.status.pids)
    return {
        connection.laddr.port
        for pid in pids
        for connection in psutil.Process(pid).net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }


def test_bytes_of_strangers_on_every_port_cost_nobody_a_cell(cluster: Cluster) -> None:
    pids = cluster.run(bodies.pid)
    ports = _ports(cluster)
    assert len(ports) > 20
    for port in ports:
        for words in BYTES:
            with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
                with contextlib.suppress(OSError):  # refused at once
                    stranger.sendall(words)
                time.sleep(0.01)
                assert cluster.run(bodies.pid, deadline_s=20) == pids
    assert cluster.run(bodies.sum_over, deadline_s=20) == EVERYBODY
    cluster.rebuild()
    assert cluster.run(bodies.sum_over, deadline_s=20) == EVERYBODY


def test_a_client_without_the_key_is_not_heard_by_any_queue(cluster: Cluster) -> None:
    context = zmq.Context()
    held = []
    try:
        for port in _ports(cluster):
            held.append(stranger := context.socket(zmq.DEALER))
            stranger.connect(f"tcp://127.0.0.1:{port}")
            with contextlib.suppress(zmq.Again):
                stranger.send(b"mine", flags=zmq.DONTWAIT)
        time.sleep(0.3)
        for _ in range(5):
            assert cluster.run(bodies.engine_id, deadline_s=20) == (0, 1, 2, 3)
    finally:
        for stranger in held:
            stranger.close(linger=0)
        context.term()


@pytest.fixture
def few_open_files() -> Iterator[int]:
    """A soft limit of 256 for this process, of which the cluster's processes would get no more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    yield 256
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_ranks_outlive_more_idle_connections_than_they_were_given_open_files(few_open_files: int) -> None:
    """gloo ends its process when it cannot accept: "accept: Too many open files"."""
    with Cluster(ranks=1, device="cpu") as cluster:
        pids = cluster.run(bodies.pid)
        rank = psutil.Process(pids[0])
        ports = {c.laddr.port for c in rank.net_connections(kind="inet") if c.status == psutil.CONN_LISTEN}
        resource.setrlimit(resource.RLIMIT_NOFILE, (4 * few_open_files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        with contextlib.ExitStack() as held:
            for port in ports:
                for _ in range(few_open_files + 50):
                    held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
            time.sleep(0.2)
            assert cluster.run(bodies.pid, deadline_s=20) == pids


def test_too_few_open_files_are_refused_at_once_with_the_number_that_is_needed() -> None:
    def start(_: int) -> str:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        with pytest.raises(ResourceError) as told:
            Cluster(ranks=8, device="cpu")
        return str(told.value)

    (said,) = run_ranks(1, start, timeout_s=20)
    assert said == (
        "8 ranks need 224 open files in a process, and this one and its children may have 64; raise the limit before "
        "Python or Jupyter starts (ulimit -n 1024), or start fewer ranks"
    )
