"""Waits for keys of a store, which no other tool shows; and which store a process group is made on."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any
from urllib.parse import urlparse

from workbench.observe.asking import asked
from workbench.observe.process import this_process
from workbench.observe.works import start_polling
from workbench.trace import ASKING

_ASKS_AGAIN_S = 2.0  # a program that does not by then does something else


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
        inside = this_process.here.inside
        remark = f"inside {inside}" if inside else ""
        question = id(store), names
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and question in asked:
            return _ask_again(original, question, (store, *args), kwargs, remark)
        if not recorder.enabled:
            this_process.early("store_wait", note=names)
        token = recorder.begin("store_wait", note=names, remark=remark)
        error = ""
        try:
            return original(store, *args, **kwargs)
        except BaseException as e:
            error = f"{type(e).__name__}: {e}"
            if is_main and _ran_out(e):  # others look, beside the program, whether they are to stop
                asked.note(question, _ASKS_AGAIN_S)
                start_polling()
            raise
        finally:
            if token is None:
                this_process.early("store_wait", error=error, is_end=True)
            recorder.end(token, error=error)

    return call


def _ask_again(
    original: Callable[..., Any], question: tuple[int, str], args: Any, kwargs: Mapping[str, Any], remark: str
) -> Any:
    """A wait whose time ran out a moment ago goes on: what it records then is one wait, however often it asks."""
    asked.count(question, "store_wait", note=question[1], remark="; ".join(filter(None, (remark, ASKING))))
    asked.enter(question)
    try:
        result = original(*args, **kwargs)
    except BaseException as e:
        if _ran_out(e):
            asked.note(question, _ASKS_AGAIN_S)
        else:
            asked.end(question, error=f"{type(e).__name__}: {e}")
        raise
    asked.end(question)
    return result


def _ran_out(error: BaseException) -> bool:
    """Whether it says that the time given to a wait is over. torch has several words for it."""
    return isinstance(error, RuntimeError) and any(w in str(error).lower() for w in ("timeout", "timed out"))


# by PrefixStore: its prefix and what it stands on, which lives as long and so stays the same Python object
_prefixes: weakref.WeakKeyDictionary[Any, tuple[str, Any]] = weakref.WeakKeyDictionary()
_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_next_number = count(1)


def remember_prefixes(prefix_store: Any) -> None:
    """Keep the prefix that each PrefixStore is made with: torch does not tell it."""
    make = prefix_store.__init__

    @functools.wraps(make)
    def recorded_make(store: Any, prefix: str, underlying: Any) -> None:
        make(store, prefix, underlying)
        _prefixes[store] = (str(prefix).strip("/"), underlying)

    prefix_store.__init__ = recorded_make


def store_note(given: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    """Names the store, prefix included, on which init_process_group keeps its keys; "" if that is a new one each time.

    given: the arguments of the call. A launcher's own store is used by every call of the process.
    """
    store, method = given.get("store"), str(given.get("init_method") or "env://")
    if store is None:
        if method.startswith("file://"):
            return f"store {method}"
        of_launcher = method.startswith("env://") and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return f"store of the launcher, attempt {environ.get('TORCHELASTIC_RESTART_COUNT', '0')}" if of_launcher else ""
    prefixes, store = _underlying(store)
    if store not in _numbers:
        _numbers[store] = next(_next_number)
    return f"store {_numbers[store]}" + (f" under {prefixes}" if prefixes else "")


def meeting_place(given: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    """Where the ranks of this call of init_process_group meet: a port, a file, a prefix of a store; equal on all."""
    store, method = given.get("store"), str(given.get("init_method") or "env://")
    if store is not None:
        prefixes, store = _underlying(store)
        place = getattr(store, "port", None) or getattr(store, "path", None) or type(store).__name__
        return f"{prefixes} on {place}" if prefixes else str(place)
    if method.startswith("file://"):
        return method
    try:
        return str(urlparse(method).port or environ.get("MASTER_PORT", ""))
    except ValueError:  # no port of this world, as torch will say
        return method


def _underlying(store: Any) -> tuple[str, Any]:
    """The prefixes under which a store keeps its keys, and the store below them."""
    prefixes = []
    while store in _prefixes:
        prefix, store = _prefixes[store]
        prefixes.append(prefix)
    return "/".join(reversed(prefixes)), store
