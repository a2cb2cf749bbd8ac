"""A group that all its members begin to make and none of them gets: they look for each other at different places, or
nothing moves where they meet.

Example: world ranks 0 and 1 wait in init_process_group, 0 under the prefix job-0 of a store and 1 under job-1.
Claim: `rendezvous-partial`, the ranks outside the largest party, where the places differ: ports, files, prefixes, or
attempts of a launcher. `stalled`, likely, those that wait where they do not.
Evidence: the calls that wait; their notes name the places.
Try: one place for all; where it is one already, a store that no earlier run has used, and the network.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from workbench.diagnose.claim import Claim, Weight
from workbench.diagnose.finding import Certainty, Kind
from workbench.diagnose.parties import at_fault, parties
from workbench.diagnose.rules.absent import TIMED_OUT
from workbench.diagnose.scene import Scene, is_local, marks, store_keys
from workbench.diagnose.words import call_words, group_words, raised, ranks_words
from workbench.trace import Event, GroupInfo, RankCall

_LEAST_NS = 1_000_000_000  # a group takes its time to be made

_ONE_PLACE = (
    "give every rank the same store, prefix, address and port, such as the launcher's, and nothing that a rank counts "
    "or chooses for itself; after a restart, the same attempt on every rank"
)
_FRESH = (
    "use a store that no earlier run has used, with a new port, prefix or file: old keys hold addresses where nobody "
    "is; then see that the ranks reach each other: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, a firewall"
)


def rule(scene: Scene) -> Iterator[Claim]:
    for meeting in scene.beginnings:
        if not meeting.absent:
            yield from _made_by_all(scene, meeting.came)
    made: dict[GroupInfo, dict[int, RankCall]] = defaultdict(dict)
    for rank, story in scene.ranks.items():
        for call in story.plan:
            if call.event.group is not None and not is_local(call) and scene.waits(call):
                made[call.event.group][rank] = call
    for group, calls in made.items():
        if set(calls) == set(group.world_ranks):
            yield from _made_by_all(scene, calls)


def _made_by_all(scene: Scene, calls: Mapping[int, RankCall]) -> Iterator[Claim]:
    """What is wrong with these calls, one of each member."""
    waiting = [r for r, c in calls.items() if scene.waits(c)]
    ran_out = [r for r, c in calls.items() if c.end is not None and TIMED_OUT.search(c.end.error)]
    if not waiting and not ran_out:
        return
    places = {r: _place(c.event) for r, c in calls.items()}
    if "" not in places.values() and len(set(places.values())) > 1:
        yield _apart(calls, places)
    elif waiting:
        yield from _stalled(scene, calls, waiting)


def _place(event: Event) -> str:
    """Where the call says that it meets the others; "" if it does not."""
    return ", ".join(m for m in marks(event) if m.startswith(("meets at ", "store of the launcher", "store file://")))


def _apart(calls: Mapping[int, RankCall], places: Mapping[int, str]) -> Claim:
    first = min((c.event for c in calls.values()), key=lambda e: (e.time_ns, e.world_rank))
    where = "; ".join(f"{ranks_words(ranks)} {place}" for place, ranks in parties(places))
    return Claim.about(
        calls.values(),
        code="beginning.place",
        kind=Kind.RENDEZVOUS_PARTIAL,
        ranks=at_fault(places),
        message=f"{call_words(first)}: {ranks_words(calls)} all came to make {group_words(first.group)}, but not to "
        f"one place (port, file or prefix of a store), so they never meet: {where}.{raised(calls.values())}",
        fix=_ONE_PLACE,
    )


def _stalled(scene: Scene, calls: Mapping[int, RankCall], waiting: list[int]) -> Iterator[Claim]:
    stood_ns = scene.end_ns - max(c.event.time_ns for c in calls.values())
    if stood_ns < max(_LEAST_NS, scene.patience_ns):
        return
    first = min((c.event for c in calls.values()), key=lambda e: (e.time_ns, e.world_rank))
    others = [r for r in calls if r not in waiting]
    waits = [c.event for r in waiting for c in scene.ranks[r].inner if c.end is None and c.event.op == "store_wait"]
    keys = sorted({key for event in waits for key in store_keys(event)} - {""})
    got_through = f", and {ranks_words(others)} got through" if others else ""
    waited_for = f"; the keys waited for: {', '.join(keys[:4])}" if keys else ""
    yield Claim.about(
        calls.values(),
        code="stalled.beginning",
        kind=Kind.STALLED,
        ranks=waiting,
        message=f"{call_words(first)}: all members came to make {group_words(first.group)}; {ranks_words(waiting)} "
        f"{'has' if len(waiting) == 1 else 'have'} been inside for {stood_ns / 1e9:.1f} s{got_through}{waited_for}.",
        certainty=Certainty.LIKELY,
        weight=Weight.ALONE,
        fix=_FRESH,
    )
