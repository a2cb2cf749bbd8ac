"""Run a command recorded, watch it, and say what went wrong: while it hangs, or when it has ended."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGKILL

from workbench.observe import Frame, dump_stacks, mark_ended, mark_status
from workbench.trace import TraceError, read_progress
from workbench.xray.job import Job
from workbench.xray.screen import Screen
from workbench.xray.unrecorded import Lookout
from workbench.xray.verdict import Verdict, as_ended, as_interrupted, judge

DEADLINE_S = 120.0
_POLL_S = 0.2
_QUIET_S = 1.0  # without an event before the ranks are shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How it went. `status` is the command's own, as a shell gives it."""

    verdict: Verdict
    status: int


def trace_command(
    command: Sequence[str],
    directory: Path,
    *,
    deadline_s: float = DEADLINE_S,
    keep: bool = False,
    say: Callable[[str], None],
    output_to_stderr: bool = False,
) -> Outcome:
    """Run `command`, recorded into `directory`, and judge it.

    A job is ended only when deadline_s have passed without an event of any rank, a rank waits in a recorded call, and
    there is a finding: a rank that never comes to a call is one, also if it sleeps or computes for longer than that.
    keep: such a job is not ended: what was found is told, again when it changes; the verdict is that of its end.
    Ctrl-C goes to the command, and the job is judged as it stands; a second one ends it.
    Raises: ArgumentError for a command that cannot be run.
    """
    traces = directory / "trace"
    traces.mkdir(mode=0o700)
    screen = Screen(sys.stderr)
    with Job(command, str(traces), stdout=sys.stderr.fileno() if output_to_stderr else None) as job:
        watch = _Watch(job, traces, deadline_s, keep, say, screen)
        try:
            verdict = watch.until_verdict()
        except KeyboardInterrupt:
            screen.clear()
            return _interrupted(job, traces, say)
        if verdict is not None:
            verdict = as_ended(verdict, stacks=_stacks(traces, verdict), deadline_s=deadline_s)
            _tell(verdict, say)
            _mark_ended(traces, deadline_s, verdict)
            job.end()
            return Outcome(verdict=verdict, status=_status(job))
        status = job.status
    assert status is not None
    with contextlib.suppress(OSError):  # as in _mark_ended
        mark_status(traces, status)
    try:
        verdict = judge(traces)
    except TraceError as e:  # every rank was ended before its file was whole, or all files were cut
        verdict = Verdict(trace=None, lost=str(e))
    if watch.lost:
        verdict = replace(verdict, lost=watch.lost)
    elif watch.lookout.found and (watch.lookout.is_rank or not verdict.recorded):
        verdict = replace(verdict, lost=watch.lookout.found)
    if verdict.findings:
        say(str(verdict))
    return Outcome(verdict=verdict, status=status)


def _interrupted(job: Job, traces: Path, say: Callable[[str], None]) -> Outcome:
    """Pass Ctrl-C on and say where the ranks stood; who waited for a second by then was waiting."""
    verdict = as_interrupted(judge(traces, deadline_s=_QUIET_S, running=True))
    _mark_ended(traces, _QUIET_S, verdict)
    job.interrupt()
    say(str(verdict))
    say("interrupted; a second Ctrl-C ends the job at once")
    try:
        while job.status is None:
            job.wait(_POLL_S)
    except KeyboardInterrupt:
        job.end()
    return Outcome(verdict=verdict, status=_status(job))


def _mark_ended(traces: Path, deadline_s: float, verdict: Verdict) -> None:
    ranks = () if verdict.trace is None else verdict.trace.ranks
    stopped = [r.header.pid for r in ranks if r.world_rank in verdict.stopped]
    with contextlib.suppress(OSError):  # the directory is gone, or its disk full: only a later look would read this
        mark_ended(traces, deadline_s=deadline_s, interrupted=verdict.interrupted, stopped_pids=stopped)


def _tell(verdict: Verdict, say: Callable[[str], None]) -> None:
    say(str(verdict))
    say(verdict.stacks_text())


def _status(job: Job) -> int:
    return 128 + SIGKILL if job.status is None else job.status


class _Watch:
    """Looks at the trace files of a running job."""

    def __init__(
        self, job: Job, traces: Path, deadline_s: float, keep: bool, say: Callable[[str], None], screen: Screen
    ) -> None:
        self._job, self._traces, self._deadline_s, self._keep = job, traces, deadline_s, keep
        self._say, self._screen = say, screen
        self.lookout = Lookout(job.family)
        self._told: object = None  # what was found when the job was last told of
        self._directory = os.open(traces, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.lost = ""

    def until_verdict(self) -> Verdict | None:
        """The verdict on a job that hangs and is not kept; None once the command has ended by itself."""
        try:
            return self._until_verdict()
        finally:
            os.close(self._directory)

    def _until_verdict(self) -> Verdict | None:
        progress, moved = 0, time.monotonic()
        next_look = self._deadline_s
        while self._job.status is None:
            self._job.wait(_POLL_S)
            self._look_whether_removed()
            self._look_for_unrecorded()
            now = self._progress()
            if now < progress and not self.lost:
                self._say(f"some of what was recorded is gone from {self._traces}: a hang may not be seen")
            quiet_s = time.monotonic() - moved
            if now != progress:
                progress, moved, next_look = now, time.monotonic(), self._deadline_s
                self._screen.clear()
            elif quiet_s >= next_look:
                verdict = judge(self._traces, deadline_s=self._deadline_s, running=True)
                if verdict.waiting and verdict.findings:
                    self._screen.clear()
                    if not self._keep:
                        return verdict
                    self._tell_if_new(verdict)
                next_look = quiet_s * 1.5
            elif quiet_s > _QUIET_S and self._screen.wanted:
                self._show()
        self._screen.clear()
        self._look_whether_removed()
        return None

    def _look_whether_removed(self) -> None:
        if self.lost or (self._traces.is_dir() and os.fstat(self._directory).st_nlink):
            return
        self.lost = f"{self._traces} was removed while the command ran, and what was recorded with it"
        if self._job.status is None:
            self._screen.clear()
            self._say(f"{self.lost}; the command goes on, and nothing watches whether it hangs")

    def _look_for_unrecorded(self) -> None:
        text = self.lookout.look()
        if text:
            self._screen.clear()
            self._say(f"workbench: {text}")

    def _tell_if_new(self, verdict: Verdict) -> None:
        found = [(f.code, f.ranks, f.evidence) for f in verdict.findings]  # a message also says how long
        if found == self._told:
            return
        self._told = found
        verdict = replace(verdict, stacks=_stacks(self._traces, verdict))
        _tell(verdict, self._say)
        self._say(f"{verdict.conclusion} after {self._deadline_s:g} s without an event; the job goes on (--keep)")

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
