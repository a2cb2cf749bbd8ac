"""Pins what careless and unlucky programs get from a Session: typed errors alike on all ranks, and nothing left behind.

Found by trying to break it; each of these once hung, crashed a rank, or cost a healthy rank its session.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.forked import run_outcomes, run_ranks
from tests.runtime.layouts import HIDDEN, fused_powers
from workbench.backends import shm
from workbench.errors import ArgumentError, CapacityError, ClosedError, PeerDeadError, PlanMismatchError
from workbench.ranks import GroupMap
from workbench.runtime import Session
from workbench.runtime.channel import GlooChannel

TWO = GroupMap.custom({"tp": [[0, 1]]})
THREE = GroupMap.custom({"tp": [[0, 1, 2]]})
SIZES: dict[str, Any] = {"hidden": HIDDEN, "dtype": torch.float32, "max_tokens": 4}


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def opened(group_map: GroupMap, backend: str | None = None, timeout_s: float = 20) -> Session:
    session = Session(group_map, device="cpu", timeout_s=timeout_s)
    session.prepare("tp", **SIZES, backend=backend)
    return session


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_what_a_session_makes_for_itself_ignores_the_default_device_and_dtype(backend: str) -> None:
    """Engines build models under a default device; "meta" stands for any that is not the CPU."""

    def body(rank: int) -> tuple[Any, ...]:
        torch.set_default_device("meta")
        torch.set_default_dtype(torch.float64)
        with opened(TWO, backend) as s:
            told = s.broadcast_object({"from": rank}, group="tp")
            x = s.empty((1, HIDDEN), torch.float32, group="tp").fill_(2.0**rank)
            return told, s.empty((0, HIDDEN), torch.float32, group="tp").device.type, s.all_reduce(x, group="tp")[0, 0]

    assert run_ranks(2, body) == [({"from": 0}, "cpu", 3.0)] * 2


def test_a_default_group_that_somebody_destroyed_does_not_keep_a_session_from_rebuilding_or_closing() -> None:
    def body(rank: int) -> list[float]:
        with opened(TWO) as s:
            dist.destroy_process_group()
            s.rebuild()
            sums = fused_powers(s, "tp", 1).residual.unique().tolist()
            dist.destroy_process_group()
        return sums

    assert run_ranks(2, body) == [[8.0], [8.0]]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda s, x: s.all_reduce(x, group=["tp"]), "group=a list: a plain tensor needs group=KIND, a text"),
        (lambda s, x: s.all_reduce(x, group=None), "group=null: a plain tensor needs group=KIND"),
        (lambda s, x: s.all_reduce(x, group="tp", label=None), "label=null; allowed: a text of at most 256 characters"),
        (lambda s, x: s.all_reduce(x, group="tp", label=object()), "label=object; allowed"),
        (lambda s, x: s.all_reduce(x, group="tp", label="x" * 257), "allowed: a text of at most 256"),
        (lambda s, _: s.why("tp", tokens="4"), "tokens='4'; allowed: a whole number from 0 on"),
        (lambda s, _: s.why("tp", tokens=-1), "tokens=-1; allowed"),
        (lambda s, _: s.empty(4, torch.float32, group="tp"), "shape=4; allowed: a tuple of whole numbers"),
        (lambda s, _: s.empty((1.5, HIDDEN), torch.float32, group="tp"), r"shape=\(1\.5, 64\); allowed"),
        (
            lambda s, _: s.broadcast_object(1, group="tp", group_root="0"),
            "group_root='0'; allowed: a place in the group",
        ),
        (lambda s, _: s.broadcast_object(1, group="tp", group_root=True), "group_root=True; allowed"),
        (
            lambda s, _: s.prepare("tp", **SIZES, concurrent_groups=0),
            "concurrent_groups=0; allowed: a whole number from 1 to 16",
        ),
        (lambda s, _: s.gather_object(nested(100_000), group="tp"), "gather_object of list: maximum recursion depth"),
    ],
    ids=[
        *("list", "none", "no-label", "object", "long", "text", "negative", "number", "fraction"),
        *("root", "root-true", "concurrent", "deep"),
    ],
)
def test_an_argument_of_an_odd_type_is_refused_by_name_and_harms_nobody(call: Any, told: str) -> None:
    def body(rank: int) -> list[float]:
        with opened(TWO) as s:
            with pytest.raises(ArgumentError, match=told):
                call(s, torch.ones(1, HIDDEN))
            return fused_powers(s, "tp", 1).residual.unique().tolist()

    assert run_ranks(2, body) == [[8.0], [8.0]]


def test_a_refused_shape_takes_no_memory_that_peers_read() -> None:
    def body(rank: int) -> str:
        with opened(TWO) as s:
            for shape in ((1.5, HIDDEN), (-1, HIDDEN)):
                with pytest.raises(ArgumentError):
                    s.empty(shape, torch.float32, group="tp")
            with pytest.raises(CapacityError) as e:
                s.empty((1000, HIDDEN), torch.float32, group="tp")
            return str(e.value)

    assert all(", 0 of 4096 bytes in use" in told for told in run_ranks(2, body))


def test_a_forked_child_cannot_speak_for_its_parent_nor_take_leave_in_its_name() -> None:
    def body(rank: int) -> list[float]:
        with opened(TWO) as s:
            child = os.fork()
            if child == 0:
                refused = 0
                try:
                    with s:
                        for speak in (
                            lambda: s.barrier(group="tp"),
                            lambda: s.gather_object(1, group="tp"),
                            lambda: s.prepare("tp", **{**SIZES, "max_tokens": 9}),
                            s.rebuild,
                        ):
                            with pytest.raises(ClosedError, match="the session belongs to process"):
                                speak()
                            refused += 1
                        raise SystemExit
                finally:
                    s.close()
                    os._exit(refused)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
            s.barrier(group="tp")
            return fused_powers(s, "tp", 1).residual.unique().tolist()

    assert run_ranks(2, body) == [[8.0], [8.0]]


def test_a_rebuild_keeps_a_session_frozen_so_that_bigger_calls_still_take_the_fallback() -> None:
    def body(rank: int) -> tuple[list[float], str]:
        with opened(TWO) as s:
            s.freeze()
            s.rebuild()
            return fused_powers(s, "tp", 9).residual.unique().tolist(), s.why("tp", tokens=9).choice

    assert run_ranks(2, body) == [([8.0], "gloo")] * 2


def test_deadlines_that_differ_are_refused_alike() -> None:
    """With 2 s here and 8 s there, one rank would give up on another that still waits, each with another error."""

    def body(rank: int) -> str:
        with pytest.raises(PlanMismatchError) as e:
            Session(TWO, device="cpu", timeout_s=2 if rank else 8)
        return str(e.value)

    told = "world rank 0 came with 8 s; world rank 1 came with 2 s; pass the same timeout_s= or set WORKBENCH_TIMEOUT_S"
    assert run_ranks(2, body) == [f"the timeouts of the ranks differ, so no group was made: {told} alike"] * 2


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"backend": object()}, "backend=object; allowed: the name of one, as text, or None for any"),
        ({"backend": "x" * 65}, f"backend='{'x' * 60}'...; allowed"),
        ({"hidden": "x" * 100_000}, f"hidden='{'x' * 60}'...; allowed"),
        ({"dtype": torch.float64}, "dtype=torch.float64; allowed"),
    ],
    ids=["object", "long", "very-long", "dtype"],
)
def test_what_one_member_cannot_mean_is_every_members_short_error(asked: dict[str, Any], told: str) -> None:
    def body(rank: int) -> str:
        with Session(TWO, device="cpu", timeout_s=20) as s:
            with pytest.raises(ArgumentError) as e:
                s.prepare("tp", **{**SIZES, **(asked if rank else {})})
            s.prepare("tp", **SIZES)
            assert fused_powers(s, "tp", 1).residual.unique().tolist() == [8.0]
            return str(e.value)

    texts = run_ranks(2, body)
    assert texts[0] == texts[1]
    assert f"world rank 1 asked for what cannot be: {told}" in texts[0]
    assert len(texts[0]) < 300


def test_a_second_thread_on_gloo_is_refused_where_it_would_mix_up_messages() -> None:
    """gloo ends the process on a message of another size than expected."""

    def body(rank: int) -> tuple[float, str]:
        with opened(TWO, "gloo") as s:
            if rank:
                time.sleep(1.0)
                return float(s.all_reduce(torch.ones(1, HIDDEN), group="tp")[0, 0]), ""
            sums: list[float] = []
            thread = threading.Thread(
                target=lambda: sums.append(float(s.all_reduce(torch.ones(1, HIDDEN), group="tp")[0, 0]))
            )
            thread.start()
            time.sleep(0.3)
            for call in (lambda: s.all_reduce(torch.ones(1, HIDDEN), group="tp"), lambda: s.barrier(group="tp")):
                with pytest.raises(ArgumentError) as e:
                    call()
            thread.join()
            return sums[0], str(e.value)

    (first, told), (second, _) = run_ranks(2, body)
    assert (first, second) == (2.0, 2.0)
    assert told.startswith("tp[0,1] on world rank 0: another call is not over yet")


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_signal_handler_that_calls_in_the_midst_of_a_call_is_refused_and_the_call_is_right(
    backend: str, tmp_path: Path
) -> None:
    handled = tmp_path / "handled"

    def body(rank: int) -> tuple[float, list[str]]:
        told: list[str] = []

        def call_again(*_: object) -> None:
            with pytest.raises(ArgumentError) as e:
                s.all_reduce(torch.ones(2, HIDDEN), group="tp")
            told.append(str(e.value))
            handled.touch()

        with opened(TWO, backend) as s:
            if rank == 0:
                signal.signal(signal.SIGALRM, call_again)
                signal.setitimer(signal.ITIMER_REAL, 0.2)
            while rank == 1 and not handled.exists():  # so the other waits when the signal comes
                time.sleep(0.01)
            total = float(s.all_reduce(torch.ones(1, HIDDEN), group="tp")[0, 0])
        return total, told

    (first, told), (second, _) = run_ranks(2, body)
    assert (first, second) == (2.0, 2.0)
    assert "another call is not over yet, of another thread or of what a signal handler interrupts" in told[0]


def test_a_rank_that_died_before_a_rebuild_is_named_at_once() -> None:
    def body(rank: int) -> tuple[tuple[int, ...], float]:
        s = opened(THREE, timeout_s=30)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(PeerDeadError) as e:
            s.rebuild()
        return e.value.dead, time.monotonic() - started

    outcomes = run_outcomes(3, body, timeout_s=60)
    for rank in (0, 2):
        assert outcomes[rank].error is None, outcomes[rank].trace
        dead, elapsed_s = outcomes[rank].value
        assert dead == (1,)
        assert elapsed_s < 15


def test_a_rank_killed_with_its_memory_shared_and_not_yet_mapped_leaves_no_memory_behind() -> None:
    pids: list[int] = []

    def body(rank: int) -> tuple[int, ...]:
        gather = GlooChannel.gather

        def die(channel: GlooChannel, value: Any, *, what: str) -> list[Any]:
            if what == "mapping the peers' shared memory":
                os.kill(os.getpid(), signal.SIGKILL)
            return gather(channel, value, what=what)

        with Session(THREE, device="cpu", timeout_s=20) as s:
            if rank == 1:
                GlooChannel.gather = die  # type: ignore[method-assign] # in this rank's process alone
            with pytest.raises(PeerDeadError) as e:
                s.prepare("tp", **SIZES, backend="shm")
        return e.value.dead

    outcomes = run_outcomes(3, body, timeout_s=60, while_running=pids.extend)
    assert [outcomes[rank].value for rank in (0, 2)] == [(1,), (1,)]
    left = [path.name for pid in pids for path in Path("/dev/shm").glob(f"wbk-{pid}-*")]
    assert left == []


def test_a_rank_without_memory_for_a_path_takes_it_from_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: int) -> tuple[str, str]:
        def poor(*_: Any) -> Any:
            raise MemoryError("no page is left")

        if rank == 1:
            monkeypatch.setattr(shm, "room", poor)
        with opened(TWO) as s:
            plan = s.why("tp")
            return plan.choice, dict(plan.rejected)["shm"]

    assert run_ranks(2, body) == [("gloo", "world rank 1: no page is left")] * 2
