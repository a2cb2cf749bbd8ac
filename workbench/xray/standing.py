"""Where each rank of a recorded job stands: the call it is in or left last, for how long, how far behind. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from workbench.trace import BELOW_PYTHON, BY_FUTURE, ON_GPU, Event, RankCall, Trace, pair_calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where one rank stands. state: "waiting" in a recorded call, "running" outside, "ended", or "dead".

    last: words for the call it is in, else the one it left last, and how far its group is ahead of or behind it.
    """

    world_rank: int
    state: str
    last: str

    def __str__(self) -> str:
        return f"world rank {self.world_rank}: {self.state}, {self.last}"


def find_standings(
    trace: Trace, *, now_ns: int, dead: Collection[int] = (), stopped: Collection[int] = ()
) -> tuple[Standing, ...]:
    """Every rank that left a file, in rank order. now_ns: the moment of reading, on the trace's clock."""
    reached: dict[tuple[object, ...], int] = {}  # the furthest call of each group
    latest: dict[int, Event] = {}
    open_calls: dict[int, RankCall] = {}
    for call in pair_calls(trace.events):
        event = call.event
        latest[event.world_rank] = event if call.end is None else call.end
        if event.group is not None and event.peer_world_rank is None:
            name = (event.group.key, event.group.generation)
            reached[name] = max(reached.get(name, 0), event.sequence)
        if is_waiting(call):
            open_calls[event.world_rank] = call
    ended = {e.world_rank: e.note for e in trace.events if e.op == "exit"}
    found = []
    for rank in trace.world_ranks:
        inside = open_calls.get(rank)
        if rank in ended or rank in dead:
            state, words = ("ended" if rank in ended else "dead"), ended.get(rank, "its process is gone")
            if rank in latest:
                words += f", last call: {call_text(latest[rank])}"
        elif inside is not None:
            state, words = (
                "waiting",
                f"inside {call_text(inside.event)} for {(now_ns - inside.event.time_ns) / 1e9:.1f} s",
            )
            words += _distance(inside.event, reached)
        elif rank in latest:
            quiet_s = (now_ns - latest[rank].time_ns) / 1e9
            state, words = "running", f"last call: {call_text(latest[rank])}, {quiet_s:.1f} s ago"
            words += _distance(latest[rank], reached)
        else:
            state, words = "running", "no call of torch.distributed yet"
        if rank in stopped:
            words += ", its process is stopped"
        found.append(Standing(world_rank=rank, state=state, last=words))
    return tuple(found)


def waiting_ranks(trace: Trace, *, dead: Collection[int] = ()) -> frozenset[int]:
    """World ranks that are inside a recorded call; not those whose call was only started, nor those that are gone."""
    gone = {e.world_rank for e in trace.events if e.op == "exit"} | set(dead)
    return frozenset(c.event.world_rank for c in pair_calls(trace.events) if is_waiting(c)) - gone


def is_waiting(call: RankCall) -> bool:
    """True for a call that began, has not ended, and holds up the program, its GPU, or C++ that nobody sees waiting."""
    words = call.event.note.split("; ")
    unseen = {ON_GPU, BELOW_PYTHON, BY_FUTURE}
    return call.end is None and ("async" not in words or not unseen.isdisjoint(words))


def call_text(event: Event) -> str:
    """all_reduce #3 on tp[0,1]; recv #2 from world rank 4; store_wait of its keys."""
    if event.group is None:
        return f"{event.op} {event.note}".rstrip()
    if event.peer_world_rank is not None:
        way = "from" if event.op == "recv" else "to"
        return f"{event.op} #{event.sequence} {way} world rank {event.peer_world_rank} on {event.group.key}"
    return f"{event.op} #{event.sequence} on {event.group.key}"


def _distance(event: Event, reached: dict[tuple[object, ...], int]) -> str:
    if event.group is None or event.peer_world_rank is not None:
        return ""
    behind = reached.get((event.group.key, event.group.generation), 0) - event.sequence
    return f", {behind} behind" if behind > 0 else ""
