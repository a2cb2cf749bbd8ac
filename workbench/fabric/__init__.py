"""What a machine offers: facts of every rank, what a group has in common, and what its kernels may do. Pure."""

from workbench.fabric.capabilities import Capability, decide_capability
from workbench.fabric.fabric import Fabric
from workbench.fabric.facts import NO_CLIQUE, UNTRIED, Allocator, Clique, Facts, Link, Outcome, Trial
from workbench.fabric.machine import SIMULATED, Machine, describe_host, read_machine, simulated
from workbench.fabric.verdict import Verdict, name_ranks, name_shares

__all__ = [
    "NO_CLIQUE",
    "SIMULATED",
    "UNTRIED",
    "Allocator",
    "Capability",
    "Clique",
    "Fabric",
    "Facts",
    "Link",
    "Machine",
    "Outcome",
    "Trial",
    "Verdict",
    "decide_capability",
    "describe_host",
    "name_ranks",
    "name_shares",
    "read_machine",
    "simulated",
]
