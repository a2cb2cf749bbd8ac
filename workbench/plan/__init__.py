"""Which path a group takes and why. Pure: facts in, a Plan out, the same on every rank."""

from workbench.plan.plan import CANDIDATES, FUSED, Candidate, Plan, Standing, WorkspaceKey, decide_backend

__all__ = ["CANDIDATES", "FUSED", "Candidate", "Plan", "Standing", "WorkspaceKey", "decide_backend"]
