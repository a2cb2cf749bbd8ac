"""GlooChannel: JSON values between the members of one group, over its gloo group, with deadlines that name ranks."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from workbench.errors import ClosedError, DeadlineError, PeerDeadError, WorkbenchError
from workbench.ranks import GroupKey
from workbench.runtime.members import Member, raise_if_dead, ranks_text, wait_until
from workbench.runtime.process_group import TorchGroups

FRAME_BYTES = 4096  # length + JSON text of nearly every value; a longer one takes a second exchange


class GlooChannel:
    """How the members of `key` agree on things. One per group and rank; collective over the group.

    A failed exchange leaves gloo's pairs in an unknown state, so the channel is closed by it: later calls raise
    ClosedError with the first failure as cause.
    """

    def __init__(
        self,
        key: GroupKey,
        *,
        groups: TorchGroups,
        store: dist.Store,
        members: Mapping[int, Member],
        world_rank: int,
        timeout_s: float,
    ) -> None:
        self.key = key
        self.world_rank = world_rank
        self.timeout_s = timeout_s
        self.torch_group = groups.control
        self.data_group = groups.data
        self.device = groups.device
        self._store = store
        self._members = [members[r] for r in key.world_ranks]
        self._self = members[world_rank]
        self._round = 0
        self._failure: Exception | None = None
        self._place = [key.torch_rank(r) for r in key.world_ranks]

    def gather(self, value: Any, *, what: str = "exchange") -> list[Any]:
        """Every member's JSON value, in group_rank order.

        Collective: every member of the group, equally often.
        Raises: DeadlineError or PeerDeadError naming world ranks; ClosedError after an earlier failure.
        """
        data = json.dumps(value).encode()
        frames = self._all_gather(_frame(data, FRAME_BYTES), what)
        longest = max(_length(f) for f in frames)
        if longest + 8 > FRAME_BYTES:
            frames = self._all_gather(_frame(data, longest + 8), what)
        return [json.loads(bytes(f[8 : 8 + _length(f)].tolist())) for f in frames]

    def broadcast_object(self, value: Any, *, group_root: int) -> Any:
        """The root member's picklable object, on every member. `group_root` counts places in `key.world_ranks`.

        Collective: every member of the group. The object is pickled, as torch's own object collectives do: the
        members of one job trust each other.   Raises: as gather.
        """
        root = self.key.world_rank(group_root)
        what = f"broadcast_object from group root {group_root} = {ranks_text([root])}"
        data = pickle.dumps(value) if root == self.world_rank else b""
        length = torch.tensor([len(data)])
        self._run(lambda: dist.broadcast(length, src=root, group=self.torch_group, async_op=True), what)
        body = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if data
            else torch.empty(int(length), dtype=torch.uint8)
        )
        self._run(lambda: dist.broadcast(body, src=root, group=self.torch_group, async_op=True), what)
        return value if root == self.world_rank else pickle.loads(body.numpy().tobytes())

    def barrier(self, *, what: str = "barrier") -> None:
        """Return once every member has entered. Collective over the group; raises as gather."""
        self._all_gather(torch.zeros(1, dtype=torch.uint8), what)

    def _all_gather(self, frame: torch.Tensor, what: str) -> list[torch.Tensor]:
        received = [torch.empty_like(frame) for _ in self._place]
        self._run(lambda: dist.all_gather(received, frame, group=self.torch_group, async_op=True), what)
        return [received[p] for p in self._place]

    def _run(self, start: Callable[[], Any], what: str) -> None:
        """Start one gloo call and poll it until it ends, a peer dies, or the deadline passes."""
        self._enter(what)
        try:
            work = start()
            wait_until(
                work.is_completed,
                timeout_s=self.timeout_s,
                on_expiry=lambda: TimeoutError("deadline"),
                now_and_then=lambda: self._look_around(what),
            )
            work.wait()
        except (RuntimeError, TimeoutError, WorkbenchError) as e:
            self._failure = self._agree(self._explain(e, what))
            raise self._failure from e
        except BaseException as e:
            self._failure = ClosedError(f"{self.key}: {what} was interrupted by {type(e).__name__}")
            raise

    def _enter(self, what: str) -> None:
        """Say in the store that this rank has come, unless the group has failed already."""
        if self._failure is not None:
            raise ClosedError(f"{self.key}: no exchange after an earlier failure: {self._failure}") from self._failure
        self._failure = self._story()
        if self._failure is not None:
            raise self._failure
        self._round += 1
        self._store.set(self._round_key(self.world_rank), f"{self._round} {what}")

    def _look_around(self, what: str) -> None:
        """Raise if another member has failed here already, or a member's process has ended."""
        story = self._story()
        if story is not None:
            raise story
        raise_if_dead(self._members, self._self, what=f"{self.key}: {what}")

    def _explain(self, cause: Exception, what: str) -> Exception:
        """Why a gloo call failed: a dead member, members that did not come, or gloo's own words."""
        if isinstance(cause, WorkbenchError):
            return cause
        try:
            if not isinstance(cause, TimeoutError):
                self._watch_for_a_death(what)
            missing = tuple(r for r in self.key.world_ranks if self._round_of(r) < self._round)
        except WorkbenchError as found:
            return found
        if missing:
            return DeadlineError(
                f"{self.key}: {what}: waited {self.timeout_s:g} s for {ranks_text(missing)}, which did not enter it; "
                f"every member of the group must make the same calls in the same order",
                missing=missing,
            )
        if isinstance(cause, TimeoutError):
            return DeadlineError(
                f"{self.key}: {what}: waited {self.timeout_s:g} s though every member entered it, so gloo itself does "
                f"not move; look at the network between them, or raise timeout_s"
            )
        return WorkbenchError(f"{self.key}: {what} failed though every member entered it: {cause}")

    def _watch_for_a_death(self, what: str) -> None:
        """A broken connection comes a moment before the process that held it is seen to be gone."""
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            self._look_around(what)
            time.sleep(0.01)

    def _agree(self, mine: Exception) -> Exception:
        """The first member that fails tells the story; the others, which often fail because of it, tell the same."""
        ranks = getattr(mine, "dead", ()) or getattr(mine, "missing", ())
        told = json.dumps([type(mine).__name__, str(mine), list(ranks)])
        return _retold(self._store.compare_set(self._story_key(), "", told))

    def _story(self) -> Exception | None:
        key = self._story_key()
        return _retold(self._store.get(key)) if self._store.check([key]) else None

    def _story_key(self) -> str:
        return f"failed/{'.'.join(map(str, self.key.world_ranks))}"

    def _round_key(self, world_rank: int) -> str:
        return f"round/{'.'.join(map(str, self.key.world_ranks))}/{world_rank}"

    def _round_of(self, world_rank: int) -> int:
        key = self._round_key(world_rank)
        return int(self._store.get(key).split()[0]) if self._store.check([key]) else 0


class AloneChannel:
    """The channel of a group of one rank: the same face, and nobody to wait for."""

    torch_group = None
    data_group = None

    def __init__(self, key: GroupKey, *, device: str, timeout_s: float) -> None:
        self.key = key
        self.device = device
        self.world_rank = key.world_ranks[0]
        self.timeout_s = timeout_s

    def gather(self, value: Any, *, what: str = "exchange") -> list[Any]:  # noqa: ARG002 - as GlooChannel
        """The value alone, as it would come back from the wire."""
        return [json.loads(json.dumps(value))]

    def broadcast_object(self, value: Any, *, group_root: int) -> Any:
        """The value itself."""
        self.key.world_rank(group_root)
        return value

    def barrier(self, *, what: str = "barrier") -> None:
        """Nobody to wait for."""


def _frame(data: bytes, size: int) -> torch.Tensor:
    """8 bytes of length, then as much of `data` as fits, zero-padded to `size`."""
    frame = bytearray(size)
    frame[:8] = len(data).to_bytes(8, "little")
    body = data[: size - 8]
    frame[8 : 8 + len(body)] = body
    return torch.frombuffer(frame, dtype=torch.uint8)


def _length(frame: torch.Tensor) -> int:
    return int.from_bytes(bytes(frame[:8].tolist()), "little")


def _retold(told: bytes) -> Exception:
    kind, text, ranks = json.loads(told)
    if kind == PeerDeadError.__name__:
        return PeerDeadError(text, dead=tuple(ranks))
    if kind == DeadlineError.__name__:
        return DeadlineError(text, missing=tuple(ranks))
    return WorkbenchError(text)
