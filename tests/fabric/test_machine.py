"""Pins the simulated machines, rank placement, and that a user's file is either understood or refused in one line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import ArgumentError, WorkbenchError
from workbench.fabric import SIMULATED, Allocator, Fabric, Machine, describe_host, read_machine, simulated
from workbench.ranks import GroupKey

SMALL: dict[str, Any] = {"schema": 1, "name": "mine", "nodes": 2, "gpus_per_node": 2, "arch": "sm90", "nvlink": "all"}


def write(path: Path, document: object) -> str:
    file = path / "machine.json"
    file.write_text(document if isinstance(document, str) else json.dumps(document))
    return str(file)


def whole(machine: Machine) -> Fabric:
    ranks = tuple(range(machine.num_devices))
    return Fabric(GroupKey("world", ranks), tuple(machine.facts_of(r) for r in ranks))


def test_the_shipped_machines_are_what_their_names_say() -> None:
    # devices, hosts, architecture, one clique, NVLink within hosts, multicast attribute
    expected = {
        "h100x8": (8, 1, "sm90", False, True, True),
        "h200x8-nomc": (8, 1, "sm90", False, True, False),
        "h200x2": (2, 1, "sm90", False, True, False),
        "b200x8": (8, 1, "sm100", False, True, True),
        "gb200-4x4": (16, 4, "sm100", True, True, True),
        "gb200-2x4": (8, 2, "sm100", True, True, True),
        "gb200-4x4-two-cliques": (16, 4, "sm100", False, True, True),
        "pcie-pairs": (4, 1, "sm90", False, False, False),
        "ib-2x8": (16, 2, "sm90", False, True, True),
    }
    assert tuple(expected) == SIMULATED
    for name, told in expected.items():
        fabric = whole(simulated(name))
        found = (
            fabric.key.size,
            len({f.host for f in fabric.facts}),
            fabric.arch.reason,
            fabric.one_clique.ok,
            fabric.nvlink.ok,
            fabric.facts[0].multicast_supported,
        )
        assert found == told, name
        assert fabric.devices.ok
        assert fabric.p2p.ok


def test_ranks_are_placed_consecutively() -> None:
    machine = simulated("gb200-4x4")
    assert [machine.facts_of(r).node for r in (0, 3, 4, 7, 8, 15)] == [
        "node0", "node0", "node1", "node1", "node2", "node3",
    ]  # fmt: skip
    assert len({machine.facts_of(r).device for r in range(16)}) == 16
    with pytest.raises(ArgumentError, match="world rank 16 has no GPU on gb200-4x4: 4 nodes of 4 GPUs are 16"):
        machine.facts_of(16)


def test_machines_survive_json_and_print_on_one_line(tmp_path: Path) -> None:
    for name in SIMULATED:
        machine = simulated(name)
        assert Machine.from_json(json.loads(json.dumps(machine.to_json()))) == machine
        assert read_machine(write(tmp_path, machine.to_json())) == machine
        assert "\n" not in str(machine)
    assert str(simulated("gb200-4x4-two-cliques")) == (
        "gb200-4x4-two-cliques (simulated): four GB200 trays, cut into two NVLink cliques; 4 x 4 GB200 (sm100), "
        "2 NVLink cliques, allocator plain, multicast"
    )


def test_a_users_file_may_leave_most_out_and_say_what_single_ranks_have_otherwise(tmp_path: Path) -> None:
    differing = {"1": {"allocator": "vmm-fabric", "peer_access": False}, "3": {"arch": "sm100", "in_clique": False}}
    machine = read_machine(write(tmp_path, {**SMALL, "cliques": [[0, 1]], "differing": differing}))
    assert Machine.from_json(machine.to_json()) == machine
    assert [machine.facts_of(r).allocator for r in range(4)] == [
        Allocator.PLAIN, Allocator.VMM_FABRIC, Allocator.PLAIN, Allocator.PLAIN,
    ]  # fmt: skip
    assert [machine.facts_of(r).arch for r in range(4)] == ["sm90", "sm90", "sm90", "sm100"]
    fabric = whole(machine)
    assert fabric.p2p.reason == "peer access from world rank 1 to world rank 0 fails (simulated)"
    assert fabric.one_clique.reason.startswith("world rank 3 in no NVLink clique")


@pytest.mark.parametrize("name", ["h100x8", "h200x8-nomc", "h200x2", "b200x8", "pcie-pairs"])
def test_a_host_is_described_from_what_its_gpus_say_of_themselves(name: str) -> None:
    machine = simulated(name)
    facts = [machine.facts_of(rank) for rank in range(machine.num_devices)]
    assert describe_host(facts, name=machine.name, about=machine.about) == machine


def test_gpus_of_one_host_that_differ_are_told_apart_and_several_hosts_are_refused() -> None:
    change = {"differing": {"1": {"arch": "sm100", "multicast": True}, "3": {"allocator": "vmm-fabric"}}}
    machine = Machine.from_json({**SMALL, "nodes": 1, "gpus_per_node": 4, "nvlink": [[0, 2, 3]], **change})
    facts = [machine.facts_of(rank) for rank in range(4)]
    told = describe_host(facts, name="mine", about="probed").to_json()
    assert (told["nvlink"], told["differing"]) == ([[0, 2, 3]], change["differing"])
    assert Machine.from_json(told).to_json() == told
    two = simulated("ib-2x8")
    with pytest.raises(ArgumentError, match="GPUs of one host make a description; these are 16 ranks on 2 hosts"):
        describe_host([two.facts_of(rank) for rank in range(16)], name="mine", about="probed")


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ({}, "fields 'schema', 'name', 'nodes', 'gpus_per_node', 'arch' are missing"),
        ({"schema": 1, "name": "mine", "arch": "sm90"}, "fields 'nodes', 'gpus_per_node' are missing"),
        ({"schema": 1, "name": "mine", "arch": "sm90", "nodes": 1}, "field 'gpus_per_node' is missing"),
    ],
)
def test_all_missing_fields_are_told_at_once_with_where_to_start(
    tmp_path: Path, document: dict[str, Any], told: str
) -> None:
    with pytest.raises(ArgumentError) as refused:
        read_machine(write(tmp_path, document))
    advice = "; `workbench why --show-machine h100x8` prints a whole description to start from"
    assert str(refused.value).endswith(f": {told}{advice}")


@pytest.mark.parametrize(("asked", "nearest"), [("h200x8", "h200x8-nomc"), ("gb200-4x8", "gb200-4x4")])
def test_a_name_that_is_no_machine_gets_the_nearest_and_all(asked: str, nearest: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        read_machine(asked)
    assert str(refused.value) == (
        f"no machine is called '{asked}'; allowed: h100x8, h200x8-nomc, h200x2, b200x8, gb200-4x4, gb200-2x4, "
        f"gb200-4x4-two-cliques, pcie-pairs, ib-2x8, or a path to a .json file; nearest name: '{nearest}'"
    )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"schema": 3}, "schema is 3"),
        ({"nodes": 0}, "nodes is 0; allowed: a whole number from 1 to 1024"),
        ({"nodes": 1e3}, "nodes is 1000.0"),
        ({"nodes": 10**30}, "nodes is 1000000000000000000000000000000"),
        ({"nodes": 10**60}, "nodes is an integer of 200 bits"),
        ({"nodes": 1024, "gpus_per_node": 32}, "32768 devices; allowed: 8192"),
        ({"gpus_per_node": "8"}, "gpus_per_node is '8'"),
        ({"name": "../x"}, "name is '../x'"),
        ({"name": "a" * 65}, "name is"),
        ({"arch": "sm9"}, "arch is 'sm9'"),
        ({"about": "two\nlines"}, "about is 'two\\nlines'"),
        ({"about": "\x1b[31mred"}, "about is"),
        ({"nvlink": "some"}, "nvlink is 'some'; allowed: a list"),
        ({"nvlink": [[0, 2]]}, "nvlink must be lists of local GPU numbers from 0 to 1"),
        ({"nvlink": [[0], [0]]}, "none of them twice"),
        ({"nvlink": [0, 1]}, "nvlink must be lists"),
        ({"nvlink": [[True]]}, "nvlink must be lists"),
        ({"cliques": [[2]]}, "cliques must be lists of node numbers from 0 to 1"),
        ({"cliques": [[]]}, "cliques must be lists"),
        (
            {"allocator": "cudaMalloc"},
            "allocator is 'cudaMalloc'; allowed: one of none, plain, vmm-posix-fd, vmm-fabric",
        ),
        ({"multicast": "yes"}, "multicast is 'yes'; allowed: true or false"),
        ({"differing": {"4": {}}}, "world ranks from 0 to 3"),
        ({"differing": {"-1": {}}}, "world ranks from 0 to 3"),
        ({"differing": {"²": {}}}, "world ranks from 0 to 3"),
        ({"differing": {"1": {"colour": 1}}}, "unknown field 'colour'"),
        ({"nvlnk": "all"}, "unknown field 'nvlnk'; nearest name: 'nvlink'"),
    ],
)
def test_a_field_that_does_not_fit_is_refused_by_name(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        read_machine(write(tmp_path, {**SMALL, **change}))
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "not a JSON document"),
        ("[]", "a list stands here"),
        ("null", "null stands here"),
        ("{", "not a JSON document"),
        ('{"schema": 1, "schema": 1}', "'schema' stands twice"),
        ('{"schema": NaN}', "NaN is no JSON number"),
        ('{"schema": ' + "9" * 5000 + "}", "not a JSON document"),
        ("[" * 200_000, "too deeply nested"),
        ('{"a":' * 50_000, "too deeply nested"),
        (" " * (1 << 20) + "{}", "larger than 1048576 bytes"),
    ],
    ids=range(10),
)
def test_a_text_that_is_no_object_is_refused(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        read_machine(write(tmp_path, text))
    assert told in str(refused.value)


def test_a_path_that_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "latin.json").write_bytes(b"\xff\xfe")
    for path, told in {
        str(tmp_path): "directory",
        str(tmp_path / "pipe.json"): "not a regular file",
        "/dev/zero": "not a regular file",
        str(tmp_path / "none.json"): "No such file",
        str(tmp_path / "latin.json"): "not text in UTF-8",
        "a\0b.json": "not a file name",
        "gb300x72": "no machine is called 'gb300x72'; allowed: h100x8",
    }.items():
        with pytest.raises(ArgumentError) as refused:
            read_machine(path)
        assert told in str(refused.value), path


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(field=st.sampled_from([*SMALL, "cliques", "differing", "allocator", "num_sms"]), value=JSON_VALUES)
def test_any_value_in_any_field_is_either_understood_or_refused(field: str, value: object) -> None:
    machine, problem = None, ""
    try:
        machine = Machine.from_json({**SMALL, field: value})
    except WorkbenchError as e:
        problem = str(e)
    assert (machine is None) == bool(problem)
    assert "\n" not in problem
    assert machine is None or Machine.from_json(machine.to_json()) == machine
