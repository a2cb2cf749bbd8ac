"""Functions that tests send to ranks. They stand in a module of their own, so that a rank can import it by name."""

from __future__ import annotations

import os
from typing import Any


def pid() -> int:
    return os.getpid()


def environment() -> dict[str, str]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT")
    return {name: os.environ[name] for name in names}


def engine_id() -> int:
    from ipyparallel.engine.app import IPEngine

    return int(IPEngine.instance().id)


def sum_over(kind: str | None = None) -> float:
    """10^rank summed over the world, or over this rank's group of `kind` by the Session."""
    import torch
    import torch.distributed as dist
    from IPython import get_ipython

    names: dict[str, Any] = get_ipython().user_ns
    x = torch.full((2, 64), 10.0 ** names["rank"])
    if kind is None:
        dist.all_reduce(x)
        return float(x[0, 0])
    return float(names["session"].all_reduce(x, group=kind)[0, 0])


def pass_on() -> float:
    """What the rank before this one sent: once started and waited for, once not."""
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.full((1,), -1.0)
    sending = dist.isend(torch.full((1,), float(rank)), dst=(rank + 1) % size)
    dist.recv(received, src=(rank - 1) % size)
    sending.wait()
    again = torch.full((1,), -1.0)
    waiting = dist.irecv(again, src=(rank - 1) % size)
    dist.send(torch.full((1,), float(rank)), dst=(rank + 1) % size)
    waiting.wait()
    assert again == received
    return float(received)


def prepare(kind: str) -> str:
    import torch
    from IPython import get_ipython

    session = get_ipython().user_ns["session"]
    return str(session.prepare(kind, hidden=64, dtype=torch.float32, max_tokens=8).choice)


def remember(value: int) -> None:
    from IPython import get_ipython

    names = get_ipython().user_ns
    names["remembered"] = value + names["rank"]


def recall() -> int:
    from IPython import get_ipython

    return int(get_ipython().user_ns["remembered"])


def fail_on(world_rank: int) -> None:
    import torch.distributed as dist

    if dist.get_rank() == world_rank:
        raise ValueError(f"world rank {world_rank} has had enough")
    dist.barrier()


class Unreadable:
    """What runs `code` when it is unpickled."""

    def __init__(self, code: str) -> None:
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (self.code,)


def unreadable(code: str = "1 / 0") -> Unreadable:
    return Unreadable(code)


def fail_with(literal: str) -> None:
    import ast

    raise ValueError(ast.literal_eval(literal))


def start_children() -> list[int]:
    """The pids of a child, and of a grandchild whose parent has ended."""
    import subprocess
    import sys

    child = subprocess.Popen(["sleep", "600"])
    lonely = "import subprocess as s; print(s.Popen(['sleep', '600'], stdout=s.DEVNULL, stderr=s.DEVNULL).pid)"
    told = subprocess.run([sys.executable, "-c", lonely], capture_output=True, text=True, check=True)
    return [child.pid, int(told.stdout)]


def use_and_destroy_a_group() -> None:
    import torch
    import torch.distributed as dist

    group = dist.new_group()
    dist.all_reduce(torch.ones(1), group=group)
    dist.destroy_process_group(group)


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))
