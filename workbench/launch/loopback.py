"""A rendezvous for the ranks of one host, whose store can be reached from this host alone.

torch's own rendezvous opens its store on every interface of the machine, and anybody who can reach it can read and
write the job's keys. Here the listening socket is bound to the loopback address first and then handed to the store.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "loopback"
"""What torchrun is to be given as rendezvous backend, after `register`."""

_ADDRESS = "127.0.0.1"
_TIMEOUT = timedelta(seconds=60)


class LoopbackRendezvous(RendezvousHandler):
    """One agent, which is node 0 of 1, and the store that its ranks meet in."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Ranks connect to the agent's store and never start one of their own."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        listener = socket.create_server((_ADDRESS, 0), backlog=1024)
        port = listener.getsockname()[1]
        self._store = TCPStore(
            _ADDRESS,
            port,
            is_master=True,
            timeout=_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return RendezvousInfo(PrefixStore("agent", self._store), 0, 1, RendezvousStoreInfo(_ADDRESS, port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nobody else is here to be told."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return str(self._run_id)

    def shutdown(self) -> bool:
        return True


def register() -> None:
    """Make the rendezvous known to torchrun in this process, under BACKEND. Local; again is fine."""
    rendezvous_handler_registry.register(BACKEND, LoopbackRendezvous)
