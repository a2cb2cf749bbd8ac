"""Which path a group takes and why. Pure: facts in, a Plan out, the same on every rank."""

from workbench.plan.decide import DTYPE_BYTES, Ask, decide_path
from workbench.plan.plan import (
    CANDIDATES,
    FUSED,
    OWN,
    Candidate,
    Plan,
    Standing,
    WorkspaceKey,
    decide_backend,
    find_switch,
    fingerprint,
)
from workbench.plan.tables import Table, parse_table, path_order, shipped_tables, show_bytes
from workbench.plan.upstream import (
    UPSTREAM_SYSTEMS,
    RetiredVariable,
    Rule,
    ask_upstream,
    describe_situation,
    find_model,
    find_retired,
    listed_models,
    upstream_rules,
)

__all__ = [
    "CANDIDATES",
    "DTYPE_BYTES",
    "FUSED",
    "OWN",
    "UPSTREAM_SYSTEMS",
    "Ask",
    "Candidate",
    "Plan",
    "RetiredVariable",
    "Rule",
    "Standing",
    "Table",
    "WorkspaceKey",
    "ask_upstream",
    "decide_backend",
    "decide_path",
    "describe_situation",
    "find_model",
    "find_retired",
    "find_switch",
    "fingerprint",
    "listed_models",
    "parse_table",
    "path_order",
    "shipped_tables",
    "show_bytes",
    "upstream_rules",
]
