"""When each rank captured, what it captured, and when it replayed: the record behind the capture timeline. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from workbench.trace.calls import pair_calls
from workbench.trace.event import Event


class Stage(Enum):
    """What a span of the timeline is. The value is its word in pictures."""

    DOOR = "waits at the door"
    WARM_UP = "warm-up"
    CAPTURE = "capture"
    CALL = "captured call"
    REPLAY = "replay"


STAGE_OF = {
    "capture_door": Stage.DOOR,
    "capture_warm_up": Stage.WARM_UP,
    "capture": Stage.CAPTURE,
    "replay": Stage.REPLAY,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One stage on one rank. Units: nanoseconds on the events' clock. `end_ns` is None if it never ended."""

    world_rank: int
    stage: Stage
    start_ns: int
    end_ns: int | None
    text: str
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureTimeline:
    """The spans of all ranks in order of their start, and the time they cover."""

    world_ranks: tuple[int, ...]
    spans: tuple[Span, ...]
    start_ns: int
    end_ns: int


def capture_timeline(events: Iterable[Event]) -> CaptureTimeline | None:
    """The timeline of everything that was captured or replayed, or None if nothing was."""
    spans = []
    for call in pair_calls(events):
        event = call.event
        stage = STAGE_OF.get(event.op, Stage.CALL if event.capture else None)
        if stage is None or call.begin is None:
            continue
        group = f" on {event.group.key}" if event.group is not None else ""
        shape = f" {list(event.shape)}" if event.shape is not None else ""
        note = call.end.note if call.end is not None else ""
        spans.append(
            Span(
                world_rank=event.world_rank,
                stage=stage,
                start_ns=call.begin.time_ns,
                end_ns=call.end.time_ns if call.end is not None else None,
                text=f"{event.op}{shape}{group}{f' ({note})' if note else ''}",
                error=call.end.error if call.end is not None else "",
            )
        )
    if not spans:
        return None
    return CaptureTimeline(
        world_ranks=tuple(sorted({s.world_rank for s in spans})),
        spans=tuple(sorted(spans, key=lambda s: (s.start_ns, s.world_rank))),
        start_ns=min(s.start_ns for s in spans),
        end_ns=max(s.end_ns or s.start_ns for s in spans),
    )
