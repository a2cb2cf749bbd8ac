"""Documents: JSON from outside (a user's machine, a tuned table, a peer's facts) read field by field, trusting nothing.

Every complaint is one ArgumentError that names the file, the place in it, what stands there and what is allowed.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from workbench.errors import ArgumentError

MAX_DOCUMENT_BYTES = 1 << 20
_REQUIRED: Any = object()

E = TypeVar("E", bound=Enum)


class Document:
    """One JSON object. Each `take_` method gives one field, checked; `end` refuses the fields that nobody took."""

    __slots__ = ("_asked", "_fields", "where")

    def __init__(self, fields: object, where: str) -> None:
        if not isinstance(fields, Mapping):
            raise ArgumentError(f"{where}: {show_value(fields)} stands here; allowed: an object with named fields")
        self._fields: Mapping[str, Any] = fields
        self._asked: set[str] = set()
        self.where = where

    def take_text(self, name: str, *, at_most: int = 400, pattern: str = "", default: str = _REQUIRED) -> str:
        value = self._take(name, default)
        if not isinstance(value, str) or len(value) > at_most or not value.isprintable():
            self._refuse(name, value, f"one line of at most {at_most} printable characters")
        if pattern and value != default and not re.fullmatch(pattern, value):
            self._refuse(name, value, f"a text of the form {pattern}")
        return value

    def take_whole(self, name: str, low: int, high: int, *, default: int = _REQUIRED) -> int:
        value = self._take(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self._refuse(name, value, f"a whole number from {low} to {high}")
        return value

    def take_flag(self, name: str, *, default: bool = _REQUIRED) -> bool:
        value = self._take(name, default)
        if not isinstance(value, bool):
            self._refuse(name, value, "true or false")
        return value

    def take_choice(self, name: str, choices: type[E], *, default: E = _REQUIRED) -> E:
        value = self._take(name, default)
        if isinstance(value, choices):
            return value
        known = [c.value for c in choices]
        if not isinstance(value, str) or value not in known:
            self._refuse(name, value, f"one of {', '.join(known)}")
        return choices(value)

    def take_list(self, name: str, *, at_most: int = 10_000, default: list[Any] = _REQUIRED) -> list[Any]:
        value = self._take(name, default)
        if not isinstance(value, list | tuple) or len(value) > at_most:
            self._refuse(name, value, f"a list of at most {at_most} entries")
        return list(value)

    def take_texts(self, name: str, *, at_most: int = 400, default: list[str] = _REQUIRED) -> tuple[str, ...]:
        values = self.take_list(name, default=default)
        for i, value in enumerate(values):
            if not isinstance(value, str) or len(value) > at_most or not value.isprintable():
                self._refuse(f"{name}[{i}]", value, f"one line of at most {at_most} printable characters")
        return tuple(values)

    def take_child(self, name: str, *, default: Mapping[str, Any] = _REQUIRED) -> Document:
        return Document(self._take(name, default), f"{self.where}: {name}")

    def take_children(self, name: str, *, default: list[Any] = _REQUIRED) -> list[Document]:
        entries = self.take_list(name, default=default)
        return [Document(entry, f"{self.where}: {name}[{i}]") for i, entry in enumerate(entries)]

    def take_value(self, name: str) -> Any:
        """A field as it stands, for a caller that checks it itself."""
        return self._take(name, _REQUIRED)

    def names(self) -> tuple[str, ...]:
        """The names of all fields, for objects whose names are data."""
        return tuple(self._fields)

    def require(self, *names: str, advice: str = "") -> None:
        """Raise if fields are missing, with all that are, and with `advice`."""
        missing = [repr(name) for name in names if name not in self._fields]
        if missing:
            fields = f"field {missing[0]} is" if len(missing) == 1 else f"fields {', '.join(missing)} are"
            raise ArgumentError(f"{self.where}: {fields} missing{f'; {advice}' if advice else ''}")

    def has(self, name: str) -> bool:
        return name in self._fields

    def end(self) -> None:
        """Raise if a field is left that no method took."""
        for name in sorted(set(self._fields) - self._asked):
            close = get_close_matches(name[:64], sorted(self._asked), n=1)
            hint = f"; nearest name: {close[0]!r}" if close else ""
            raise ArgumentError(f"{self.where}: unknown field {show_value(name)}{hint}")

    def refuse(self, problem: str) -> NoReturn:
        """Raise with a problem that spans fields."""
        raise ArgumentError(f"{self.where}: {problem}")

    def _take(self, name: str, default: Any) -> Any:
        self._asked.add(name)
        if name in self._fields:
            return self._fields[name]
        if default is _REQUIRED:
            raise ArgumentError(f"{self.where}: field {name!r} is missing")
        return default

    def _refuse(self, name: str, value: object, allowed: str) -> NoReturn:
        raise ArgumentError(f"{self.where}: {name} is {show_value(value)}; allowed: {allowed}")


def parse_document(text: str, where: str) -> Document:
    """The object that `text` holds. Raises ArgumentError for anything but one JSON object without doubled names."""
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise ArgumentError(f"{where}: too deeply nested") from None
    except ValueError as e:
        raise ArgumentError(f"{where}: not a JSON document: {str(e)[:120]}") from None
    return Document(value, where)


def read_document(path: str | Path, *, at_most: int = MAX_DOCUMENT_BYTES) -> Document:
    """The object in a file. Raises ArgumentError for what is no readable regular file of `at_most` bytes."""
    where = show_value(str(path))
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe must not hold us up
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ArgumentError(f"{where}: not a regular file")
            data = file.read(at_most + 1)
        if len(data) > at_most:
            raise ArgumentError(f"{where}: larger than {at_most} bytes")
        return parse_document(data.decode(), where)
    except OSError as e:
        raise ArgumentError(f"{where}: cannot be read: {e.strerror}") from None
    except UnicodeDecodeError:
        raise ArgumentError(f"{where}: not text in UTF-8") from None
    except ValueError as e:  # a path with a NUL byte, and the refusals above
        raise e if isinstance(e, ArgumentError) else ArgumentError(f"{where}: not a file name") from None


def show_value(value: object) -> str:
    """A short, printable text for any value, hostile ones included."""
    if isinstance(value, str):
        return ascii(value) if len(value) <= 60 else f"{value[:60]!a}..."
    if value is None or isinstance(value, bool | float):
        return json.dumps(value)
    if isinstance(value, int):
        return str(value) if value.bit_length() <= 128 else f"an integer of {value.bit_length()} bits"
    return "an object" if isinstance(value, dict) else "a list" if isinstance(value, list) else type(value).__name__


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"field {show_value(twice)} stands twice in one object")
    return fields


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
