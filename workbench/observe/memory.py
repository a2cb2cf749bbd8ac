"""Memory that ranks share: symmetric-memory rendezvous, and FlashInfer's workspaces."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from workbench.observe.groups import known_group
from workbench.observe.process import this_process

WORKSPACES = (
    "create_allreduce_fusion_workspace",
    "trtllm_create_ipc_workspace_for_all_reduce",
    "trtllm_create_ipc_workspace_for_all_reduce_fusion",
)


def install(module: Any) -> None:
    """Called once the module has been executed."""
    if module.__name__ == "torch.distributed._symmetric_memory":
        module.rendezvous = _recorded(module.rendezvous, "symm_mem_rendezvous")
        return
    for name in WORKSPACES:
        if hasattr(module, name):
            setattr(module, name, _recorded(getattr(module, name), "workspace"))


def _recorded(original: Callable[..., Any], op: str) -> Callable[..., Any]:
    """A span around `original`, on the group it names, with its plain arguments (sizes, ranks) in the note."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        group = next((g for g in map(_group, (*args, *kwargs.values())) if g is not None), None)
        key = ", ".join(
            [str(a) for a in args if isinstance(a, int)] + [f"{k}={v}" for k, v in kwargs.items() if _plain(v)]
        )
        door = this_process.recorder if group is None else group.lane
        inside = this_process.here.inside
        remark = f"inside {inside}" if inside else ""
        token = door.begin(op, note=f"{original.__name__}({key})" if op == "workspace" else key, remark=remark)
        try:
            result = original(*args, **kwargs)
        except BaseException as e:
            door.end(token, error=f"{type(e).__name__}: {e}")
            raise
        door.end(token)
        return result

    return call


def _plain(value: Any) -> bool:
    return isinstance(value, int | float | str)


def _group(value: Any) -> Any:
    """The group that an argument is, or that it names."""
    import torch.distributed as dist

    if isinstance(value, str):
        try:
            value = dist.distributed_c10d._resolve_process_group(value)  # type: ignore[arg-type]  # a text to us
        except (RuntimeError, ValueError, LookupError, TypeError):
            return None
    return known_group(value) if isinstance(value, dist.ProcessGroup) else None
