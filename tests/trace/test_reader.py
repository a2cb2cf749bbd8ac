"""Reading files that are torn, cut, foreign or hostile. Pinned: TraceError with the file's name, or counted damage."""

from __future__ import annotations

import json
import os
import random
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from workbench.ranks import GroupKey
from workbench.trace import Event, Phase, RankTrace, Recorder, TraceError, align, layout, read_directory, read_rank

SMALL = 64 << 10
RING_AT = 4096 + 4096 + 16384


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Rank 2's file: five calls on tp[0,2], the second with a note."""
    with Recorder.open(tmp_path, 2, size_bytes=SMALL) as rec:
        lane = rec.group(GroupKey("tp", (0, 2)), label="tp")
        for n in range(5):
            lane.end(lane.begin("all_reduce", shape=(n, 8)), note="slow" if n == 1 else "")
    return tmp_path / "rank-00002.wbtrace"


def patch(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as f:
        f.seek(offset)
        f.write(data)


def test_a_record_cut_short_is_passed_over_and_counted(path: Path) -> None:
    last = RING_AT + 10 * 80
    patch(path, last + 72, struct.pack("<Q", 7))
    found = read_rank(path)
    assert [(e.phase.value, e.sequence) for e in found.events][-1] == ("B", 5)
    assert (len(found.events), found.drops.damaged, found.drops.total) == (9, 1, 1)
    assert not found.drops.complete


def test_a_note_whose_end_is_missing_says_so(path: Path) -> None:
    patch(path, RING_AT + 4 * 80 + 25, b"\0")  # the flag of the last part
    assert read_rank(path).events[3].note == "slow..."


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "0 bytes long, a trace file has a header of 4096"),
        (b"x" * 100, "100 bytes long"),
        (b"PK\3\4" + b"x" * 8000, "starts with b'PK"),
        (bytes(70000), "died while making it"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_by_name(tmp_path: Path, content: bytes, found: str) -> None:
    path = tmp_path / "rank-00000.wbtrace"
    path.write_bytes(content)
    with pytest.raises(TraceError) as refused:
        read_rank(path)
    assert str(path) in str(refused.value)
    assert found in str(refused.value)


def test_a_cut_file_is_refused_with_both_sizes(path: Path) -> None:
    os.truncate(path, 40_000)
    with pytest.raises(TraceError, match="40000 bytes long, its header declares 65536: the file was cut"):
        read_rank(path)


@pytest.mark.parametrize("offset", range(8, 64, 8))
@pytest.mark.parametrize("value", [0, 1, 1 << 31, (1 << 64) - 1])
def test_a_header_with_other_sizes_is_refused_before_anything_is_allocated(path: Path, offset: int, value: int) -> None:
    patch(path, offset, struct.pack("<Q", value))
    with pytest.raises(TraceError, match="header"):
        read_rank(path)


def test_a_pipe_or_directory_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank-00000.wbtrace")
    with pytest.raises(TraceError, match="not a regular file"):
        read_rank(tmp_path / "rank-00000.wbtrace")


def test_a_table_that_makes_no_sense_costs_the_events_that_need_it(path: Path) -> None:
    patch(path, 8192, b"[" * 16000)
    found = read_rank(path)
    assert (found.events, found.groups, found.drops.damaged) == ((), (), 10)


def test_a_record_that_names_the_wrong_sort_of_thing_is_damaged(path: Path) -> None:
    patch(path, RING_AT + 28, struct.pack("<I", 3))  # its group is the text of its op
    found = read_rank(path)
    assert (len(found.events), found.drops.damaged) == (9, 1)


def test_random_damage_never_does_more_than_raise_trace_error(path: Path) -> None:
    whole, chance = path.read_bytes(), random.Random(4)
    outcomes = {"read": 0, "refused": 0}
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(chance.choice((1, 4, 64))):
            data[
                chance.choice(
                    (chance.randrange(4600), chance.randrange(8192, 8800), chance.randrange(RING_AT, RING_AT + 900))
                )
            ] = chance.randrange(256)
        path.write_bytes(data)
        try:
            assert isinstance(read_rank(path), RankTrace)
            outcomes["read"] += 1
        except TraceError:
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 20


def test_a_directory_with_one_bad_file_gives_the_others_and_names_it(path: Path) -> None:
    (path.parent / "rank-00007.wbtrace").write_bytes(b"junk")
    (path.parent / "copy-of-2.wbtrace").write_bytes(path.read_bytes())
    trace = read_directory(path.parent)
    assert trace.world_ranks == (2,)
    assert [(Path(p).name, t.split(": ", 1)[1][:30]) for p, t in trace.unreadable] == [
        ("rank-00002.wbtrace", "another file holds world rank "),
        ("rank-00007.wbtrace", "4 bytes long, a trace file has"),
    ]
    assert not trace.complete


def test_a_directory_without_traces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"no trace in .*: no file \*.wbtrace found"):
        read_directory(tmp_path)


def test_ranks_of_one_boot_keep_their_exact_order_and_hosts_meet_by_wall_clock(path: Path) -> None:
    one = read_rank(path)

    def copy(world_rank: int, boot_id: str, monotonic_ns: int, wall_ns: int, times: list[int]) -> RankTrace:
        header = replace(
            one.header,
            world_rank=world_rank,
            boot_id=boot_id,
            anchor_monotonic_ns=monotonic_ns,
            anchor_wall_ns=wall_ns,
        )
        events = [
            replace(e, world_rank=world_rank, time_ns=t, ordinal=n)
            for n, (e, t) in enumerate(zip(one.events, times, strict=False))
        ]
        return replace(one, header=header, events=tuple(events))

    a = copy(0, "x", 10, 1010, [20, 40])
    b = copy(1, "x", 12, 9000, [30])  # its wall clock was stepped after the boot: not used
    c = copy(2, "y", 500, 1000, [535])
    trace = align([c, b, a])
    assert [(e.world_rank, e.time_ns) for e in trace.events] == [(0, 1020), (1, 1030), (2, 1035), (0, 1040)]
    assert trace.num_clocks == 2


def test_the_header_holds_only_what_is_listed(path: Path) -> None:
    head = path.read_bytes()[layout.PREFIX.size : 4096].rstrip(b"\0")
    assert sorted(json.loads(head)) == [
        "anchor_monotonic_ns",
        "anchor_wall_ns",
        "attempt",
        "boot_id",
        "host",
        "pid",
        "versions",
        "world_rank",
    ]


def test_a_moved_event_differs_in_its_time_alone() -> None:
    event = Event(time_ns=5, world_rank=1, phase=Phase.END, op="recv", peer_world_rank=0, note="a", capture=True)
    assert event.moved(7) == replace(event, time_ns=12)
    assert event.time_ns == 5
