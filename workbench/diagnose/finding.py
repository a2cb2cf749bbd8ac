"""Finding: one thing that went wrong, whose fault it is, how that is known, and what to try."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from workbench.diagnose.words import group_words, ranks_words
from workbench.trace import GroupInfo


class Kind(StrEnum):
    """What went wrong. The value is the word in JSON and on the command line."""

    GROUP_PLAN_MISMATCH = "group-plan-mismatch"
    ROOT_MISMATCH = "root-mismatch"
    WRONG_ROOT = "wrong-root"
    REDUCE_OP_MISMATCH = "reduce-op-mismatch"
    OP_MISMATCH = "op-mismatch"
    SHAPE_MISMATCH = "shape-mismatch"
    DTYPE_MISMATCH = "dtype-mismatch"
    LAYOUT_MISMATCH = "layout-mismatch"
    ORDER_SWAP = "order-swap"
    RENDEZVOUS_PARTIAL = "rendezvous-partial"
    MISSING_CALL = "missing-call"
    ORDINAL_DRIFT = "ordinal-drift"
    WRONG_GROUP = "wrong-group"
    NON_MEMBER_CALL = "non-member-call"
    STALE_STORE = "stale-store"
    STORE_TIMEOUT = "store-timeout"
    STALLED = "stalled"
    HANDLE_FAILURE = "handle-failure"
    WORKSPACE_OVERFLOW = "workspace-overflow"
    WORKSPACE_MOVED = "workspace-moved"
    CAPTURE_COLLECTIVE = "capture-collective"
    CAPTURE_COUNT_MISMATCH = "capture-count-mismatch"
    PATH_DIVERGENCE = "path-divergence"
    DOUBLE_REDUCE = "double-reduce"
    MISSING_REDUCE = "missing-reduce"
    PEER_EXCEPTION = "peer-exception"
    PEER_DEAD = "peer-dead"
    ENVIRONMENT = "environment"


class Certainty(StrEnum):
    """IS: the records show it. LIKELY: records are missing, or the records allow another reading."""

    IS = "is"
    LIKELY = "likely"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that went wrong.

    code       the rule's stable id
    ranks      the world ranks at fault, ascending; not the victims. All of them where nobody is in the minority
    group      the group it happened on, if any
    message    what happened, in one sentence or two, with the calling function and line, and the exception's text
    evidence   the events it rests on, one line each
    fix        what to try
    consequence  it follows from a finding above it: its ranks are at fault only if it outlives the repair of that one
    """

    code: str
    kind: Kind
    ranks: tuple[int, ...]
    group: GroupInfo | None = None
    message: str
    evidence: tuple[str, ...] = ()
    certainty: Certainty = Certainty.IS
    fix: str
    consequence: bool = False

    def to_json(self) -> dict[str, Any]:
        """All fields, in a fixed order."""
        return {
            "code": self.code,
            "kind": self.kind.value,
            "ranks": list(self.ranks),
            "group": None if self.group is None else self.group.to_json(),
            "message": self.message,
            "evidence": list(self.evidence),
            "certainty": self.certainty.value,
            "fix": self.fix,
            "consequence": self.consequence,
        }

    def __str__(self) -> str:
        where = "" if self.group is None else f" on {group_words(self.group)}"
        at_fault = f" by {ranks_words(self.ranks)}" if self.ranks else ""
        known = "follows from the above" if self.consequence else self.certainty
        return f"{self.kind}{where}{at_fault} ({known}): {self.message} Try: {self.fix}"
