"""Members: who the ranks of a job are (host, process, device), told over the store before any group exists.

The store is the one place where a missing rank can be named: a rank that never came has written no key. So the first
exchange of a session and the question "who is missing?" go over it; data goes over gloo.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch.distributed as dist

from workbench.errors import DeadlineError, PeerDeadError, WorkbenchError, name_error
from workbench.runtime.story import Story

OPENING = "opening a Session"
"""What ranks do before they have a group to talk over, and the name in the session's store of why it failed."""

LOST_STORE = (dist.DistNetworkError, dist.DistStoreError)
"""What torch raises where the process that holds the store has ended, or does not answer."""


@dataclass(frozen=True, slots=True)
class Member:
    """One rank's process. `host` is the machine's boot id, so that containers with equal names stay apart."""

    world_rank: int
    host: str
    pid: int
    started: float
    pid_namespace: str = ""

    def is_dead(self, seen_from: Member) -> bool:
        """True if the process is certainly gone; False where it lives or cannot be seen from here."""
        if (self.host, self.pid_namespace) != (seen_from.host, seen_from.pid_namespace):
            return False
        try:
            process = psutil.Process(self.pid)
            return bool(process.create_time() != self.started or process.status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True


def ranks_text(world_ranks: Sequence[int]) -> str:
    """'world rank 3' or 'world ranks 1, 3'; long lists are cut after sixteen."""
    shown = ", ".join(map(str, world_ranks[:16])) + (f" and {len(world_ranks) - 16} more" if world_ranks[16:] else "")
    return f"world rank{'s' if len(world_ranks) != 1 else ''} {shown}"


def tell_over_store(store: dist.Store, prefix: str, *, world_rank: int, value: Any) -> None:
    """Leave this rank's JSON value for those that gather under `prefix`. Local: waits for nobody."""
    store.set(f"{prefix}/{world_rank}", json.dumps(value))


def gather_over_store(
    store: dist.Store,
    prefix: str,
    *,
    world_rank: int,
    world_size: int,
    value: Any,
    timeout_s: float,
    what: str,
    advice: str = "start every rank and let each open its Session, or raise timeout_s",
    now_and_then: Callable[[], None] | None = None,
) -> list[Any]:
    """Every rank's JSON value, in world-rank order.

    Collective: all ranks of the store's world.   Raises: DeadlineError that names the ranks which wrote nothing;
    PeerDeadError if the store is gone.
    """
    keys = [f"{prefix}/{r}" for r in range(world_size)]

    def missing() -> tuple[int, ...]:
        return tuple(r for r, key in enumerate(keys) if not store.check([key]))

    def expired() -> DeadlineError:
        absent = missing()
        return DeadlineError(
            f"{what}: world rank {world_rank} waited {timeout_s:g} s for {ranks_text(absent)} of {world_size}; "
            f"{advice}",
            missing=absent,
        )

    try:
        tell_over_store(store, prefix, world_rank=world_rank, value=value)
        wait_until(lambda: store.check(keys), timeout_s=timeout_s, on_expiry=expired, now_and_then=now_and_then)
        return [json.loads(data) for data in store.multi_get(keys)]
    except LOST_STORE as e:
        raise why_store_is_lost(e, what=what, world_rank=world_rank, look=now_and_then) from e


def wait_until(
    done: Callable[[], bool],
    *,
    timeout_s: float,
    on_expiry: Callable[[], Exception],
    now_and_then: Callable[[], None] | None = None,
) -> None:
    """Poll `done`, ever more slowly, so that Ctrl-C comes through; raise `on_expiry()` past the deadline.

    `now_and_then` runs about four times a second and may raise what makes waiting pointless.
    """
    started = time.monotonic()
    checked = started
    pause = 20e-6
    while not done():
        now = time.monotonic()
        if now - started > timeout_s:
            raise on_expiry()
        if now_and_then is not None and now - checked > 0.25:
            checked = now
            now_and_then()
        time.sleep(pause)
        pause = min(pause * 1.3, 0.01)


def why_store_is_lost(
    error: Exception, *, what: str, world_rank: int, look: Callable[[], None] | None
) -> WorkbenchError:
    """What to raise where the store answers no more: the rank that held it is dead, if `look` comes to see that.

    A broken connection comes a moment before the process that held it is seen to be gone.
    """
    deadline = time.monotonic() + 1.0
    try:
        while look is not None and time.monotonic() < deadline:
            look()
            time.sleep(0.01)
    except WorkbenchError as found:
        return found
    return PeerDeadError(
        f"{what} on world rank {world_rank}: the job's store answers no more ({name_error(error)}); its process, which "
        f"is torchrun's agent or else world rank 0, has ended or hangs: look at its own error first, then start again"
    )


def raise_if_dead(members: Sequence[Member], seen_from: Member, *, what: str) -> None:
    """Raise PeerDeadError naming those of `members` whose process has ended."""
    dead = tuple(m.world_rank for m in members if m.is_dead(seen_from))
    if dead:
        raise _dead_error(dead, what)


def opening_watch(members: Mapping[int, Member], store: dist.Store, world_rank: int) -> Callable[[], None]:
    """A look around for waits that have no group yet: it raises once a rank failed in opening, or its process ended.

    The first rank to see a death tells the others over the store, so that all name the same ranks: whoever leaves
    because of it is no cause. `members` may still be unknown. Local.
    """
    story = Story(store, OPENING)

    def look() -> None:
        told = story.read()
        dead = tuple(m.world_rank for m in members.values() if m.is_dead(members[world_rank]))
        if told is None and dead:
            told = story.tell(_dead_error(dead, "making the groups of a Session"))
        if told is not None:
            raise told

    return look


def _dead_error(dead: tuple[int, ...], what: str) -> PeerDeadError:
    text = f"{what}: the process of {ranks_text(dead)} has ended; look at its own traceback first, then start again"
    return PeerDeadError(text, dead=dead)
