"""Memory that ranks share: handles that cannot be opened, workspaces that move under a graph, paths that differ.

Example: symm_mem_rendezvous on tp[0,1] raises on world rank 1. A workspace of tp[0,1] is made anew after a capture
recorded calls on it. In one call world rank 0 takes the path "custom" and 1 takes "nccl".
Claim: `handle-failure` or `workspace-overflow`, the ranks on which it raised. `workspace-moved`, likely, since the
graph may hold the old address. `path-divergence`, the ranks outside the largest party.
Evidence: the calls, with what they raised.
Try: what the exception's text is known to mean; the largest workspace before the first capture; a vote on the path.
"""

from __future__ import annotations

from collections.abc import Iterator

from workbench.diagnose.claim import Claim
from workbench.diagnose.finding import Certainty, Kind
from workbench.diagnose.log_lines import explain_log_line
from workbench.diagnose.parties import at_fault, parties_words
from workbench.diagnose.scene import RankStory, Scene
from workbench.diagnose.words import call_words, group_words, raised, ranks_words
from workbench.trace import RankCall

MAKING = frozenset({"symm_mem_rendezvous", "workspace"})


def rule(scene: Scene) -> Iterator[Claim]:
    failed = [
        c for s in scene.ranks.values() for c in s.calls if c.event.op in MAKING and c.end is not None and c.end.error
    ]
    if failed:
        yield _failure(failed)
    moved = [call for story in scene.ranks.values() for call in _moved(story)]
    if moved:
        yield _movement(moved)
    yield from _paths(scene)


def _failure(calls: list[RankCall]) -> Claim:
    first = min((c.event for c in calls), key=lambda e: e.time_ns)
    ranks = tuple(sorted({c.event.world_rank for c in calls}))
    known = explain_log_line(calls[0].end.error if calls[0].end is not None else "")
    overflow = known is not None and known.kind is Kind.WORKSPACE_OVERFLOW
    return Claim.about(
        calls,
        code="workspace.overflow" if overflow else "workspace.handle",
        kind=Kind.WORKSPACE_OVERFLOW if overflow else Kind.HANDLE_FAILURE,
        ranks=ranks,
        message=f"{call_words(first)} failed on {ranks_words(ranks)}.{raised(calls)}",
        fix=known.fix if known is not None else "workbench doctor shows what this machine lets ranks share, and how",
    )


def _moved(story: RankStory) -> Iterator[RankCall]:
    """Workspaces made again, with the same words, after calls on their group were captured."""
    captured: set[tuple[int, ...]] = set()
    made: set[tuple[object, tuple[int, ...]]] = set()
    for call in story.calls:
        event = call.event
        if event.group is None:
            continue
        members = event.group.world_ranks
        if event.capture:
            captured.add(members)
        elif event.op == "workspace":
            if members in captured and (event.site, members) in made:
                yield call
            made.add((event.site, members))


def _movement(calls: list[RankCall]) -> Claim:
    first = min((c.event for c in calls), key=lambda e: e.time_ns)
    ranks = tuple(sorted({c.event.world_rank for c in calls}))
    return Claim.about(
        calls,
        code="workspace.moved",
        kind=Kind.WORKSPACE_MOVED,
        ranks=ranks,
        message=f"{call_words(first)} made the workspace of {group_words(first.group)} again on {ranks_words(ranks)}, "
        f"after calls on this group were captured: the graph may still hold the old address.",
        certainty=Certainty.LIKELY,
        fix="make the workspace for the largest batch before the first capture, and keep it as long as the graph",
    )


def _paths(scene: Scene) -> Iterator[Claim]:
    for meetings in scene.meetings.values():
        for meeting in meetings:
            said = {r: c.event.path for r, c in meeting.came.items() if c.event.path}
            if len(set(said.values())) < 2:
                continue
            yield Claim.about(
                meeting.came.values(),
                code="call.path",
                kind=Kind.PATH_DIVERGENCE,
                ranks=at_fault(said),
                message=f"{call_words(meeting.first.event)}, {meeting}, takes different paths: {parties_words(said)}."
                f"{raised(meeting.came.values())}",
                fix="decide the path from what all members know alike, or vote on it before the call",
            )
            break
