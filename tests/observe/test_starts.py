"""Every way in which a rank can come to be records, and nothing else is changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.observe.traced import PROGRAMS, begins, environment, record, results, workbench_trace
from tests.ports import free_port
from workbench.observe import recorded_environment


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_ranks_that_multiprocessing_starts_record_under_the_rank_they_are_given(tmp_path: Path, method: str) -> None:
    trace, output = record(tmp_path, [sys.executable, str(PROGRAMS / "spawned.py"), method, free_port()])
    assert results(output) == {"0": "6.0", "1": "6.0"}
    assert trace.world_ranks == (0, 1)
    for rank in (0, 1):
        ops = [e.op for e in begins(trace, rank) if e.op != "store_wait"]
        assert ops == ["init_process_group", "all_reduce", "destroy_process_group"]


def test_an_exception_that_spawn_hands_to_the_parent_is_the_ranks(tmp_path: Path) -> None:
    command = [sys.executable, str(PROGRAMS / "spawned.py"), "spawn", free_port(), "fail"]
    traced = workbench_trace(tmp_path, command)
    rank = traced.trace.rank(1)
    assert rank is not None
    assert [e.error for e in rank.events if e.op == "exception"] == ["KeyError: 'lost'"]
    assert traced.document["command_status"] == 1


def test_ranks_whose_environment_was_replaced_record(tmp_path: Path) -> None:
    trace, output = record(tmp_path, [sys.executable, str(PROGRAMS / "starts_ranks.py"), free_port()])
    assert results(output) == {"0": "3.0", "1": "3.0"}
    assert trace.world_ranks == (0, 1)


@pytest.mark.parametrize("change", ["os.environ['PYTHONPATH'] = '/x'", "os.environ.clear()"])
def test_ranks_below_a_program_that_changes_its_own_environment_record(tmp_path: Path, change: str) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    rank = "import torch.distributed as dist; dist.init_process_group('gloo'); dist.destroy_process_group()"
    parent = tmp_path / "parent.py"
    parent.write_text(
        f"import os, subprocess, sys\n{change}\nos.environ.update({variables})\n"
        f'subprocess.run([sys.executable, "-c", "{rank}"], check=True)\n'
    )
    trace, _ = record(tmp_path, [sys.executable, str(parent)])
    assert [e.op for e in begins(trace, 0) if e.op != "store_wait"] == ["init_process_group", "destroy_process_group"]


def test_a_process_that_uses_no_torch_loads_none_and_leaves_nothing(tmp_path: Path) -> None:
    code = "import sys, subprocess; print([m for m in ('torch', 'numpy', 'psutil', 'click') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=recorded_environment(environment(), str(tmp_path / "trace")),
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")
    assert list(tmp_path.iterdir()) == []


def test_the_users_own_sitecustomize_still_runs_and_the_path_is_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('own', __name__)\n")
    plain = {**environment(), "PYTHONPATH": str(tmp_path)}
    code = "import sys; print(sys.path); import sitecustomize; print(sitecustomize.__file__)"
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=30, check=True
        ).stdout
        for env in (plain, recorded_environment(plain, str(tmp_path / "trace")))
    ]
    assert outputs[0] == outputs[1]
    assert outputs[0].startswith("own sitecustomize\n")


def test_a_hook_that_fails_costs_the_recording_and_not_the_program(tmp_path: Path) -> None:
    (tmp_path / "trace").mkdir(mode=0o777)
    (tmp_path / "trace").chmod(0o777)  # the recorder refuses a directory that others can write
    code = "import torch.distributed as dist; dist.init_process_group('gloo'); print(dist.get_world_size())"
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=recorded_environment(environment(**variables), str(tmp_path / "trace")),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "1\n"
    assert "world rank 0 is not recorded: " in done.stderr
