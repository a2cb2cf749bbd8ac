"""What engines themselves decide, version by version: rules before and after each fix, as data (rules/*.json).

So that one can ask "would SGLang fuse here, and why not" of a version that is not installed. Nothing of ours decides by
these rules. A condition holds one fact and one test of it ("is", "one_of", "at_most", "at_least"), the text for when it
fails ("else", with {fact} places), and may be waived ("unless", a condition without text). Where an engine fuses up to
a size only, its rules name the table of sizes of their version ("sizes").
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any

from workbench.documents import Document, parse_document
from workbench.errors import ArgumentError
from workbench.fabric import Allocator, Fabric, Verdict
from workbench.plan.decide import Ask
from workbench.plan.tables import show_bytes
from workbench.ranks import GroupMap

UPSTREAM_SYSTEMS = ("sglang", "vllm")
_TESTS = ("is", "one_of", "at_most", "at_least")
_MODEL_SUFFIX = re.compile(r"(ForCausalLM|ForConditionalGeneration)$")


@dataclass(frozen=True, slots=True)
class Condition:
    """`fact` passes `test` against `value`, or `unless` holds; `otherwise` says what is wrong when neither does."""

    fact: str
    test: str
    value: Any
    otherwise: str
    unless: Condition | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeLimits:
    """Up to which message an engine fuses, in MiB a rank, by architecture and TP size; from then on it does not.

    limit: the engine's own name of the table.   setting: what a user sets to have another limit.
    one_shot: up to which message FlashInfer's trtllm backend is asked for one shot; above it for two.
    """

    id: str
    source: str
    limit: str
    setting: str
    fuses: Mapping[str, Mapping[int, float]]
    one_shot: Mapping[str, Mapping[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One version of one decision. `when` tells dates or releases, `cost` what it cost the users it turned away.

    groups: kinds of group that the engine asks it of; of others it never does, whatever the conditions say.
    """

    system: str
    topic: str
    id: str
    when: str
    source: str
    cost: str
    requires: tuple[Condition, ...]
    groups: tuple[str, ...] = ()
    sizes: SizeLimits | None = None

    def concerns(self, kinds: Iterable[str]) -> bool:
        """Whether the engine asks this of a group that goes by these kinds; a rule without groups is of the launch."""
        return not self.groups or not set(self.groups).isdisjoint(kinds)

    def __str__(self) -> str:
        return f"{self.system} {self.topic} {self.id} ({self.when}; {self.source})"


@dataclass(frozen=True, slots=True)
class RetiredVariable:
    """An environment variable that an engine once read and reads no more."""

    name: str
    system: str
    since: str
    instead: str

    def __str__(self) -> str:
        return f"{self.name} is set and does nothing since {self.since} ({self.system}); {self.instead}"


def upstream_rules(system: str, topic: str) -> tuple[Rule, ...]:
    """All versions of one decision, oldest first. Raises ArgumentError with the systems and topics there are."""
    topics = _rules(system) if system in UPSTREAM_SYSTEMS else {}
    if topic not in topics:
        known = ", ".join(f"{s} {t}" for s in UPSTREAM_SYSTEMS for t in _rules(s))
        raise ArgumentError(f"no rules for {system!r} {topic!r}; there are {known}")
    return topics[topic]


def ask_upstream(rule: Rule, situation: Mapping[str, Any]) -> Verdict:
    """What that version says of `situation` (see describe_situation), with every reason against it.

    Raises: ArgumentError if the rule needs a fact that the situation lacks; facts it does not need are not looked at.
    """
    if rule.groups and not rule.concerns(_fact("kinds", situation, rule)):
        kind = situation["kinds"][0]
        return Verdict(
            False, f"it works on {', '.join(rule.groups)} groups alone, and this one is {kind}", (str(rule),)
        )
    failed = [c.otherwise.format_map(situation) for c in rule.requires if not _holds(c, situation, rule)]
    size = _size_up(rule.sizes, situation, rule) if rule.sizes is not None else None
    if size is not None and not size.ok:
        failed.append(size.reason)
    if failed:
        return Verdict(False, "; ".join(failed), (str(rule), rule.cost))
    return Verdict(True, f"every condition holds{f'; {size.reason}' if size else ''}", (str(rule),))


def describe_situation(
    group_map: GroupMap, fabric: Fabric, ask: Ask, *, num_hosts: int, model: str = ""
) -> dict[str, Any]:
    """The facts that upstream rules ask for, of one group: sizes of the layout, links of the group, tokens, model.

    num_hosts: hosts of the whole launch.   model: an architecture's name; see find_model.
    """
    sizes = group_map.sizes
    return {
        "arch": fabric.arch.reason,
        "kinds": (fabric.key.kind, *(alias for alias, owner in group_map.aliases.items() if owner == fabric.key.kind)),
        "kind": fabric.key.kind,
        "group_size": fabric.key.size,
        "tp": sizes.get("tp", 1),
        "pp": sizes.get("pp", 1),
        "dp": sizes.get("dp", 1),
        "attn_cp": sizes.get("attn_cp", 1),
        "moe_ep": sizes.get("moe_ep", 1),
        "dp_attention": sizes.get("attn_dp", 1) > 1,
        "num_hosts": num_hosts,
        "same_host": fabric.same_host.ok,
        "nvlink": fabric.nvlink.ok and fabric.p2p.ok,
        "one_clique": fabric.one_clique.ok,
        "vmm": all(f.allocator in (Allocator.VMM_POSIX_FD, Allocator.VMM_FABRIC) for f in fabric.facts),
        "tokens": ask.tokens,
        "message_bytes": ask.message_bytes,
        "model": model,
        "moe_a2a": "none",
        "fusion_forbidden": False,
        "deterministic": False,
    }


def find_model(name: str) -> tuple[str, str]:
    """An architecture's short name, and "" or a hint at a listed one with a similar name.

    'Qwen3MoeForCausalLM', 'Qwen3Moe' and 'qwen3_moe' are one. The list is SGLang's; a name not on it is no error.
    """
    short = _MODEL_SUFFIX.sub("", name.strip())[:64]
    by_plain = {_plain_name(model): model for model in listed_models()}
    if _plain_name(short) in by_plain:
        return by_plain[_plain_name(short)], ""
    close = get_close_matches(_plain_name(short), by_plain, n=1, cutoff=0.75)
    return short, f"nearest listed: {by_plain[close[0]]}" if close else ""


def listed_models() -> tuple[str, ...]:
    """The model architectures for which SGLang's newest rule turns fusion on by itself."""
    newest = upstream_rules("sglang", "auto_enable")[-1]
    return next(tuple(c.value) for c in newest.requires if c.fact == "model")


def find_retired(names: Iterable[str]) -> tuple[RetiredVariable, ...]:
    """Those of the named environment variables that no longer do anything."""
    return tuple(_retired()[name] for name in sorted(set(names)) if name in _retired())


def _plain_name(model: str) -> str:
    return model.lower().replace("_", "").replace("-", "")


def _holds(condition: Condition, situation: Mapping[str, Any], rule: Rule) -> bool:
    if condition.unless is not None and _holds(condition.unless, situation, rule):
        return True
    found, value = _fact(condition.fact, situation, rule), condition.value
    if condition.test == "is":
        return bool(found == value)
    if condition.test == "one_of":
        return found in value
    return bool(found <= value) if condition.test == "at_most" else bool(found >= value)


def _size_up(sizes: SizeLimits, situation: Mapping[str, Any], rule: Rule) -> Verdict | None:
    """Whether the engine fuses a message of this size; None where the rule's conditions have refused already."""
    size, arch, tp = (_fact(name, situation, rule) for name in ("message_bytes", "arch", "tp"))
    if arch not in sizes.fuses or tp < 2:
        return None
    table = f"{sizes.limit} of {sizes.id}"
    if tp not in sizes.fuses[arch]:
        widths = ", ".join(map(str, sizes.fuses[arch]))
        return Verdict(False, f"tp={tp} is not fused at any size on {arch} ({table} has tp {widths})")
    limit = _bytes(sizes.fuses[arch][tp])
    where = f"the {show_bytes(limit)} up to which tp={tp} is fused on {arch} ({table}"
    if size > limit:
        return Verdict(False, f"{show_bytes(size)} a rank is above {where}; {sizes.setting} sets another limit)")
    text = f"{show_bytes(size)} a rank is within {where})"
    if tp in sizes.one_shot.get(arch, {}):
        one_shot = _bytes(sizes.one_shot[arch][tp])
        shots = "one shot" if size <= one_shot else "two shots"
        text += f", in {shots} by FlashInfer's trtllm backend (one shot up to {show_bytes(one_shot)})"
    return Verdict(True, text)


def _bytes(mib: float) -> int:
    return int(mib * (1 << 20))


def _fact(name: str, situation: Mapping[str, Any], rule: Rule) -> Any:
    if name not in situation:
        raise ArgumentError(f"{rule} asks for {name!r}, which the situation does not tell")
    return situation[name]


@cache
def _rules(system: str) -> Mapping[str, tuple[Rule, ...]]:
    doc = _shipped(f"{system}.json")
    doc.take_whole("schema", 1, 1)
    sizes = {limits.id: limits for limits in map(_sizes, doc.take_children("sizes", default=[]))}
    topics = doc.take_child("topics")
    rules = {
        topic: tuple(_rule(system, topic, r, sizes) for r in topics.take_children(topic)) for topic in topics.names()
    }
    topics.end()
    doc.end()
    return rules


@cache
def _retired() -> Mapping[str, RetiredVariable]:
    doc = _shipped("retired_variables.json")
    doc.take_whole("schema", 1, 1)
    fields = ("name", "system", "since", "instead")
    found = [RetiredVariable(*(entry.take_text(f) for f in fields)) for entry in doc.take_children("variables")]
    doc.end()
    return {variable.name: variable for variable in found}


def _shipped(name: str) -> Document:
    return parse_document((files("workbench.plan") / "rules" / name).read_text(encoding="utf-8"), name)


def _sizes(doc: Document) -> SizeLimits:
    def by_width(name: str) -> dict[str, dict[int, float]]:
        arches = doc.take_child(name)
        found = {arch: arches.take_child(arch) for arch in arches.names()}
        return {a: {int(width): float(row.take_value(width)) for width in row.names()} for a, row in found.items()}

    limits = SizeLimits(
        id=doc.take_text("id"),
        source=doc.take_text("source"),
        limit=doc.take_text("limit"),
        setting=doc.take_text("setting"),
        fuses=by_width("fuses_up_to_mib"),
        one_shot=by_width("one_shot_up_to_mib"),
    )
    doc.end()
    return limits


def _rule(system: str, topic: str, doc: Document, sizes: Mapping[str, SizeLimits]) -> Rule:
    rule = Rule(
        system=system,
        topic=topic,
        id=doc.take_text("id"),
        when=doc.take_text("when"),
        source=doc.take_text("source"),
        cost=doc.take_text("cost"),
        requires=tuple(_condition(c) for c in doc.take_children("requires")),
        groups=doc.take_texts("groups", default=[]),
        sizes=sizes[doc.take_text("sizes")] if doc.has("sizes") else None,
    )
    doc.end()
    return rule


def _condition(doc: Document, *, with_text: bool = True) -> Condition:
    tests = [test for test in _TESTS if doc.has(test)]
    if len(tests) != 1:
        doc.refuse(f"a condition has exactly one of {', '.join(_TESTS)}")
    condition = Condition(
        fact=doc.take_text("fact"),
        test=tests[0],
        value=doc.take_value(tests[0]),
        otherwise=doc.take_text("else") if with_text else "",
        unless=_condition(doc.take_child("unless"), with_text=False) if doc.has("unless") else None,
    )
    doc.end()
    return condition
