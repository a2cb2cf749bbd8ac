"""Open files: how many a process of a cluster needs, whether this user may have them, and taking them."""

from __future__ import annotations

import resource

from workbench.errors import ResourceError

_ENOUGH = 65_536


def check_open_files(ranks: int) -> None:
    """Refuse a number of ranks that the limit on open files would let half start. Local.

    ipyparallel's controller has 110 open and 6 more a rank; a rank 70, and 8 a peer once two groups have met.
    Raises: ResourceError.
    """
    needed = 128 + 12 * ranks
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ResourceError(
            f"{ranks} ranks need {needed} open files in a process, and this one and its children may have {hard}; "
            f"raise the limit before Python or Jupyter starts (ulimit -n {max(needed, 1024)}), or start fewer ranks"
        )


def take_open_files() -> None:
    """Raise this process's own limit as far as it may: a stranger's idle connections must not use it up. Local."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
