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
    ("c_name", "mirror"), [("WbkCall", abi.Call), ("WbkRank", abi.RankMemory), ("WbkReport", abi.Report)]
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
