"""Claim: what a rule says before the rules are heard together. Only its finding leaves the room."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from workbench.diagnose.finding import Certainty, Finding, Kind
from workbench.diagnose.scene import Scene
from workbench.diagnose.words import call_words, evidence_of
from workbench.trace import GroupInfo, RankCall

NEVER = 1 << 62
"""The place of what a rank did not do: after everything that it did."""

DEATH = NEVER - 1
"""The place of a rank's end, of which it may have recorded nothing itself."""


class Weight(IntEnum):
    """How near to the first cause a claim can be, whatever its place."""

    CAUSE = 0
    REMARK = 1  # would be a cause, were nothing else found
    SYMPTOM = 2
    ALONE = 3  # told only where nothing else is
    BESIDE = 4  # told only where something else is: the program got over it


@dataclass(frozen=True, slots=True)
class Claim:
    """A finding, and where the fault was made.

    places: by world rank, the ordinal of the event that the claim is about, NEVER for one that did not come. A claim
        that stands before another one on a rank that both concern comes first, whatever the clock says.
    time_ns: on the trace's clock; it decides between claims that concern no rank in common.
    line: the call at fault, as words; claims of one code about one line, on groups that share no rank, are one fault.
    """

    finding: Finding
    time_ns: int
    weight: Weight = Weight.CAUSE
    line: str = ""
    places: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def about(
        cls,
        calls: Iterable[RankCall],
        *,
        code: str,
        kind: Kind,
        ranks: Iterable[int],
        message: str,
        fix: str,
        certainty: Certainty = Certainty.IS,
        weight: Weight = Weight.CAUSE,
        group: GroupInfo | None = None,
        shown: Iterable[RankCall] | None = None,
        absent: Iterable[int] = (),
    ) -> Claim:
        """The claim that `ranks` made a fault in these calls.

        group: default: that of the calls. shown: the calls that are the evidence; default: all. absent: world ranks
        that never came to them.
        """
        calls = tuple(calls)
        first = min(calls, key=lambda c: (c.event.time_ns, c.event.world_rank)).event
        places = dict.fromkeys(absent, NEVER)
        for call in calls:
            rank, ordinal = call.event.world_rank, call.event.ordinal
            places[rank] = min(ordinal, places.get(rank, ordinal))
        finding = Finding(
            code=code,
            kind=kind,
            ranks=tuple(sorted(set(ranks))),
            group=first.group if group is None else group,
            message=message,
            evidence=evidence_of(calls if shown is None else shown),
            certainty=certainty,
            fix=fix,
        )
        return cls(finding, first.time_ns, weight, call_words(first), places)


Rule = Callable[[Scene], Iterator[Claim]]
