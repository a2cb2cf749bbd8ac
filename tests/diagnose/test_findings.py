"""What leaves the room: findings as JSON and in one line, and what lines of logs mean."""

from __future__ import annotations

import ast
import json
import re
from importlib.resources import files
from pathlib import Path

import pytest

from tests.trace.made import group
from workbench.diagnose import Certainty, Finding, Kind, explain_log_line

ROOT = Path(__file__).parents[2]
FINDING = Finding(
    code="call.shape",
    kind=Kind.SHAPE_MISMATCH,
    ranks=(1, 2, 3),
    group=group("tp", 0, 1, 2, 3),
    message="the shape differs.",
    evidence=("one", "two"),
    certainty=Certainty.LIKELY,
    fix="agree on it",
)


def test_a_finding_as_json_has_all_fields_in_a_fixed_order() -> None:
    assert json.loads(json.dumps(FINDING.to_json())) == {
        "code": "call.shape",
        "kind": "shape-mismatch",
        "ranks": [1, 2, 3],
        "group": {"kind": "tp", "world_ranks": [0, 1, 2, 3], "label": "tp", "ordinal": 1, "generation": 0},
        "message": "the shape differs.",
        "evidence": ["one", "two"],
        "certainty": "likely",
        "fix": "agree on it",
        "consequence": False,
    }
    fields = ["code", "kind", "ranks", "group", "message", "evidence", "certainty", "fix", "consequence"]
    assert list(FINDING.to_json()) == fields


def test_a_finding_prints_on_one_line() -> None:
    assert str(FINDING) == (
        "shape-mismatch on tp[0,1,2,3] by world ranks 1-3 (likely): the shape differs. Try: agree on it"
    )


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (
            "[rank3]:[E ProcessGroupNCCL.cpp:632] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(",
            "missing-call",
        ),
        (
            "INFO 05-01 shm_broadcast.py:466] No available shared memory broadcast block found in 60 second(s).",
            "stalled",
        ),
        ("torch.distributed.DistStoreError: wait timeout after 2000ms, keys: /default_pg/0//cpu//0/2", "store-timeout"),
        ("RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:44093", "peer-dead"),
        ("RuntimeError: [..] Read error [127.0.0.1]:12685: Connection reset by peer", "peer-dead"),
        (
            "RuntimeError: [..unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
            "missing-call",
        ),
        ("The server socket has failed to listen on any local network address. EADDRINUSE", "environment"),
        ("ValueError: Global rank 0 is not part of group <torch.distributed.ProcessGroup object>", "wrong-root"),
        ("RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective:", "op-mismatch"),
        ("CUDA error: operation not permitted when stream is capturing", "capture-collective"),
        ("INFO custom_all_reduce.py Registering 0 cuda graph addresses", "capture-count-mismatch"),
        ("RuntimeError: CUDA error: invalid argument in cudaIpcGetMemHandle", "handle-failure"),
        (
            "torch.distributed.DistBackendError: NCCL error: unhandled system error, NCCL version 2.27.3",
            "peer-exception",
        ),
        (
            "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
            "peer-exception",
        ),
        (
            "node1:4711:4822 [3] misc/socket.cc:483 NCCL WARN socketStartConnect: Connect to 10.0.0.2 failed",
            "peer-exception",
        ),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has", "peer-exception"),
        ("torch.AcceleratorError: CUDA error: an illegal memory access was encountered", "peer-exception"),
        ("Fatal Python error: Segmentation fault", "peer-dead"),
        ("failed (exitcode: -11) local_rank: 2 (pid: 4711) of binary: /usr/bin/python", "peer-dead"),
        ("[rank1]:[E ProcessGroupNCCL.cpp:684] Some NCCL operations have failed or timed out. Due to", "missing-call"),
        (
            "WARNING Custom allreduce is disabled because your platform lacks GPU P2P capability or P2P test failed.",
            "path-divergence",
        ),
        (
            "WARNING Custom allreduce is disabled because it's not supported on more than two PCIe-only GPUs.",
            "path-divergence",
        ),
        ("Failed: Cuda error /workspace/csrc/custom_all_reduce.cuh:455 'invalid argument'", "handle-failure"),
        ("[enforce fail at pair.cc:446] op.preamble.length <= op.nbytes. 64 vs 32", "shape-mismatch"),
        ("[Errno 98] Address already in use", "environment"),
        (
            "torch.distributed.DistStoreError: Timed out after 31 seconds waiting for clients. 1/2 joined.",
            "store-timeout",
        ),
        ("Ranks 2 failed to pass monitoredBarrier in 2000 ms", "rendezvous-partial"),
    ],
)
def test_lines_that_people_search_for_are_known(line: str, kind: str) -> None:
    explanation = explain_log_line(line)
    assert explanation is not None
    assert explanation.kind == kind
    assert explanation.to_json()["kind"] == kind
    assert explanation.fix in str(explanation)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("Custom allreduce is disabled because your platform lacks GPU P2P capability", "custom-disabled-p2p"),
        (
            "Custom allreduce is disabled because it's not supported on more than two PCIe-only GPUs",
            "custom-disabled-pcie",
        ),
        ("Custom allreduce is disabled due to an unsupported world size: 3.", "custom-disabled"),
        ("custom_all_reduce.cuh:37 invalid argument", "custom-invalid-argument"),
        ("NCCL WARN Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000", "driver"),
        ("Signal 11 (SIGSEGV) received by PID 4711", "segfault"),
        ("Signal 9 (SIGKILL) received by PID 4711", "unresponsive"),
    ],
)
def test_of_several_entries_the_one_that_says_most_is_given(line: str, code: str) -> None:
    explanation = explain_log_line(line)
    assert explanation is not None
    assert explanation.code == code


def test_a_connection_that_ended_is_told_as_a_consequence_and_each_sentence_ends() -> None:
    explanation = explain_log_line("recvValue failed: Connection reset by peer")
    assert "This line is a consequence" in str(explanation)
    assert "Try: look at the output of the other ranks first" in str(explanation)
    assert str(explanation).endswith("puts the first cause first. Read on: notebooks/07_xray.ipynb")


@pytest.mark.parametrize("line", ["", "step 100 loss 2.31", "INFO: Started server process [4711]", "timeout=60"])
def test_other_lines_are_not_explained(line: str) -> None:
    assert explain_log_line(line) is None


def test_every_entry_names_a_notebook_that_is_there() -> None:
    entries = json.loads(files("workbench.diagnose").joinpath("log_lines.json").read_text())
    assert len(entries) == len({e["code"] for e in entries}) >= 20
    for entry in entries:
        assert (ROOT / "notebooks" / f"{entry['notebook']}.ipynb").exists(), entry["code"]


def test_every_rule_says_its_example_claim_evidence_and_what_to_try() -> None:
    rules = sorted((ROOT / "workbench/diagnose/rules").glob("[!_]*.py"))
    assert len(rules) >= 12
    for path in rules:
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        headings = [
            line.partition(":")[0] for line in text.splitlines() if re.match(r"(Example|Claim|Evidence|Try): ", line)
        ]
        assert headings == ["Example", "Claim", "Evidence", "Try"], path.name
