"""flashinfer-ai/flashinfer#1986.

Symptom: 8192 tokens of hidden 8192 on four ranks end in an illegal access or a hang. Cause: one-shot or two-shot was
chosen by the number of tokens alone, over a range that nobody had tried. Shown on plans, and small on real ranks.
"""

from __future__ import annotations

from tests.bugs.worlds import fused, only, open_session
from tests.forked import run_ranks
from workbench.fabric import Fabric, simulated
from workbench.plan import Ask, decide_path, shipped_tables
from workbench.ranks import GroupKey, GroupMap

TOKENS = (1, 128, 2048, 8192)
HIDDENS = (1024, 8192)


def test_old_by_tokens_alone_a_message_eight_times_the_buffer_is_one_shot() -> None:
    buffer_bytes = 128 * 1024 * 2  # what 128 tokens of hidden 1024 in bf16 take

    def choose(tokens: int) -> str:
        return "one_shot" if tokens <= 128 else "two_shot"

    message_bytes = 128 * 8192 * 2
    assert choose(128) == "one_shot"
    assert message_bytes == 8 * buffer_bytes


def test_every_point_fits_by_bytes_or_falls_back_with_the_reason() -> None:
    machine = simulated("h100x8")
    fabric = Fabric(GroupKey("tp", (0, 1, 2, 3)), tuple(machine.facts_of(r) for r in range(4)))
    choices = {}
    for hidden in HIDDENS:
        for tokens in TOKENS:
            plan = decide_path(fabric, Ask(hidden=hidden, tokens=tokens, rounding="twice"))
            choices[tokens, hidden] = plan.choice
            if plan.choice.startswith("custom"):
                assert tokens * hidden * 2 <= shipped_tables()["sm90"].max_message_bytes
            else:
                assert "is above" in dict(plan.rejected)["custom.fused"]
    assert choices == {
        (1, 1024): "custom.fused.push",
        (128, 1024): "custom.fused.two_shot_push",
        (2048, 1024): "custom.fused.two_shot_push",
        (8192, 1024): "custom.fused.two_shot_push",
        (1, 8192): "custom.fused.push",
        (128, 8192): "custom.fused.two_shot_push",
        (2048, 8192): "nccl",
        (8192, 8192): "nccl",
    }


def test_on_real_ranks_every_number_of_tokens_is_right_below_and_above_the_capacity() -> None:
    def body(rank: int) -> list[float]:
        with open_session(GroupMap.custom({"tp": [[0, 1, 2, 3]]}), "tp", max_tokens=128) as s:
            s.freeze()
            return [only(fused(s, "tp", tokens=t).residual) for t in TOKENS]

    assert run_ranks(4, body) == [[1116.0] * 4] * 4
