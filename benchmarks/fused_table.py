"""Markdown of what `fused_cuda.py --steps time` wrote: python3 benchmarks/fused_table.py FILE..."""

import json
import sys
from pathlib import Path

PEERS = {
    "sgl_fused_1": "SGLang fused, one-shot",
    "sgl_fused_2": "SGLang fused, two-shot",
    "fi_one": "FlashInfer trtllm one-shot",
    "sgl+norm": "SGLang all-reduce + norm",
    "symm2+norm": "symm_mem two-shot + norm",
    "symm1+norm": "symm_mem one-shot + norm",
    "nccl+norm": "NCCL + norm",
}


def table(report: dict) -> str:
    meta = report["meta"]
    lines = [
        f"### Hidden {meta['hidden']}, {meta['ranks']} ranks, {meta['dtype']}",
        "",
        f"{meta['date']}, {meta['ranks']} x {meta['device']}, driver {meta['driver']}, CUDA {meta['cuda']}, torch "
        f"{meta['torch']}, NCCL {meta['nccl']}. `{meta['command']}`",
        "",
        "| tokens | ours, us | p10 to p90 | again | best peer, us | ratio | second, us | peer write: driver's copy / "
        "by SMs | ratio to the copy | ours, sum alone | SGLang sum alone |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for tokens, row in report["tokens"].items():
        us = row["us"]
        peers = sorted((k for k in us if k in PEERS), key=lambda k: us[k]["us"])
        first, second = peers[:2]
        ours = us["ours"]
        lines.append(
            f"| {tokens} | **{ours['us']}** | {ours['p10']} to {ours['p90']} | {us['ours again']['us']} | "
            f"{us[first]['us']} {PEERS[first]} | **{ours['us'] / us[first]['us']:.3f}** | "
            f"{us[second]['us']} {PEERS[second]} | {us['p2p_write']['us']} / {us['sm_write']['us']} | "
            f"{row['ratio_to_peer_write']:.3f} | {us['ours sum']['us']} | {us.get('sgl_ar', {}).get('us', '-')} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    for name in sys.argv[1:]:
        print(table(json.loads(Path(name).read_text())))


if __name__ == "__main__":
    main()
