"""All-to-alls whose parts are equal, given, or tensors of a list, from Python and from C++. Two ranks."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    sent, taken = [[1, 2], [3, 4]][rank], [[1, 3], [2, 4]][rank]
    dist.all_to_all_single(torch.empty(4, 5), torch.ones(4, 5))
    dist.all_to_all_single(torch.empty(sum(taken), 5), torch.ones(sum(sent), 5), taken, sent)
    dist.all_to_all([torch.empty(2), torch.empty(2)], [torch.ones(2), torch.ones(2)])
    functional.all_to_all_single(torch.ones(sum(sent), 5), taken, sent, dist.group.WORLD).sum().item()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
