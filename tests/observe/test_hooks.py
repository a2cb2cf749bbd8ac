"""What is recorded around things that need a GPU: captures, shared memory, and NCCL's calls under way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from workbench.observe import captures, memory
from workbench.observe.described import _reduce_ops, reduce_op_name
from workbench.observe.environment import DIRECTORY
from workbench.observe.process import this_process
from workbench.trace import RankTrace, read_rank


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """This process as world rank 3, recorded."""
    monkeypatch.setenv(DIRECTORY, str(tmp_path))
    monkeypatch.setattr("workbench.observe.process.register_stack_dump", lambda _: None)
    this_process.become(3)
    yield tmp_path / "rank-00003.wbtrace"
    this_process.recorder.close()
    this_process.forget()


def told(trace: RankTrace) -> list[tuple[str, str, str, str]]:
    return [(e.phase.value, e.op, e.note, e.error) for e in trace.events]


class Graph:
    """torch.cuda.CUDAGraph, as far as captures are concerned. The second capture fails at its end."""

    num_captures = 0

    def capture_begin(self, pool: object = None) -> None:  # noqa: ARG002  # as torch calls it
        Graph.num_captures += 1

    def capture_end(self) -> None:
        if Graph.num_captures == 2:
            raise RuntimeError("operation not permitted when stream is capturing")


def test_a_capture_lasts_from_its_begin_to_its_end_and_calls_inside_are_marked(recorded: Path) -> None:
    captures.install(SimpleNamespace(CUDAGraph=Graph))
    inside = []
    graph = Graph()
    graph.capture_begin(pool=None)
    inside.append(this_process.capturing)
    graph.capture_end()
    graph.capture_begin()
    with pytest.raises(RuntimeError, match="not permitted"):
        graph.capture_end()
    assert (inside, this_process.capturing) == ([1], 0)
    assert told(read_rank(recorded)) == [
        ("B", "capture", "", ""),
        ("E", "capture", "", ""),
        ("B", "capture", "", ""),
        ("E", "capture", "", "RuntimeError: operation not permitted when stream is capturing"),
    ]


def test_workspaces_are_recorded_with_what_they_were_asked_for(recorded: Path) -> None:
    def create_allreduce_fusion_workspace(backend: str, *, world_size: int, hidden_dim: int) -> str:
        return f"{backend} {world_size} {hidden_dim}"

    module = SimpleNamespace(
        __name__="flashinfer.comm.allreduce", create_allreduce_fusion_workspace=create_allreduce_fusion_workspace
    )
    memory.install(module)
    assert module.create_allreduce_fusion_workspace("trtllm", world_size=2, hidden_dim=64) == "trtllm 2 64"
    note = "create_allreduce_fusion_workspace(world_size=2, hidden_dim=64)"
    assert told(read_rank(recorded)) == [("B", "workspace", note, ""), ("E", "workspace", "", "")]


def test_a_reduce_op_is_told_by_its_name_however_torch_wraps_it() -> None:
    wrapped = [dist.ReduceOp(dist.ReduceOp.RedOpType.MAX), dist.ReduceOp.MAX, dist.AllreduceCoalescedOptions().reduceOp]
    assert [reduce_op_name(op) for op in wrapped] == ["max", "max", "sum"]


def test_what_is_no_reduce_op_is_told_by_its_type_alike_on_every_rank() -> None:
    assert [reduce_op_name(op) for op in ("sum", object(), torch.ones(2), sum, 3)] == [
        *("type str", "type object", "type Tensor", "type builtin_function_or_method", "type int"),
    ]
    assert not [op for op in _reduce_ops if isinstance(op, torch.Tensor)]
