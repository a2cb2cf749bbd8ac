"""Pins how a Session comes to its paths: each rank's facts, told to the group; one decision; votes; room; memory.

Facts of simulated machines stand in for a probe's, on real ranks. No GPU is there, so on such facts a group ends with
every reason in one error, alike on each member; on facts of CPU ranks it runs.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forked import run_ranks
from tests.runtime.layouts import HIDDEN, fused_powers
from workbench.backends import gloo, shm
from workbench.backends.base import Room
from workbench.errors import MismatchError, PlanMismatchError, ResourceError
from workbench.fabric import Facts, Verdict, simulated
from workbench.ops import Op
from workbench.plan import path_order
from workbench.ranks import GroupMap
from workbench.runtime import Session, room, selection
from workbench.runtime import session as session_module
from workbench.runtime.room import Claim, decide_room, free_memory
from workbench.settings import Settings

PAIR = GroupMap.custom({"tp": [[0, 1]]})
EIGHT = GroupMap.custom({"tp": [list(range(8))]})
SIZES = {"hidden": HIDDEN, "dtype": torch.float32, "max_tokens": 4}


def tell(monkeypatch: pytest.MonkeyPatch, facts_of: Callable[[int], Facts]) -> None:
    """Let ranks that are forked from now on find these facts."""
    monkeypatch.setattr(session_module, "probe_facts", lambda world_rank, **_: facts_of(world_rank))


def take_gpu_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks that are forked from now on ask the paths of GPUs; nothing touches one before a vote has refused it."""
    monkeypatch.setattr(selection, "path_order", lambda _device, backend=None: path_order("cuda", backend=backend))


def cpu(world_rank: int, node: int = 0) -> Facts:
    return Facts(world_rank=world_rank, host=f"boot-{node}", node=f"node{node}")


def prepared(group_map: GroupMap, **more: Any) -> Callable[[int], tuple[str, str, list[float]]]:
    def body(rank: int) -> tuple[str, str, list[float]]:
        with Session(group_map, device="cpu", timeout_s=20) as s:
            plan = s.prepare("tp", **{**SIZES, **more})
            return plan.choice, str(plan.rejected), fused_powers(s, "tp", 2).residual.unique().tolist()

    return body


def refused(group_map: GroupMap, **more: Any) -> Callable[[int], str]:
    def body(rank: int) -> str:
        with Session(group_map, device="cpu", timeout_s=20) as s, pytest.raises(ResourceError) as e:
            s.prepare("tp", **{**SIZES, **more})
        return str(e.value)

    return body


def test_on_one_host_the_kernel_of_our_own_is_chosen_for_the_reason_of_the_table() -> None:
    def body(rank: int) -> tuple[str, str, int, str]:
        with Session(PAIR, device="cpu", timeout_s=20) as s:
            plan = s.prepare("tp", **SIZES)
            assert plan.workspace_bytes == s._groups[0, 1].prepared[torch.float32, HIDDEN].parts[0].workspace.size_bytes
            return plan.choice, plan.reason, plan.capacity_tokens, plan.fallback

    node = Path("/proc/sys/kernel/hostname").read_text().strip()
    assert run_ranks(2, body) == [("shm", f"all on {node}", 4, "gloo over tp[0,1]")] * 2


def test_members_that_say_different_hosts_take_the_path_between_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    tell(monkeypatch, lambda rank: cpu(rank, node=rank))
    rejected = (
        "(('shm', 'on 2 hosts (world rank 0: node0; world rank 1: node1); its memory is shared within a host only'),)"
    )
    assert run_ranks(2, prepared(PAIR)) == [("gloo", rejected, [8.0])] * 2


def test_one_rank_that_differs_decides_for_all_alike_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    tell(monkeypatch, lambda rank: cpu(rank, node=1 if rank == 5 else 0))
    found = run_ranks(8, prepared(EIGHT))
    assert found == [found[0]] * 8
    assert found[0][0] == "gloo"
    assert "on 2 hosts (world ranks 0..4, 6, 7: node0; world rank 5: node1)" in found[0][1]


NOT_HERE = {
    "custom.fused": "world ranks 0..7: torch finds no usable GPU",
    "nccl": "world ranks 0..7: torch finds no usable GPU",
}


def test_every_path_of_a_gpu_machine_is_refused_with_its_reason_where_no_gpu_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """decide_path names custom.fused.push; its backend's probe refuses; and so on down to the last."""
    place = simulated("h100x8")
    tell(monkeypatch, lambda rank: place.facts_of(rank))
    take_gpu_paths(monkeypatch)
    texts = set(run_ranks(8, refused(EIGHT, dtype=torch.bfloat16)))
    assert len(texts) == 1
    text = texts.pop()
    order = ["custom.fused", "custom", "nccl"]
    places = [text.index(f"; {name}: " if i else f": {name}: ") for i, name in enumerate(order)]
    assert places == sorted(places)
    assert "custom: rounds twice between sum and residual, rounding='once' is asked for" in text
    for name, reason in NOT_HERE.items():
        assert f"{name}: {reason}" in text


@pytest.mark.parametrize(
    ("machine", "fields", "told"),
    [
        ("gb200-2x4", {}, "custom.fused: world ranks 0..7: torch finds no usable GPU"),  # chosen: one clique
        ("gb200-2x4", {"clique": "none"}, "custom.fused: on 2 hosts (world ranks 0..3: node0; world ranks 4..7: node1) "
         "and world rank 5 in no NVLink clique"),
        ("h100x8", {"arch": "sm100"}, "custom.fused: mixed architectures (world ranks 0..4, 6, 7: sm90; world rank 5: "
         "sm100)"),
        ("h100x8", {"device": ""}, "custom.fused: world rank 5 without a GPU; custom: world rank 5 without a GPU"),
        ("h100x8", {"multicast_forbidden": False}, "custom.fused: world ranks 0..7: torch finds no usable GPU"),
    ],
    ids=["clique", "no-clique", "arch", "device", "multicast"],
)  # fmt: skip
def test_members_that_disagree_about_facts_decide_alike_and_name_the_one(
    machine: str, fields: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workbench.fabric import NO_CLIQUE

    place = simulated(machine)
    fields = {**fields, "clique": NO_CLIQUE} if fields.get("clique") else fields
    take_gpu_paths(monkeypatch)
    tell(monkeypatch, lambda rank: replace(place.facts_of(rank), **(fields if rank == 5 else {})))
    texts = set(run_ranks(8, refused(EIGHT, dtype=torch.bfloat16)))
    assert len(texts) == 1
    assert told in texts.pop()


def test_a_rank_that_cannot_tell_its_facts_is_every_members_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def facts_of(rank: int) -> Facts:
        if rank == 1:
            raise OSError("no boot id")
        return cpu(rank)

    tell(monkeypatch, facts_of)
    assert run_ranks(2, refused(PAIR)) == ["tp[0,1]: telling facts failed; world rank 1: no boot id"] * 2


@pytest.mark.parametrize("name", ["fusion", "custom_all_reduce", "multicast", "check"])
def test_settings_that_differ_are_refused_alike_before_any_group_is_made(name: str) -> None:
    def body(rank: int) -> str:
        settings = Settings(**{name: rank == 1})
        with pytest.raises(PlanMismatchError) as e:
            Session(PAIR, device="cpu", timeout_s=20, settings=settings)
        return str(e.value)

    texts = set(run_ranks(2, body))
    assert len(texts) == 1
    assert f"values of WORKBENCH_{name.upper()} of the ranks differ" in texts.pop()


def test_ranks_with_different_tables_are_told_alike_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As two versions of the package would be: the same facts, another order of the paths on one rank."""

    def body(rank: int) -> str:
        if rank == 1:
            monkeypatch.setattr(selection, "path_order", lambda device, backend=None: ("gloo", "shm"))
        monkeypatch.setattr(shm, "bind", None)
        with Session(PAIR, device="cpu", timeout_s=20) as s, pytest.raises(PlanMismatchError) as e:
            s.prepare("tp", **SIZES)
        return str(e.value)

    texts = set(run_ranks(2, body))
    assert len(texts) == 1
    text = texts.pop()
    assert "members decided differently from the same facts: world rank 0: " in text
    assert "world rank 1: " in text


def test_a_path_that_one_members_backend_refuses_is_passed_over_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: int) -> tuple[str, str, list[float]]:
        if rank == 1:
            monkeypatch.setattr(shm, "probe", lambda request, key: Verdict(False, "no compiler"))
        return prepared(PAIR)(rank)

    assert run_ranks(2, body) == [("gloo", "(('shm', 'world rank 1: no compiler'),)", [8.0])] * 2


def test_a_backend_module_that_is_missing_is_a_refusal_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: int) -> tuple[str, str, list[float]]:
        real = importlib.import_module

        def load(name: str) -> Any:
            if name == "workbench.backends.shm" and rank == 0:
                raise ModuleNotFoundError("No module named 'workbench.backends.shm'")
            return real(name)

        monkeypatch.setattr(selection.importlib, "import_module", load)
        return prepared(PAIR)(rank)

    choice, rejected, found = run_ranks(2, body)[1]
    assert (choice, found) == ("gloo", [8.0])
    assert "world rank 0: No module named 'workbench.backends.shm'" in rejected


def test_what_failed_for_a_request_is_remembered_and_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: int) -> tuple[int, list[str], str]:
        tried: list[int] = []

        def bind(channel: Any, request: Any) -> None:
            tried.append(request.max_tokens)
            raise ResourceError("no memory, says this test")

        monkeypatch.setattr(shm, "bind", bind)
        with Session(PAIR, device="cpu", timeout_s=20) as s:
            choices = [s.prepare("tp", **{**SIZES, "max_tokens": n}).choice for n in (4, 8)]
            s._groups[0, 1].prepared.clear()
            choices.append(s.prepare("tp", **SIZES).choice)
            return len(tried), choices, s.why("tp").rejected[0][1]

    assert run_ranks(2, body) == [(2, ["gloo"] * 3, "no memory, says this test")] * 2


def test_a_named_backend_still_has_to_be_able(monkeypatch: pytest.MonkeyPatch) -> None:
    tell(monkeypatch, lambda rank: cpu(rank, node=rank))
    texts = set(run_ranks(2, refused(PAIR, backend="shm")))
    assert len(texts) == 1
    text = texts.pop()
    assert text.startswith("tp[0,1]: no path for hidden=64 dtype=torch.float32 max_tokens=4 ops=all_reduce+all_reduce_")
    assert text.endswith(
        "rounding=once: shm: on 2 hosts (world rank 0: node0; world rank 1: node1); its memory is shared within a host "
        "only"
    )


def test_a_session_probes_once_and_a_group_of_one_rank_never(monkeypatch: pytest.MonkeyPatch) -> None:
    group_map = GroupMap.custom({"one": [[0], [1]], "tp": [[0, 1]], "again": [[1, 0]]})

    def body(rank: int) -> list[int]:
        probes: list[int] = []

        def facts_of(rank: int, **_: object) -> Facts:
            probes.append(rank)
            return cpu(rank)

        monkeypatch.setattr(session_module, "probe_facts", facts_of)
        counts = []
        with Session(group_map, device="cpu", timeout_s=20) as s:
            for kind in ("one", "tp", "again", "tp"):
                s.prepare(kind, **SIZES)
                counts.append(len(probes))
        return counts

    assert run_ranks(2, body) == [[0, 1, 1, 1]] * 2


class Sized:
    """A backend for the test: it notes what it was bound for, and gloo does the work."""

    bound: list[tuple[int, str]]

    def __init__(self) -> None:
        self.bound = []

    def probe(self, *_: Any) -> Verdict:
        return Verdict(True, "made for this test")

    def bind(self, channel: Any, request: Any) -> Any:
        self.bound.append((request.max_tokens, request.algorithm))
        return gloo.bind(channel, request)


def test_each_range_of_sizes_has_a_workspace_of_its_own_and_a_call_takes_that_of_its_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Eight Hopper GPUs in facts: push up to 60 KiB a rank, two shots above it. 64 floats are 256 bytes a token."""
    place = simulated("h100x8")
    tell(monkeypatch, lambda rank: place.facts_of(rank))
    take_gpu_paths(monkeypatch)

    def body(rank: int) -> tuple[list[Any], list[Any], list[float]]:
        backends = {name: Sized() for name in ("custom", "nccl")}
        monkeypatch.setattr(selection, "_module", lambda path: backends[path.backend])
        with Session(EIGHT, device="cpu", timeout_s=40, trace_dir=str(tmp_path)) as s:
            s.prepare("tp", **{**SIZES, "max_tokens": 1024})
            sums = [fused_powers(s, "tp", n).residual.unique().tolist()[0] for n in (1, 240, 241, 1024)]
            plans = [(s.why("tp", tokens=n).choice, s.why("tp", tokens=n).capacity_tokens) for n in (1, 240, 241, 1024)]
            assert backends["nccl"].bound == []
            return plans, backends["custom"].bound, sums

    plans, custom, sums = run_ranks(8, body)[3]
    assert plans == [("custom.fused.push", 240)] * 2 + [("custom.fused.two_shot_push", 1024)] * 2
    assert custom == [(240, "push"), (1024, "two_shot_push")]
    assert sums == [260.0] * 4
    from workbench.trace import read_directory

    events = [e for e in read_directory(tmp_path).ranks[0].events if e.op == "all_reduce_add_rms_norm"]
    assert [e.path for e in events if e.phase.value == "B"] == [
        *["custom.fused.push"] * 2,
        *["custom.fused.two_shot_push"] * 2,
    ]


def test_a_path_that_only_sums_is_composed_with_the_bits_of_the_unfused_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16 the sum 257 rounds to 256, and with the residual of 1 again to 256; rounded once, 258 comes out."""
    place = simulated("h200x2")
    tell(monkeypatch, lambda rank: place.facts_of(rank))
    take_gpu_paths(monkeypatch)

    def body(rank: int) -> tuple[str, frozenset[Op], float, float, str]:
        asked: list[frozenset[Op]] = []

        class OnlySums(Sized):
            def bind(self, channel: Any, request: Any) -> Any:
                asked.append(request.ops)
                return super().bind(channel, request)

        monkeypatch.setattr(selection, "_module", lambda path: OnlySums())
        settings = Settings(fusion=False)
        with Session(PAIR, device="cpu", timeout_s=20, settings=settings) as s:
            plan = s.prepare("tp", hidden=8, dtype=torch.bfloat16, max_tokens=1, rounding="twice")
            x = torch.full((1, 8), 256.0 if rank == 0 else 1.0).bfloat16()
            one = torch.ones_like(x)
            out = s.all_reduce_add_rms_norm(x, one, torch.ones(8).bfloat16(), eps=1e-6, group="tp")
            return plan.choice, asked[0], out.residual[0, 0].item(), s.all_reduce(x, group="tp")[0, 0].item(), ""

    assert run_ranks(2, body) == [("custom.push", frozenset({Op.ALL_REDUCE}), 256.0, 256.0, "")] * 2


def test_more_than_there_is_room_for_is_refused_before_any_byte_is_taken() -> None:
    """2^20 x 2^20 floats are 4 TiB a buffer: more than the machine has, and none of it is taken."""
    before = room.free_bytes()
    texts = set(run_ranks(2, refused(PAIR, hidden=1 << 20, max_tokens=1 << 20, backend="shm")))
    assert len(texts) == 1
    found = re.search(
        r"shm: world ranks 0, 1: (\d+) bytes asked \((\d+) each\) of /dev/shm, (\d+) are free; world ranks 0, 1: \1 "
        r"bytes asked \(\2 each\) of the host's memory, (\d+) are free",
        texts.pop(),
    )
    assert found is not None
    assert int(found[1]) == 2 * int(found[2]) > 2 * 2 * (1 << 42)
    assert 0 < int(found[3]) <= before + (1 << 30)


def test_one_member_short_of_memory_refuses_for_the_group_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: int) -> str:
        if rank == 1:
            monkeypatch.setattr(shm, "room", lambda request, key: Room(shm=1 << 60))
        return refused(PAIR, backend="shm")(rank)

    texts = set(run_ranks(2, body))
    assert len(texts) == 1
    assert re.search(r"asked \(\d+ by world rank 0, 1152921504606846976 by world rank 1\) of /dev/shm", texts.pop())


def test_members_of_one_host_share_its_memory_and_gpus_are_their_own() -> None:
    shared = [(r, [Claim("host shm", "/dev/shm", 600, 1000)]) for r in (0, 1)]
    assert decide_room(shared) == "world ranks 0, 1: 1200 bytes asked (600 each) of /dev/shm, 1000 are free"
    assert decide_room(shared[:1]) == ""
    gpus = [(r, [Claim(f"gpu {r}", "GPU memory", 600, 1000 if r else 500)]) for r in (0, 1)]
    assert decide_room(gpus) == "world rank 0: 600 bytes asked of GPU memory, 500 are free"
    assert decide_room([(0, []), (1, [])]) == ""


def test_a_control_group_smaller_than_the_machine_bounds_the_room(tmp_path: Path) -> None:
    """cgroup v2: the group's own limit, its parent's smaller one, pages of files that can be given back."""

    def write(path: str, text: str) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    write("proc/meminfo", "MemTotal: 1000 kB\nMemAvailable:    800 kB\n")
    write("proc/self/cgroup", "0::/job/rank\n")
    write("sys/fs/cgroup/job/rank/memory.max", "max\n")
    write("sys/fs/cgroup/job/rank/memory.current", "1\n")
    assert free_memory(tmp_path) == (800 * 1024, "/")
    write("sys/fs/cgroup/job/memory.max", "500000\n")
    write("sys/fs/cgroup/job/memory.current", "450000\n")
    write("sys/fs/cgroup/job/memory.stat", "anon 1\ninactive_file 20000\nactive_file 5000\n")
    assert free_memory(tmp_path) == (75000, "sys/fs/cgroup/job")
    write("sys/fs/cgroup/job/rank/memory.max", "1000\n")
    write("sys/fs/cgroup/job/rank/memory.current", "5000\n")
    assert free_memory(tmp_path) == (0, "sys/fs/cgroup/job/rank")
    # cgroup v1, where no limit is a number near 2^63 and a group's file pages are counted with those inside it
    write("proc/self/cgroup", "4:memory:/box\n3:cpu:/\n0::/\n")
    write("sys/fs/cgroup/memory/box/memory.limit_in_bytes", "9223372036854771712\n")
    write("sys/fs/cgroup/memory/memory.limit_in_bytes", "600000\n")
    write("sys/fs/cgroup/memory/memory.usage_in_bytes", "500000\n")
    write("sys/fs/cgroup/memory/memory.stat", "inactive_file 1\ntotal_inactive_file 10000\n")
    assert free_memory(tmp_path) == (110000, "sys/fs/cgroup/memory")


def test_this_machine_says_how_much_memory_is_left() -> None:
    free, _ = free_memory()
    assert 0 < free < 1 << 50


STEPS = [
    ("prepare", 0),
    ("telling facts", 1),
    ("probe", 2),
    ("shared memory", 3),
    ("mapping the peers' shared memory", 4),
]


@pytest.mark.parametrize(("step", "before"), STEPS, ids=[step for step, _ in STEPS])
def test_a_rank_that_stays_away_from_a_step_is_named_with_the_step(step: str, before: int) -> None:
    """World rank 1 goes into a barrier instead of the step: both are told who came for what."""

    def body(rank: int) -> str:
        with pytest.raises(MismatchError) as e, Session(PAIR, device="cpu", timeout_s=20) as s:
            channel = s._groups[0, 1].channel
            if rank == 1:
                real, calls = channel.gather, []

                def gather(value: Any, *, what: str) -> list[Any]:
                    calls.append(what)
                    return real(value, what="barrier" if len(calls) == before + 1 else what)

                channel.gather = gather
            s.prepare("tp", **SIZES)
        return str(e.value)

    texts = set(run_ranks(2, body))
    assert len(texts) == 1
    assert f"world rank 0: {step}; world rank 1: barrier" in texts.pop()
