"""A kit as workbench/measure/kit.py describes it, of ways that run on CPU ranks; for test_kit.py."""

from types import SimpleNamespace

import torch
import torch.distributed as dist


class Bench:
    """What a kit's parts are made with."""

    def __init__(self, gloo):
        self.gloo = gloo


def load_peers(part, bench, *, hidden, max_tokens, peers):
    """The ops of a part, by name."""
    if part == "flashinfer":
        raise RuntimeError(f"no such wheel under {peers[:1]}")
    print("loading", part)  # a kit may talk; it must not get into a document
    memory = torch.zeros(max_tokens, hidden, dtype=torch.float32)

    def reduce(x, out=None):
        out.copy_(x)
        dist.all_reduce(out, group=bench.gloo)
        return out

    def fused(x, residual, weight, eps, out):
        norm, total = out
        added = residual + reduce(x, torch.empty_like(x))
        total.copy_(added)
        norm.copy_(torch.nn.functional.rms_norm(added, weight.shape, weight, eps))
        return out

    def op(kind, call, **more):
        common = {"fits": lambda tokens: True, "input": None, "eager": True, "graphed": True, "after_capture": None}
        return SimpleNamespace(**{**common, "kind": kind, "call": call, **more})

    def one_kernel(x, residual, weight, eps, out):
        assert out[1].data_ptr() != residual.data_ptr(), "one kernel writes the new residual elsewhere"
        return fused(x, residual, weight, eps, out)

    def composed(x, residual, weight, eps, out):
        assert out[1] is residual, "composed ways update the residual in place, as engines do"
        return fused(x, residual, weight, eps, out)

    def late(x, residual, weight, eps, out):
        norm, total = fused(x, residual, weight, eps, out)
        total[-1, -1] += 1  # wrong in one element
        return norm, total

    return {
        "sgl_fused_1": op("fused", one_kernel, fits=lambda tokens: tokens <= 2),
        "sgl_fused_2": op("fused", late),
        "sgl+norm": op("fused", composed, input=lambda tokens: memory[:tokens]),
        "sgl_ar": op("sum", reduce),
        "a_part_of_theirs": op("sum", reduce),
        "fi_two": op("fused", fused, graphed=False),
    }
