"""What each rank of a comparison does. Run by torchrun: `python -m workbench.bench.rank SPEC.json RESULT.json`."""

from __future__ import annotations

import datetime
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from workbench.backends.custom_build import build_cuda, why_no_kernels
from workbench.bench.files import write_whole
from workbench.launch import PROGRESS, end_with_starter
from workbench.measure import NO_MULTICAST, FusedSpec, measure_fused
from workbench.trace import Comparison


@record
def main() -> None:
    """Measure; world rank 0 writes the result, anew after each number of tokens."""
    end_with_starter()
    spec = FusedSpec.from_json(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    run_rank(spec, out=Path(sys.argv[2]), say=lambda text: print(f"{PROGRESS}{text}", flush=True))
    leave(0)


def run_rank(spec: FusedSpec, *, out: Path | None, say: Callable[[str], None]) -> Comparison:
    """The comparison on this rank. Past spec.limit_s the process ends with 1; only world rank 0 writes, and speaks.

    Nothing is closed: end the process with `leave`.   Collective: every rank of torchrun's job.
    """
    first = os.environ["RANK"] == "0"
    at = ["the start"]

    def tell(text: str) -> None:
        at[0] = text
        if first:
            say(text)

    def expire() -> None:
        say(f"ended after --limit {spec.limit_s:g} s; the last news: {at[0]}")  # whichever rank is first ends all
        os._exit(1)

    def save(comparison: Comparison) -> None:
        if first and out is not None:
            write_whole(out, json.dumps(comparison.to_json(), indent=1) + "\n")

    watch = threading.Timer(spec.limit_s, expire)
    watch.daemon = True
    watch.start()
    try:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // spec.ranks))
        if spec.device == "cuda":
            _start_cuda(spec)
        return measure_fused(spec, say=tell, save=save, leave_open=True)
    finally:
        watch.cancel()


def leave(status: int) -> None:
    """End the process without teardown: peers may have this rank's memory mapped, and other systems leave threads."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _start_cuda(spec: FusedSpec) -> None:
    """This rank's GPU, and NCCL as the default group, which other systems' kernels look for. Multicast stays off.

    The kernels are compiled before anybody waits for this rank.
    """
    os.environ.update(NO_MULTICAST)
    device = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(device)
    arch = "{}{}a".format(*torch.cuda.get_device_capability())
    if not why_no_kernels(arch):
        build_cuda(arch)
    dist.init_process_group(
        "nccl", device_id=torch.device("cuda", device), timeout=datetime.timedelta(seconds=spec.timeout_s)
    )


if __name__ == "__main__":
    main()
