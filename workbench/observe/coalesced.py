"""Calls that torch holds back and makes as one: batches of sends and recvs on GPUs, and whatever a program coalesces.

Such a call returns at once and has done nothing yet. It ends with the Work that stands for all of them, or where the
manager has waited for that.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from workbench.observe.endings import tell_exception
from workbench.observe.process import OPAQUE, this_process
from workbench.observe.works import start_work
from workbench.trace import Lane, Recorder, Token, end_after_device


@dataclass(frozen=True, slots=True)
class Held:
    """The calls that one manager holds back. is_async: they are waited for after it."""

    is_async: bool
    calls: list[tuple[Lane | Recorder, Token | None, str]] = field(default_factory=list)
    gpus: list[Any] = field(default_factory=list)

    def add(self, door: Lane | Recorder, token: Token | None, op: str, gpu: Any) -> None:
        self.calls.append((door, token, op))
        if gpu is not None:
            self.gpus[:] = [gpu]

    def made(self, works: list[Any]) -> None:
        """torch has made the calls. works: what the program is to wait for, if it is to."""
        gpu = self.gpus[0] if self.gpus else None
        if works and self.calls and not (gpu is not None and this_process.capturing):
            (door, token, op), *others = self.calls
            is_peered = op in ("send", "recv")
            polled = gpu is not None or not is_peered
            start_work(works[-1], door, token, op, polled=polled, on_gpu=gpu is not None, others=others)
            return
        for door, token, _ in self.calls:
            if gpu is not None and not this_process.capturing:
                end_after_device(door, token, gpu)
            else:
                door.end(token)

    def failed(self, error: BaseException) -> None:
        for door, token, _ in self.calls:
            door.end(token, error=f"{type(error).__name__}: {error}")
        tell_exception(error, self.calls[0][0] if self.calls else None)


holding: dict[Any, Held] = {}
"""By process group, while one of its managers is open. Empty nearly always; read at every call."""


def recorded_manager(module: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    """torch's _coalescing_manager; the calls on its group are recorded until they are really made."""
    signature = inspect.signature(original)
    here = this_process.here

    @contextlib.contextmanager
    def _coalescing_manager(*args: Any, **kwargs: Any) -> Iterator[Any]:
        if here.inside is OPAQUE or not this_process.live:
            with original(*args, **kwargs) as manager:
                yield manager
            return
        given = signature.bind(*args, **kwargs).arguments
        group = given.get("group") or module._get_default_group()
        inside, held = here.inside, Held(bool(given.get("async_ops", False)))
        try:
            with original(*args, **kwargs) as manager:
                holding[group] = held
                try:
                    yield manager
                finally:
                    del holding[group]
                    here.inside = OPAQUE  # what follows are the steps by which torch makes the calls
        except BaseException as e:
            held.failed(e)
            raise
        finally:
            here.inside = inside
        held.made(list(manager.works))

    return _coalescing_manager
