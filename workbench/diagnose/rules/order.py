"""Calls made in another order, left out, or made in addition: what a first difference between members comes from.

Example: world rank 0 sums [2,6] and then [6,2], 1 the other way round: `order-swap`. World rank 1 of three sums only
what the others sum second: `missing-call`. A rank makes one call more each step, from a line that its peer never
reaches: `ordinal-drift`.
Claim: the ranks outside the largest party, those that left a call out, those that got ahead. It rests on shapes and
operations where these differ, else on the lines the calls come from. Two calls of equal shape that only change places
are a likely `order-swap`: ranks that take turns can look the same.
Evidence: the calls from the first difference on.
Try: make the same calls in one order on every member, also where there is nothing to do.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from workbench.diagnose.claim import Claim
from workbench.diagnose.finding import Certainty, Kind
from workbench.diagnose.parties import at_fault, parties
from workbench.diagnose.scene import Meeting, Scene
from workbench.diagnose.words import call_words, ranks_words
from workbench.trace import Event

_MOST = 32  # calls over which an order is compared
_UNROOTED = frozenset({"all_reduce", "reduce_scatter", "reduce_scatter_tensor", "all_gather", "all_gather_into_tensor"})

_Key = Callable[[Event], object]


def rule(scene: Scene) -> Iterator[Claim]:
    """Calls of equal shape that change places: seen by their functions, or by the text of their lines."""
    for meetings in scene.meetings.values():
        for place, meeting in enumerate(meetings):
            if _line_differs(meeting) and meeting.first.event.op in _UNROOTED:
                claim = _swapped_lines(scene, meetings, place)
                if claim is not None:
                    yield claim
                break


def explain_difference(meetings: Sequence[Meeting], place: int) -> Claim | None:
    """What a first difference in operation, root, shape or dtype comes from, if the calls after it tell."""
    orders = _orders(meetings[place : place + _MOST])
    length = _swap_length(orders, signature)
    if length:
        return _swap(meetings, place, orders, length, Certainty.IS)
    ((_, most), *others) = parties({r: (signature(e[0]), line(e[0])) for r, e in orders.items()})
    if len(others) != 1:
        return None
    few = others[0][1]
    skipped, extra = _offset(orders[few[0]], orders[most[0]]), _offset(orders[most[0]], orders[few[0]])
    if skipped and not extra:
        return _skipped(meetings[place], few, most, skipped)
    if extra and not skipped:
        return _ahead(meetings[place], few, most, extra) if len(few) < len(most) else None
    return None


def explain_absence(meetings: Sequence[Meeting], place: int) -> Claim | None:
    """What an absence comes from, if ranks left the common order before: seen by the lines their calls come from.

    The absent ranks left out a call if all their later ones agree with the others' after it. Those who came are ahead
    if they are no majority and made two or more calls from lines that the absent ranks never reach, while the absent
    ranks reach no line that they do not.
    """
    meeting = meetings[place]
    ahead, behind = sorted(meeting.came), sorted(set(meeting.name.world_ranks) - set(meeting.came))
    start = next((i for i in range(place) if _line_differs(meetings[i])), None)
    if start is None or not set(behind) <= set(meetings[start].came):
        return None
    orders = _orders(meetings[start : place + 1])
    skipped = _offset(orders[behind[0]], orders[ahead[0]])
    if skipped and len(orders[behind[0]]) + skipped <= len(orders[ahead[0]]):
        return _skipped(meetings[start], behind, ahead, skipped)
    if len(ahead) > len(behind):
        return None
    theirs = {line(m.came[behind[0]].event) for m in meetings if behind[0] in m.came}
    own = {line(m.came[ahead[0]].event) for m in meetings if ahead[0] in m.came}
    more = [m for m in meetings[start:] if ahead[0] in m.came and line(m.came[ahead[0]].event) not in theirs]
    if len(more) < 2 or theirs - own:
        return None
    return _ahead(meetings[start], ahead, behind, len(more), more[0].came[ahead[0]].event)


def signature(event: Event) -> object:
    return event.op, event.root_world_rank, event.reduce_op, event.shape, event.dtype


def line(event: Event) -> object:
    return None if event.site is None else (event.site.file, event.site.line)


def _line_differs(meeting: Meeting) -> bool:
    return len({line(c.event) for c in meeting.came.values()}) > 1


def _orders(meetings: Sequence[Meeting]) -> dict[int, list[Event]]:
    """By world rank: its calls, one after the other."""
    orders: dict[int, list[Event]] = {}
    for meeting in meetings:
        for rank, call in meeting.came.items():
            orders.setdefault(rank, []).append(call.event)
    return orders


def _swap_length(orders: Mapping[int, Sequence[Event]], key: _Key) -> int:
    """Over how many calls all members made the same ones, in exactly two orders; 0 if they did not."""
    for length in range(2, min(map(len, orders.values()), default=0) + 1):
        made = [tuple(key(e) for e in events[:length]) for events in orders.values()]
        if len(set(made)) == 2 and len({frozenset(Counter(m).items()) for m in made}) == 1:
            return length
    return 0


def _offset(few: Sequence[Event], many: Sequence[Event]) -> int:
    """How many calls of `many` come before all that `few` made; 0 if `few` is no later part of it.

    Lines count too: they must differ where the orders part, and agree after it.
    """
    if line(few[0]) == line(many[0]):
        return 0
    for skip in range(1, len(many)):
        both = list(zip(few, many[skip:], strict=False))
        if all(signature(a) == signature(b) and line(a) == line(b) for a, b in both):
            return skip
    return 0


def _swapped_lines(scene: Scene, meetings: Sequence[Meeting], place: int) -> Claim | None:
    orders = _orders(meetings[place : place + _MOST])
    if set(orders) != set(meetings[place].came):
        return None

    def label(event: Event) -> object:
        site = event.site
        return None if site is None else (site.function, _argument(event.op, scene.source(site.file, site.line)))

    length = _swap_length(orders, label)
    if not length or any(len({signature(c.event) for c in m.came.values()}) > 1 for m in meetings[:length]):
        return None
    swapped = {rank: events[:length] for rank, events in orders.items()}
    lines = [{line(e) for e in events} for events in swapped.values()]
    functions = {e.site.function for events in swapped.values() for e in events if e.site is not None}
    if len(functions) < 2 and lines[0] & lines[-1]:  # one function, one set of lines: its ranks take turns
        return None
    return _swap(meetings, place, orders, length, Certainty.LIKELY)


def _argument(op: str, text: str) -> str:
    """What a line passes first to the operation, such as x in `all_reduce(x, async_op=True)`; else the line."""
    found = re.search(rf"\b{op}\(\s*([^,)]+)", text)
    return found[1].strip() if found else text.strip()


def _swap(
    meetings: Sequence[Meeting], place: int, orders: Mapping[int, Sequence[Event]], length: int, certainty: Certainty
) -> Claim:
    meeting = meetings[place]
    said = {rank: tuple((signature(e), line(e)) for e in events[:length]) for rank, events in orders.items()}
    found = parties(said)
    told = "; ".join(
        f"{ranks_words(ranks)} made {', then '.join(_brief(e) for e in orders[ranks[0]][: min(length, 4)])}"
        for _, ranks in found
    )
    return Claim.about(
        meeting.came.values(),
        code="order.swap",
        kind=Kind.ORDER_SWAP,
        ranks=at_fault(said),
        message=f"from {meeting} on, the members make the same {length} calls in two orders: {told}.",
        shown=(m.came[ranks[0]] for _, ranks in found for m in meetings[place : place + length]),
        certainty=certainty,
        fix="make the calls in one order on every rank: sorted(names), and not the order of a dict or of arrival",
    )


def _skipped(meeting: Meeting, few: Sequence[int], most: Sequence[int], number: int) -> Claim:
    event = meeting.came[most[0]].event
    return Claim.about(
        meeting.came.values(),
        code="order.skipped",
        kind=Kind.MISSING_CALL,
        ranks=few,
        message=f"{ranks_words(few)} left out {call_words(event)}"
        f"{f' and {number - 1} more' if number > 1 else ''}, which {ranks_words(most)} made as {meeting}: from there "
        f"on, their calls meet those of other lines.",
        fix="make the call on every member, with nothing to add where there is nothing",
    )


def _ahead(
    meeting: Meeting, ahead: Sequence[int], behind: Sequence[int], number: int, extra: Event | None = None
) -> Claim:
    event = extra or meeting.came[ahead[0]].event
    return Claim.about(
        meeting.came.values(),
        code="order.drift",
        kind=Kind.ORDINAL_DRIFT,
        ranks=ahead,
        message=f"{ranks_words(ahead)} got ahead of {ranks_words(behind)}: from {meeting} on, {number} calls such as "
        f"{call_words(event)} have no partner there, so calls meet those of other steps.",
        fix="let every member make the same calls a step, also where it has nothing to do",
    )


def _brief(event: Event) -> str:
    shape = "" if event.shape is None else f" of {list(event.shape)}"
    return f"{event.op}{shape} in {event.site}" if event.site is not None else f"{event.op}{shape}"
