"""The ctypes mirror of the C face has the compiler's sizes and offsets. Needs a C++ compiler only; offsets exact."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from workbench.backends import custom_abi as abi

INCLUDE = Path(__file__).resolve().parents[2] / "kernels_ext" / "include"
COMPILER = shutil.which("c++") or shutil.which("g++")


def printed(tmp_path: Path, body: str) -> list[str]:
    source, program = tmp_path / "p.cpp", tmp_path / "p"
    source.write_text(
        f'#include <cstddef>\n#include <cstdio>\n#include "wbk/cuda_abi.h"\n#include "wbk/cuda_layout.h"\n'
        f"int main() {{ {body} }}\n"
    )
    subprocess.run([COMPILER, "-std=c++17", f"-I{INCLUDE}", str(source), "-o", str(program)], check=True, timeout=60)
    return subprocess.run([program], check=True, capture_output=True, text=True, timeout=10).stdout.split()


needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


@needs_compiler
@pytest.mark.parametrize(
    ("c_name", "mirror"),
    [("WbkCall", abi.Call), ("WbkRank", abi.RankMemory), ("WbkReport", abi.Report), ("WbkHandle", abi.Handle)],
)
def test_every_field_lies_where_the_compiler_puts_it(tmp_path, c_name, mirror):
    names = [name for name, *_ in mirror._fields_]
    body = "".join(f'std::printf("%zu ", offsetof({c_name}, {name}));' for name in names)
    *offsets, size = printed(tmp_path, body + f'std::printf("%zu", sizeof({c_name}));')
    assert [int(o) for o in offsets] == [getattr(mirror, name).offset for name in names]
    assert int(size) == ctypes.sizeof(mirror)


@needs_compiler
def test_slots_of_halves_and_senders_do_not_overlap(tmp_path):
    # 3 ranks, 5 rows of 7 vectors: four planes of 35 vectors, 2 halves x 2 senders, in 2240 bytes
    planes = "".join(
        f'std::printf("%llu ", (unsigned long long)layout.plane({half}, wbk::Layout::peer_place({sender}, 1), 2));'
        for half in (0, 1)
        for sender in (0, 2)
    )
    told = printed(
        tmp_path,
        f'wbk::Layout layout{{3, 5, 7}}; {planes} std::printf("%llu", (unsigned long long)layout.slot_bytes());',
    )
    assert told == ["0", "35", "70", "105", "2240"]


@needs_compiler
def test_rows_of_a_two_shot_call_fit_its_plane_and_do_not_overlap(tmp_path):
    # 10 tokens of 4 ranks: groups 0..2, so a sender's plane needs rows 0..2 for its parts and 3..5 for its own tokens
    told = printed(
        tmp_path,
        "wbk::Layout layout{4, 6, 1}; const unsigned g = layout.groups(10);"
        'for (unsigned i = 0; i < g; ++i) std::printf("%u %u ", layout.part_row(i), layout.finished_row(i, g));'
        'std::printf("%d %d", layout.holds_two_shot(12), layout.holds_two_shot(13));',
    )
    assert told == ["0", "3", "1", "4", "2", "5", "1", "0"]
    assert abi.two_shot_rows(10, 4) == 6


def test_two_shots_from_the_size_at_which_their_second_wait_pays():
    # 326,700 bytes * n / ((n - 1)(n - 2)): 217,800 for 4 ranks, 62,228 for 8; rows of 14,336 bytes
    assert [abi.push_bytes(ranks) for ranks in (3, 4, 8, 16)] == [490_050, 217_800, 62_228, 24_891]
    assert abi.choose(15, 7168, 2, ranks=4).algorithm == abi.PUSH
    assert abi.choose(16, 7168, 2, ranks=4).algorithm == abi.TWO_SHOT_PUSH
    assert abi.choose(7, 7168, 2, ranks=8).algorithm == abi.PUSH  # fewer tokens than ranks
    assert abi.choose(8, 7168, 2, ranks=8).algorithm == abi.TWO_SHOT_PUSH
    assert abi.choose(4096, 7168, 2, ranks=2).algorithm == abi.PUSH


def test_memory_holds_every_call_by_the_algorithm_it_takes():
    # 4,096 tokens of 7,168 on 8 ranks: 1,024 rows a plane, where push for all sizes would need 4,096
    assert abi.plane_rows(4096, 7168, 2, 8) == 1024
    assert abi.plane_rows(4096, 7168, 2, 2) == 4096
    for ranks in (2, 3, 4, 8, 16):
        for hidden in (8, 2880, 7168, 16384):
            rows = abi.plane_rows(500, hidden, 2, ranks)
            for tokens in range(501):
                by_push = abi.choose(tokens, hidden, 2, ranks).algorithm == abi.PUSH
                assert (tokens if by_push else abi.two_shot_rows(tokens, ranks)) <= rows


def test_layout_of_a_call_follows_its_bytes_and_its_row():
    # 7168 in bf16: 14 KiB a row, 896 vectors: 7 blocks of 128 threads; at most 100 rows at one time from 2 to 16 MiB
    assert abi.choose(1, 7168, 2) == abi.Choice(7)
    assert abi.choose(146, 7168, 2) == abi.Choice(7)  # 2,093,056 bytes
    assert abi.choose(147, 7168, 2) == abi.Choice(7, max_lanes=100)
    assert abi.choose(1170, 7168, 2) == abi.Choice(7, max_lanes=100)  # 16,773,120 bytes
    assert abi.choose(1171, 7168, 2) == abi.Choice(7)
    # 4096 in bf16: 8 KiB a row, 512 vectors: 4 blocks of 128 up to 1 MiB, then 2 of 256
    assert abi.choose(128, 4096, 2) == abi.Choice(4)
    assert abi.choose(129, 4096, 2) == abi.Choice(2)
    # 5120 in bf16: 10 KiB a row, 5 blocks; 140 rows of 10 KiB are as many bytes as 100 of 14
    assert abi.choose(512, 5120, 2) == abi.Choice(5, max_lanes=140)
    # never fewer than 2 blocks or more than 8
    assert abi.choose(4096, 8, 2) == abi.Choice(2)
    assert abi.choose(1, 16384, 4) == abi.Choice(8)


def test_every_cluster_size_of_a_workspace_is_known_before_its_first_call():
    for hidden, itemsize in ((7168, 2), (4096, 2), (8, 2), (16384, 4), (2880, 2)):
        seen = {abi.choose(tokens, hidden, itemsize).cluster for tokens in range(1, 5000)}
        assert seen <= set(abi.clusters(hidden, itemsize))
    assert abi.clusters(4096, 2) == (2, 4)
    assert abi.clusters(7168, 2) == (7,)
