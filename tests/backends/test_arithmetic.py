"""Pins what the backends compute in every group shape: the reference's sum and residual bit for bit, on all ranks.

The norm of the shared-memory kernel may differ from the reference in the last bit of its dtype, because the mean is
taken in another order; it must be equal on all ranks.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.backends.ranks import bits, channels, data, request, run_ranks
from workbench.backends import gloo, reference, shm
from workbench.errors import ArgumentError
from workbench.ops import Op, Rounding, reference_all_reduce, reference_all_reduce_add_rms_norm, round_to

BACKENDS = {"shm": shm, "gloo": gloo, "reference": reference}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
EPS = 1e-6


def in_group(num_ranks: int, backend: ModuleType, work: Any, **wanted: Any) -> list[Any]:
    """Run work(workspace, group_rank) on each rank of one group of num_ranks, and give back the values."""

    def rank_main(rank: int) -> Any:
        with channels(tuple(range(num_ranks))) as [channel]:
            workspace = backend.bind(channel, request(**wanted))
            try:
                return work(workspace, rank)
            finally:
                workspace.close()

    return run_ranks(num_ranks, rank_main)


def near(norm: torch.Tensor, expected: torch.Tensor) -> bool:
    """At most one unit in the last place of the dtype apart."""
    return bool(((bits(norm).int() - bits(expected).int()).abs() <= (1 if norm.dtype.itemsize == 2 else 32)).all())


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6])
def test_powers_of_two_tell_ranks_apart(name: str, num_ranks: int) -> None:
    """Rank r gives 2^r, the residual is 5: a rank left out, taken twice or doubled changes the sum."""

    def work(workspace: Any, rank: int) -> list[list[float]]:
        seen = []
        for tokens in (0, 1, 7, 64):
            x = torch.full((tokens, 48), 2.0**rank)
            out = workspace.all_reduce_add_rms_norm(
                x, torch.full_like(x, 5.0), torch.ones(48), eps=EPS, weight_bias=0.0
            )
            total = workspace.all_reduce(x)
            assert total.shape == out.residual.shape == out.norm.shape == (tokens, 48)
            seen.append(total.unique().tolist() + out.residual.unique().tolist() + out.norm.unique().tolist())
        return seen

    total = {1: 1.0, 2: 3.0, 3: 7.0, 4: 15.0, 6: 63.0}[num_ranks]
    for seen in in_group(num_ranks, BACKENDS[name], work, hidden=48, dtype=torch.float32):
        assert seen == [[], *[[total, total + 5, 1.0]] * 3]


def test_sixteen_ranks_on_few_cores_sum_right() -> None:
    def work(workspace: Any, rank: int) -> list[float]:
        seen: list[float] = []
        for tokens in (0, 1, 7, 64):
            x = torch.full((tokens, 32), 2.0**rank)
            out = workspace.all_reduce_add_rms_norm(
                x, torch.full_like(x, 5.0), torch.ones(32), eps=EPS, weight_bias=0.0
            )
            seen += out.residual.unique().tolist()
        return seen

    assert in_group(16, shm, work, hidden=32, dtype=torch.float32) == [[65540.0] * 3] * 16


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("rounding", Rounding)
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_data_equals_the_reference(name: str, rounding: Rounding, dtype: torch.dtype) -> None:
    hidden = 1000  # no multiple of any register

    def work(workspace: Any, rank: int) -> list[torch.Tensor]:
        outputs = []
        for tokens in (1, 5, 130):
            xs = [data(10 + r, (tokens, hidden), dtype) for r in range(3)]
            residual, weight = data(1, (tokens, hidden), dtype), data(2, (hidden,), dtype)
            for in_place in (False, True):
                x = xs[rank]
                if in_place:
                    x = workspace.empty((tokens, hidden), dtype)
                    x.copy_(xs[rank])
                out = workspace.all_reduce_add_rms_norm(x, residual, weight, eps=EPS, weight_bias=1.0)
                expected = reference_all_reduce_add_rms_norm(
                    xs, residual, weight, eps=EPS, weight_bias=1.0, rounding=rounding
                )
                assert torch.equal(bits(out.residual), bits(expected.residual))
                assert near(out.norm, expected.norm)
                total = workspace.all_reduce(x)
                assert torch.equal(bits(total), bits(reference_all_reduce(xs)))
                outputs += [out.norm, out.residual, total]
        return [bits(t).clone() for t in outputs]

    ranks = in_group(3, BACKENDS[name], work, hidden=hidden, dtype=dtype, max_tokens=130, rounding=rounding)
    assert len(ranks[0]) == 18
    for outputs in ranks[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outputs, ranks[0], strict=True))


@pytest.mark.parametrize("name", BACKENDS)
def test_eps_and_weight_bias_enter_the_norm_as_given(name: str) -> None:
    """The sum is 0.03 everywhere, so its mean square 9e-4; norm = 0.03 / sqrt(9e-4 + eps) * (weight_bias + 2).

    With eps = 0 that is 2, with eps = 16e-4 it is 0.03 / 0.05 * 2 = 1.2, and so on.
    """
    expected = {(0.0, 0.0): 2.0, (16e-4, 0.0): 1.2, (16e-4, 3.0): 3.0, (1e-5, 0.0): 1.98898, (1e-2, 0.0): 0.57470}

    def work(workspace: Any, rank: int) -> dict[tuple[float, float], list[float]]:
        x, weight = torch.full((2, 33), 0.01), torch.full((33,), 2.0)
        norms = {}
        for eps, weight_bias in expected:
            out = workspace.all_reduce_add_rms_norm(x, x, weight, eps=eps, weight_bias=weight_bias)
            norms[eps, weight_bias] = out.norm.unique().tolist()
        return norms

    for norms in in_group(2, BACKENDS[name], work, hidden=33, dtype=torch.float32):
        assert {case: [pytest.approx(value, rel=1e-5)] for case, value in expected.items()} == norms


REFUSED = {
    "negative bit": (lambda x, w: (torch._neg_view(x), x, w, 1e-6, 0.0), "x is a lazy negation"),
    "gradient": (lambda x, w: (x, x, torch.nn.Parameter(w), 1e-6, 0.0), r"weight requires grad.*weight.detach\(\)"),
    "sparse": (lambda x, w: (x.to_sparse(), x, w, 1e-6, 0.0), "x is a torch.sparse_coo tensor"),
    "no residual": (lambda x, w: (x, None, w, 1e-6, 0.0), "residual is None"),
    "no weight": (lambda x, w: (x, x, None, 1e-6, 0.0), "weight is None"),
    "text": (lambda x, w: ("x", x, w, 1e-6, 0.0), "x is a str"),
    "eps as text": (lambda x, w: (x, x, w, "1e-6", 0.0), "eps is '1e-6'"),
    "no eps": (lambda x, w: (x, x, w, None, 0.0), "eps is None"),
    "eps NaN": (lambda x, w: (x, x, w, float("nan"), 0.0), "eps is nan"),
    "negative eps": (lambda x, w: (x, x, w, -1.0, 0.0), "eps is -1.0"),
    "bias as text": (lambda x, w: (x, x, w, 1e-6, "0"), "weight_bias is '0'"),
}


@pytest.mark.parametrize("name", BACKENDS)
def test_a_refused_argument_is_one_ranks_error_and_harms_nobody(name: str) -> None:
    """Rank 1 makes each wrong call alone, between calls of the group; a call that waited would time out."""

    def work(workspace: Any, rank: int) -> list[float]:
        x, weight = torch.full((2, 8), 2.0**rank), torch.ones(8)
        sums = []
        for wrong, message in REFUSED.values():
            if rank == 1:
                a, residual, w, eps, weight_bias = wrong(x, weight)
                with pytest.raises(ArgumentError, match=message):
                    workspace.all_reduce_add_rms_norm(a, residual, w, eps=eps, weight_bias=weight_bias)
            sums.append(workspace.all_reduce(x)[1, 7].item())
            assert workspace.broken == ""
        with torch.no_grad():
            out = workspace.all_reduce_add_rms_norm(
                torch.nn.Parameter(x), x, torch.nn.Parameter(weight), eps=1e-6, weight_bias=0.0
            )
        return [*sums, out.residual[0, 0].item() - x[0, 0].item()]

    assert in_group(2, BACKENDS[name], work, hidden=8, dtype=torch.float32) == [[3.0] * (len(REFUSED) + 1)] * 2


def test_an_op_that_was_not_prepared_is_refused() -> None:
    def rank_main(rank: int) -> float:
        with channels((0, 1)) as [channel]:
            only = replace(request(8, torch.float32), ops=frozenset({Op.ALL_REDUCE_ADD_RMS_NORM}))
            workspace = shm.bind(channel, only)
            x = torch.full((1, 8), 2.0**rank)
            with pytest.raises(ArgumentError, match="all_reduce asked, prepared for all_reduce_add_rms_norm only"):
                workspace.all_reduce(x)
            out = workspace.all_reduce_add_rms_norm(x, torch.zeros(1, 8), torch.ones(8), eps=1e-6, weight_bias=0.0)
            workspace.close()
            return float(out.residual[0, 0])

    assert run_ranks(2, rank_main) == [3.0, 3.0]


@pytest.mark.parametrize("hidden", [1, 2, 31, 32, 33, 63, 64, 65, 127, 7168, 40000])
def test_any_hidden_size(hidden: int) -> None:
    def work(workspace: Any, rank: int) -> None:
        for tokens in (1, 3):
            xs = [data(10 + r, (tokens, hidden)) for r in range(2)]
            residual, weight = data(1, (tokens, hidden)), data(2, (hidden,))
            out = workspace.all_reduce_add_rms_norm(xs[rank], residual, weight, eps=EPS, weight_bias=0.0)
            expected = reference_all_reduce_add_rms_norm(xs, residual, weight, eps=EPS)
            assert torch.equal(bits(out.residual), bits(expected.residual))
            assert near(out.norm, expected.norm)

    in_group(2, shm, work, hidden=hidden)


def special_values(dtype: torch.dtype) -> torch.Tensor:
    """Zeros of both signs, subnormals, limits, infinities, NaN, and values that tie when rounded."""
    tiny = torch.finfo(dtype).tiny
    largest = torch.finfo(dtype).max
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    inf, nan = float("inf"), float("nan")
    values = [
        0.0,
        -0.0,
        smallest,
        -smallest,
        tiny,
        -tiny,
        tiny / 2,
        1.0,
        -1.0,
        257.0,
        largest,
        -largest,
        inf,
        -inf,
        nan,
    ]
    return torch.tensor([values], dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("flush", [False, True], ids=["plain", "denormals-off"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values_pass_unharmed(dtype: torch.dtype, flush: bool) -> None:
    """Every pair of special values meets; bits as the reference's, even if the program switched subnormals off."""
    values = special_values(dtype)[0]
    count = len(values)
    a, b = (t.reshape(1, -1).contiguous() for t in torch.meshgrid(values, values, indexing="ij"))
    hidden = count * count
    residual = values.roll(3).repeat(count).reshape(1, -1)

    def work(workspace: Any, rank: int) -> None:
        weight = torch.ones(hidden, dtype=dtype)
        expected_sum = reference_all_reduce([a, b])
        expected = reference_all_reduce_add_rms_norm([a, b], residual, weight, eps=EPS)
        rows = torch.cat([values] * count).reshape(1, -1)
        if flush:
            assert torch.set_flush_denormal(True)
        total = workspace.all_reduce((a, b)[rank])
        out = workspace.all_reduce_add_rms_norm((a, b)[rank], residual, weight, eps=EPS, weight_bias=0.0)
        kept = workspace.all_reduce(rows if rank == 0 else torch.full_like(rows, -0.0))
        torch.set_flush_denormal(False)
        assert torch.equal(bits(total), bits(expected_sum))
        assert torch.equal(bits(out.residual), bits(expected.residual))
        assert out.norm.isnan().all()
        assert torch.equal(bits(kept), bits(round_to(rows.float(), dtype)))  # x + -0.0 is x
        assert (bits(kept)[0, 1] != 0).item()  # -0.0 kept its sign

    in_group(2, shm, work, hidden=hidden, dtype=dtype)


def test_fp16_and_bf16_round_every_exponent_like_torch() -> None:
    """Sums of a coarse and a fine value, over all exponents: rounding ties, overflow and gradual underflow."""

    def work(workspace: Any, rank: int) -> None:
        dtype = workspace.request.dtype
        every = torch.arange(-0x8000, 0x8000, dtype=torch.int32).to(torch.int16).view(dtype).reshape(16, -1)
        other = every.flatten().roll(7919).reshape(16, -1).contiguous()
        total = workspace.all_reduce((every, other)[rank].contiguous())
        assert torch.equal(bits(total), bits(reference_all_reduce([every, other])))

    for dtype in (torch.bfloat16, torch.float16):
        in_group(2, shm, work, hidden=4096, dtype=dtype)


def test_more_than_a_hundred_calls_of_alternating_sizes_and_ops() -> None:
    hidden = 7168

    def work(workspace: Any, rank: int) -> int:
        checked = 0
        for call in range(120):
            tokens = (1, 64, 0, 7, 33, 2)[call % 6]
            xs = [torch.full((tokens, hidden), float(2**r + call % 5), dtype=torch.bfloat16) for r in range(2)]
            x = xs[rank]
            if (call + rank) % 3 == 0:  # one rank in place, the other not, in turn
                x = workspace.empty((tokens, hidden), torch.bfloat16)
                x.copy_(xs[rank])
            if call % 2:
                total = workspace.all_reduce(x)
            else:
                weight = torch.ones(hidden, dtype=torch.bfloat16)
                total = workspace.all_reduce_add_rms_norm(x, xs[0], weight, eps=EPS, weight_bias=0.0).residual - xs[0]
            x.zero_()  # the caller may write over x as soon as the call returns
            assert total.unique().tolist() == ([3.0 + 2 * (call % 5)] if tokens else [])
            checked += 1
        return checked

    assert in_group(2, shm, work, hidden=hidden, max_tokens=64) == [120, 120]


@pytest.mark.parametrize("name", BACKENDS)
def test_interleaved_groups_of_one_process_stay_apart(name: str) -> None:
    """Each rank is in [0,2] or [1,3] and in [3,1,0,2]; the list of the last is kept though torch sorts it."""
    groups = ((0, 2), (1, 3), (3, 1, 0, 2))

    def rank_main(rank: int) -> list[float]:
        with channels(*groups) as mine:
            workspaces = [BACKENDS[name].bind(c, request(16, torch.float32)) for c in mine]
            sums = []
            for call in range(6):
                for workspace in workspaces:
                    x = torch.full((3, 16), 10.0**rank)
                    sums.append(workspace.all_reduce(x)[call % 3, 0].item())
            # fp32 in the order 3, 1, 0, 2: (1e8 + 1) - 1e8 + 1 is 1, the ascending order would give 0
            odd = torch.full((1, 16), {3: 1e8, 1: 1.0, 0: -1e8, 2: 1.0}[rank])
            sums.append(workspaces[-1].all_reduce(odd)[0, 0].item())
            for workspace in workspaces:
                workspace.close()
            return sums

    pairs = {0: 101.0, 2: 101.0, 1: 1010.0, 3: 1010.0}
    for rank, sums in enumerate(run_ranks(4, rank_main)):
        assert sums == [pairs[rank], 1111.0] * 6 + [1.0]


def test_a_group_without_world_rank_0() -> None:
    def rank_main(rank: int) -> float:
        with channels((1, 2)) as mine:
            if not mine:
                return 0.0
            workspace = shm.bind(mine[0], request(16, torch.float32))
            try:
                return float(workspace.all_reduce(torch.full((1, 16), 10.0**rank))[0, 0])
            finally:
                workspace.close()

    assert run_ranks(3, rank_main) == [0.0, 110.0, 110.0]


def test_two_groups_of_the_same_ranks_at_once_with_different_requests() -> None:
    def rank_main(rank: int) -> list[float]:
        with channels((0, 1), (0, 1)) as mine:
            a = shm.bind(mine[0], request(16, torch.float32, rounding=Rounding.TWICE))
            b = shm.bind(mine[1], request(80, torch.bfloat16))
            sums = []
            for _ in range(50):
                sums.append(a.all_reduce(torch.full((2, 16), 2.0**rank))[0, 0].item())
                sums.append(b.all_reduce(torch.full((1, 80), 4.0**rank, dtype=torch.bfloat16))[0, 0].item())
            b.close()
            sums.append(a.all_reduce(torch.full((2, 16), 2.0**rank))[0, 0].item())
            a.close()
            return sums

    assert run_ranks(2, rank_main) == [[3.0, 5.0] * 50 + [3.0]] * 2
