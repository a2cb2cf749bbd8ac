"""vllm-project/vllm#4903.

Symptom: TP over two hosts crashes in the check of the links. Cause: the devices that one host sees were taken for those
of the whole group. Modelled on two hosts of two devices.
"""

from __future__ import annotations

import pytest

from workbench.fabric import Fabric, Machine
from workbench.ranks import GroupKey

TWO_BY_TWO = Machine(
    name="two-by-two",
    about="two hosts of two GPUs",
    nodes=2,
    gpus_per_node=2,
    device_name="H100",
    arch="sm90",
    num_sms=132,
    nvlink=((0, 1),),
)


def _fabric(*ranks: int) -> Fabric:
    return Fabric(GroupKey("tp", ranks), tuple(TWO_BY_TWO.facts_of(r) for r in ranks))


def test_old_a_rank_of_the_second_host_has_no_row_in_the_first_hosts_matrix() -> None:
    links = [[True, True], [True, True]]  # as the first host sees its own two devices
    with pytest.raises(IndexError):
        all(links[one][other] for one in range(4) for other in range(4))


@pytest.mark.parametrize(
    ("ranks", "same_host"), [((0, 1), True), ((2, 3), True), ((0, 2), False), ((1, 2), False), ((0, 1, 2, 3), False)]
)
def test_hosts_are_told_apart_by_host_and_not_by_rank_or_by_devices_seen(ranks, same_host: bool) -> None:
    assert _fabric(*ranks).same_host.ok is same_host


def test_links_are_asked_within_a_host_and_nothing_is_claimed_across() -> None:
    four = _fabric(0, 1, 2, 3)
    assert four.nvlink.ok
    assert [[v.ok for v in row] for row in four.p2p_matrix] == [
        [True, True, False, False],
        [True, True, False, False],
        [False, False, True, True],
        [False, False, True, True],
    ]
    assert four.p2p_matrix[0][2].reason == "untried (another host)"
