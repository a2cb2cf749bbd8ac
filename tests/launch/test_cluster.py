"""Pins what a cluster's ranks are and what a cell on them does, with real processes. Times are printed, not pinned:
the limits asserted are several times what an idle machine needs."""

from __future__ import annotations

import stat
import textwrap
import threading
import time
from _thread import interrupt_main

import psutil
import pytest

from tests.launch import bodies
from tests.launch.conftest import measured
from workbench import Cluster
from workbench.errors import ArgumentError, ClosedError, LayoutError
from workbench.launch import CellDeadlineError, RanksFailedError

EVERYBODY = (1111.0,) * 4


@pytest.fixture
def sorted_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output once, at the end, by rank: as in a notebook under test."""
    monkeypatch.setenv("WORKBENCH_TEST", "1")


def test_engine_id_is_the_world_rank_that_torchrun_gave(cluster: Cluster) -> None:
    assert cluster.run(bodies.engine_id) == (0, 1, 2, 3)
    assert cluster.run(bodies.environment, ranks=3) == (
        {
            "RANK": "3",
            "LOCAL_RANK": "3",
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "4",
            "GROUP_RANK": "0",
            "TORCHELASTIC_RESTART_COUNT": "0",
        },
    )
    assert cluster.client.ids == [0, 1, 2, 3]


@pytest.mark.usefixtures("sorted_output")
def test_a_cell_finds_its_names_and_a_default_group(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.run(
        """
        x = torch.full((2,), 10.0 ** rank, device=device)
        dist.all_reduce(x)
        print(world_size, x.tolist(), group_map.world_size, session.group("tp"))
        rank
        """
    )
    assert capsys.readouterr().out.splitlines() == [
        "[0-1] 4 [1111.0, 1111.0] 4 tp[0,1]",
        "[2-3] 4 [1111.0, 1111.0] 4 tp[2,3]",
        "[0] 0",
        "[1] 1",
        "[2] 2",
        "[3] 3",
    ]


def test_views_and_cells_reach_the_ranks_of_a_group(cluster: Cluster) -> None:
    assert [view.apply_sync(bodies.engine_id) for view in cluster.view("cp")] == [[0, 2], [1, 3]]
    assert cluster.view("tp", 1).apply_sync(bodies.engine_id) == [2, 3]
    assert cluster.view().apply_sync(bodies.engine_id) == [0, 1, 2, 3]
    assert cluster.run(bodies.engine_id, ranks="cp:1") == (1, 3)
    with pytest.raises(LayoutError, match="tp has 2 groups"):
        cluster.view("tp", 2)


def test_messages_between_two_ranks_arrive(cluster: Cluster) -> None:
    assert cluster.run(bodies.pass_on) == (3.0, 0.0, 1.0, 2.0)


def test_the_session_sums_over_its_groups(cluster: Cluster) -> None:
    cluster.run(bodies.prepare, "tp")
    assert cluster.run(bodies.sum_over, "tp") == (11.0, 11.0, 1100.0, 1100.0)


def test_the_rank_that_failed_first_is_told_first_with_its_line(cluster: Cluster) -> None:
    code = """
    def half(n):
        return 1 / (n - 2)
    half(rank)
    dist.all_reduce(torch.ones(1), group=dist.new_group([0, 1, 2, 3]))
    """
    with pytest.raises(RanksFailedError) as told:
        cluster.run(f"import threading, signal, os\n{_interrupt_itself(3)}\n{textwrap.dedent(code)}")
    lines = str(told.value).splitlines()
    assert lines[0] == "world rank 2 failed first: ZeroDivisionError: division by zero"
    assert any("return 1 / (n - 2)" in line for line in lines)
    assert not any("workbench/launch" in line for line in lines)
    assert {e.world_rank: e.name for e in told.value.errors} == {
        2: "ZeroDivisionError",
        **dict.fromkeys((0, 1, 3), "KeyboardInterrupt"),
    }


@pytest.mark.parametrize("code", ["exit()", "quit()", "exit", "if rank == 1:\n    exit()"])
def test_exit_in_a_cell_is_refused_with_words_and_loses_no_rank(cluster: Cluster, code: str) -> None:
    pids = cluster.run(bodies.pid)
    with pytest.raises(RanksFailedError, match=r"nothing was ended; .* call cluster\.close\(\)"):
        cluster.run(code)
    with pytest.raises(RanksFailedError, match="world rank 0 failed: SystemExit: 3"):
        cluster.run("import sys; sys.exit(3)", ranks=0)
    assert cluster.run(bodies.pid) == pids
    assert cluster.status.alive == (0, 1, 2, 3)


def test_an_interrupt_ends_a_loop_and_keeps_the_ranks(cluster: Cluster) -> None:
    pids = cluster.run(bodies.pid)
    started = time.monotonic()
    with pytest.raises(CellDeadlineError):
        cluster.run("while True: pass", deadline_s=0.3)
    assert cluster.status.busy == (0, 1, 2, 3)
    started = time.monotonic()
    assert cluster.interrupt() == ()
    assert measured("interrupt of a loop on 4 ranks", time.monotonic() - started) < 3
    assert cluster.run(bodies.pid) == pids


HANGS = {
    "all_reduce": "dist.all_reduce(torch.ones(4))",
    "barrier": "dist.barrier()",
    "monitored barrier": "dist.monitored_barrier()",
    "object collective": "dist.all_gather_object([None] * 4, rank)",
    "receive": "dist.recv(torch.ones(4), src=0)",
    "receive from anybody": "dist.recv(torch.ones(4))",
    "started receive": "dist.irecv(torch.ones(4), src=0).wait()",
    "started collective": "dist.all_reduce(torch.ones(4), async_op=True).wait()",
    "new group": "dist.new_group([0, 1, 2, 3])",
    "store": "dist.distributed_c10d._get_default_store().wait(['nobody sets this'])",
    "store value": "dist.distributed_c10d._get_default_store().get('nobody sets this')",
    "session": "session.barrier(group='cp')",
}


@pytest.mark.parametrize("name", HANGS)
def test_a_hung_wait_is_interrupted_and_the_next_collective_is_right(cluster: Cluster, name: str) -> None:
    pids = cluster.run(bodies.pid)
    with pytest.raises(CellDeadlineError):
        cluster.run(f"if rank > 1:\n    {HANGS[name]}", deadline_s=0.5)
    started = time.monotonic()
    assert cluster.interrupt() == ()
    assert measured(f"interrupt of a hung {name}", time.monotonic() - started) < 3
    started = time.monotonic()
    cluster.rebuild()
    assert cluster.run(bodies.sum_over) == EVERYBODY
    assert measured("rebuild and one all-reduce", time.monotonic() - started) < 5
    assert cluster.run(bodies.pid) == pids


def test_rebuild_interrupts_what_hangs_and_keeps_what_ranks_hold(cluster: Cluster) -> None:
    cluster.run(bodies.remember, 100)
    cluster.run(bodies.prepare, "cp")
    generation = cluster.status.generation
    with pytest.raises(CellDeadlineError):
        cluster.run("if rank == 0: session.all_reduce(torch.ones(2, 64), group='cp')", deadline_s=0.5)
    cluster.rebuild()
    assert cluster.status.generation == generation + 1
    assert cluster.run(bodies.recall) == (100, 101, 102, 103)
    assert cluster.run(bodies.sum_over, "cp") == (101.0, 1010.0, 101.0, 1010.0)


def test_a_group_that_was_left_by_an_interrupt_refuses_the_next_call(cluster: Cluster) -> None:
    with pytest.raises(CellDeadlineError):
        cluster.run("if rank: dist.barrier()", deadline_s=0.3)
    assert cluster.interrupt() == ()
    with pytest.raises(RanksFailedError, match=r"barrier #\d+ on world\[0,1,2,3\] was interrupted.*cluster\.rebuild"):
        cluster.run("dist.barrier()", ranks="1-3")


def test_a_deadline_says_where_each_rank_stands_while_all_live(cluster: Cluster) -> None:
    pids = cluster.run(bodies.pid)
    code = """
    import time
    def step(x):
        dist.all_reduce(x)
    if rank == 3:
        time.sleep(30)
    step(torch.ones(8))
    """
    started = time.monotonic()
    with pytest.raises(CellDeadlineError) as told:
        cluster.run(code, deadline_s=1)
    measured("deadline of 1 s with its diagnosis", time.monotonic() - started)
    text = str(told.value)
    print(text)
    assert told.value.missing == (3,)
    assert "world ranks 0-2 came, 0-2 still inside after" in text
    assert "missing: 3" in text
    assert "cell, in step, line 3: dist.all_reduce(x)" in text
    assert "cell, line 6: step(torch.ones(8))" in text
    assert "cell, line 5: time.sleep(30)" in text
    assert cluster.status.alive == (0, 1, 2, 3)
    assert cluster.interrupt() == ()
    assert cluster.run(bodies.pid) == pids


def test_ctrl_c_in_the_driver_interrupts_the_ranks(cluster: Cluster) -> None:
    threading.Timer(0.5, interrupt_main).start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt, match=r"interrupted: world ranks 1-3.*cluster\.rebuild"):
        cluster.run("if rank: dist.barrier()")
    measured("Ctrl-C after 0.5 s", time.monotonic() - started - 0.5)
    assert cluster.status.busy == ()


@pytest.mark.parametrize("apart_s", [0.0, 0.02, 0.2])
def test_a_second_ctrl_c_at_once_is_one_with_the_first(cluster: Cluster, apart_s: float) -> None:
    for after_s in (0.5, 0.5 + apart_s):
        threading.Timer(after_s, interrupt_main).start()
    takes_a_while_to_end = """
        import time
        try: time.sleep(60)
        finally: time.sleep(0.5)  # both must come before the ranks are back: a later one would end the tests
    """
    with pytest.raises(KeyboardInterrupt, match="interrupted: world ranks 0-3"):
        cluster.run(textwrap.dedent(takes_a_while_to_end))
    assert cluster.status.busy == ()


def test_a_busy_rank_is_refused_and_the_others_serve(cluster: Cluster) -> None:
    with pytest.raises(CellDeadlineError):
        cluster.run("import time; time.sleep(60)", ranks=1, deadline_s=0.2)
    with pytest.raises(ClosedError, match=r"still in an earlier cell: world rank 1; .*cluster\.where"):
        cluster.run("1")
    assert cluster.run(bodies.engine_id, ranks="0,2-3") == (0, 2, 3)
    assert "busy: 1" in repr(cluster)
    assert [s.state for s in cluster.where().standings] == ["idle", "running", "idle", "idle"]


def test_a_second_default_group_does_not_meet_the_keys_of_the_first(cluster: Cluster) -> None:
    """Symptom elsewhere: destroy, then init again under torchrun hangs until its timeout."""
    started = time.monotonic()
    cluster.run("for _ in range(2):\n    dist.destroy_process_group(); dist.init_process_group('gloo')", deadline_s=20)
    assert cluster.run(bodies.sum_over) == EVERYBODY
    measured("destroy and init again, twice", time.monotonic() - started)


def test_groups_that_cells_destroy_are_gone_with_their_threads(cluster: Cluster) -> None:
    cluster.run(bodies.use_and_destroy_a_group)  # torch's own threads start
    before = cluster.run(bodies.num_threads)
    for _ in range(3):
        cluster.run(bodies.use_and_destroy_a_group)
    assert cluster.run(bodies.num_threads) == before


def test_a_group_that_is_not_made_everywhere_names_who_did_not_call(cluster: Cluster) -> None:
    with pytest.raises(
        RanksFailedError, match=r"new_group\(\[0, 1\]\): world rank 0 waited 1 s for world ranks 1, 2, 3"
    ):
        cluster.run("from datetime import timedelta; dist.new_group([0, 1], timeout=timedelta(seconds=1))", ranks=0)


@pytest.mark.usefixtures("sorted_output")
def test_figures_and_values_are_shown_with_their_ranks(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.run(
        "import sys; from IPython.display import SVG, display; display(SVG('<svg/>')); print('too', file=sys.stderr)"
    )
    told = capsys.readouterr()
    assert "[0-3]\n" in told.out
    assert told.err == "[0-3] too\n"


def test_output_comes_while_the_cell_runs(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """The rank prints its own clock; here it is read when the text arrives."""
    arrived: list[float] = []

    class Noting:
        def update(self, outputs: dict[int, object]) -> None:
            if not arrived and getattr(outputs[0], "stdout", ""):
                arrived.append(time.monotonic() - float(outputs[0].stdout.split()[0]))

        def finish(self, outputs: dict[int, object]) -> None:
            pass

    cell = cluster._crew.send("import time; print(time.monotonic()); time.sleep(1)", (), {}, (0,))
    cell.watch(Noting(), lambda: None, deadline_s=None)
    assert measured("a printed line reaches the driver", arrived[0]) < 0.5


def test_wrong_arguments_are_refused_before_anything_starts(cluster: Cluster) -> None:
    for wrong in ({"ranks": 0}, {"ranks": True}, {"ranks": 65}, {"device": "tpu"}, {"timeout_s": -1}):
        with pytest.raises(ArgumentError, match="allowed"):
            Cluster(**wrong)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(LayoutError, match="for 4 ranks"):
        Cluster(3, group_map=cluster.group_map)
    with pytest.raises(ArgumentError, match="deadline_s"):
        cluster.run("1", deadline_s=0)


def test_files_are_private_and_sockets_are_local(cluster: Cluster) -> None:
    paths = [cluster.directory.parent, cluster.directory, *cluster.directory.rglob("*")]
    for path in paths:
        mode = stat.S_IMODE(path.lstat().st_mode)
        if path.name != "README":  # IPython copies its own, with the mode it has there
            assert mode & 0o077 == 0, f"{path} has mode {mode:04o}"
    assert stat.S_IMODE(cluster.directory.lstat().st_mode) == 0o700
    keys = list(cluster.directory.rglob("ipcontroller-*.json"))
    assert [stat.S_IMODE(path.lstat().st_mode) for path in keys] == [0o600, 0o600]
    addresses = {
        (connection.laddr.ip, process.name())
        for process in psutil.Process().children(recursive=True)
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert len(paths) > 10
    assert {ip for ip, _ in addresses} == {"127.0.0.1"}, addresses


def _interrupt_itself(seconds: float) -> str:
    return f"threading.Timer({seconds}, os.kill, (os.getpid(), signal.SIGINT)).start() if rank != 2 else None"
