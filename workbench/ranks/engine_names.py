"""What the engines' own launch arguments are called here, so that a name copied from a launch command is understood.

Spelled without leading dashes, with '_' for '-', and without a last '_size'. Sources: the argument parsers of SGLang,
vLLM and Megatron-LM. A remark says what a plain change of name would get wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

NAMES: Mapping[str, Mapping[str, str]] = {
    "sglang": {
        "tensor_parallel": "tp",
        "attn_tp": "tp",
        "attention_tp": "tp",
        "pipeline_parallel": "pp",
        "dp": "attn_dp",
        "data_parallel": "attn_dp",
        "cp": "attn_cp",
        "context_parallel": "attn_cp",
        "attention_cp": "attn_cp",
        "attention_context_parallel": "attn_cp",
        "ep": "moe_ep",
        "expert_parallel": "moe_ep",
        "moe_data_parallel": "moe_dp",
        "decode_context_parallel": "dcp",
    },
    "vllm": {
        "tensor_parallel": "tp",
        "pipeline_parallel": "pp",
        "data_parallel": "dp",
        "cp": "pcp",
        "context_parallel": "pcp",
        "prefill_context_parallel": "pcp",
        "decode_context_parallel": "dcp",
        "ep": "moe",
        "expert_parallel": "moe",
        "enable_expert_parallel": "moe",
        "enable_eplb": "eplb",
        "enable_elastic_ep": "elastic_ep",
        "nnodes": "nodes",
    },
    "megatron": {
        "tensor_parallel": "tp",
        "tensor_model_parallel": "tp",
        "pipeline_parallel": "pp",
        "pipeline_model_parallel": "pp",
        "virtual_pipeline_model_parallel": "vpp",
        "context_parallel": "cp",
        "dp": "world",
        "data_parallel": "world",
        "expert_parallel": "ep",
        "expert_model_parallel": "ep",
        "expert_tensor_parallel": "etp",
        "num_distributed_optimizer_instances": "optimizer_instances",
    },
}

_REMARKS: Mapping[tuple[str, str], str] = {
    ("sglang", "attn_dp"): "data parallelism with DP attention; replicas without it are launches of their own",
    ("vllm", "moe"): "moe=true makes the expert groups, each dp*pcp*tp ranks wide",
    ("megatron", "world"): "data parallelism is what is left of it: world / (tp*cp*pp)",
}


def find_engine_name(system: str, asked: str, known: Iterable[str]) -> str:
    """The known name of what an engine's argument calls `asked`; "" if it is no argument's name."""
    plain = asked.lower().lstrip("-").replace("-", "_").removesuffix("_size")
    name = NAMES.get(system, {}).get(plain, plain)
    return name if name in set(known) else ""


def find_remark(system: str, name: str) -> str:
    return _REMARKS.get((system, name), "")
