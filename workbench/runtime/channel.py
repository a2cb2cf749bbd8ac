"""GlooChannel: JSON values between the members of one group, over its gloo group, with deadlines that name ranks."""

from __future__ import annotations

import contextlib
import json
import pickle
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from workbench.backends.busy import Busy
from workbench.errors import (
    ArgumentError,
    CallFailedError,
    ClosedError,
    DeadlineError,
    MismatchError,
    WorkbenchError,
    name_error,
)
from workbench.ranks import GroupKey
from workbench.runtime.members import LOST_STORE, Member, raise_if_dead, ranks_text, wait_until, why_store_is_lost
from workbench.runtime.process_group import TorchGroups
from workbench.runtime.story import BLAMING, Story

FRAME_BYTES = 4096  # holds the head and nearly every value; a longer value takes a second exchange
_WHAT_BYTES = 240
_HEAD = struct.Struct(f"<QQ{_WHAT_BYTES}s")  # length of the value, round of the sender, what it came for


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
        self.busy = Busy(f"{key} on world rank {world_rank}")
        self._store = store
        self._everybody = tuple(members.values())  # the store may be held by a rank outside the group
        self._members = [members[r] for r in key.world_ranks]
        self._self = members[world_rank]
        self._round = 0
        self._failure: Exception | None = None
        self._story = Story(store, f"failed/{'.'.join(map(str, key.world_ranks))}")
        self._place = [key.torch_rank(r) for r in key.world_ranks]

    def gather(self, value: Any, *, what: str, held: bool = False) -> list[Any]:
        """Every member's JSON value, in group_rank order. held: the caller holds `busy`.

        Collective: every member of the group, equally often and with equal `what`.
        Raises: ArgumentError for a value that is not JSON, before any wait. MismatchError, alike on every member, if
        members came for different things. DeadlineError or PeerDeadError naming world ranks; ClosedError after an
        earlier failure.
        """
        try:
            data = json.dumps(value).encode()
        except (TypeError, ValueError, RecursionError) as e:
            raise ArgumentError(
                f"{self.key}: {what} of {type(value).__name__}: {e}; pass None, numbers, texts, lists"
            ) from e
        with contextlib.nullcontext() if held else self.busy:
            frames = self._all_gather(_frame(data, FRAME_BYTES, self._round + 1, what), what)
            self._compare([_HEAD.unpack_from(f) for f in frames])
            lengths = [_HEAD.unpack_from(f)[0] for f in frames]
            if max(lengths) > FRAME_BYTES - _HEAD.size:
                frames = self._all_gather(_frame(data, _HEAD.size + max(lengths), self._round + 1, what), what)
        return [json.loads(f[_HEAD.size : _HEAD.size + n]) for f, n in zip(frames, lengths, strict=True)]

    def broadcast_object(self, value: Any, *, group_root: int) -> Any:
        """The root member's picklable object, on every member. `group_root` counts places in `key.world_ranks`.

        Collective: every member of the group. The object is pickled, as torch's own object collectives do: the
        members of one job trust each other.
        Raises: as gather; MismatchError too if members name different roots. ArgumentError, alike on every member, if
        the root's object cannot be pickled.
        """
        root = self.key.world_rank(group_root)
        what = f"broadcast_object from group root {group_root} = {ranks_text([root])}"
        data, problem = b"", ""
        if root == self.world_rank:
            try:
                data = pickle.dumps(value)
            except Exception as e:  # whatever the object's own code raises; told to all, so that nobody waits for it
                problem = f"{type(value).__name__} cannot be pickled: {type(e).__name__}: {e}"
        with self.busy:
            length, problem = self.gather([len(data), problem], what=what, held=True)[group_root]
            if problem:
                raise ArgumentError(f"{self.key}: {what}: {problem}")
            body = torch.empty(length, dtype=torch.uint8, device="cpu")  # whatever the default device is
            if data:
                body = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            self._run(lambda: dist.broadcast(body, src=root, group=self.torch_group, async_op=True), what)
        return value if root == self.world_rank else pickle.loads(body.numpy().tobytes())

    def barrier(self, *, what: str = "barrier") -> None:
        """Return once every member has entered. Collective over the group; raises as gather."""
        self.gather(None, what=what)

    def leave(self, error: BaseException) -> None:
        """Tell the other members that this rank takes part no more, so that they need not wait for it. Local."""
        if self._failure is not None:
            return
        if not isinstance(error, BLAMING):
            error = ClosedError(f"{self.key}: world rank {self.world_rank} left its session: {name_error(error)}")
        self._failure = self._story.tell(error)

    def fail(self, what: str, error: Exception) -> Exception:
        """As the Channel protocol says."""
        mine: Exception = CallFailedError.arose(self.key, what, self.world_rank, error)
        if isinstance(error, LOST_STORE):
            doing = f"{self.key}: {what}"
            mine = why_store_is_lost(
                error,
                what=doing,
                world_rank=self.world_rank,
                look=lambda: raise_if_dead(self._everybody, self._self, what=doing),
            )
        if self._failure is not None:
            return mine
        self._failure = self._story.tell(mine)
        return self._failure

    def story(self) -> Exception | None:
        """As the Channel protocol says."""
        return self._story.read()

    def _all_gather(self, frame: bytes, what: str) -> list[bytes]:
        mine = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
        received = [torch.empty_like(mine) for _ in self._place]
        self._run(lambda: dist.all_gather(received, mine, group=self.torch_group, async_op=True), what)
        return [received[p].numpy().tobytes() for p in self._place]

    def _compare(self, heads: list[tuple[int, int, bytes]]) -> None:
        """Raise MismatchError on every member unless all are in the same round for the same thing."""
        came = [(number, text.rstrip(b"\0").decode(errors="replace")) for _, number, text in heads]
        if all(c == came[0] for c in came):
            return
        in_step = all(number == came[0][0] for number, _ in came)
        texts = [text if in_step else f"{text} (as number {number} on this group)" for number, text in came]
        story = "; ".join(f"world rank {r}: {text}" for r, text in zip(self.key.world_ranks, texts, strict=True))
        error = MismatchError(
            f"{self.key}: members came for different things: {story}; every member must make the same calls in the "
            f"same order"
        )
        if not in_step:
            self._failure = error  # they would never meet again
        raise error

    def _run(self, start: Callable[[], Any], what: str) -> None:
        """Start one gloo call and poll it until it ends, a peer dies, or the deadline passes."""
        self._enter(what)
        work = None
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
            if work is None or isinstance(e, RecursionError):  # it arose here, not in gloo's talk with the others
                raise self.fail(what, e) from e
            self._failure = self._story.tell(self._explain(e, what))
            raise self._failure from e
        except Exception as e:
            raise self.fail(what, e) from e
        except BaseException as e:
            left = ClosedError(
                f"{self.key}: {what} on world rank {self.world_rank} was interrupted: {type(e).__name__}"
            )
            self._failure = self._story.tell(left)
            raise

    def _enter(self, what: str) -> None:
        """Say in the store that this rank has come, unless the group has failed already."""
        if self._failure is not None:
            raise ClosedError(f"{self.key}: no {what} after an earlier failure: {self._failure}") from self._failure
        self._failure = self.story()
        if self._failure is not None:
            raise self._failure
        self._round += 1
        self._store.set(self._round_key(self.world_rank), f"{self._round} {what}")

    def _look_around(self, what: str) -> None:
        """Raise if another member has failed here already, or a member's process has ended."""
        story = self.story()
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
        return WorkbenchError(
            f"{self.key}: {what} failed on world rank {self.world_rank} though every member entered it: {cause}"
        )

    def _watch_for_a_death(self, what: str) -> None:
        """A broken connection comes a moment before the process that held it is seen to be gone."""
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            self._look_around(what)
            time.sleep(0.01)

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
        self.busy = Busy(str(key))
        self.world_rank = key.world_ranks[0]
        self.timeout_s = timeout_s

    def gather(self, value: Any, *, what: str, held: bool = False) -> list[Any]:  # noqa: ARG002 - as GlooChannel
        """The value alone, as it would come back from the wire."""
        return [json.loads(json.dumps(value))]

    def broadcast_object(self, value: Any, *, group_root: int) -> Any:
        """The value itself."""
        self.key.world_rank(group_root)
        return value

    def leave(self, error: BaseException) -> None:
        """Nobody to tell."""

    def fail(self, what: str, error: Exception) -> Exception:
        """As the Channel protocol says."""
        return CallFailedError.arose(self.key, what, self.world_rank, error)

    def story(self) -> Exception | None:
        """Nobody to hear of."""
        return None

    def barrier(self, *, what: str = "barrier") -> None:
        """Nobody to wait for."""


def _frame(data: bytes, size: int, number: int, what: str) -> bytes:
    """`size` bytes: length of the data, the sender's round and what it came for, then as much data as fits."""
    text = what.encode()[:_WHAT_BYTES]
    return (_HEAD.pack(len(data), number, text) + data)[:size].ljust(size, b"\0")
