"""flashinfer 3408: TP2 x PP2; the first stage's rendezvous over the world waits for the second's. 4 ranks."""

import sys
import time

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()  # all are connected: who ends early leaves nobody behind
    tp = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    if rank < 2:
        dist.broadcast_object_list(["tactic"], src=0, group=tp if CORRECT else None)
        if rank == 0:
            dist.send(torch.ones(4), dst=2)
    elif rank == 2:
        dist.recv(torch.empty(4), src=0)  # the activations of the first stage
    elif not CORRECT:
        time.sleep(60)  # work of its own: it is not gone, so nobody's connection breaks meanwhile
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
