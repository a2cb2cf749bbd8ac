"""Pins that virtual ranks are told from real ones, recorded runs from those made here, and that none is made up.

With a GPU the sixteen ranks run here; without one the refusal names the record.
"""

from __future__ import annotations

import pytest
import torch

from workbench.backends.custom_build import why_no_kernels
from workbench.errors import ResourceError
from workbench.measure import check_virtual_ranks, recorded_virtual_run


def test_the_record_says_that_it_is_one_and_where_it_stands() -> None:
    assert str(recorded_virtual_run()) == (
        "virtual: 2, 3, 4, 6, 8, 16 ranks on one NVIDIA H200: 18264 checks, 0 wrong "
        "(recorded 2026-11-30, benchmarks/2026-11-30-h200)"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="says why a machine without a GPU has no virtual ranks")
def test_without_a_gpu_nothing_is_made_up() -> None:
    with pytest.raises(ResourceError, match=r"virtual ranks need a GPU, and torch finds none; recorded_virtual_run"):
        check_virtual_ranks()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one Hopper or Blackwell GPU")
def test_sixteen_virtual_ranks_give_the_bits_of_the_reference() -> None:
    problem = why_no_kernels("{}{}a".format(*torch.cuda.get_device_capability()))
    if problem:
        pytest.skip(problem)
    run = check_virtual_ranks(ranks=16, tokens=(1, 8, 3, 32))
    assert (run.checks, run.wrong, run.source) == (64, 0, "run here")
