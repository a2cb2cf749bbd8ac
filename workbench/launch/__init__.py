"""Starting ranks: real processes under torchrun, with nothing left behind."""

from typing import TYPE_CHECKING, Any

from workbench.launch.directory import ClusterRecord, find_records
from workbench.launch.job import PROGRESS, JobResult, RankFailure, run_job
from workbench.launch.orphans import die_with_parent, end_with_starter
from workbench.launch.survivors import MARK, find_survivors, run_tag, stop_survivors

if TYPE_CHECKING:
    from workbench.launch.cluster import Cluster
    from workbench.launch.current import current_cluster
    from workbench.launch.failure import CellDeadlineError, RankDiedError, RankError, RanksFailedError
    from workbench.launch.standing import ClusterStatus, Diagnosis, Standing

__all__ = [
    "MARK",
    "PROGRESS",
    "CellDeadlineError",
    "Cluster",
    "ClusterRecord",
    "ClusterStatus",
    "Diagnosis",
    "JobResult",
    "RankDiedError",
    "RankError",
    "RankFailure",
    "RanksFailedError",
    "Standing",
    "current_cluster",
    "die_with_parent",
    "end_with_starter",
    "find_records",
    "find_survivors",
    "run_job",
    "run_tag",
    "stop_survivors",
]

_LATER = {
    "Cluster": "cluster",
    "ClusterStatus": "standing",
    "current_cluster": "current",
    "CellDeadlineError": "failure",
    "RankDiedError": "failure",
    "RankError": "failure",
    "RanksFailedError": "failure",
    "Diagnosis": "standing",
    "Standing": "standing",
}


def __getattr__(name: str) -> Any:
    """Clusters on first use: jobs do not pay for loading ipyparallel."""
    if name in _LATER:
        import importlib

        return getattr(importlib.import_module(f"workbench.launch.{_LATER[name]}"), name)
    raise AttributeError(f"module 'workbench.launch' has no attribute {name!r}")
