"""What happened on each rank: events, the recorder that writes them, readers, exports, and who waited for whom."""

from workbench.trace.event import CallSite, Event, GroupInfo, Phase, TraceError, stride_class
from workbench.trace.recorder import Lane, Recorder, Token

__all__ = ["CallSite", "Event", "GroupInfo", "Lane", "Phase", "Recorder", "Token", "TraceError", "stride_class"]
