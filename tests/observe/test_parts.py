"""What an all-to-all records of the parts that it sends and takes: elements, by member."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.observe.traced import begins, record, torchrun
from workbench.observe.described import parts_words

NOTES = ["sends 5,10; takes 5,15", "sends 15,20; takes 10,20"]


def test_parts_are_recorded_in_elements_of_each_way_to_call(tmp_path: Path) -> None:
    trace, _ = record(tmp_path, torchrun("parts.py"))
    for rank, parts in enumerate(NOTES):
        calls = [(e.op, e.note) for e in begins(trace, rank) if e.op.startswith("all_to_all")]
        assert calls == [
            ("all_to_all_single", "default group; sends 10x2; takes 10x2"),
            ("all_to_all_single", f"default group; {parts}"),
            ("all_to_all", "default group; sends 2x2; takes 2x2"),
            ("all_to_all_single", f"async; below Python; {parts}"),
        ]


def test_tensors_of_a_list_are_counted_one_by_one_and_what_torch_refuses_is_left_out() -> None:
    sizes = [torch.ones(n, 2) for n in (1, 2)]
    assert parts_words(sizes, None, sizes[::-1], None, 2) == "sends 2,4; takes 4,2"
    assert parts_words(torch.ones(3), [1, 2], torch.ones(3), [2, 1], 2) == "sends 1,2; takes 2,1"
    assert parts_words(torch.ones(0, 4), [0, 0], torch.ones(2, 4), [2, 0], 2) == "sends 0x2; takes 8,0"
    assert parts_words(torch.ones(4), None, torch.ones(6), None, 2) == "sends 2x2; takes 3x2"
    assert [parts_words(given, None, torch.ones(4), None, 2) for given in (None, [None])] == ["", ""]
