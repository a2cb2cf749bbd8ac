"""What the X-ray shows: report.html, from the verdict and the trace behind it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from workbench.demo import write_private
from workbench.diagnose import Finding
from workbench.errors import LayoutError
from workbench.ranks import GroupMap
from workbench.trace import Lanes, Trace, capture_timeline, rendezvous_lanes
from workbench.views import (
    Code,
    Picture,
    Section,
    Table,
    Text,
    group_map_caption,
    group_map_figure,
    group_map_text,
    lanes_figure,
    lanes_text,
    report_html,
    timeline_figure,
    timeline_text,
)
from workbench.xray.verdict import Verdict, source_lines

_START_UP = frozenset({"init_process_group", "new_group"})


def write_report(path: Path, verdict: Verdict, *, command: str, command_status: int | None) -> Path:
    """Write one page: findings with their lines of code, ranks, groups, who waited for whom, captures, stacks."""
    trace = verdict.trace
    sections = [_summary(verdict, command, command_status)]
    sections += [_finding(n, job, f, verdict.late_ranks(f)) for n, (job, f) in enumerate(verdict.told, start=1)]
    if trace is not None:
        sections.append(_ranks(verdict))
        sections += _groups(trace)
        sections += _lanes(rendezvous_lanes(trace, until_ns=verdict.now_ns if verdict.waiting else None))
        timeline = capture_timeline(trace.events)
        if timeline is not None:
            picture = Picture(timeline_figure(timeline), timeline_text(timeline), "A lane is a rank.")
            sections.append(Section("Captured and replayed", (picture,)))
    if verdict.stacks:
        sections.append(Section("Stacks", (Code(verdict.stacks_text()),)))
    write_private(path, report_html("X-ray of a distributed program", sections))
    return path


def _summary(verdict: Verdict, command: str, status: int | None) -> Section:
    trace = verdict.trace
    if trace is None or not verdict.recorded:
        found = f"{verdict.conclusion[:1].upper()}{verdict.conclusion[1:]}."
    else:
        found = ""
        if verdict.jobs:
            found = f"The command started {len(verdict.jobs)} jobs; ranks, groups and calls below are of one of them: "
        found += f"{len(trace.events)} events of {len(trace.ranks)} of {verdict.world_size} ranks. "
        found += f"Findings: {len(verdict.findings)}." if verdict.findings else "No defect found."
        if not trace.complete:
            found += " Records are missing, so what is absent may only look so."
    ended = f" {verdict.ending[:1].upper()}{verdict.ending[1:]}." if verdict.ending else ""
    if verdict.interrupted and trace is not None:
        ended += " It was interrupted by Ctrl-C: what is told is how it stood then."
    ended += "" if status is None else f" The command's exit status is {status}."
    return Section("Verdict", (Code(command, wraps=True), Text(found + ended)))


def _finding(number: int, job: int, finding: Finding, late: Sequence[str]) -> Section:
    heading = f"{'First cause' if number == 1 else f'Finding {number}'}: {finding.kind}"
    heading += f", in job {job}" if job else ""
    where = "" if finding.group is None else f" Group: {finding.group}."
    parts: list[Text | Code] = [
        Text(finding.message),
        Text(f"{_blame(finding)}.{where} Rule: {finding.code}."),
    ]
    code = source_lines((finding.message, *finding.evidence), most=8)
    if finding.evidence or code:
        parts.append(Code("\n".join([*finding.evidence, *(f"> {line}" for line in code)]), wraps=True))
    parts += [Text(f"{line}.") for line in late]
    parts.append(Text(f"Try: {finding.fix}"))
    return Section(heading, tuple(parts))


def _blame(finding: Finding) -> str:
    ranks = ", ".join(map(str, finding.ranks)) or "none"
    if finding.consequence:
        return f"Follows from the above. World ranks it concerns: {ranks}"
    return f"World ranks at fault: {ranks}. Certainty: {finding.certainty}"


def _ranks(verdict: Verdict) -> Section:
    rows = tuple((s.world_rank, s.state, s.last) for s in verdict.standings)
    return Section("Where each rank stood", (Table(("world rank", "state", "call"), rows),))


def _groups(trace: Trace) -> list[Section]:
    """The group map the program declared, else the groups that its ranks made."""
    group_map = _declared(trace) or _observed(trace)
    if group_map is None:
        return []
    picture = Picture(group_map_figure(group_map), group_map_text(group_map), group_map_caption(group_map))
    return [Section("Who is in which group", (picture,))]


def _declared(trace: Trace) -> GroupMap | None:
    for rank in trace.ranks:
        for document in rank.declared:
            try:
                return GroupMap.from_json(json.loads(document))
            except (LayoutError, ValueError):
                continue
    return None


def _observed(trace: Trace) -> GroupMap | None:
    """Groups by kind; a rank that is in two groups of one kind puts the later ones in a row of their own."""
    rows: dict[str, list[list[int]]] = {}
    for group in sorted({g for r in trace.ranks for g in r.groups}, key=lambda g: (g.ordinal, g.world_ranks)):
        ranks = list(group.world_ranks)
        for number in range(1, 64):
            row = rows.setdefault(group.key.kind if number == 1 else f"{group.key.kind}-{number}", [])
            if ranks in row:
                break
            if not any(set(ranks) & set(other) for other in row):
                row.append(ranks)
                break
    try:
        return GroupMap.custom({kind: lists for kind, lists in rows.items() if lists})
    except LayoutError:
        return None


def _lanes(lanes: Lanes) -> list[Section]:
    if not lanes.calls:
        return []
    shown, before = _after_start_up(lanes)
    picture = Picture(lanes_figure(shown), lanes_text(shown), "A lane is a rank; pale: waiting for a member.")
    return [Section("Who waited for whom", (*([Text(before)] if before else []), picture))]


def _after_start_up(lanes: Lanes) -> tuple[Lanes, str]:
    """From the first call that makes no group on, and what went before in words; all of it if nothing came after."""
    number = next((n for n, c in enumerate(lanes.calls) if c.op not in _START_UP), 0)
    start_up, calls = lanes.calls[:number], lanes.calls[number:]
    if not start_up or any(c.waiting or c.missing for c in start_up):
        return lanes, ""
    start_ns = calls[0].start_ns
    made = Counter(c.op for c in start_up)
    words = ", ".join(op if n == 1 else f"{n} x {op}" for op, n in made.items())
    took = f"The start-up took {(start_ns - lanes.start_ns) / 1e9:.1f} s ({words})"
    return replace(lanes, calls=calls, start_ns=start_ns), f"{took}; the figure and its times begin after it."
