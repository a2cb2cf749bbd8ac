"""diagnose: every rule is asked, and what they say is put in order: first cause first, its symptoms below."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import pairwise

from workbench.diagnose.claim import Claim, Rule, Weight
from workbench.diagnose.consequences import as_consequence, find_consequences
from workbench.diagnose.finding import Finding
from workbench.diagnose.rules import (
    absent,
    beginnings,
    captures,
    endings,
    intent,
    messages,
    order,
    plans,
    roots,
    signatures,
    stalled,
    stopped,
    stores,
    workspaces,
)
from workbench.diagnose.scene import Scene
from workbench.diagnose.words import group_words, ranks_words
from workbench.trace import Trace

RULES: tuple[Rule, ...] = (
    *(plans.rule, stores.rule, intent.rule, roots.rule, captures.rule, workspaces.rule),
    *(signatures.rule, messages.rule, order.rule, absent.rule, endings.rule),
    *(stopped.rule, stalled.rule, beginnings.rule),
)
"""Of claims about one call, an earlier rule's comes first."""


def diagnose(
    trace: Trace,
    *,
    deadline_s: float | None = None,
    now_ns: int | None = None,
    dead: Collection[int] = (),
    stopped: Collection[int] = (),
    source: Callable[[str, int], str] | None = None,
) -> tuple[Finding, ...]:
    """What went wrong, first cause first; () if nothing did.

    now_ns: for a job that still runs, the moment the trace was read, on its clock (ns since 1970). None: it is over.
    deadline_s: how long a rank of a running job may be waited for before it counts as missing. None: no patience.
    dead: world ranks of a running job whose process is gone, though nothing tells how it ended.
    stopped: world ranks of a running job whose process is stopped, by a signal or a debugger.
    source: gives the text of (file, line) of the program, such as linecache.getline: calls of equal shape that change
        places can then be told by what their lines say.
    """
    scene = Scene(
        trace,
        now_ns=now_ns,
        patience_ns=int((deadline_s or 0) * 1e9),
        dead=dead,
        stopped=stopped,
        source=source,
    )
    claims = find_consequences(scene, [claim for rule in RULES for claim in rule(scene)])
    ordered = _merge(c for weight in Weight for c in _in_order([c for c in claims if c.weight is weight]))
    return tuple(dict.fromkeys(_findings(_told(ordered))))


def _in_order(claims: Sequence[Claim]) -> Iterator[Claim]:
    """First the claims that no other comes before on a rank that both concern; of these, the first in time.

    Which of two ranks was the quicker then decides only between faults that have nothing to do with each other, or
    each of which comes before the other on some rank.
    """
    later: dict[int, set[int]] = defaultdict(set)  # by claim: those that it comes before
    by_rank: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, claim in enumerate(claims):
        for rank, place in claim.places.items():
            by_rank[rank][place].append(number)
    for by_place in by_rank.values():
        for here, following in pairwise([numbers for _, numbers in sorted(by_place.items())]):
            for number in here:
                later[number].update(following)
    num_earlier = Counter(n for numbers in later.values() for n in numbers)
    waiting = {number: (claim.time_ns, number) for number, claim in enumerate(claims)}
    free = [turn for number, turn in waiting.items() if not num_earlier[number]]
    heapify(free)
    while waiting:
        _, number = heappop(free) if free else min(waiting.values())
        del waiting[number]
        yield claims[number]
        for other in later[number]:
            num_earlier[other] -= 1
            if not num_earlier[other] and other in waiting:
                heappush(free, waiting[other])


def _told(claims: Sequence[Claim]) -> list[Claim]:
    """Those that are told, given which others there are."""
    faults = [c for c in claims if c.weight not in (Weight.ALONE, Weight.BESIDE)]
    faults = faults or [c for c in claims if c.weight is Weight.ALONE]
    return [*faults, *(c for c in claims if c.weight is Weight.BESIDE)] if faults else []


def _findings(claims: Sequence[Claim]) -> Iterator[Finding]:
    """The claims' findings; a symptom below a cause says that it follows from it, and blames nobody for certain."""
    has_cause = any(c.weight in (Weight.CAUSE, Weight.REMARK) for c in claims)
    for claim in claims:
        finding = claim.finding
        if has_cause and claim.weight is Weight.SYMPTOM:
            finding = as_consequence(finding)
        yield finding


def _merge(claims: Iterable[Claim]) -> list[Claim]:
    """One claim for a fault that one line makes on several groups, in the place of the first.

    Groups that share a rank stay apart: there one claim may be what the other leads to.
    """
    faults: list[list[Claim]] = []
    likes: dict[object, list[tuple[set[int], list[Claim]]]] = defaultdict(list)  # by line, code and weight
    for claim in claims:
        group = claim.finding.group
        ranks = set() if group is None or not claim.line else set(group.world_ranks)
        like = likes[claim.line, claim.finding.code, claim.weight] if ranks else []
        held, fault = next((one for one in like if one[0].isdisjoint(ranks)), (set[int](), list[Claim]()))
        if not fault:
            faults.append(fault)
            like.append((held, fault))
        fault.append(claim)
        held |= ranks
    return [same[0] if len(same) == 1 else _merged(same) for same in faults]


def _merged(claims: Sequence[Claim]) -> Claim:
    first, *others = (c.finding for c in claims)
    likewise = [f"{group_words(f.group)} by {ranks_words(f.ranks)}" for f in others]
    more = f" and {len(likewise) - 4} more groups" if len(likewise) > 4 else ""
    finding = replace(
        first,
        ranks=tuple(sorted({r for c in claims for r in c.finding.ranks})),
        message=f"{first.message} Likewise on {', '.join(likewise[:4])}{more}.",
        evidence=tuple(dict.fromkeys(line for c in claims for line in c.finding.evidence[:4]))[:8],
        certainty=max(c.finding.certainty for c in claims),
    )
    return replace(claims[0], finding=finding)
