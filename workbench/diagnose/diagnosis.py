"""diagnose: every rule is asked, and what they say is put in order: first cause first, its symptoms below."""

from __future__ import annotations

from collections.abc import Collection

from workbench.diagnose.claim import Claim, Rule
from workbench.diagnose.finding import Finding
from workbench.diagnose.rules import absent, signatures
from workbench.diagnose.scene import Scene
from workbench.trace import Trace

RULES: tuple[Rule, ...] = (signatures.rule, absent.rule)


def diagnose(
    trace: Trace, *, deadline_s: float | None = None, now_ns: int | None = None, dead: Collection[int] = ()
) -> tuple[Finding, ...]:
    """What went wrong, first cause first; () if nothing did.

    now_ns: for a job that still runs, the moment the trace was read, on its clock (ns since 1970). None: it is over.
    deadline_s: how long a rank of a running job may be waited for before it counts as missing. None: no patience.
    dead: world ranks whose process the caller knows to be gone.
    """
    patience_ns = int((deadline_s or 0) * 1e9)
    scene = Scene(trace, now_ns=now_ns, patience_ns=patience_ns, dead=dead)
    claims = [claim for rule in RULES for claim in rule(scene)]
    return tuple(claim.finding for claim in sorted(claims, key=_order))


def _order(claim: Claim) -> tuple[int, int, str, tuple[int, ...]]:
    return (claim.weight, claim.time_ns, claim.finding.code, claim.finding.ranks)
