"""Program order: whether a rank went past a call that another one waits for. Told by what it did before, or by the text
of the program.

Two ranks that wait for each other in different calls have made them in opposite orders, or one of them left a call
out. The second is told where the program does one before the other.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, takewhile

from workbench.trace import CallSite, Event, GroupInfo, RankCall

_MOST_LINES = 50_000
_MOST_PAST = 2048  # calls of a rank in which its habit is looked for
_MOST_ALIKE = 256  # calls that lead up to a place in it
_NO_STEP = {"wait", "init_process_group", "new_group", "destroy_process_group"}
_LOOPS = (ast.For, ast.While, ast.AsyncFor)
_IN_TURN = {
    ast.For: ("target", "iter", "body", "orelse"),
    ast.AsyncFor: ("target", "iter", "body", "orelse"),
    ast.While: ("test", "body", "orelse"),
    ast.With: ("items", "body"),
    ast.AsyncWith: ("items", "body"),
    ast.If: ("test", "body"),
    ast.Try: ("body", "orelse", "finalbody"),
}
"""Parts of a statement that are run one after the other; others exclude each other, or nothing is known of them."""

Source = Callable[[str, int], str]


@dataclass(frozen=True, slots=True)
class Lacked:
    """What a rank has not made, though another one waits for it: how to know it among the rank's calls, and where it
    stands in the program (None: nobody knows)."""

    is_one: Callable[[Event], bool]
    site: CallSite | None


def went_past(source: Source, calls: Sequence[RankCall], waits_in: RankCall, lacked: Lacked) -> bool:
    """Whether the rank that made `calls` and now waits in `waits_in` has left out what is lacked.

    By its own past, where that is regular: from one call like the one it waits in to the next it made more of the
    lacked ones than now, or between two lacked ones fewer of those it waits in. Else by the text: the lacked call
    stands before the one it waits in, not in another branch; and it was not made yet, unless in a loop that has ended.
    """
    made = [*(c.event for c in takewhile(lambda c: c is not waits_in, calls)), waits_in.event]
    here = _key(waits_in.event)
    lacks, waits = [lacked.is_one(e) for e in made], [_key(e) == here for e in made]
    usual, since = _between(lacks, waits[:-1], from_start=True), sum(_after_last(lacks, waits[:-1]))
    if usual:
        return since < usual
    usual = _between(waits, lacks, from_start=False)
    if usual:
        return sum(_after_last(waits, lacks)) > usual
    there, at = lacked.site, waits_in.event.site
    if there is None or at is None or there.file != at.file:
        return False
    one, other = _paths(_text(source, at.file), there.line, at.line)
    if there.function != at.function and not (_runs_in_place(there, one) and _runs_in_place(at, other)):
        return False
    found = _branch(one[0], other[0]) if one and other else None
    if found is None:
        return False
    if any(waits[:-1]) and not _has_own_loop(other, one):  # reached again only past all the rest
        return not since
    return found < 0 and (not since or _has_own_loop(one, other))


def usual_call(calls: Sequence[RankCall], waits_in: RankCall) -> Event | None:
    """What the rank made before where it now makes `waits_in`, if that is another call; None if its past tells nothing.

    The place is known by the calls that led up to it: the longest such run that its past holds, always followed by one
    and the same call.
    """
    made = [c.event for c in takewhile(lambda c: c is not waits_in, calls) if c.event.op not in _NO_STEP]
    made = made[-_MOST_PAST:]
    keys = [_key(e) for e in made]
    longest, following = 0, set[int]()
    for place in range(1, len(keys)):
        alike = 0
        while alike < min(place, _MOST_ALIKE) and keys[place - 1 - alike] == keys[-1 - alike]:
            alike += 1
        if alike > longest:
            longest, following = alike, set()
        if alike and alike == longest:
            following.add(place)
    usual = {keys[place] for place in following}
    if usual == set(keys[len(keys) - longest :]):  # of a mere repetition nobody knows how often it is due
        return None
    return made[max(following)] if len(usual) == 1 and usual != {_key(waits_in.event)} else None


def was_made(calls: Sequence[RankCall], event: Event) -> bool:
    """Whether one of the calls is like this one: the same operation at the same line, on the same group and peer."""
    return any(_key(c.event) == _key(event) for c in calls)


def _between(counted: Sequence[bool], marks: Sequence[bool], *, from_start: bool) -> int:
    """How many of `counted` lie between two marks, if always as many; 0 if not, or if there are no two.

    from_start: with one mark alone, those before it.
    """
    places = [i for i, mark in enumerate(marks) if mark]
    if from_start and len(places) == 1:
        places = [-1, *places]
    found = {sum(counted[a + 1 : b]) for a, b in pairwise(places)}
    return found.pop() if len(found) == 1 else 0


def _after_last(counted: Sequence[bool], marks: Sequence[bool]) -> Sequence[bool]:
    last = max((i for i, mark in enumerate(marks) if mark), default=-1)
    return counted[last + 1 :]


def group_key(group: GroupInfo | None) -> object:
    """What tells groups of one rank apart, and is alike on all members."""
    return None if group is None else (group.world_ranks, group.label)


def _key(event: Event) -> object:
    line = None if event.site is None else (event.site.file, event.site.line)
    return event.op, group_key(event.group), line, event.peer_world_rank


def _text(source: Source, file: str) -> str:
    def lines() -> Iterator[str]:
        for number in range(1, _MOST_LINES):
            text = source(file, number)
            if not text:
                return
            yield text

    return "".join(lines())


_Step = tuple[ast.AST, str, int]  # a node, the field of it that goes on, and the place in that field


@lru_cache(maxsize=256)
def _paths(text: str, first: int, second: int) -> tuple[list[_Step], list[_Step]]:
    """The ways to two lines, from where they part; () of what cannot be read, or of one line."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [], []
    one, other = _path(tree, first), _path(tree, second)
    depth = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    return ([], []) if depth is None else (one[depth:], other[depth:])


def _path(tree: ast.AST, line: int) -> list[_Step]:
    """From the module to the innermost statement that holds the line: node, field, place in the field."""
    path: list[_Step] = []
    node: ast.AST | None = tree
    while node is not None:
        step = next(
            (
                (name, i, child)
                for name, value in ast.iter_fields(node)
                for i, child in enumerate(value if isinstance(value, list) else [value])
                if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case | ast.withitem | ast.expr)
                and _holds(child, line)
            ),
            None,
        )
        if step is None:
            return path
        path.append((node, step[0], step[1]))
        node = step[2] if isinstance(step[2], ast.stmt | ast.ExceptHandler | ast.match_case) else None
    return path


def _holds(node: ast.AST, line: int) -> bool:
    if isinstance(node, ast.match_case):
        return any(_holds(child, line) for child in node.body)
    if isinstance(node, ast.withitem):
        return _holds(node.context_expr, line)
    start, end = getattr(node, "lineno", 0), getattr(node, "end_lineno", None) or 0
    return bool(start <= line <= end)


def _runs_in_place(site: CallSite, path: Sequence[_Step]) -> bool:
    """Whether the line is run where it stands, seen from where two ways part: by no function that is called later."""
    own = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return site.function != "<lambda>" and not any(isinstance(node, own) for node, *_ in path[1:])


def _has_own_loop(one: Sequence[_Step], other: Sequence[_Step]) -> bool:
    """Whether the first line stands in a loop that does not hold the second."""
    return any(isinstance(node, _LOOPS) for node, *_ in one[1:]) or (
        isinstance(one[0][0], _LOOPS) and one[0][1] == "body" != other[0][1]
    )


def _branch(one: _Step, other: _Step) -> int | None:
    """Two ways on from one node: below 0 if `one` is run before `other`, above if after; None if not both are run."""
    (node, field, place), (_, other_field, other_place) = one, other
    if field == other_field:
        return None if field in ("handlers", "cases") else place - other_place
    turns = _IN_TURN.get(type(node), ())
    if field in turns and other_field in turns:
        return turns.index(field) - turns.index(other_field)
    return None
