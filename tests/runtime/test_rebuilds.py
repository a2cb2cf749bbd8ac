"""Pins what a rebuild or an opening that fails, or is interrupted, leaves behind: a story for all, and a way on."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.forked import run_outcomes, run_ranks
from tests.ports import free_port
from tests.runtime.layouts import HIDDEN, fused_powers
from workbench.errors import (
    CallFailedError,
    ClosedError,
    DeadlineError,
    PeerDeadError,
    PlanMismatchError,
    WorkbenchError,
)
from workbench.ranks import GroupMap
from workbench.runtime import Session, joining

TWO = GroupMap.custom({"tp": [[0, 1]]})
CHAIN = GroupMap.custom({"tp": [[0, 1, 2]], "pp": [[0], [1, 2]]})
SIZES: dict[str, Any] = {"hidden": HIDDEN, "dtype": torch.float32, "max_tokens": 4}


def test_a_rebuild_that_failed_refuses_calls_and_the_next_one_prepares_what_was_prepared() -> None:
    def body(rank: int) -> tuple[str, list[str], float, str]:
        with Session(TWO, device="cpu", timeout_s=1) as s:
            s.prepare("tp", **SIZES, backend="shm")
            s.freeze()
            s.barrier(group="tp")
            time.sleep(1.5 * rank)  # rank 1 comes when rank 0 has given up
            with pytest.raises(DeadlineError) as e:
                s.rebuild()
            refused = []
            for call in (
                lambda: s.prepare("tp", **SIZES),
                lambda: s.barrier(group="tp"),
                lambda: s.torch_group("tp"),
            ):
                with pytest.raises(ClosedError) as refusal:
                    call()
                refused.append(str(refusal.value))
            meet(rank)
            s.rebuild()
            total = float(fused_powers(s, "tp", 1).residual[0, 0])
            with pytest.raises(WorkbenchError):
                s.prepare("tp", **{**SIZES, "max_tokens": 64})
            return str(e.value), refused, total, s.why("tp").choice

    ended = run_ranks(2, body)
    assert "waited 1 s for world rank 1 of 2" in ended[0][0]
    for _, refused, total, choice in ended:
        advice = "the last rebuild failed, so this session has no groups; rebuild() on every rank"
        assert refused == [f"{op}: {advice}" for op in ("prepare", "barrier", "torch_group")]
        assert (total, choice) == (8.0, "shm")


def test_how_many_groups_call_at_one_time_is_agreed_and_kept_by_a_rebuild() -> None:
    def body(rank: int) -> tuple[str, bool, bool]:
        with Session(TWO, device="cpu", timeout_s=20) as s:
            with pytest.raises(PlanMismatchError) as e:
                s.prepare("tp", **SIZES, concurrent_groups=1 + rank)
            s.prepare("tp", **SIZES)
            alone = _workspace(s)
            s.prepare("tp", **SIZES, concurrent_groups=2)
            kept = _workspace(s)
            s.prepare("tp", **SIZES)  # less than what is there
            covered = alone is not kept is _workspace(s)
            s.rebuild()
            return str(e.value), covered, _workspace(s).request.concurrent_groups == 2

    for told, covered, again in run_ranks(2, body):
        assert "world rank 1: hidden=64" in told
        assert "concurrent_groups=2" in told
        assert (covered, again) == (True, True)


def _workspace(s: Session) -> Any:
    (prepared,) = s._calls.bound("tp").prepared.values()
    return prepared.parts[0].workspace


def meet(rank: int) -> None:
    """Return on both ranks at once, by the job's own store."""
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=20))
    store.set(f"here{rank}", "")
    store.wait(["here0", "here1"])


def test_ctrl_c_in_an_opening_session_frees_the_others_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: int) -> tuple[str, float]:
        if rank == 1:
            monkeypatch.setattr(joining, "exchange_hello", interrupted)
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt if rank else ClosedError) as e:
            Session(TWO, device="cpu", timeout_s=30)
        waited_s = time.monotonic() - started
        time.sleep(1.0 * rank)  # its process lives on
        return str(e.value), waited_s

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt("of the user")

    told, waited_s = run_ranks(2, body)[0]
    assert told == "custom: opening a Session on world rank 1 was interrupted: KeyboardInterrupt"
    assert waited_s < 15


def test_an_error_after_the_groups_of_a_first_opening_is_told_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise TypeError("a bug of ours")

    def body(_: int) -> tuple[str, bool]:
        monkeypatch.setattr(joining, "bind_group", broken)
        with pytest.raises(CallFailedError) as e:
            Session(TWO, device="cpu", timeout_s=10)
        return str(e.value).partition("; ")[0], dist.is_initialized()

    (told, left), other = run_ranks(2, body)
    assert (told, left) == other
    assert told[: -len("0: TypeError: a bug of ours")] == "custom: opening a Session failed on world rank "
    assert not left


@pytest.mark.parametrize("where", ["opening", "gather", "capture", "rebuild"])
def test_a_death_of_the_rank_that_holds_the_store_is_told_as_its_death(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()

    def die(*_: Any, **__: Any) -> None:
        os._exit(7)

    def step(rank: int) -> None:
        if rank == 0 and where == "opening":
            monkeypatch.setattr(joining, "make_groups", die)
        with Session(CHAIN, device="cpu", timeout_s=10) as s:
            s.prepare("tp", **SIZES)
            fused_powers(s, "tp", 1)
            s.barrier(group="tp")
            if rank == 0:
                time.sleep(0.5)  # the others wait by now
                die()
            if where == "rebuild":
                s.rebuild()
            if where == "capture":
                with s.capture():
                    pass
            with pytest.raises(PeerDeadError):
                s.gather_object(rank, group="tp")
            s.gather_object(rank, group="pp")  # without the dead one, and without the store

    def body(rank: int) -> tuple[str, tuple[int, ...]]:
        monkeypatch.setenv("MASTER_PORT", port)
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
        with pytest.raises(PeerDeadError) as e:
            step(rank)
        time.sleep(0.3)  # lives on
        return str(e.value), e.value.dead

    for outcome in run_outcomes(3, body)[1:]:
        told, dead = outcome.value or ("", outcome.trace)
        in_hello = where == "opening" and "the job's store answers no more" in told  # who is who is not known yet
        assert dead == (() if in_hello else (0,)), told
