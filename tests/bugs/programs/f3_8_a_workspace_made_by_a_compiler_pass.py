"""vllm 37461: a compiler pass makes the workspace; a second start, from its cache, runs no pass. 2 ranks."""

import sys

import torch
import torch.distributed as dist

CORRECT = "--correct" in sys.argv
COMPILED = {"decoder layer": "the artefact of the first start"}

workspaces = {}


def make_workspace(group):
    handles = [None] * dist.get_world_size(group)
    dist.all_gather_object(handles, f"handle of rank {dist.get_rank()}", group=group)
    workspaces[group] = handles


def compile_layer(name, group):
    if name not in COMPILED:
        make_workspace(group)  # the pass that finds the fused pattern
        COMPILED[name] = "artefact"


def fused_all_reduce(x, group):
    if CORRECT and group not in workspaces:
        make_workspace(group)
    if group not in workspaces:
        raise RuntimeError("flashinfer all-reduce workspace must be initialized")
    dist.all_reduce(x, group=group)


def main():
    dist.init_process_group("gloo")
    dist.barrier()  # all are connected: who ends early leaves nobody behind
    group = dist.new_group([0, 1])
    compile_layer("decoder layer", group)
    x = torch.ones(4)
    fused_all_reduce(x, group)
    assert x.tolist() == [2.0] * 4
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
