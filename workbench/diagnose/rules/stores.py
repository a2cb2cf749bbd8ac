"""Waits for keys of a store that nobody writes, and a store that is used again.

Example: world ranks 0 and 1 wait for exchange/3/1/2, world rank 2 for exchange/3/0/0: the counter in the keys differs.
World rank 1 waits for weights/ready, which nobody writes. A second init_process_group on the same store under the same
prefix finds the keys of the first.
Claim: `ordinal-drift`, the ranks outside the largest party. `store-timeout`, the ranks that wait. `stale-store`, the
ranks that made the second group, whether or not anything was raised.
Evidence: the waits with their keys; both calls of init_process_group.
Try: count in each group and not in the process; compare the keys; give the second init a prefix of its own.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from workbench.diagnose.claim import Claim, Weight
from workbench.diagnose.finding import Kind
from workbench.diagnose.parties import at_fault, parties_words
from workbench.diagnose.scene import RankStory, Scene, marks, store_keys
from workbench.diagnose.words import call_words, raised, ranks_words
from workbench.trace import RankCall

_NUMBER = re.compile(r"\d+")
_TIMED_OUT = re.compile(r"timeout|timed out", re.IGNORECASE)


def rule(scene: Scene) -> Iterator[Claim]:
    yield from _waits(scene)
    yield from _used_again(scene)


def _waits(scene: Scene) -> Iterator[Claim]:
    stuck: dict[int, RankCall] = {}
    for rank, story in scene.ranks.items():
        for call in story.calls:
            if call.event.op == "store_wait" and call.begin is not None and _is_stuck(scene, story, call):
                stuck[rank] = call
    by_template: dict[str, dict[int, RankCall]] = defaultdict(dict)
    for rank, call in stuck.items():
        by_template[_NUMBER.sub("#", store_keys(call.event)[0])][rank] = call
    for calls in by_template.values():
        counters = _counters(calls)
        yield _drift(calls, counters) if counters else _timeout(calls)


def _is_stuck(scene: Scene, story: RankStory, call: RankCall) -> bool:
    """Whether the rank waits still, or its wait ran out and it came no further; one that asks now and then goes on."""
    if call.end is None:
        return scene.waits(call) and not scene.was_ended(story.world_rank)
    return _TIMED_OUT.search(call.end.error) is not None and not story.went_on_after(call)


def _counters(calls: Mapping[int, RankCall]) -> dict[int, str]:
    """By world rank: the one number in its keys in which the ranks differ; {} if they differ in none or in several."""
    numbers = {rank: [_NUMBER.findall(key) for key in store_keys(call.event)] for rank, call in calls.items()}
    if len({tuple(map(len, found)) for found in numbers.values()}) != 1:
        return {}
    first = next(iter(numbers.values()))
    differing = {
        place
        for found in numbers.values()
        for key, wanted in zip(found, first, strict=True)
        for place, (a, b) in enumerate(zip(key, wanted, strict=True))
        if a != b
    }
    if len(differing) != 1:
        return {}
    place = differing.pop()
    return {rank: found[0][place] for rank, found in numbers.items()}


def _drift(calls: Mapping[int, RankCall], counters: Mapping[int, str]) -> Claim:
    said = parties_words(counters, {rank: f"(such as {store_keys(call.event)[0]})" for rank, call in calls.items()})
    first = min(calls.values(), key=lambda c: c.event.time_ns).event
    return Claim.about(
        calls.values(),
        code="store.counter",
        kind=Kind.ORDINAL_DRIFT,
        ranks=at_fault(counters),
        message=f"{call_words(first)}: the ranks wait for keys with different numbers: {said}; each "
        f"writes under its own number and nobody finds the others'.{raised(calls.values())}",
        fix="count exchanges in each group, not in the process: put the members and the group's number in the key",
    )


def _timeout(calls: Mapping[int, RankCall]) -> Claim:
    first = min(calls.values(), key=lambda c: c.event.time_ns).event
    keys = store_keys(next(iter(calls.values())).event)
    return Claim.about(
        calls.values(),
        code="store.key",
        kind=Kind.STORE_TIMEOUT,
        ranks=calls,
        message=f"{call_words(first)}: {ranks_words(calls)} wait{'s' * (len(calls) == 1)} for {', '.join(keys[:4])}"
        f"{f' and {len(keys) - 4} more' if len(keys) > 4 else ''}, which nobody wrote.{raised(calls.values())}",
        weight=Weight.REMARK,
        fix="compare the key with what the writer sets, prefix included; see whether the writer got that far",
    )


def _used_again(scene: Scene) -> Iterator[Claim]:
    again: dict[int, Sequence[RankCall]] = {}
    for rank, story in scene.ranks.items():
        before: dict[str, RankCall] = {}
        for call in story.calls:
            if call.event.op != "init_process_group" or call.begin is None:
                continue
            store = next((m for m in marks(call.begin) if m.startswith("store ")), None)
            if store is not None and store in before:
                again.setdefault(rank, (before[store], call))
            elif store is not None:
                before[store] = call
    if not again:
        return
    second = min((calls[1] for calls in again.values()), key=lambda c: c.event.time_ns)
    ranks = tuple(sorted(again))
    yield Claim.about(
        (calls[1] for calls in again.values()),
        code="store.again",
        kind=Kind.STALE_STORE,
        ranks=ranks,
        message=f"{call_words(second.event)}: {ranks_words(ranks)} made the process group again on the store of the "
        f"first time, under the same prefix: it still holds the addresses and counters of the first."
        f"{raised(c for calls in again.values() for c in calls[1:])}",
        shown=(c for calls in again.values() for c in calls),
        fix="give the second init a store of its own: store=dist.PrefixStore('second', store), or a new TCPStore",
    )
