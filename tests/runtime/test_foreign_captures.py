"""Pins that a capture which is none of the session's own is noticed by every call, before anything waits or allocates.

On CPU ranks: another session's capture is real; a CUDA graph's is told by a stand-in for torch's question, since no
stream captures here (tests/cuda/check_runtime.py asks the real thing).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.forked import run_ranks
from tests.runtime.layouts import HIDDEN, fused_powers
from workbench.backends.base import Request
from workbench.backends.composed import ComposedWorkspace
from workbench.errors import CaptureError, ClosedError
from workbench.ops import ALL, Limits, Rounding
from workbench.plan import Plan
from workbench.ranks import GroupMap
from workbench.runtime import Session
from workbench.runtime.capture import foreign_capture
from workbench.runtime.prepared import Part, Prepared
from workbench.trace import Recorder

PAIR = GroupMap.custom({"tp": [[0, 1]]})


def opened() -> Session:
    s = Session(PAIR, device="cpu", timeout_s=20)
    s.prepare("tp", hidden=HIDDEN, dtype=torch.float32, max_tokens=4)
    return s


def calls(s: Session) -> dict[str, Callable[[], Any]]:
    x = torch.ones(1, HIDDEN)
    return {
        "all_reduce": lambda: s.all_reduce(x, group="tp"),
        "all_reduce_add_rms_norm": lambda: fused_powers(s, "tp", 1),
        "prepare": lambda: s.prepare("tp", hidden=HIDDEN, dtype=torch.float32, max_tokens=64),
        "freeze": lambda: s.freeze(),
        "rebuild": lambda: s.rebuild(),
        "capture": lambda: s.capture().__enter__(),
        "barrier": lambda: s.barrier(group="tp"),
        "gather_object": lambda: s.gather_object(1, group="tp"),
        "broadcast_object": lambda: s.broadcast_object(1, group="tp"),
        "close": lambda: s.close(),
    }


NAMES = list(calls(None))  # type: ignore[arg-type] # nothing is called


def refusals(s: Session) -> list[str]:
    """The names of the calls that were refused, each with an error that names it."""
    refused = []
    for name, call in calls(s).items():
        with pytest.raises(CaptureError, match=name):
            call()
        refused.append(name)
    return refused


def test_inside_another_sessions_capture_every_call_is_refused_by_name_and_works_afterwards() -> None:
    def body(rank: int) -> tuple[list[str], list[float], list[float]]:
        with opened() as one, opened() as other:
            with one.capture() as c:
                captured = one.all_reduce(torch.full((1, HIDDEN), 2.0**rank), group="tp")
                refused = refusals(other)
            c.replay()
            return refused, captured.unique().tolist(), fused_powers(other, "tp", 1).residual.unique().tolist()

    assert run_ranks(2, body) == [(NAMES, [3.0], [8.0])] * 2


def test_a_call_of_another_thread_is_not_taken_into_the_capture() -> None:
    def body(rank: int) -> tuple[list[str], int, list[float]]:
        with opened() as s:
            told: list[str] = []

            def call() -> None:
                with pytest.raises(CaptureError) as e:
                    fused_powers(s, "tp", 1)
                told.append(str(e.value))

            with s.capture() as c:
                out = fused_powers(s, "tp", 1)
                thread = threading.Thread(target=call)
                thread.start()
                thread.join()
            c.replay()
            return told, len(c.calls), out.residual.unique().tolist()

    told = "tp[0,1]: all_reduce_add_rms_norm in a thread that is not the one that captures; a session serves one"
    assert run_ranks(2, body) == [([f"{told} thread at a time"], 1, [8.0])] * 2


def test_a_child_forked_inside_a_capture_opens_sessions_of_its_own() -> None:
    def body(rank: int) -> int:
        with opened() as s, s.capture():
            child = os.fork()
            if child == 0:
                status = 1
                with contextlib.suppress(BaseException):
                    status = 0 if not foreign_capture("cpu") else 2
                os._exit(status)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert run_ranks(2, body) == [0, 0]


@contextmanager
def captured_stream(monkeypatch: pytest.MonkeyPatch, s: Session) -> Iterator[None]:
    """As if the session were on CUDA and the current stream captured; any other CUDA call would fail without a GPU."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        patch.setattr(s, "device", "cuda")
        patch.setattr(s._calls, "_device", "cuda")
        yield


def test_inside_a_graph_capture_of_the_callers_own_every_call_is_refused_before_any_cuda_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def body(rank: int) -> tuple[list[str], str, list[float]]:
        with opened() as s:
            with captured_stream(monkeypatch, s):
                refused = refusals(s)
                with pytest.raises(CaptureError) as e:
                    fused_powers(s, "tp", 1)
            return refused, str(e.value), fused_powers(s, "tp", 1).residual.unique().tolist()

    found = run_ranks(2, body)
    for rank in (0, 1):
        refused, text, total = found[rank]
        assert refused == NAMES
        assert text == (
            f"tp[0,1]: all_reduce_add_rms_norm on world rank {rank} inside a CUDA graph capture, which this session "
            "does not know; capture it in `with session.capture()` on every rank"
        )
        assert total == [8.0]


def test_a_capture_that_failed_is_over_for_the_other_session_too() -> None:
    def body(rank: int) -> list[float]:
        with opened() as one, opened() as other:
            with pytest.raises(CaptureError, match="ZeroDivisionError"), one.capture():
                raise ZeroDivisionError
            return fused_powers(other, "tp", 1).residual.unique().tolist()

    assert run_ranks(2, body) == [[8.0]] * 2


class Broken:
    """A workspace that a failure has ended."""

    backend, size_bytes = "shm", 7
    request = Request(hidden=8, dtype=torch.float32, max_tokens=4, ops=ALL, rounding=Rounding.TWICE)

    def __init__(self, story: str) -> None:
        self.broken = story
        self.closed = 0

    def all_reduce(self, _: torch.Tensor) -> torch.Tensor:
        raise ClosedError(self.broken)

    def close(self) -> None:
        self.closed += 1


def test_what_stands_around_a_workspace_tells_that_it_is_broken_and_closes_it() -> None:
    inner = Broken("a peer died")
    limits = Limits(hidden=8, dtype=torch.float32, max_tokens=4, group="tp[0,1]", world_rank=0)
    composed = ComposedWorkspace(inner, inner.request, limits)  # type: ignore[arg-type] # all that it reads of one
    assert (composed.broken, composed.size_bytes, composed.backend) == ("a peer died", 7, "shm")
    with pytest.raises(ClosedError, match="a peer died"):
        composed.all_reduce_add_rms_norm(torch.ones(1, 8), torch.ones(1, 8), torch.ones(8), eps=0.0, weight_bias=0.0)

    def prepared(*stories: str) -> tuple[Prepared, list[Broken]]:
        made = [Broken(story) for story in stories]
        parts = tuple(
            Part(Plan(group="tp[0,1]", choice="shm", reason="", capacity_tokens=n + 1), workspace)  # type: ignore[arg-type] # as above
            for n, workspace in enumerate(made)
        )
        lane = Recorder.off().group(None, label="", ordinal=0)  # type: ignore[arg-type] # nothing is recorded
        return Prepared(inner.request, parts, asked=None, group="tp[0,1]", lane=lane, tells=True), made

    assert prepared("", "")[0].broken == ""
    both, made = prepared("", "a peer died")
    assert both.broken == "a peer died"
    both.fallback = Part(both.parts[0].plan, Broken("the fallback died"))  # type: ignore[arg-type] # as above
    assert prepared("")[0].broken == ""
    made[1].broken = ""
    assert both.broken == "the fallback died"
    both.close()
    assert [w.closed for w in made] == [1, 1]
