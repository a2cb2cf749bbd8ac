"""Pins the memory of a shared-memory group: made or refused alike, given back, and never a forked child's."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import time
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.backends.ranks import channels, request, run_ranks
from tests.backends.shm_groups import (
    HIDDEN,
    mappings,
    named_segments,
    ones,
    open_files,
    outcomes_of,
    then_closed,
)
from workbench.backends import gloo, segments, shm
from workbench.errors import CapacityError, ClosedError, ResourceError
from workbench.ranks import GroupKey
from workbench.runtime.room import decide_room, measure_claims


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
