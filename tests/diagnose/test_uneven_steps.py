"""Ranks that make unequal numbers of calls in a step: which of them left one out, or made one in addition.

Exact: kind, ranks, certainty and consequence of the findings. Where both are possible, both are said, and it is likely.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.diagnose.made import Made, group, site
from workbench.diagnose import Certainty, Finding, Kind, diagnose
from workbench.trace import Drops, GroupInfo

PAIR = group("tp", 0, 1)
FSDP = """\
def main():
    for batch in batches:
        model(batch).sum().backward()
        if rank == 0:
            clip(model)
    norm = sum(p.full_tensor() for p in model.parameters())
"""


def _source(text: str) -> Callable[[str, int], str]:
    lines = text.splitlines(keepends=True)
    return lambda _file, n: lines[n - 1] if 0 < n <= len(lines) else ""


def _judge(made: Made, text: str = "") -> list[Finding]:
    made.pause(31)
    return list(diagnose(made.trace(), deadline_s=30.0, now_ns=made.now_ns, source=_source(text)))


def _said(findings: list[Finding]) -> list[tuple[Kind, tuple[int, ...], str, bool]]:
    return [(f.kind, f.ranks, f.certainty.value, f.consequence) for f in findings]


def _fsdp(world_size: int, *, steps: int, other: dict[int, tuple[str, int, str]]) -> Finding:
    """Steps of a gather and a scatter from line 3; then `other` ranks make (op, line, function) where the rest step."""
    made, members = Made(world_size), group("world", *range(world_size))
    for _ in range(steps):
        for op in ("all_gather_into_tensor", "reduce_scatter_tensor"):
            for rank in range(world_size):
                made.call(rank, op, members, shape=(272,), dtype="float32", site=site(3))
    for rank in range(world_size):
        op, line, function = other.get(rank, ("all_gather_into_tensor", 3, "main"))
        note = "async; below Python" if rank in other else ""
        shape = (16,) if rank in other else (272,)
        made.begin(rank, op, members, shape=shape, dtype="float32", site=site(line, function), note=note)
    return _judge(made, FSDP)[0]


@pytest.mark.parametrize("steps", [1, 3])
def test_who_gathers_the_weights_while_others_step_left_out_a_step(steps: int) -> None:
    end = ("all_gather_into_tensor", 6, "main.<locals>.<genexpr>")
    found = _fsdp(2, steps=steps, other={1: end})
    assert (found.kind, found.ranks, found.certainty) == (Kind.MISSING_CALL, (1,), Certainty.IS)
    assert "the same number of batches" in found.fix
    assert "join" not in found.fix  # FSDP has none


def test_where_most_ranks_left_the_loop_the_one_that_steps_on_is_named_as_likely() -> None:
    end = ("all_gather_into_tensor", 6, "main.<locals>.<genexpr>")
    found = _fsdp(3, steps=2, other={1: end, 2: end})
    assert (found.kind, found.ranks, found.certainty) == (Kind.ORDINAL_DRIFT, (0,), Certainty.LIKELY)
    assert "one call more on world rank 0, or one that world ranks 1,2 left out" in found.message


@pytest.mark.parametrize("steps", [1, 3])
def test_a_call_that_one_of_many_makes_is_one_more_there_or_left_out_by_the_others(steps: int) -> None:
    found = _fsdp(4, steps=steps, other={0: ("all_reduce", 5, "main")})
    assert found.ranks == (0,)
    assert found.certainty is Certainty.LIKELY
    assert "batches" not in found.fix or "if all_reduce in main (train.py:5) is one call more" in found.fix


def test_of_two_ranks_in_their_first_step_both_may_be_at_fault() -> None:
    found = _fsdp(2, steps=1, other={0: ("all_reduce", 5, "main")})
    assert (found.ranks, found.certainty) == ((0, 1), Certainty.LIKELY)
    assert "or one that world rank 1 left out" in found.message


def test_the_advice_on_gradients_holds_for_no_sync_too() -> None:
    text = "def main():\n    for batch in batches:\n        loss(batch).backward()\n    all_gather_object(x)\n"
    made = Made(2)
    for _ in range(3):
        for rank in (0, 1):
            made.call(rank, "all_reduce", PAIR, site=site(3), note="async; below Python")
    made.begin(0, "all_reduce", PAIR, site=site(3), note="async; below Python")
    made.begin(1, "all_gather_object", PAIR, site=site(4))
    found = _judge(made, text)[0]
    assert (found.ranks, found.certainty) == ((1,), Certainty.IS)
    for advice in ("no_sync() on all ranks or on none", "the same number of batches", "DistributedDataParallel.join()"):
        assert advice in found.fix


def _layers(*, steps: int) -> Made:
    """Steps of three sums on [0,1] and on [2,3] and one over all; in the last one, 1 goes on without it."""
    made, all_four = Made(4), group("world", 0, 1, 2, 3, ordinal=2)
    pairs = [group("tp", 0, 1), group("tp", 2, 3, ordinal=1)]
    for step in range(steps):
        for rank in range(4):
            for _ in range(3):
                made.call(rank, "all_reduce", pairs[rank // 2], site=site(8))
        for rank in range(4):
            if step < steps - 1:
                made.call(rank, "all_reduce", all_four, site=site(10))
            elif rank == 1:
                made.begin(rank, "all_reduce", pairs[0], site=site(8))
            else:
                made.begin(rank, "all_reduce", all_four, site=site(10))
    return made


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_of_a_circle_the_rank_that_all_others_wait_for_left_the_call_out(steps: int) -> None:
    first, second = _judge(_layers(steps=steps))
    assert (first.ranks, first.certainty, first.consequence) == ((1,), Certainty.IS, False)
    assert first.kind in (Kind.MISSING_CALL, Kind.RENDEZVOUS_PARTIAL)
    assert (second.ranks, second.consequence) == ((0,), True)


def _stages(made: Made, counts: tuple[int, int]) -> None:
    for _ in range(min(counts)):
        made.call(0, "send", PAIR, peer_world_rank=1, site=site(9))
        made.call(1, "recv", PAIR, peer_world_rank=0, site=site(10))


@pytest.mark.parametrize("steps", [1, 2])
def test_a_microbatch_too_many_is_told_by_the_steps_before(steps: int) -> None:
    made = Made(2)
    for _ in range(steps):
        _stages(made, (4, 4))
        for rank in (0, 1):
            made.call(rank, "all_reduce", PAIR, site=site(11))
    _stages(made, (4, 4))
    made.begin(0, "all_reduce", PAIR, site=site(11))
    made.begin(1, "recv", PAIR, peer_world_rank=0, site=site(10))
    first, second = _judge(made)
    assert _said([first, second]) == [
        (Kind.MISSING_CALL, (1,), "likely", False),
        (Kind.MISSING_CALL, (0,), "likely", True),
    ]
    assert "is one too many, or world rank 0 left out a send" in first.message


def test_in_the_first_step_nobody_knows_and_both_are_named() -> None:
    made = Made(2)
    _stages(made, (4, 4))
    made.begin(0, "all_reduce", PAIR, site=site(11))
    made.begin(1, "recv", PAIR, peer_world_rank=0, site=site(10))
    first, *others = _judge(made)
    assert _said([first]) == [(Kind.MISSING_CALL, (0, 1), "likely", False)]
    assert (
        "One of them left a call out before, or made one too many; or their calls are in two orders." in first.message
    )
    assert all(f.consequence for f in others)


def _stage_without_a_recv(line: int) -> list[Finding]:
    """2 leaves out a recv from 0 and what follows from it, and meets 3's call at `line` in a later sum."""
    made, tp, pp = Made(4), group("tp", 2, 3), group("pp", 0, 2, ordinal=1)
    made.call(0, "send", pp, peer_world_rank=2, site=site(7))
    made.call(2, "recv", pp, peer_world_rank=0, site=site(9))
    for rank in (2, 3):
        made.call(rank, "all_gather", tp, site=site(10), shape=(8,), dtype="float32")
    for rank in (2, 3):
        made.call(rank, "all_reduce", tp, site=site(11))
    made.begin(0, "send", pp, peer_world_rank=2, site=site(7))
    made.begin(2, "all_reduce", tp, site=site(11))
    made.begin(3, "all_gather" if line == 10 else "all_reduce", tp, site=site(line), shape=(9,), dtype="float32")
    return _judge(made)


def test_a_recv_left_out_stands_before_the_mismatch_it_leads_to() -> None:
    first, second = _said(_stage_without_a_recv(10))
    assert first == (Kind.MISSING_CALL, (2,), "is", False)
    assert second[1:] == ((2,), "likely", True)


def test_a_mismatch_of_one_line_does_not_follow_from_it() -> None:
    assert (Kind.SHAPE_MISMATCH, (2, 3), "is", False) in _said(_stage_without_a_recv(11))


def test_a_difference_stands_before_a_later_call_of_the_same_group_that_a_rank_left_out_too() -> None:
    """Two buckets of gradients, of which the first met another call."""
    text = "def main():\n    for batch in batches:\n        loss(batch).backward()\n    all_gather_object(x)\n"
    made = Made(2)
    for _ in range(4):
        for rank in (0, 1):
            made.call(rank, "all_reduce", PAIR, site=site(3), note="async; below Python")
    for _ in range(2):
        made.begin(0, "all_reduce", PAIR, site=site(3), note="async; below Python")
    made.begin(1, "all_gather_object", PAIR, site=site(4))
    first, second = _judge(made, text)
    assert first.message.startswith("world rank 1 left out the gradient sum that world rank 0 makes")
    assert _said([first, second]) == [
        (Kind.MISSING_CALL, (1,), "is", False),
        (Kind.MISSING_CALL, (1,), "likely", True),
    ]


def _message(sent: list[tuple[int, ...]], taken: list[tuple[int, ...]], *, ended: bool, dtype: str = "float32") -> Made:
    made = Made(2)
    for shape in sent:
        made.call(0, "send", PAIR, peer_world_rank=1, site=site(5), shape=shape, dtype="float32")
    for shape in taken[: None if ended else -1]:
        made.call(1, "recv", PAIR, peer_world_rank=0, site=site(6), shape=shape, dtype=dtype)
    if not ended:
        made.begin(1, "recv", PAIR, peer_world_rank=0, site=site(6), shape=taken[-1], dtype=dtype)
        made.exit(1, status=-6)
    return made


@pytest.mark.parametrize("room", [(4, 2), (16, 2)], ids=["smaller", "larger"])
@pytest.mark.parametrize("ended", [False, True])
def test_a_message_of_another_size_than_its_buffer_is_told_before_the_end_it_leads_to(
    room: tuple[int, ...], ended: bool
) -> None:
    findings = list(diagnose(_message([(8,), (8, 2)], [(8,), room], ended=ended).trace()))
    assert _said(findings[:1]) == [(Kind.SHAPE_MISMATCH, (0, 1), "is", False)]
    assert "world rank 0 sends float32[8, 2] to world rank 1 (send in main (train.py:5))" in findings[0].message
    assert f"receives float32{list(room)} (recv in main (train.py:6))" in findings[0].message
    assert all(f.consequence for f in findings[1:])
    assert len(findings) == 2 - ended


@pytest.mark.parametrize(("room", "dtype"), [((16,), "float32"), ((8, 2), "int32"), ((32,), "bfloat16")])
def test_a_message_of_equal_size_in_another_shape_is_none(room: tuple[int, ...], dtype: str) -> None:
    assert diagnose(_message([(8, 2)], [room], ended=True, dtype=dtype).trace()) == ()


def test_messages_that_may_have_changed_places_are_no_finding_where_they_went_well() -> None:
    assert diagnose(_message([(8,), (4,)], [(4,), (8,)], ended=True).trace()) == ()
    first = diagnose(_message([(8,), (4,)], [(4,)], ended=False).trace())[0]
    assert (first.kind, first.certainty) == (Kind.SHAPE_MISMATCH, Certainty.LIKELY)
    assert "compare the order of the calls on both sides" in first.fix


def _tagged(
    sent: list[str], taken: list[str], *, path: str = "gloo", waits_in: GroupInfo | None = PAIR
) -> list[Finding]:
    """Sends of rank 0 and receives of rank 1 with these words about their tags; the last receive waits, and rank 0 in a
    barrier of a group."""
    made = Made(3)
    for note in sent:
        made.call(0, "send", PAIR, peer_world_rank=1, site=site(5), shape=(8,), path=path, note=note)
    for note in taken[:-1]:
        made.call(1, "recv", PAIR, peer_world_rank=0, site=site(6), shape=(8,), path=path, note=note)
    made.begin(1, "recv", PAIR, peer_world_rank=0, site=site(6), shape=(8,), path=path, note=taken[-1])
    if waits_in is not None:
        made.begin(0, "barrier", waits_in, site=site(7))
    made.pause(31)
    return list(diagnose(made.trace(), deadline_s=30.0, now_ns=made.now_ns))


def test_a_receive_under_a_tag_that_nobody_sends_is_told_with_the_one_that_is_left_over() -> None:
    first = _tagged(["tag 3", "tag 1"], ["tag 3", "tag 2"])[0]
    assert (first.kind, first.ranks, first.certainty) == (Kind.OP_MISMATCH, (0, 1), Certainty.LIKELY)
    assert "waits for world rank 0 in recv under tag 2 (recv in main (train.py:6))" in first.message
    assert "left over there is send under tag 1 (send in main (train.py:5))" in first.message
    first = _tagged(["", "async"], ["", "tag 2"])[0]
    assert "left over there is send under tag 0" in first.message


def test_what_has_one_tag_or_is_taken_in_order_by_nccl_is_not_told_by_its_tags() -> None:
    for told in (_tagged(["tag 1", "tag 2"], ["tag 2", "tag 1"]), _tagged(["tag 1"], ["tag 2"], path="nccl")):
        assert Kind.OP_MISMATCH not in [f.kind for f in told]


def test_a_sender_that_may_yet_send_is_not_told_by_the_tag_of_what_it_sent_before() -> None:
    for waits_in in (None, group("pp", 0, 2)):
        told = _tagged(["tag 9"], ["tag 3"], waits_in=waits_in)
        assert Kind.OP_MISMATCH not in [f.kind for f in told]
    assert (told[0].kind, told[0].ranks) == (Kind.RENDEZVOUS_PARTIAL, (2,)), "it waits for another"


@pytest.mark.parametrize("rank", [0, 1])
def test_messages_are_not_paired_where_records_are_lost(rank: int) -> None:
    made = _message([(8,)], [(4,)], ended=True)
    made.drops = {rank: Drops(table_lost=True)}
    assert diagnose(made.trace()) == ()


@pytest.mark.parametrize(("rank", "kinds"), [(0, {Kind.SHAPE_MISMATCH, Kind.PEER_DEAD}), (1, {Kind.PEER_DEAD})])
def test_nor_where_the_receiver_takes_from_any_rank(rank: int, kinds: set[Kind]) -> None:
    made = _message([(8,), (4,)], [(4,)], ended=False)
    made.call(rank, "recv", None, note="from any rank on tp[0,1]")
    assert {f.kind for f in diagnose(made.trace())} == kinds
