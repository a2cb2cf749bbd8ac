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

from workbench.observe.described import describe_tensor, parts_words, reduce_op_name
from workbench.observe.endings import tell_exception
from workbench.observe.groups import known_group
from workbench.observe.process import OPAQUE, this_process
from workbench.observe.works import start_work
from workbench.trace import BELOW_PYTHON, ON_GPU, Lane, Token

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

_FUNCTIONAL = ("_c10d_functional", "_c10d_functional_autograd")

_libraries: list[Any] = []
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
    import torch

    with _lock:
        if _libraries:
            return
        library = _open("c10d")
        for operator, op in OPERATORS.items():
            if hasattr(torch.ops.c10d, operator):
                overload = getattr(torch.ops.c10d, operator).default
                library.impl(operator, _kernel(overload, op), "BackendSelect", with_keyset=True)
        for space in _FUNCTIONAL:
            library = _open(space)
            for schema in torch._C._jit_get_all_schemas():
                name = schema.name.partition("::")[2]
                places = [i for i, a in enumerate(schema.arguments) if a.name == "reduce_op"]
                if schema.name.startswith(f"{space}::") and not schema.overload_name and places:
                    overload = getattr(getattr(torch.ops, space), name).default
                    library.impl(name, _noting_kernel(overload, places[0]), "BackendSelect", with_keyset=True)


def _open(space: str) -> Any:
    import torch

    library = torch.library.Library(space, "IMPL")  # type: ignore[no-untyped-call]  # torch's
    _libraries.append(library)
    return library


def _covered(original: Callable[..., Any]) -> Callable[..., Any]:
    here = this_process.here

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if here.inside:
            return original(*args, **kwargs)
        put_in_place()
        told = next((a.reduceOp for a in (*args, *kwargs.values()) if hasattr(a, "reduceOp")), None)
        told = told or next((a for a in (*args, *kwargs.values()) if hasattr(a, "RedOpType")), None)
        here.reduce_op = reduce_op_name(told) if told is not None else None
        try:
            return original(*args, **kwargs)
        finally:
            here.reduce_op = None

    return call


def _noting_kernel(overload: Any, reduce_op_at: int) -> Callable[..., Any]:
    """Of a functional collective: its reduce op, which stands in a box that Python cannot open further down."""
    below = _keys_below()
    here = this_process.here

    def kernel(keyset: Any, *args: Any) -> Any:
        here.reduce_op = str(args[reduce_op_at])
        try:
            return overload.redispatch(keyset & below, *args)
        finally:
            here.reduce_op = None

    return kernel


def _kernel(overload: Any, op: str) -> Callable[..., Any]:
    import torch

    below = _keys_below()
    names = [a.name for a in overload._schema.arguments]
    group_at = names.index("process_group")
    input_at = next(names.index(n) for n in _INPUTS if n in names)
    root_at = names.index("root_rank") if "root_rank" in names else -1
    peer_at = next((names.index(n) for n in ("src", "dst") if n in names), -1)
    tag_at = names.index("tag") if "tag" in names else -1
    reduces = "reduce_op" in names
    here = this_process.here
    work_of = torch.distributed.Work.unbox

    def begin(args: tuple[Any, ...]) -> tuple[Lane, Token, bool] | None:
        tensor = args[input_at]
        many = isinstance(tensor, list | tuple) and len(tensor) > 1
        while isinstance(tensor, list | tuple):
            tensor = tensor[0] if tensor else None
        known = known_group(torch.distributed.ProcessGroup.unbox(args[group_at]))
        if known is None or tensor is None or tensor.device.type == "meta":
            return None
        fields: dict[str, Any] = {}
        if op != "barrier":
            describe_tensor(tensor, fields)
        if reduces:
            fields["reduce_op"] = here.reduce_op
        if root_at >= 0:
            fields["root_group_rank"] = args[root_at]
        if peer_at >= 0:
            fields["peer_world_rank"] = known.ranks[args[peer_at]]
        note = ""
        if op in ("all_to_all", "all_to_all_single"):
            taken, sent, _, *sizes = args
            taken_sizes, sent_sizes = sizes[:2] if op == "all_to_all_single" else (None, None)
            note = parts_words(sent, sent_sizes, taken, taken_sizes, len(known.ranks))
        capture = this_process.capturing > 0
        name = op if many else op.removesuffix("_coalesced")  # torch's own way to say one all_gather_into_tensor
        remark = f"async; {ON_GPU}; {BELOW_PYTHON}" if tensor.is_cuda else f"async; {BELOW_PYTHON}"
        if tag_at >= 0 and args[tag_at]:
            remark = f"{remark}; tag {args[tag_at]}"
        token = known.lane.begin(name, path=known.backend, capture=capture, remark=remark, note=note, **fields)
        return None if token is None else (known.lane, token, tensor.is_cuda)

    def kernel(keyset: Any, *args: Any) -> Any:
        if here.inside or not this_process.live:
            return overload.redispatch(keyset & below, *args)
        try:
            begun = begin(args)
        except Exception as e:  # recording must not fail the call
            this_process.fail(e)
            begun = None
        if begun is None:
            return overload.redispatch(keyset & below, *args)
        lane, token, on_gpu = begun
        here.inside = OPAQUE
        try:
            result = overload.redispatch(keyset & below, *args)
        except BaseException as e:
            lane.end(token, error=f"{type(e).__name__}: {e}")
            tell_exception(e, lane)
            raise
        finally:
            here.inside = ""
        if on_gpu and this_process.capturing:
            lane.end(token)  # what is to be waited for is the graph
        else:
            work = work_of(result[-1] if isinstance(result, tuple) else result)
            start_work(work, lane, token, op, polled=on_gpu or peer_at < 0, on_gpu=on_gpu)
        return result

    return kernel


def _keys_below() -> Any:
    import torch

    return torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
