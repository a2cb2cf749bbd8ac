"""What a call of torch.distributed says about itself, taken from its arguments in a microsecond or two."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Mapping, Sequence
from operator import index
from typing import Any

from workbench.trace import Parts, stride_class

_INPUTS = ("tensor", "input_tensor", "input", "input_list", "input_tensor_list", "tensors")
_OUTPUTS = ("output", "output_tensor", "output_tensor_list", "tensor_list", "gather_list", "scatter_list")
_NOWHERE = 1 << 30
_LISTS = (list, tuple)

_dtypes: dict[Any, str] = {}
_reduce_ops: dict[Any, str] = {}


_Place = tuple[int, str]  # where an argument stands among the positional ones, and its name
_Key = Callable[[tuple[Any, ...], Mapping[str, Any]], tuple[Any, ...]]


class Described:
    """Where the arguments of one function stand that are worth recording.

    root, peer: the parameter that names the root's or the peer's world rank; `group_<it>` names its place in the group.
    """

    def __init__(self, original: Any, *, root: str = "", peer: str = "") -> None:
        parameters = inspect.signature(original).parameters
        self._names = list(parameters)
        self.root, self.peer = root, peer
        self.group = self._place("group")[0]
        self.is_async = self._place("async_op")[0]
        self._who, self._group_who = self._place(root or peer), self._place(f"group_{root or peer}")
        self._tag = self._place("tag") if peer else (_NOWHERE, "")
        inputs = [n for n in _INPUTS if n in parameters][:1]
        self._tensors = [self._place(n) for n in (*inputs, *_OUTPUTS) if n in parameters]
        self._num_inputs = len(inputs)
        self._op = self._place("op")
        self._default_op = parameters["op"].default if "op" in parameters else None
        names = ("input", "input_split_sizes", "output", "output_split_sizes")
        if "output_split_sizes" not in parameters:
            names = ("input_tensor_list", "", "output_tensor_list", "")
        self._parts = [self._place(n) for n in names] if names[0] in parameters and names[2] in parameters else []
        plain = [p for p in (self._op, self._who, self._group_who, self._tag) if p[0] is not _NOWHERE]
        named = {id(op) for op in getattr(type(self._default_op), "__members__", {}).values()}
        is_plainest = len(self._tensors) == 1 and plain == [self._op]
        self.key = _key_of_one(self._tensors[0], self._op, named) if is_plainest else _key(self._tensors, plain, named)
        """What `fields` depends on in (args, kwargs), as quickly as it can be had."""

    def _place(self, name: str) -> _Place:
        return (self._names.index(name) if name in self._names else _NOWHERE), name

    def names_peer(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a send or recv says with whom."""
        return any(
            (args[at] if len(args) > at else kwargs.get(name)) is not None for at, name in (self._who, self._group_who)
        )

    def tag(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """The tag of a send or recv; 0 where it has none."""
        at, name = self._tag
        tag = _whole(args[at] if len(args) > at else kwargs.get(name, 0))
        return tag if type(tag) is int else 0

    def gpu(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The device of the call's first tensor if that is a GPU, else None."""
        for at, name in self._tensors:
            value: Any = args[at] if len(args) > at else kwargs.get(name)
            value = value[0] if type(value) in _LISTS and value else value
            if value is not None:
                return value.device if getattr(value, "is_cuda", False) else None
        return None

    def parts(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], ranks: tuple[int, ...]) -> str:
        """Of an all-to-all: what this rank sends to each of `ranks` and takes from each; "" of any other call."""
        if not self._parts:
            return ""
        sent, sent_sizes, taken, taken_sizes = (
            args[at] if len(args) > at else kwargs.get(name) for at, name in self._parts
        )
        return parts_words(sent, sent_sizes, taken, taken_sizes, len(ranks))

    def fields(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], ranks: tuple[int, ...]) -> dict[str, Any]:
        """The fields of Lane.begin that the arguments speak of. `ranks`: the group's members."""
        num = len(args)

        def given(place: tuple[int, str]) -> Any:
            return args[place[0]] if num > place[0] else kwargs.get(place[1])

        found: dict[str, Any] = {}
        for number, place in enumerate(self._tensors):
            value = given(place)
            tensors = list(value) if isinstance(value, list | tuple) else [value]
            if number < self._num_inputs:
                describe_tensor(tensors[0] if tensors else None, found)
            for tensor in tensors:  # a hole in any of them is worse than what the first looks like
                look: dict[str, Any] = {}
                describe_tensor(tensor, look)
                if look.get("stride_class", "contiguous") != "contiguous":
                    found["stride_class"] = look["stride_class"]
        if self._op[0] is not _NOWHERE:
            op = given(self._op)
            found["reduce_op"] = reduce_op_name(self._default_op if op is None else op)
        world_rank, group_rank = _whole(given(self._who)), _whole(given(self._group_who))
        if self.root:
            found["root_world_rank"] = world_rank
            found["root_group_rank"] = 0 if world_rank is None and group_rank is None else group_rank
        elif self.peer:
            if world_rank is None and isinstance(group_rank, int) and 0 <= group_rank < len(ranks):
                world_rank = ranks[group_rank]
            found["peer_world_rank"] = world_rank
        return found


def _key(tensors: Sequence[_Place], plain: Sequence[_Place], named: Container[int]) -> _Key:
    """The key of a function of these tensors, or lists of tensors, and these other arguments.

    named: ids of the reduce ops that have a name and are never freed. To hash one takes longer than all the rest.
    """

    def key(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        num = len(args)
        parts: list[Any] = []
        for at, name in tensors:
            value: Any = args[at] if num > at else kwargs.get(name)
            try:
                parts += value.shape, value.dtype, value.is_contiguous() or value.stride()
            except (AttributeError, RuntimeError, TypeError):
                parts.append(tuple(map(_look, value)) if type(value) in _LISTS else None)
        for at, name in plain:
            value = args[at] if num > at else kwargs.get(name)
            parts.append(id(value) if id(value) in named else value)
        return tuple(parts)

    return key


def _key_of_one(tensor: _Place, op: _Place, named: Container[int]) -> _Key:
    """The same for all_reduce: most calls that wait for nothing but their peers are this one."""
    (at, name), (op_at, op_name) = tensor, op

    def key(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        num = len(args)
        value: Any = args[at] if num > at else kwargs.get(name)
        op = args[op_at] if num > op_at else kwargs.get(op_name)
        if id(op) in named:
            op = id(op)
        try:
            return value.shape, value.dtype, value.is_contiguous() or value.stride(), op
        except (AttributeError, RuntimeError, TypeError):
            return tuple(map(_look, value)) if type(value) in _LISTS else None, op

    return key


def _look(tensor: Any) -> Any:
    try:
        return tensor.shape, tensor.dtype, tensor.is_contiguous() or tensor.stride()
    except (AttributeError, RuntimeError, TypeError):
        return None


def dtype_name(dtype: Any) -> str:
    """float32 for torch.float32."""
    name = _dtypes.get(dtype)
    if name is None:
        name = _dtypes[dtype] = str(dtype).removeprefix("torch.")
    return name


def reduce_op_name(op: Any) -> str:
    """sum for ReduceOp.SUM; "type str" for what is none: printed, it may be its address, another on each rank."""
    try:
        name = _reduce_ops.get(op)
    except TypeError:
        return _word(op)
    if name is None:
        name = _word(op)
        if not name.startswith("type "):  # kept for ever, as the program's own objects must not be
            _reduce_ops[op] = name
    return name


def _word(op: Any) -> str:
    from torch.distributed import ReduceOp

    if not isinstance(op, ReduceOp | ReduceOp.RedOpType):
        return f"type {type(op).__name__}"
    # a ReduceOp too prints as its address, but compares with the names there are
    return next((n.lower() for n, member in ReduceOp.RedOpType.__members__.items() if op == member), "?")


def parts_words(sent: Any, sent_sizes: Any, taken: Any, taken_sizes: Any, num_members: int) -> str:
    """The parts of an all-to-all; "" for what torch itself will refuse, and for too many to keep.

    sent, taken: a tensor each, split along its rows by the sizes (None or empty: evenly); or a list of tensors each.
    """
    try:
        return str(Parts(_part_sizes(sent, sent_sizes, num_members), _part_sizes(taken, taken_sizes, num_members)))
    except (AttributeError, RuntimeError, TypeError):
        return ""


def _part_sizes(value: Any, sizes: Any, num_members: int) -> tuple[int, ...]:
    """Elements, by member. Raises TypeError for a size that is only a symbol while torch compiles."""
    if isinstance(value, _LISTS):
        found = [tensor.numel() for tensor in value]
    else:
        row = value.shape[1:].numel()
        found = [_whole(n) * row for n in sizes] if sizes else [value.numel() // num_members] * num_members
    if any(type(n) is not int for n in found):
        raise TypeError(f"{found} are no numbers yet")
    return tuple(found)


def _whole(value: Any) -> Any:
    """What torch takes for a whole number, NumPy's or a tensor of one, as int; anything else as it is.

    A symbol stays one: to ask for its number would make the compiled code one for this number alone.
    """
    try:
        return value if value is None or type(value).__name__ == "SymInt" else index(value)
    except TypeError:
        return value


def describe_tensor(tensor: Any, found: dict[str, Any]) -> None:
    """Shape, dtype and strides of what is a tensor; nothing of what torch itself will refuse."""
    try:
        found["shape"] = shape = tuple(tensor.shape)
        found["dtype"] = dtype_name(tensor.dtype)
        found["stride_class"] = "contiguous" if tensor.is_contiguous() else stride_class(shape, tensor.stride())
    except (AttributeError, RuntimeError, TypeError):
        pass
