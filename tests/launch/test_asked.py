"""Pins what a Cluster makes of the ranks and the device it is asked for, before anything starts."""

from __future__ import annotations

import pytest
import torch

from workbench import GroupMap
from workbench.errors import ArgumentError, LayoutError
from workbench.launch.asked import count_ranks, place_ranks


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("two_gpus")
def test_a_setting_gives_way_to_the_number_of_ranks_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert place_ranks(None, "cuda", 2) == "cuda"
    assert capsys.readouterr().err == ""
    assert place_ranks(None, "cuda", 4) == "cpu"
    assert "4 ranks and 2 GPUs: CPU ranks" in capsys.readouterr().err


@pytest.mark.usefixtures("two_gpus")
def test_without_a_word_gpus_are_taken_where_they_suffice() -> None:
    assert [place_ranks(None, None, n) for n in (1, 2, 3, 16)] == ["cuda", "cuda", "cpu", "cpu"]
    assert place_ranks("cpu", "cuda", 2) == "cpu"


@pytest.mark.usefixtures("two_gpus")
def test_ranks_that_may_share_take_gpus_whatever_their_number() -> None:
    assert place_ranks(None, "cuda", 4, share=True) == place_ranks("cuda", None, 64, share=True) == "cuda"
    assert place_ranks(None, None, 4, share=True) == place_ranks("cpu", "cuda", 4, share=True) == "cpu"


@pytest.mark.usefixtures("two_gpus")
def test_cuda_by_name_with_too_few_gpus_is_refused() -> None:
    with pytest.raises(ArgumentError, match="4 ranks on cuda need a GPU each, torch finds 2"):
        place_ranks("cuda", None, 4)
    with pytest.raises(ArgumentError, match="allowed: 'cpu', 'cuda'"):
        place_ranks("tpu", None, 2)


def test_ranks_are_four_or_the_worlds() -> None:
    group_map = GroupMap.build("sglang", tp=8)
    assert (count_ranks(None, None), count_ranks(None, group_map), count_ranks(64, None)) == (4, 8, 64)
    for wrong in (0, -1, True, 65, "4", 2.0):
        with pytest.raises(ArgumentError, match="a whole number from 1 to 64"):
            count_ranks(wrong, None)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="the group map is for 8 ranks"):
        count_ranks(4, group_map)
