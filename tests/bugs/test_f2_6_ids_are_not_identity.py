"""facebookresearch/param#183.

Symptom: a tool that replays recorded collectives joins the wrong peers. Cause: it matched groups by their id, and ranks
give one id to different member lists: "2" is [0,1] on ranks 0 and 1, and [2,3] on ranks 2 and 3. Modelled on records.
"""

from __future__ import annotations

from workbench.ranks import GroupKey
from workbench.trace import Presence, from_flight_recorder, rendezvous_lanes

MEMBERS = {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]}


def _dump(rank: int) -> dict:
    """One all-reduce on the group that this rank calls 2."""
    entry = {
        "record_id": 0,
        "pg_id": 2,
        "process_group": ("2", "tp"),
        "collective_seq_id": 1,
        "p2p_seq_id": 0,
        "op_id": 1,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": 1_000 + rank,
        "input_sizes": [[8]],
        "input_dtypes": ["Float"],
        "state": "completed",
        "time_discovered_completed_ns": 2_000,
        "retired": True,
        "is_p2p": False,
        "frames": [],
    }
    table = {"2": {"name": "2", "desc": "tp", "ranks": str(MEMBERS[rank])}}
    return {"version": "2.10", "pg_config": table, "entries": [entry]}


def test_old_joined_by_id_ranks_of_two_groups_meet_in_one_call() -> None:
    joined: dict[str, set[int]] = {}
    for rank in MEMBERS:
        for entry in _dump(rank)["entries"]:
            joined.setdefault(entry["process_group"][0], set()).add(rank)
    assert joined == {"2": {0, 1, 2, 3}}  # right: two groups of two


def test_joined_by_members_each_group_meets_itself_and_nobody_is_missing() -> None:
    lanes = rendezvous_lanes(from_flight_recorder({rank: _dump(rank) for rank in MEMBERS}))
    assert [c.group.key for c in lanes.calls] == [GroupKey("tp", (0, 1)), GroupKey("tp", (2, 3))]
    assert [[(v.world_rank, v.presence) for v in c.visits] for c in lanes.calls] == [
        [(0, Presence.LEFT), (1, Presence.LEFT)],
        [(2, Presence.LEFT), (3, Presence.LEFT)],
    ]


def test_groups_of_equal_size_and_kind_are_different_groups() -> None:
    assert GroupKey("tp", (0, 1)) != GroupKey("tp", (2, 3))
    assert GroupKey("tp", (0, 1)) != GroupKey("tp", (1, 0))
