"""A launcher of its own: two ranks as subprocesses whose environment holds nothing but what it puts there."""

import os
import subprocess
import sys

RANK = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(x)
print("RESULT", dist.get_rank(), x.item(), flush=True)
dist.destroy_process_group()
"""


def main():
    children = []
    for rank in ("0", "1"):
        environment = {
            "RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[1],
            "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"],
        }  # fmt: skip
        children.append(subprocess.Popen([sys.executable, "-c", RANK], env=environment))
    sys.exit(max(child.wait() for child in children))


if __name__ == "__main__":
    main()
