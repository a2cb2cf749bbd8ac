"""Choosing and setting up workspaces: facts, a plan, votes of those who can, room, and only then memory.

Every step is gathered before the next one, and decided by each member from what all told, so that members take the same
path or raise the same error. What failed for a request is remembered, and not tried again.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import asdict, replace
from types import ModuleType
from typing import Any

from workbench.backends.base import Request, Room, Verdict, Workspace
from workbench.backends.composed import ComposedWorkspace
from workbench.errors import ArgumentError, CaptureError, PlanMismatchError, ResourceError, WorkbenchError
from workbench.fabric import Fabric, Facts, name_shares
from workbench.ops import Op
from workbench.plan import (
    ALONE,
    BUILT_KERNELS,
    Ask,
    Candidate,
    Path,
    Plan,
    decide_backend,
    decide_plans,
    fingerprint,
    path_order,
    split_choice,
)
from workbench.runtime.channel import AloneChannel
from workbench.runtime.prepared import Part, Prepared
from workbench.runtime.probe import vote_fabric
from workbench.runtime.requests import MAX_TOKENS
from workbench.runtime.room import Claim, decide_room, measure_claims
from workbench.runtime.subgroup import BoundGroup, limits_of
from workbench.settings import Settings


def bind_workspace(
    group: BoundGroup,
    request: Request | ArgumentError,
    *,
    device: str,
    settings: Settings,
    backend: str | None,
    probe: Callable[[], Facts],
) -> Plan:
    """Agree on paths for `request` in `group` and set them up; the plan for as many tokens as were asked for.

    `request` may be the error that a caller's sizes gave. `probe` tells this rank's facts; it is asked once a group.
    Collective: every member of the group.
    Raises, alike on every member: ArgumentError, PlanMismatchError, ResourceError if no path is left.
    """
    existing = None
    if isinstance(request, ArgumentError):
        backend = None  # it may be what is wrong, and no word to tell
    if not isinstance(request, ArgumentError):
        existing = group.prepared.get((request.dtype, request.hidden))
        if existing is not None and not _covers(existing, request, backend):
            existing = None
    everyone_has_it = _agree(group, request, backend, has_it=existing is not None)
    if isinstance(request, ArgumentError):
        raise request
    if existing is not None and everyone_has_it:
        return existing.plan(None)
    if group.frozen:
        raise CaptureError(
            f"{group.key}: the session is frozen, so no workspace is made or grown: {_text(request)} asked; prepare it "
            f"before freeze(), or let the calls take the fallback"
        )
    if group.fabric is None:
        group.fabric = _find_fabric(group, probe)
    parts = None
    while parts is None:
        plans = _decide(group, group.fabric, request, device=device, settings=settings, backend=backend)
        parts = _bind(group, request, plans)
    prepared = Prepared(
        request,
        parts,
        asked=backend,
        group=str(group.key),
        lane=group.lane,
        tells=group.channel.world_rank == group.key.world_ranks[0],
    )
    group.put(prepared)
    for part in parts:
        group.lane.instant("plan", note=str(part.plan))
    return prepared.plan(None)


def freeze_group(group: BoundGroup, *, device: str) -> None:
    """Let nothing of the group grow from now on: bigger calls take the fallback. Collective over the group."""
    group.frozen = True
    last = ALONE.name if group.key.size == 1 else path_order(device)[-1]
    for prepared in group.prepared.values():
        request = replace(prepared.request, max_tokens=MAX_TOKENS)
        plan = Plan(group=str(group.key), choice=last, reason="takes what is too large for frozen workspaces")
        if prepared.fallback is None:
            prepared.fallback = Part(plan, _module(split_choice(last)[0]).bind(group.channel, request))


def _find_fabric(group: BoundGroup, probe: Callable[[], Facts]) -> Fabric:
    """What the group's members have in common. A group of one has nothing to find out."""
    if isinstance(group.channel, AloneChannel):
        return Fabric(group.key, (Facts(world_rank=group.key.world_ranks[0], host="alone", node="alone"),))
    return vote_fabric(group.channel, probe)


def _decide(
    group: BoundGroup, fabric: Fabric, request: Request, *, device: str, settings: Settings, backend: str | None
) -> tuple[Plan, ...]:
    """The plans for every number of tokens, whose paths every member can take. Collective over the group."""
    order = path_order(device, backend=backend)
    ask = Ask(
        hidden=request.hidden,
        tokens=request.max_tokens,
        dtype=str(request.dtype).removeprefix("torch."),
        fused=Op.ALL_REDUCE_ADD_RMS_NORM in request.ops,
        rounding=request.rounding.value,
        symmetric_memory=backend is not None,  # its kernels wait without bound: by name only
    )
    while True:
        plans = decide_plans(
            fabric,
            ask,
            settings,
            order=order,
            kernels=BUILT_KERNELS,
            refused=group.refused.get(request, {}),
            by_name=backend is not None,
        )
        for plan in plans:
            if plan.choice == "none":
                story = "; ".join(f"{name}: {reason}" for name, reason in plan.rejected)
                story = story or f"no path of {device} ranks is called {backend!r}"
                raise ResourceError(f"{group.key}: no path for {_text(request)}: {story}")
        refusals = _vote_paths(group, request, plans)
        if not refusals:
            return plans
        group.refused.setdefault(request, {}).update(refusals)


def _vote_paths(group: BoundGroup, request: Request, plans: tuple[Plan, ...]) -> dict[str, str]:
    """The plans' choices that some member cannot take, or has no room for, and why. Collective over the group.

    Raises PlanMismatchError, alike on every member, if the members' plans differ.
    """
    looks = {plan.choice: _look(*_part_of(request, plan), group) for plan in plans}
    mine = {"plans": fingerprint([plan.to_json() for plan in plans]), "paths": looks}
    told = group.channel.gather(mine, what="probe")
    ranks_by_plan: dict[str, list[int]] = {}
    for world_rank, theirs in zip(group.key.world_ranks, told, strict=True):
        ranks_by_plan.setdefault(theirs["plans"], []).append(world_rank)
    if len(ranks_by_plan) > 1:
        raise PlanMismatchError(
            f"{group.key}: members decided differently from the same facts: {name_shares(ranks_by_plan)}; install the "
            f"same version of the workbench, tables included, on every rank"
        )
    refusals = {}
    for choice in looks:
        answers = [(r, theirs["paths"][choice]) for r, theirs in zip(group.key.world_ranks, told, strict=True)]
        _, refused = decide_backend([Candidate(choice, tuple((r, a["ok"], a["reason"]) for r, a in answers))])
        reason = dict(refused).get(choice) or decide_room([(r, (Claim(**c) for c in a["claims"])) for r, a in answers])
        if reason:
            refusals[choice] = reason
    return refusals


def _look(path: Path, request: Request, group: BoundGroup) -> dict[str, Any]:
    """What this member says of a path: whether its backend can serve here, and the memory it would take."""
    try:
        backend = _module(path)
        verdict: Verdict = backend.probe(request, group.key)
        measure_room = getattr(backend, "room", None)
        room: Room = measure_room(request, group.key) if measure_room is not None and verdict.ok else Room()
        claims = [claim.to_json() for claim in measure_claims(room)]
    except (WorkbenchError, ImportError, OSError, MemoryError) as e:
        return {"ok": False, "reason": " ".join(str(e).split()), "claims": []}  # a plan is one line
    return {"ok": verdict.ok, "reason": verdict.reason, "claims": claims}


def _bind(group: BoundGroup, request: Request, plans: tuple[Plan, ...]) -> tuple[Part, ...] | None:
    """A workspace for each plan; None, with nothing left behind and the failure remembered, if one cannot be made."""
    made: list[Part] = []
    for plan in plans:
        path, part = _part_of(request, plan)
        try:
            workspace: Workspace = _module(path).bind(group.channel, part)
        except ResourceError as e:
            while made:
                made.pop().workspace.close()
            group.refused.setdefault(request, {})[plan.choice] = str(e)
            return None
        if path.composed and Op.ALL_REDUCE_ADD_RMS_NORM in request.ops:
            whole = replace(part, ops=request.ops)
            workspace = ComposedWorkspace(workspace, whole, limits_of(group, whole))
        made.append(Part(replace(plan, workspace_bytes=workspace.size_bytes), workspace))
    return tuple(made)


def _part_of(request: Request, plan: Plan) -> tuple[Path, Request]:
    """The plan's path, and the part of the request that its backend is to serve."""
    path, algorithm = split_choice(plan.choice)
    ops = frozenset({Op.ALL_REDUCE}) if path.composed else request.ops
    return path, replace(request, max_tokens=plan.capacity_tokens, algorithm=algorithm, ops=ops)


def _module(path: Path) -> ModuleType:
    return importlib.import_module(f"workbench.backends.{path.backend}")


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
        raise PlanMismatchError(
            f"{group.key}: members prepare for different things: {name_shares(by_text)}; pass equal arguments"
        )
    return all(theirs["has_it"] for theirs in asked)


def _covers(prepared: Prepared, request: Request, backend: str | None) -> bool:
    have = prepared.request
    return (
        not prepared.broken
        and have.max_tokens >= request.max_tokens
        and have.ops >= request.ops
        and have.rounding == request.rounding
        and have.concurrent_groups >= request.concurrent_groups
        and (backend is None or all(p.workspace.backend in (backend, ALONE.backend) for p in prepared.parts))
    )


def _text(request: Request) -> str:
    fields = asdict(request)
    fields |= {"ops": "+".join(sorted(op.value for op in request.ops)), "rounding": request.rounding.value}
    del fields["algorithm"]
    if request.concurrent_groups == 1:
        del fields["concurrent_groups"]
    return " ".join(f"{name}={value}" for name, value in fields.items())
