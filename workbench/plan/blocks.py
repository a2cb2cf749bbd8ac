"""How many blocks a kernel is launched with, as tables write it: a number, or arithmetic over `sms` and `ws`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import cache

from workbench.errors import ArgumentError

MAX_BLOCKS = 4096
_MAX_LENGTH = 64
_OPERATIONS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def count_blocks(expression: str, *, sms: int, ws: int) -> int:
    """The value of `expression` on a device of `sms` multiprocessors in a group of `ws` ranks.

    Written with whole numbers, `sms`, `ws`, + - * // and parentheses, at most 64 characters; nothing is evaluated as
    Python.   Raises: ArgumentError for anything else, and for a result outside 1..4096.
    """
    value = _value(_parse(expression), {"sms": sms, "ws": ws}, expression)
    if not 1 <= value <= MAX_BLOCKS:
        raise ArgumentError(f"block count {expression!r} is {value} for sms={sms}, ws={ws}; allowed: 1 to {MAX_BLOCKS}")
    return value


@cache
def _parse(expression: str) -> ast.expr:
    if len(expression) > _MAX_LENGTH:
        raise _refusal(expression[:_MAX_LENGTH] + "...")
    try:
        return ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _refusal(expression) from None


def _value(node: ast.expr, names: Mapping[str, int], expression: str) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value <= MAX_BLOCKS**2:
        return node.value
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        left, right = _value(node.left, names, expression), _value(node.right, names, expression)
        if isinstance(node.op, ast.FloorDiv) and right == 0:
            raise ArgumentError(f"block count {expression!r} divides by zero for {names}")
        return _OPERATIONS[type(node.op)](left, right)
    raise _refusal(expression)


def _refusal(expression: str) -> ArgumentError:
    return ArgumentError(f"block count {expression!r}; allowed: whole numbers, sms, ws, + - * // and parentheses")
