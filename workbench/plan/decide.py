"""decide_path: the path one group takes for one message, from gathered facts, settings and tables. Pure.

Capability first, and nothing before it: no list of widths, no count of nodes, no opt-in decides about a group whose
links were never looked at. Such a policy upstream once kept sixteen ranks of one NVLink clique off the fast path.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from workbench.errors import ArgumentError
from workbench.fabric import Capability, Fabric, decide_capability
from workbench.plan.paths import ALONE, ROUNDINGS, Path, all_paths, find_rounding, find_switch, path_order
from workbench.plan.plan import Plan, Standing
from workbench.plan.tables import EVERY_KERNEL, Algorithm, Entry, Mode, Row, Table, shipped_tables, show_bytes
from workbench.settings import Settings

DTYPE_BYTES: Mapping[str, int] = MappingProxyType({"bfloat16": 2, "float16": 2, "float32": 4})
VECTOR_BYTES = 16
MAX_HIDDEN = 1 << 20
MAX_TOKENS = 1 << 24
_ANY = "takes any size over any links"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a group is to be prepared for. Raises ArgumentError for sizes outside their bounds; 0 tokens are legal.

    fused: all-reduce + add + RMSNorm is wanted, not the all-reduce alone.   captured: inside a CUDA graph.
    rounding: how often the fused operation's sum is rounded, "once" or "twice".
    symmetric_memory: the caller offers symmetric memory, torch's and NCCL's, as paths.
    """

    hidden: int
    tokens: int
    dtype: str = "bfloat16"
    fused: bool = True
    captured: bool = True
    rounding: str = "once"
    symmetric_memory: bool = False

    def __post_init__(self) -> None:
        for name, low, high in (("hidden", 1, MAX_HIDDEN), ("tokens", 0, MAX_TOKENS)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ArgumentError(f"{name}={value!r}; allowed: whole numbers from {low} to {high}")
        if self.dtype not in DTYPE_BYTES:
            raise ArgumentError(f"dtype={self.dtype!r}; allowed: {', '.join(DTYPE_BYTES)}")
        if self.rounding not in ROUNDINGS:
            raise ArgumentError(f"rounding={self.rounding!r}; allowed: {', '.join(ROUNDINGS)}")

    @property
    def row_bytes(self) -> int:
        return self.hidden * DTYPE_BYTES[self.dtype]

    @property
    def message_bytes(self) -> int:
        """Bytes that each rank brings: tokens x hidden x size of an element."""
        return self.tokens * self.row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """All that a decision depends on."""

    fabric: Fabric
    ask: Ask
    settings: Settings
    tables: Mapping[str, Table]
    kernels: Collection[Algorithm]
    refused: Mapping[str, str]
    by_name: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offer:
    """A path that takes the message. `limit_bytes` is the largest message it takes, None without a limit."""

    choice: str
    reason: str
    limit_bytes: int | None = None
    workspace_bytes: int = 0
    standing: Standing = Standing.DEFAULT
    passed_over: tuple[tuple[str, str], ...] = ()


def decide_path(
    fabric: Fabric,
    ask: Ask,
    settings: Settings | None = None,
    *,
    tables: Mapping[str, Table] | None = None,
    kernels: Collection[Algorithm] = EVERY_KERNEL,
    order: Sequence[str] | None = None,
    refused: Mapping[str, str] | None = None,
    by_name: bool = False,
) -> Plan:
    """The first path of `order` that takes the message, and why each one before it does not.

    Equal facts, ask, settings, tables and refusals give the same plan on every member;
    `fingerprint(plan.to_json())` is what members compare. `tables` maps architectures to tables and defaults to the
    shipped ones, `order` to the paths of the group's device. `kernels` are the algorithms that have one: BUILT_KERNELS
    tells what this build can run, EVERY_KERNEL (the default) what the tables choose if all are there. `refused` holds
    choices that members found unusable since, with their reasons. `by_name`: the caller names the path, so the sizes at
    which tables give way to another path do not count; what the group's links and the kernels can do still does.
    A group that no path can serve gets choice "none" with standing UNSUPPORTED. workspace_bytes is what the choice's
    staging takes a rank; paths of a library, and CPU paths, count their own.
    """
    if fabric.key.size == 1:
        return _plan(fabric, ask, _Offer(choice=ALONE.name, reason="one rank owes nothing to others"), (), "")
    case = _Case(
        fabric=fabric,
        ask=ask,
        settings=Settings() if settings is None else settings,
        tables=shipped_tables() if tables is None else tables,
        kernels=kernels,
        refused={} if refused is None else refused,
        by_name=by_name,
    )
    if order is None:
        order = path_order("cuda" if any(f.device for f in fabric.facts) else "cpu")
    paths = [path for path in map(_known, order) if _asked_for(path, ask)]
    rejected: list[tuple[str, str]] = []
    for i, path in enumerate(paths):
        offer = _offer(path, case)
        if isinstance(offer, _Offer):
            fallback = _fallback(paths[i + 1 :], offer, case)
            return _plan(fabric, ask, offer, (*rejected, *offer.passed_over), fallback)
        rejected.append((path.name, offer))
    none = _Offer(choice="none", reason="no path can serve this group", standing=Standing.UNSUPPORTED)
    return _plan(fabric, ask, none, tuple(rejected), "")


def decide_plans(fabric: Fabric, ask: Ask, settings: Settings | None = None, **options: Any) -> tuple[Plan, ...]:
    """The plans for every number of tokens from 0 to `ask.tokens`, ascending; `options` are those of decide_path.

    Each serves more tokens than the one before it and up to its own capacity_tokens; two neighbours differ in choice.
    """
    plans: list[Plan] = []
    for tokens in _edges(fabric, ask, options.get("tables")):
        plan = decide_path(fabric, replace(ask, tokens=tokens), settings, **options)
        if plans and plans[-1].choice == plan.choice:
            plans.pop()
        plans.append(plan)
    return tuple(plans)


def _edges(fabric: Fabric, ask: Ask, tables: Mapping[str, Table] | None) -> list[int]:
    """The numbers of tokens at which a table's answer may change, ascending; the last one is the ask's own."""
    found = _find_entry(fabric, shipped_tables() if tables is None else tables)
    edges = {ask.tokens}
    if not isinstance(found, str):
        entry = found[1]
        rows = [row for mode_rows in entry.rows.values() for row in mode_rows]
        sizes = {entry.max_message_bytes, *(r.up_to_bytes for r in rows), *(r.from_bytes - 1 for r in rows)}
        edges |= {size // ask.row_bytes for size in sizes if size >= 0}
    return sorted(edge for edge in edges if edge <= ask.tokens)


def _known(name: str) -> Path:
    path = all_paths().get(name)
    if path is None:
        raise ArgumentError(f"no path is called {name!r}; known: {', '.join(all_paths())}")
    return path


def _asked_for(path: Path, ask: Ask) -> bool:
    """A path that fuses on a GPU has a sibling for the all-reduce alone; shm is both in one."""
    if path.symmetric and not ask.symmetric_memory:
        return False
    return ask.fused or not path.fused or path.device == "cpu"


def _plan(fabric: Fabric, ask: Ask, offer: _Offer, rejected: tuple[tuple[str, str], ...], fallback: str) -> Plan:
    return Plan(
        group=str(fabric.key),
        choice=offer.choice,
        reason=offer.reason,
        rejected=rejected,
        fallback=fallback,
        capacity_tokens=ask.tokens if offer.standing is not Standing.UNSUPPORTED else 0,
        workspace_bytes=offer.workspace_bytes,
        standing=offer.standing,
    )


def _fallback(paths: Sequence[Path], offer: _Offer, case: _Case) -> str:
    """Which path takes the first message that is too large for the choice, and over which group.

    A choice without a limit of its own falls back when its workspace may grow no more.
    """
    ask = case.ask
    if offer.limit_bytes is not None:
        ask = replace(ask, tokens=min(max(offer.limit_bytes // ask.row_bytes, ask.tokens) + 1, MAX_TOKENS))
    for path in paths:
        if isinstance(_offer(path, replace(case, ask=ask)), _Offer):
            above = "" if offer.limit_bytes is None else f" above {show_bytes(offer.limit_bytes)}"
            return f"{path.name} over {case.fabric.key}{above}"
    return ""


def _offer(path: Path, case: _Case) -> _Offer | str:
    """An offer, or the reason why this path does not take the message. What the group can do is asked first."""
    fabric, ask = case.fabric, case.ask
    switch = find_switch(path, case.settings, fused=ask.fused)
    if switch and not path.multicast:  # allowing multicast is advice only where devices and links would do
        return switch
    if path.one_host and not fabric.same_host.ok:
        return f"{fabric.same_host.reason}; its memory is shared within a host only"
    if path.widths and fabric.key.size not in path.widths:
        return f"serves groups of {', '.join(map(str, path.widths))} ranks"
    if path.multicast:
        multicast = decide_capability(fabric, Capability.MULTICAST)
        if switch or not multicast.ok:
            return multicast.reason if not multicast.ok else switch
    offer: _Offer | str
    if path.backend == "custom":
        offer = _custom(path, case)
    elif path.name == "nccl":
        offer = _Offer(choice="nccl", reason=_ANY) if fabric.devices.ok else fabric.devices.reason
    elif path.device == "cuda":
        staged = decide_capability(fabric, Capability.STAGED)  # these need the very links that staging needs
        offer = _Offer(choice=path.name, reason=staged.reason) if staged.ok else staged.reason
    else:
        offer = _Offer(choice=path.name, reason=fabric.same_host.reason if path.one_host else _ANY)
    if isinstance(offer, str):
        return offer
    differs = ask.fused and ask.dtype != "float32"  # an fp32 sum has nothing to round, and neither has an all-reduce
    return (find_rounding(path, ask.rounding) if differs else "") or case.refused.get(path.name) or offer


def _custom(path: Path, case: _Case) -> _Offer | str:
    """Our own kernels: a row for the architecture and width, members that can reach each other, a kernel, the size."""
    fabric, ask = case.fabric, case.ask
    found = _find_entry(fabric, case.tables)
    staged = decide_capability(fabric, Capability.STAGED)
    problems = [text for text in (found if isinstance(found, str) else "", "" if staged.ok else staged.reason) if text]
    if isinstance(found, str) or problems:
        return "; ".join(problems)
    if ask.row_bytes % VECTOR_BYTES:
        return f"rows of {ask.row_bytes} bytes; allowed: multiples of {VECTOR_BYTES}"
    table, entry = found
    mode = Mode.FUSED if path.fused else Mode.GRAPH if ask.captured else Mode.EAGER
    return _size_up(path, case, table, entry, mode, staged.reason)


def _find_entry(fabric: Fabric, tables: Mapping[str, Table]) -> tuple[Table, Entry] | str:
    if not fabric.arch.ok:
        return fabric.arch.reason
    arch, ws = fabric.arch.reason, fabric.key.size
    table = tables.get(arch)
    if table is None:
        return f"no table for {arch}; there are {', '.join(sorted(tables))}"
    if ws not in table.entries:
        widths = ", ".join(map(str, sorted(table.entries)))
        why = table.absent.get(ws, "a table holds widths up to 16")
        return f"table {table.name} has no width {ws} ({why}); it has {widths}"
    return table, table.entries[ws]


def _size_up(path: Path, case: _Case, table: Table, entry: Entry, mode: Mode, links: str) -> _Offer | str:
    """The row that serves the message. Rows without capability or kernel are passed over, with the reason."""
    ws, size, rows = case.fabric.key.size, case.ask.message_bytes, entry.rows[mode]
    where = f"{table.name}/ws{ws} {mode.value}"
    if not rows:
        return f"{where} has no rows"
    end = min(entry.max_message_bytes, max(row.up_to_bytes for row in rows))
    if size > end and not case.by_name:
        return f"{show_bytes(size)} is above the {show_bytes(end)} at which {where} ends"
    passed_over: list[tuple[str, str]] = []
    usable: list[int] = []
    for i, row in enumerate(rows):
        choice = f"{path.name}.{row.algorithm.value}"
        problem = _missing(row.algorithm, case) or case.refused.get(choice, "")
        if not problem:
            usable.append(i)
        elif row.from_bytes <= size <= row.up_to_bytes:
            passed_over.append((choice, problem))
    chosen = next((i for i in usable if rows[i].from_bytes <= size <= rows[i].up_to_bytes), None)
    if chosen is None and not (case.by_name and usable):
        return "; ".join(dict(passed_over).values()) or f"no row of {where} serves {show_bytes(size)}"
    if chosen is None:
        chosen = max(usable, key=lambda i: rows[i].up_to_bytes)
        place = f"is in no row of {where} with a kernel, but the path was asked for by name"
    else:
        place = f"is in row {chosen + 1} of {where}"
    row = rows[chosen]
    blocks = entry.count_blocks(row.algorithm, sms=case.fabric.num_sms, ws=ws)
    return _Offer(
        choice=f"{path.name}.{row.algorithm.value}",
        reason=f"{show_bytes(size)} a rank {place}, {blocks} blocks; {links}",
        limit_bytes=min(entry.max_message_bytes, max(rows[i].up_to_bytes for i in usable)),
        workspace_bytes=_workspace_bytes(rows, mode, size, ws, blocks),
        standing=row.standing or table.standing,
        passed_over=tuple(passed_over),
    )


def _missing(algorithm: Algorithm, case: _Case) -> str:
    """What the algorithm needs and does not have: the group's capability first, then a kernel."""
    if algorithm is Algorithm.MULTICAST:
        multicast = decide_capability(case.fabric, Capability.MULTICAST)
        if not multicast.ok:
            return multicast.reason
    return "" if algorithm in case.kernels else f"no kernel for {algorithm.value} in this build"


def _workspace_bytes(rows: Sequence[Row], mode: Mode, size: int, ws: int, blocks: int) -> int:
    """Staging a rank for messages up to `size`. Calls alternate between two halves, so each slot exists twice.

    push, stream: a slot a peer.   two_shot_push: a share a peer on the way out and one on the way back.
    pull, two_shot_pull, multicast: one buffer the size of the message and a flag line of 128 bytes a block.
    Fused kernels keep 64 bytes of control words besides.
    """

    def largest(*algorithms: Algorithm) -> int:
        return max(
            (min(r.up_to_bytes, size) for r in rows if r.algorithm in algorithms and r.from_bytes <= size), default=0
        )

    pushed = largest(Algorithm.PUSH, Algorithm.STREAM)
    shared = largest(Algorithm.TWO_SHOT_PUSH)
    pulled = largest(Algorithm.PULL, Algorithm.TWO_SHOT_PULL, Algorithm.MULTICAST)
    buffer = pulled + 128 * blocks if pulled > max(pushed, shared) else 0
    control = 64 if mode is Mode.FUSED else 0
    return 2 * (ws - 1) * pushed + 4 * shared + buffer + control
