"""No finding on a correct program: random schedules that every rank follows, whole, cut, and with records lost."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.diagnose.made import Made, group, site
from workbench.diagnose import diagnose
from workbench.trace import Drops, Event, GroupInfo, Phase, RankTrace, Trace, align

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter_tensor", "barrier", "all_to_all_single")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
OBJECTS = ("broadcast_object_list", "all_gather_object", "gather_object", "monitored_barrier")
RANDOM = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclass(frozen=True)
class Step:
    """One thing that all ranks of a program do, each in its part."""

    what: str
    group: int
    root: int
    size: int
    line: int
    late: bool
    own_lines: bool


STEPS = st.lists(
    st.builds(
        Step,
        what=st.sampled_from(
            [*COLLECTIVES, *ROOTED, *OBJECTS, "send", "any", "store", "capture", "local_group", "group"]
        ),
        group=st.integers(0, 7),
        root=st.integers(0, 7),
        size=st.integers(0, 3),
        line=st.integers(1, 5),
        late=st.booleans(),
        own_lines=st.booleans(),
    ),
    min_size=1,
    max_size=25,
)


class Program:
    """The records of a correct program: every rank goes through the same steps at its own pace."""

    def __init__(self, world_size: int, steps: list[Step], choices: random.Random) -> None:
        self.made = Made(world_size)
        self._choices = choices
        self._lists: list[tuple[int, ...]] = [tuple(range(world_size))]
        self._groups: list[dict[int, GroupInfo]] = [{}]  # by rank: the ordinal may differ where groups are local
        self._num: Counter[int] = Counter()
        self._waits: dict[int, list[Event]] = {r: [] for r in range(world_size)}
        for rank in range(world_size):
            self._groups[0][rank] = group("world", *self._lists[0], ordinal=0, label="0")
            self.made.call(rank, "init_process_group", self._groups[0][rank])
            self._num[rank] = 1
        for step in steps:
            self._take(step)
        for rank in range(world_size):
            if choices.random() < 0.7:  # else calls that were started are left to the end of the process
                for begun in self._waits[rank]:
                    self.made.call(rank, "wait", note=f"for {begun.op}")
                    self.made.end(begun)
            self.made.exit(rank)

    def _take(self, step: Step) -> None:
        members = self._lists[step.group % len(self._lists)]
        infos = self._groups[step.group % len(self._lists)]
        ranks = list(members)
        self._choices.shuffle(ranks)
        if step.what in ("group", "local_group"):
            self._new_group(step, local=step.what == "local_group")
        elif step.what in ("send", "any"):
            self._exchange(step, ranks, infos)
        elif step.what == "store":
            for rank in ranks:
                self.made.call(rank, "store_wait", note=f"step/{step.line}/{step.size}", site=site(step.line))
        else:
            begun = [self._begin(step, rank, infos[rank], members) for rank in ranks]
            for event in begun:
                if step.late:
                    self._waits[event.world_rank].append(event)
                else:
                    self.made.end(event)

    def _begin(self, step: Step, rank: int, info: GroupInfo, members: tuple[int, ...]) -> Event:
        op = "all_reduce" if step.what == "capture" else step.what
        leads = step.own_lines and rank == members[step.root % len(members)]
        fields: dict[str, Any] = {"site": site(step.line + 100 * leads)}
        if op not in (*OBJECTS, "barrier"):
            rows = rank if op == "all_to_all_single" else step.size
            fields |= {"shape": (rows, 4), "dtype": "float32", "stride_class": "contiguous"}
        if op in ROOTED or op in ("broadcast_object_list", "gather_object"):
            fields |= {"root_world_rank": members[step.root % len(members)]}
        if step.late:
            fields |= {"note": "async" if info.ordinal else "default group; async"}
        if step.what == "capture":
            capture = self.made.begin(rank, "capture")
            event = self.made.begin(rank, op, info, **fields, capture=True)
            self.made.end(capture)
            return event
        event = self.made.begin(rank, op, info, **fields)
        if op in ("all_gather_object", "broadcast_object_list"):
            inner = {"shape": (8 + rank,), "dtype": "uint8", "note": f"inside {op}"}
            self.made.call(rank, "all_gather" if op == "all_gather_object" else "broadcast", info, **inner)
        return event

    def _exchange(self, step: Step, ranks: list[int], infos: dict[int, GroupInfo]) -> None:
        """A tensor from one rank to another, received by name or from whoever sends."""
        if len(ranks) < 2:
            return
        source, target = ranks[:2]
        fields: dict[str, Any] = {"shape": (step.size,), "dtype": "float32", "site": site(step.line)}
        send = self.made.begin(source, "send", infos[source], peer_world_rank=target, **fields)
        if step.what == "any":
            self.made.call(target, "recv", None, note=f"from any rank on {infos[target]}")
        else:
            note = {"note": "async"} if step.late else {}
            receive = self.made.begin(target, "recv", infos[target], peer_world_rank=source, **fields, **note)
            if step.late:
                self._waits[target].append(receive)
            else:
                self.made.end(receive)
        self.made.end(send)

    def _new_group(self, step: Step, *, local: bool) -> None:
        world = self._lists[0]
        members = tuple(sorted(self._choices.sample(world, 1 + step.root % len(world))))
        ranks = list(members if local else world)
        self._choices.shuffle(ranks)
        label = "%040x" % (len(self._lists) + 7) if local else str(len(self._lists))
        infos = {r: group("group", *members, ordinal=self._num[r], label=label) for r in ranks}
        begun = [self.made.begin(r, "new_group", infos[r], note="no timeout given") for r in ranks]
        for event in begun:
            self._num[event.world_rank] += 1
            self.made.end(event)
        self._lists.append(members)
        self._groups.append({r: infos[r] for r in members})


@RANDOM
@given(st.integers(1, 6), STEPS, st.randoms(use_true_random=False))
def test_nothing_is_said_of_a_program_that_ended_well(
    world_size: int, steps: list[Step], choices: random.Random
) -> None:
    assert diagnose(Program(world_size, steps, choices).made.trace()) == ()


@RANDOM
@given(st.integers(2, 6), STEPS, st.randoms(use_true_random=False), st.floats(0, 1))
def test_nothing_is_said_while_it_runs(world_size: int, steps: list[Step], choices: random.Random, part: float) -> None:
    made = Program(world_size, steps, choices).made
    until = int(made.now_us * part)
    whole = made.trace()
    seen = [replace(r, events=tuple(e for e in r.events if e.time_ns <= until * 1000)) for r in whole.ranks]
    assert diagnose(align(seen), deadline_s=60.0, now_ns=made.now_ns) == ()


@RANDOM
@given(st.integers(2, 6), STEPS, st.randoms(use_true_random=False), st.floats(0, 1))
def test_nothing_is_said_where_a_rank_lost_its_oldest_records(
    world_size: int, steps: list[Step], choices: random.Random, part: float
) -> None:
    whole = Program(world_size, steps, choices).made.trace()
    assert diagnose(_with_losses(whole, choices.randrange(world_size), part)) == ()


def _with_losses(trace: Trace, world_rank: int, part: float) -> Trace:
    def lose(rank: RankTrace) -> RankTrace:
        lost = int(len(rank.events) * part)
        by_group = Counter(e.group for e in rank.events[:lost])
        drops = Drops(total=lost, by_group=tuple(by_group.items()))
        return replace(rank, events=rank.events[lost:], drops=drops)

    return align(lose(r) if r.world_rank == world_rank else r for r in trace.ranks)


def test_the_random_programs_hold_what_they_are_to_test() -> None:
    choices = random.Random(4)
    whats = [*COLLECTIVES, *ROOTED, *OBJECTS, "send", "any", "store", "capture", "local_group", "group"]
    steps = [Step(w, n % 5, n, n % 3, 1 + n % 4, n % 2 == 0, n % 3 == 0) for n, w in enumerate(whats * 3)]
    events = Program(4, steps, choices).made.trace().events
    assert {e.op for e in events} >= {*COLLECTIVES, *ROOTED, *OBJECTS, "send", "recv", "capture", "new_group", "wait"}
    assert any(e.capture for e in events)
    assert {e.phase for e in events} == set(Phase)


@pytest.mark.parametrize("turns", [2, 3])
def test_ranks_that_take_turns_at_two_lines_are_no_swap(turns: int) -> None:
    """In turn i rank i sums its own tensor and the others sum zeros: two lines of one function, in any order."""
    made, world = Made(turns), group("world", *range(turns))
    for turn in range(turns):
        begun = [made.begin(r, "all_reduce", world, site=site(10 if r == turn else 12)) for r in range(turns)]
        for event in begun:
            made.end(event)
    made.exit(*range(turns))
    text = {10: "dist.all_reduce(mine)", 12: "dist.all_reduce(zeros)"}
    assert diagnose(made.trace(), source=lambda _file, line: text[line]) == ()
