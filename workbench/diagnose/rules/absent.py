"""A call that some of its members never enter, while the others wait for them, failed, or went on without.

Example: world ranks 0 and 1 wait in all_gather_object of world[0,1,2,3]; 2 and 3 have ended and never came.
Claim: `rendezvous-partial` where it is the first call on the group, init_process_group included, or an exchange between
hosts; `missing-call` for a later one, and for a send or recv without its counterpart. The absent ranks are at fault.
Of a circle of ranks that wait for each other one left a call out: who went past it, for whom most members wait, or who
makes another call than before. Where none of this tells: `order-swap`, if these are the first such calls of them all,
else a likely `missing-call` of all of them. Of each group only the first such call is told.
Evidence: the calls of those who came, and what the absent ranks do instead.
Try: let every member reach the call; or name the group that was meant.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from workbench.diagnose.claim import NEVER, Claim, Weight
from workbench.diagnose.finding import Certainty, Kind
from workbench.diagnose.program_order import Lacked, group_key, usual_call, was_made, went_past
from workbench.diagnose.rules.order import explain_absence
from workbench.diagnose.rules.signatures import is_unwritten, same_steps
from workbench.diagnose.scene import EXCHANGES, Meeting, Scene, marks
from workbench.diagnose.words import call_words, error_words, group_words, raised, ranks_words
from workbench.trace import Event, GroupInfo, RankCall

TIMED_OUT = re.compile(r"timed?[ -]?out|monitoredBarrier", re.IGNORECASE)
"""What an exception says when a wait ran out; others say that a connection ended."""

_FIX = "make every member reach this call; or, if fewer are meant, name their group with group="


def rule(scene: Scene) -> Iterator[Claim]:
    claims: list[Claim] = []
    waits: dict[int, tuple[RankCall, tuple[int, ...]]] = {}  # by world rank: the call it waits in, and for whom
    for meetings in (*scene.meetings.values(), *([m] for m in scene.beginnings)):
        for place, meeting in enumerate(meetings):
            blamed = _blamed(scene, meeting) if meeting.absent else ()
            if blamed:
                claim = explain_absence(meetings, place) or _absent(scene, meetings, place, blamed)
                claims.append(_placed(scene, claim, meeting.first, blamed))
                waits |= {r: (c, blamed) for r, c in meeting.came.items() if scene.waits(c)}
                break
    for call in _lonely(scene):
        peer = call.event.peer_world_rank
        assert peer is not None
        claims.append(_placed(scene, _unpaired(scene, call, peer), call, (peer,)))
        waits[call.event.world_rank] = (call, (peer,))
    circle = _circle(waits)
    exchanging = {r for r in circle if waits[r][0].event.op in EXCHANGES}
    ahead = set() if exchanging else _went_past(scene, circle, waits)
    most = set() if exchanging else _most_wait_for(scene, circle, waits)
    unusual = set() if exchanging else {r for r in circle if usual_call(scene.ranks[r].calls, waits[r][0]) is not None}
    ahead = next((ranks for ranks in (ahead, most, unusual) if len(ranks) == 1), set())
    if ahead and ahead != most and ahead <= unusual and _is_repeated(scene, waits[min(ahead)][0]):
        claims = [_in_doubt(scene, c, waits) if set(c.finding.ranks) == ahead else c for c in claims]
    if len(ahead) == 1:  # it left a call out, which its own claim tells; the others only wait
        led_to = set(circle) - ahead
    elif circle and not exchanging:
        yield _circular(scene, circle, waits)
        led_to = set(circle)
    else:  # who stands in an exchange that the others stay away from is not at fault for what it does not send
        led_to = exchanging if len(exchanging) < len(circle) else set()
    victims = _victims(waits, circle)
    for claim in claims:
        blamed_ranks = set(claim.finding.ranks)
        is_led = claim.finding.code.startswith("absent.") and blamed_ranks <= victims
        yield replace(claim, weight=Weight.SYMPTOM) if led_to & blamed_ranks or is_led else claim


def _placed(scene: Scene, claim: Claim, call: RankCall, blamed: Sequence[int]) -> Claim:
    """The claim; if all blamed ranks went past the call, and on to ones that they stand in, its place is at those."""
    places = dict(claim.places)
    for rank in blamed:
        story = scene.ranks.get(rank)
        inside = story.inside if story is not None else None
        if story is None or inside is None or inside.event.op == "wait" or places.get(rank) != NEVER:
            return claim
        if not went_past(scene.source, story.calls, inside, _lacked(scene, call, rank)):
            return claim
        places[rank] = inside.event.ordinal
    return replace(claim, places=places)


def _blamed(scene: Scene, meeting: Meeting) -> tuple[int, ...]:
    """Who is absent and cannot come any more, or was waited for longer than patience allows; () if nobody is.

    A rank that may have been on its way is not blamed, unless a member's wait for it ran out.
    """
    ran_out = any(TIMED_OUT.search(error) for error in meeting.errors)
    absent = [
        r
        for r in meeting.missing or meeting.unknown
        if ran_out or r not in scene.ranks or not _was_on_its_way(scene, r)
    ]
    waiting = any(scene.waits(c) for c in meeting.came.values())
    if waiting or meeting.errors:
        return tuple(sorted(absent))
    return tuple(sorted(r for r in absent if scene.is_gone(r) and r in meeting.missing))


def _was_on_its_way(scene: Scene, world_rank: int) -> bool:
    """Whether somebody ended the rank, after another one had failed, while it stood in no call: it may have come.

    Not if it had destroyed its groups: it had left.
    """
    story = scene.ranks[world_rank]
    return scene.was_ended(world_rank) and story.inside is None and not story.has_left


def _absent(scene: Scene, meetings: Sequence[Meeting], place: int, blamed: tuple[int, ...]) -> Claim:
    meeting = meetings[place]
    event = meeting.first.event
    is_first = not any(r in m.came or r in m.unknown for m in meetings[:place] for r in blamed)
    rendezvous = is_first or event.op in EXCHANGES or event.op == "monitored_barrier"
    told = _who_came(scene, meeting)
    told.append(f"{ranks_words(blamed)} never did" if meeting.missing else f"nothing is known of {ranks_words(blamed)}")
    lead, default, fix = "", "", same_steps(scene, event) if is_unwritten(scene, event) else _FIX
    meant = _forgotten(scene, meeting, blamed)
    if meant is not None:
        lead = f"called without group=, so over all ranks, by exactly the members of {group_words(meant)}: "
        fix = f"pass {group_words(meant)} to this call as group="
    elif "default group" in marks(event) and any(len(g) < len(meeting.name.world_ranks) for g in scene.made):
        default = ". It was called without group=, so over all ranks"
    where = "; ".join(_whereabouts(scene, r) for r in blamed[:4])
    return Claim.about(
        meeting.came.values(),
        code="absent.rendezvous" if rendezvous else "absent.call",
        kind=Kind.RENDEZVOUS_PARTIAL if rendezvous else Kind.MISSING_CALL,
        ranks=blamed,
        absent=blamed,
        message=f"{lead}{call_words(event)}, {meeting}: {', '.join(told)}{default}. {where}."
        f"{raised(meeting.came.values())}",
        certainty=_certainty(scene, blamed, bool(meeting.missing)),
        weight=Weight.SYMPTOM if all(_has_own_trouble(scene, r) for r in blamed) else Weight.CAUSE,
        fix=fix,
    )


def _who_came(scene: Scene, meeting: Meeting) -> list[str]:
    """Who came to the call; who of them still waits in it, or did until its end."""
    came = ranks_words(meeting.came)
    waiting = [r for r, c in meeting.came.items() if scene.waits(c)]
    ended = [r for r in waiting if scene.ranks[r].exit is not None]
    alive = [r for r in waiting if r not in ended]
    waited_s = (scene.end_ns - meeting.first.event.time_ns) / 1e9
    still = f"still wait{'s' if len(alive) == 1 else ''} after {waited_s:.1f} s"
    until = f"waited until {'its' if len(ended) == 1 else 'their'} end"
    told = [(ranks, words) for ranks, words in ((alive, still), (ended, until)) if ranks]
    if len(told) == 1 and len(waiting) == len(meeting.came):
        return [f"{came} came and {told[0][1]}"]
    return [f"{came} came", *(f"{ranks_words(ranks)} {words}" for ranks, words in told)]


def _forgotten(scene: Scene, meeting: Meeting, blamed: Sequence[int]) -> GroupInfo | None:
    """The group that the callers most likely meant: they are its members, and the others have gone on without them."""
    if not all("default group" in marks(c.event) for c in meeting.came.values()):
        return None
    if not all(scene.is_gone(r) or (r in scene.ranks and scene.ranks[r].inside is not None) for r in blamed):
        return None
    groups = (g for r in meeting.came if r in scene.ranks for g in scene.ranks[r].trace.groups)
    return next((g for g in groups if set(g.world_ranks) == set(meeting.came)), None)


def _has_own_trouble(scene: Scene, world_rank: int) -> bool:
    """Whether another rule says why the rank did not come: it raised, died, is stopped, or waits for a store."""
    story = scene.ranks.get(world_rank)
    if story is None:
        return False
    if world_rank in scene.stopped:
        return True
    failed = scene.is_gone(world_rank) and story.exit_status != 0
    return failed or (story.inside is not None and story.inside.event.op == "store_wait")


def _certainty(scene: Scene, blamed: Sequence[int], recorded: bool) -> Certainty:
    stories = {r: scene.ranks[r] for r in blamed if r in scene.ranks}
    stuck = all(
        scene.is_gone(r) or (r in stories and (stories[r].inside is not None or stories[r].has_left)) for r in blamed
    )
    return Certainty.IS if recorded and stuck else Certainty.LIKELY


def _whereabouts(scene: Scene, world_rank: int) -> str:
    """What the rank does instead."""
    story = scene.ranks.get(world_rank)
    if story is None:
        return f"world rank {world_rank} left no records"
    if story.exception is not None:
        return f"world rank {world_rank} ended with {error_words(story.exception.error)}"
    if story.inside is not None:
        return f"world rank {world_rank} is inside {call_words(story.inside.event)}"
    last = f"its last call was {call_words(story.calls[-1].event)}" if story.calls else "it made no call"
    status = f"ended with status {story.exit_status}" if story.exit is not None else "is in no recorded call"
    return f"world rank {world_rank} {status}; {last}"


def _lonely(scene: Scene) -> Iterator[RankCall]:
    """Sends and recvs that wait, where the peer made fewer of the counterpart: of each rank the call it stands in."""
    for story in scene.ranks.values():
        waiting = [c for c in story.calls if c.event.op in COUNTERPART and scene.waits(c)]
        for call in waiting[:1]:
            peer = scene.ranks.get(call.event.peer_world_rank if call.event.peer_world_rank is not None else -1)
            if peer is None or not peer.trace.drops.complete or scene.was_ended(peer.world_rank):
                continue
            if made_between(peer.calls, call) < made_between(story.calls, call):
                yield call


COUNTERPART = {"send": "recv", "recv": "send"}


def made_between(calls: Sequence[RankCall], call: RankCall) -> int:
    """How many calls of this kind, or of its counterpart, were made between the two ranks of `call`, on its group."""
    event = call.event
    members = event.group.world_ranks if event.group is not None else ()
    made = 0
    for c in calls:
        e = c.event
        own = e.world_rank == event.world_rank
        wanted = (event.op, event.peer_world_rank) if own else (COUNTERPART[event.op], event.world_rank)
        from_any = not own and e.op == wanted[0] and e.peer_world_rank is None
        made += from_any or (
            (e.op, e.peer_world_rank) == wanted and e.group is not None and e.group.world_ranks == members
        )
    return made


def _unpaired(scene: Scene, call: RankCall, peer: int) -> Claim:
    event = call.event
    counterpart = COUNTERPART[event.op]
    call_made = f"{call_words(event)} for world rank {peer}"
    waits = f"waits in {call_made}, {(scene.end_ns - event.time_ns) / 1e9:.1f} s"
    if scene.ranks[event.world_rank].exit is not None:
        waits = f"waited in {call_made} until its end"
    return Claim.about(
        [call],
        code="absent.peer",
        kind=Kind.MISSING_CALL,
        ranks=(peer,),
        absent=(peer,),
        message=f"world rank {event.world_rank} {waits}; no {counterpart} of {peer} is left for it. "
        f"{_whereabouts(scene, peer)}.",
        certainty=_certainty(scene, (peer,), True),
        fix=f"let world rank {peer} make the {counterpart} for it, in the same order as its other calls",
    )


def _circle(waits: Mapping[int, tuple[RankCall, tuple[int, ...]]]) -> tuple[int, ...]:
    """World ranks of which each waits for the next, and the last for the first; () if there is no such circle."""
    seen: set[int] = set()
    for start in sorted(waits):
        path, onward = [start], [_waiting_among(waits, start)]
        while path:
            following = next(onward[-1], None)
            if following is None:
                seen.add(path.pop())
                onward.pop()
            elif following in path:
                return tuple(path[path.index(following) :])
            elif following not in seen:
                path.append(following)
                onward.append(_waiting_among(waits, following))
    return ()


def _waiting_among(waits: Mapping[int, tuple[RankCall, tuple[int, ...]]], world_rank: int) -> Iterator[int]:
    """Those whom the rank waits for that wait themselves."""
    return (r for r in waits[world_rank][1] if r in waits)


def _went_past(scene: Scene, circle: Sequence[int], waits: Mapping[int, tuple[RankCall, tuple[int, ...]]]) -> set[int]:
    """Those of a circle that went past the call in which the one before them waits."""
    found = set()
    for waiting, world_rank in zip(circle, (*circle[1:], *circle[:1]), strict=True):
        lacked = _lacked(scene, waits[waiting][0], world_rank)
        if went_past(scene.source, scene.ranks[world_rank].calls, waits[world_rank][0], lacked):
            found.add(world_rank)
    return found


def _lacked(scene: Scene, call: RankCall, world_rank: int) -> Lacked:
    """What `call` waits for on another rank: the same call there, from the same line; of a send or recv its
    counterpart, which stands where the rank made one before."""
    event = call.event
    if event.op not in COUNTERPART:
        return Lacked(lambda e: _same_call(e, event), event.site)
    wanted = (COUNTERPART[event.op], event.world_rank)
    made = [c.event.site for c in scene.ranks[world_rank].calls if (c.event.op, c.event.peer_world_rank) == wanted]
    return Lacked(lambda e: (e.op, e.peer_world_rank) == wanted, made[-1] if made else None)


def _same_call(event: Event, other: Event) -> bool:
    return event.op == other.op and event.site == other.site and group_key(event.group) == group_key(other.group)


def _victims(waits: Mapping[int, tuple[RankCall, tuple[int, ...]]], circle: Sequence[int]) -> set[int]:
    """World ranks that are late because they wait, if over others, for the circle or for a rank that waits for none."""
    held = {r for _, late in waits.values() for r in late if r not in waits} | set(circle)
    victims: set[int] = set()
    while more := {r for r, (_, late) in waits.items() if r not in held | victims and (held | victims) & set(late)}:
        victims |= more
    return victims


def _most_wait_for(
    scene: Scene, circle: Sequence[int], waits: Mapping[int, tuple[RankCall, tuple[int, ...]]]
) -> set[int]:
    """Those of a circle, in which all did such calls before, for whom more members wait in one call than stay away."""
    if _is_first(scene, circle, waits):
        return set()
    waited_for: dict[tuple[object, tuple[int, ...]], int] = Counter()
    for call, blamed in waits.values():
        waited_for[group_key(call.event.group), blamed] += 1
    most = {blamed for (_, blamed), number in waited_for.items() if number > len(blamed)}
    return {r for r in circle if any(r in blamed for blamed in most)}


def _is_first(scene: Scene, circle: Sequence[int], waits: Mapping[int, tuple[RankCall, tuple[int, ...]]]) -> bool:
    """Whether none of a circle made a call before like the one it waits in, or like one that is waited for."""
    for waiting, late in zip(circle, (*circle[1:], *circle[:1]), strict=True):
        call = waits[waiting][0]
        lacked = _lacked(scene, call, late)
        if any(lacked.is_one(c.event) for c in scene.ranks[late].calls):
            return False
        if _is_repeated(scene, call):
            return False
    return True


def _is_repeated(scene: Scene, call: RankCall) -> bool:
    """Whether the rank made such a call before."""
    return was_made([c for c in scene.ranks[call.event.world_rank].calls if c is not call], call.event)


def _in_doubt(scene: Scene, claim: Claim, waits: Mapping[int, tuple[RankCall, tuple[int, ...]]]) -> Claim:
    """The claim about a rank that alone makes another call than before: that one may be too many."""
    (rank,) = claim.finding.ranks
    call = waits[rank][0]
    usual = usual_call(scene.ranks[rank].calls, call)
    assert usual is not None
    others, own = ranks_words(waits[rank][1]), call_words(call.event)
    counterpart = COUNTERPART.get(call.event.op, call.event.op)
    finding = replace(
        claim.finding,
        certainty=Certainty.LIKELY,
        message=f"{claim.finding.message} Before, world rank {rank} made {call_words(usual)} after the same calls: "
        f"its {own} is one too many, or {others} left out a {counterpart}.",
        fix=f"make as many calls such as {own} on world rank {rank} as each {counterpart} of {others} answers",
    )
    return replace(claim, finding=finding)


def _circular(scene: Scene, circle: Sequence[int], waits: Mapping[int, tuple[RankCall, tuple[int, ...]]]) -> Claim:
    """Nobody stands out. It is certain that calls changed places where one line makes them all, for the first time."""
    calls = [waits[r][0] for r in circle]
    told = "; ".join(
        f"world rank {r} waits in {call_words(c.event)} on {group_words(c.event.group)} for {ranks_words(waits[r][1])}"
        for r, c in zip(circle, calls, strict=True)
    )
    is_first = _is_first(scene, circle, waits)
    is_one_line = len({c.event.site for c in calls}) == 1
    swap = "make calls on groups that share ranks in one order everywhere, or let one side of a pair send first"
    missed = "one of them left a call out before, or made one too many"
    return Claim.about(
        calls,
        code="order.circle" if is_first else "order.uneven",
        kind=Kind.ORDER_SWAP if is_first else Kind.MISSING_CALL,
        ranks=circle,
        message=f"ranks wait for each other in a circle: {told}."
        f"{'' if is_first else f' {missed[0].upper()}{missed[1:]}; or their calls are in two orders.'}",
        certainty=Certainty.IS if is_first and is_one_line else Certainty.LIKELY,
        fix=f"{swap}; unless {missed}: then make as many on each"
        if is_first
        else f"count the calls of this step on each rank, and make as many on all; or, if as many are made, {swap}",
    )
