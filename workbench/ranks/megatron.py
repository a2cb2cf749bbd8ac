"""Megatron-core's process groups: one grid for dense layers and one for experts, both counted up in one axis order.

`order` names the axes fastest first; axes of size 1 may be left out, and none may come twice. The dense grid has tp,
cp, dp, pp; the expert grid has etp, ep, edp, pp in the places of tp, ep, dp, pp. dp and edp are what the world leaves.
A kind is one choice of axes that move; its lists count up in the same order. Pipelines must be equal in both grids.

`dp_cp`, `dp` and `ep_dp` also get a gloo group for each list. `embd` and `pos_embd` hold first and last, or only first,
stages, so they do not cover the world. `optimizer_instances` cuts dp_cp and ep_dp lists into equal parts.
Source: behaviour of Megatron-core 0.16.1; pinned by tests/ranks.
"""

from __future__ import annotations

from math import lcm, prod

from workbench.ranks.grid import Grid, RankLists, cut, describe_lists, describe_steps
from workbench.ranks.layout import DEVICE_AND_CPU, DEVICE_ONLY, Layout, Part, Rules
from workbench.ranks.sizes import Form, Sizes, SizeSpec

SPECS = {
    "world": SizeSpec(Form.OPTIONAL_WIDTH, None),
    "tp": SizeSpec(Form.WIDTH),
    "cp": SizeSpec(Form.WIDTH),
    "pp": SizeSpec(Form.WIDTH),
    "ep": SizeSpec(Form.WIDTH),
    "etp": SizeSpec(Form.OPTIONAL_WIDTH, None),
    "order": SizeSpec(Form.TEXT, "tp-cp-ep-dp-pp"),
    "optimizer_instances": SizeSpec(Form.WIDTH),
    "hybrid_cp": SizeSpec(Form.FLAG, False),
    "hierarchical_cp": SizeSpec(Form.WIDTHS, None),
    "all_gather_group": SizeSpec(Form.FLAG, False),
    "vpp": SizeSpec(Form.OPTIONAL_WIDTH, None),
}

AXES = ("tp", "cp", "ep", "dp", "pp")


def fill_in(sizes: Sizes) -> Sizes:
    return {"world": world_size(sizes)}


def world_size(sizes: Sizes) -> int:
    return int(sizes["world"] or dense_width(sizes))


def dense_width(sizes: Sizes) -> int:
    """Ranks of one model replica: tp * cp * pp."""
    return int(sizes["tp"] * sizes["cp"] * sizes["pp"])


def expert_width(sizes: Sizes) -> int:
    """Ranks of one set of experts: etp * ep * pp."""
    return int((sizes["etp"] or sizes["tp"]) * sizes["ep"] * sizes["pp"])


def find_problem(sizes: Sizes) -> str | None:
    """What Megatron-core refuses; it has no launch checks apart from these."""
    world, dense, expert = world_size(sizes), dense_width(sizes), expert_width(sizes)
    pp, cp, instances = sizes["pp"], sizes["cp"], sizes["optimizer_instances"]
    both = lcm(dense, expert)
    if world % dense:
        return f"world={world} is not a multiple of tp*cp*pp = {dense}; allowed: multiples of {both}"
    if sizes["vpp"] is not None and pp == 1:
        return f"vpp={sizes['vpp']} with pp=1; allowed: virtual stages only with pp > 1"
    problem = _find_order_problem(sizes, world // dense)
    if problem is not None:
        return problem
    if world % expert:
        return f"world={world} is not a multiple of etp*ep*pp = {expert}; allowed: multiples of {both}"
    dp, edp = world // dense, world // expert
    problem = _find_order_problem({**sizes, "cp": 1}, edp)
    if problem is not None:
        return problem
    if pp > 1 and dp != edp and not sizes["order"].endswith("pp"):
        return (
            f"order {sizes['order']!r} does not end in pp, and dp={dp} differs from the experts' dp={edp}; "
            "allowed: pp last, or tp*cp = etp*ep"
        )
    if pp > 1 and _stride_of_pp(dense_grid(sizes)) != _stride_of_pp(expert_grid(sizes)):
        return f"order {sizes['order']!r} gives dense and expert layers different pipelines; allowed: pp last"
    if dp * cp % instances or edp % instances:
        return (
            f"optimizer_instances={instances} does not divide dp*cp = {dp * cp} and the experts' dp = {edp}; "
            "allowed: a divisor of both"
        )
    if sizes["hybrid_cp"] and dp * cp % 2:
        return f"hybrid_cp with dp*cp = {dp * cp}; allowed: an even dp*cp"
    levels = sizes["hierarchical_cp"]
    if levels is not None and prod(levels) != cp:
        return f"hierarchical_cp={list(levels)} multiplies to {prod(levels)}, not to cp={cp}; allowed: factors of cp"
    return None


def find_launch_problem(sizes: Sizes) -> str | None:  # noqa: ARG001  the shape every system shares
    return None


def dense_grid(sizes: Sizes) -> Grid:
    names = {"tp": "tp", "cp": "cp", "dp": "dp", "pp": "pp"}
    widths = {**sizes, "dp": world_size(sizes) // dense_width(sizes)}
    return _grid(sizes["order"], names, widths)


def expert_grid(sizes: Sizes) -> Grid:
    names = {"tp": "etp", "ep": "ep", "dp": "edp", "pp": "pp"}
    widths = {**sizes, "etp": sizes["etp"] or sizes["tp"], "edp": world_size(sizes) // expert_width(sizes)}
    return _grid(sizes["order"], names, widths)


def lay_out(sizes: Sizes) -> Layout:
    dense, expert = dense_grid(sizes), expert_grid(sizes)
    layout = Layout(grids=(dense, expert))

    def own(kind: str, grid: Grid, *axes: str) -> None:
        inner = tuple(name for name in grid.names if name in axes)
        lists = grid.lists(inner)
        layout.own(kind, lists, describe_lists(grid, inner, lists))

    def create(kind: str, grid: Grid, *axes: str) -> None:
        own(kind, grid, *axes)
        layout.loops.append((Part(kind, DEVICE_ONLY),))

    own("dp_cp", dense, "dp", "cp")
    _create_dp_cp(layout, sizes)
    if sizes["hybrid_cp"]:
        _create_hybrid(layout)
    own("dp", dense, "dp")
    layout.loops.append((Part("dp", DEVICE_AND_CPU),))
    own("cp", dense, "cp")
    _create_cp(layout, sizes["hierarchical_cp"] or ())
    create("mp", dense, "tp", "pp")
    create("tp", dense, "tp")
    own("pp", dense, "pp")
    _create_pp(layout)
    create("tp_dp_cp", dense, "tp", "dp", "cp")
    create("tp_dp", dense, "tp", "dp")
    create("tp_cp", dense, "tp", "cp")
    create("ep", expert, "ep")
    create("ep_tp", expert, "etp")
    create("tp_ep", expert, "etp", "ep")
    create("tp_ep_pp", expert, "etp", "ep", "pp")
    own("ep_dp", expert, "edp")
    _create_ep_dp(layout, sizes["optimizer_instances"])
    _create_intra_dist_opt(layout, sizes["optimizer_instances"])
    return layout


def _find_order_problem(sizes: Sizes, dp: int) -> str | None:
    """Every axis wider than 1 must be named, once, and nothing else may be."""
    order = sizes["order"]
    tokens = order.lower().split("-")
    if len(set(tokens)) != len(tokens) or not set(tokens) <= set(AXES):
        return f"order {order!r} is not a dash-joined choice of {', '.join(AXES)}; allowed: each of them at most once"
    missing = [name for name in AXES if name not in tokens and {**sizes, "dp": dp}[name] != 1]
    if missing:
        width = {**sizes, "dp": dp}[missing[0]]
        return (
            f"order {order!r} has no {missing[0]} although its size is {width}; allowed: name every axis wider than 1"
        )
    return None


def _grid(order: str, names: dict[str, str], widths: Sizes) -> Grid:
    tokens = order.lower().split("-")
    fastest_first = [token for token in tokens if token in names] + [name for name in names if name not in tokens]
    return Grid(tuple((names[token], widths[names[token]]) for token in reversed(fastest_first)))


def _stride_of_pp(grid: Grid) -> int:
    return prod(size for _, size in grid.axes[grid.names.index("pp") + 1 :])


def _create_dp_cp(layout: Layout, sizes: Sizes) -> None:
    """Each dp_cp list, at once its twin for all-gather, then its gloo group, then its share for each optimiser."""
    lists, instances = layout.groups["dp_cp"], sizes["optimizer_instances"]
    parts = [Part("dp_cp", DEVICE_ONLY)]
    if sizes["all_gather_group"]:
        layout.own("dp_cp_ag", lists, f"a second set of the dp_cp lists: {layout.origins['dp_cp']}")
        parts.append(Part("dp_cp_ag", DEVICE_ONLY))
    else:
        layout.absent.append("dp_cp_ag")
    parts.append(Part("dp_cp", ("cpu",)))
    if instances > 1:
        shares = _cut_each(lists, len(lists[0]) // instances)
        layout.own("intra_dp_cp", shares, _neighbours("dp_cp", shares))
        parts.append(Part("intra_dp_cp", DEVICE_AND_CPU, instances))
    else:
        layout.alias("intra_dp_cp", "dp_cp")
    layout.loops.append(tuple(parts))


def _create_hybrid(layout: Layout) -> None:
    """Blocks of 2, 4, 8 ... ranks, below the largest power of two that fits a dp_cp list."""
    lists = layout.groups["dp_cp"]
    width = len(lists[0])
    parts = []
    for size in (2**power for power in range(1, width.bit_length() - 1)):
        kind = f"hybrid_dp_cp_{size}"
        blocks = _cut_each(lists, size)
        layout.own(kind, blocks, _neighbours("dp_cp", blocks))
        parts.append(Part(kind, DEVICE_ONLY, len(blocks) // len(lists)))
    if parts:
        layout.loops.append(tuple(parts))


def _create_cp(layout: Layout, levels: tuple[int, ...]) -> None:
    lists = layout.groups["cp"]
    parts = [Part("cp", DEVICE_ONLY)]
    for level in range(len(levels)):
        kind = f"hcp_level{level}"
        split = _split_level(lists, levels, level)
        layout.own(kind, split, f"level {level} of each cp list seen as {' * '.join(map(str, levels))}, fastest first")
        parts.append(Part(kind, DEVICE_ONLY, len(split) // len(lists)))
    layout.loops.append(tuple(parts))


def _create_pp(layout: Layout) -> None:
    pipelines = layout.groups["pp"]
    embd = tuple(ranks if len(ranks) == 1 else (ranks[0], ranks[-1]) for ranks in pipelines)
    layout.own("embd", embd, "first and last rank of each pp list")
    layout.own("pos_embd", tuple(ranks[:1] for ranks in pipelines), "first rank of each pp list")
    layout.loops.append(tuple(Part(kind, DEVICE_ONLY) for kind in ("pp", "embd", "pos_embd")))


def _create_ep_dp(layout: Layout, instances: int) -> None:
    """Each ep_dp list, then the lists inside one optimiser's share of it, then the lists across the shares."""
    lists = layout.groups["ep_dp"]
    if instances == 1:
        layout.alias("intra_ep_dp", "ep_dp")
        layout.absent.append("inter_ep_dp")
        layout.loops.append((Part("ep_dp", DEVICE_AND_CPU),))
        return
    levels = (len(lists[0]) // instances, instances)
    intra, inter = _split_level(lists, levels, 0), _split_level(lists, levels, 1)
    layout.own("intra_ep_dp", intra, _neighbours("ep_dp", intra))
    layout.own("inter_ep_dp", inter, f"one rank of each of the {instances} shares of one ep_dp list")
    layout.loops.append(
        (
            Part("ep_dp", DEVICE_AND_CPU),
            Part("intra_ep_dp", DEVICE_AND_CPU, len(intra) // len(lists)),
            Part("inter_ep_dp", DEVICE_AND_CPU, len(inter) // len(lists)),
        )
    )


def _create_intra_dist_opt(layout: Layout, instances: int) -> None:
    """All ranks of one optimiser's share: its tp_ep_pp lists one after another, which is rarely ascending."""
    blocks = layout.groups["tp_ep_pp"]
    share = len(blocks) // instances
    lists = tuple(
        tuple(rank for block in blocks[start : start + share] for rank in block)
        for start in range(0, len(blocks), share)
    )
    layout.create("intra_dist_opt", lists, f"{share} tp_ep_pp lists one after another", DEVICE_ONLY)


def _cut_each(lists: RankLists, length: int) -> RankLists:
    return tuple(piece for ranks in lists for piece in cut(ranks, length))


def _split_level(lists: RankLists, levels: tuple[int, ...], level: int) -> RankLists:
    """The lists of one level when each list is seen as a grid of `levels`, the first of them fastest."""
    places = Grid(tuple((str(number), levels[number]) for number in reversed(range(len(levels))))).lists((str(level),))
    return tuple(tuple(ranks[place] for place in row) for ranks in lists for row in places)


def _neighbours(kind: str, lists: RankLists) -> str:
    if len(lists[0]) == 1:
        return f"each rank of a {kind} list alone"
    at_most = "" if len(lists[-1]) == len(lists[0]) else "at most "
    return f"{at_most}{len(lists[0])} neighbours of one {kind} list; {describe_steps(lists)}"


RULES = Rules("megatron", "0.16.1", SPECS, fill_in, find_problem, find_launch_problem, lay_out)
