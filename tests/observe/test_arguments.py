"""Arguments that the recording looks at in haste: they are told right, and where it fails over one the call goes on."""

from __future__ import annotations

import pytest

from tests.observe.traced import begins, record, results, torchrun
from workbench.trace import Phase, Trace, pair_calls


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, str]:
    return record(tmp_path_factory.mktemp("arguments"), torchrun("odd_arguments.py", ranks=1))


def test_reduce_ops_at_one_line_are_told_apart_whether_torch_keeps_them_or_the_program_makes_them(
    run: tuple[Trace, str],
) -> None:
    ops = [e.reduce_op for e in begins(run[0], 0) if e.op == "all_reduce"]
    assert ops == ["sum", "max", "min", "max", "sum", "sum", "min", "max"]


def test_a_root_that_is_no_plain_int_is_recorded_as_the_number_that_torch_takes_it_for(run: tuple[Trace, str]) -> None:
    roots = [(e.root_world_rank, e.root_group_rank) for e in begins(run[0], 0) if e.op == "broadcast"]
    assert roots == [(0, 0), (0, 0)]


def test_a_call_over_which_the_recording_fails_goes_on_and_leaves_a_word(run: tuple[Trace, str]) -> None:
    trace, output = run
    assert results(output) == {"0": "2.0"}
    rank = trace.rank(0)
    assert rank is not None
    told = [e.error for e in rank.events if e.op == "unrecorded" and e.phase is Phase.INSTANT]
    assert told == ["KeyError: 'no hash'"]
    assert [e.op for e in begins(trace, 0)][-2:] == ["barrier", "destroy_process_group"]
    assert [str(c.event) for c in pair_calls(rank.events) if c.end is None] == []
