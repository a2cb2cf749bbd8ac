"""Pins which versions of FlashInfer and NCCL are refused, and why; that doctor names what is installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from workbench import doctor
from workbench.defects import FLASHINFER, NCCL, find_refusal, known_defects
from workbench.errors import ArgumentError

DATA = Path(doctor.__file__).parent / "defects.json"


@pytest.mark.parametrize(
    ("version", "first_reason"),
    [
        ("0.6.6", "flashinfer-device-from-rank"),
        ("0.6.10", "flashinfer-world-rendezvous"),
        ("0.6.10.post1", "flashinfer-world-rendezvous"),
        ("0.6.11", "flashinfer-world-by-default"),
        ("0.6.15", "flashinfer-world-by-default"),
        ("0.6.18rc1", "flashinfer-stale-residual"),
        ("0.7.2", "flashinfer-stale-residual"),
    ],
)
def test_versions_that_meet_over_the_wrong_group_or_give_wrong_data_are_refused_by_name(
    version: str, first_reason: str
) -> None:
    refusal = find_refusal(FLASHINFER, version)
    assert refusal.startswith(f"flashinfer-python {version} is refused: {first_reason}: ")
    assert "install flashinfer-python 0.7.2.post1 or newer" in refusal


@pytest.mark.parametrize("version", ["0.7.2.post1", "0.7.3", "0.8.0"])
def test_later_versions_are_not_refused(version: str) -> None:
    assert find_refusal(FLASHINFER, version) == ""


def test_world_rendezvous_is_told_of_0_6_10_alone() -> None:
    told = {v: [d.id for d in known_defects(FLASHINFER, v)] for v in ("0.6.9", "0.6.10", "0.6.11")}
    assert ["flashinfer-world-rendezvous" in ids for ids in told.values()] == [False, True, False]


def test_defects_of_nccl_by_version() -> None:
    assert [d.id for d in known_defects(NCCL, "2.26.2")] == ["nccl-no-windows", "nccl-window-grid-barrier"]
    assert [d.id for d in known_defects(NCCL, "2.28.9")] == ["nccl-window-grid-barrier"]
    assert known_defects(NCCL, "2.30.7") == ()


def test_a_version_that_is_none_is_an_argument_error() -> None:
    with pytest.raises(ArgumentError, match=r"nccl version 'unknown'; allowed: a version as pip writes it"):
        known_defects(NCCL, "unknown")


def test_every_entry_has_a_source_and_a_next_step_and_ids_are_unique() -> None:
    entries = json.loads(DATA.read_text())["defects"]
    assert len({e["id"] for e in entries}) == len(entries) >= 15
    assert all(e["source"] and e["do"] and e["symptom"] for e in entries)


def test_doctor_names_the_defects_of_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The versions are given here, because no CI machine has an NCCL and one must see both outcomes."""
    monkeypatch.setattr(doctor, "installed_versions", lambda: {FLASHINFER: "0.6.10", NCCL: "2.28.9"})
    rows = {(r.name, r.found.partition(":")[0]): r for r in doctor.examine() if r.name.startswith("defect of ")}
    old = rows["defect of flashinfer-python 0.6.10", "flashinfer-world-rendezvous"]
    assert old.needs_hand
    assert "vLLM issue 45917" in old.found
    assert old.advice == "install flashinfer-python 0.7.2.post1 or newer"
    assert not rows["defect of nccl 2.28.9", "nccl-window-grid-barrier"].needs_hand
