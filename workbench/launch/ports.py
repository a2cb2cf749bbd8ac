"""Ports that stay ours from the moment they are chosen until somebody listens on them.

ipyparallel's controller chooses its ports by binding and letting go, and listens some 300 ms later. Meanwhile the
kernel may hand one of them to anybody, such as the controller of a cluster that is started beside it: the heart monitor
then cannot listen, no rank is registered, and nothing says so.
"""

from __future__ import annotations

import contextlib
import socket

from workbench.errors import ResourceError


def reserve_ports(count: int, address: str = "127.0.0.1") -> tuple[socket.socket, ...]:
    """`count` TCP sockets, each bound to a free port of its own, not listening. Local.

    Linux gives such a port to nobody who asks for any port; who names it and sets SO_REUSEADDR, as ZeroMQ and libuv do,
    may listen on it beside the socket returned here. Close them once somebody does, or keep them.
    Raises: ResourceError if so many are not free.
    """
    with contextlib.ExitStack() as unless_all:
        sockets: list[socket.socket] = []
        for _ in range(count):
            held = unless_all.enter_context(socket.socket())
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                held.bind((address, 0))
            except OSError as e:
                raise ResourceError(
                    f"{count} ports of {address} were asked for and {len(sockets)} are free ({e.strerror}); see what "
                    f"holds them: ss -tan; how many there are: sysctl net.ipv4.ip_local_port_range"
                ) from e
            sockets.append(held)
        unless_all.pop_all()
    return tuple(sockets)
