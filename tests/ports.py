"""A port for a program under test, which no other test is given meanwhile."""

from __future__ import annotations

import socket

from workbench.launch.ports import reserve_ports

_held: list[socket.socket] = []


def free_port() -> str:
    """A port of 127.0.0.1 that is reserved until this process ends; torch's stores may listen on it."""
    _held.extend(reserve_ports(1))
    return str(_held[-1].getsockname()[1])
