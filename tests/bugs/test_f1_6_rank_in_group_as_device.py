"""vllm-project/vllm#35424.

Symptom: TP2 x PP2 on GPUs 4 to 7: the second stage opens GPUs 0 and 1, and the start ends in "duplicate GPU". Cause: a
place in the group was used as a device index. Modelled on facts.
"""

from __future__ import annotations

from workbench.fabric import Fabric, Facts
from workbench.ranks import GroupMap

DEVICE = {0: 4, 1: 5, 2: 6, 3: 7}  # world rank -> the GPU its process was given
GROUPS = GroupMap.build("vllm", tp=2, pp=2)


def _fabric(world_rank: int, device_of: dict[int, int]) -> Fabric:
    key = GROUPS.group_of("tp", world_rank)
    told = {"host": "boot-0", "node": "node0", "arch": "sm90"}
    return Fabric(key, tuple(Facts(world_rank=r, device=f"GPU-{device_of[r]}", **told) for r in key.world_ranks))


def test_old_the_place_in_the_group_picks_the_device() -> None:
    opened = {r: GROUPS.group_of("tp", r).group_rank(r) for r in DEVICE}
    assert opened == {0: 0, 1: 1, 2: 0, 3: 1}  # right: 4, 5, 6, 7


def test_a_member_is_asked_for_its_own_device() -> None:
    second = _fabric(2, DEVICE)
    assert second.key.world_ranks == (2, 3)
    assert second.facts[0].device == "GPU-6"
    assert second.devices.evidence == ("world rank 2: GPU-6", "world rank 3: GPU-7")


def test_two_members_on_one_device_are_named_before_anything_starts() -> None:
    wrong = _fabric(2, DEVICE | {3: 6}).devices
    assert (wrong.ok, wrong.reason) == (False, "world ranks 2, 3 share device GPU-6")
