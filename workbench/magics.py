"""IPython magics: `%%ranks` runs a cell on the ranks of the current cluster. `%load_ext workbench.magics`; a Cluster
loads them by itself."""

from __future__ import annotations

import shlex

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class, no_var_expand

from workbench.errors import WorkbenchError
from workbench.launch import current_cluster

_USAGE = "%%ranks [0,2 | 1-3 | tp | tp:0] [--deadline SECONDS]"


@magics_class
class RankMagics(Magics):
    """The magics of a notebook with ranks."""

    @no_var_expand
    @cell_magic
    def ranks(self, line: str, cell: str) -> None:
        """Run the cell on ranks and show what they print, equal lines once.

        %%ranks                    all ranks
        %%ranks 0,2                world ranks 0 and 2; 1-3 for a run of them
        %%ranks tp:0               the first tp group of the cluster's group map; tp alone: every rank in a tp group
        %%ranks --deadline 20      past 20 s say where each rank stands; the ranks go on
        """
        wanted, deadline_s = parse_line(line)
        try:
            current_cluster().run(cell, ranks=wanted, deadline_s=deadline_s)
        except (WorkbenchError, KeyboardInterrupt) as e:
            if not hasattr(e, "_render_traceback_"):  # the driver's own frames would say nothing to the reader
                told = [f"{type(e).__name__}: {e}"]
                e._render_traceback_ = lambda: told  # type: ignore[union-attr]  # IPython's hook
            raise

    @line_magic
    def where(self, line: str) -> None:
        """Where each rank of the current cluster stands: its stack, its last call, who is missing."""
        if line.strip():
            raise UsageError("%where takes no argument")
        print(current_cluster().where())


def parse_line(line: str) -> tuple[str | None, float | None]:
    """The ranks and the deadline that stand behind %%ranks. Raises UsageError, which IPython shows as one line."""
    try:
        words = shlex.split(line)
    except ValueError as e:  # a quotation without its end
        raise UsageError(f"{line!r} is not understood ({e}); usage: {_USAGE}") from None
    deadline_s = None
    rest: list[str] = []
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if name != "--deadline":
            rest.append(word)
            continue
        try:
            deadline_s = float(value if equals else words.pop(0))
        except (ValueError, IndexError):
            raise UsageError(f"--deadline takes a number of seconds; usage: {_USAGE}") from None
    if any(word.startswith("-") for word in rest):
        raise UsageError(f"{' '.join(rest)!r} is not understood; usage: {_USAGE}")
    return " ".join(rest) or None, deadline_s  # "0, 2" is one word more than "0,2", and "0 2" is not rank 02


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Called by %load_ext."""
    shell.register_magics(RankMagics)
