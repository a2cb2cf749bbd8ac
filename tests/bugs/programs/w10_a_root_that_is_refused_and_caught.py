"""Asks for a root that is no member, is told so on every rank, catches it and goes on: fine. 3 ranks."""

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    x = torch.ones(2)
    try:
        dist.broadcast(x, src=7)
    except (RuntimeError, ValueError) as e:
        print(f"no such root: {e}")
    else:
        raise AssertionError("torch took 7 for a rank")
    dist.all_reduce(x)
    assert x.tolist() == [3.0, 3.0]
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
