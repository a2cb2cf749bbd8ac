"""Records what programs do that know nothing of this package: their collectives, groups, waits and ends.

`recorded_environment` makes every Python process below a command record itself; `read_observed` reads what they wrote.
Nothing here is imported before a program imports torch.distributed, and none of it takes part in its communication.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.observe.declared import declare
    from workbench.observe.ended import Ended, boot_id, mark_ended, mark_status, read_ended
    from workbench.observe.environment import DIRECTORY, STARTUP, recorded_environment
    from workbench.observe.jobs import find_jobs, find_lost, read_run_id
    from workbench.observe.observed import read_observed
    from workbench.observe.stacks import Frame, dump_stacks

__all__ = [
    "DIRECTORY",
    "STARTUP",
    "Ended",
    "Frame",
    "boot_id",
    "declare",
    "dump_stacks",
    "find_jobs",
    "find_lost",
    "mark_ended",
    "mark_status",
    "read_ended",
    "read_observed",
    "read_run_id",
    "recorded_environment",
]

_HOMES = {
    "DIRECTORY": "environment",
    "STARTUP": "environment",
    "Ended": "ended",
    "boot_id": "ended",
    "mark_ended": "ended",
    "mark_status": "ended",
    "read_ended": "ended",
    "Frame": "stacks",
    "declare": "declared",
    "dump_stacks": "stacks",
    "find_jobs": "jobs",
    "find_lost": "jobs",
    "read_run_id": "jobs",
    "read_observed": "observed",
    "recorded_environment": "environment",
}


def __getattr__(name: str) -> Any:
    """The front door on first use: a recorded process imports this room in its first milliseconds."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'workbench.observe' has no attribute {name!r}")
    return getattr(import_module(f"workbench.observe.{_HOMES[name]}"), name)
