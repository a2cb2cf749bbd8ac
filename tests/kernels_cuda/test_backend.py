"""The custom backend says no on a machine without a GPU, and its ops have shapes that a compiler can follow."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from workbench.backends import custom
from workbench.backends.base import Request
from workbench.ops import ALL, Rounding
from workbench.plan import Algorithm
from workbench.ranks import GroupKey


def request_of(hidden: int = 4096, max_tokens: int = 8, algorithm: str = "") -> Request:
    return Request(
        hidden=hidden,
        dtype=torch.bfloat16,
        max_tokens=max_tokens,
        ops=ALL,
        rounding=Rounding.ONCE,
        algorithm=algorithm,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_probe_refuses_without_a_gpu():
    verdict = custom.probe(request_of(), GroupKey("tp", (0, 1)))
    assert not verdict.ok
    assert verdict.reason == "torch finds no usable GPU"


def test_room_is_that_of_the_algorithm_in_whole_units_of_2_mib():
    eight = GroupKey("tp", tuple(range(8)))
    # 2 halves x 7 peers x 14,336 bytes a row: 4,096 rows by push, 1,024 by two shots, which the cost model also takes
    assert custom.room(request_of(7168, 4096, "push"), eight).gpu == 822_083_584
    assert custom.room(request_of(7168, 4096, "two_shot_push"), eight).gpu == 205_520_896
    assert custom.room(request_of(7168, 4096), eight).gpu == 205_520_896
    assert custom.room(request_of(), GroupKey("tp", (0, 1))).gpu == 2_097_152


def test_every_algorithm_of_this_build_is_one_that_tables_can_name():
    assert custom.ALGORITHMS == ("push", "two_shot_push")
    assert {Algorithm(name) for name in custom.ALGORITHMS} == {Algorithm.PUSH, Algorithm.TWO_SHOT_PUSH}


def test_fake_ops_give_fresh_tensors_of_the_inputs_shape():
    with FakeTensorMode():
        x, weight = torch.empty(3, 4096, dtype=torch.bfloat16), torch.empty(4096, dtype=torch.bfloat16)
        total = custom._fake_all_reduce(x, 1)
        norm, residual = custom._fake_fused(x, x, weight, 1e-6, 0.0, 1)
    assert [(t.shape, t.dtype) for t in (total, norm, residual)] == [((3, 4096), torch.bfloat16)] * 3


def test_both_ops_are_registered_with_their_schema():
    schema = str(torch.ops.workbench.custom_all_reduce_add_rms_norm.default._schema)
    assert schema == (
        "workbench::custom_all_reduce_add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, "
        "float weight_bias, int workspace) -> (Tensor, Tensor)"
    )
