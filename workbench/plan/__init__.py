"""Which path a group takes and why. Pure: facts in, a Plan out, the same on every rank."""

from workbench.plan.decide import DTYPE_BYTES, Ask, decide_path, decide_plans
from workbench.plan.paths import ALONE, Path, all_paths, find_switch, path_order, split_choice
from workbench.plan.plan import Candidate, Plan, Standing, WorkspaceKey, decide_backend, fingerprint
from workbench.plan.tables import (
    BUILT_KERNELS,
    EVERY_KERNEL,
    Algorithm,
    Mode,
    Table,
    parse_table,
    read_table,
    shipped_tables,
    show_bytes,
)
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
    "ALONE",
    "BUILT_KERNELS",
    "DTYPE_BYTES",
    "EVERY_KERNEL",
    "UPSTREAM_SYSTEMS",
    "Algorithm",
    "Ask",
    "Candidate",
    "Mode",
    "Path",
    "Plan",
    "RetiredVariable",
    "Rule",
    "Standing",
    "Table",
    "WorkspaceKey",
    "all_paths",
    "ask_upstream",
    "decide_backend",
    "decide_path",
    "decide_plans",
    "describe_situation",
    "find_model",
    "find_retired",
    "find_switch",
    "fingerprint",
    "listed_models",
    "parse_table",
    "path_order",
    "read_table",
    "shipped_tables",
    "show_bytes",
    "split_choice",
    "upstream_rules",
]
