"""What happened on each rank: events, the recorder that writes them, readers, exports, and who waited for whom."""

from workbench.trace.event import CallSite, Event, GroupInfo, Phase, TraceError, stride_class
from workbench.trace.reader import read_directory, read_progress, read_rank
from workbench.trace.recorder import Lane, Recorder, Token
from workbench.trace.records import Drops, Header, RankTrace, Trace, align

__all__ = [
    "CallSite",
    "Drops",
    "Event",
    "GroupInfo",
    "Header",
    "Lane",
    "Phase",
    "RankTrace",
    "Recorder",
    "Token",
    "Trace",
    "TraceError",
    "align",
    "read_directory",
    "read_progress",
    "read_rank",
    "stride_class",
]
