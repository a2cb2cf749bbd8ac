"""What `workbench why` answers: for a layout on a machine, the path each group takes, and why not the others."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.errors import ArgumentError
from workbench.fabric import Capability, Fabric, Machine, Verdict, decide_capability, name_ranks, read_machine
from workbench.plan import (
    BUILT_KERNELS,
    UPSTREAM_SYSTEMS,
    Ask,
    Plan,
    Rule,
    Standing,
    Table,
    ask_upstream,
    decide_path,
    describe_situation,
    find_model,
    find_retired,
    listed_models,
    read_table,
    shipped_tables,
    show_bytes,
    upstream_rules,
)
from workbench.ranks import GroupKey, GroupMap
from workbench.settings import Settings

_NUMBERS = re.compile(r"s? ?\d+(?:(?:, |\.\.)\d+)*")
_STANDINGS = {
    Standing.DEFAULT: "(default): by published thresholds, a cost model or for want of another path, measured by "
    "nobody on such a machine; `workbench tune` there writes measured rows, and --table reads them",
    Standing.MEASURED: "(measured): by a row that was measured on the device its table names",
}
_UPSTREAM_TOPICS = {"sglang": ("custom_all_reduce", "fusion"), "vllm": ("fusion",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAnswer:
    """One group: its plan, what its kernels may do, and what versions of the engine itself would say.

    plan: what links, settings and tables decide.   here: the same with the kernels that this build has, which is what a
    Session does; tables may name algorithms that nobody has written yet.
    """

    key: GroupKey
    aliases: tuple[str, ...]
    plan: Plan
    here: Plan
    capabilities: tuple[tuple[Capability, Verdict], ...]
    upstream: tuple[tuple[Rule, Verdict], ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.key.kind,
            "aliases": list(self.aliases),
            "world_ranks": list(self.key.world_ranks),
            "plan": self.plan.to_json(),
            "this_build": self.here.to_json(),
            "capabilities": {capability.value: verdict.to_json() for capability, verdict in self.capabilities},
            "upstream": [_upstream_json(rule, verdict) for rule, verdict in self.upstream],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What is true of the whole layout. `model` is the verdict of SGLang's list of models, if one was asked for."""

    machine: Machine
    layout: str
    ask: Ask
    groups: tuple[GroupAnswer, ...]
    warnings: tuple[str, ...] = ()
    model: tuple[str, Rule, Verdict] | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "layout": self.layout,
            "machine": self.machine.to_json(),
            "hidden": self.ask.hidden,
            "tokens": self.ask.tokens,
            "dtype": self.ask.dtype,
            "message_bytes": self.ask.message_bytes,
            "label": "simulated",
            "groups": [group.to_json() for group in self.groups],
            "model": None if self.model is None else {"name": self.model[0], **_upstream_json(*self.model[1:])},
            "warnings": list(self.warnings),
        }

    def __str__(self) -> str:
        where = "in a CUDA graph" if self.ask.captured else "eager"
        size = f"{show_bytes(self.ask.message_bytes)} a rank"
        lines = [
            f"{self.layout}",
            f"on {self.machine}",
            f"{size}: tokens {self.ask.tokens}, hidden {self.ask.hidden}, {self.ask.dtype}, {where}",
            *(line for group in _alike(self.groups) for line in ("", *_group_lines(group))),
        ]
        lines += _standing_lines(self.groups)
        if self.model is not None:
            name, rule, verdict = self.model
            lines += ["", f"model {name}: SGLang turns its fusion on by itself: {verdict} ({rule})"]
        return "\n".join(lines)


def explain(
    system: str,
    sizes: Mapping[str, Any],
    *,
    machine: str,
    hidden: int,
    tokens: int,
    dtype: str = "bfloat16",
    kind: str | None = None,
    model: str | None = None,
    captured: bool = True,
    rounding: str = "once",
    symmetric_memory: bool = False,
    upstream: bool = False,
    table: str | None = None,
    settings: Settings | None = None,
    variables: Iterable[str] | None = None,
) -> Answer:
    """The path each group of a layout takes on a machine. World rank r sits on node r // gpus_per_node.

    machine: the id of a simulated machine or a path to a JSON file.   kind: one kind only, aliases allowed.
    rounding: how often the fused operation rounds its sum, "once" or "twice"; paths of one class are never mixed.
    model: an architecture's name, for SGLang's list.   upstream: what versions of the engine would say of each group.
    table: the file of a tuned table, which replaces the shipped one of its architectures; one of other architectures
    than the machine's decides nothing, and a warning says so.
    settings, variables: the switches, and the names of the environment variables that are set; default: as found here.
    Local, and without torch.   Raises: ArgumentError, LayoutError.
    """
    settings = Settings.read() if settings is None else settings
    warnings = [str(retired) for retired in find_retired(os.environ if variables is None else variables)]
    ask = Ask(
        hidden=hidden,
        tokens=tokens,
        dtype=dtype,
        captured=captured,
        rounding=rounding,
        symmetric_memory=symmetric_memory,
    )
    group_map = GroupMap.build(system, **sizes)
    place = read_machine(machine)
    keys = _keys(group_map, kind)
    tables = shipped_tables()
    tuned = None if table is None else read_table(table)
    if tuned is not None:
        tables = {**tables, **dict.fromkeys(tuned.arches, tuned)}
    facts = [place.facts_of(rank, multicast_allowed=settings.multicast) for rank in _ranks_on(place, group_map)]
    if tuned is not None:
        warnings += _unused(tuned, place.name, sorted({f.arch for f in facts}))
    num_hosts = len({f.host for f in facts})
    if model is not None and system != "sglang":
        raise ArgumentError(f"model={model[:64]!r}: only SGLang keeps a list of models; leave it out for {system}")
    rules = [r for topic in _UPSTREAM_TOPICS.get(system, ()) for r in upstream_rules(system, topic)] if upstream else []
    answers = []
    for key in keys:
        fabric = Fabric(key, tuple(facts[rank] for rank in key.world_ranks))
        situation = describe_situation(group_map, fabric, ask, num_hosts=num_hosts) if rules and key.size > 1 else {}
        answers.append(
            GroupAnswer(
                key=key,
                aliases=tuple(alias for alias, owner in group_map.aliases.items() if owner == key.kind),
                plan=decide_path(fabric, ask, settings, tables=tables),
                here=decide_path(fabric, ask, settings, tables=tables, kernels=BUILT_KERNELS),
                capabilities=tuple((c, decide_capability(fabric, c)) for c in Capability if key.size > 1),
                upstream=tuple((rule, ask_upstream(rule, situation)) for rule in rules if situation),
            )
        )
    if upstream and system not in UPSTREAM_SYSTEMS:
        warnings.append(f"no rules of {system} are kept; there are those of {', '.join(UPSTREAM_SYSTEMS)}")
    return Answer(
        machine=place,
        layout=group_map.title(),
        ask=ask,
        groups=tuple(answers),
        warnings=tuple(warnings),
        model=None if model is None else _ask_for_model(model, group_map, keys, facts, ask, num_hosts),
    )


def _unused(table: Table, machine: str, arches: Sequence[str]) -> list[str]:
    """The warning about a table that speaks for none of the machine's architectures."""
    if set(table.arches) & set(arches):
        return []
    decides = f"the shipped table of {', '.join(arches)} decides" if shipped_tables().keys() & set(arches) else ""
    return [
        f"table {table.name} is for {', '.join(table.arches)}, and {machine} is {', '.join(arches)}: it decides "
        f"nothing here; {decides or 'no shipped table does either'}"
    ]


def _keys(group_map: GroupMap, kind: str | None) -> list[GroupKey]:
    kinds = list(group_map.groups) if kind is None else [group_map.owner(kind)]
    local = [k for k in kinds if k in group_map.local_numbering]
    if local:
        raise ArgumentError(
            f"kinds {', '.join(local)} count ranks inside one engine, so their places on the machine are unknown; "
            "build the layout without elastic_ep, or ask for another kind"
        )
    return [key for k in kinds for key in group_map.keys(k)]


def _ranks_on(machine: Machine, group_map: GroupMap) -> range:
    if group_map.world_size > machine.num_devices:
        raise ArgumentError(
            f"the layout has {group_map.world_size} ranks, {machine.name} has {machine.nodes} x "
            f"{machine.gpus_per_node} = {machine.num_devices} GPUs; choose a larger machine or a smaller layout"
        )
    return range(group_map.world_size)


def _ask_for_model(
    name: str, group_map: GroupMap, keys: Sequence[GroupKey], facts: Sequence[Any], ask: Ask, num_hosts: int
) -> tuple[str, Rule, Verdict]:
    model, hint = find_model(name)
    rule = upstream_rules("sglang", "auto_enable")[-1]
    fabric = Fabric(keys[0], tuple(facts[rank] for rank in keys[0].world_ranks))
    verdict = ask_upstream(rule, describe_situation(group_map, fabric, ask, num_hosts=num_hosts, model=model))
    if model not in listed_models():
        hint = hint or f"listed: {', '.join(listed_models())}"
        verdict = Verdict(False, f"{verdict.reason} ({hint})", verdict.evidence)
    return model, rule, verdict


def _alike(groups: Sequence[GroupAnswer]) -> list[tuple[GroupAnswer, int]]:
    """Groups in order, with the number of those of their kind whose answer differs in nothing but numbers of ranks."""
    found: dict[tuple[Any, ...], tuple[GroupAnswer, int]] = {}
    for group in groups:
        reasons = [group.plan.reason, *(f"{n} {r}" for n, r in group.plan.rejected)]
        verdicts = [f"{c.value} {v}" for c, v in group.capabilities] + [f"{r.id} {v}" for r, v in group.upstream]
        texts = tuple(_NUMBERS.sub("#", text) for text in (*reasons, *verdicts))
        same = (group.key.kind, group.key.size, group.plan.choice, group.plan.standing, *texts)
        first, count = found.get(same, (group, 0))
        found[same] = (first, count + 1)
    return list(found.values())


def _group_lines(counted: tuple[GroupAnswer, int]) -> list[str]:
    group, count = counted
    plan, label = group.plan, _label(group.key)
    also = f" (also {', '.join(group.aliases)})" if group.aliases else ""
    if group.key.size == 1:
        return [f"{group.key.kind}{also}: {count} groups of one rank, nothing to reduce"]
    more = f" and {count - 1} more like it" if count > 1 else ""
    lines = [f"{label}{more}{also}: {plan.choice} ({plan.standing.value})", f"  why    {plan.reason}"]
    if plan.choice.startswith("custom"):
        lines.append(f"  bytes  {plan.workspace_bytes} a rank of workspace, for up to {plan.capacity_tokens} tokens")
    if plan.fallback:
        lines.append(f"  then   {plan.fallback.replace(plan.group, label)}")
    lines += [f"  not    {names}: {reason}" for reason, names in _by_reason(plan.rejected)]
    if group.here.choice != plan.choice:
        new = [pair for pair in group.here.rejected if pair not in plan.rejected]
        lines += [f"  build  {group.here.choice} for now; {names}: {reason}" for reason, names in _by_reason(new)]
    has = [c.value for c, v in group.capabilities if v.ok]
    lines += [f"  has    {', '.join(has)}"] if has else []
    lacks = _by_reason((c.value, v.reason) for c, v in group.capabilities if not v.ok)
    lines += [f"  lacks  {names}: {reason}" for reason, names in lacks]
    return lines + _asked_lines(group)


def _asked_lines(group: GroupAnswer) -> list[str]:
    """What versions of the engine say; those that are never asked of such a group are told in one line a decision."""
    versions: dict[str, list[str]] = {}
    for rule, verdict in group.upstream:
        if rule.concerns((group.key.kind, *group.aliases)):
            versions[f"{rule}: {verdict}{_known_trouble(rule)}"] = []
        else:
            versions.setdefault(f"{rule.system} {rule.topic}: {verdict}", []).append(rule.id)
    return [f"  asked  {answer}" + (f" ({', '.join(ids)})" if ids else "") for answer, ids in versions.items()]


def _known_trouble(rule: Rule) -> str:
    """What a version was known to do wrong, to this layout or to others: beside a "yes" as well as beside a "no"."""
    return "" if rule.cost == "none known" else f"; known trouble of that version: {rule.cost}"


def _standing_lines(groups: Sequence[GroupAnswer]) -> list[str]:
    """What the words behind the choices mean, of those that are there."""
    found = {group.plan.standing for group in groups if group.key.size > 1}
    told = [text for standing, text in _STANDINGS.items() if standing in found]
    return ["", *told] if told else []


def _by_reason(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    names: dict[str, list[str]] = {}
    for name, reason in pairs:
        names.setdefault(reason, []).append(name)
    return [(reason, ", ".join(found)) for reason, found in names.items()]


def _label(key: GroupKey) -> str:
    """The group's kind and ranks, ascending lists drawn together: 'tp[0..15]'."""
    if key.numbering_differs:
        return f"{key.kind}[{','.join(map(str, key.world_ranks[:16]))}{',...' if key.size > 16 else ''}]"
    return f"{key.kind}[{name_ranks(key.world_ranks).removeprefix('world ranks ')}]"


def _upstream_json(rule: Rule, verdict: Verdict) -> dict[str, Any]:
    return {
        "topic": rule.topic,
        "id": rule.id,
        "when": rule.when,
        "source": rule.source,
        "cost": rule.cost,
        "ok": verdict.ok,
        "reason": verdict.reason,
    }
