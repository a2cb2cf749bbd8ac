"""Ranks that multiprocessing starts. Arguments: how to start them (spawn or fork), and how they end.

wait        one waits for work, the other for it; the parent ends them, and goes well
daemon      the same, and the interpreter ends them
raise       rank 1 raises between two calls
too_early   the parent ends rank 1 while rank 0 needs it, and takes no notice of how rank 0 ends
killed      somebody else kills rank 1; the parent notices, and sends the same signal to what is gone already
"""

import multiprocessing
import os
import signal
import sys
import tempfile
import time


def load(rank):
    if rank == 1:
        raise ValueError("bad weights")


def work(rank, directory, how):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    dist.all_reduce(torch.ones(2))
    if how == "raise":
        load(rank)
    open(os.path.join(directory, f"up{rank}"), "x").close()
    if rank == {"wait": 0, "daemon": 0, "too_early": 1, "killed": 1}.get(how):
        time.sleep(600)
    dist.all_reduce(torch.ones(2))


def main():
    start, how = sys.argv[1:]
    context = multiprocessing.get_context(start)
    with tempfile.TemporaryDirectory() as directory:
        ranks = [context.Process(target=work, args=(r, directory, how), daemon=how == "daemon") for r in range(2)]
        for rank in ranks:
            rank.start()
        if how == "raise":
            for rank in ranks:
                rank.join()
            sys.exit(1)
        while len([name for name in os.listdir(directory) if name.startswith("up")]) < 2:
            time.sleep(0.02)
        time.sleep(0.5)
        if how == "wait":
            for rank in ranks:
                rank.terminate()
        if how == "killed":
            os.kill(ranks[1].pid, signal.SIGKILL)
            time.sleep(0.5)
            ranks[1].kill()
            ranks[0].join()
        if how == "too_early":
            ranks[1].terminate()
            ranks[0].join()


if __name__ == "__main__":
    main()
