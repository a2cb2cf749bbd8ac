"""How ranks and drivers write their messages: JSON that can be read whatever text is in it."""

from __future__ import annotations

from json import dumps  # the function: a cell may put another one into the module
from typing import Any

from jupyter_client.jsonutil import json_clean, json_default


def pack(message: Any) -> bytes:
    """`message` as JSON in UTF-8, with "?" for half a surrogate pair, as in names of files that are no UTF-8.

    Jupyter's own packer raises for some of them and writes others so that nobody can read them. Either way the answer
    of a rank is lost, and the rank is waited for without end.
    """
    try:
        text = dumps(message, default=json_default, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):  # keys that are no strings, numbers that JSON lacks
        text = dumps(json_clean(message), default=json_default, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "replace")
