"""noonghunna/club-3090#922.

Symptom: the model answers "!!!!". Two causes look alike: custom all-reduce over patched peer access, or a bad cable. A
test of the link alone tells them apart. Modelled on a driver whose link flips a bit.
"""

from __future__ import annotations

import pytest
import torch

from tests.bugs.fake_driver import DEVICES, FakeDriver
from workbench.ops import reference_all_reduce
from workbench.runtime.cuda_probe import ProbeError, probe_peer_access

ONE, TWO = torch.full((1, 8), 1.0), torch.full((1, 8), 10.0)


def _flip(x: torch.Tensor) -> torch.Tensor:
    """A bit flips in what the other device sees."""
    bits = x.clone().view(torch.int32)
    bits[0, 7] ^= 1 << 22
    return bits.view(torch.float32)


def _all_reduce(*, bad_cable: bool, bad_kernel: bool) -> torch.Tensor:
    arrived = _flip(TWO) if bad_cable else TWO
    total = reference_all_reduce([ONE, arrived])
    return _flip(total) if bad_kernel else total


def test_old_from_the_sum_alone_kernel_and_cable_look_the_same() -> None:
    right = _all_reduce(bad_cable=False, bad_kernel=False)
    assert right.unique().tolist() == [11.0]
    wrong = [_all_reduce(bad_cable=cable, bad_kernel=not cable) for cable in (True, False)]
    assert [(x != right).sum().item() for x in wrong] == [1, 1]


def test_the_links_own_test_blames_the_cable_and_clears_it_where_the_kernel_is_wrong() -> None:
    with pytest.raises(ProbeError) as e:
        probe_peer_access(FakeDriver(flips=True), *DEVICES)
    assert str(e.value) == "written to the other's memory: 1 of 256 words are others"
    probe_peer_access(FakeDriver(), *DEVICES)  # no error: look at the kernel
