"""`workbench measure` and `workbench tune`: jobs that time our way beside others, and what comes of it."""

from workbench.bench.commands import measure, tune

__all__ = ["measure", "tune"]
