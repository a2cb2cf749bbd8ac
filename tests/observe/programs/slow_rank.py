"""World rank 0 computes for ten seconds while the others wait for it in a barrier; with `fails` it then raises."""

import sys
import time

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 0:
        end = time.monotonic() + 10
        x = torch.eye(32)
        while time.monotonic() < end:
            x = x @ x
        if "fails" in sys.argv:
            raise ValueError("the sum is not the sum")
    dist.barrier()
    print(f"RESULT {dist.get_rank()} done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
