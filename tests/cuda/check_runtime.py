"""The runtime on two GPUs, as one program: what only a GPU can show of facts, paths, room, captures and failures.

    python3 tests/cuda/check_runtime.py [STEP...] [--limit SECONDS]

build      our kernels, so that no later step waits for a compiler
facts      what each rank's probe says, printed; the voted fabric stages over NVLink, and the plan is custom.fused.push
paths      a session with each backend by name, and with none: bits of the CPU reference, quantised norms, equal scales;
           a call larger than the table's rows takes the library in the same session
segments   the same under expandable_segments:True: what the allocator hands out, and results after empty_cache
room       more than the GPU holds is refused by name, bytes asked and free, alike; the session goes on
captures   a graph capture of the caller's own, and another session's, are refused by every call; the graph survives
failures   one rank fails in each stage of the set-up: the same exception on both, and the next session works
cycles     sessions opened, prepared, called and closed fifty times: GPU memory, descriptors and threads are back

Every step is a torchrun job of its own with a limit; what is wrong is printed at once. Exit 0 if nothing was.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from workbench import GroupMap, Session
from workbench.backends import custom, custom_memory
from workbench.backends import custom_abi as abi
from workbench.backends.base import Room
from workbench.backends.custom_build import build_cuda
from workbench.errors import CaptureError, ResourceError, WorkbenchError
from workbench.fabric import Allocator, Capability, Fabric, Outcome, decide_capability
from workbench.launch.multicast import multicast_switches
from workbench.ops import Quant, Rounding, quantise, reference_all_reduce_add_rms_norm
from workbench.plan import BUILT_KERNELS, Ask, decide_path
from workbench.ranks import GroupKey
from workbench.runtime import session as session_module
from workbench.runtime.devices import take_gpu
from workbench.runtime.probe import probe_facts
from workbench.settings import Settings

ROOT = Path(__file__).parent.parent.parent
STEPS = ("build", "facts", "paths", "segments", "room", "captures", "failures", "cycles")
HIDDEN, EPS = 7168, 1e-6
PAIR = GroupMap.custom({"tp": [[0, 1]]})
QUANTS = (Quant("fp8", scale=0.02), Quant("fp8_token"), Quant("fp8_group"), Quant("int8_token"))
LEAK_BYTES = 8 << 20  # what the driver may keep for itself between cycles


class Checks:
    """Counts, and prints what is wrong at once."""

    def __init__(self) -> None:
        self.done, self.wrong = 0, 0

    def that(self, fine: bool, what: object) -> None:
        self.done += 1
        if not fine:
            self.wrong += 1
            print(f"WRONG on world rank {os.environ['RANK']}: {what}", flush=True)

    def alike(self, text: str, *parts: str) -> None:
        """Both ranks have one text, with these parts in it."""
        told: list[Any] = [None, None]
        dist.all_gather_object(told, text)
        self.that(told[0] == told[1], f"ranks were told different things: {told}")
        for part in parts:
            self.that(part in text, f"{part!r} is not in {text!r}")


def say(text: object) -> None:
    if os.environ["RANK"] == "0":
        print(text, flush=True)


def random(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@contextmanager
def opened(timeout_s: float = 30.0) -> Iterator[Session]:
    with Session(PAIR, device="cuda", timeout_s=timeout_s) as s:
        yield s


def is_exact(s: Session, tokens: int, rounding: str, *, hidden: int = HIDDEN, quant: Quant | None = None) -> bool:
    """Residual bits of the CPU reference; codes and scales those of the norm that came."""
    dtype = torch.bfloat16
    parts = [random((tokens, hidden), r, dtype) for r in (0, 1)]
    residual, weight = random((tokens, hidden), 99, dtype), random((hidden,), 98, dtype)
    wanted = reference_all_reduce_add_rms_norm(parts, residual, weight, eps=EPS, rounding=Rounding(rounding))
    x = parts[s.world_rank].cuda()
    out = s.all_reduce_add_rms_norm(x, residual.cuda(), weight.cuda(), eps=EPS, group="tp", quant=quant)
    fine = torch.equal(out.residual.cpu(), wanted.residual)
    if quant is not None:
        assert out.quant is not None
        assert out.scale is not None
        codes, scale = quantise(out.norm.cpu(), quant)
        fine = fine and torch.equal(out.quant.cpu().view(torch.uint8), codes.view(torch.uint8))
        fine = fine and torch.equal(out.scale.cpu(), scale)
        told: list[Any] = [None, None]
        dist.all_gather_object(told, out.scale.flatten().tolist())
        fine = fine and told[0] == told[1]
    return fine


def step_build(checks: Checks) -> None:
    torch.zeros(1, device="cuda")
    library = build_cuda(custom._arch_name())
    say(f"kernels {library.name}")
    checks.that(library.exists(), library)


def step_facts(checks: Checks) -> None:
    started = time.monotonic()
    facts = probe_facts(int(os.environ["RANK"]), device="cuda", step_deadline_s=30)
    print(f"probed in {time.monotonic() - started:.1f} s: {facts}", flush=True)
    for line in (*facts.links, *facts.notes, f"fd {facts.vmm_fd}; fabric handle {facts.vmm_fabric}"):
        print(f"    world rank {facts.world_rank}: {line}", flush=True)
    started = time.monotonic()
    again = probe_facts(int(os.environ["RANK"]), device="cuda", step_deadline_s=30)
    checks.that(again == facts and time.monotonic() - started < 2, "a second probe differs, or tries the device again")
    told: list[Any] = [None, None]
    dist.all_gather_object(told, facts)
    fabric = Fabric(GroupKey("tp", (0, 1)), tuple(told))
    say(fabric)
    checks.that(facts.arch in ("sm90", "sm100", "sm103"), facts.arch)
    checks.that(facts.allocator is Allocator.PLAIN, facts.allocator)
    checks.that(told[0].device != told[1].device, "both ranks say one GPU")
    peer = next((k for k in facts.links if k.device == told[1 - facts.world_rank].device), None)
    checks.that(peer is not None, "the peer's GPU is not among the links")
    if peer is not None:
        checks.that(peer.nvlink, f"no NVLink: {peer}")
        checks.that(peer.peer_access.outcome is Outcome.WORKS, peer)
        checks.that(peer.ipc.outcome is Outcome.WORKS, peer)
    checks.that(facts.vmm_fd.outcome is Outcome.WORKS, facts.vmm_fd)
    staged = decide_capability(fabric, Capability.STAGED)
    checks.that(staged.ok, staged)
    for rounding in ("once", "twice"):
        plan = decide_path(fabric, Ask(hidden=HIDDEN, tokens=1, rounding=rounding), kernels=BUILT_KERNELS)
        say(plan)
        checks.that(plan.choice == "custom.fused.push", plan)


def step_paths(checks: Checks) -> None:
    for backend in (None, "custom", "nccl", "nccl_window", "symm_mem", "flashinfer"):
        for rounding in ("once", "twice"):
            with opened() as s:
                try:
                    plan = s.prepare(
                        "tp", hidden=HIDDEN, dtype=torch.bfloat16, max_tokens=64, rounding=rounding, backend=backend
                    )
                except ResourceError as e:
                    say(f"{backend} {rounding}: refused: {e}")
                    checks.that(backend not in (None, "custom", "nccl"), f"{backend} {rounding}: {e}")
                    continue
                say(f"{backend} {rounding}: {plan}")
                want = "custom.fused" if backend is None else backend
                checks.that(plan.choice.startswith(want), plan)
                checks.that(plan.workspace_bytes > 0 or plan.choice == "nccl", plan)
                for tokens in (0, 1, 7, 64):
                    checks.that(is_exact(s, tokens, rounding), f"{plan.choice} {rounding}: {tokens} tokens")
                for quant in QUANTS:
                    checks.that(is_exact(s, 7, rounding, quant=quant), f"{plan.choice} {rounding}: {quant}")
                s.check()
    with opened() as s:
        plan = s.prepare("tp", hidden=HIDDEN, dtype=torch.bfloat16, max_tokens=16384)
        parts = s._groups[0, 1].prepared[torch.bfloat16, HIDDEN].parts
        say("up to 16384 tokens: " + "; ".join(f"{p.plan.choice} to {p.plan.capacity_tokens}" for p in parts))
        checks.that(plan.capacity_tokens == 16384, plan)
        ends = [p.plan.capacity_tokens for p in parts]
        for tokens in (1, *ends, *(end + 1 for end in ends[:-1])):
            x = torch.full((tokens, HIDDEN), 2.0**s.world_rank, dtype=torch.bfloat16, device="cuda")
            total = s.all_reduce(x, group="tp")
            checks.that(bool((total == 3).all()), f"{tokens} tokens of {s.why('tp', tokens=tokens).choice}")


def step_segments(checks: Checks) -> None:
    checks.that("expandable_segments:True" in os.environ.get("PYTORCH_ALLOC_CONF", ""), "the setting is not there")
    torch.zeros(1 << 20, device="cuda")
    facts = probe_facts(int(os.environ["RANK"]), device="cuda", step_deadline_s=30)
    print(f"allocator {facts.allocator.value}; notes {facts.notes}", flush=True)
    checks.that(facts.allocator is not Allocator.PLAIN, "the allocator says plain memory under expandable segments")
    for backend in (None, "nccl"):
        with opened() as s:
            plan = s.prepare("tp", hidden=HIDDEN, dtype=torch.bfloat16, max_tokens=64, backend=backend)
            say(plan)
            checks.that(is_exact(s, 64, "once"), f"{plan.choice}: 64 tokens")
            x = torch.full((4, HIDDEN), 2.0**s.world_rank, dtype=torch.bfloat16, device="cuda")
            with s.capture() as c:
                total = s.all_reduce(x, group="tp")
            ballast = [torch.empty(1 << 26, dtype=torch.uint8, device="cuda") for _ in range(4)]
            del ballast
            for factor in (1.0, 2.0, 4.0):
                torch.cuda.empty_cache()
                x.fill_(factor * 2.0**s.world_rank)
                c.replay()
                torch.cuda.synchronize()
                checks.that(bool((total == 3 * factor).all()), f"{plan.choice}: replay after empty_cache, {factor}")


def step_room(checks: Checks) -> None:
    with opened() as s:
        s.prepare("tp", hidden=HIDDEN, dtype=torch.bfloat16, max_tokens=1, backend="custom")  # probes need memory too
        shared = torch.cuda.device_count() < 2
        held = None
        if s.world_rank == 0 or not shared:
            held = torch.empty(torch.cuda.mem_get_info()[0] - (64 << 20), dtype=torch.uint8, device="cuda")
        s.barrier(group="tp")
        try:
            s.prepare("tp", hidden=HIDDEN, dtype=torch.bfloat16, max_tokens=4096, backend="custom")
            checks.that(False, "room for 112 MiB was found where 64 MiB are free")
        except ResourceError as e:
            say(e)
            checks.alike(
                str(e),
                "bytes asked",
                "of GPU memory",
                "are free",
                *(("world ranks 0, 1",) if shared else ("world rank 0", "world rank 1")),
            )
        del held
        torch.cuda.empty_cache()
        if s.world_rank == 1:
            real, custom.room = custom.room, lambda request, key: Room(gpu=1 << 50)
        try:
            s.prepare("tp", hidden=HIDDEN, dtype=torch.bfloat16, max_tokens=64, backend="custom")
            checks.that(False, "one rank's lack of memory was not told")
        except ResourceError as e:
            say(e)
            apart = f"world rank 1: {1 << 50} bytes asked of GPU memory"
            checks.alike(str(e), f"{1 << 50} by world rank 1" if shared else apart)
        if s.world_rank == 1:
            custom.room = real
        s.prepare("tp", hidden=HIDDEN, dtype=torch.bfloat16, max_tokens=32, backend="custom")
        checks.that(is_exact(s, 32, "once"), "a call after two refusals")


def step_captures(checks: Checks) -> None:
    with opened() as s, opened() as other:
        for session in (s, other):
            session.prepare("tp", hidden=HIDDEN, dtype=torch.bfloat16, max_tokens=64)
        x = torch.full((4, HIDDEN), 2.0**s.world_rank, dtype=torch.bfloat16, device="cuda")
        weight = torch.ones(HIDDEN, dtype=torch.bfloat16, device="cuda")
        s.all_reduce(x, group="tp")

        def refusals(of: Session) -> None:
            calls: dict[str, Callable[[], Any]] = {
                "all_reduce_add_rms_norm": lambda: of.all_reduce_add_rms_norm(x, x, weight, eps=EPS, group="tp"),
                "all_reduce": lambda: of.all_reduce(x, group="tp"),
                "prepare": lambda: of.prepare("tp", hidden=HIDDEN, dtype=torch.bfloat16, max_tokens=128),
                "freeze": of.freeze,
                "rebuild": of.rebuild,
                "barrier": lambda: of.barrier(group="tp"),
                "capture": lambda: of.capture().__enter__(),
                "close": of.close,
            }
            for name, call in calls.items():
                try:
                    call()
                    checks.that(False, f"{name} ran inside a capture that is none of its session")
                except CaptureError as e:
                    checks.that(name in str(e), f"{name}: {e}")

        graph, y = torch.cuda.CUDAGraph(), torch.ones(8, device="cuda")
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog asks meanwhile
            y *= 2
            refusals(s)
        graph.replay()
        torch.cuda.synchronize()
        checks.that(y.unique().tolist() == [2.0], "the caller's own graph did not survive the refusals")
        with warnings.catch_warnings(record=True) as warned:
            try:
                with s.capture():
                    s.all_reduce(x[:, :64].contiguous(), group="tp")
                checks.that(False, "a hidden size that nobody prepared was captured")
            except CaptureError as e:
                say(e)
        checks.that(not warned, f"a refused capture warns as well: {[str(w.message) for w in warned]}")
        with s.capture() as c:
            total = s.all_reduce(x, group="tp")
            refusals(other)
        c.replay()
        torch.cuda.synchronize()
        checks.that(bool((total == 3).all()), "the capture did not survive the refusals")
        for session in (s, other):
            checks.that(bool((session.all_reduce(x, group="tp") == 3).all()), "a call after the captures")


@contextmanager
def replaced(place: Any, name: str, value: Any) -> Iterator[None]:
    """On world rank 1 alone, something that fails instead of what is there."""
    real = getattr(place, name)
    if os.environ["RANK"] == "1":
        setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, real)


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def step_failures(checks: Checks) -> None:
    refused = abi.KernelError("refused, says this test")
    stages: dict[str, tuple[Any, str, Exception]] = {
        "probe": (session_module, "probe_facts", OSError("no facts, says this test")),
        "kernels": (custom, "build_cuda", ResourceError("no compiler, says this test")),
        "allocate": (abi.OwnMemory, "__init__", refused),
        "import": (abi.OwnMemory, "open_peer", refused),
        "first call": (custom.CustomWorkspace, "prove", refused),
    }
    for stage, (place, name, error) in stages.items():
        patience_s = 8.0 if stage == "first call" else 30.0  # the peer's kernel waits as long
        with replaced(place, name, raising(error)), opened(patience_s) as s:
            try:
                s.prepare("tp", hidden=HIDDEN, dtype=torch.bfloat16, max_tokens=64, backend="custom")
                checks.that(False, f"{stage}: no error")
            except WorkbenchError as e:
                say(f"{stage}: {type(e).__name__}: {e}")
                checks.alike(f"{type(e).__name__}: {e}", "ResourceError", "world rank 1", "says this test")
        works(checks, stage)
    with replaced(custom_memory, "DescriptorServer", raising(OSError("no socket, says this test"))), opened() as s:
        plan = s.prepare("tp", hidden=HIDDEN, dtype=torch.bfloat16, max_tokens=64, backend="custom")
        workspace = s._groups[0, 1].prepared[torch.bfloat16, HIDDEN].parts[0].workspace
        say(f"export: {plan.choice} over {workspace.memory_kind} memory")  # type: ignore[attr-defined] # custom has it
        checks.that(workspace.memory_kind == "ipc", "export by descriptor failed, and no other way was taken")  # type: ignore[attr-defined]
        checks.that(is_exact(s, 7, "once"), "export: a call")
    works(checks, "export")
    with opened() as s:
        s.prepare("tp", hidden=HIDDEN, dtype=torch.bfloat16, max_tokens=64)
        x = torch.ones(4, HIDDEN, dtype=torch.bfloat16, device="cuda")
        try:
            with s.capture():
                s.all_reduce(x, group="tp")
                if s.world_rank == 1:
                    raise MemoryError("no room for this graph")
            checks.that(False, "capture: no error")
        except CaptureError as e:
            say(f"capture: {e}")
            checks.alike(str(e), "the capture failed on world rank 1: MemoryError: no room for this graph")
        checks.that(is_exact(s, 7, "once"), "capture: a call of the same session")
    works(checks, "capture")


def works(checks: Checks, after: str) -> None:
    """The next session is as good as any."""
    with opened() as s:
        plan = s.prepare("tp", hidden=HIDDEN, dtype=torch.bfloat16, max_tokens=64)
        checks.that(plan.choice.startswith("custom.fused"), f"after {after}: {plan}")
        checks.that(is_exact(s, 7, "once"), f"after {after}: a call")


def step_cycles(checks: Checks) -> None:
    seen: list[tuple[int, int, int]] = []
    started = time.monotonic()
    for _ in range(51):
        works(checks, "a cycle")
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        dist.barrier()  # the peer's memory counts here too while it is mapped
        free, _total = torch.cuda.mem_get_info()
        seen.append((free, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
        if time.monotonic() - started > 140:
            break
    say(f"{len(seen) - 1} cycles in {time.monotonic() - started:.1f} s")
    say(f"free bytes, descriptors, threads: {seen[1]} then {seen[-1]}")
    checks.that(len(seen) == 51, f"only {len(seen) - 1} cycles in time")
    checks.that(seen[1][0] - seen[-1][0] <= LEAK_BYTES, f"GPU memory is gone: {[s[0] for s in seen[1::10]]}")
    checks.that(seen[-1][1] <= seen[1][1] + 2, f"descriptors are left: {[s[1] for s in seen[1::10]]}")
    checks.that(seen[-1][2] <= seen[1][2] + 2, f"threads are left: {[s[2] for s in seen[1::10]]}")


def run_rank(step: str) -> int:
    """One rank of one step."""
    take_gpu()
    dist.init_process_group("cpu:gloo,cuda:nccl")
    checks = Checks()
    globals()[f"step_{step}"](checks)
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (checks.done, checks.wrong))
    say(f"{step}: {sum(done for done, _ in told)} checks, {sum(wrong for _, wrong in told)} wrong")
    dist.destroy_process_group()
    return int(any(wrong for _, wrong in told))


def run_step(step: str, limit_s: float) -> bool:
    """The step as a torchrun job; False if it went wrong or ran out of time."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1" if step == "build" else "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    environment = {**os.environ, **multicast_switches(os.environ)}
    environment["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    if step == "segments":
        environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    print(f"== {step} (at most {limit_s:g} s)", flush=True)
    started = time.monotonic()
    job = subprocess.Popen([*command, __file__, "--rank", step], cwd=ROOT, env=environment, start_new_session=True)
    try:
        status = job.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        print(f"WRONG: {step} still ran after {limit_s:g} s", flush=True)
        status = 1
    finally:
        _end(job)
    print(f"== {step}: {'fine' if status == 0 else 'WRONG'}, {time.monotonic() - started:.1f} s", flush=True)
    return status == 0


def _end(job: subprocess.Popen[bytes]) -> None:
    """End the job and its ranks, which torchrun passes the signal on to; then by force."""
    if job.poll() is not None:
        return
    job.terminate()
    try:
        job.wait(timeout=10)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, 9)
        job.wait(timeout=10)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of {', '.join(STEPS)}; all by default")
    parser.add_argument("--limit", type=float, default=100.0, help="seconds for each step; build and cycles have more")
    parser.add_argument("--rank", choices=STEPS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.rank:
        return run_rank(chosen.rank)
    unknown = sorted(set(chosen.steps) - set(STEPS))
    if unknown:
        parser.error(f"no step is called {unknown[0]!r}; there are {', '.join(STEPS)}")
    if torch.cuda.device_count() < (1 if Settings.read().share_gpus else 2):
        print("needs two GPUs, or one and WORKBENCH_SHARE_GPUS=1")
        return 2
    more = {"build": 240.0, "cycles": 170.0}
    wrong = [step for step in chosen.steps or STEPS if not run_step(step, more.get(step, chosen.limit))]
    print(f"wrong: {', '.join(wrong)}" if wrong else f"{len(chosen.steps or STEPS)} steps, nothing wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
