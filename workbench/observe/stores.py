"""Waits for keys of a store, which no other tool shows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from workbench.observe.process import this_process


def record_store_waits(store_class: Any) -> None:
    """Put the recording into Store.wait, get and multi_get."""
    for name in ("wait", "get", "multi_get"):
        setattr(store_class, name, _recorded(getattr(store_class, name)))


def _recorded(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(store: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = this_process.recorder
        keys = args[0] if args else kwargs.get("key", kwargs.get("keys", ()))
        names = keys if isinstance(keys, str) else ", ".join(map(str, keys))
        if not recorder.enabled:
            this_process.early("store_wait", note=names)
        inside = this_process.here.inside
        token = recorder.begin("store_wait", note=names, remark=f"inside {inside}" if inside else "")
        error = ""
        try:
            return original(store, *args, **kwargs)
        except BaseException as e:
            error = f"{type(e).__name__}: {e}"
            raise
        finally:
            if token is None:
                this_process.early("store_wait", error=error, is_end=True)
            recorder.end(token, error=error)

    return call
