"""diagnose: every rule is asked, and what they say is put in order: first cause first, its symptoms below."""

from __future__ import annotations

from collections.abc import Callable, Collection

from workbench.diagnose.claim import Rule, Weight
from workbench.diagnose.finding import Finding
from workbench.diagnose.rules import (
    absent,
    captures,
    endings,
    intent,
    order,
    plans,
    roots,
    signatures,
    stalled,
    stores,
    workspaces,
)
from workbench.diagnose.scene import Scene
from workbench.trace import Trace

RULES: tuple[Rule, ...] = (
    *(plans.rule, stores.rule, intent.rule, roots.rule, captures.rule, workspaces.rule),
    *(signatures.rule, order.rule, absent.rule, endings.rule, stalled.rule),
)
"""Of claims about one moment, an earlier rule's comes first."""


def diagnose(
    trace: Trace,
    *,
    deadline_s: float | None = None,
    now_ns: int | None = None,
    dead: Collection[int] = (),
    source: Callable[[str, int], str] | None = None,
) -> tuple[Finding, ...]:
    """What went wrong, first cause first; () if nothing did.

    now_ns: for a job that still runs, the moment the trace was read, on its clock (ns since 1970). None: it is over.
    deadline_s: how long a rank of a running job may be waited for before it counts as missing. None: no patience.
    dead: world ranks of a running job whose process is gone, though nothing tells how it ended.
    source: gives the text of (file, line) of the program, such as linecache.getline: calls of equal shape that change
        places can then be told by what their lines say.
    """
    scene = Scene(trace, now_ns=now_ns, patience_ns=int((deadline_s or 0) * 1e9), dead=dead, source=source)
    claims = [(claim, number) for number, rule in enumerate(RULES) for claim in rule(scene)]
    ordered = [claim for claim, _ in sorted(claims, key=lambda c: (c[0].weight, c[0].time_ns, c[1]))]
    explained = any(claim.weight is not Weight.ALONE for claim in ordered)
    return tuple(dict.fromkeys(c.finding for c in ordered if not (explained and c.weight is Weight.ALONE)))
