"""Pins block counts written as arithmetic, and that nothing else is understood."""

from __future__ import annotations

import pytest

from workbench.errors import ArgumentError
from workbench.plan.blocks import count_blocks


@pytest.mark.parametrize(
    ("expression", "blocks"),
    [("64", 64), ("sms", 132), ("128 // ws", 16), ("sms - 2 * (ws + 1)", 114), (" 96 ", 96), ("ws*ws//3+1", 22)],
)
def test_expressions_of_sms_and_ws(expression: str, blocks: int) -> None:
    assert count_blocks(expression, sms=132, ws=8) == blocks


@pytest.mark.parametrize(
    "expression",
    [
        "", "sm", "sms ** 2", "sms / 2", "-1", "1.5", "True", "'9'", "ws if ws else 1", "[ws]", "ws.real", "(ws:=3)",
        "__import__('os')", "sms(1)", "lambda: 1", "ws\0", "(" * 40, "9" * 65, "1;2", "f'{ws}'", "ws and sms",
        "999999999",
    ],
)  # fmt: skip
def test_anything_else_is_refused_in_one_line(expression: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        count_blocks(expression, sms=132, ws=8)
    assert "allowed: whole numbers, sms, ws, + - * // and parentheses" in str(refused.value)


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        ("ws - 8", "is 0 for sms=132, ws=8; allowed: 1 to 4096"),
        ("4097", "is 4097"),
        ("sms * sms", "is 17424"),
        ("1 // (ws - 8)", "divides by zero"),
    ],
)
def test_a_count_that_no_kernel_can_have_is_refused(expression: str, told: str) -> None:
    with pytest.raises(ArgumentError, match="block count") as refused:
        count_blocks(expression, sms=132, ws=8)
    assert told in str(refused.value)
