"""Calls of a CUDA workspace go into one graph under torch.compile(fullgraph=True). Needs no GPU: tensors are fakes.

Only the memory is a stand-in, since there is none without a GPU; nothing here launches a kernel. The same on GPUs, with
results: benchmarks/cuda_checks.py, step memory.
"""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from workbench.backends import custom
from workbench.backends.base import Request
from workbench.backends.custom_memory import Shape
from workbench.ops import ALL, Rounding
from workbench.ranks import GroupKey

HIDDEN = 4096


@pytest.fixture
def workspace():
    channel = SimpleNamespace(key=GroupKey("tp", (0, 1)), world_rank=1, timeout_s=1.0)
    request = Request(hidden=HIDDEN, dtype=torch.bfloat16, max_tokens=8, ops=ALL, rounding=Rounding.ONCE)
    memory = SimpleNamespace(size_bytes=0, fill=lambda rank: None)
    shared = SimpleNamespace(memory=memory, slots=[0, 0])
    return custom.CustomWorkspace(channel, request, Shape(rows=8, hidden=HIDDEN, dtype=0), shared)


@pytest.fixture
def graphs():
    torch._dynamo.reset()
    yield []
    torch._dynamo.reset()


def test_both_calls_are_nodes_of_one_graph(workspace, graphs):
    def layer(x, residual, weight):
        out = workspace.all_reduce_add_rms_norm(x * 2, residual, weight, eps=1e-6, weight_bias=0.0)
        return out.norm + 1, workspace.all_reduce(out.residual)

    def keep(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    with FakeTensorMode():
        x, weight = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in ((3, HIDDEN), (HIDDEN,)))
        norm, total = torch.compile(layer, fullgraph=True, backend=keep)(x, x, weight)
    assert [(t.shape, t.dtype, t.device.type) for t in (norm, total)] == [((3, HIDDEN), torch.bfloat16, "cuda")] * 2
    (graph,) = graphs
    ours = [str(node.target) for node in graph.graph.nodes if "workbench" in str(node.target)]
    assert ours == ["workbench.custom_all_reduce_add_rms_norm", "workbench.custom_all_reduce"]
