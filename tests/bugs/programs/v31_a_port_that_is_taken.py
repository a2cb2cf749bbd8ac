"""World rank 0 serves a second store on a port that is taken. 2 ranks."""

import socket
import sys
from datetime import timedelta

import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        taken = socket.create_server(("127.0.0.1", 0))
        port = 0 if CORRECT else taken.getsockname()[1]
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
        print(f"served on {store.port}")
        taken.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
