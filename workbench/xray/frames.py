"""Which frame of a stack is the program's own."""

from __future__ import annotations

from collections.abc import Sequence

from workbench.observe import Frame


def program_frame(stack: Sequence[Frame]) -> Frame | None:
    """The innermost frame outside libraries, else the outermost; None of an empty stack. Innermost first."""
    return next((f for f in stack if not _is_library(f.file)), stack[-1] if stack else None)


def _is_library(file: str) -> bool:
    return "site-packages/" in file or "dist-packages/" in file or "/lib/python3" in file or file.startswith("<")
