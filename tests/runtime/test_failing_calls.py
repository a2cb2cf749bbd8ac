"""Pins what ranks get when one of them fails for a reason that nobody foresaw: the same error on each, soon, by name.

The reasons are real where they can be: limits on memory, files and descriptors, and the interpreter's own on recursion.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forked import run_outcomes, run_ranks
from tests.runtime.layouts import HIDDEN, fused_powers
from workbench.backends import build, shm
from workbench.errors import CallFailedError, ClosedError, PeerDeadError, WorkbenchError
from workbench.ranks import GroupMap
from workbench.runtime import Session, selection, session

TWO = GroupMap.custom({"tp": [[0, 1]]})
CHAIN = GroupMap.custom({"tp": [[0, 1], [2]], "pp": [[0, 2], [1]]})
SIZES: dict[str, Any] = {"hidden": HIDDEN, "dtype": torch.float32, "max_tokens": 4}
BIG_HIDDEN, BIG_TOKENS = 8192, 4096  # 128 MiB a tensor

Heard = tuple[str, str, str, float]
"""The error's class, its text, the class of its cause, seconds until it came."""


def hear(call: Callable[[], Any]) -> Heard:
    started = time.monotonic()
    with pytest.raises(WorkbenchError) as e:
        call()
    cause = e.value.__cause__
    return type(e.value).__name__, str(e.value), type(cause).__name__, time.monotonic() - started


def alike(heard: list[Heard], *, failed: int, cause: str = "", within_s: float = 15.0) -> str:
    """The one text that all ranks heard, soon, the failing one with the cause."""
    assert len({(kind, text) for kind, text, _, _ in heard}) == 1, heard
    assert f"world rank {failed}: " in heard[0][1]
    assert max(seconds for *_, seconds in heard) < within_s
    if cause:
        assert heard[failed][2] == cause
    return heard[0][1]


@contextmanager
def limited(what: int, soft: int) -> Iterator[None]:
    """This process under a limit of the system."""
    before = resource.getrlimit(what)
    resource.setrlimit(what, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


def little_memory() -> Any:
    """Next to no address space beyond what is mapped now."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return limited(resource.RLIMIT_AS, mapped + (16 << 20))


def no_descriptor() -> Any:
    """No descriptor beyond those that are open now."""
    lowest_free = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest_free)
    return limited(resource.RLIMIT_NOFILE, lowest_free)


def close_watches() -> None:
    """What a program does that closes descriptors which are not its own: here those that watch peers' processes."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            if "pidfd" in os.readlink(f"/proc/self/fd/{fd}"):
                os.close(int(fd))


def opened(group_map: GroupMap = TWO, backend: str | None = None) -> Session:
    s = Session(group_map, device="cpu", timeout_s=30)
    s.prepare("tp", **SIZES, backend=backend)
    return s


def raising(error: Exception) -> Callable[..., Any]:
    def broken(*_: Any, **__: Any) -> Any:
        raise error

    return broken


PLACES = {
    "asked": (shm, "probe"),
    "room": (shm, "room"),
    "own memory": (shm, "OwnSegment"),
    "peers' memory": (shm, "map_segment"),
    "opened": (shm, "load_library"),
    "taken into use": (selection, "Prepared"),
    "probed": (session, "probe_facts"),
}


@pytest.mark.parametrize("error", [TypeError("a bug of ours"), RecursionError("too deep"), KeyError("x")], ids=repr)
@pytest.mark.parametrize("place", PLACES)
def test_a_bug_on_one_rank_in_any_step_of_prepare_is_one_error_on_all(
    place: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name = PLACES[place]

    def body(rank: int) -> Heard:
        with Session(TWO, device="cpu", timeout_s=30) as s:
            if rank == 1:
                monkeypatch.setattr(module, name, raising(error))

            def prepare_and_call() -> None:
                s.prepare("tp", **SIZES)
                fused_powers(s, "tp", 1)  # a member that was done in time hears it here

            return hear(prepare_and_call)

    ended = run_ranks(2, body)
    text = alike(ended, failed=1, cause=type(error).__name__)
    assert ended[0][0] == "CallFailedError"
    assert text.startswith("tp[0,1]: ")
    assert f" failed on world rank 1: {type(error).__name__}: {error}; its traceback there has the cause" in text


def test_a_rank_that_failed_after_the_last_vote_and_lives_on_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: int) -> Heard:
        with Session(TWO, device="cpu", timeout_s=30) as s:
            if rank == 1:
                monkeypatch.setattr(selection, "Prepared", raising(TypeError("a bug of ours")))
                heard = hear(lambda: s.prepare("tp", **SIZES, backend="shm"))
                time.sleep(2.0)
                return heard
            s.prepare("tp", **SIZES, backend="shm")
            heard = hear(lambda: fused_powers(s, "tp", 1))
            assert heard[3] < 1.5  # before the other leaves its session
            return heard

    assert alike(run_ranks(2, body), failed=1).startswith("tp[0,1]: prepare failed on world rank 1: TypeError: a bug")


@pytest.mark.parametrize("later", [False, True], ids=["first call", "later call"])
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_memory_that_ends_inside_a_call_of_one_rank_is_one_error_on_all(backend: str, later: bool) -> None:
    def body(rank: int) -> tuple[Heard, str]:
        with Session(TWO, device="cpu", timeout_s=30) as s:
            s.prepare("tp", hidden=BIG_HIDDEN, dtype=torch.float32, max_tokens=BIG_TOKENS, backend=backend)
            x = torch.ones(BIG_TOKENS, BIG_HIDDEN)
            if later:
                s.all_reduce(x[:1], group="tp")
            if rank == 1:
                time.sleep(1.0)  # the other waits in its call by now
                with little_memory():
                    heard = hear(lambda: s.all_reduce(x, group="tp"))
            else:
                heard = hear(lambda: [s.all_reduce(x, group="tp") for _ in range(2)])
            return heard, hear(lambda: s.all_reduce(x[:1], group="tp"))[0]

    ended = run_ranks(2, body)
    text = alike([heard for heard, _ in ended], failed=1, cause="RuntimeError")
    assert "tp[0,1]: all_reduce failed on world rank 1: RuntimeError: " in text
    assert "allocate" in text
    assert [after for _, after in ended] == ["ClosedError"] * 2


LIMITS = {
    "file size": (lambda: limited(resource.RLIMIT_FSIZE, 1), "File too large"),
    "memory": (little_memory, "Cannot allocate memory"),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_a_limit_that_one_rank_meets_in_prepare_takes_the_path_from_all_and_says_why(limit: str) -> None:
    build.build_cpu()  # compiled before, so that the limit is met by what is asked for

    def body(rank: int) -> tuple[str, str, float]:
        enter, _ = LIMITS[limit]
        with Session(TWO, device="cpu", timeout_s=30) as s:
            sizes = {**SIZES, "hidden": BIG_HIDDEN, "max_tokens": BIG_TOKENS}
            if rank == 1:
                with enter():
                    plan = s.prepare("tp", **sizes)
            else:
                plan = s.prepare("tp", **sizes)
            total = s.all_reduce(torch.full((1, BIG_HIDDEN), 2.0**rank), group="tp")
            return plan.choice, dict(plan.rejected)["shm"], float(total[0, 0])

    ended = run_ranks(2, body)
    assert ended[0] == ended[1]
    choice, reason, total = ended[0]
    assert (choice, total) == ("gloo", 3.0)
    assert "world rank 1: " in reason
    assert LIMITS[limit][1] in reason


def under(limit: Callable[[], Any], wanted: bool, call: Callable[[], Any]) -> Any:
    """call(), under the limit if it is wanted."""
    if not wanted:
        return call()
    with limit():
        return call()


def test_a_rank_without_descriptors_is_named_alike_by_prepare_and_the_session_goes_on() -> None:
    def body(rank: int) -> tuple[Heard, list[float]]:
        with Session(TWO, device="cpu", timeout_s=30) as s:
            heard = under(no_descriptor, rank == 1, lambda: hear(lambda: s.prepare("tp", **SIZES)))
            s.prepare("tp", **SIZES)
            return heard, fused_powers(s, "tp", 1).residual.unique().tolist()

    ended = run_ranks(2, body)
    text = alike([heard for heard, _ in ended], failed=1, cause="OSError")
    assert text.startswith("tp[0,1]: telling facts failed; world rank 1: [Errno 24] Too many open files")
    assert [total for _, total in ended] == [[8.0]] * 2


def test_a_rank_without_descriptors_is_named_alike_when_a_session_is_opened() -> None:
    def body(rank: int) -> Heard:
        with opened():  # on its default group: torch itself ends a process that has no descriptor for one
            return under(no_descriptor, rank == 1, lambda: hear(lambda: Session(TWO, device="cpu", timeout_s=30)))

    text = alike(run_ranks(2, body), failed=1, cause="OSError")
    assert text.startswith("custom: opening a Session failed on world rank 1: OSError: [Errno 24] Too many open files")


def test_a_rank_that_fails_frees_those_that_wait_for_a_rank_that_waits_for_it() -> None:
    """World rank 1 fails in tp[0,1]; world rank 2 waits for world rank 0 in pp[0,2]. All hear of world rank 1."""

    def body(rank: int) -> Heard:
        with pytest.raises(CallFailedError), Session(CHAIN, device="cpu", timeout_s=30) as s:
            for kind in ("tp", "pp"):
                s.prepare(kind, **SIZES)
            if rank == 1:
                s._groups[0, 1].channel._place = raising(TypeError("mine"))  # type: ignore[union-attr, assignment]

            def step() -> None:
                if rank != 2:
                    s.gather_object(rank, group="tp")
                s.all_reduce(torch.ones(1, HIDDEN), group="pp")

            heard = hear(step)
            time.sleep(1.0 if rank == 1 else 0.0)  # its process lives on
            raise CallFailedError("as the program would, from the block")
        return heard

    ended = run_ranks(3, body)
    text = alike(ended, failed=1, cause="TypeError")
    assert text.startswith("tp[0,1]: gather_object failed on world rank 1: TypeError: ")


def test_a_rank_that_waits_for_one_that_left_over_a_third_ones_death_hears_of_the_third() -> None:
    """World rank 1 dies in tp[0,1]; world rank 0 leaves over it; world rank 2 waits for world rank 0 in pp[0,2]."""

    def body(rank: int) -> tuple[int, ...]:
        with pytest.raises(PeerDeadError) as e, Session(CHAIN, device="cpu", timeout_s=30) as s:
            for kind in ("tp", "pp"):
                s.prepare(kind, **SIZES)
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == 0:
                s.all_reduce(torch.ones(1, HIDDEN), group="tp")
            s.all_reduce(torch.ones(1, HIDDEN), group="pp")
        time.sleep(1.0 if rank == 0 else 0.0)  # its process lives on
        return e.value.dead

    outcomes = run_outcomes(3, body)
    assert [outcomes[rank].value for rank in (0, 2)] == [(1,), (1,)], [o.trace for o in outcomes]


def test_an_error_in_one_ranks_close_is_every_ranks_and_all_is_given_back() -> None:
    def body(rank: int) -> tuple[Heard, bool]:
        s = opened(backend="shm")
        if rank == 1:
            close_watches()
        heard = hear(s.close)
        s.close()
        return heard, torch.distributed.is_initialized()

    ended = run_ranks(2, body)
    text = alike([heard for heard, _ in ended], failed=1, cause="OSError")
    assert text.startswith("tp[0,1]: close failed; world rank 1: [Errno 9] Bad file descriptor")
    assert [left for _, left in ended] == [False, False]


def test_an_error_in_one_ranks_teardown_is_told_to_all_by_the_rebuild_that_meets_it() -> None:
    def body(rank: int) -> tuple[Heard, list[float]]:
        with opened(backend="shm") as s:
            if rank == 1:
                close_watches()
            heard = hear(s.rebuild)
            s.rebuild()
            s.prepare("tp", **SIZES)
            return heard, fused_powers(s, "tp", 1).residual.unique().tolist()

    ended = run_ranks(2, body)
    text = alike([heard for heard, _ in ended], failed=1, cause="OSError")
    assert text.startswith("custom: opening a Session failed on world rank 1: OSError: [Errno 9] Bad file descriptor")
    assert [total for _, total in ended] == [[8.0]] * 2


def test_an_error_inside_one_ranks_replay_is_one_error_on_all() -> None:
    def body(rank: int) -> Heard:
        with Session(TWO, device="cpu", timeout_s=30) as s:
            s.prepare("tp", hidden=BIG_HIDDEN, dtype=torch.float32, max_tokens=BIG_TOKENS, backend="shm")
            with s.capture() as c:
                s.all_reduce(torch.ones(BIG_TOKENS, BIG_HIDDEN), group="tp")
            return under(little_memory, rank == 1, lambda: hear(c.replay))

    text = alike(run_ranks(2, body), failed=1, cause="RuntimeError")
    assert text.startswith("tp[0,1]: all_reduce failed on world rank 1: RuntimeError: ")


def test_recursion_without_end_on_one_rank_frees_the_others_at_the_end_of_its_block() -> None:
    """Not even the first line of a call can run, so nothing is told before."""

    def body(rank: int) -> tuple[str, float]:
        def deeper(s: Session) -> None:
            deeper(s)

        started = time.monotonic()
        with pytest.raises(RecursionError if rank else ClosedError) as e, opened() as s:
            if rank == 1:
                deeper(s)
            fused_powers(s, "tp", 1)
        waited_s = time.monotonic() - started
        time.sleep(1.0 * rank)  # its process lives on
        return str(e.value), waited_s

    (told, waited_s), _ = run_ranks(2, body)
    assert told == "tp[0,1]: world rank 1 left its session: RecursionError: maximum recursion depth exceeded"
    assert waited_s < 15
