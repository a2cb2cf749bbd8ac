"""The runtime: groups on real ranks, votes, workspaces and the Session that holds them."""

from workbench.runtime.session import Session

__all__ = ["Session"]
