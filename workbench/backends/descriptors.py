"""Hand a file descriptor to the other members of a group on one host, through a Unix socket without a name on any disk.

The socket lives in the abstract namespace under 128 random bits that only the group is told, and serves only processes
of this user. Nothing here imports the rest of the package, so programs that measure kernels can load this file alone.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class DescriptorServer:
    """Gives `fd` to whoever of this user asks at `address`, until closed. Local."""

    def __init__(self, fd: int) -> None:
        self.address = f"wbk-{os.getpid()}-{secrets.token_hex(16)}"
        self._fd = fd
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{self.address}")
        self._socket.listen(64)
        self._thread = threading.Thread(target=self._serve, name="wbk-descriptors", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Serve nobody any more. The descriptor stays the caller's."""
        self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            with peer:
                _, uid, _ = _CREDENTIALS.unpack(
                    peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                )
                if uid == os.geteuid():
                    try:
                        socket.send_fds(peer, [b"\0"], [self._fd])
                    except OSError:  # the peer is gone; whoever waits for it has a deadline
                        continue


def fetch_descriptor(address: str, timeout_s: float) -> int:
    """A copy of the descriptor served at `address`, the caller's to close.

    Raises: OSError (TimeoutError among them) if nobody serves there, or not this user, or not within `timeout_s`.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
        s.settimeout(timeout_s)
        s.connect(f"\0{address}")
        _, fds, _, _ = socket.recv_fds(s, 1, 1)
    if not fds:
        raise ConnectionRefusedError(f"{address} gave no descriptor")
    os.set_inheritable(fds[0], False)
    return fds[0]
