"""Pins how calls of a shared-memory group fail: who is named, by which error, on every rank, and what serves on.

No time is asserted: where a hang would be the failure, the wait's own deadline would give another error.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.backends.shm_groups import (
    HIDDEN,
    Board,
    ones,
    outcomes_of,
    then_closed,
    wait_until_asleep,
)
from workbench.backends import shm
from workbench.errors import (
    ArgumentError,
    CallFailedError,
    CapacityError,
    ClosedError,
    DeadlineError,
    PeerDeadError,
)

BIG = 64  # sixteen pieces: a rank that dies in the middle has not handed over everything


@pytest.mark.parametrize("in_place", [False, True], ids=["copied", "in-place"])
def test_a_rank_killed_inside_a_call_is_named_long_before_the_deadline(in_place: bool) -> None:
    board = Board()

    def work(workspace: Any, rank: int) -> Any:
        x = workspace.empty((BIG, HIDDEN), torch.bfloat16) if in_place else ones(BIG)
        x.fill_(1.0)
        workspace.all_reduce(ones())
        if rank == 2:
            board[2] = 1.0
        if rank == 0:
            board.wait_for(3)  # come only after rank 2 is dead
        with pytest.raises(PeerDeadError) as caught:
            workspace.all_reduce(x)
        return caught.value.dead, str(caught.value), then_closed(workspace)

    def kill(pids: Sequence[int]) -> None:
        board.wait_for(2)
        wait_until_asleep(pids[2])  # inside the kernel
        os.kill(pids[2], signal.SIGKILL)
        board[3] = 1.0

    ended = outcomes_of(3, work, while_running=kill)
    assert ended[2].signal == signal.SIGKILL
    for rank in (0, 1):
        assert ended[rank].error is None, ended[rank].trace
        dead, text, later = ended[rank].value
        assert dead == (2,)
        assert "tp[0,1,2]: call 2 (all_reduce, 64 tokens of hidden 7168, bfloat16): the process of world rank 2" in text
        assert text in later


def test_a_rank_killed_after_it_handed_over_everything_is_not_missed() -> None:
    board = Board()

    def work(workspace: Any, rank: int) -> float:
        workspace.all_reduce(ones())
        if rank == 2:
            board[2] = 1.0
        if rank == 1:
            board.wait_for(3)
            time.sleep(0.5)  # meanwhile rank 0 waits for this rank and looks at the dead one
        return float(workspace.all_reduce(ones())[0, 0])

    def kill(pids: Sequence[int]) -> None:
        board.wait_for(2)
        wait_until_asleep(pids[2])
        os.kill(pids[2], signal.SIGKILL)
        board[3] = 1.0

    ended = outcomes_of(3, work, while_running=kill)
    assert [o.value for o in ended[:2]] == [3.0, 3.0]
    assert ended[2].signal == signal.SIGKILL


def test_a_stopped_rank_is_named_when_the_deadline_passes() -> None:
    board = Board()

    def work(workspace: Any, rank: int) -> Any:
        workspace.all_reduce(ones())
        if rank == 1:
            board[1] = 1.0
            board.wait_for(2)
        with pytest.raises(DeadlineError) as caught:
            workspace.all_reduce(ones(5))
        if rank == 0:
            board[0] += 1
        if rank == 2:
            board[4] += 1
        return caught.value.missing, str(caught.value), then_closed(workspace)

    def stop(pids: Sequence[int]) -> None:
        board.wait_for(1)
        os.kill(pids[1], signal.SIGSTOP)
        board[2] = 1.0
        board.wait_for(0)
        board.wait_for(4)
        os.kill(pids[1], signal.SIGCONT)

    ended = outcomes_of(3, work, timeout_s=4.0, while_running=stop)
    for outcome in ended:  # the stopped rank too, when it comes late
        assert outcome.error is None, outcome.trace
        missing, text, later = outcome.value
        assert missing == (1,)
        assert "waited 4 s for world rank 1" in text
        assert "call 2 (all_reduce, 5 tokens" in text
        assert text in later


@pytest.mark.parametrize("in_place", [False, True], ids=["copied", "in-place"])
def test_ctrl_c_comes_through_a_wait_and_the_peers_are_told(in_place: bool) -> None:
    board = Board()

    def work(workspace: Any, rank: int) -> Any:
        x = workspace.empty((1, HIDDEN), torch.bfloat16) if in_place else ones()
        x.fill_(1.0)
        workspace.all_reduce(x)
        if rank == 0:
            board[0] = 1.0
            with pytest.raises(KeyboardInterrupt):
                workspace.all_reduce(x)
            x.fill_(-1.0)
            later = then_closed(workspace)
            board[1] = 1.0
            return later
        board.wait_for(1)
        if not in_place:  # the other had handed over all it had; what is read in place may be overwritten by now
            assert workspace.all_reduce(ones())[0, 0] == 2.0
        with pytest.raises(ClosedError) as caught:
            workspace.all_reduce(ones())
        return str(caught.value), then_closed(workspace)

    def interrupt(pids: Sequence[int]) -> None:
        board.wait_for(0)
        wait_until_asleep(pids[0])
        os.kill(pids[0], signal.SIGINT)

    ended = outcomes_of(2, work, while_running=interrupt)
    assert [o.error for o in ended] == [None, None], ended[0].trace + ended[1].trace
    assert "broken by an earlier failure: a call was interrupted by KeyboardInterrupt" in ended[0].value
    assert ended[1].value[0] == "tp[0,1]: world rank 0 was interrupted in call 2; rebuild the group"


CALLS = {
    "tokens": (lambda w: w.all_reduce(ones(2)), lambda w: w.all_reduce(ones(3)), "2 tokens", "3 tokens"),
    "no tokens": (lambda w: w.all_reduce(ones(0)), lambda w: w.all_reduce(ones(1)), "0 tokens", "1 tokens"),
    "op": (
        lambda w: w.all_reduce(ones(2)),
        lambda w: w.all_reduce_add_rms_norm(ones(2), ones(2), ones()[0], eps=1e-6, weight_bias=0.0),
        "all_reduce, 2 tokens",
        "all_reduce_add_rms_norm, 2 tokens",
    ),
    "eps": (
        lambda w: w.all_reduce_add_rms_norm(ones(), ones(), ones()[0], eps=1e-6, weight_bias=0.0),
        lambda w: w.all_reduce_add_rms_norm(ones(), ones(), ones()[0], eps=1e-5, weight_bias=0.0),
        "eps 9.99999997e-07",
        "eps 9.99999975e-06",
    ),
    "weight bias": (
        lambda w: w.all_reduce_add_rms_norm(ones(), ones(), ones()[0], eps=1e-6, weight_bias=0.0),
        lambda w: w.all_reduce_add_rms_norm(ones(), ones(), ones()[0], eps=1e-6, weight_bias=1.0),
        "weight_bias 0",
        "weight_bias 1",
    ),
}


@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize("case", CALLS)
def test_different_calls_are_an_error_on_every_rank_that_names_both(case: str, odd: int) -> None:
    usual, other, usual_text, other_text = CALLS[case]

    def work(workspace: Any, rank: int) -> Any:
        workspace.all_reduce(ones())
        with pytest.raises(ArgumentError) as caught:
            (other if rank == odd else usual)(workspace)
        return str(caught.value), then_closed(workspace)

    for outcome in outcomes_of(3, work):
        assert outcome.error is None, outcome.trace
        text, later = outcome.value
        assert "tp[0,1,2]: call 2:" in text
        assert f"world rank {odd} came with" in text
        assert usual_text in text
        assert other_text in text
        assert text in later


def test_different_calls_are_told_while_a_third_rank_is_absent() -> None:
    def work(workspace: Any, rank: int) -> str:
        if rank == 1:
            with pytest.raises(ArgumentError) as caught:
                time.sleep(1.0)  # the others meet without this rank
                workspace.all_reduce(ones(2))
            return str(caught.value)
        with pytest.raises(ArgumentError) as caught:
            workspace.all_reduce(ones(2 + rank))
        return str(caught.value)

    texts = [o.value for o in outcomes_of(3, work)]
    assert "world rank 0 came with all_reduce, 2 tokens" in texts[0]
    assert "world rank 2 came with all_reduce, 4 tokens" in texts[0]
    assert texts[1:] == [texts[0]] * 2


def test_each_wait_of_a_call_has_its_own_deadline() -> None:
    """Ranks come at 0, 4 and 8 s with a deadline of 7 s: nobody waits much longer than 4 s for any one rank.

    A signal handler keeps rank 0 out of the kernel while rank 1 comes, so that its wait ends without another sleep.
    """

    def work(workspace: Any, rank: int) -> float:
        workspace.all_reduce(ones())
        if rank == 0:
            signal.signal(signal.SIGALRM, lambda _number, _frame: time.sleep(2.0))
            signal.setitimer(signal.ITIMER_REAL, 3.0)
        time.sleep(4.0 * rank)
        return float(workspace.all_reduce(ones())[0, 0])

    outcomes = outcomes_of(3, work, timeout_s=7.0)
    assert [o.value for o in outcomes] == [3.0, 3.0, 3.0], [o.error for o in outcomes]


def test_a_sleeping_rank_is_woken_by_its_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that nobody wakes would sleep for a slice, longer than this test may take."""
    monkeypatch.setattr(shm, "SLICE_S", 1000.0)
    board = Board()

    def work(workspace: Any, rank: int) -> float:
        for i in range(3):
            if rank == 0:
                board[i] = 1.0
            else:
                board.wait_for(i)
                board.wait_for(9)
                wait_until_asleep(int(board[9]))
            workspace.all_reduce(ones())
        return 1.0

    def tell(pids: Sequence[int]) -> None:
        board[9] = float(pids[0])

    assert [o.value for o in outcomes_of(2, work, timeout_s=2000.0, while_running=tell)] == [1.0, 1.0]


def test_a_refused_call_leaves_the_workspace_good() -> None:
    def work(workspace: Any, rank: int) -> float:
        with pytest.raises(CapacityError, match="65 tokens asked, prepared for at most 64"):
            workspace.all_reduce(ones(65))
        with pytest.raises(ArgumentError, match="not contiguous"):
            workspace.all_reduce(ones(4)[::2])
        return float(workspace.all_reduce(ones())[0, 0])

    assert [o.value for o in outcomes_of(2, work)] == [2.0, 2.0]


def test_a_peer_that_closes_is_named_at_once() -> None:
    def work(workspace: Any, rank: int) -> str:
        workspace.all_reduce(ones())
        if rank == 1:
            workspace.close()
            workspace.close()
            assert "closed" in then_closed(workspace)
            return ""
        with pytest.raises(ClosedError) as caught:
            workspace.all_reduce(ones())
        return str(caught.value)

    text = outcomes_of(2, work)[0].value
    assert text == "tp[0,1]: world rank 1 closed its workspace before call 2; rebuild the group"


def test_an_error_that_nobody_foresaw_inside_a_call_is_one_error_on_every_rank() -> None:
    def work(workspace: Any, rank: int) -> tuple[str, str, str]:
        workspace.all_reduce(ones())
        if rank == 1:
            workspace._run_sum = lambda *_: int("no number")
        with pytest.raises(CallFailedError) as caught:
            workspace.all_reduce(ones())
        return str(caught.value), type(caught.value.__cause__).__name__, then_closed(workspace)

    ended = [o.value for o in outcomes_of(3, work)]
    assert ended[0][0].startswith("tp[0,1,2]: all_reduce failed on world rank 1: ValueError: invalid literal for int()")
    assert [text for text, _, _ in ended] == [ended[0][0]] * 3
    assert ended[1][1] == "ValueError"


def test_a_second_thread_is_refused_while_the_first_waits() -> None:
    board = Board()

    def work(workspace: Any, rank: int) -> Any:
        if rank == 1:
            board.wait_for(0)
            return float(workspace.all_reduce(ones())[0, 0])
        seen: list[Any] = []
        thread = threading.Thread(target=lambda: seen.append(float(workspace.all_reduce(ones())[0, 0])))
        thread.start()
        wait_until_asleep(os.getpid(), thread.native_id)
        with pytest.raises(ArgumentError, match="another call is not over yet"):
            workspace.all_reduce(ones())
        board[0] = 1.0
        thread.join()
        return seen

    assert [o.value for o in outcomes_of(2, work)] == [[2.0], 2.0]
