"""Run a command recorded, watch it, and say what went wrong: while it hangs, or when it has ended."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGKILL

from workbench.observe import Frame, dump_stacks, mark_ended
from workbench.trace import TraceError, read_progress
from workbench.xray.job import Job
from workbench.xray.screen import Screen
from workbench.xray.verdict import Verdict, judge

DEADLINE_S = 120.0
_POLL_S = 0.2
_QUIET_S = 1.0  # without an event before the ranks are shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How it went. `status` is the command's own, as a shell gives it. `ended`: by us, at the deadline."""

    verdict: Verdict
    status: int
    ended: bool = False
    interrupted: bool = False


def trace_command(
    command: Sequence[str],
    directory: Path,
    *,
    deadline_s: float = DEADLINE_S,
    say: Callable[[str], None],
    output_to_stderr: bool = False,
) -> Outcome:
    """Run `command`, recorded into `directory`, and judge it.

    A job is ended only when deadline_s have passed without an event of any rank, a rank waits in a recorded call, and
    there is a finding. Ctrl-C goes to the command; a second one ends it.
    Raises: ArgumentError for a command that cannot be run.
    """
    traces = directory / "trace"
    traces.mkdir(mode=0o700)
    screen = Screen(sys.stderr)
    with Job(command, str(traces), stdout=sys.stderr.fileno() if output_to_stderr else None) as job:
        watch = _Watch(job, traces, deadline_s, say, screen)
        try:
            verdict = watch.until_verdict()
        except KeyboardInterrupt:
            screen.clear()
            verdict = judge(traces, deadline_s=deadline_s, running=True)
            mark_ended(traces, deadline_s=deadline_s)
            job.interrupt()
            while job.status is None:
                job.wait(_POLL_S)
            say(str(verdict))
            return Outcome(verdict=verdict, status=job.status, interrupted=True)
        if verdict is not None:
            say(str(verdict))
            verdict = replace(verdict, stacks=_stacks(traces, verdict))
            say(verdict.stacks_text())
            mark_ended(traces, deadline_s=deadline_s)
            job.end()
            status = job.status
            return Outcome(verdict=verdict, status=128 + SIGKILL if status is None else status, ended=True)
        status = job.status
    assert status is not None
    try:
        verdict = judge(traces)
    except TraceError as e:  # every rank was ended before its file was whole
        say(str(e))
        verdict = Verdict(trace=None)
    if verdict.findings or verdict.trace is None:
        say(str(verdict))
    return Outcome(verdict=verdict, status=status)


class _Watch:
    """Looks at the trace files of a running job."""

    def __init__(self, job: Job, traces: Path, deadline_s: float, say: Callable[[str], None], screen: Screen) -> None:
        self._job, self._traces, self._deadline_s, self._say, self._screen = job, traces, deadline_s, say, screen

    def until_verdict(self) -> Verdict | None:
        """The verdict on a job that hangs; None once the command has ended by itself."""
        progress, moved = 0, time.monotonic()
        next_look = self._deadline_s
        while self._job.status is None:
            self._job.wait(_POLL_S)
            now = self._progress()
            quiet_s = time.monotonic() - moved
            if now != progress:
                progress, moved, next_look = now, time.monotonic(), self._deadline_s
                self._screen.clear()
            elif quiet_s >= next_look:
                verdict = judge(self._traces, deadline_s=self._deadline_s, running=True)
                if verdict.waiting and verdict.findings:
                    self._screen.clear()
                    return verdict
                next_look = quiet_s * 1.5
            elif quiet_s > _QUIET_S and self._screen.wanted:
                self._show()
        self._screen.clear()
        return None

    def _progress(self) -> int:
        """Events of all ranks together."""
        total = 0
        for path in self._traces.rglob("*.wbtrace"):
            try:
                total += read_progress(path)
            except (TraceError, OSError):
                continue
        return total

    def _show(self) -> None:
        started = time.monotonic()
        if self._screen.due(started):
            verdict = judge(self._traces, deadline_s=self._deadline_s, running=True)
            self._screen.show([str(s) for s in verdict.standings], cost_s=time.monotonic() - started)


def _stacks(traces: Path, verdict: Verdict) -> dict[int, tuple[Frame, ...]]:
    assert verdict.trace is not None
    ranks = {r.header.pid: r.world_rank for r in verdict.trace.ranks}
    return {ranks[pid]: frames for pid, frames in dump_stacks(traces, ranks).items()}
