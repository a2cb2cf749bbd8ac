"""decide_path: the path one group takes for one message, from gathered facts, settings and tables. Pure.

Capability first, and nothing before it: no list of widths, no count of nodes, no opt-in decides about a group whose
links were never looked at. Such a policy upstream once kept sixteen ranks of one NVLink clique off the fast path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from workbench.errors import ArgumentError
from workbench.fabric import Capability, Fabric, decide_capability
from workbench.plan.plan import Plan, Standing, find_switch
from workbench.plan.tables import Algorithm, Entry, Mode, Row, Table, path_order, shipped_tables, show_bytes
from workbench.settings import Settings

DTYPE_BYTES: Mapping[str, int] = MappingProxyType({"bfloat16": 2, "float16": 2, "float32": 4})
VECTOR_BYTES = 16
MAX_HIDDEN = 1 << 20
MAX_TOKENS = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a group is to be prepared for. Raises ArgumentError for sizes outside their bounds; 0 tokens are legal.

    fused: all-reduce + add + RMSNorm is wanted, not the all-reduce alone.   captured: inside a CUDA graph.
    symmetric_memory: the caller offers NCCL's symmetric memory as a path.
    """

    hidden: int
    tokens: int
    dtype: str = "bfloat16"
    fused: bool = True
    captured: bool = True
    symmetric_memory: bool = False

    def __post_init__(self) -> None:
        for name, low, high in (("hidden", 1, MAX_HIDDEN), ("tokens", 0, MAX_TOKENS)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ArgumentError(f"{name}={value!r}; allowed: whole numbers from {low} to {high}")
        if self.dtype not in DTYPE_BYTES:
            raise ArgumentError(f"dtype={self.dtype!r}; allowed: {', '.join(DTYPE_BYTES)}")

    @property
    def row_bytes(self) -> int:
        return self.hidden * DTYPE_BYTES[self.dtype]

    @property
    def message_bytes(self) -> int:
        """Bytes that each rank brings: tokens x hidden x size of an element."""
        return self.tokens * self.row_bytes


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
    order: Sequence[str] | None = None,
) -> Plan:
    """The first path of `order` that takes the message, and why each one before it does not.

    Equal facts, ask, settings and tables give the same plan on every member; `fingerprint(plan.to_json())` is what
    members compare. `tables` maps architectures to tables and defaults to the shipped ones, `order` to the shipped
    order of the group's device. A group that no path can serve gets choice "none" with standing UNSUPPORTED.
    workspace_bytes is what the choice's staging takes a rank; paths of a library, and CPU paths, count their own.
    """
    settings = Settings() if settings is None else settings
    tables = shipped_tables() if tables is None else tables
    if fabric.key.size == 1:
        return _plan(fabric, ask, _Offer(choice="alone", reason="one rank owes nothing to others"), (), "")
    if order is None:
        order = path_order()["cuda" if any(f.device for f in fabric.facts) else "cpu"]
    asked_for = {"custom.fused": ask.fused, "symm_mem": ask.symmetric_memory}
    paths = [path for path in order if asked_for.get(path, True)]
    rejected: list[tuple[str, str]] = []
    for i, path in enumerate(paths):
        offer = _offer(path, fabric, ask, settings, tables)
        if isinstance(offer, _Offer):
            fallback = _fallback(paths[i + 1 :], offer, fabric, ask, settings, tables)
            return _plan(fabric, ask, offer, (*rejected, *offer.passed_over), fallback)
        rejected.append((path, offer))
    none = _Offer(choice="none", reason="no path can serve this group", standing=Standing.UNSUPPORTED)
    return _plan(fabric, ask, none, tuple(rejected), "")


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


def _fallback(
    paths: Sequence[str], offer: _Offer, fabric: Fabric, ask: Ask, settings: Settings, tables: Mapping[str, Table]
) -> str:
    """Which path takes the first message that is too large for the choice, and over which group."""
    if offer.limit_bytes is None:
        return ""
    larger = replace(ask, tokens=offer.limit_bytes // ask.row_bytes + 1)
    for path in paths:
        if isinstance(_offer(path, fabric, larger, settings, tables), _Offer):
            return f"{path} over {fabric.key} above {show_bytes(offer.limit_bytes)}"
    return ""


def _offer(path: str, fabric: Fabric, ask: Ask, settings: Settings, tables: Mapping[str, Table]) -> _Offer | str:
    """An offer, or the reason why this path does not take the message."""
    if path in ("custom.fused", "custom"):
        return _custom(fabric, ask, settings, tables, fused=path == "custom.fused")
    if path == "symm_mem":
        staged = decide_capability(fabric, Capability.STAGED)  # windows need the very links that staging needs
        return _Offer(choice="symm_mem", reason=staged.reason) if staged.ok else staged.reason
    if path == "nccl":
        problem = "" if fabric.devices.ok else fabric.devices.reason
        return problem or _Offer(choice="nccl", reason="takes any size over any links")
    if path == "shm":
        far = "" if fabric.same_host.ok else f"{fabric.same_host.reason}; shared memory ends at the host"
        return find_switch("shm", settings) or far or _Offer(choice="shm", reason=fabric.same_host.reason)
    if path == "gloo":
        return _Offer(choice="gloo", reason="takes any size over any links")
    raise ArgumentError(f"no path is called {path!r}; known: custom.fused, custom, symm_mem, nccl, shm, gloo")


def _custom(fabric: Fabric, ask: Ask, settings: Settings, tables: Mapping[str, Table], *, fused: bool) -> _Offer | str:
    """Our own kernels: switched on, a row for the architecture and width, members that can reach each other, size."""
    switch = find_switch("custom.fused" if fused else "custom", settings)
    if switch:
        return switch
    found = _find_entry(fabric, tables)
    staged = decide_capability(fabric, Capability.STAGED)
    problems = [text for text in (found if isinstance(found, str) else "", "" if staged.ok else staged.reason) if text]
    if isinstance(found, str) or problems:
        return "; ".join(problems)
    if ask.row_bytes % VECTOR_BYTES:
        return f"rows of {ask.row_bytes} bytes; allowed: multiples of {VECTOR_BYTES}"
    table, entry = found
    mode = Mode.FUSED if fused else Mode.GRAPH if ask.captured else Mode.EAGER
    return _size_up(fabric, ask, table, entry, mode, staged.reason)


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


def _size_up(fabric: Fabric, ask: Ask, table: Table, entry: Entry, mode: Mode, links: str) -> _Offer | str:
    """The row that serves the message. Rows that need multicast are passed over, with the reason, without it."""
    ws, size, rows = fabric.key.size, ask.message_bytes, entry.rows[mode]
    where = f"{table.name}/ws{ws} {mode.value}"
    if not rows:
        return f"{where} has no rows"
    limit = min(entry.max_message_bytes, max(row.up_to_bytes for row in rows))
    if size > limit:
        return f"{show_bytes(size)} is above the {show_bytes(limit)} at which {where} ends"
    passed_over: tuple[tuple[str, str], ...] = ()
    path = "custom.fused" if mode is Mode.FUSED else "custom"
    for i, row in enumerate(rows):
        if not row.from_bytes <= size <= row.up_to_bytes:
            continue
        if row.algorithm is Algorithm.MULTICAST:
            multicast = decide_capability(fabric, Capability.MULTICAST)
            if not multicast.ok:
                passed_over = (*passed_over, (f"{path}.multicast", multicast.reason))
                continue
        blocks = entry.count_blocks(row.algorithm, sms=fabric.num_sms, ws=ws)
        return _Offer(
            choice=f"{path}.{row.algorithm.value}",
            reason=f"{show_bytes(size)} a rank is in row {i + 1} of {where}, {blocks} blocks; {links}",
            limit_bytes=limit,
            workspace_bytes=_workspace_bytes(rows, mode, size, ws, blocks),
            standing=row.standing or table.standing,
            passed_over=passed_over,
        )
    return f"no row of {where} serves {show_bytes(size)}"


def _workspace_bytes(rows: Sequence[Row], mode: Mode, size: int, ws: int, blocks: int) -> int:
    """Staging a rank for messages up to `size`. Calls alternate between two halves, so each slot exists twice.

    push, stream: a slot a peer.   two_shot_push: a share a peer on the way out and one on the way back.
    pull, two_shot_pull, multicast: one buffer the size of the message and a flag line of 128 bytes a block.
    Fused kernels push only, and keep 64 bytes of control words.
    """

    def largest(*algorithms: Algorithm) -> int:
        return max(
            (min(r.up_to_bytes, size) for r in rows if r.algorithm in algorithms and r.from_bytes <= size), default=0
        )

    pushed = largest(Algorithm.PUSH, Algorithm.STREAM)
    if mode is Mode.FUSED:
        return 2 * (ws - 1) * pushed + 64
    shared = largest(Algorithm.TWO_SHOT_PUSH)
    pulled = largest(Algorithm.PULL, Algorithm.TWO_SHOT_PULL, Algorithm.MULTICAST)
    buffer = pulled + 128 * blocks if pulled > max(pushed, shared) else 0
    return 2 * (ws - 1) * pushed + 4 * shared + buffer
