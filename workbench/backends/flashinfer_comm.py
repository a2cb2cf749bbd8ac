"""FlashInfer's rendezvous over our channel, so that it meets exactly the group's members, numbered as we number them.

FlashInfer asks for an object with six methods (its CommBackend protocol). This one sends every exchange through the
channel: only members take part, ranks and roots are group ranks, a wait has the channel's deadline and names who is
missing, and a member that fails in the middle tells the others, which then raise the same error.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from workbench.backends.base import Channel, Json
from workbench.errors import ResourceError, WorkbenchError

T = TypeVar("T")


class ChannelComm:
    """FlashInfer's CommBackend over one group. Every method but Get_rank and Get_size is collective over the group.

    Objects are pickled, as FlashInfer's own backends do: the members of one job trust each other.
    Raises: ResourceError, alike on every member, if a member told a failure; errors of the channel itself.
    Source: flashinfer.comm.abstractions.CommBackend; pinned by tests/backends/test_flashinfer_interface.py.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def Get_rank(self) -> int:
        return self._channel.key.group_rank(self._channel.world_rank)

    def Get_size(self) -> int:
        return self._channel.key.size

    def allgather(self, data: Any) -> tuple[Any, ...]:
        """Every member's object, in group_rank order."""
        return tuple(_unpack(told) for told in exchange(self._channel, {"value": _pack(data)}))

    def bcast(self, data: Any, root: int) -> Any:
        """The object of the member at group rank `root`. Raises LayoutError for a root outside, before any wait."""
        source = self._channel.key.world_rank(root)
        mine = _pack(data) if self._channel.world_rank == source else ""
        return _unpack(exchange(self._channel, {"value": mine})[root])

    def barrier(self) -> None:
        exchange(self._channel, {"value": ""})

    def Split(self, color: int, key: int) -> NoReturn:
        raise NotImplementedError(
            f"{self._channel.key}: FlashInfer asked to split the group (color {color}, key {key}); its workspaces are "
            f"made for whole groups here; prepare the smaller group instead"
        )


def create_together(channel: Channel, what: str, create: Callable[[ChannelComm], T]) -> T:
    """What `create` gives for a ChannelComm over this group, on every member or on none.

    Collective: every member of the group.
    Raises: ResourceError naming each world rank that failed and why, alike on every member; errors of the channel.
    """
    error: Exception | None = None
    try:
        created = create(ChannelComm(channel))
    except _Told as e:
        raise ResourceError(f"{channel.key}: {what} failed; {e}") from None
    except WorkbenchError:
        raise  # the channel's own: the exchange is over for all
    except Exception as e:  # whatever the library raises; told to all, so that nobody waits for this member
        error = e
    try:
        exchange(channel, {"value": ""} if error is None else {"error": f"{type(error).__name__}: {error}"})
    except _Told as e:
        raise ResourceError(f"{channel.key}: {what} failed; {e}") from error
    return created


class _Told(Exception):
    """A member told a failure; the text is alike on every member."""


def exchange(channel: Channel, mine: Json) -> list[str]:
    """Every member's value, in group_rank order; _Told if any came with an error instead. Collective."""
    answers = channel.gather(mine, what="setting up FlashInfer")
    errors = [
        f"world rank {world_rank}: {answer['error']}"
        for world_rank, answer in zip(channel.key.world_ranks, answers, strict=True)
        if "error" in answer
    ]
    if errors:
        raise _Told("; ".join(errors))
    return [answer["value"] for answer in answers]


def _pack(data: Any) -> str:
    return pickle.dumps(data).hex()


def _unpack(text: str) -> Any:
    return pickle.loads(bytes.fromhex(text))
