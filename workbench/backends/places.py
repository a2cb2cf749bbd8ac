"""Where ranks are: which host, which GPU. Some libraries' memory serves one host only, and one member a GPU."""

from __future__ import annotations

from pathlib import Path

import torch

from workbench.backends.base import Channel
from workbench.backends.vote import vote
from workbench.errors import ResourceError


def require_own_gpus(channel: Channel) -> None:
    """Return if all members are on one host, each with a GPU of its own.

    Collective: every member of the channel's group.   Raises: ResourceError otherwise, alike on every member.
    """
    told = vote(channel, "looking for the GPU", lambda: [host_id(), _gpu()])
    hosts, gpus = [host for host, _ in told], [gpu for _, gpu in told]
    if len(set(hosts)) > 1:
        raise ResourceError(f"{channel.key}: members are on different hosts: {hosts}; this path ends at the host")
    if len(set(gpus)) < len(gpus):
        raise ResourceError(f"{channel.key}: two members share one GPU ({gpus}); give each member its own")


def host_id() -> str:
    """What tells this machine from others, whatever containers call it: its boot id. Local."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _gpu() -> str:
    """The UUID of the process's own current device, whatever number it goes by here."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
