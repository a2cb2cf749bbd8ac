"""The kernel of a rank: it answers, whatever a cell has done to the process that both live in.

A cell can take away what an answer needs, and its rank would then be waited for without end. So here
  sys.stdout, sys.stderr   cannot be closed, and are put back behind a cell that has left None or a closed file there
  builtins                 are put back if an answer fails, and the failure is the answer
  a forked child           that comes out of a cell ends: it would be a second kernel on its parent's sockets
"""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Mapping
from typing import Any

from ipyparallel.engine import app

from workbench.launch.async_cells import AwaitingKernel

_STREAMS = ("stdout", "stderr")


def use_rank_kernel() -> None:
    """Have the engine of this process be a RankKernel. Local; before the engine starts."""
    app.Kernel = RankKernel


class RankKernel(AwaitingKernel):
    """ipyparallel's kernel, made to last."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._pid = os.getpid()
        self._builtins = dict(vars(builtins))
        self._streams: dict[str, Any] = {}

    async def execute_request(self, stream: Any, ident: Any, parent: Mapping[str, Any]) -> None:
        self._keep_streams()
        try:
            await super().execute_request(stream, ident, parent)
        except Exception as e:
            self._answer_with(e, "execute", stream, ident, parent)

    def apply_request(self, stream: Any, ident: Any, parent: Mapping[str, Any]) -> None:
        self._keep_streams()
        try:
            super().apply_request(stream, ident, parent)
        except Exception as e:
            self._answer_with(e, "apply", stream, ident, parent)

    async def do_execute(self, *args: Any, **kwargs: Any) -> Any:
        try:
            reply = await super().do_execute(*args, **kwargs)
        finally:
            self._put_back()
        if reply.get("ename") == "NoneType":  # ipykernel's name for an error while a value was shown
            last = "\n".join(reply["traceback"]).rstrip().rpartition("\n")[2]
            reply["ename"], _, reply["evalue"] = last.partition(": ")
        return reply

    def do_apply(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().do_apply(*args, **kwargs)
        finally:
            self._put_back()

    def _keep_streams(self) -> None:
        """From the first request on: before it, the engine has not made them."""
        if not self._streams:
            self._streams = {name: getattr(sys, name) for name in _STREAMS}
            for stream in self._streams.values():
                stream.close = _stay_open

    def _put_back(self) -> None:
        if os.getpid() != self._pid:
            os._exit(1)
        for name, stream in self._streams.items():
            left = getattr(sys, name, None)
            if left is None or getattr(left, "closed", False):
                setattr(sys, name, stream)

    def _answer_with(self, error: Exception, method: str, stream: Any, ident: Any, parent: Mapping[str, Any]) -> None:
        vars(builtins).update(self._builtins)
        told = f"{error}; the cell has changed what its rank needs to answer: builtins are put back, modules are not"
        content = {
            "status": "error",
            "ename": type(error).__name__,
            "evalue": told,
            "traceback": [],
            "engine_info": self.get_engine_info(method=method),
        }
        metadata = self.finish_metadata(parent, self.init_metadata(parent), content)
        self.session.send(stream, f"{method}_reply", content, parent=parent, ident=ident, metadata=metadata)


def _stay_open() -> None:
    """In the place of a stream's close."""
