"""pytorch 130515: a differentiable broadcast compares a rank in the group with a world rank. 2 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv


class Broadcast(torch.autograd.Function):
    """A broadcast whose gradient is the sum of all members' at the source, and zero elsewhere."""

    @staticmethod
    def forward(ctx, x, src, group):
        ctx.src, ctx.group = src, group
        y = x.clone()
        dist.broadcast(y, src=src, group=group)
        return y

    @staticmethod
    def backward(ctx, grad):
        total = grad.clone()
        dist.reduce(total, dst=ctx.src, group=ctx.group)
        own = dist.get_rank() if CORRECT else dist.get_rank(ctx.group)
        return (total if own == ctx.src else torch.zeros_like(total)), None, None


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()  # all are connected: who ends early leaves nobody behind
    group = dist.new_group([1])
    if rank == 1:
        x = torch.ones(3, requires_grad=True)
        Broadcast.apply(x, 1, group).sum().backward()
        assert x.grad.tolist() == [1.0, 1.0, 1.0], f"the source's gradient is {x.grad.tolist()}"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
