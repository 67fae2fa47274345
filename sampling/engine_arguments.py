"""vLLM's arguments for an engine of ours: the same behind a server and without one.

What an engine is asked for by name (`conf/engine_options/`) goes to vLLM as it is, and wins over what is written here.
"""

import math
from collections.abc import Mapping
from typing import Any

from espalier.data.records import BadInput

PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
BACKEND = "distributed_executor_backend"
# An engine that gives the logits of a head at every token. vLLM itself keeps its prefix cache on where attention is
# causal; what comes from the cache has no logits, which `OfflineClient.token_logits` sees to.
_SCORES = {"runner": "pooling", "pooler_config": {"task": "token_classify"}}
# New weights, with a receipt of every worker.
_TAKES_WEIGHTS = {"worker_extension_cls": "espalier.sampling.weight_receipt.ReceivesWeights"}
# An engine of one device works in one process. On CPUs vLLM gives its worker a process of its own, which keeps a core
# busy for a second after the last request: the trainer's, where they share a machine.
_ONE_PROCESS = {BACKEND: "vllm.v1.executor.uniproc_executor.UniProcExecutor"}


def spelled(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with vLLM's names for them, which a command line may write with dashes."""
    return {name.replace("-", "_"): value for name, value in options.items()}


def num_devices(options: Mapping[str, Any]) -> int:
    """Return how many devices an engine with these options works on (1 where none of them says more)."""
    own = spelled(options)
    return math.prod(int(own.get(name) or 1) for name in PARALLEL)


def check_one_engine(options: Mapping[str, Any]) -> None:
    """Raise BadInput where vLLM's options ask for copies of the engine, which vLLM has behind its server only."""
    if spelled(options).get("data_parallel_size") not in (None, 1):
        raise BadInput("client.options.data_parallel_size: set client.num_engines in its place")


def is_one_process(options: Mapping[str, Any], takes_weights: bool) -> bool:
    """Say whether an engine takes weights and works on one device, and nothing else was asked for."""
    return takes_weights and num_devices(options) == 1 and BACKEND not in spelled(options)


def engine_dtype(dtype: str, options: Mapping[str, Any]) -> str:
    """Return what an engine computes in: what its options say, else `dtype`, of which "auto" is bfloat16 where this
    machine multiplies it fast and float32 where it does not. An "auto" of the options is vLLM's own, the model's."""
    if "dtype" in options or dtype != "auto":
        return str(options.get("dtype", dtype))
    import torch  # not by a caller of a server that runs already

    from espalier.models.precision import has_fast_bf16

    return "bfloat16" if has_fast_bf16("cuda" if torch.cuda.is_available() else "cpu") else "float32"


ON_NODES = "bfloat16"
"""What "auto" is of engines on the nodes of a cluster, which are of other kinds than this machine."""
_RAY_ENGINES = "espalier.sampling.ray_engines.RayEngines"


def settled_dtype(node: Any) -> Any:
    """Return a config's server or client with what its engines compute in, on this machine or on a cluster's nodes, in
    place of `auto`."""
    if not isinstance(node, dict) or node.get("dtype") != "auto":
        return node
    dtype = ON_NODES if node.get("_target_") == _RAY_ENGINES else "auto"
    return {**node, "dtype": engine_dtype(dtype, node.get("options") or {})}


def window_of_engine(options: Mapping[str, Any], max_model_len: int) -> int:
    """Return the tokens of an engine's window: vLLM's own option comes before ours. Raises BadInput on 16k or auto, of
    which nobody here knows how many they are."""
    window = options.get("max_model_len", max_model_len)
    if not str(window).isdecimal():
        raise BadInput(f"client.options.max_model_len must be a number of tokens, got {window!r}: set "
                       "client.max_model_len")  # fmt: skip
    return int(window)


def engine_arguments(
    model: str,
    dtype: str,
    max_model_len: int | None,
    options: Mapping[str, Any],
    takes_weights: bool,
    scores_tokens: bool = False,
) -> dict[str, Any]:
    """Of one engine: name → value, names with underscores. `max_model_len` in tokens; `scores_tokens`: of a model with
    a head at every token, which samples nothing. Called where the engine runs: without `enforce_eager` it is eager
    where there is no GPU."""
    own = spelled(options)
    if own.get("enforce_eager") is None:
        own["enforce_eager"] = not has_gpu()
    return {
        "model": model,
        "dtype": dtype,
        "max_model_len": max_model_len,
        **(_SCORES if scores_tokens else {}),
        **(_TAKES_WEIGHTS if takes_weights else {}),
        **(_ONE_PROCESS if is_one_process(options, takes_weights) else {}),
        **own,
    }


def has_gpu() -> bool:
    """Say whether there is a GPU, in a way that leaves this process able to fork workers."""
    import torch  # not by a caller of a server that runs already

    return torch.cuda.device_count() > 0  # by NVML: after `is_available` no worker could be forked
