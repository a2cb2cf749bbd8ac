"""A Session of this package on two ranks, with one fused call."""

import torch

from workbench import GroupMap, Session


def main():
    with Session(GroupMap.build("sglang", tp=2), device="cpu", timeout_s=60) as s:
        s.prepare("attention_tp", hidden=64, dtype=torch.float32, max_tokens=4)
        x = torch.full((2, 64), float(s.world_rank + 1))
        out = s.all_reduce_add_rms_norm(x, torch.zeros(2, 64), torch.ones(64), eps=1e-6, group="attention_tp")
        print(f"RESULT {s.world_rank} {out.residual.sum().item()}", flush=True)


if __name__ == "__main__":
    main()
