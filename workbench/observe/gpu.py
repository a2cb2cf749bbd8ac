"""Collectives on a GPU: Python's call returns at once, so each ends when torch's own Flight Recorder says it is done.

That recorder is kept by torch for NCCL in any case; looking into it neither waits nor adds work to a stream. While a
graph is captured it is left alone, and a captured call ends where its Python call does: what replays is the graph.
"""

from __future__ import annotations

import json
import os
from typing import Any

from workbench.observe.process import this_process
from workbench.trace import Lane, Token

REMARK = "on the GPU"
"""Opens the note of such a call: it is under way until its end, whoever waits for it and where."""

_open: dict[tuple[str, int], tuple[Lane, Token | None]] = {}


def start_on_gpu(process_group: Any, lane: Lane, token: Token | None) -> bool:
    """Remember a call that was just enqueued. False where its end cannot be seen: the caller ends it."""
    if this_process.capturing:
        return False
    try:
        name = (str(process_group.group_name), int(process_group._get_sequence_number_for_group()))
    except (RuntimeError, AttributeError):  # a backend that counts nothing
        return False
    _open[name] = (lane, token)
    return True


def end_finished() -> bool:
    """End the calls that are done; True while others are under way."""
    if _open and not this_process.capturing:
        from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]  # not in torch's stubs

        before = dict(_open)  # what is enqueued meanwhile is not in the dump, and not done
        active = active_calls(_dump_fr_trace_json(True, True))
        for name in before.keys() - active:
            lane, token = _open.pop(name)
            lane.end(token)
    return bool(_open)


def active_calls(dump: bytes | str) -> set[tuple[str, int]]:
    """(group name, sequence number) of the collectives that a Flight Recorder dump does not call completed."""
    entries = json.loads(dump).get("entries") or ()
    return {
        (str(e["process_group"][0]), int(e["collective_seq_id"]))
        for e in entries
        if not e.get("is_p2p") and e.get("state") != "completed"
    }


os.register_at_fork(after_in_child=_open.clear)
