"""Arguments that are looked at in haste: reduce ops that come and go, and roots of odd types. One rank."""

import numpy
import torch
import torch.distributed as dist


class Root(int):
    """Torch takes it for an int; whoever looks it up gets an exception."""

    def __hash__(self):
        raise KeyError("no hash")


def main():
    dist.init_process_group("gloo")
    x = torch.ones(2)
    ops = dist.ReduceOp.RedOpType
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp(ops.MAX), dist.ReduceOp.SUM):
        dist.all_reduce(x, op)
    before = 0
    for number in (0, 3, 4):
        op, others = ops(number), []
        while before not in (0, id(op)) and len(others) < 10_000:  # at the place of the one before, if that is free
            others.append(op)
            op = ops(number)
        before = id(op)
        dist.all_reduce(x, op)
        del op
    dist.broadcast(x, group_src=Root(0))
    for root in (numpy.int64(0), torch.tensor(0)):
        dist.broadcast(x, src=root)
    dist.barrier()
    dist.destroy_process_group()
    print(f"RESULT 0 {x.sum().item()}", flush=True)


if __name__ == "__main__":
    main()
