"""NVIDIA/apex#19.

Symptom: a deadlock, or sums of things that do not belong together. Cause: collectives were issued in the order of a
dict, which differs between processes. On gloo two equal all-reduces in opposite order are summed crosswise, without a
word.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.bugs.worlds import only, plain_world
from tests.forked import run_ranks
from workbench.errors import MismatchError
from workbench.ranks import GroupMap
from workbench.runtime import Session
from workbench.trace import read_directory, rendezvous_lanes

PAIR = GroupMap.custom({"tp": [[0, 1]]})
ORDERS = (("x", "y"), ("y", "x"))  # in which each rank's dict gives its names


def _tensors(rank: int, hidden_of_y: int = 8) -> dict[str, torch.Tensor]:
    whole = {"x": torch.full((1, 8), rank + 1.0), "y": torch.full((1, hidden_of_y), (rank + 1) * 10.0)}
    return {name: whole[name] for name in ORDERS[rank]}


def _session(**options: object) -> Session:
    s = Session(PAIR, device="cpu", timeout_s=20, **options)
    for hidden in (8, 16):
        s.prepare("tp", hidden=hidden, dtype=torch.float32, max_tokens=1)
    return s


def test_old_x_of_one_rank_is_summed_with_y_of_the_other() -> None:
    def body(rank: int) -> tuple[float, float]:
        with plain_world():
            tensors = _tensors(rank)
            for x in tensors.values():
                dist.all_reduce(x)
            return only(tensors["x"]), only(tensors["y"])

    assert run_ranks(2, body) == [(21.0, 12.0), (12.0, 21.0)]  # right: 3 and 30 on both


def test_in_the_order_of_their_names_both_sums_are_right() -> None:
    def body(rank: int) -> list[float]:
        with _session(check=True) as s:
            return [only(s.all_reduce(x, group="tp")) for _, x in sorted(_tensors(rank).items())]

    assert run_ranks(2, body) == [[3.0, 30.0]] * 2


def test_check_mode_refuses_a_swap_of_tensors_that_look_different() -> None:
    def body(rank: int) -> str:
        with _session(check=True) as s, pytest.raises(MismatchError) as e:
            for x in _tensors(rank, hidden_of_y=16).values():
                s.all_reduce(x, group="tp")
        return str(e.value)

    first, second = run_ranks(2, body)
    assert first == second
    assert "world rank 0: all_reduce (sum), x float32 [1, 8]" in first
    assert "world rank 1: all_reduce (sum), x float32 [1, 16]" in first


def test_check_mode_refuses_a_swap_of_tensors_that_look_alike_by_their_labels() -> None:
    def body(rank: int) -> str:
        with _session(check=True) as s, pytest.raises(MismatchError) as e:
            for name, x in _tensors(rank).items():
                s.all_reduce(x, group="tp", label=name)
        return str(e.value)

    first, second = run_ranks(2, body)
    assert first == second
    assert "world rank 0: all_reduce (sum), x float32 [1, 8] strides [8, 1], on shm, label 'x'" in first
    assert "world rank 1: all_reduce (sum), x float32 [1, 8] strides [8, 1], on shm, label 'y'" in first


def reduce_x(s: Session, tensors: dict[str, torch.Tensor]) -> None:
    s.all_reduce(tensors["x"], group="tp")


def reduce_y(s: Session, tensors: dict[str, torch.Tensor]) -> None:
    s.all_reduce(tensors["y"], group="tp")


def test_a_swap_of_tensors_that_look_alike_shows_in_the_call_sites_of_the_trace(tmp_path) -> None:
    def body(rank: int) -> None:
        with _session(trace_dir=str(tmp_path)) as s:
            for reduce in (reduce_x, reduce_y) if rank == 0 else (reduce_y, reduce_x):
                reduce(s, _tensors(rank))

    run_ranks(2, body)
    calls = [c for c in rendezvous_lanes(read_directory(tmp_path)).calls if c.op == "all_reduce"]
    assert [[v.site.function for v in c.visits] for c in calls] == [["reduce_x", "reduce_y"], ["reduce_y", "reduce_x"]]
