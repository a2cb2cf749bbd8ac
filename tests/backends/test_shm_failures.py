"""Pins how a shared-memory group ends: who is named, by which error, on every rank, and that nothing is left behind.

No time is asserted: where a hang would be the failure, the wait's own deadline would give another error.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.backends.ranks import channels, request, run_outcomes, run_ranks
from tests.forked import Outcome
from workbench.backends import gloo, segments, shm
from workbench.errors import ArgumentError, CapacityError, ClosedError, DeadlineError, PeerDeadError, ResourceError
from workbench.ranks import GroupKey
from workbench.runtime.room import decide_room, measure_claims

HIDDEN = 7168
BIG = 64  # sixteen pieces: a rank that dies in the middle has not handed over everything


def named_segments() -> list[str]:
    """Segments of this process that still have a name."""
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"wbk-{os.getpid()}-")]


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Any:
    """No segment of an ended process stays, whatever a test does. Other programs on the machine may have live ones."""
    before = segments.list_segments()
    yield
    assert {s.name for s in segments.list_segments() if not s.alive} <= {s.name for s in before}


class Board:
    """A few numbers that forked ranks and the test share."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 4096)

    def __setitem__(self, place: int, value: float) -> None:
        self._memory[8 * place : 8 * place + 8] = struct.pack("d", value)

    def __getitem__(self, place: int) -> float:
        return float(struct.unpack("d", self._memory[8 * place : 8 * place + 8])[0])

    def wait_for(self, place: int, timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not self[place]:
            assert time.monotonic() < deadline, f"place {place} was never set"
            time.sleep(0.005)


def wait_until_asleep(pid: int, thread: int | None = None, timeout_s: float = 30.0) -> None:
    """Until that thread sleeps in ten looks one after the other: a rank that only waits for a processor does not."""
    deadline, asleep = time.monotonic() + timeout_s, 0
    while asleep < 10:
        assert time.monotonic() < deadline, f"process {pid} never slept"
        state = Path(f"/proc/{pid}/task/{thread or pid}/stat").read_text().rpartition(")")[2].split()[0]
        asleep = asleep + 1 if state == "S" else 0
        time.sleep(0.02)


def outcomes_of(
    num_ranks: int,
    work: Callable[[Any, int], Any],
    *,
    timeout_s: float = 30.0,
    while_running: Callable[[Sequence[int]], None] = lambda _pids: None,
) -> list[Outcome]:
    """Run work(workspace, rank) on one group of num_ranks; how each rank ended."""

    def rank_main(rank: int) -> Any:
        with channels(tuple(range(num_ranks)), timeout_s=timeout_s) as [channel]:
            workspace = shm.bind(channel, request(HIDDEN))
            return work(workspace, rank)

    return run_outcomes(num_ranks, rank_main, while_running=while_running)


def ones(tokens: int = 1) -> torch.Tensor:
    return torch.ones(tokens, HIDDEN, dtype=torch.bfloat16)


def then_closed(workspace: Any) -> str:
    """The text of the ClosedError that any later call gives."""
    with pytest.raises(ClosedError) as caught:
        workspace.all_reduce(ones())
    with pytest.raises(ClosedError):
        workspace.empty((1, HIDDEN), torch.bfloat16)
    assert workspace.broken == str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("in_place", [False, True], ids=["copied", "in-place"])
def test_a_rank_killed_inside_a_call_is_named_long_before_the_deadline(in_place: bool) -> None:
    board = Board()

    def work(workspace: Any, rank: int) -> Any:
        x = workspace.empty((BIG, HIDDEN), torch.bfloat16) if in_place else ones(BIG)
        x.fill_(1.0)
        workspace.all_reduce(ones())
        if rank == 2:
            board[2] = 1.0
        if rank == 0:
            board.wait_for(3)  # come only after rank 2 is dead
        with pytest.raises(PeerDeadError) as caught:
            workspace.all_reduce(x)
        return caught.value.dead, str(caught.value), then_closed(workspace)

    def kill(pids: Sequence[int]) -> None:
        board.wait_for(2)
        wait_until_asleep(pids[2])  # inside the kernel
        os.kill(pids[2], signal.SIGKILL)
        board[3] = 1.0

    ended = outcomes_of(3, work, while_running=kill)
    assert ended[2].signal == signal.SIGKILL
    for rank in (0, 1):
        assert ended[rank].error is None, ended[rank].trace
        dead, text, later = ended[rank].value
        assert dead == (2,)
        assert "tp[0,1,2]: call 2 (all_reduce, 64 tokens of hidden 7168, bfloat16): the process of world rank 2" in text
        assert text in later


def test_a_rank_killed_after_it_handed_over_everything_is_not_missed() -> None:
    board = Board()

    def work(workspace: Any, rank: int) -> float:
        workspace.all_reduce(ones())
        if rank == 2:
            board[2] = 1.0
        if rank == 1:
            board.wait_for(3)
            time.sleep(0.5)  # meanwhile rank 0 waits for this rank and looks at the dead one
        return float(workspace.all_reduce(ones())[0, 0])

    def kill(pids: Sequence[int]) -> None:
        board.wait_for(2)
        wait_until_asleep(pids[2])
        os.kill(pids[2], signal.SIGKILL)
        board[3] = 1.0

    ended = outcomes_of(3, work, while_running=kill)
    assert [o.value for o in ended[:2]] == [3.0, 3.0]
    assert ended[2].signal == signal.SIGKILL


def test_a_stopped_rank_is_named_when_the_deadline_passes() -> None:
    board = Board()

    def work(workspace: Any, rank: int) -> Any:
        workspace.all_reduce(ones())
        if rank == 1:
            board[1] = 1.0
            board.wait_for(2)
        with pytest.raises(DeadlineError) as caught:
            workspace.all_reduce(ones(5))
        if rank == 0:
            board[0] += 1
        if rank == 2:
            board[4] += 1
        return caught.value.missing, str(caught.value), then_closed(workspace)

    def stop(pids: Sequence[int]) -> None:
        board.wait_for(1)
        os.kill(pids[1], signal.SIGSTOP)
        board[2] = 1.0
        board.wait_for(0)
        board.wait_for(4)
        os.kill(pids[1], signal.SIGCONT)

    ended = outcomes_of(3, work, timeout_s=4.0, while_running=stop)
    for outcome in ended:  # the stopped rank too, when it comes late
        assert outcome.error is None, outcome.trace
        missing, text, later = outcome.value
        assert missing == (1,)
        assert "waited 4 s for world rank 1" in text
        assert "call 2 (all_reduce, 5 tokens" in text
        assert text in later


@pytest.mark.parametrize("in_place", [False, True], ids=["copied", "in-place"])
def test_ctrl_c_comes_through_a_wait_and_the_peers_are_told(in_place: bool) -> None:
    board = Board()

    def work(workspace: Any, rank: int) -> Any:
        x = workspace.empty((1, HIDDEN), torch.bfloat16) if in_place else ones()
        x.fill_(1.0)
        workspace.all_reduce(x)
        if rank == 0:
            board[0] = 1.0
            with pytest.raises(KeyboardInterrupt):
                workspace.all_reduce(x)
            x.fill_(-1.0)
            later = then_closed(workspace)
            board[1] = 1.0
            return later
        board.wait_for(1)
        if not in_place:  # the other had handed over all it had; what is read in place may be overwritten by now
            assert workspace.all_reduce(ones())[0, 0] == 2.0
        with pytest.raises(ClosedError) as caught:
            workspace.all_reduce(ones())
        return str(caught.value), then_closed(workspace)

    def interrupt(pids: Sequence[int]) -> None:
        board.wait_for(0)
        wait_until_asleep(pids[0])
        os.kill(pids[0], signal.SIGINT)

    ended = outcomes_of(2, work, while_running=interrupt)
    assert [o.error for o in ended] == [None, None], ended[0].trace + ended[1].trace
    assert "broken by an earlier failure: a call was interrupted by KeyboardInterrupt" in ended[0].value
    assert ended[1].value[0] == "tp[0,1]: world rank 0 was interrupted in call 2; rebuild the group"


CALLS = {
    "tokens": (lambda w: w.all_reduce(ones(2)), lambda w: w.all_reduce(ones(3)), "2 tokens", "3 tokens"),
    "no tokens": (lambda w: w.all_reduce(ones(0)), lambda w: w.all_reduce(ones(1)), "0 tokens", "1 tokens"),
    "op": (
        lambda w: w.all_reduce(ones(2)),
        lambda w: w.all_reduce_add_rms_norm(ones(2), ones(2), ones()[0], eps=1e-6, weight_bias=0.0),
        "all_reduce, 2 tokens",
        "all_reduce_add_rms_norm, 2 tokens",
    ),
    "eps": (
        lambda w: w.all_reduce_add_rms_norm(ones(), ones(), ones()[0], eps=1e-6, weight_bias=0.0),
        lambda w: w.all_reduce_add_rms_norm(ones(), ones(), ones()[0], eps=1e-5, weight_bias=0.0),
        "eps 9.99999997e-07",
        "eps 9.99999975e-06",
    ),
    "weight bias": (
        lambda w: w.all_reduce_add_rms_norm(ones(), ones(), ones()[0], eps=1e-6, weight_bias=0.0),
        lambda w: w.all_reduce_add_rms_norm(ones(), ones(), ones()[0], eps=1e-6, weight_bias=1.0),
        "weight_bias 0",
        "weight_bias 1",
    ),
}


@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize("case", CALLS)
def test_different_calls_are_an_error_on_every_rank_that_names_both(case: str, odd: int) -> None:
    usual, other, usual_text, other_text = CALLS[case]

    def work(workspace: Any, rank: int) -> Any:
        workspace.all_reduce(ones())
        with pytest.raises(ArgumentError) as caught:
            (other if rank == odd else usual)(workspace)
        return str(caught.value), then_closed(workspace)

    for outcome in outcomes_of(3, work):
        assert outcome.error is None, outcome.trace
        text, later = outcome.value
        assert "tp[0,1,2]: call 2:" in text
        assert f"world rank {odd} came with" in text
        assert usual_text in text
        assert other_text in text
        assert text in later


def test_different_calls_are_told_while_a_third_rank_is_absent() -> None:
    def work(workspace: Any, rank: int) -> str:
        if rank == 1:
            with pytest.raises(ArgumentError) as caught:
                time.sleep(1.0)  # the others meet without this rank
                workspace.all_reduce(ones(2))
            return str(caught.value)
        with pytest.raises(ArgumentError) as caught:
            workspace.all_reduce(ones(2 + rank))
        return str(caught.value)

    texts = [o.value for o in outcomes_of(3, work)]
    assert "world rank 0 came with all_reduce, 2 tokens" in texts[0]
    assert "world rank 2 came with all_reduce, 4 tokens" in texts[0]
    assert texts[1:] == [texts[0]] * 2


def test_each_wait_of_a_call_has_its_own_deadline() -> None:
    """Ranks come at 0, 4 and 8 s with a deadline of 7 s: nobody waits much longer than 4 s for any one rank.

    A signal handler keeps rank 0 out of the kernel while rank 1 comes, so that its wait ends without another sleep.
    """

    def work(workspace: Any, rank: int) -> float:
        workspace.all_reduce(ones())
        if rank == 0:
            signal.signal(signal.SIGALRM, lambda _number, _frame: time.sleep(2.0))
            signal.setitimer(signal.ITIMER_REAL, 3.0)
        time.sleep(4.0 * rank)
        return float(workspace.all_reduce(ones())[0, 0])

    outcomes = outcomes_of(3, work, timeout_s=7.0)
    assert [o.value for o in outcomes] == [3.0, 3.0, 3.0], [o.error for o in outcomes]


def test_a_sleeping_rank_is_woken_by_its_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that nobody wakes would sleep for a slice, longer than this test may take."""
    monkeypatch.setattr(shm, "SLICE_S", 1000.0)
    board = Board()

    def work(workspace: Any, rank: int) -> float:
        for i in range(3):
            if rank == 0:
                board[i] = 1.0
            else:
                board.wait_for(i)
                board.wait_for(9)
                wait_until_asleep(int(board[9]))
            workspace.all_reduce(ones())
        return 1.0

    def tell(pids: Sequence[int]) -> None:
        board[9] = float(pids[0])

    assert [o.value for o in outcomes_of(2, work, timeout_s=2000.0, while_running=tell)] == [1.0, 1.0]


def test_a_refused_call_leaves_the_workspace_good() -> None:
    def work(workspace: Any, rank: int) -> float:
        with pytest.raises(CapacityError, match="65 tokens asked, prepared for at most 64"):
            workspace.all_reduce(ones(65))
        with pytest.raises(ArgumentError, match="not contiguous"):
            workspace.all_reduce(ones(4)[::2])
        return float(workspace.all_reduce(ones())[0, 0])

    assert [o.value for o in outcomes_of(2, work)] == [2.0, 2.0]


def test_a_peer_that_closes_is_named_at_once() -> None:
    def work(workspace: Any, rank: int) -> str:
        workspace.all_reduce(ones())
        if rank == 1:
            workspace.close()
            workspace.close()
            assert "closed" in then_closed(workspace)
            return ""
        with pytest.raises(ClosedError) as caught:
            workspace.all_reduce(ones())
        return str(caught.value)

    text = outcomes_of(2, work)[0].value
    assert text == "tp[0,1]: world rank 1 closed its workspace before call 2; rebuild the group"


def test_a_second_thread_is_refused_while_the_first_waits() -> None:
    board = Board()

    def work(workspace: Any, rank: int) -> Any:
        if rank == 1:
            board.wait_for(0)
            return float(workspace.all_reduce(ones())[0, 0])
        seen: list[Any] = []
        thread = threading.Thread(target=lambda: seen.append(float(workspace.all_reduce(ones())[0, 0])))
        thread.start()
        wait_until_asleep(os.getpid(), thread.native_id)
        with pytest.raises(ArgumentError, match="another thread is inside a call"):
            workspace.all_reduce(ones())
        board[0] = 1.0
        thread.join()
        return seen

    assert [o.value for o in outcomes_of(2, work)] == [[2.0], 2.0]


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("/dev/shm/wbk-")


def open_files() -> int:
    """Descriptors of segments and of watched processes; gloo opens and closes its own meanwhile."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum("wbk-" in link or "pidfd" in link for link in links)


def test_close_gives_everything_back_and_tensors_stay_readable() -> None:
    def rank_main(rank: int) -> tuple[int, int]:
        with channels((0, 1)) as [channel]:
            workspace = shm.bind(channel, request(HIDDEN))
            assert named_segments() == []
            assert mappings() == 2
            assert open_files() == 4  # the own lock, two mappings, the peer's process
            kept = workspace.empty((2, HIDDEN), torch.bfloat16)
            kept.fill_(7.0)
            workspace.all_reduce(kept)
            channel.gather(None, what="meeting")
            workspace.close()
            del workspace
            gc.collect()
            assert kept.unique().tolist() == [7.0]
            kept.fill_(8.0)
            held = mappings()
            del kept
            gc.collect()
            assert open_files() == 0
            return held, mappings()

    assert run_ranks(2, rank_main) == [(1, 0)] * 2


def test_a_forked_child_that_ends_leaves_its_parent_in_the_group() -> None:
    def rank_main(rank: int) -> float:
        with channels((0, 1)) as [channel]:
            workspace = shm.bind(channel, request(HIDDEN))
            child = os.fork()
            if child == 0:
                del workspace
                gc.collect()
                os._exit(0)
            os.waitpid(child, 0)
            channel.gather(None, what="meeting")
            time.sleep(0.4 * rank)  # the other waits long enough to look whether this rank left
            total = float(workspace.all_reduce(ones())[0, 0])
            workspace.close()
            return total

    assert run_ranks(2, rank_main) == [2.0, 2.0]


@pytest.mark.parametrize("backend", [shm, gloo], ids=["shm", "gloo"])
def test_a_forked_child_is_refused_and_its_parent_stays_in_the_group(backend: ModuleType) -> None:
    """A child that called would take its parent's place: the peers would sum its data."""

    def rank_main(rank: int) -> tuple[str, float]:
        with channels((0, 1)) as [channel]:
            workspace = backend.bind(channel, request(HIDDEN))
            gone = backend.bind(channel, request(HIDDEN))
            del gone  # what is no more does not disturb a fork
            read_end, write_end = os.pipe()
            child = os.fork()
            if child == 0:
                with contextlib.suppress(BaseException):
                    assert workspace.broken
                    os.write(write_end, then_closed(workspace).encode())
                    workspace.close()
                os._exit(0)
            os.waitpid(child, 0)
            text = os.read(read_end, 4096).decode()
            os.close(read_end)
            os.close(write_end)
            assert workspace.broken == ""
            total = float(workspace.all_reduce(ones())[0, 0])
            workspace.close()
            return text.replace(str(os.getpid()), "PARENT").replace(str(child), "CHILD"), total

    for rank, (text, total) in enumerate(run_ranks(2, rank_main)):
        assert text == (
            f"tp[0,1] on world rank {rank}: the workspace belongs to process PARENT, and this is process CHILD, forked "
            f"from it; call it there, or give the child a session of its own"
        )
        assert total == 2.0


def test_empty_gives_blocks_that_return_when_unused() -> None:
    def work(workspace: Any, rank: int) -> None:
        full = (64, HIDDEN)
        first = workspace.empty(full, torch.bfloat16)
        second = workspace.empty(full, torch.bfloat16)
        assert first.data_ptr() % 64 == second.data_ptr() % 64 == 0
        first.fill_(1.0)
        second.fill_(2.0)
        assert first.unique().tolist() == [1.0]
        with pytest.raises(CapacityError, match=r"917504 bytes asked .* 1835008 of 1839104 bytes in use"):
            workspace.empty(full, torch.bfloat16)
        view = first[3]
        del first
        with pytest.raises(CapacityError):  # a view keeps the block
            workspace.empty(full, torch.bfloat16)
        del view
        again = workspace.empty(full, torch.bfloat16)
        assert workspace.empty((0, HIDDEN), torch.bfloat16).shape == (0, HIDDEN)
        assert workspace.empty((), torch.bfloat16).shape == ()
        again.fill_(3.0)
        assert second.unique().tolist() == [2.0]
        small = [workspace.empty((1, 5), torch.bfloat16) for _ in range(4)]
        del second
        del small[1]
        assert workspace.empty((1, 5), torch.bfloat16).data_ptr() < small[2].data_ptr()

    assert [o.error for o in outcomes_of(2, work)] == [None, None]


def test_a_group_of_one_allocates_nothing() -> None:
    class Alone:
        key = GroupKey("tp", (3,))
        world_rank = 3
        timeout_s = 1.0

    before = mappings()
    workspace = shm.bind(Alone(), request(HIDDEN))  # type: ignore[arg-type]
    assert workspace.size_bytes == 0
    assert mappings() == before
    assert workspace.all_reduce(ones(2)).unique().tolist() == [1.0]
    workspace.close()
    with pytest.raises(ClosedError):
        workspace.all_reduce(ones())


def small_shm() -> None:
    """Give this process a /dev/shm of 1 MiB of its own. Needs root."""
    os.setsid()
    libc_unshare(0x00020000)  # CLONE_NEWNS
    for command in (["mount", "--make-rprivate", "/"], ["mount", "-t", "tmpfs", "-o", "size=1M", "none", "/dev/shm"]):
        subprocess.run(command, check=True)


def libc_unshare(flags: int) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), "unshare")


def may_mount() -> bool:
    return os.geteuid() == 0 and subprocess.run(["unshare", "-m", "true"], check=False).returncode == 0


@pytest.mark.skipif(not may_mount(), reason="a small /dev/shm needs the right to mount")
@pytest.mark.parametrize("poor", [(0, 1, 2), (1,)], ids=["all", "one"])
def test_a_full_dev_shm_is_the_same_error_on_every_rank_and_leaves_nothing(poor: tuple[int, ...]) -> None:
    def rank_main(rank: int) -> tuple[str, list[str], int]:
        if rank in poor:
            small_shm()
        with channels((0, 1, 2)) as [channel]:
            if rank in poor:
                claims = measure_claims(shm.room(request(HIDDEN, max_tokens=512), channel.key))
                assert decide_room([(rank, claims)]).endswith("bytes asked of /dev/shm, 1048576 are free")
            with pytest.raises(ResourceError) as caught:
                shm.bind(channel, request(HIDDEN, max_tokens=32))
            gc.collect()
            return str(caught.value), named_segments(), mappings()

    ended = run_ranks(3, rank_main)
    text = ended[0][0]
    assert f"tp[0,1,2]: shared memory failed; world rank {poor[0]}: /dev/shm cannot hold a segment" in text
    assert "needed 1843200 bytes, free 1048576 bytes (No space left on device)" in text
    assert text.count("world rank") == len(poor)
    assert ended == [(text, [], 0)] * 3


@pytest.mark.skipif(not may_mount(), reason="another /dev/shm needs the right to mount")
def test_ranks_with_different_dev_shm_are_refused_alike() -> None:
    def rank_main(rank: int) -> str:
        if rank == 1:
            os.setsid()
            libc_unshare(0x00020000)
            subprocess.run(["mount", "--make-rprivate", "/"], check=True)
            subprocess.run(["mount", "-t", "tmpfs", "none", "/dev/shm"], check=True)
        with channels((0, 1)) as [channel]:
            with pytest.raises(ResourceError) as caught:
                shm.bind(channel, request(HIDDEN))
            return str(caught.value)

    texts = run_ranks(2, rank_main)
    assert texts[0] == texts[1]
    assert "world ranks 0 and 1 differ in host, process namespace and /dev/shm" in texts[0]


def test_a_rank_that_cannot_map_its_peer_fails_all_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1's peer segment is replaced by one open to others before it is mapped."""
    real = segments.map_segment

    def rank_main(rank: int) -> tuple[str, list[str]]:
        if rank == 1:

            def spoiled(name: str, size_bytes: int) -> Any:
                os.chmod(f"/dev/shm/{name}", 0o644)
                return real(name, size_bytes)

            monkeypatch.setattr(shm, "map_segment", spoiled)
        with channels((0, 1)) as [channel]:
            with pytest.raises(ResourceError) as caught:
                shm.bind(channel, request(HIDDEN))
            channel.gather(None, what="meeting")
            return str(caught.value), named_segments()

    ended = run_ranks(2, rank_main)
    assert ended[0] == ended[1]
    assert "mapping the peers' shared memory failed; world rank 1: segment wbk-" in ended[0][0]
    assert "mode -rw-r--r--" in ended[0][0]
    assert ended[0][1] == []


def test_a_pid_that_was_used_again_is_not_watched() -> None:
    """This process lives, but it is not the one that started one tick later."""
    started = segments.start_time_of(os.getpid())
    os.close(shm._watch(os.getpid(), started))
    before = open_files()
    with pytest.raises(ResourceError, match=f"process {os.getpid()} has ended"):
        shm._watch(os.getpid(), started + 1)
    assert open_files() == before


def test_probe_says_why_not() -> None:
    assert shm.probe(request(HIDDEN), GroupKey("tp", (0, 1))).ok
    assert "17 ranks" in shm.probe(request(HIDDEN), GroupKey("tp", tuple(range(17)))).reason
    assert "torch.float64" in shm.probe(request(HIDDEN, torch.float64), GroupKey("tp", (0, 1))).reason
