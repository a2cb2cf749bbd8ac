"""cluster.xray(): the verdict on the ranks of a notebook, while they hang and after a rebuild."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench import Cluster
from workbench.launch import CellDeadlineError


@pytest.mark.timeout(240)
def test_a_rank_that_stays_away_is_found_while_the_others_hang_and_forgotten_after_a_rebuild(tmp_path: Path) -> None:
    with Cluster(ranks=3, device="cpu") as cluster:
        cluster.run("dist.all_reduce(torch.ones(2))")
        assert cluster.xray().findings == ()
        with pytest.raises(CellDeadlineError):
            cluster.run("if rank != 1: dist.all_reduce(torch.ones(2))", deadline_s=2)
        xray = cluster.xray()
        assert [(f.kind, f.ranks) for f in xray.findings] == [("missing-call", (1,))]
        assert "world rank 0: waiting, inside all_reduce #2 on world[0,1,2]" in repr(xray)
        assert "all_reduce #2" in str(xray.lanes())
        assert xray.save(tmp_path / "xray.html").stat().st_size > 1_000_000
        cluster.interrupt()
        cluster.rebuild()
        cluster.run("dist.barrier()")
        assert cluster.xray().findings == ()
