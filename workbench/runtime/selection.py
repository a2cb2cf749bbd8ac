"""Choosing and setting up a workspace: probe here, gather, decide alike, bind; a failed path is remembered."""

from __future__ import annotations

import importlib
from dataclasses import asdict, replace
from types import ModuleType
from typing import Any

from workbench.backends.base import Request, Verdict
from workbench.errors import ArgumentError, CaptureError, PlanMismatchError, ResourceError, WorkbenchError
from workbench.plan import CANDIDATES, Candidate, Plan, Standing, decide_backend, find_switch
from workbench.runtime.frozen import FrozenWorkspace
from workbench.runtime.members import ranks_text
from workbench.runtime.requests import MAX_TOKENS
from workbench.runtime.subgroup import BoundGroup, Prepared
from workbench.settings import Settings


def bind_workspace(
    group: BoundGroup, request: Request | ArgumentError, *, device: str, settings: Settings, backend: str | None
) -> Plan:
    """Agree on a path for `request` in `group` and set it up. `request` may be the error that a caller's sizes gave.

    Collective: every member of the group.
    Raises, alike on every member: ArgumentError, PlanMismatchError, ResourceError if no path is left.
    """
    existing = None
    if not isinstance(request, ArgumentError):
        existing = group.prepared.get((request.dtype, request.hidden))
        if existing is not None and not _covers(existing, request, backend):
            existing = None
    everyone_has_it = _agree(group, request, backend, has_it=existing is not None)
    if isinstance(request, ArgumentError):
        raise request
    if existing is not None and everyone_has_it:
        return existing.plan
    if group.frozen:
        raise CaptureError(
            f"{group.key}: the session is frozen, so no workspace is made or grown: {_text(request)} asked; prepare it "
            f"before freeze(), or let the calls take the fallback"
        )
    names = CANDIDATES["alone" if group.key.size == 1 else device]
    if backend is not None and group.key.size > 1:
        names = tuple(n for n in names if n == backend)
    rejected: list[tuple[str, str]] = []
    while names:
        choice, refused = decide_backend(_candidates(group, request, names, settings))
        rejected += refused
        if choice is None:
            break
        try:
            workspace = _backend(choice).bind(group.channel, request)
        except ResourceError as e:
            group.refused[choice, request] = str(e)
            rejected.append((choice, str(e)))
            names = names[names.index(choice) + 1 :]
            continue
        plan = Plan(
            group=str(group.key),
            choice=choice,
            reason="the first path that every member can take",
            rejected=tuple(rejected),
            fallback="" if choice == names[-1] else f"{names[-1]} over {group.key}",
            capacity_tokens=request.max_tokens,
            workspace_bytes=workspace.size_bytes,
            standing=Standing.DEFAULT,
        )
        group.put(request, Prepared(workspace, plan))
        group.lane.instant("plan", note=str(plan))
        return plan
    story = "; ".join(f"{name}: {reason}" for name, reason in rejected) or f"no path is called {backend!r}"
    raise ResourceError(f"{group.key}: no path for {_text(request)}: {story}")


def _agree(group: BoundGroup, request: Request | ArgumentError, backend: str | None, *, has_it: bool) -> bool:
    """Compare what the members ask for, so that one member's bad argument is every member's error.

    True if all members have a workspace that serves the request and is not broken.
    """
    mine: dict[str, Any] = {"backend": backend, "has_it": has_it}
    mine |= {"problem": str(request)} if isinstance(request, ArgumentError) else {"request": _text(request)}
    asked = group.channel.gather(mine, what="prepare")
    for world_rank, theirs in zip(group.key.world_ranks, asked, strict=True):
        if "problem" in theirs:
            raise ArgumentError(f"{group.key}: world rank {world_rank} asked for what cannot be: {theirs['problem']}")
    by_text: dict[str, list[int]] = {}
    for world_rank, theirs in zip(group.key.world_ranks, asked, strict=True):
        by_text.setdefault(f"{theirs['request']} backend={theirs['backend'] or 'any'}", []).append(world_rank)
    if len(by_text) > 1:
        found = "; ".join(f"{ranks_text(ranks)}: {text}" for text, ranks in by_text.items())
        raise PlanMismatchError(f"{group.key}: members prepare for different things: {found}; pass equal arguments")
    return all(theirs["has_it"] for theirs in asked)


def _candidates(group: BoundGroup, request: Request, names: tuple[str, ...], settings: Settings) -> list[Candidate]:
    verdicts = [_probe(group, request, name, settings) for name in names]
    answers = group.channel.gather([[v.ok, v.reason] for v in verdicts], what="probe")
    return [
        Candidate(name, tuple((r, *answer[i]) for r, answer in zip(group.key.world_ranks, answers, strict=True)))
        for i, name in enumerate(names)
    ]


def _probe(group: BoundGroup, request: Request, name: str, settings: Settings) -> Verdict:
    if (name, request) in group.refused:
        return Verdict(False, f"failed before: {group.refused[name, request]}")
    switch = find_switch("custom.fused" if name == "custom" else name, settings)
    if switch:
        return Verdict(False, switch)
    try:
        verdict: Verdict = _backend(name).probe(request, group.key)
    except WorkbenchError as e:
        return Verdict(False, str(e))
    return verdict


def _covers(prepared: Prepared, request: Request, backend: str | None) -> bool:
    have = prepared.workspace.request
    return (
        not prepared.workspace.broken
        and have.max_tokens >= request.max_tokens
        and have.ops >= request.ops
        and have.rounding == request.rounding
        and (backend is None or prepared.workspace.backend in (backend, "alone"))
    )


def _backend(name: str) -> ModuleType:
    return importlib.import_module(f"workbench.backends.{name}")


def _text(request: Request) -> str:
    ops = "+".join(sorted(op.value for op in request.ops))
    fields = asdict(request) | {"ops": ops, "dtype": str(request.dtype), "rounding": request.rounding.value}
    return " ".join(f"{name}={value}" for name, value in fields.items())


def freeze_group(group: BoundGroup, *, device: str) -> None:
    """Wrap every workspace so that it never grows: bigger calls take the fallback. Collective over the group."""
    group.frozen = True
    last = CANDIDATES["alone" if group.key.size == 1 else device][-1]
    for prepared in group.prepared.values():
        request = replace(prepared.workspace.request, max_tokens=MAX_TOKENS)
        fallback = _backend(last).bind(group.channel, request)
        tells = group.channel.world_rank == group.key.world_ranks[0]
        prepared.workspace = FrozenWorkspace(prepared.workspace, fallback, group.lane, str(group.key), tells=tells)
