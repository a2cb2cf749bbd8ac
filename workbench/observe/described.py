"""What a call of torch.distributed says about itself, taken from its arguments in a microsecond or two."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from workbench.trace import stride_class

_INPUTS = ("tensor", "input_tensor", "input", "input_list", "input_tensor_list", "tensors")
_OUTPUTS = ("output", "output_tensor", "output_tensor_list", "tensor_list", "gather_list", "scatter_list")
_NOWHERE = 1 << 30

_dtypes: dict[Any, str] = {}
_reduce_ops: dict[Any, str] = {}


class Described:
    """Where the arguments of one function stand that are worth recording.

    root, peer: the parameter that names the root's or the peer's world rank; `group_<it>` names its place in the group.
    """

    def __init__(self, original: Any, *, root: str = "", peer: str = "") -> None:
        parameters = inspect.signature(original).parameters
        self._names = list(parameters)
        self.root, self.peer = root, peer
        self.group = self._place("group")
        self.is_async = self._place("async_op")
        self._who, self._group_who = self._place(root or peer), self._place(f"group_{root or peer}")
        self._inputs = [self._place(n) for n in _INPUTS if n in parameters][:1]
        self._outputs = [self._place(n) for n in _OUTPUTS if n in parameters]
        self._op = self._place("op")
        self._default_op = parameters["op"].default if "op" in parameters else None
        self._root_place_by_default = 0 if root and "group" in parameters else None

    def _place(self, name: str) -> tuple[int, str]:
        return (self._names.index(name) if name in self._names else _NOWHERE), name

    def fields(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], ranks: tuple[int, ...]) -> dict[str, Any]:
        """The fields of Lane.begin that the arguments speak of. Under "any_source": a recv that names nobody."""
        num = len(args)
        found: dict[str, Any] = {}
        for at, name in self._inputs:
            tensor = args[at] if num > at else kwargs.get(name)
            if type(tensor) in (list, tuple):
                tensor = tensor[0] if tensor else None
            describe_tensor(tensor, found)
        if self._outputs and found.get("stride_class") == "contiguous":
            for at, name in self._outputs:
                tensors: Any = args[at] if num > at else kwargs.get(name)
                for tensor in tensors if type(tensors) in (list, tuple) else (tensors,):
                    if getattr(tensor, "is_contiguous", _yes)() is False:
                        found["stride_class"] = stride_class(tuple(tensor.shape), tensor.stride())
        if self._op[0] is not _NOWHERE:
            at = self._op[0]
            found["reduce_op"] = reduce_op_name(args[at] if num > at else kwargs.get("op", self._default_op))
        if self.root or self.peer:
            at, name = self._who
            world_rank = args[at] if num > at else kwargs.get(name)
            at, name = self._group_who
            group_rank = args[at] if num > at else kwargs.get(name)
            if self.root:
                if world_rank is None and group_rank is None:
                    group_rank = self._root_place_by_default
                found["root_world_rank"], found["root_group_rank"] = world_rank, group_rank
            else:
                if world_rank is None and isinstance(group_rank, int) and 0 <= group_rank < len(ranks):
                    world_rank = ranks[group_rank]
                found["peer_world_rank"] = world_rank
        return found


def dtype_name(dtype: Any) -> str:
    """float32 for torch.float32."""
    name = _dtypes.get(dtype)
    if name is None:
        name = _dtypes[dtype] = str(dtype).removeprefix("torch.")
    return name


def reduce_op_name(op: Any) -> str:
    """sum for ReduceOp.SUM."""
    try:
        name = _reduce_ops.get(op)
    except TypeError:
        return _word(op)
    if name is None:
        name = _reduce_ops[op] = _word(op)
    return name


def _word(op: Any) -> str:
    return str(getattr(op, "name", op)).rpartition(".")[2].strip("<>: 0123456789").lower() or "?"


def _yes() -> bool:
    return True


def describe_tensor(tensor: Any, found: dict[str, Any]) -> None:
    """Shape, dtype and strides of what is a tensor; nothing of what torch itself will refuse."""
    try:
        found["shape"] = shape = tuple(tensor.shape)
        found["dtype"] = dtype_name(tensor.dtype)
        found["stride_class"] = "contiguous" if tensor.is_contiguous() else stride_class(shape, tensor.stride())
    except (AttributeError, RuntimeError, TypeError):
        pass
