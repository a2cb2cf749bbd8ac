"""Pins that a sum still owed cannot be forgotten, doubled, or taken over the wrong group without an error.

Symptom upstream: garbage text, from a reduce that two layers each did, or that neither did (SGLang 20050, 32012).
"""

from __future__ import annotations

import pytest
import torch

from workbench.errors import PartialError
from workbench.ops import Partial, ReduceOver


def test_any_use_before_the_reduce_raises_and_names_the_kinds() -> None:
    x = Partial(torch.ones(2, 4), owed=ReduceOver("moe_ep", "moe_tp"))
    residual = torch.zeros(2, 4)
    uses = [
        lambda: x + residual,
        lambda: residual + x,
        lambda: x * 2,
        lambda: 2 * x,
        lambda: torch.add(residual, x),
        lambda: torch.nn.functional.rms_norm(x, (4,)),
        lambda: torch.relu(x),
        lambda: residual.add_(x),
    ]
    for use in uses:
        with pytest.raises(PartialError, match="moe_ep x moe_tp"):
            use()
    assert x.unreduced().sum() == 8


def test_a_second_reduce_raises() -> None:
    x = Partial(torch.ones(1), owed=ReduceOver("tp"))
    x.settle()
    with pytest.raises(PartialError, match="reduced over tp already; a second reduce would double it"):
        x.unreduced()


def test_what_is_owed_is_a_set_of_kinds() -> None:
    assert ReduceOver("moe_ep", "moe_tp") == ReduceOver("moe_tp", "moe_ep")
    assert ReduceOver("moe_ep") != ReduceOver("moe_tp")


@pytest.mark.parametrize("kinds", [(), ("",), ("tp", "tp"), (3,)])
def test_nonsense_is_refused(kinds: tuple) -> None:
    with pytest.raises(PartialError):
        ReduceOver(*kinds)
    with pytest.raises(PartialError):
        Partial([1.0], owed=ReduceOver("tp"))
