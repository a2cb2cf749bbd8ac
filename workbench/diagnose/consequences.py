"""Consequences: what happens to a rank in the very call that another claim is about follows from that claim.

Example: world ranks 2 and 3 name two roots in a broadcast and stand in it; 0 and 1 wait for them in an all-reduce. The
roots are the cause; that 2 and 3 never enter the all-reduce follows from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from signal import SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV

from workbench.diagnose.claim import NEVER, Claim, Weight
from workbench.diagnose.finding import Certainty, Finding
from workbench.diagnose.log_lines import explain_log_line
from workbench.diagnose.program_order import group_key
from workbench.diagnose.rules.absent import TIMED_OUT
from workbench.diagnose.rules.order import line
from workbench.diagnose.scene import UNSEEN, RankStory, Scene, is_async, marks
from workbench.trace import BELOW_PYTHON, RankCall

_OWN_SIGNALS = (SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV)  # what a process runs into; others come from outside


def find_consequences(scene: Scene, claims: Sequence[Claim]) -> list[Claim]:
    """The claims; those that follow from another one as symptoms. One that they follow from stays as it is.

    These follow: an absence of ranks that all stand in calls that other claims are about; a call that met that of
    another line, on a rank that left one out before; an exception or a death in such a call; a lost connection where
    anything else went wrong.
    """
    led = set(_led_astray(scene, claims)) | set(_out_of_step(scene, claims))
    causes = [c for i, c in enumerate(claims) if c.weight is Weight.CAUSE and not _is(c, "ending.") and i not in led]
    weights = {c.weight for c in claims if _is(c, "ending.exception") and not _is_lost(c)}  # of exceptions of their own
    weights |= {Weight.CAUSE for c in claims if c.weight is Weight.CAUSE and not _is_lost(c)}
    found = []
    for number, claim in enumerate(claims):
        if _is_lost(claim) and claim.weight is Weight.ALONE and Weight.ALONE in weights:
            found.append(replace(claim, finding=as_consequence(claim.finding), weight=Weight.BESIDE))
        elif claim.weight is Weight.CAUSE and (
            number in led or (_is_lost(claim) and Weight.CAUSE in weights) or _ended_in_a_call(scene, claim, causes)
        ):
            found.append(replace(claim, weight=Weight.SYMPTOM))
        else:
            found.append(claim)
    return found


def as_consequence(finding: Finding) -> Finding:
    """The finding as one that follows from another: it blames nobody for certain."""
    fix = "repair what stands above; this follows from it"
    return replace(finding, consequence=True, certainty=Certainty.LIKELY, fix=fix)


def _is(claim: Claim, *codes: str) -> bool:
    return claim.finding.code.startswith(codes)


def _is_lost(claim: Claim) -> bool:
    """Whether the connection to another rank ended, as happens once that one has failed."""
    known = explain_log_line(claim.finding.message) if _is(claim, "ending.exception") else None
    return known is not None and known.code == "gloo-peer"


def _led_astray(scene: Scene, claims: Sequence[Claim]) -> Iterator[int]:
    """Numbers of the absences whose ranks all stand in calls that other claims are about, but for absences alone."""
    new = [c for c in claims if c.weight is Weight.CAUSE and not _is(c, "absent.", "ending.")]
    if not new:
        return
    new += [c for c in claims if c.weight is Weight.SYMPTOM and _is(c, "absent.")]
    earlier = set(_earlier(claims))
    absences = {
        i: c for i, c in enumerate(claims) if c.weight is Weight.CAUSE and _is(c, "absent.") and i not in earlier
    }
    held: set[int] = set()
    while new:
        held |= {r for claim in new for r in claim.places if any(_concerns(claim, c) for c in _stands_in(scene, r))}
        led = [i for i, claim in absences.items() if held.issuperset(claim.finding.ranks)]
        new = [absences.pop(i) for i in led]
        yield from led


def _out_of_step(scene: Scene, claims: Sequence[Claim]) -> Iterator[int]:
    """Numbers of the claims about a call that met that of another line, on ranks that left one out before."""
    earlier: dict[int, int] = {}  # by world rank: the call before which it left one out
    for number in _earlier(claims):
        earlier |= {r: claims[number].places[r] for r in claims[number].finding.ranks}
    for number, claim in enumerate(claims):
        is_late = any(rank in earlier and place >= earlier[rank] for rank, place in claim.places.items())
        if is_late and claim.weight is Weight.CAUSE and _is(claim, "call.", "order.") and _lines_differ(scene, claim):
            yield number


def _earlier(claims: Sequence[Claim]) -> Iterator[int]:
    """Numbers of the absences of which it is known before which call the absent ranks left one out.

    Not those of a group whose members met in different calls before: there the difference is the earlier.
    """
    differing = {group_key(c.finding.group) for c in claims if _is(c, "call.", "order.")}
    for number, claim in enumerate(claims):
        is_sequel = group_key(claim.finding.group) in differing and not _is(claim, "absent.peer")
        if claim.weight is not Weight.CAUSE or not _is(claim, "absent.") or is_sequel:
            continue
        if all(claim.places.get(r, NEVER) < NEVER for r in claim.finding.ranks):
            yield number


def _lines_differ(scene: Scene, claim: Claim) -> bool:
    made = (c for r in claim.places if r in scene.ranks for c in scene.ranks[r].calls)
    return len({line(c.event) for c in made if c.event.ordinal == claim.places[c.event.world_rank]}) > 1


def _stands_in(scene: Scene, world_rank: int) -> Iterable[RankCall]:
    """The calls that hold the rank: of those whose wait nobody sees, each that has not ended."""
    story = scene.ranks.get(world_rank)
    inside = story.inside if story is not None else None
    if story is None or (inside is not None and inside.event.op != "wait"):
        return () if inside is None else (inside,)
    left = [c for c in story.calls if c.end is None and is_async(c)]
    return left if inside is not None else [c for c in left if not UNSEEN.isdisjoint(marks(c.event))]


def _concerns(claim: Claim, call: RankCall) -> bool:
    """Whether the claim is about the call. Where members left the common order, later ones count too."""
    event, finding = call.event, claim.finding
    place = claim.places.get(event.world_rank)
    if place is None or event.ordinal <= place:
        return event.ordinal == place
    if _is(claim, "plan."):
        return event.op == "new_group"
    return (
        _is(claim, "order.", "call.left-out", "call.extra") and event.group is not None and event.group == finding.group
    )


def _ended_in_a_call(scene: Scene, claim: Claim, causes: Sequence[Claim]) -> bool:
    """Whether the claim is about ranks that raised or died in calls that other claims are about."""
    if not _is(claim, "ending.exception", "ending.death"):
        return False
    in_a_call = _died_in if _is(claim, "ending.death") else _raised_in
    return all(
        any(
            in_a_call(scene.ranks[rank], claim.places[rank], call, _is(cause, "absent."))
            for cause in causes
            if rank in cause.places
            for call in scene.ranks[rank].calls
            if _concerns(cause, call)
        )
        for rank in claim.finding.ranks
    )


def _died_in(story: RankStory, _: int, call: RankCall, is_absence: bool) -> bool:
    """Whether the rank ended itself in a call that it had not left. Of a wait that ran out, libraries make an abort."""
    status = story.exit_status
    if status is None or call.end is not None:
        return False
    return -status in ((SIGABRT,) if is_absence else _OWN_SIGNALS) or (status > 0 and story.inside is call)


def _raised_in(story: RankStory, ordinal: int, call: RankCall, is_absence: bool) -> bool:
    """Whether the exception came out of a call that C++ issued below the line that raised it."""
    event = next((e for e in story.exceptions if e.ordinal == ordinal), None)
    if event is None or BELOW_PYTHON not in marks(call.event) or line(event) != line(call.event):
        return False
    later = (c.event for c in story.calls if call.event.ordinal < c.event.ordinal < ordinal)
    return all(line(e) == line(event) for e in later) and (not is_absence or bool(TIMED_OUT.search(event.error)))
