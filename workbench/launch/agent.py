"""torchrun, which also writes down which rank failed first: `python -m workbench.launch.agent FAILURE.json ARGS...`.

torchrun prints that to the terminal only. A killed rank leaves no error file, so its name is known here alone.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from workbench.launch import loopback
from workbench.launch.orphans import end_with_starter


def main() -> int:
    """Run torchrun with the arguments after the file's name; 1 if a rank failed."""
    end_with_starter()
    log_plainly()
    loopback.register()
    path, arguments = Path(sys.argv[1]), sys.argv[2:]
    try:
        torchrun(arguments)
    except ChildFailedError as e:
        path.write_text(json.dumps(first_failure(e)))
        return 1
    return 0


def log_plainly() -> None:
    """Take torch's formatter off its log handlers: to print a traceback it loads the compiler, a second or more.

    That second is spent when a rank has just died and somebody waits to be told.
    """
    for name in ("torch", *logging.root.manager.loggerDict):
        if name.split(".")[0] == "torch":
            for handler in logging.getLogger(name).handlers:
                handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))


def first_failure(error: ChildFailedError) -> dict[str, object]:
    """The fields of a RankFailure: the rank that failed first, in its own words where it had a chance to speak."""
    world_rank, failure = error.get_first_failure()
    message, trace = _told_by_rank(Path(failure.error_file))
    if failure.exitcode < 0:
        message = f"killed by {signal.Signals(-failure.exitcode).name}"
    message = message or f"exited with status {failure.exitcode} and left no traceback"
    return {"world_rank": world_rank, "message": message, "traceback": trace}


def _told_by_rank(error_file: Path) -> tuple[str, str]:
    """Message and traceback that @record wrote in the rank; empty where it had no chance to."""
    try:
        told = json.loads(error_file.read_text())["message"]
        return str(told["message"]), str(told["extraInfo"]["py_callstack"])
    except (OSError, ValueError, KeyError, TypeError):
        return "", ""


if __name__ == "__main__":
    sys.exit(main())
