"""Starting ranks: real processes under torchrun, with nothing left behind."""

from workbench.launch.job import PROGRESS, JobResult, RankFailure, run_job
from workbench.launch.orphans import die_with_parent
from workbench.launch.survivors import find_survivors, run_tag, stop_survivors

__all__ = [
    "PROGRESS",
    "JobResult",
    "RankFailure",
    "die_with_parent",
    "find_survivors",
    "run_job",
    "run_tag",
    "stop_survivors",
]
