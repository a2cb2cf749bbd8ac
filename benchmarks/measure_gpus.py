"""The full tables of this machine's GPUs: one `workbench measure fused` after another, each within its own limit.

  python benchmarks/measure_gpus.py --out DIR --peers KIT [--hidden 7168,4096] [--limit-s 400]

For each hidden size: 1 to 4,096 tokens with all ranks coming together, then fewer sizes with one rank late and between
matrix products. Results grow in DIR while it runs, so what was done before an interruption is kept. Exit: the worst of
the jobs' exits. KIT: a directory with other systems' kernels (workbench/measure/kit.py says what it must hold).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

ALL = ",".join(str(1 << i) for i in range(13))
FEW = "1,8,32,128,512,2048"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory for the results")
    parser.add_argument("--peers", help="directory of the kit")
    parser.add_argument("--hidden", default="7168,4096")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ranks", default="2")
    parser.add_argument("--rounds", default="30")
    parser.add_argument("--tokens", default=ALL)
    parser.add_argument("--few", default=FEW, help="token counts of the two further scenarios")
    parser.add_argument("--without", help="ways to leave out, as workbench measure fused has it")
    parser.add_argument("--limit-s", type=float, default=400.0, help="seconds for everything")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.limit_s
    together = [(h, "together", ["--tokens", options.tokens]) for h in options.hidden.split(",")]
    further = [
        (h, "skewed-gemm", ["--tokens", options.few, "--arrival", "together,skewed", "--chain", "none,gemm"])
        for h in options.hidden.split(",")
    ]
    jobs, worst = together + further, 0
    for number, (hidden, name, more) in enumerate(jobs):
        left = end - time.monotonic()
        limit = left / (len(jobs) - number) * 1.5 if number + 1 < len(jobs) else left
        limit = min(limit, left) - 16  # the job is given 15 seconds to end by itself
        if limit < 10:
            print(f"no time left for hidden {hidden}, {name}", flush=True)
            return max(worst, 1)
        command = [sys.executable, "-m", "workbench", "measure", "fused", "--device", options.device]
        command += ["--ranks", options.ranks, "--hidden", hidden, "--rounds", options.rounds, *more]
        command += ["--peers", options.peers] if options.peers else []
        command += ["--without", options.without] if options.without else []
        command += ["--limit-s", f"{limit:.0f}", "--json", str(options.out / f"h{hidden}-{name}.json")]
        started = time.monotonic()
        status = subprocess.run(command, check=False).returncode
        print(f"hidden {hidden}, {name}: exit {status} after {time.monotonic() - started:.1f} s\n", flush=True)
        worst = max(worst, status)
    return worst


if __name__ == "__main__":
    sys.exit(main())
