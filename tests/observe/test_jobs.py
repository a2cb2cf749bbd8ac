"""Which ranks are one job. Exact: the directory that each of them is given."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from workbench.observe.jobs import claim_job, read_run_id

BY_HAND = {"MASTER_PORT": "29500"}


def claim(directory: Path, environ: Mapping[str, str], world_rank: int, place: str | None = None) -> str:
    """The job of a rank, by name: that of a process which ends at once."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write_end, Path(claim_job(str(directory), environ, world_rank, place=place)).name.encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(write_end)
    with os.fdopen(read_end) as told:
        return told.read()


def test_ranks_of_one_run_id_are_one_job_restarts_included(tmp_path: Path) -> None:
    first = {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "0"}
    again = {**first, "TORCHELASTIC_RESTART_COUNT": "1"}
    assert [claim(tmp_path, e, r) for e in (first, again, first) for r in (0, 1)] == [tmp_path.name] * 6
    assert claim(tmp_path, {"TORCHELASTIC_RUN_ID": "b"}, 0) == "job-2"
    assert claim(tmp_path, first, 2) == tmp_path.name
    assert read_run_id(tmp_path) == "a"


def test_ranks_that_meet_at_two_ports_are_two_jobs(tmp_path: Path) -> None:
    assert [claim(tmp_path, BY_HAND, 0, port) for port in ("29500", "29501")] == [tmp_path.name, "job-2"]


def test_a_rank_that_is_there_already_begins_another_job_at_the_same_place(tmp_path: Path) -> None:
    claim_job(str(tmp_path), BY_HAND, 0)
    assert claim(tmp_path, BY_HAND, 1) == tmp_path.name, "while another of its ranks lives"
    assert claim(tmp_path, BY_HAND, 1) == "job-2"


def test_a_rank_started_after_all_of_the_job_ended_begins_another(tmp_path: Path) -> None:
    assert claim(tmp_path, BY_HAND, 0) == tmp_path.name
    assert claim(tmp_path, BY_HAND, 1) == "job-2", "rank 1 of the first job never came"


def test_a_rank_started_before_the_first_one_came_is_of_its_job_though_that_one_is_gone(tmp_path: Path) -> None:
    """A rank 0 whose port is taken is gone before rank 1 has imported torch."""
    start_read, start_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.read(start_read, 1)
            os._exit(Path(claim_job(str(tmp_path), BY_HAND, 1)).name != tmp_path.name)
        finally:
            os._exit(9)
    time.sleep(0.1)
    assert claim(tmp_path, BY_HAND, 0) == tmp_path.name
    os.write(start_write, b"!")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_world_of_their_own_that_ranks_of_a_launcher_make_is_another_job(tmp_path: Path) -> None:
    torchrun = {"TORCHELASTIC_RUN_ID": "a"}
    assert [claim(tmp_path, torchrun, r) for r in (0, 1)] == [tmp_path.name] * 2
    claim_job(str(tmp_path), torchrun, 0, place="helpers on 29501")
    assert claim(tmp_path, torchrun, 1, "helpers on 29501") == "job-2"
    assert claim(tmp_path, torchrun, 2) == tmp_path.name


@pytest.mark.parametrize("nonsense", ["[" * 50_000, '""', '{"job": 1e999}', "{}", '"run"\n{"job": -3}'])
def test_claims_that_make_no_sense_are_passed_over(tmp_path: Path, nonsense: str) -> None:
    (tmp_path / "jobs.jsonl").write_text(f"{nonsense}\n")
    assert claim(tmp_path, BY_HAND, 0) == tmp_path.name
    assert read_run_id(tmp_path) == ""
