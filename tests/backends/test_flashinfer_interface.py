"""Pins the interface of the FlashInfer that CI installs, on CPU: what we pass, what close() needs, how it meets.

Whatever upstream changes here turns red and asks for a look at workbench/backends/flashinfer.py. The file descriptors
that its workspaces exchange are passed between real ranks of interleaved groups, over our rendezvous and over its own.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.backends.ranks import channels, request, run_ranks
from workbench.backends import flashinfer
from workbench.backends.flashinfer_comm import ChannelComm, create_together
from workbench.errors import ResourceError
from workbench.ops import Rounding
from workbench.ranks import GroupKey

try:
    VERSION = importlib.metadata.version("flashinfer-python")
except importlib.metadata.PackageNotFoundError:
    VERSION = ""

pytestmark = pytest.mark.skipif(
    not VERSION,
    reason="FlashInfer is not installed: pip install '.[flashinfer-cpu]', then "
    "pip install --no-deps flashinfer-python==0.7.2.post1 (no GPU needed)",
)


@pytest.fixture(scope="module")
def comm() -> Any:
    return importlib.import_module("flashinfer.comm")


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_the_version_is_one_that_was_read_and_run() -> None:
    assert VERSION == "0.7.2.post1"
    assert flashinfer.find_version_problem() == ""


def test_kernels_that_would_be_compiled_inside_a_set_up_are_refused_with_the_command_that_builds_them(
    comm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashInfer's own spec for Hopper, on a machine that has compiled nothing, and with an object where it looks."""
    jit = importlib.import_module("flashinfer.jit.comm")
    monkeypatch.setattr(jit.current_compilation_context, "TARGET_CUDA_ARCHS", {(9, "0a")})
    told = flashinfer.find_build_problem("trtllm")
    assert told.startswith("FlashInfer has not compiled its kernels here, which takes minutes; once, on each host: ")
    assert "from flashinfer.jit.comm import gen_trtllm_comm_module as g" in told
    spec = jit.gen_trtllm_comm_module()
    assert (spec.is_aot, spec.is_compiled) == (False, False)
    assert spec.aot_path.parts[-2:] == ("trtllm_comm", "trtllm_comm.so")
    monkeypatch.setattr(type(spec), "is_aot", True)
    assert flashinfer.find_build_problem("trtllm") == ""


def test_a_gpu_without_kernels_is_told(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    jit = importlib.import_module("flashinfer.jit.comm")
    monkeypatch.setattr(jit.current_compilation_context, "TARGET_CUDA_ARCHS", {(8, "0")})
    assert flashinfer.find_build_problem("trtllm").startswith("FlashInfer has no kernels for this GPU: ")


def test_a_workspace_is_made_with_these_parameters(comm: Any) -> None:
    assert parameters(comm.create_allreduce_fusion_workspace) == [
        *("backend", "world_size", "rank", "max_token_num", "hidden_dim", "dtype", "gpus_per_node", "comm_backend"),
        *("force_oneshot_support", "group", "top_k", "rms_eps", "weight_bias", "routed_scaling_factor"),
        *("include_shared_expert", "add_residual", "write_residual_output", "apply_rms_norm", "output_dtype"),
        *("dynamic_fp8", "write_norm_output", "config"),
    ]


def test_what_is_left_out_falls_back_to_all_ranks_and_to_auto(comm: Any) -> None:
    """Why the backend always passes all three."""
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(comm.create_allreduce_fusion_workspace).parameters.items()
    }
    assert (defaults["backend"], defaults["comm_backend"], defaults["group"]) == ("auto", None, None)


def test_a_call_takes_these_parameters(comm: Any) -> None:
    assert parameters(comm.allreduce_fusion) == [
        *("input", "workspace", "pattern", "launch_with_pdl", "trigger_completion_at_end", "output", "residual_out"),
        *("norm_out", "quant_out", "scale_out", "residual_in", "rms_gamma", "rms_eps", "scale_factor", "layout_code"),
        *("use_oneshot", "fp32_acc", "moe_reduction_device_num_experts", "moe_reduction_scale_input"),
        *("moe_reduction_active_experts_token_input", "moe_reduction_token_input", "expanded_idx_to_permuted_idx"),
        *("expert_scale_factor", "shared_expert_output", "block_quant_group_size", "weight_bias"),
        "moe_finalize_backend",
    ]
    defaults = inspect.signature(comm.allreduce_fusion).parameters
    assert (defaults["fp32_acc"].default, defaults["use_oneshot"].default) == (False, None)
    assert (comm.AllReduceFusionPattern.kAllReduce, comm.AllReduceFusionPattern.kARResidualRMSNorm) == (0, 1)


def test_a_workspace_is_asked_and_closed_through_these_names(comm: Any) -> None:
    trtllm = importlib.import_module("flashinfer.comm.trtllm_ar")
    workspace = importlib.import_module("flashinfer.comm.allreduce").TRTLLMAllReduceFusionWorkspace
    assert parameters(workspace.is_buffer_size_sufficient) == [
        *("self", "tp_size", "num_tokens", "hidden_dim", "dtype", "use_oneshot")
    ]
    assert {"_internal_workspace", "ipc_handles", "mem_handles", "metadata"} <= names_in(workspace.__init__)
    assert "control_flag_ptr" in names_in(trtllm.trtllm_create_ipc_workspace_for_all_reduce_fusion)
    assert "_symm_workspace_refs" in names_in(trtllm.trtllm_destroy_ipc_workspace_for_all_reduce_fusion)
    assert "_symm_workspace_refs" not in names_in(workspace.destroy)  # its own destroy() keeps the memory
    assert callable(importlib.import_module("flashinfer.comm.cuda_ipc").CudaRTLibrary.cudaFree)
    assert callable(trtllm.get_trtllm_comm_module)
    assert callable(importlib.import_module("flashinfer.comm.trtllm_mnnvl_ar").get_trtllm_mnnvl_comm_module)


def test_the_trtllm_workspace_asks_for_memory_without_multicast(comm: Any) -> None:
    trtllm = importlib.import_module("flashinfer.comm.trtllm_ar")
    source = inspect.getsource(inspect.unwrap(trtllm.trtllm_create_ipc_workspace_for_all_reduce_fusion))
    assert source.count("SymmDeviceMemory(\n") == 1
    assert source.count("enable_multicast=False") == 1


def test_one_shot_limits_are_flashinfers_own_table() -> None:
    """In MiB of ranks x message x 2 there, so half of it in bytes here; it has no row for 16."""
    table = importlib.import_module("flashinfer.comm.trtllm_ar")._use_oneshot_heuristics
    assert table == {2: 512, 4: 64, 8: 42}
    assert {size: limit << 20 >> 1 for size, limit in table.items()} == {
        size: flashinfer.ONE_SHOT_BYTES[size] for size in table
    }


def test_our_rendezvous_is_a_comm_backend_in_flashinfers_eyes(comm: Any) -> None:
    protocol = importlib.import_module("flashinfer.comm.mnnvl").CommBackend
    methods = [name for name in vars(protocol) if not name.startswith("_")]
    assert methods == ["Get_rank", "Get_size", "allgather", "bcast", "barrier", "Split"]
    assert issubclass(ChannelComm, protocol)
    assert all(parameters(getattr(ChannelComm, m)) == parameters(getattr(protocol, m)) for m in methods)


def test_descriptors_reach_the_members_of_interleaved_groups(comm: Any) -> None:
    """FlashInfer's own exchange, all to all and from group root 1: [0,2] and [1,3] at one time, then (3,1)."""
    fds = importlib.import_module("flashinfer.comm.fd_exchange")

    def body(rank: int) -> list:
        told = []
        with channels((0, 2), (1, 3), (3, 1)) as mine:
            for channel in mine:
                ours = ChannelComm(channel)
                all_to_all = [read(fd) for fd in fds.exchange_fds(ours, written(rank))]
                root = fds.broadcast_fd(ours, written(rank) if ours.Get_rank() == 1 else None, 1)
                told.append((all_to_all, read(root)))
        return told

    zero, one, two, three = run_ranks(4, body)
    assert zero == two == [(["world rank 0", "world rank 2"], "world rank 2")]
    assert one == three
    assert one == [
        (["world rank 1", "world rank 3"], "world rank 3"),
        (["world rank 3", "world rank 1"], "world rank 1"),
    ]


def test_flashinfers_own_backend_maps_the_root_too_but_numbers_as_torch_sorts(comm: Any) -> None:
    """Since 0.6.13 its root is right; the order of (3,1) is torch's, so kernels and map would disagree."""
    backend = importlib.import_module("flashinfer.comm.mnnvl").TorchDistBackend

    def body(rank: int) -> list:
        with channels((0, 2), (1, 3), (3, 1)) as mine:
            theirs = [backend(group=channel.torch_group) for channel in mine]
            return [(t.Get_rank(), t.allgather(rank), t.bcast(rank, 1)) for t in theirs]

    zero, one, two, three = run_ranks(4, body)
    assert zero == [(0, (0, 2), 2)]
    assert two == [(1, (0, 2), 2)]
    assert one == [(0, (1, 3), 3), (0, (1, 3), 3)]
    assert three == [(1, (1, 3), 3), (1, (1, 3), 3)]


def test_a_member_whose_descriptor_is_bad_fails_all_members_alike(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """World rank 3's send fails; world rank 1 would wait 30 s for it, 1 s here, and then hears why."""
    fds = importlib.import_module("flashinfer.comm.fd_exchange")
    monkeypatch.setattr(fds, "_TIMEOUT_S", 1.0)

    def create(ours: ChannelComm, rank: int) -> list[str]:
        fd = written(rank)
        if rank == 3:
            os.close(fd)
        return [read(fd) for fd in fds.exchange_fds(ours, fd)]

    def body(rank: int) -> Any:
        with channels((0, 2), (1, 3)) as (channel,):
            try:
                return create_together(channel, "a workspace", lambda ours: create(ours, rank))
            except ResourceError as e:
                return str(e)

    zero, one, two, three = run_ranks(4, body)
    assert zero == two == ["world rank 0", "world rank 2"]
    assert one == three
    assert one.startswith("tp[1,3]: a workspace failed; world rank 1: ")
    assert one.endswith("; world rank 3: OSError: [Errno 9] Bad file descriptor")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # FlashInfer calls its own deprecated functions
def test_our_calls_pass_flashinfers_own_checks_and_reach_its_kernel(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of FlashInfer's Python on CPU tensors; only the compiled kernel, which needs a GPU, is a recorder."""
    trtllm = importlib.import_module("flashinfer.comm.trtllm_ar")
    reached: list[dict] = []
    kernel = SimpleNamespace(trtllm_allreduce_fusion=lambda **given: reached.append(given))
    monkeypatch.setattr(trtllm, "get_trtllm_comm_module", lambda: kernel)
    asked = request(64, max_tokens=40, rounding=Rounding.TWICE)
    native = importlib.import_module("flashinfer.comm.allreduce").TRTLLMAllReduceFusionWorkspace.__new__(
        importlib.import_module("flashinfer.comm.allreduce").TRTLLMAllReduceFusionWorkspace
    )
    native.world_size, native.rank, native._destroyed, native.workspace_tensor = 2, 1, True, torch.zeros(7)
    native.mem_handles = []
    native.metadata = {"max_token_num": 40, "tp_size": 2, "hidden_dim": 64, "use_fp32_lamport": False}
    channel = SimpleNamespace(key=GroupKey("tp", (0, 1)), world_rank=1)
    workspace = flashinfer.FlashInferWorkspace(channel, asked, native, backend="flashinfer", fusion="trtllm")
    x, weight = torch.ones(3, 64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)
    workspace._reduce(x, True)
    out = workspace._fuse(x, x, weight, 1e-6, 1.0, False)
    workspace._fuse(x[:0], x[:0], weight, 1e-6, 1.0, True)  # nothing to do, nothing launched
    plain, fused = reached
    told = ("world_size", "world_rank", "token_num", "hidden_dim", "pattern_code", "use_oneshot", "fp32_acc")
    assert [plain[name] for name in told] == [2, 1, 3, 64, 0, True, True]
    assert [fused[name] for name in told] == [2, 1, 3, 64, 1, False, True]
    assert (fused["launch_with_pdl"], fused["rms_eps"], fused["weight_bias"]) == (True, 1e-6, 1.0)
    assert fused["norm_out"].data_ptr() == out.norm.data_ptr()
    assert fused["residual_out"].data_ptr() == out.residual.data_ptr()
    assert fused["residual_in"].data_ptr() == x.data_ptr()
    assert native.is_buffer_size_sufficient(2, 40, 64, torch.bfloat16)
    assert not native.is_buffer_size_sufficient(2, 41, 64, torch.bfloat16)


def test_split_of_a_group_without_world_rank_0_gives_all_ranks(comm: Any) -> None:
    """The known defect flashinfer-split-gives-world: why our rendezvous refuses to be split."""
    backend = importlib.import_module("flashinfer.comm.mnnvl").TorchDistBackend

    def body(rank: int) -> tuple:
        with channels((0, 1), (2, 3)) as (channel,):
            with pytest.raises(NotImplementedError, match=r"tp\[[02],[13]\]: FlashInfer asked to split the group"):
                ChannelComm(channel).Split(0, rank)
            return backend(group=channel.torch_group).Split(0, rank).Get_size()

    assert run_ranks(4, body) == [2, 2, 4, 4]


def written(rank: int) -> int:
    """A descriptor of memory that says which world rank made it."""
    fd = os.memfd_create("rank")
    os.write(fd, f"world rank {rank}".encode())
    return fd


def read(fd: int) -> str:
    text = os.pread(fd, 64, 0).decode()
    os.close(fd)
    return text


def names_in(function: Any) -> set[str]:
    """Names and texts that a function's code mentions."""
    code = inspect.unwrap(function).__code__
    return {*code.co_names, *(c for c in code.co_consts if isinstance(c, str))}
