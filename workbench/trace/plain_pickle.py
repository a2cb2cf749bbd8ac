"""Reads pickles of lists, dicts, tuples, texts and numbers without running Python's unpickler.

The few instructions that build such values are carried out here, so nothing can be imported or called, a dict's keys
are texts or numbers (hashing a deep tuple can exhaust the stack), and memory follows the size of the data.
"""

from __future__ import annotations

import pickletools
from typing import Any


def load_plain_pickle(data: bytes) -> Any:
    """The value, with lists for tuples. Raises ValueError for a pickle that holds anything but plain data."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    try:
        for code, argument, _ in pickletools.genops(data):
            name = code.name
            if name in _VALUES:
                stack.append(_CONSTANTS.get(name, argument))
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[int(argument or 0)])
            elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
                memo[len(memo) if name == "MEMOIZE" else int(argument or 0)] = stack[-1]
            elif name == "MARK":
                marks.append(len(stack))
            elif name in _EMPTY:
                stack.append(_EMPTY[name]())
            elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
                stack.append(_take(stack, len(stack) - int(name[-1])))
            elif name == "TUPLE":
                stack.append(_take(stack, marks.pop()))
            elif name in ("APPEND", "APPENDS"):
                values = _take(stack, marks.pop() if name == "APPENDS" else len(stack) - 1)
                _of(list, stack[-1]).extend(values)
            elif name in ("SETITEM", "SETITEMS"):
                values = _take(stack, marks.pop() if name == "SETITEMS" else len(stack) - 2)
                _of(dict, stack[-1]).update(zip(map(_key, values[::2]), values[1::2], strict=True))
            elif name == "STOP":
                return stack.pop()
            elif name not in ("PROTO", "FRAME"):
                raise ValueError(f"it holds {name}, which is more than plain data")
    except (IndexError, KeyError) as e:
        raise ValueError(f"it is damaged: {type(e).__name__}: {e}") from None
    raise ValueError("it has no end")


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = {
    *_CONSTANTS,
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
}
_EMPTY = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": list}


def _take(stack: list[Any], start: int) -> list[Any]:
    """Cut the values from `start` on off the stack."""
    if not 0 <= start <= len(stack):
        raise IndexError("stack")
    values = stack[start:]
    del stack[start:]
    return values


def _of(kind: type[Any], value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"it is damaged: {type(value).__name__} where a {kind.__name__} is filled")
    return value


def _key(value: Any) -> Any:
    if not isinstance(value, str | int):
        raise ValueError(f"it has a {type(value).__name__} for a key")
    return value
