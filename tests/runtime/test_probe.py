"""Pins that probing is honest and never waits: a machine without a GPU, deadlines, and one fabric for all ranks.

On a machine with GPUs the last tests try the real thing; nothing pretends to be a GPU.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.backends.ranks import GlooChannel
from tests.fabric.made import make_facts
from tests.forked import run_ranks
from workbench.fabric import NO_CLIQUE, Allocator, Capability, Facts, Outcome, decide_capability, simulated
from workbench.plan import Ask, decide_path, fingerprint
from workbench.ranks import GroupKey
from workbench.runtime.cuda_probe import is_healthy
from workbench.runtime.probe import probe_facts, run_steps, vote_fabric
from workbench.settings import Settings

BOOT_ID = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
NO_GPU = not torch.cuda.is_available()


def test_a_cpu_rank_tells_its_host_and_claims_nothing() -> None:
    facts = probe_facts(3, device="cpu")
    assert (facts.world_rank, facts.host, facts.device, facts.arch, facts.links) == (3, BOOT_ID, "", "", ())
    assert (facts.clique, facts.allocator, facts.vmm_fd.outcome) == (NO_CLIQUE, Allocator.NONE, Outcome.UNTRIED)
    assert facts.multicast_forbidden
    assert Facts.from_json(facts.to_json()) == facts


@pytest.mark.skipif(not NO_GPU, reason="a GPU is there")
def test_a_rank_that_wants_a_gpu_where_there_is_none_says_so() -> None:
    facts = probe_facts(0, device="cuda")
    assert (facts.device, facts.notes) == ("", ("torch finds no usable GPU",))


@pytest.mark.skipif(not NO_GPU, reason="a GPU is there")
def test_the_probes_process_gives_a_reason_for_every_step_without_a_driver() -> None:
    steps = ["devices", "nvml", "vmm_fd", "peer_access:GPU-1"]
    answers = run_steps("GPU-0", steps, 20)
    assert list(answers) == steps
    assert {a["outcome"] for a in answers.values()} == {"fails"}
    assert all("libcuda.so.1" in answers[s]["reason"] for s in steps if s != "nvml")


PROGRAM = """
import json, os, sys, time
for step in sys.argv[2:]:
    if step == "hang":
        time.sleep(600)
    if step == "crash":
        os.abort()
    if step == "mute":
        sys.exit(0)
    works = {"step": step, "outcome": "works", "reason": "", "value": 1}
    print("{" if step == "garbage" else json.dumps(works), flush=True)
"""


def test_a_step_that_hangs_or_crashes_fails_alone_and_the_rest_is_still_tried(tmp_path: Path) -> None:
    program = tmp_path / "steps.py"
    program.write_text(PROGRAM)
    started = time.monotonic()
    answers = run_steps("x", ["a", "hang", "b", "crash", "garbage", "mute", "c"], 2.0, program=str(program))
    assert time.monotonic() - started < 40
    assert {step: (a["outcome"], a["reason"]) for step, a in answers.items()} == {
        "a": ("works", ""),
        "hang": ("fails", "no answer within 2 s"),
        "b": ("works", ""),
        "crash": ("fails", "the probe's process was ended by SIGABRT"),
        "garbage": ("fails", "an answer that is no JSON"),
        "mute": ("fails", "the probe's process ended without an answer"),
        "c": ("works", ""),
    }


def test_a_hanging_probe_leaves_no_process_behind(tmp_path: Path) -> None:
    """The probe starts a process of its own, as the IPC step does; both are gone afterwards."""
    program = tmp_path / "steps.py"
    pids = tmp_path / "pids"
    program.write_text(
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(600)\n"
    )
    run_steps("x", ["hang"], 3.0, program=str(program))
    left = [int(p) for p in pids.read_text().split()]
    assert len(left) == 2
    ends = time.monotonic() + 20
    while any(_runs(pid) for pid in left) and time.monotonic() < ends:
        time.sleep(0.05)
    assert not any(_runs(pid) for pid in left)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("mask", "healthy"),
    [
        (0, True),  # nothing supported, nothing told
        (0b10, True),  # bandwidth is not degraded
        (0b01, False),  # bandwidth is degraded
        (0b01 << 2, False),  # a route recovers
        (0b01 << 4, False),  # a route is unhealthy
        (0b10 << 4 | 0b10 << 2, True),
        (1 << 8, True),  # configuration: none wrong
        (4 << 8, False),  # configuration: no partition
    ],
)
def test_trouble_in_the_fabrics_health_mask(mask: int, healthy: bool) -> None:
    assert is_healthy(mask) is healthy


def body_of_a_disagreeing_rank(rank: int) -> tuple[str, str, str]:
    """Eight ranks of two trays; world rank 5 alone says it is in no clique. Each decides for itself."""
    dist.init_process_group("gloo")
    key = GroupKey("tp", tuple(range(8)))
    channel = GlooChannel(key, dist.group.WORLD, 30.0)
    facts = simulated("gb200-2x4").facts_of(rank)
    agreed = vote_fabric(channel, lambda: facts)
    differing = vote_fabric(channel, lambda: replace(facts, clique=NO_CLIQUE) if rank == 5 else facts)
    plans = [decide_path(fabric, Ask(hidden=7168, tokens=1), Settings()) for fabric in (agreed, differing)]
    dist.destroy_process_group()
    return plans[0].choice, plans[1].choice, fingerprint([plan.to_json() for plan in plans])


def test_one_rank_that_differs_gives_the_same_plan_on_every_rank_and_is_named() -> None:
    found = run_ranks(8, body_of_a_disagreeing_rank)
    assert {(first, second) for first, second, _ in found} == {("custom.fused.push", "nccl")}
    assert len({plans for _, _, plans in found}) == 1
    assert "world rank 5 in no NVLink clique" in found[0][2]


DIFFERING: dict[str, dict[str, object]] = {
    "nothing": {},
    "clique": {"clique": NO_CLIQUE},
    "allocator": {"allocator": Allocator.VMM_POSIX_FD},
    "arch": {"arch": "sm90"},
    "host": {"host": "boot-9", "node": "stray"},
    "multicast": {"multicast_supported": False},
}
# (hosts, one clique, architecture, what world rank 5 has otherwise) -> the choice as set, without fusion, without ours
SIXTEEN: dict[tuple[int, bool, str, str], tuple[str, str, str]] = {
    (1, False, "sm100", "nothing"): ("custom.fused.push", "custom.push", "nccl"),
    (1, False, "sm100", "clique"): ("custom.fused.push", "custom.push", "nccl"),  # on one host nobody asks
    (1, False, "sm100", "allocator"): ("custom.fused.push", "custom.push", "nccl"),
    (1, False, "sm100", "arch"): ("nccl", "nccl", "nccl"),
    (1, False, "sm100", "host"): ("nccl", "nccl", "nccl"),  # elsewhere, and in no clique
    (1, True, "sm100", "host"): ("custom.fused.push", "custom.push", "nccl"),  # elsewhere in the clique
    (1, False, "sm90", "nothing"): ("nccl", "nccl", "nccl"),  # no row of sixteen
    (4, True, "sm100", "nothing"): ("custom.fused.push", "custom.push", "nccl"),
    (4, True, "sm100", "clique"): ("nccl", "nccl", "nccl"),
    (4, True, "sm100", "allocator"): ("custom.fused.push", "custom.push", "nccl"),
    (4, True, "sm100", "multicast"): ("custom.fused.push", "custom.push", "nccl"),
    (4, False, "sm100", "nothing"): ("nccl", "nccl", "nccl"),
}


def body_of_every_combination(rank: int) -> list[str]:
    """Sixteen ranks tell their facts of each kind of machine, one of them otherwise, and each decides for itself."""
    dist.init_process_group("gloo")
    channel = GlooChannel(GroupKey("tp", tuple(range(16))), dist.group.WORLD, 30.0)
    choices = []
    for (num_hosts, clique, arch, name), wanted in SIXTEEN.items():
        facts = make_facts(16, num_hosts=num_hosts, clique=clique, arch=arch, multicast=True)[rank]
        mine = replace(facts, **(DIFFERING[name] if rank == 5 else {}))
        fabric = vote_fabric(channel, lambda mine=mine: mine)
        ask = Ask(hidden=7168, tokens=1, rounding="twice")
        switches = (Settings(), Settings(fusion=False), Settings(custom_all_reduce=False))
        plans = [decide_path(fabric, ask, settings) for settings in switches]
        assert tuple(plan.choice for plan in plans) == wanted, (num_hosts, clique, arch, name, plans)
        choices += [str(plan) for plan in plans]
    dist.destroy_process_group()
    return choices


def test_sixteen_ranks_decide_alike_on_every_machine_whoever_differs() -> None:
    found = run_ranks(16, body_of_every_combination)
    assert len(found[0]) == 36
    assert found == [found[0]] * 16


def body_that_tells_real_facts(rank: int) -> str:
    dist.init_process_group("gloo")
    channel = GlooChannel(GroupKey("tp", (1, 0)), dist.group.WORLD, 30.0)  # type: ignore[arg-type]  # the default group
    fabric = vote_fabric(channel, lambda: probe_facts(rank, device="cpu"))
    dist.destroy_process_group()
    return f"{fabric.same_host.ok} {[f.world_rank for f in fabric.facts]}"


def test_real_ranks_find_that_they_share_a_host_in_the_groups_own_order() -> None:
    assert run_ranks(2, body_that_tells_real_facts) == ["True [1, 0]", "True [1, 0]"]


@pytest.mark.skipif(NO_GPU, reason="needs a GPU")
def test_a_gpu_is_told_by_uuid_architecture_and_what_its_own_memory_can_do() -> None:
    facts = probe_facts(0, device="cuda", step_deadline_s=60)
    assert facts.device.startswith("GPU-")
    assert facts.arch == "sm{}{}".format(*torch.cuda.get_device_capability())
    assert facts.num_sms == torch.cuda.get_device_properties(0).multi_processor_count
    assert facts.allocator in (Allocator.PLAIN, Allocator.VMM_POSIX_FD, Allocator.VMM_FABRIC)
    assert facts.vmm_fd.outcome is not Outcome.UNTRIED
    assert len(facts.links) == torch.cuda.device_count() - 1
    assert Facts.from_json(facts.to_json()) == facts


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_of_one_host_reach_each_other_by_writing_and_reading() -> None:
    facts = []
    for index in (0, 1):
        torch.cuda.set_device(index)
        facts.append(probe_facts(index, device="cuda", step_deadline_s=60))
    torch.cuda.set_device(0)
    told = "\n".join(f"{f}\n{f.links}\n{f.notes}" for f in facts)
    assert [link.peer_access.outcome for f in facts for link in f.links[:1]] == [Outcome.WORKS, Outcome.WORKS], told
    assert [link.ipc.outcome for f in facts for link in f.links[:1]] == [Outcome.WORKS, Outcome.WORKS], told
    assert decide_capability(_fabric(facts), Capability.STAGED).ok, told


def _fabric(facts: list[Facts]):  # type: ignore[no-untyped-def]  # a test's helper
    from workbench.fabric import Fabric

    return Fabric(GroupKey("tp", tuple(f.world_rank for f in facts)), tuple(facts))
