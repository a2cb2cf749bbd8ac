"""Puts the recording in place as soon as a program imports what is to be recorded, and not a moment earlier."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

# module -> the file of this room whose `install(module)` runs right after the module's own code
HOOKS = {
    "subprocess": "children",
    "multiprocessing.popen_fork": "children",
    "multiprocessing.process": "workers",
    "torch.distributed.distributed_c10d": "process_groups",
    "torch.distributed._functional_collectives": "below_python",
    "torch.distributed._symmetric_memory": "memory",
    "torch.cuda.graphs": "captures",
    "torch.multiprocessing.spawn": "endings",
    "flashinfer.comm.allreduce": "memory",
    "flashinfer.comm.trtllm_ar": "memory",
}


def watch_imports() -> None:
    """Watch this process's imports, and the processes it starts. Local; again is fine."""
    from workbench.observe.children import pass_on

    if any(isinstance(f, _Finder) for f in sys.meta_path):
        return
    pass_on(os.environ["WORKBENCH_OBSERVE"])
    for name in HOOKS:
        if name in sys.modules:
            _run_hook(sys.modules[name])
    sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds nothing itself: asks the finders behind it, and has the hook run after the module it names."""

    def __init__(self) -> None:
        self._asking: set[str] = set()

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,  # noqa: ARG002  # the import system passes both
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if name not in HOOKS or name in self._asking:
            return None
        self._asking.add(name)
        try:
            spec = find_spec(name)
        finally:
            self._asking.discard(name)
        loader = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _run_hook(module)

            loader.exec_module = exec_module  # type: ignore[method-assign]  # of this one loader, for this one module
        return spec


def _run_hook(module: ModuleType) -> None:
    try:
        import_module(f"workbench.observe.{HOOKS[module.__name__]}").install(module)
    except Exception as e:  # whatever it is, the program must run on as it would without us
        sys.stderr.write(f"workbench: {module.__name__} is not recorded: {type(e).__name__}: {e}\n")
