"""The X-ray of a notebook's cluster, between its cells or while one hangs: see Cluster.xray."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from workbench.diagnose import Finding
from workbench.trace import RankTrace, read_directory, rendezvous_lanes
from workbench.views import Shown, show_lanes, show_ranks
from workbench.xray.report import write_report
from workbench.xray.verdict import Verdict, judge_trace


@dataclass(frozen=True, slots=True, repr=False)
class ClusterXray:
    """What went wrong since the groups were last made, where each rank stands, who waits for whom."""

    verdict: Verdict

    @property
    def findings(self) -> tuple[Finding, ...]:
        """First cause first; () if nothing is wrong."""
        return self.verdict.findings

    def ranks(self) -> Shown:
        """Where each rank stands."""
        return show_ranks(self.verdict.standings)

    def lanes(self, *, newest: int | None = 20) -> Shown:
        """Who waited for whom in the newest calls."""
        assert self.verdict.trace is not None
        return show_lanes(rendezvous_lanes(self.verdict.trace, until_ns=self.verdict.now_ns), newest=newest)

    def save(self, path: str | Path) -> Path:
        """The same as one page to open in a browser. Raises FileExistsError."""
        return write_report(Path(path), self.verdict, command="a notebook's cluster", command_status=None)

    def __repr__(self) -> str:
        return str(self.verdict)


def xray_cluster(directory: Path) -> ClusterXray:
    """Read the traces of the cluster in `directory`. A rank that is not in a call now counts as missing from it. Local.

    Raises: TraceError if no rank has left a trace.
    """
    trace = read_directory(directory / "trace", complete=_since_rebuild)
    return ClusterXray(judge_trace(trace, now_ns=time.time_ns(), deadline_s=0.0))


def _since_rebuild(rank: RankTrace) -> RankTrace:
    """Without what happened before the cluster was last rebuilt: those groups are gone."""
    starts = [n for n, e in enumerate(rank.events) if e.op == "generation"]
    return replace(rank, events=rank.events[starts[-1] :]) if starts else rank
