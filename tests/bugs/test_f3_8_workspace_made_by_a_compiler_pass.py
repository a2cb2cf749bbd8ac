"""vllm-project/vllm#37461.

Symptom: the second start of a server crashes since the workspace of the fused op does not exist. Cause: a compiler pass
created it, and a start that finds the compiled artefact in its cache runs no pass.
"""

from __future__ import annotations

import pytest
import torch

from tests.bugs.worlds import HIDDEN, fused, only, open_session
from tests.forked import run_ranks
from workbench.errors import ArgumentError
from workbench.ranks import GroupMap

PAIR = GroupMap.custom({"tp": [[0, 1]]})


def test_old_a_start_from_the_cache_finds_no_workspace() -> None:
    workspaces: dict[str, str] = {}

    def compile_with_pass(cache: dict[str, str]) -> None:
        if "model" not in cache:
            workspaces["tp"] = "made by the pass"
            cache["model"] = "artefact"

    cache: dict[str, str] = {}
    compile_with_pass(cache)
    assert workspaces == {"tp": "made by the pass"}
    workspaces.clear()  # a new process, with the cache of the old one on disk
    compile_with_pass(cache)
    with pytest.raises(KeyError):
        workspaces["tp"]


def test_an_op_without_workspace_says_what_to_call_and_nobody_hangs() -> None:
    def body(rank: int) -> tuple[str, float]:
        with open_session(PAIR) as s:
            with pytest.raises(ArgumentError) as e:
                fused(s, "tp")
            s.prepare("tp", hidden=HIDDEN, dtype=torch.float32, max_tokens=4)
            return str(e.value), only(fused(s, "tp").residual)

    text = (
        "tp[0,1]: float32 hidden 8 is not prepared (prepared: nothing); call prepare('tp', hidden=8, "
        "dtype=torch.float32, max_tokens=...) on every member first"
    )
    assert run_ranks(2, body) == [(text, 16.0)] * 2


def test_preparing_is_idempotent_so_that_both_the_pass_and_the_start_may_do_it() -> None:
    def body(rank: int) -> tuple[bool, float]:
        with open_session(PAIR, "tp") as s:
            first = s.why("tp")
            second = s.prepare("tp", hidden=HIDDEN, dtype=torch.float32, max_tokens=4)
            return first is second, only(fused(s, "tp").residual)

    assert run_ranks(2, body) == [(True, 16.0)] * 2
