"""A vote: what each member could do or could not, told to all, so that a failure is the same exception on each rank."""

from __future__ import annotations

from collections.abc import Callable

from workbench.backends.base import Channel, Json
from workbench.errors import CallFailedError, ResourceError, WorkbenchError, name_error


def vote(channel: Channel, what: str, attempt: Callable[[], Json]) -> list[Json]:
    """Every member's result of its own attempt, in group_rank order.

    Collective: every member of the group, in the same order as its other calls on the channel.
    Raises: ResourceError naming the group and each world rank whose attempt raised a WorkbenchError, OSError or
        MemoryError. CallFailedError for any other error of an attempt, such as a bug. The same text on every member.
        Errors of the channel itself pass through.
    """
    error: Exception | None = None
    try:
        mine: Json = {"value": attempt()}
    except (WorkbenchError, OSError, MemoryError) as e:
        error = e
        mine = {"error": str(e) or type(e).__name__}
    except Exception as e:  # nobody foresaw it: told, so that no member waits for this one
        error = e
        mine = {"failed": name_error(e)}
    answers = channel.gather(mine, what=what)
    for world_rank, answer in zip(channel.key.world_ranks, answers, strict=True):
        if "failed" in answer:
            raise CallFailedError.arose(channel.key, what, world_rank, answer["failed"]) from error
    reasons = [
        f"world rank {channel.key.world_ranks[group_rank]}: {answer['error']}"
        for group_rank, answer in enumerate(answers)
        if "error" in answer
    ]
    if reasons:
        raise ResourceError(f"{channel.key}: {what} failed; {_short(reasons)}") from error
    return [answer["value"] for answer in answers]


def _short(reasons: list[str]) -> str:
    """All reasons, or the first four and a count."""
    return "; ".join(reasons[:4]) + (f"; and {len(reasons) - 4} more" if reasons[4:] else "")
