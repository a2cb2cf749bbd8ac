"""What leaves the room: findings as JSON and in one line, and what lines of logs mean."""

from __future__ import annotations

import ast
import json
import re
from datetime import timedelta
from importlib.resources import files
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.forked import run_ranks
from tests.trace.made import group
from workbench.diagnose import Certainty, Finding, Kind, explain_log_line

ROOT = Path(__file__).parents[2]
NCCL_ERROR = "DistBackendError: NCCL error in: /torch/csrc/distributed/c10d/NCCLUtils.cpp:77, {}, NCCL version 2.27.5"
SOCKET = "[W1130 08:46:16.594 socket.cpp:764] [c10d] The client socket has"
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
            "torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0//cpu//0/rank_1",
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
        ("gpu1:47:48 [0] misc/cudawrap.cc:30 NCCL WARN Cuda failure 'out of memory'", "gpu-memory"),
        ("gpu1:47:48 [0] misc/cudawrap.cc:30 NCCL WARN Cuda failure 2 'out of memory'", "gpu-memory"),
        (
            "NCCL WARN socketStartConnect: Connect to 10.0.0.4<379> failed : Software caused connection abort",
            "nccl-connect",
        ),
        ("NCCL WARN socketStartConnect: Connect to 10.0.0.4<379> failed : No route to host", "no-route"),
        ("NCCL WARN Bootstrap : no socket interface found", "nccl-warn"),
        (NCCL_ERROR.format("internal error - please report this issue to the NCCL developers"), "nccl-internal"),
        (NCCL_ERROR.format("unhandled cuda error (run with NCCL_DEBUG=INFO for details)"), "nccl-cuda"),
        (NCCL_ERROR.format("unhandled system error (run with NCCL_DEBUG=INFO for details)"), "nccl-system"),
        (NCCL_ERROR.format("invalid usage (run with NCCL_DEBUG=WARN for details)"), "nccl-usage"),
        (NCCL_ERROR.format("invalid argument (run with NCCL_DEBUG=WARN for details)"), "nccl-usage"),
        (NCCL_ERROR.format("remote process exited or there was a network error"), "nccl-remote"),
        (NCCL_ERROR.format("unknown result code"), "nccl-error"),
        ("NCCL communicator was aborted on rank 1.  Original reason for failure was: a timeout", "nccl-aborted"),
        (f"{SOCKET} failed to connect to [node0]:29500 (errno: 113 - No route to host).", "no-route"),
        (f"{SOCKET} failed to connect to [node0]:29500 (errno: 101 - Network is unreachable).", "no-route"),
        (f"{SOCKET} failed to connect to [node0]:29500 (errno: 111 - Connection refused).", "port-refused"),
        (f"{SOCKET} timed out after 2000ms while trying to connect to (10.0.0.1, 29500).", "host-unreachable"),
        (
            "[c10d] The IPv6 network addresses of (nohost.invalid, 29778) cannot be retrieved "
            "(gai error: -2 - Name or service not known).",
            "name-unresolved",
        ),
        (
            "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
            "store-gone",
        ),
        (
            "[PG ID 0 Rank 1] ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress",
            "watchdog-stuck",
        ),
        ("terminate called without an active exception", "aborted-at-exit"),
        ("ProcessGroupNCCL.cpp:5188] Guessing device ID based on global rank. This can cause a hang", "device-guessed"),
    ],
)
def test_of_several_entries_the_one_that_says_most_is_given(line: str, code: str) -> None:
    explanation = explain_log_line(line)
    assert explanation is not None
    assert explanation.code == code


def test_ranks_that_never_joined_the_store_are_counted_and_are_no_key_that_nobody_wrote() -> None:
    line = "torch.distributed.DistStoreError: Timed out after 301 seconds waiting for clients. 3/4 clients joined."
    explanation = explain_log_line(line)
    assert explanation is not None
    assert (explanation.code, explanation.kind) == ("store-clients", Kind.RENDEZVOUS_PARTIAL)
    assert explanation.says.startswith("1 of 4 did not join the job's store at its start, within 301 s. ")
    assert "key" not in str(explanation)
    assert "compare MASTER_ADDR, MASTER_PORT, WORLD_SIZE and --nnodes on all" in explanation.fix


STATUS = "[PG ID 0 PG GUID 0(default_pg) Rank 0]  failure detected by watchdog at work sequence id: 5 PG status: "
CAME = "it came to call"
ALL_DONE = "that it enqueued, and waits for none: if another rank of the group has enqueued more, it waits for this one"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (f"{STATUS}last enqueued work: 9, last completed work: 4", f"calls 5 to 9 and not finished them: {CAME} 5,"),
        (
            f"{STATUS}last enqueued work: 5, last started work: -1, last completed work: 4",
            f"not finished it: {CAME} 5,",
        ),
        (f"{STATUS}last enqueued work: 2, last completed work: -1", f"calls 1 to 2 and not finished them: {CAME} 1,"),
        (
            "dump. Last enqueued NCCL work: 4, last completed NCCL work: 4.This is",
            f"finished all 4 calls {ALL_DONE} in call 5.",
        ),
        (f"{STATUS}last enqueued work: -1, last completed work: -1", f"finished all 0 calls {ALL_DONE} in call 1."),
        (f"{STATUS}last enqueued work: 4, last completed work: 7", "not fit together: 7 calls done, and 4 enqueued."),
    ],
)
def test_the_watchdogs_two_numbers_tell_a_rank_that_waits_from_one_that_is_waited_for(line: str, told: str) -> None:
    explanation = explain_log_line(line)
    assert explanation is not None
    assert explanation.code == "nccl-status"
    assert told in explanation.says


def raise_torchs_own(_: int) -> list[str]:
    """In a process of its own: what torch records and starts here must not be in other tests' ranks."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="twice") as twice:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.ModuleList([torch.nn.Linear(1, 1) for _ in "ab"]))
        model.module.forward = lambda x: model.module[0](x)  # type: ignore[operator,union-attr]  # the second is left out
        with pytest.raises(RuntimeError, match="prior iteration") as unfinished:
            for _ in range(2):
                model(torch.ones(1, 1)).sum().backward()
    finally:
        dist.destroy_process_group()
    with pytest.raises(ValueError, match="not been initialized") as absent:
        dist.barrier()
    with pytest.raises(dist.DistStoreError) as alone:
        dist.TCPStore("127.0.0.1", 0, 3, is_master=True, timeout=timedelta(seconds=1))
    return [str(e.value) for e in (twice, unfinished, absent, alone)]


def test_torchs_own_texts_are_known_as_this_version_raises_them() -> None:
    (texts,) = run_ranks(1, raise_torchs_own)
    told = [explain_log_line(text) for text in texts]
    assert [t and t.code for t in told] == ["initialised-twice", "ddp-unfinished", "not-initialised", "store-clients"]
    assert told[3] is not None
    assert told[3].says.startswith("2 of 3 did not join")


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
