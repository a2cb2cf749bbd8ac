"""What a child of multiprocessing raises: its parent's code catches it, prints it, and has the child exit with 1.

In place before torch is imported: by then a child may be inside the function it was started for.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def install(module: ModuleType) -> None:
    """Called once multiprocessing.process has been executed."""
    process_class: Any = module.BaseProcess
    bootstrap = process_class._bootstrap  # where a child lives and dies

    @functools.wraps(bootstrap)
    def recorded_bootstrap(process: Any, *args: Any, **kwargs: Any) -> Any:
        process.run = telling(process.run)
        return bootstrap(process, *args, **kwargs)

    process_class._bootstrap = recorded_bootstrap


def telling(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, whose exception is recorded if this process is one that is recorded by then."""

    @functools.wraps(fn)
    def told(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except BaseException as e:
            if "torch.distributed" in sys.modules:
                from workbench.observe.endings import tell_exception

                tell_exception(e)
            raise

    return told
