"""What four tools say about each faulty program of tests/bugs/programs: a markdown table, and the same as JSON.

    python benchmarks/xray_table.py --out benchmarks/DATE-xray [--only NAME ...]

Each program runs four times on CPU ranks, which are forked with torch imported and started as torchrun would: as it is;
with TORCH_DISTRIBUTED_DEBUG=DETAIL; with torch's Flight Recorder, dumped ten times a second and read by torchfrtrace;
and recorded by the workbench. Ranks that neither compute nor say anything for QUIET_S hang and are ended. What a tool
says is the first line in which it complains, shortened; "silent" is a run with status 0 and without a complaint. Rows
that the directory holds already are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: a forked rank must not inherit a thread pool it cannot use
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist

from tests.bugs.run_program import World, run_program, run_world
from tests.bugs.test_programs import FAULTY

QUIET_S = 6.0
COMPLAINT = re.compile(r"^(?:\[rank\d+\]: ?)?((?:[\w.]+\.)?\w*(?:Error|Exception)\b.*)")
NOISE = re.compile(r" at 0x[0-9a-f]+|\[127\.0\.0\.1\]:\d+|/\S+/(?=gloo/)")
WIDTH = 110


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory for table.md and table.json")
    parser.add_argument("--only", nargs="*", help="names of programs")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / "table.json"
    rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"] if file.exists() else []
    done = {row["program"] for row in rows}
    for (name, num_ranks), (kind, ranks, _) in FAULTY.items():
        if name in done or (arguments.only and name not in arguments.only):
            continue
        row = {"program": name, "num_ranks": num_ranks, "wanted": f"{kind}: {ranks_words(ranks)}"}
        row["torch"] = told(run(name, num_ranks, lambda: None))
        row["detail"] = told(run(name, num_ranks, lambda: dist.set_debug_level(dist.DebugLevel.DETAIL)))
        row["flight_recorder"] = flight_recorder(name, num_ranks)
        row["workbench"] = workbench(name, num_ranks)
        rows.append(row)
        print(json.dumps(row), flush=True)
        document = {"command": " ".join(["python", *sys.argv]), "torch": torch.__version__, "rows": rows}
        file.write_text(json.dumps(document, indent=1) + "\n")
        (arguments.out / "table.md").write_text(markdown(rows))


def run(name: str, num_ranks: int, prepare: Callable[[], None]) -> World:
    with tempfile.TemporaryDirectory() as directory:
        return run_world(
            name, num_ranks, Path(directory), correct=False, prepare=prepare, quiet_s=QUIET_S, look=lambda: "hangs"
        )


def told(world: World) -> str:
    """The first complaint that a run printed, or that it printed none."""
    found = [m[1] for m in map(COMPLAINT.match, world.output.splitlines()) if m]
    aborted = ["a rank aborts"] if any(s < 0 and s not in (-9, -15) for s in world.statuses) else []
    killed = ["a rank is killed"] if world.hung is None and -9 in world.statuses else []
    hangs = ["hangs"] if world.hung else []
    return shorten("; ".join([*hangs, *aborted, *killed, *found[:1]]) or "silent")


def flight_recorder(name: str, num_ranks: int) -> str:
    """What torchfrtrace says of the dumps of a run."""
    with tempfile.TemporaryDirectory() as directory:
        run(name, num_ranks, lambda: keep_dumping(Path(directory)))
        if not list(Path(directory).glob("fr_*")):
            return "no dump"
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", directory, "-p", "fr_"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    lines = (done.stdout + done.stderr).splitlines()
    complaint = next((m[1] for m in map(COMPLAINT.match, reversed(lines)) if m), "")
    culprit = next((line for line in lines if "culprit" in line or "mismatch" in line.lower()), "")
    return shorten(culprit or complaint or "nothing found")


def keep_dumping(directory: Path) -> None:
    """In a rank: dump torch's Flight Recorder ten times a second, into a file that is always whole."""
    from torch._C._distributed_c10d import _dump_fr_trace

    os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"
    path = directory / f"fr_{os.environ['RANK']}"
    part = directory.with_name(f"{directory.name}-{path.name}")

    def keep() -> None:
        while True:
            time.sleep(0.1)
            part.write_bytes(_dump_fr_trace())
            part.rename(path)

    threading.Thread(target=keep, daemon=True).start()
    leave = os._exit

    def dump_and_leave(status: int) -> None:
        part.write_bytes(_dump_fr_trace())
        part.rename(path)
        leave(status)

    os._exit = dump_and_leave  # type: ignore[assignment]


def workbench(name: str, num_ranks: int) -> str:
    """The first finding: kind, ranks, certainty."""
    with tempfile.TemporaryDirectory() as directory:
        findings = run_program(name, num_ranks, Path(directory), correct=False, quiet_s=QUIET_S).verdict.findings
    if not findings:
        return "no finding"
    likely = ", likely" if findings[0].certainty == "likely" else ""
    return f"{findings[0].kind}: {ranks_words(findings[0].ranks)}{likely}"


def ranks_words(ranks: tuple[int, ...]) -> str:
    return f"world rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def shorten(text: str) -> str:
    text = NOISE.sub("", text).replace("|", "\\|").strip()
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}..."


def markdown(rows: list[dict[str, Any]]) -> str:
    names = ("program", "torch", "detail", "flight_recorder", "workbench")
    lines = ["| program | torch | torch, DETAIL | Flight Recorder | workbench |", "| --- | --- | --- | --- | --- |"]
    lines += ["| " + " | ".join(f"`{row[n]}`" if n == "program" else row[n] for n in names) + " |" for row in rows]
    right = sum(row["workbench"].removesuffix(", likely") == row["wanted"] for row in rows)
    return "\n".join(
        [*lines, "", f"The workbench names the kind and the ranks first in {right} of {len(rows)} programs.", ""]
    )


if __name__ == "__main__":
    main()
