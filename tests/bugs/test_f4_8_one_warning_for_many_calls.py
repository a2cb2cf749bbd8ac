"""sgl-project/sglang#34921.

Symptom: 28032 equal warnings in one start. Cause: a validator ran, and warned, for each call that was too large, though
the fallback was right each time.
"""

from __future__ import annotations

import logging
import warnings

from tests.bugs.worlds import fused, only, open_session
from tests.forked import run_ranks
from workbench.ranks import GroupMap
from workbench.trace import read_directory

CALLS = 150


def test_old_a_warning_a_call() -> None:
    def all_reduce(tokens: int) -> None:
        if tokens > 4:
            logging.getLogger("upstream").warning("%d tokens exceed the workspace", tokens)

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("upstream").addHandler(handler)
    for _ in range(CALLS):
        all_reduce(5)
    assert len(lines) == CALLS


def test_one_line_for_the_reader_a_count_at_the_end_and_each_call_in_the_trace(tmp_path) -> None:
    def body(rank: int) -> tuple[list[str], list[str], set[float]]:
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())
        logging.getLogger("workbench").addHandler(handler)
        with open_session(GroupMap.custom({"tp": [[0, 1]]}), "tp", trace_dir=tmp_path) as s, warnings.catch_warnings():
            warnings.simplefilter("error")
            s.freeze()
            found = {only(fused(s, "tp", tokens=5).residual) for _ in range(CALLS)}
            told = list(lines)
        return told, lines[1:], found

    line = (
        "tp[0,1]: 5 tokens exceed the 4 of the frozen shm workspace; gloo reduces over the same group, then adds and "
        "normalises (told once)"
    )
    count = "tp[0,1]: 150 calls in all took the fallback"
    assert run_ranks(2, body) == [([line], [count], {16.0}), ([], [], {16.0})]  # the first member speaks for the group
    trace = read_directory(tmp_path)
    assert [sum(e.op == "fallback" for e in rank.events) for rank in trace.ranks] == [CALLS, CALLS]
