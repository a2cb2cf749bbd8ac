"""The lines about each rank: drawn in place on a terminal, and nowhere else."""

from __future__ import annotations

import io

from workbench.xray.screen import Screen


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_are_drawn_over_the_last_ones_and_taken_away() -> None:
    terminal = Terminal()
    screen = Screen(terminal)
    assert screen.wanted
    screen.show(["world rank 0: waiting", "world rank 1: running"], cost_s=0)
    screen.show(["world rank 0: running"], cost_s=0)
    screen.clear()
    screen.clear()
    assert terminal.getvalue() == (
        "world rank 0: waiting\nworld rank 1: running\n\x1b[2A\x1b[Jworld rank 0: running\n\x1b[1A\x1b[J"
    )


def test_a_file_gets_no_such_lines() -> None:
    assert not Screen(io.StringIO()).wanted
