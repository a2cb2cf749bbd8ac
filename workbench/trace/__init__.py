"""What happened on each rank: events, the recorder that writes them, readers, exports, and who waited for whom."""

from workbench.trace.calls import RankCall, pair_calls
from workbench.trace.chrome import to_chrome
from workbench.trace.comparison import (
    Column,
    Comparison,
    Role,
    Row,
    Scenario,
    Spread,
    parse_comparison,
    read_comparison,
)
from workbench.trace.event import BY_HAND, CallSite, Event, GroupInfo, Phase, TraceError, stride_class
from workbench.trace.flight_recorder import (
    from_flight_recorder,
    load_dump,
    read_flight_recorder,
    to_flight_recorder,
    write_flight_recorder,
)
from workbench.trace.jsonl import from_jsonl, to_jsonl
from workbench.trace.lane_writer import Lane, Token, callers_key
from workbench.trace.lanes import Call, Lanes, Presence, Visit, rendezvous_lanes
from workbench.trace.members import find_members
from workbench.trace.on_gpu import allow_looks_during_captures, end_after_device, end_passed_calls
from workbench.trace.parts import Parts
from workbench.trace.reader import read_directory, read_progress, read_rank
from workbench.trace.recorder import Recorder
from workbench.trace.records import Drops, Header, RankTrace, Trace, align
from workbench.trace.remarks import ASKING, BELOW_PYTHON, BY_FUTURE, ON_GPU, SHUT_DOWN, STRANGERS
from workbench.trace.sample import Sample, tell_crowding
from workbench.trace.timeline import CaptureTimeline, Span, Stage, capture_timeline
from workbench.trace.torch_calls import PLAIN, ROOTED

__all__ = [
    "ASKING",
    "BELOW_PYTHON",
    "BY_FUTURE",
    "BY_HAND",
    "ON_GPU",
    "PLAIN",
    "ROOTED",
    "SHUT_DOWN",
    "STRANGERS",
    "Call",
    "CallSite",
    "CaptureTimeline",
    "Column",
    "Comparison",
    "Drops",
    "Event",
    "GroupInfo",
    "Header",
    "Lane",
    "Lanes",
    "Parts",
    "Phase",
    "Presence",
    "RankCall",
    "RankTrace",
    "Recorder",
    "Role",
    "Row",
    "Sample",
    "Scenario",
    "Span",
    "Spread",
    "Stage",
    "Token",
    "Trace",
    "TraceError",
    "Visit",
    "align",
    "allow_looks_during_captures",
    "callers_key",
    "capture_timeline",
    "end_after_device",
    "end_passed_calls",
    "find_members",
    "from_flight_recorder",
    "from_jsonl",
    "load_dump",
    "pair_calls",
    "parse_comparison",
    "read_comparison",
    "read_directory",
    "read_flight_recorder",
    "read_progress",
    "read_rank",
    "rendezvous_lanes",
    "stride_class",
    "tell_crowding",
    "to_chrome",
    "to_flight_recorder",
    "to_jsonl",
    "write_flight_recorder",
]
