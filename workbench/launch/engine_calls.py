"""What a driver asks of a rank. Sent by reference: the rank runs its own copy, and the driver loads no torch."""

from __future__ import annotations


def begin(generation: int) -> tuple[int, str]:
    """Leave all groups and make those of `generation`; gives the rank's pid and device. Collective: every rank."""
    from workbench.launch.engine import this_rank

    return this_rank().begin(generation)


def end() -> None:
    """Close what holds memory of others. Local: nobody is waited for."""
    from workbench.launch.engine import this_rank

    this_rank().end()
