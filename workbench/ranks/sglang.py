"""SGLang's process groups: pipeline stages of `tp` ranks, cut once for attention and once more for MoE.

    attention  rank = ((pp * attn_dp + a_dp) * attn_cp + a_cp) * attn_tp + a_tp     attn_tp = tp / (attn_dp * attn_cp)
    MoE        rank = ((pp * moe_dp  + m_dp) * moe_ep  + m_ep) * moe_tp  + m_tp     moe_tp  = tp / (moe_ep * moe_dp)

A kind as wide as the TP group is the TP group itself. MoE-DP is the attention-CP group whenever attention CP is wider,
because those ranks must share their tokens before the experts. There is no attention-DP group.
Source: behaviour of SGLang 0.5.23 (attention order dp, cp, tp; older releases differed); pinned by tests/ranks.
"""

from __future__ import annotations

from workbench.ranks.grid import Grid, cut, describe_lists, describe_steps
from workbench.ranks.layout import Layout, Rules
from workbench.ranks.sizes import Form, Sizes, SizeSpec

SPECS = {
    "tp": SizeSpec(Form.WIDTH),
    "pp": SizeSpec(Form.WIDTH),
    "attn_dp": SizeSpec(Form.WIDTH),
    "attn_cp": SizeSpec(Form.WIDTH),
    "moe_ep": SizeSpec(Form.WIDTH),
    "moe_dp": SizeSpec(Form.WIDTH),
    "dcp": SizeSpec(Form.LOOSE),
    "shared_experts_tp": SizeSpec(Form.OPTIONAL_LOOSE, None),
    "pdmux": SizeSpec(Form.FLAG, False),
    "world": SizeSpec(Form.OPTIONAL_WIDTH, None),
}


def fill_in(sizes: Sizes) -> Sizes:
    return {"world": sizes["tp"] * sizes["pp"]}


def find_problem(sizes: Sizes) -> str | None:
    """What SGLang refuses before or while it builds groups, whatever the launch checks said."""
    tp, dcp, shared = sizes["tp"], sizes["dcp"], sizes["shared_experts_tp"]
    world = sizes["tp"] * sizes["pp"]
    if sizes["world"] not in (None, world):
        return f"a world of {sizes['world']} ranks is not tp*pp = {world}; allowed: world = tp*pp"
    if tp % (sizes["attn_dp"] * sizes["attn_cp"]):
        return (
            f"tp={tp} cannot be cut into attn_dp={sizes['attn_dp']} * attn_cp={sizes['attn_cp']} attention groups; "
            "allowed: attn_dp*attn_cp divides tp"
        )
    if tp % (sizes["moe_ep"] * sizes["moe_dp"]):
        return (
            f"tp={tp} cannot be cut into moe_ep={sizes['moe_ep']} * moe_dp={sizes['moe_dp']} expert groups; "
            "allowed: moe_ep*moe_dp divides tp"
        )
    if dcp > 1 and tp % dcp:
        return f"dcp={dcp} does not divide tp={tp}; allowed: dcp divides tp"
    if shared is not None and shared > 1 and shared != attn_tp_width(sizes) and world % shared:
        return (
            f"blocks of shared_experts_tp={shared} reach past the last of {world} ranks; "
            "allowed: shared_experts_tp divides the attention TP width"
        )
    return None


def find_launch_problem(sizes: Sizes) -> str | None:
    """What SGLang's checks on launch arguments refuse although its group builder would not."""
    tp, ep, moe_dp = sizes["tp"], sizes["moe_ep"], sizes["moe_dp"]
    dcp, shared, attn_tp = sizes["dcp"], sizes["shared_experts_tp"], attn_tp_width(sizes)
    if dcp < 1:
        return f"dcp={dcp} is below 1; allowed: 1 (off) or a divisor of tp={tp}"
    if moe_dp > 1 and sizes["pp"] > 1:
        return f"moe_dp={moe_dp} with pp={sizes['pp']}; allowed: moe_dp > 1 only with pp=1"
    if moe_dp > 1 and ep > 1 and ep * moe_dp != tp:
        return f"moe_ep={ep} * moe_dp={moe_dp} is not tp={tp}; allowed: moe_ep*moe_dp = tp when both exceed 1"
    if moe_dp not in (1, sizes["attn_cp"]):
        return f"moe_dp={moe_dp} with attn_cp={sizes['attn_cp']}; allowed: moe_dp is 1 or equals attn_cp"
    if shared is not None and (shared < 1 or attn_tp % shared):
        return (
            f"shared_experts_tp={shared} does not divide the attention TP width {attn_tp}; "
            f"allowed: None or a divisor of {attn_tp}"
        )
    return None


def attn_tp_width(sizes: Sizes) -> int:
    return int(sizes["tp"] // (sizes["attn_dp"] * sizes["attn_cp"]))


def lay_out(sizes: Sizes) -> Layout:
    tp, pp, attn_cp, moe_ep, moe_dp = (sizes[name] for name in ("tp", "pp", "attn_cp", "moe_ep", "moe_dp"))
    attn_tp, moe_tp = attn_tp_width(sizes), tp // (moe_ep * moe_dp)
    stages = Grid((("pp", pp), ("tp", tp)))
    attention = Grid((("pp", pp), ("attn_dp", sizes["attn_dp"]), ("attn_cp", attn_cp), ("attn_tp", attn_tp)))
    experts = Grid((("pp", pp), ("moe_dp", moe_dp), ("moe_ep", moe_ep), ("moe_tp", moe_tp)))
    every_rank = stages.read(("pp", "tp"))

    layout = Layout(grids=(stages, attention, experts))

    def create(kind: str, grid: Grid, axis: str) -> None:
        lists = grid.lists((axis,))
        layout.create(kind, lists, describe_lists(grid, (axis,), lists))

    def create_unless_tp(kind: str, width: int, grid: Grid, axis: str) -> None:
        if width == tp:
            layout.alias(kind, "tp")
        else:
            create(kind, grid, axis)

    layout.create("world", (every_rank,), "all ranks")
    create("tp", stages, "tp")
    if sizes["pdmux"]:
        layout.create("pdmux_prefill_tp", layout.groups["tp"], f"a second set of the tp lists: {layout.origins['tp']}")
    else:
        layout.absent.append("pdmux_prefill_tp")
    if sizes["dcp"] > 1:
        blocks = cut(every_rank, sizes["dcp"])
        layout.create("dcp", blocks, f"{sizes['dcp']} neighbours of one tp list; {describe_steps(blocks)}")
    else:
        layout.absent.append("dcp")
    create_unless_tp("attn_cp", attn_cp, attention, "attn_cp")
    create_unless_tp("attention_tp", attn_tp, attention, "attn_tp")

    shared = sizes["shared_experts_tp"]
    if shared is None or shared <= 1:
        layout.absent.append("shared_experts_tp")
    elif shared == attn_tp:
        layout.alias("shared_experts_tp", "attention_tp")
    else:
        blocks = cut(every_rank, shared)
        layout.create("shared_experts_tp", blocks, f"{shared} neighbours of the world; {describe_steps(blocks)}")

    if attn_cp > moe_dp:
        layout.alias("moe_dp", "attn_cp")
    else:
        create_unless_tp("moe_dp", moe_dp, experts, "moe_dp")
    create_unless_tp("moe_ep", moe_ep, experts, "moe_ep")
    create_unless_tp("moe_tp", moe_tp, experts, "moe_tp")
    create("pp", stages, "pp")
    layout.create("self_pp", cut(every_rank, 1), "each rank alone, for a draft model of one stage")
    return layout


RULES = Rules("sglang", "0.5.23", SPECS, fill_in, find_problem, find_launch_problem, lay_out)
