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


def test_blocks_of_a_row_follow_tokens_and_hidden_size():
    # 7168 in bf16 is 896 vectors: 7 blocks of 128 threads for few tokens, 4 of 224 for many; always 2 to 8
    assert abi.choose(1, 7168, 2).cluster == 7
    assert abi.choose(128, 7168, 2).cluster == 7
    assert abi.choose(129, 7168, 2).cluster == 4
    assert abi.choose(1, 16384, 4).cluster == 8
    assert abi.choose(4096, 8, 2).cluster == 2
