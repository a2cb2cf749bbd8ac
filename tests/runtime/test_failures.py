"""Pins what members learn when one of them dies, stays away, or is interrupted: who, soon, and without a hang.

Times are asserted with wide margins and printed; the machine that runs this is small.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

import pytest
import torch

from tests.forked import Outcome, run_outcomes
from tests.runtime.layouts import FOUR, HIDDEN, fused_powers
from workbench.errors import ClosedError, DeadlineError, PeerDeadError
from workbench.runtime import Session


def _ready(tmp_path) -> tuple:
    """Ranks say when they are about to enter the last call; the parent waits for that."""

    def say(rank: int) -> None:
        (tmp_path / f"ready{rank}").touch()

    def wait(ranks: Sequence[int]) -> None:
        deadline = time.monotonic() + 20
        while not all((tmp_path / f"ready{r}").exists() for r in ranks):
            assert time.monotonic() < deadline, "ranks did not get ready"
            time.sleep(0.01)

    return say, wait


def _call(session: Session, how: str) -> None:
    if how == "gather":
        session.gather_object(session.world_rank, group="tp")
    else:
        fused_powers(session, "tp", 1)


def _prepared(how: str, timeout_s: float) -> Session:
    session = Session(FOUR, device="cpu", timeout_s=timeout_s)
    if how != "gather":
        session.prepare("tp", hidden=HIDDEN, dtype=torch.float32, max_tokens=1, backend=how)
    return session


@pytest.mark.parametrize("how", ["shm", "gloo", "gather"])
def test_a_rank_killed_while_others_wait_is_named_soon(tmp_path, how: str) -> None:
    say, wait = _ready(tmp_path)
    killed_at = []

    def body(rank: int) -> tuple[str, tuple[int, ...], float]:
        with pytest.raises(PeerDeadError) as e, _prepared(how, 30) as s:
            say(rank)
            if rank == 2:
                time.sleep(60)
            _call(s, how)
        return str(e.value), e.value.dead, time.monotonic()

    def kill(pids: Sequence[int]) -> None:
        wait(range(4))
        time.sleep(0.3)
        os.kill(pids[2], signal.SIGKILL)
        killed_at.append(time.monotonic())

    outcomes = run_outcomes(4, body, timeout_s=40, while_running=kill)
    assert outcomes[2].signal == signal.SIGKILL
    for rank in (0, 1, 3):
        text, dead, noticed_at = _value(outcomes[rank])
        print(f"{how}: world rank {rank} noticed after {noticed_at - killed_at[0]:.3f} s")
        assert dead == (2,)
        assert "world rank 2" in text
        assert noticed_at - killed_at[0] < 5


@pytest.mark.parametrize("how", ["shm", "gloo", "gather"])
def test_a_rank_that_never_comes_is_named_at_the_deadline(tmp_path, how: str) -> None:
    say, wait = _ready(tmp_path)

    def body(rank: int) -> tuple[str, tuple[int, ...]] | None:
        with _prepared(how, 1.5) as s:
            if rank == 1:
                wait((0, 2, 3))  # alive, and nowhere near the call, until they have given up
                os._exit(0)
            with pytest.raises(DeadlineError) as e:
                _call(s, how)
            say(rank)
            if how != "gather":
                with pytest.raises(ClosedError):
                    _call(s, how)
            return str(e.value), e.value.missing

    started = time.monotonic()
    outcomes = run_outcomes(4, body, timeout_s=40)
    for rank in (0, 2, 3):
        text, missing = _value(outcomes[rank])
        assert missing == (1,), text
        assert "world rank 1" in text
        assert outcomes[rank].elapsed_s < 20
    print(f"{how}: all ended after {time.monotonic() - started:.1f} s")


@pytest.mark.parametrize("how", ["shm", "gloo", "gather"])
def test_ctrl_c_in_a_wait_comes_through_at_once_and_close_does_not_hang(tmp_path, how: str) -> None:
    say, wait = _ready(tmp_path)
    sent_at = []

    def body(rank: int) -> float:
        with pytest.raises(KeyboardInterrupt), _prepared(how, 30) as s:
            say(rank)
            if rank == 3:
                time.sleep(60)
            _call(s, how)
        return time.monotonic()

    def interrupt(pids: Sequence[int]) -> None:
        wait(range(4))
        time.sleep(0.3)
        sent_at.append(time.monotonic())
        for pid in pids:
            os.kill(pid, signal.SIGINT)

    for outcome in run_outcomes(4, body, timeout_s=40, while_running=interrupt):
        print(f"{how}: world rank {outcome.rank} left after {_value(outcome) - sent_at[0]:.3f} s")
        assert _value(outcome) - sent_at[0] < 5


def test_a_failed_session_can_be_followed_by_a_new_one() -> None:
    def body(rank: int) -> list[float]:
        s = _prepared("gather", 1.5)
        if rank == 1:
            time.sleep(4)  # too late for the others
        with pytest.raises(DeadlineError):
            _call(s, "gather")
        s.close()
        with Session(FOUR, device="cpu", timeout_s=20) as again:
            again.prepare("tp", hidden=HIDDEN, dtype=torch.float32, max_tokens=1)
            return fused_powers(again, "tp", 1).residual.unique().tolist()

    outcomes = run_outcomes(4, body, timeout_s=60)
    assert [_value(o) for o in outcomes] == [[20.0]] * 4


def _value(outcome: Outcome):
    assert outcome.error is None, f"world rank {outcome.rank}: {outcome.trace}"
    assert outcome.signal == 0, f"world rank {outcome.rank} was killed by signal {outcome.signal}"
    return outcome.value
