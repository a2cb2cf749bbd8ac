"""DistributedDataParallel: the sums of its buckets are issued by C++. Prints the weights' sum after two steps."""

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
    model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        x = torch.full((4, 64), float(dist.get_rank() + step))
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"RESULT {dist.get_rank()} {sum(p.sum().item() for p in model.parameters()):.9f}", flush=True)
    dist.barrier()  # nobody leaves while a peer still reads from it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
