"""Pins that no cell costs the notebook its ranks: what cells await, answer, print, close, start or take away.

Real processes; times are not pinned, only that nothing waits for its deadline.
"""

from __future__ import annotations

import threading
import time
from _thread import interrupt_main
from typing import Any

import psutil
import pytest

from tests.launch import bodies
from workbench import Cluster, GroupMap
from workbench.errors import ArgumentError
from workbench.launch import CellDeadlineError, RanksFailedError

EVERYBODY = (1111.0,) * 4
AWAITING = {
    "a sleep": "await asyncio.sleep(1000)",
    "a loop after an await": "await asyncio.sleep(0)\nwhile rank == 1:\n    pass\nawait asyncio.sleep(1000)",
    "a collective after an await": "await asyncio.sleep(0)\nif rank > 1: dist.barrier()\nawait asyncio.sleep(1000)",
}


@pytest.fixture(autouse=True)
def sorted_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output once, at the end, by rank: as in a notebook under test."""
    monkeypatch.setenv("WORKBENCH_TEST", "1")


def test_a_cell_that_awaits_ends_and_shows_its_value(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.run("import asyncio\nawait asyncio.sleep(0.01)\nprint('rested')\n7", deadline_s=20)
    assert capsys.readouterr().out == "[0-3] rested\n[0-3] 7\n"
    with pytest.raises(RanksFailedError, match="world ranks 0-3 failed: ZeroDivisionError"):
        cluster.run("await asyncio.sleep(0.01)\n1 / 0", deadline_s=20)


@pytest.mark.parametrize("name", AWAITING)
def test_an_interrupt_ends_a_cell_that_awaits_wherever_it_stands(cluster: Cluster, name: str) -> None:
    pids = cluster.run(bodies.pid)
    with pytest.raises(CellDeadlineError):
        cluster.run(f"import asyncio\n{AWAITING[name]}", deadline_s=0.5)
    assert cluster.interrupt(wait_s=10) == ()
    cluster.rebuild()
    assert cluster.run(bodies.sum_over) == EVERYBODY
    assert cluster.run(bodies.pid) == pids


def test_an_answer_that_cannot_be_read_here_is_that_ranks_error_and_the_ranks_serve_on(cluster: Cluster) -> None:
    with pytest.raises(RanksFailedError, match="ZeroDivisionError: the answer cannot be read here: division by zero"):
        cluster.run(bodies.unreadable, deadline_s=20)
    with pytest.raises(RanksFailedError, match=r"SystemExit: the answer cannot be read here: 3"):
        cluster.run(bodies.unreadable, "raise SystemExit(3)", deadline_s=20)
    assert cluster.status.busy == ()
    assert cluster.run(bodies.sum_over) == EVERYBODY


@pytest.mark.parametrize("half", ["\\ud800", "\\udcff"])
def test_half_a_surrogate_pair_in_what_a_rank_says_loses_nothing(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], half: str
) -> None:
    with pytest.raises(RanksFailedError, match=r"ValueError: no file a\?b"):
        cluster.run(bodies.fail_with, f"'no file a{half}b'", ranks=1, deadline_s=20)
    with pytest.raises(RanksFailedError, match=r"ValueError: no file a\?b"):
        cluster.run(f"raise ValueError('no file a{half}b')", ranks=1, deadline_s=20)
    capsys.readouterr()
    cluster.run(f"print('a{half}b')\nprint('and on')", deadline_s=20)
    assert capsys.readouterr().out == "[0-3] a?b\n[0-3] and on\n"


@pytest.mark.parametrize("taken", ["sys.stdout.close(); sys.stderr.close()", "sys.stdout = sys.stderr = None"])
def test_streams_that_a_cell_has_taken_away_are_there_for_the_next(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], taken: str
) -> None:
    cluster.run(f"import sys; {taken}", deadline_s=20)
    pids = cluster.run(bodies.pid, deadline_s=20)
    cluster.run("print('heard'); print('too', file=sys.stderr)", deadline_s=20)
    assert capsys.readouterr() == ("[0-3] heard\n", "[0-3] too\n")
    assert cluster.run(bodies.pid) == pids


def test_a_cell_that_breaks_what_its_rank_answers_with_is_told_so_and_the_rank_serves_on(cluster: Cluster) -> None:
    pids = cluster.run(bodies.pid)
    with pytest.raises(RanksFailedError, match=r"world rank 2 failed: ZeroDivisionError: .* builtins are put back"):
        cluster.run("import builtins; builtins.len = lambda _: 1 / 0", ranks=2, deadline_s=20)
    cluster.run("import json; kept, json.dumps = json.dumps, None", deadline_s=20)
    assert cluster.run(bodies.pid, deadline_s=20) == pids
    cluster.run("json.dumps = kept")
    assert cluster.run(bodies.sum_over) == EVERYBODY


def test_a_forked_child_that_comes_out_of_its_cell_ends(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.run(
        "import os\nif (child := os.fork()) == 0:\n    1 / 0\nprint(os.waitpid(child, 0)[1] >> 8)", deadline_s=20
    )
    cluster.run("if (child := os.fork()) == 0:\n    raise SystemExit(3)\nos.waitpid(child, 0)[1] >> 8", deadline_s=20)
    assert capsys.readouterr().out.splitlines()[-1] == "[0-3] 1"
    assert cluster.run(bodies.sum_over) == EVERYBODY


def test_megabytes_that_come_after_the_answer_are_shown(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.run("for _ in range(300):\n    print('x' * 100_000)\nprint('end')", ranks="0,1", deadline_s=60)
    told = capsys.readouterr().out
    assert (len(told), told[-10:]) == (300 * 100_007 + 10, "[0-1] end\n")


def test_a_value_that_cannot_be_shown_is_told_with_its_own_error(cluster: Cluster) -> None:
    with pytest.raises(RanksFailedError, match="world ranks 0-3 failed: ValueError: not for show"):
        cluster.run(
            "class Shy:\n    def __repr__(self):\n        raise ValueError('not for show')\nShy()", deadline_s=20
        )


@pytest.mark.parametrize(
    "code", ["session.close()", "with session:\n    pass", "if rank == 2:\n    session._open = False"]
)
def test_a_session_that_a_cell_closed_is_opened_anew_by_a_rebuild(cluster: Cluster, code: str) -> None:
    cluster.run(code, deadline_s=20)
    cluster.rebuild()
    cluster.run(bodies.prepare, "tp")
    assert cluster.run(bodies.sum_over, "tp") == (11.0, 11.0, 1100.0, 1100.0)


def test_names_that_a_cell_has_taken_away_are_back_after_a_rebuild_and_others_stay(cluster: Cluster) -> None:
    cluster.run("del session, torch, rank\nworld_size = 'mine'", deadline_s=20)
    cluster.rebuild()
    try:
        cluster.run("assert session.group('tp') and torch and rank in range(4) and world_size == 'mine'", deadline_s=20)
    finally:
        cluster.run("world_size = 4")


def test_a_rebuild_that_failed_on_one_rank_does_not_spoil_the_next(cluster: Cluster) -> None:
    code = """
    def once(self, number, rank=rank, cls=type(engine), begin=type(engine).begin):
        cls.begin = begin
        if rank == 2:
            raise RuntimeError("not this time")
        return begin(self, number)
    type(engine).begin = once
    """
    cluster.run("from workbench.launch.engine import this_rank\nengine = this_rank()")
    generation = cluster.status.generation
    with Cluster(ranks=2, device="cpu", timeout_s=2) as impatient:  # two ranks wait out their deadline for the other
        impatient.run("from workbench.launch.engine import this_rank\nengine = this_rank()")
        impatient.run(code.replace("rank == 2", "rank == 1"))
        with pytest.raises(RanksFailedError, match="not this time"):
            impatient.rebuild()
        impatient.rebuild()
        assert impatient.run(bodies.sum_over) == (11.0, 11.0)
        assert impatient.status.generation == 2
    assert cluster.status.generation == generation


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.03, 0.1])
def test_an_interrupted_rebuild_does_not_spoil_the_next(cluster: Cluster, after_s: float) -> None:
    timer = threading.Timer(after_s, interrupt_main)
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        cluster.rebuild()
        time.sleep(10)
    cluster.rebuild()
    assert cluster.run(bodies.sum_over) == EVERYBODY


def test_where_leaves_a_rank_alone_that_has_no_handler_for_its_signal(cluster: Cluster) -> None:
    pids = cluster.run(bodies.pid)
    cluster.run("import signal\nbefore = signal.signal(signal.SIGUSR1, signal.SIG_DFL)", ranks=1)
    with pytest.raises(CellDeadlineError):
        cluster.run("import time\ntime.sleep(60)", ranks=1, deadline_s=0.3)
    assert [s.state for s in cluster.where().standings] == ["idle", "silent", "idle", "idle"]
    assert cluster.interrupt(wait_s=10) == ()
    assert cluster.run(bodies.pid) == pids
    cluster.run(
        "import faulthandler\nfrom workbench.launch import engine\n"
        "faulthandler.unregister(signal.SIGUSR1)\n"
        "faulthandler.register(signal.SIGUSR1, file=engine._kept_open[0], chain=False)",
        ranks=1,
    )


def test_what_is_no_code_no_function_and_no_group_map_is_refused_before_anything_is_sent(cluster: Cluster) -> None:
    for work in (3, None, b"1"):
        with pytest.raises(ArgumentError, match="code as text, or a function"):
            cluster.run(work)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ArgumentError, match=r"GroupMap\.build"):
        Cluster(2, group_map={"tp": [[0, 1]]})  # type: ignore[arg-type]  # wrong on purpose


def test_what_ranks_started_ends_with_them(cluster: Cluster) -> None:
    """A child, and a grandchild whose parent is gone."""
    started = cluster.run(bodies.start_children, ranks=0)[0]
    children = [psutil.Process(pid) for pid in started]
    assert all(child.is_running() for child in children)
    cluster.restart()
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert cluster.run(bodies.sum_over) == EVERYBODY


def test_an_interrupt_during_close_comes_when_all_is_gone() -> None:
    second = Cluster(ranks=2, device="cpu", group_map=GroupMap.custom({"tp": [[0, 1]]}))
    ranks: list[Any] = [psutil.Process(pid) for pid in second.status.pids]
    timer = threading.Timer(0.02, interrupt_main)
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        second.close()
        time.sleep(10)
    assert not any(rank.is_running() for rank in ranks)
    assert not second.directory.exists()
