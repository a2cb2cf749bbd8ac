"""World rank 1 ends badly, in the way its argument says, while the others wait for it."""

import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist


def end(how):
    if how == "exception":
        raise ValueError("no such expert: 7")
    if how == "sys_exit":
        sys.exit("no such config")
    if how == "os_exit":
        os._exit(5)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    dist.barrier()
    if dist.get_rank() == 1:
        end(sys.argv[1])
    dist.all_reduce(torch.ones(2))


if __name__ == "__main__":
    main()
