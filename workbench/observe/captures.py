"""Captures of CUDA graphs: when they begin and end, and which calls lie inside."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from workbench.observe.process import this_process
from workbench.trace import Token

_tokens: list[Token | None] = []


def install(module: ModuleType) -> None:
    """Called once torch.cuda.graphs has been executed."""
    graph = module.CUDAGraph
    begin, end = graph.capture_begin, graph.capture_end

    @functools.wraps(begin)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        token = this_process.recorder.begin("capture")
        try:
            result = begin(self, *args, **kwargs)
        except BaseException as e:
            this_process.recorder.end(token, error=f"{type(e).__name__}: {e}")
            raise
        _tokens.append(token)
        this_process.capturing += 1
        return result

    @functools.wraps(end)
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        error = ""
        try:
            return end(self, *args, **kwargs)
        except BaseException as e:
            error = f"{type(e).__name__}: {e}"
            raise
        finally:
            this_process.capturing = max(this_process.capturing - 1, 0)
            this_process.recorder.end(_tokens.pop() if _tokens else None, error=error)

    graph.capture_begin, graph.capture_end = capture_begin, capture_end
