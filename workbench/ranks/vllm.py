"""vLLM's process groups: one grid, read in several axis orders.

    rank = (((ext_dp * dp + d) * pp + p) * pcp + c) * tp + t

`ext_dp` counts replicas outside vLLM; with `world` given it is whatever the other sizes leave. `dcp` adds no ranks: its
lists are consecutive cuts of the grid read with tp outside pcp, so a list longer than pcp is not ascending. `eplb`
repeats the lists of `ep` in groups of their own, so that expert rebalancing cannot block a forward pass. `etp` and
`edp` place the n-gram tables of an engram model: across TP, or TP and DP; and on the DP ranks that share a node.

With `elastic_ep` each engine (pp * pcp * tp ranks) is a torch world of its own: tp, dcp, pcp and pp count ranks from 0
in every engine, there is no world group, and dp, ep, eplb use wide ranks in coordinators that are not torch groups.
Source: behaviour of vLLM 0.33.0; pinned by tests/ranks.
"""

from __future__ import annotations

from math import gcd

from workbench.ranks.grid import Grid, RankLists, cut, describe_lists, describe_steps
from workbench.ranks.layout import DEVICE_AND_CPU, DEVICE_ONLY, Layout, Rules
from workbench.ranks.sizes import Form, Sizes, SizeSpec

SPECS = {
    "tp": SizeSpec(Form.WIDTH),
    "pp": SizeSpec(Form.WIDTH),
    "pcp": SizeSpec(Form.WIDTH),
    "dcp": SizeSpec(Form.LOOSE),
    "dp": SizeSpec(Form.WIDTH),
    "ext_dp": SizeSpec(Form.WIDTH),
    "moe": SizeSpec(Form.FLAG, False),
    "eplb": SizeSpec(Form.FLAG, False),
    "nodes": SizeSpec(Form.WIDTH),
    "engram": SizeSpec(Form.ENGRAM, None),
    "elastic_ep": SizeSpec(Form.FLAG, False),
    "world": SizeSpec(Form.OPTIONAL_WIDTH, None),
}


def fill_in(sizes: Sizes) -> Sizes:
    world = world_size(sizes)
    return {"world": world, "ext_dp": world // (engine_width(sizes) * sizes["dp"])}


def world_size(sizes: Sizes) -> int:
    return int(sizes["world"] or engine_width(sizes) * sizes["dp"] * sizes["ext_dp"])


def engine_width(sizes: Sizes) -> int:
    """Ranks of one engine: pp * pcp * tp."""
    return int(sizes["pp"] * sizes["pcp"] * sizes["tp"])


def find_problem(sizes: Sizes) -> str | None:
    """What vLLM refuses while it builds groups, whatever the launch checks said."""
    engine, world, dcp = engine_width(sizes), world_size(sizes), sizes["dcp"]
    replica = engine * sizes["dp"]
    if world % replica:
        return f"a world of {world} ranks is not a multiple of dp*pp*pcp*tp = {replica}; allowed: its multiples"
    if sizes["ext_dp"] not in (1, world // replica):
        return (
            f"a world of {world} ranks is not ext_dp*dp*pp*pcp*tp = {replica * sizes['ext_dp']}; "
            "allowed: leave world out, or ext_dp"
        )
    shared = engine if sizes["elastic_ep"] else world
    if dcp < 0 or (dcp > 1 and shared % dcp):
        return f"dcp={dcp} does not divide {shared} ranks; allowed: a divisor of tp, or pcp, or tp*pcp"
    if world % sizes["nodes"]:
        return f"{world} ranks cannot be split over nodes={sizes['nodes']} equal nodes; allowed: a divisor of {world}"
    if sizes["elastic_ep"]:
        if (world // sizes["nodes"]) % engine:
            node = world // sizes["nodes"]
            return f"elastic_ep with engines of {engine} ranks on nodes of {node}; allowed: whole engines in a node"
        if engram_spans_dp(sizes):
            return "elastic_ep with an engram table across dp; allowed: engram across_dp=False"
    return None


def find_launch_problem(sizes: Sizes) -> str | None:
    """What vLLM's checks on launch arguments refuse although its group builder would not."""
    tp, pcp, dcp = sizes["tp"], sizes["pcp"], sizes["dcp"]
    if dcp < 1:
        return f"dcp={dcp} is below 1; allowed: 1 (off) or more"
    if pcp == 1 and tp % dcp:
        return f"dcp={dcp} does not divide tp={tp}; allowed with pcp=1: a divisor of tp"
    if pcp > 1 and dcp not in (1, pcp, tp * pcp):
        return f"dcp={dcp} with pcp={pcp}, tp={tp}; allowed: {', '.join(map(str, sorted({1, pcp, tp * pcp})))}"
    if sizes["eplb"] and tp * pcp * sizes["dp"] == 1:
        return "eplb=True with tp*pcp*dp = 1; allowed: eplb only when experts are spread over several ranks"
    if sizes["elastic_ep"] and not sizes["eplb"]:
        return "elastic_ep=True with eplb=False; allowed: elastic_ep only with eplb=True"
    if sizes["elastic_ep"] and sizes["pp"] > 1:
        return f"elastic_ep=True with pp={sizes['pp']}; allowed: elastic_ep only with pp=1"
    return None


def engram_spans_dp(sizes: Sizes) -> bool:
    """True when the n-gram tables are sharded over TP and DP together."""
    return bool(sizes["engram"] and sizes["engram"]["across_dp"] and sizes["dp"] > 1)


def edp_width(sizes: Sizes) -> int:
    """How many DP ranks hold one n-gram table together; 1 means that there is no such group.

    Tables in host memory are shared inside a node: the largest count that divides both dp and the replicas of a node.
    A table kept in GPU memory and spread over DP alone (tp = 1) spans all of dp.
    """
    engram, dp = sizes["engram"], sizes["dp"]
    if engram is None or sizes["elastic_ep"]:
        return 1
    if engram["across_dp"] and not engram["cpu_offload"] and sizes["tp"] == 1:
        return int(dp)
    replicas_of_node, rest = divmod(world_size(sizes), sizes["nodes"] * engine_width(sizes))
    return 1 if rest else gcd(dp, replicas_of_node)


def lay_out(sizes: Sizes) -> Layout:
    elastic, dp = sizes["elastic_ep"], sizes["dp"]
    engine_axes = (("pp", sizes["pp"]), ("pcp", sizes["pcp"]), ("tp", sizes["tp"]))
    wide = Grid((("ext_dp", sizes["ext_dp"]), ("dp", dp), *engine_axes))
    near = Grid(engine_axes) if elastic else wide
    replicas = () if elastic else ("ext_dp", "dp")
    local_note = " (ranks counted inside one engine)" if elastic else ""
    wide_channels = DEVICE_ONLY if elastic else DEVICE_AND_CPU

    layout = Layout(grids=(wide,), local_numbering=("tp", "dcp", "pcp", "pp") if elastic else ())

    def create_near(kind: str, axis: str, outer: tuple[str, ...]) -> None:
        lists = near.lists((axis,), outer=(*replicas, *outer))
        layout.create(kind, lists, describe_lists(near, (axis,), lists) + local_note)

    def create_wide(kind: str, inner: tuple[str, ...], outer: tuple[str, ...]) -> None:
        lists = wide.lists(inner, outer=outer)
        layout.create(kind, lists, describe_lists(wide, inner, lists), wide_channels)

    if not elastic:
        layout.create("world", (wide.read(wide.names),), "all ranks")
    create_near("tp", "tp", ("pp", "pcp"))
    if engram_spans_dp(sizes):
        create_wide("etp", ("dp", "tp"), ("ext_dp", "pp", "pcp"))
    else:
        layout.alias("etp", "tp")

    edp = edp_width(sizes)
    if 1 < edp < dp:
        blocks = cut(wide.read(("ext_dp", "pp", "pcp", "tp", "dp")), edp)
        layout.create("edp", blocks, f"{edp} neighbours of one dp list that share a node; {describe_steps(blocks)}")
    elif edp == dp > 1:
        layout.alias("edp", "dp")

    blocks, dcp_origin = _dcp_lists(sizes["dcp"] or 1, near, replicas)
    layout.create("dcp", blocks, dcp_origin + local_note)
    create_near("pcp", "pcp", ("pp", "tp"))
    create_near("pp", "pp", ("tp", "pcp"))
    create_wide("dp", ("dp",), ("ext_dp", "tp", "pp", "pcp"))
    if sizes["moe"]:
        create_wide("ep", ("dp", "pcp", "tp"), ("ext_dp", "pp"))
    else:
        layout.absent.append("ep")
    if sizes["moe"] and sizes["eplb"]:
        layout.create(
            "eplb", layout.groups["ep"], f"a second set of the ep lists: {layout.origins['ep']}", wide_channels
        )
    else:
        layout.absent.append("eplb")
    if edp == 1:
        layout.absent.append("edp")
    return layout


def _dcp_lists(dcp: int, near: Grid, replicas: tuple[str, ...]) -> tuple[RankLists, str]:
    if dcp == 1:
        return cut(near.read(near.names), 1), "each rank alone: dcp is 1 wide"
    blocks = cut(near.read((*replicas, "pp", "tp", "pcp")), dcp)
    return blocks, f"{dcp} neighbours after reading the ranks pcp first, then tp; {describe_steps(blocks)}"


RULES = Rules("vllm", "0.33.0", SPECS, fill_in, find_problem, find_launch_problem, lay_out)
