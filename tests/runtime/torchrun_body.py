"""What each rank does under plain torchrun: every kind, 0, 1, 7 and 64 tokens, rank r contributing 2^r, residual 5."""

import os

import torch

from workbench import GroupMap, Session

HIDDEN = 64
KINDS = ("tp", "attention_tp", "attn_cp", "moe_ep", "moe_tp")
SIZES = {
    4: {"tp": 4, "attn_cp": 2, "moe_ep": 2},
    6: {"tp": 6, "attn_cp": 2, "moe_ep": 3},
    16: {"tp": 16, "attn_cp": 2, "attn_dp": 2, "moe_ep": 4},
}


def main() -> None:
    """Run every check; the last line of world rank 0 says how many there were."""
    torch.set_num_threads(1)
    checked = 0
    with Session(GroupMap.build("sglang", **SIZES[int(os.environ["WORLD_SIZE"])]), timeout_s=60) as s:
        device = torch.device(s.device, torch.cuda.current_device()) if s.device == "cuda" else torch.device("cpu")
        for kind in KINDS:
            s.prepare(kind, hidden=HIDDEN, dtype=torch.float32, max_tokens=64)
            wanted = float(sum(2**r for r in s.group(kind).world_ranks) + 5)
            for tokens in (0, 1, 7, 64):
                x = torch.full((tokens, HIDDEN), 2.0**s.world_rank, device=device)
                weight = torch.ones(HIDDEN, device=device)
                out = s.all_reduce_add_rms_norm(x, torch.full_like(x, 5), weight, eps=1e-6, group=kind)
                assert out.residual.unique().tolist() == ([wanted] if tokens else []), (kind, tokens, out.residual)
                norms = s.gather_object(out.norm.tolist(), group=kind)
                assert norms == [norms[0]] * s.group(kind).size
                checked += 1
        rank = s.world_rank
    if rank == 0:
        print(f"{checked} checks exact and bit-equal on every rank, path {s.device}")


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    main()
