"""The verdict on a recorded job: its findings, where every rank stands, and their stacks."""

from __future__ import annotations

import linecache
import os
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from workbench.diagnose import Certainty, Finding, diagnose
from workbench.observe import Frame, boot_id, find_jobs, find_lost, read_ended, read_observed
from workbench.trace import Trace, TraceError
from workbench.xray.frames import program_frame, waits_for_work
from workbench.xray.standing import Standing, find_standings, waiting_ranks

SCHEMA = 1
_IF_SLOW = "if it is only slow, use a larger --deadline, or --keep"
_IF_IDLE = "waits for work by design, use --keep, or a larger --deadline"
_LINE = re.compile(r"\((?P<file>[^()\s][^()]*):(?P<line>\d+)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What was found. `trace` is None if no process recorded anything. `waiting`: ranks inside a recorded call.
    `stopped`: ranks whose process was stopped.

    jobs: the verdict on each, where one command ran several; `findings` are then those of all, in the order of the
        jobs, and everything else is of one of them.
    ended_at_deadline_s: seconds without an event after which the job was ended; None if it was not.
    interrupted: Ctrl-C came first, and the findings are those of that moment.
    lost: which records are gone or cannot be read, of a job that is over: without a finding there is no verdict.
    """

    trace: Trace | None
    findings: tuple[Finding, ...] = ()
    standings: tuple[Standing, ...] = ()
    waiting: frozenset[int] = frozenset()
    stopped: frozenset[int] = frozenset()
    now_ns: int = 0
    stacks: Mapping[int, tuple[Frame, ...]] = field(default_factory=dict)
    ended_at_deadline_s: float | None = None
    interrupted: bool = False
    lost: str = ""
    jobs: tuple[Verdict, ...] = ()

    @property
    def told(self) -> tuple[tuple[int, Finding], ...]:
        """The findings, each with the number of its job from 1; 0 where there is one job."""
        if not self.jobs:
            return tuple((0, f) for f in self.findings)
        return tuple((number, f) for number, job in enumerate(self.jobs, start=1) for f in job.findings)

    @property
    def word(self) -> str:
        """The verdict in a word, as documents have it."""
        if self.findings:
            return "defect"
        return "ok" if self.recorded and not self.interrupted and not self.lost else "unknown"

    @property
    def world_size(self) -> int:
        """Ranks of the largest default group that was asked for; else of those that left a file."""
        if self.trace is None:
            return 0
        asked = [len(e.group.world_ranks) for e in self.trace.events if e.op == "init_process_group" and e.group]
        return max([*asked, *(r + 1 for r in self.trace.world_ranks)], default=0)

    @property
    def recorded(self) -> bool:
        """Whether any process used torch.distributed."""
        if self.jobs:
            return any(job.recorded for job in self.jobs)
        return self.trace is not None and any(e.op not in ("exit", "exception") for e in self.trace.events)

    @property
    def conclusion(self) -> str:
        """The verdict in a line."""
        if self.findings:
            is_certain = any(f.certainty is Certainty.IS for f in self.findings)
            word = "verdict: defect" if is_certain else "verdict: suspected defect"
            return f"interrupted; {word}" if self.interrupted else word
        if self.interrupted:
            return "interrupted, so no verdict"
        if self.lost:
            return f"no verdict: {self.lost}"
        if not self.recorded:
            return (
                "nothing recorded: no process used torch.distributed (or what `workbench trace` had put into its "
                "environment did not reach it: a script sets PYTHONPATH anew instead of export "
                "PYTHONPATH=DIR${PYTHONPATH:+:$PYTHONPATH}; env -i, sudo; python -I, -E or -S)"
            )
        return "verdict: ok"

    @property
    def ending(self) -> str:
        """How a watcher ended the job; "" if it did not."""
        if self.ended_at_deadline_s is None:
            return ""
        return f"no rank made an event for {self.ended_at_deadline_s:g} s while some waited, so the job was ended then"

    def to_json(self, *, command_status: int | None) -> dict[str, Any]:
        """The document of `workbench trace --json` and `workbench diagnose --json`."""
        several = {"jobs": [{"verdict": j.word, "world_size": j.world_size} for j in self.jobs]} if self.jobs else {}
        return {
            "schema": SCHEMA,
            "verdict": self.word,
            "world_size": self.world_size,
            "command_status": command_status,
            "ended_at_deadline_s": self.ended_at_deadline_s,
            "interrupted": self.interrupted,
            "findings": [f.to_json() | ({"job": job} if job else {}) for job, f in self.told],
            **several,
        }

    def __str__(self) -> str:
        if self.jobs:
            return "\n".join(
                f"job {number} of {len(self.jobs)} that the command started:\n{self._as_shown(job)}"
                for number, job in enumerate(self.jobs, start=1)
            )
        if self.trace is None or not (self.recorded or self.findings):
            return self.conclusion
        lines = []
        for number, finding in enumerate(self.findings, start=1):
            lines.append(f"{'first cause' if number == 1 else 'then'}: {finding}")
            lines += [f"    {line}" for line in finding.evidence]
            lines += [f"    > {text}" for text in source_lines((finding.message, *finding.evidence))]
            lines += [f"    {text}" for text in self.late_ranks(finding)]
        if not self.findings and not self.interrupted:
            lines.append(f"no defect found in {len(self.trace.events)} events of {len(self.trace.ranks)} ranks")
            lines += [self.conclusion] if self.lost else []
        if self.findings or self.interrupted:
            lines += [str(s) for s in self.standings]
        return "\n".join(_plain(line) for line in lines)

    def _as_shown(self, job: Verdict) -> Verdict:
        """One of the jobs, with what is known of how they were ended."""
        stacks = self.stacks if job.trace is self.trace else {}
        return replace(job, ended_at_deadline_s=self.ended_at_deadline_s, interrupted=self.interrupted, stacks=stacks)

    def late_ranks(self, finding: Finding) -> list[str]:
        """Of a job at its deadline: where the ranks at fault are that run outside any call, and may be slow."""
        if not (self.stacks or self.ended_at_deadline_s is not None) or finding.certainty is not Certainty.LIKELY:
            return []
        running = [s.world_rank for s in self.standings if s.world_rank in finding.ranks and s.state == "running"]
        lines = []
        for rank in running:
            frame = program_frame(self.stacks.get(rank, ()))
            place = "outside any recorded call" if frame is None else f"at {os.path.basename(frame.file)}:{frame.line}"
            if self.ended_at_deadline_s is None:
                advice = "it may only wait for work" if rank in self.idle else "it may only be slow"
            else:
                advice = f"if it {_IF_IDLE}" if rank in self.idle else _IF_SLOW
            lines.append(f"world rank {rank} {'waits' if rank in self.idle else 'is'} {place}; {advice}")
        return lines

    @property
    def idle(self) -> frozenset[int]:
        """World ranks outside any recorded call that wait for something else than a rank, as their stacks show."""
        running = {s.world_rank for s in self.standings if s.state == "running"}
        return frozenset(r for r, stack in self.stacks.items() if r in running and waits_for_work(stack))

    def stacks_text(self) -> str:
        """The stack of every rank that gave one, from its program's start inwards."""
        lines = []
        for rank, frames in sorted(self.stacks.items()):
            lines.append(f"stack of world rank {rank}, innermost last:")
            lines += [f"    {frame}" for frame in reversed(frames)]
        return "\n".join(lines)


def judge(*directories: str | os.PathLike[str], deadline_s: float | None = None, running: bool = False) -> Verdict:
    """Read what the ranks recorded and say what went wrong.

    running: the job still runs here, so a rank that did not come may yet come, until deadline_s. A job that was ended
    at its deadline is judged as it stood then. Of several jobs that one command ran all findings are told; the rest
    is of the first that hangs with findings, else of the first with findings, else of the last.
    Raises: OSError; TraceError where the job is over and none of its files can be read. Some that cannot be read are
    counted against the certainty of the findings.
    """
    verdicts = tuple(_judge_job(directories, job, deadline_s, running) for job in find_jobs(directories))
    if len(verdicts) == 1:
        return verdicts[0]
    verdicts = tuple(replace(v, findings=tuple(_told_elsewhere(f, v, verdicts) for f in v.findings)) for v in verdicts)
    faulty = [v for v in verdicts if v.findings]
    shown = next((v for v in faulty if v.waiting), (faulty or verdicts[-1:])[0])
    lost = "; ".join(dict.fromkeys(v.lost for v in verdicts if v.lost))
    return replace(shown, findings=tuple(f for v in faulty for f in v.findings), lost=lost, jobs=verdicts)


def _judge_job(
    directories: Sequence[str | os.PathLike[str]], job: Sequence[Path], deadline_s: float | None, running: bool
) -> Verdict:
    try:
        trace = read_observed(*directories, job=job)
    except TraceError:
        if running:
            return Verdict(trace=None)  # a rank may still be making its file
        if any(next(d.glob("*.wbtrace"), None) for d in job):
            raise
        return Verdict(trace=None, lost=_lost(job, ()))
    lost = _lost(job, {(r.world_rank, r.header.pid) for r in trace.ranks}) if not trace.unreadable else ""
    if lost:
        trace = replace(trace, unreadable=((", ".join(map(str, job)), lost),))
    ended = None if running else read_ended(directories)
    if ended is not None:
        then_ns = _on(trace, ended.boot_id, ended.monotonic_ns)
        stopped = frozenset(r.world_rank for r in trace.ranks if r.header.pid in ended.stopped_pids)
        verdict = judge_trace(trace, now_ns=then_ns, deadline_s=ended.deadline_s, stopped=stopped)
        if ended.interrupted:
            return as_interrupted(verdict)
        return replace(verdict, ended_at_deadline_s=ended.deadline_s)
    now_ns = _on(trace, boot_id(), time.monotonic_ns()) if running else None
    stopped = stopped_ranks(trace) if running else frozenset[int]()
    verdict = judge_trace(trace, now_ns=now_ns, deadline_s=deadline_s, dead=dead_ranks(trace), stopped=stopped)
    return verdict if running else replace(verdict, lost="; ".join(text for _, text in trace.unreadable))


def _told_elsewhere(finding: Finding, own: Verdict, verdicts: Sequence[Verdict]) -> Finding:
    """The finding; if the ranks that are absent from one job's beginning wait for its ranks in another's, with that."""
    if finding.code != "absent.rendezvous" or own.trace is None:
        return finding
    elsewhere: dict[int, str] = {}
    for number, other in enumerate(verdicts, start=1):
        if other is own or other.trace is None:
            continue
        awaited = {r for f in other.findings if f.code == finding.code for r in f.ranks}
        if awaited & set(own.trace.world_ranks):
            elsewhere |= {r: f"world rank {r} {_meets(other.trace, r)} (job {number})" for r in other.trace.world_ranks}
    if not set(elsewhere) >= set(finding.ranks) or not elsewhere.keys().isdisjoint(own.trace.world_ranks):
        return finding
    places = [f"world rank {r} {_meets(own.trace, r)}" for r in own.trace.world_ranks]
    places += [elsewhere[r] for r in finding.ranks]
    return replace(
        finding,
        message=f"{finding.message} They look for each other at different places, and so make jobs of their own: "
        f"{'; '.join(places[:8])}.",
        fix="give every rank the same port, prefix or file: whoever starts the ranks chooses it, once for all",
    )


def _meets(trace: Trace, world_rank: int) -> str:
    """Where the rank looked for the others last, in the words of its call."""
    notes = [e.note for e in trace.events if e.world_rank == world_rank and e.op == "init_process_group" and e.note]
    words = notes[-1].split("; ") if notes else []
    return next((w for w in words if w.startswith("meets at ")), "meets nobody")


def _lost(job: Sequence[Path], found: Collection[tuple[int, int]]) -> str:
    """Whose records are gone, in words. See find_lost."""
    ranks = find_lost(job, found)
    words = f"world rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return f"what {words} recorded is gone from {', '.join(map(str, job))}" if ranks else ""


def as_ended(verdict: Verdict, *, stacks: Mapping[int, tuple[Frame, ...]], deadline_s: float) -> Verdict:
    """The same of a job that is ended at its deadline, whose ranks gave these stacks. What to try is also to wait for
    a rank that waits for work.
    """
    ended = replace(verdict, stacks=stacks, ended_at_deadline_s=deadline_s)

    def advised(finding: Finding) -> Finding:
        is_doubtful = finding.certainty is Certainty.LIKELY and not finding.consequence
        if not is_doubtful or not ended.idle.intersection(finding.ranks):
            return finding
        return replace(finding, fix=f"{finding.fix}; or, if who is absent {_IF_IDLE}")

    jobs = tuple(
        replace(job, findings=tuple(map(advised, job.findings))) if job.trace is verdict.trace else job
        for job in ended.jobs
    )
    findings = tuple(f for job in jobs for f in job.findings) if jobs else tuple(map(advised, ended.findings))
    return replace(ended, findings=findings, jobs=jobs)


def as_interrupted(verdict: Verdict) -> Verdict:
    """The same of a job that nobody let hang for as long as its deadline: its findings are likely at most."""
    findings = tuple(replace(f, certainty=Certainty.LIKELY) for f in verdict.findings)
    return replace(verdict, findings=findings, interrupted=True, jobs=tuple(map(as_interrupted, verdict.jobs)))


def judge_trace(
    trace: Trace,
    *,
    now_ns: int | None,
    deadline_s: float | None = None,
    dead: frozenset[int] = frozenset(),
    stopped: frozenset[int] = frozenset(),
) -> Verdict:
    """The verdict on a trace. now_ns: the moment it was read, on its clock, for a job that runs. None: it is over."""
    last_ns = trace.events[-1].time_ns if trace.events else 0
    moment_ns = last_ns if now_ns is None else now_ns
    findings = diagnose(
        trace, deadline_s=deadline_s, now_ns=now_ns, dead=dead, stopped=stopped, source=linecache.getline
    )
    return Verdict(
        trace=trace,
        findings=findings,
        standings=find_standings(trace, now_ns=moment_ns, dead=dead, stopped=stopped),
        waiting=waiting_ranks(trace, dead=dead),
        stopped=stopped,
        now_ns=moment_ns,
    )


def _on(trace: Trace, boot: str, monotonic_ns: int) -> int:
    """A moment of one host's clock on the trace's, ns since 1970; the present where no rank is of that host."""
    for rank in trace.ranks:
        if rank.header.boot_id == boot:
            return monotonic_ns + rank.header.anchor_wall_ns - rank.header.anchor_monotonic_ns
    return time.time_ns()


def dead_ranks(trace: Trace) -> frozenset[int]:
    """World ranks of this host whose process is gone and which did not say how they ended."""
    told = {e.world_rank for e in trace.events if e.op == "exit"}
    here = boot_id()
    return frozenset(
        r.world_rank
        for r in trace.ranks
        if r.header.boot_id == here and r.world_rank not in told and not _lives(r.header.pid)
    )


def stopped_ranks(trace: Trace) -> frozenset[int]:
    """World ranks of this host whose process is stopped, by a signal or a debugger."""
    here = boot_id()
    return frozenset(r.world_rank for r in trace.ranks if r.header.boot_id == here and _state(r.header.pid) in _STOPPED)


def source_lines(texts: Sequence[str], *, most: int = 4) -> list[str]:
    """The lines of code that these texts name as (file:line), where the file is here to be read."""
    found: dict[str, None] = {}
    for text in texts:
        for match in _LINE.finditer(text):
            code = linecache.getline(match["file"], int(match["line"])).strip()
            if code:
                found[f"{os.path.basename(match['file'])}:{match['line']}: {code}"] = None
    return list(found)[:most]


def _plain(line: str) -> str:
    """`line` with what would move a terminal's cursor, or change its colours, written out."""
    return "".join(c if c.isprintable() or c in "\t\n\u200d\ufe0f" else f"\\x{ord(c):02x}" for c in line)


def _lives(pid: int) -> bool:
    return _state(pid) not in ("", psutil.STATUS_ZOMBIE)


_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def _state(pid: int) -> str:
    """The kernel's word for what a process does; "" if there is none."""
    if not 0 < pid < 1 << 31:  # no pid of this kernel; a file may hold any number
        return ""
    try:
        return str(psutil.Process(pid).status())
    except psutil.NoSuchProcess:
        return ""
