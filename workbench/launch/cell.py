"""One piece of work on some ranks: sent, watched, shown; ended by its end, a death or a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import ipyparallel
from ipyparallel.client.client import ExecuteReply

from workbench.launch.failure import RankError, shown_traceback
from workbench.launch.output import RankOutput, Rich
from workbench.launch.show import Display

_POLL_S = 0.01
_OUTPUT_S = 10.0  # how long nothing more of the output may come, once all have answered, before it is let go


class Cell:
    """Work that was sent to ranks, each with an AsyncResult of its own. `text` is how messages call it."""

    def __init__(self, results: Mapping[int, ipyparallel.AsyncResult], text: str) -> None:
        self.world_ranks = tuple(results)
        self.text = text
        self.started_s = time.monotonic()
        self._results = dict(results)
        self._told = {r: result.metadata for r, result in results.items()}  # which the client fills as messages come

    @property
    def running(self) -> tuple[int, ...]:
        """World ranks that have not answered yet."""
        return tuple(r for r, result in self._results.items() if not result.done())

    @property
    def values(self) -> tuple[Any, ...]:
        """What the ranks gave back, by rank; for a piece of code None each."""
        values = (result.get(0) for result in self._results.values())
        return tuple(None if isinstance(value, ExecuteReply) else value for value in values)

    def outputs(self) -> dict[int, RankOutput]:
        """What the ranks have shown so far."""
        return {r: self._output(r) for r in self.world_ranks}

    def errors(self) -> tuple[RankError, ...]:
        """What ranks raised, the earliest first."""
        found = []
        for r in self.world_ranks:
            error = self._error(r)
            if error is not None:
                completed = self._results[r].metadata["completed"]
                found.append(
                    RankError(
                        world_rank=r,
                        name=str(error.ename),
                        message=str(error.evalue),
                        traceback=shown_traceback(str(error.traceback or "")),
                        when_s=completed.timestamp() if completed else time.time(),
                    )
                )
        return tuple(sorted(found, key=lambda e: (e.when_s, e.world_rank)))

    def watch(self, display: Display, look_around: Callable[[], None], *, deadline_s: float | None) -> None:
        """Show output until every rank has answered.

        `look_around` is called again and again and may raise. Raises: TimeoutError past the deadline, counted from the
        start.
        """
        try:
            while self.running:
                display.update(self.outputs())
                look_around()
                if deadline_s is not None and time.monotonic() - self.started_s > deadline_s:
                    raise TimeoutError
                time.sleep(_POLL_S)
            self._await_output()
        finally:
            display.finish(self.outputs())

    def wait(self, timeout_s: float) -> bool:
        """Whether every rank answers within the time. Nothing is shown."""
        deadline = time.monotonic() + timeout_s
        while self.running and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return not self.running

    def _await_output(self) -> None:
        """Return once the ranks' output has come to its end. Megabytes come seconds after the answer."""
        seen = -1
        late = 0.0
        while not all(result.wait_for_output(_POLL_S) for result in self._results.values()):
            size = sum(_size(told) for told in self._told.values())
            if size > seen:
                seen, late = size, time.monotonic() + _OUTPUT_S
            elif time.monotonic() > late:
                return

    def _output(self, world_rank: int) -> RankOutput:
        told = self._told[world_rank]
        rich: list[Rich] = [(o["data"], o.get("metadata", {})) for o in list(told["outputs"])]
        stdout = told["stdout"] or ""
        value = told["execute_result"]
        if value is not None:
            if set(value["data"]) <= {"text/plain"}:
                stdout += value["data"].get("text/plain", "") + "\n"
            else:
                rich.append((value["data"], value.get("metadata", {})))
        error = self._error(world_rank)
        stderr = told["stderr"] or ""
        if error is not None and self.running:  # the whole story follows once all have ended
            stderr += f"{error.ename}: {error.evalue}\n"
        return RankOutput(stdout=stdout, stderr=stderr, rich=tuple(rich))

    def _error(self, world_rank: int) -> ipyparallel.RemoteError | None:
        result = self._results[world_rank]
        error = result.exception() if result.done() else None
        return error if isinstance(error, ipyparallel.RemoteError) else None


def _size(told: Mapping[str, Any]) -> int:
    return len(told["stdout"] or "") + len(told["stderr"] or "") + len(told["outputs"])
