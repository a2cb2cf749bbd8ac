"""pytorch/pytorch#198140 (repair proposed in PR 197857).

Symptom: the first rendezvous or allocation of a workspace in a graph capture ends in an obscure capture error. Cause:
making a handle synchronises the stream, which a capture forbids. Modelled on CPU, where a capture is a list of calls.
"""

from __future__ import annotations

import pytest
import torch

from tests.bugs.worlds import HIDDEN, fused, only, open_session
from tests.forked import run_ranks
from workbench.errors import CaptureError
from workbench.ranks import GroupMap

TWO_KINDS = GroupMap.custom({"tp": [[0, 1]], "cp": [[1, 0]]})


def test_old_the_driver_reports_the_stream_and_not_the_operation() -> None:
    class Stream:
        capturing = True

        def synchronize(self) -> None:
            if self.capturing:
                raise RuntimeError("operation not permitted when stream is capturing")

    def create_workspace(stream: Stream) -> str:
        stream.synchronize()
        return "workspace"

    with pytest.raises(RuntimeError) as e:
        create_workspace(Stream())
    assert "workspace" not in str(e.value)


def test_making_a_workspace_inside_is_refused_by_name_and_a_known_one_is_used() -> None:
    def body(rank: int) -> tuple[list[str], float]:
        with open_session(TWO_KINDS, "tp") as s:
            texts = []
            with s.capture() as c:
                for kind in ("cp", "tp"):
                    with pytest.raises(CaptureError) as e:
                        s.prepare(kind, hidden=HIDDEN, dtype=torch.float32, max_tokens=64)
                    texts.append(str(e.value))
                out = fused(s, "tp")
            c.replay()
            return texts, only(out.residual)

    for rank, (texts, value) in enumerate(run_ranks(2, body)):
        assert value == 16.0
        refusal = (
            f"prepare on world rank {rank} while a capture is on; it waits for other ranks or moves memory, "
            f"so do it before the capture, on every rank"
        )
        assert texts == [refusal] * 2
