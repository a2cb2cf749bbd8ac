"""Two members of an all-to-all of which one sends to the other more or fewer elements than that one takes from it.

Example: in call #3 of ep[0,1,2] world rank 0 sends 24 elements to world rank 2, which has room for 32 from it.
Claim: `shape-mismatch`, the one rank that all such pairs have in common, if there are several pairs and only one such
rank; else both ranks of each pair. What a gloo rank has no room for aborts it; what is not sent stays as it was, and
nothing is raised.
Evidence: the calls of those ranks, with what each sends and takes.
Try: exchange the counts in the same step, before the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.diagnose.claim import Claim
from workbench.diagnose.finding import Kind
from workbench.diagnose.scene import Meeting
from workbench.diagnose.words import call_words, raised
from workbench.trace import Parts

OPS = frozenset({"all_to_all", "all_to_all_single"})
_MOST_PAIRS = 4  # that are told


@dataclass(frozen=True, slots=True)
class _Pair:
    """What one world rank sends to another, and what that one takes from it. Units: elements."""

    source: int
    target: int
    sent: int
    taken: int

    def __str__(self) -> str:
        return f"world rank {self.source} sends {self.sent} to {self.target}, which takes {self.taken} from it"


def find_unequal_parts(meeting: Meeting) -> Claim | None:
    """The claim about the pairs that disagree in this call; None if it is no all-to-all, or all agree."""
    pairs = _unequal_pairs(meeting)
    if not pairs:
        return None
    more = f"; and {len(pairs) - _MOST_PAIRS} more pairs" if len(pairs) > _MOST_PAIRS else ""
    has_ended = not meeting.absent and all(c.end is not None for c in meeting.came.values())
    told = raised(meeting.came.values()) or (" Nothing was raised." if has_ended else "")
    return Claim.about(
        meeting.came.values(),
        code="call.parts",
        kind=Kind.SHAPE_MISMATCH,
        ranks=_ranks_at_fault(pairs),
        message=f"{call_words(meeting.first.event)}, {meeting}: the members disagree on how many elements they "
        f"exchange: "
        f"{'; '.join(map(str, pairs[:_MOST_PAIRS]))}{more}.{told}",
        shown=(meeting.came[r] for r in sorted({r for p in pairs for r in (p.source, p.target)})),
        fix="exchange the counts first, in the same step: all_to_all_single of the input split sizes gives every "
        "rank its output split sizes",
    )


def _unequal_pairs(meeting: Meeting) -> list[_Pair]:
    members = meeting.name.world_ranks
    parts: dict[int, Parts] = {}
    for rank, call in meeting.came.items():
        found = Parts.parse(call.event.note) if call.event.op in OPS else None
        if found is not None and len(found.sends) == len(found.takes) == len(members):
            parts[rank] = found
    places = {rank: place for place, rank in enumerate(members) if rank in parts}
    return [
        _Pair(source, target, sent, taken)
        for source in places
        for target in places
        if (sent := parts[source].sends[places[target]]) != (taken := parts[target].takes[places[source]])
    ]


def _ranks_at_fault(pairs: Sequence[_Pair]) -> tuple[int, ...]:
    common = set.intersection(*({p.source, p.target} for p in pairs))
    if len(common) == 1:
        return tuple(common)
    return tuple(sorted({r for p in pairs for r in (p.source, p.target)}))
