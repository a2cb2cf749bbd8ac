"""Fusion Workbench: see, reproduce, fix and speed up fused collectives of LLM inference."""

from typing import TYPE_CHECKING, Any

from workbench.version import VERSION as __version__

if TYPE_CHECKING:
    from workbench.launch import Cluster
    from workbench.observe import declare
    from workbench.ranks import GroupMap
    from workbench.runtime import Session

__all__ = ["Cluster", "GroupMap", "Session", "__version__", "declare"]


def __getattr__(name: str) -> Any:
    """Cluster, GroupMap, Session, declare on first use: pure code does not pay the seconds that torch takes to load."""
    if name == "Cluster":
        from workbench.launch import Cluster

        return Cluster
    if name == "GroupMap":
        from workbench.ranks import GroupMap

        return GroupMap
    if name == "Session":
        from workbench.runtime import Session

        return Session
    if name == "declare":
        from workbench.observe import declare

        return declare
    raise AttributeError(f"module 'workbench' has no attribute {name!r}")
