"""Collectives that C++ issues: the buckets of DistributedDataParallel, functional collectives, compiled code.

All of them, and Python's too, pass the operators `c10d::*` of torch's dispatcher. A kernel for the key BackendSelect,
which is in every thread's key set and is used by none of these operators, sees each call and hands it on unchanged. It
costs some ten microseconds a call, so it is put in place by the first program part that needs it, never for Python's
own calls alone; those are recorded where they are made and pass the kernel in silence.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from workbench.observe.described import dtype_name, reduce_op_name
from workbench.observe.endings import tell_exception
from workbench.observe.groups import known_group
from workbench.observe.process import this_process
from workbench.observe.works import start_work
from workbench.trace import stride_class

OPERATORS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce_coalesced",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather_into_tensor",
    "allgather_coalesced_": "all_gather_coalesced",
    "allgather_into_tensor_coalesced_": "all_gather_into_tensor_coalesced",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_tensor_coalesced",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all_single",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "barrier": "barrier",
    "send": "send",
    "recv_": "recv",
}
METHODS = (
    *("allreduce", "allreduce_coalesced", "allgather", "_allgather_base", "allgather_coalesced"),
    *("allgather_into_tensor_coalesced", "all_gather_single", "reduce_scatter", "_reduce_scatter_base"),
    *("reduce_scatter_tensor_coalesced", "reduce_scatter_single", "alltoall", "alltoall_base", "all_to_all_single"),
    *("broadcast", "reduce", "gather", "scatter", "barrier", "send", "recv"),
)
_INPUTS = ("input_tensors", "input_list", "inputs", "input_tensor", "input", "tensors", "tensor")

_library: Any = None
_lock = threading.Lock()


def install(_: ModuleType) -> None:
    """Called once torch.distributed._functional_collectives has been executed."""
    put_in_place()


def cover_process_group(process_group: Any) -> None:
    """Put the kernels in place when a program calls a ProcessGroup's own methods, or makes a gradient reducer."""
    from torch._C import _distributed_c10d as c10d

    for name in METHODS:
        if hasattr(process_group, name):
            setattr(process_group, name, _covered(getattr(process_group, name)))
    make = c10d.Reducer.__init__

    @functools.wraps(make)
    def recorded_make(reducer: Any, *args: Any, **kwargs: Any) -> None:
        put_in_place()
        make(reducer, *args, **kwargs)

    c10d.Reducer.__init__ = recorded_make  # type: ignore[method-assign,assignment]  # the point of this function


def put_in_place() -> None:
    """Register the kernels. Local; again is fine."""
    global _library
    import torch

    with _lock:
        if _library is not None:
            return
        _library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]  # torch's
        for operator, op in OPERATORS.items():
            if hasattr(torch.ops.c10d, operator):
                _library.impl(operator, _kernel(operator, op), "BackendSelect", with_keyset=True)


def _covered(original: Callable[..., Any]) -> Callable[..., Any]:
    here = this_process.here

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not here.outer and _library is None:
            put_in_place()
        return original(*args, **kwargs)

    return call


def _kernel(operator: str, op: str) -> Callable[..., Any]:
    import torch

    overload = getattr(torch.ops.c10d, operator).default
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    names = [a.name for a in overload._schema.arguments]
    group_at = names.index("process_group")
    input_at = next(names.index(n) for n in _INPUTS if n in names)
    reduce_op_at = names.index("reduce_op") if "reduce_op" in names else -1
    root_at = names.index("root_rank") if "root_rank" in names else -1
    peer_at = next((names.index(n) for n in ("src", "dst") if n in names), -1)
    here = this_process.here

    def kernel(keyset: Any, *args: Any) -> Any:
        if here.outer or not this_process.recorder.enabled:
            return overload.redispatch(keyset & below, *args)
        tensor = args[input_at]
        while isinstance(tensor, list | tuple):
            tensor = tensor[0] if tensor else None
        known = known_group(torch.distributed.ProcessGroup.unbox(args[group_at]))
        if known is None or tensor is None or tensor.device.type == "meta":
            return overload.redispatch(keyset & below, *args)
        peer = args[peer_at] if peer_at >= 0 else -1
        token = known.lane.begin(
            op,
            shape=None if op == "barrier" else tuple(tensor.shape),
            dtype=None if op == "barrier" else dtype_name(tensor.dtype),
            stride_class=None if op == "barrier" else stride_class(tuple(tensor.shape), tensor.stride()),
            reduce_op=_reduce_op(args[reduce_op_at]) if reduce_op_at >= 0 else None,
            root_group_rank=args[root_at] if root_at >= 0 else None,
            peer_world_rank=known.ranks[peer] if 0 <= peer < len(known.ranks) else None,
            path=known.backend,
            capture=this_process.capturing > 0,
            remark="async; below Python",
        )
        here.outer, here.opaque = op, True
        try:
            result = overload.redispatch(keyset & below, *args)
        except BaseException as e:
            known.lane.end(token, error=f"{type(e).__name__}: {e}")
            tell_exception(e, known.lane)
            raise
        finally:
            here.outer, here.opaque = "", False
        work = result[-1] if isinstance(result, tuple) else result
        start_work(torch.distributed.Work.unbox(work), known.lane, token, op, polled=peer_at < 0)
        return result

    return kernel


def _reduce_op(boxed: Any) -> str:
    from torch.distributed import ReduceOp

    op = ReduceOp.unbox(boxed)  # type: ignore[attr-defined]  # not in torch's stubs
    return next((reduce_op_name(kind) for kind in ReduceOp.RedOpType.__members__.values() if op == kind), "?")
