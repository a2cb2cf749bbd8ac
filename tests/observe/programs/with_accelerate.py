"""Hugging Face accelerate on CPU ranks. Prints the weights' sum after training and the gathered losses."""

import torch
from accelerate import Accelerator


def main():
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.arange(32.0).reshape(8, 4) / 32)
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for (x,) in loader:
        loss = model(x).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    losses = accelerator.gather(loss.detach().reshape(1))
    total = sum(p.sum().item() for p in model.parameters())
    print(f"RESULT {accelerator.process_index} {total:.9f} {losses.sum().item():.9f}", flush=True)
    accelerator.wait_for_everyone()
    # The group goes with the last that holds it. One that is left when Python ends aborts now and then: a thread of
    # gloo drops a tensor that Python knows.
    accelerator.free_memory()
    model = optimizer = loader = loss = losses = None
    accelerator.end_training()


if __name__ == "__main__":
    main()
