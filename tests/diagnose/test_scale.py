"""64 ranks with 10,000 events each: what a diagnosis costs. It is printed; only its growth is bounded."""

from __future__ import annotations

import resource
import time
from dataclasses import replace

import pytest

from tests.diagnose.made import Made, group, site
from workbench.diagnose import Kind, diagnose
from workbench.trace import Event, Phase, RankTrace, Trace, align


def _trace(num_ranks: int, num_events: int, *, skip: int | None = None) -> Trace:
    """Tensor-parallel groups of eight and the world in turn; `skip`: this rank leaves out its last call."""
    made = Made(num_ranks)
    world = group("world", *range(num_ranks))
    tps = [group("tp", *range(i, i + 8), ordinal=1 + i // 8) for i in range(0, num_ranks, 8)]
    one = [made.call(0, "all_reduce", g, site=site(10 + n)) for n, g in enumerate((tps[0], world))]
    ranks = []
    for rank, header in ((r.world_rank, r.header) for r in made.trace().ranks):
        groups = (tps[rank // 8], world)
        events: list[Event] = []
        for number in range(num_events // 2):
            if rank == skip and number == num_events // 2 - 1:
                break
            like = replace(one[number % 2], world_rank=rank, group=groups[number % 2], sequence=number // 2 + 1)
            for phase, at_ns in ((Phase.BEGIN, 2_000 * number + 10 * rank), (Phase.END, 2_000 * number + 1_500)):
                events.append(replace(like, phase=phase, time_ns=at_ns, ordinal=len(events)))
        if skip is not None and number == num_events // 2 - 1 and rank != skip:
            events.pop()  # waits in the call
        ranks.append(RankTrace(header=header, events=tuple(events), groups=groups))
    return align(ranks)


@pytest.mark.timeout(600)
def test_the_cost_grows_with_the_events_and_not_with_their_square(capsys) -> None:
    def seconds(trace: Trace) -> float:
        started = time.process_time()
        assert diagnose(trace) == ()
        return time.process_time() - started

    small, large = _trace(64, 1_000), _trace(64, 10_000)
    assert len(large.events) == 640_000
    tenth, whole = seconds(small), seconds(large)
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    with capsys.disabled():
        print(
            f"\n64 ranks x 10,000 events: {whole:.1f} s of CPU, {peak_gib:.2f} GiB peak; a tenth of them: {tenth:.1f} s"
        )
    assert whole < 40 * tenth
    assert peak_gib < 2


def _many_groups(number: int) -> Trace:
    """A call on each of these groups of all four ranks; rank 3 raised before the last half of them."""
    made = Made(4)
    groups = [group("group", 0, 1, 2, 3, ordinal=n + 1, label=str(n + 1)) for n in range(number)]
    for n, one in enumerate(groups):
        for rank in range(3 if n >= number // 2 else 4):
            made.groups[rank].setdefault(one)
            made.call(rank, "all_reduce", one, sequence=1)
    made.instant(3, "exception", error="ValueError: bad sample")
    made.exit(3, status=1)
    return made.trace()


def test_the_cost_grows_with_the_groups_and_not_with_their_square() -> None:
    def seconds(trace: Trace) -> float:
        started = time.process_time()
        assert diagnose(trace)[0].ranks == (3,)
        return time.process_time() - started

    tenth, whole = seconds(_many_groups(600)), seconds(_many_groups(6_000))
    assert whole < 30 * tenth


def test_in_a_large_trace_the_one_rank_that_left_out_the_last_call_is_named() -> None:
    (finding,) = diagnose(_trace(64, 2_000, skip=37))
    assert (finding.kind, finding.ranks) == (Kind.MISSING_CALL, (37,))
