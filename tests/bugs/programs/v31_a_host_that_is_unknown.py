"""World rank 1 looks for its weights' store on a host whose name nobody resolves. 2 ranks."""

import sys
from datetime import timedelta

import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=2))
    port = [store.port if rank == 0 else None]
    dist.broadcast_object_list(port, src=0)
    if rank == 1:
        host = "127.0.0.1" if CORRECT else "no-such-host.invalid"
        dist.TCPStore(host, port[0], is_master=False, timeout=timedelta(seconds=0.5))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
