"""Pins `workbench why`: what it says of sixteen ranks, of every kind of a layout, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from workbench.errors import ArgumentError, LayoutError, WorkbenchError
from workbench.fabric import simulated
from workbench.settings import Settings
from workbench.why import Answer, explain

ROOT = Path(__file__).parent.parent


def why(system: str = "sglang", machine: str = "gb200-4x4", **more: Any) -> Answer:
    sizes = more.pop("sizes", {"tp": 16})
    asked = {"hidden": 7168, "tokens": 1, "settings": Settings(), "variables": (), **more}
    return explain(system, sizes, machine=machine, **asked)


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "workbench", "why", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, **variables},
        check=False,
    )


UNFUSED = Settings(fusion=False)
TP16 = ("sglang", "--size", "tp=16", "--hidden", "7168", "--tokens", "1")


def test_sixteen_ranks_of_one_clique_take_the_custom_path() -> None:
    done = run(*TP16, "--machine", "gb200-4x4", "--kind", "attention_tp")
    assert (done.returncode, done.stderr) == (0, "")
    assert "tp[0..15] (also attention_tp, moe_tp): custom.fused.push (default)" in done.stdout
    assert "has    staged" in done.stdout
    assert "one NVLink clique" in done.stdout


@pytest.mark.parametrize(
    ("machine", "missing"),
    [
        ("gb200-4x4-two-cliques", "in 2 NVLink cliques"),
        ("ib-2x8", "world ranks 0..15 in no NVLink clique"),
        ("ib-2x8", "table sm90 has no width 16"),
    ],
)
def test_where_sixteen_ranks_have_no_custom_path_the_missing_thing_is_named(machine: str, missing: str) -> None:
    answer = why(machine=machine, kind="tp")
    assert [g.plan.choice for g in answer.groups] == ["nccl"]
    assert missing in str(answer)


def test_every_kind_is_answered_and_groups_alike_are_drawn_once() -> None:
    answer = why(machine="b200x8", sizes={"tp": 8, "attn_cp": 2, "moe_ep": 4}, tokens=8)
    choices = {(g.key.kind, g.key.size): g.plan.choice for g in answer.groups}
    assert choices == {
        ("world", 8): "custom.fused.two_shot_push",
        ("tp", 8): "custom.fused.two_shot_push",
        ("attn_cp", 2): "custom.fused.push",
        ("attention_tp", 4): "custom.fused.push",
        ("moe_ep", 4): "custom.fused.push",
        ("moe_tp", 2): "custom.fused.push",
        ("pp", 1): "alone",
        ("self_pp", 1): "alone",
    }
    lines = str(answer).splitlines()
    assert "attn_cp[0, 4] and 3 more like it (also moe_dp): custom.fused.push (default)" in lines
    assert "pp: 8 groups of one rank, nothing to reduce" in lines
    assert max(map(len, lines)) < 300


def test_groups_that_differ_are_drawn_apart() -> None:
    answer = why(machine="pcie-pairs", sizes={"tp": 4, "attn_cp": 2}, kind="attention_tp")
    assert [g.plan.choice for g in answer.groups] == ["custom.fused.push", "custom.fused.push"]
    answer = why(machine="pcie-pairs", sizes={"tp": 4, "attn_cp": 2}, kind="attn_cp")
    assert "attn_cp[0, 2] and 1 more like it" in str(answer)
    assert "world ranks 0, 2 of node0 are not connected by NVLink" in str(answer)


def test_the_json_document_holds_every_group_with_bytes_standing_and_reasons() -> None:
    done = run(*TP16, "--machine", "gb200-4x4", "--json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["schema"], document["label"]) == (0, 1, "simulated")
    assert (document["message_bytes"], document["machine"]["name"]) == (14336, "gb200-4x4")
    tp = next(g for g in document["groups"] if g["kind"] == "tp")
    assert tp["aliases"] == ["attention_tp", "moe_tp"]
    assert tp["world_ranks"] == list(range(16))
    assert (tp["plan"]["standing"], tp["plan"]["workspace_bytes"]) == ("default", 430144)
    assert {name: verdict["ok"] for name, verdict in tp["capabilities"].items()} == {
        "staged": True,
        "graph_zero_copy_ipc": False,
        "graph_zero_copy_vmm": False,
        "multicast": False,
    }


def test_switches_and_retired_variables_are_seen_at_the_door() -> None:
    done = run(
        *TP16,
        *("--machine", "gb200-4x4", "--kind", "tp", "--json"),
        WORKBENCH_FUSION="0",
        SGLANG_ENABLE_CUSTOM_ALL_REDUCE_V2_MULTINODE="1",
    )
    document = json.loads(done.stdout)
    assert document["groups"][0]["plan"]["choice"] == "nccl"
    assert document["groups"][0]["plan"]["rejected"][0] == ["custom.fused", "switched off by WORKBENCH_FUSION=0"]
    assert "rounds twice between sum and residual" in document["groups"][0]["plan"]["rejected"][1][1]
    unfused = why(settings=UNFUSED, rounding="twice", kind="tp")
    assert unfused.groups[0].plan.choice == "custom.push"
    assert "SGLANG_ENABLE_CUSTOM_ALL_REDUCE_V2_MULTINODE is set and does nothing" in done.stderr
    assert document["warnings"] == [done.stderr.strip()]
    custom_off = why(settings=Settings(custom_all_reduce=False), kind="tp")
    assert custom_off.groups[0].plan.choice == "nccl"
    assert "custom.fused, custom: switched off by WORKBENCH_CUSTOM_ALL_REDUCE=0" in str(custom_off)


def test_multicast_is_allowed_by_its_setting_alone() -> None:
    asked = {"sizes": {"tp": 8}, "tokens": 64, "kind": "tp", "rounding": "twice"}
    asked["settings"] = Settings(multicast=True, fusion=False)  # the fused kernel would take it
    allowed = why(machine="h100x8", **asked)
    assert allowed.groups[0].plan.choice == "custom.multicast"
    absent = why(machine="h200x8-nomc", **asked)
    assert absent.groups[0].plan.choice == "custom.two_shot_pull"
    assert "world ranks 0..7 without multicast" in str(absent)


def test_where_a_kernel_is_missing_the_answer_says_what_this_build_does() -> None:
    asked = {"machine": "h100x8", "sizes": {"tp": 8}, "kind": "tp", "rounding": "twice", "settings": UNFUSED}
    answer = why(tokens=64, **asked)  # 896 KiB a rank: an algorithm that nobody has written
    assert (answer.groups[0].plan.choice, answer.groups[0].here.choice) == ("custom.two_shot_pull", "nccl")
    told = [line for line in str(answer).splitlines() if line.startswith("  build  nccl for now; custom: ")]
    assert len(told) == 1
    assert told[0].endswith("no kernel for two_shot_pull in this build")
    assert answer.to_json()["groups"][0]["this_build"]["choice"] == "nccl"
    small = why(tokens=1, **asked)
    assert (small.groups[0].here.choice, small.groups[0].plan.choice) == ("custom.push",) * 2
    assert "build" not in str(small)


def test_a_users_machine_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(
        json.dumps({**simulated("h100x8").to_json(), "name": "mine", "differing": {"5": {"nvlink": False}}})
    )
    answer = why(machine=str(file), sizes={"tp": 8}, kind="tp")
    assert answer.groups[0].plan.choice == "nccl"
    assert "world ranks 0, 5 of node0 are not connected by NVLink" in str(answer)


def test_model_names_are_looked_up_in_sglangs_list() -> None:
    answer = why(model="Qwen3MoeForCausalLM")
    assert answer.model is not None
    assert (answer.model[0], answer.model[2].ok) == ("Qwen3Moe", True)
    refused = why(model="Qwen3Next2").model
    assert refused is not None
    assert refused[2].reason == "Qwen3Next2 is not on the list of models (nearest listed: Qwen3Next)"
    bogus = why(model="Bogus").model
    assert bogus is not None
    assert bogus[2].reason == (
        "Bogus is not on the list of models (listed: DeepseekV3, DeepseekV32, DeepseekV4, GptOss, GlmMoeDsa, Glm4Moe, "
        "Glm4MoeLite, MistralLarge3, Qwen3Moe, Qwen3VLMoe, Qwen3Next, KimiK25, Qwen3_5Moe, Qwen3_5, InternS2Preview, "
        "NemotronH, NemotronHPuzzle)"
    )
    with pytest.raises(ArgumentError, match="only SGLang keeps a list of models; leave it out for vllm"):
        why("vllm", sizes={"tp": 8}, model="Qwen3Moe")


def test_versions_of_the_engine_are_asked_on_request() -> None:
    answer = why("vllm", machine="b200x8", sizes={"tp": 4, "pp": 2}, kind="tp", upstream=True)
    assert [(rule.id, verdict.ok) for rule, verdict in answer.groups[0].upstream] == [
        ("no-pp-no-dp", False),
        ("gate-lifted", True),
        ("no-pp", False),
        ("group-passed", True),
        ("sixteen-ranks", True),
    ]
    large = why("vllm", machine="b200x8", sizes={"tp": 8}, tokens=2048, kind="tp", upstream=True)
    assert [verdict.ok for _, verdict in large.groups[0].upstream] == [False] * 5
    assert "no: 28 MiB a rank is above the 1 MiB up to which tp=8 is fused on sm100" in str(large)
    assert why("megatron", machine="b200x8", sizes={"tp": 8}, upstream=True).warnings == (
        "no rules of megatron are kept; there are those of sglang, vllm",
    )


def test_an_engine_is_not_said_to_fuse_over_groups_that_it_never_asks_about() -> None:
    answer = why("vllm", machine="h100x8", sizes={"tp": 4, "dp": 2}, hidden=8192, tokens=64, upstream=True)
    groups = [group.splitlines() for group in str(answer).split("\n\n")]
    asked = {lines[0].split("[")[0]: [line for line in lines if line.startswith("  asked")] for lines in groups}
    versions = "(no-pp-no-dp, gate-lifted, no-pp, group-passed, sixteen-ranks)"
    for kind in ("world", "dp"):
        told = f"  asked  vllm fusion: no: it works on tp groups alone, and this one is {kind} {versions}"
        assert asked[kind] == [told]
    assert [": yes: " in line for line in asked["tp"]] == [False, True, True, True, True]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"sizes": {"tp": 32}}, "the layout has 32 ranks, gb200-4x4 has 4 x 4 = 16 GPUs"),
        ({"machine": "dgx"}, "no machine is called 'dgx'; allowed: h100x8"),
        ({"kind": "moe"}, "'moe' is not a kind of this map"),
        ({"hidden": 0}, "hidden=0"),
        ({"dtype": "fp8"}, "dtype='fp8'"),
    ],
)
def test_bad_input_is_refused_with_what_is_allowed(more: dict[str, Any], told: str) -> None:
    with pytest.raises(WorkbenchError) as refused:
        why(**more)
    assert told in str(refused.value)
    assert isinstance(refused.value, ArgumentError | LayoutError)


def test_bad_input_ends_with_status_two_and_one_line() -> None:
    for arguments in (
        (*TP16, "--machine", "/dev/zero"),
        (*TP16, "--machine", "ib-2x8", "--size", "tp=8"),
        (*TP16, "--machine", "ib-2x8", "--tokens", "-1"),
        TP16,
    ):
        done = run(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.count("\n") == 1


def test_the_answer_does_not_need_torch() -> None:
    code = (
        "import sys; from workbench.why import explain; "
        "explain('sglang', {'tp': 8}, machine='h100x8', hidden=4096, tokens=1); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT, timeout=60).returncode == 0


def test_engine_local_kinds_are_refused() -> None:
    with pytest.raises(ArgumentError, match="count ranks inside one engine"):
        why("vllm", machine="b200x8", sizes={"tp": 2, "dp": 2, "elastic_ep": True, "eplb": True})


def test_a_table_of_another_architecture_is_told_to_decide_nothing(tmp_path: Path) -> None:
    shipped = ROOT / "workbench" / "plan" / "tables" / "sm100.json"
    cpu = tmp_path / "mine.json"
    cpu.write_text(json.dumps({**json.loads(shipped.read_text()), "table": "cpu-tuned", "arches": ["cpu"]}))
    asked = ("sglang", "--size", "tp=2", "--machine", "h200x2", "--hidden", "7168", "--tokens", "1", "--kind", "tp")
    told = "table cpu-tuned is for cpu, and h200x2 is sm90: it decides nothing here; the shipped table of sm90 decides"
    done = run(*asked, "--table", str(cpu), "--json")
    assert (done.returncode, done.stderr) == (0, f"{told}\n")
    answer = json.loads(done.stdout)
    assert answer["warnings"] == [told]
    assert answer["groups"] == json.loads(run(*asked, "--json").stdout)["groups"]
    b200 = why(machine="b200x8", sizes={"tp": 8}, table=str(shipped))
    assert b200.warnings == ()


def test_default_and_measured_are_explained_where_they_stand() -> None:
    default = (
        "(default): by published thresholds, a cost model or for want of another path, measured by nobody on such a "
        "machine; `workbench tune` there writes measured rows, and --table reads them"
    )
    measured = "(measured): by a row that was measured on the device its table names"
    sixteen = str(why(kind="tp")).splitlines()
    assert sixteen[-2:] == ["", default]
    pair = str(why(machine="h200x2", sizes={"tp": 2}, kind="tp")).splitlines()
    assert "tp[0, 1] (also attention_tp, moe_tp): custom.fused.push (measured)" in pair
    assert pair[-2:] == ["", measured]
    alone = str(why(machine="h200x2", sizes={"tp": 2}, kind="pp"))
    assert "(default)" not in alone
    assert "(measured)" not in alone


def test_the_trouble_of_a_version_is_told_beside_its_answer_and_none_where_none_is_known() -> None:
    answer = why(machine="b200x8", sizes={"tp": 8}, kind="tp", tokens=64, upstream=True)
    asked = [line for line in str(answer).splitlines() if line.startswith("  asked  sglang fusion")]
    assert asked == [
        "  asked  sglang fusion cp-limit (before 2026-03-24; sgl-project/sglang before #21249): "
        "yes: every condition holds; known trouble of that version: no fusion with context parallelism: one workspace "
        "over WORLD and an in-group root taken for a world rank could not serve subgroups",
        "  asked  sglang fusion subgroups (from 2026-03-24 or later; sgl-project/sglang#21249): "
        "yes: every condition holds",
    ]
