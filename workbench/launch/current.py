"""The current cluster: the one that `%%ranks` means."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from IPython import get_ipython

from workbench.errors import ResourceError

if TYPE_CHECKING:
    from workbench.launch.cluster import Cluster

_clusters: list[weakref.ReferenceType[Cluster]] = []


def current_cluster() -> Cluster:
    """The cluster that was started or attached last in this process and is still open. Raises ResourceError if none."""
    for reference in reversed(_clusters):
        cluster = reference()
        if cluster is not None and not cluster.closed:
            return cluster
    raise ResourceError("no cluster is open here; start one with Cluster(ranks=4), or Cluster.attach()")


def enter_notebook(cluster: Cluster) -> None:
    """Make it the current cluster, and have %%ranks where IPython runs."""
    _clusters.append(weakref.ref(cluster))
    shell = get_ipython()
    if shell is not None:
        shell.extension_manager.load_extension("workbench.magics")
