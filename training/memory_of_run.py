"""The memory plan of a run (`training.memory_plan`) from its config: networks are built without weights and counted.

`smallest_change` names what makes a run fit that does not: one setting where one is enough, tried from the one that
costs least to the one that changes most, else several together.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from espalier.data.records import BadInput
from espalier.models.gpu_attention import AUTO, kernel_of
from espalier.models.load import BadModel, is_reward_model, load_config
from espalier.models.precision import has_fast_bf16, is_bf16
from espalier.models.recompute import recomputes
from espalier.models.token_scores import LEAST_TOKENS, MAX_SCORES
from espalier.runtime.entrypoint import build
from espalier.runtime.ranks import is_main_rank
from espalier.runtime.schemas import TrainConfig
from espalier.training.lookup_rows import VECTOR, plain_lookups
from espalier.training.memory_plan import (
    BUCKET,
    GIB,
    LIVE,
    PREFETCH,
    Network,
    Plan,
    Setup,
    Shape,
    Work,
    memory_plan,
    merged_numbers,
)

log = logging.getLogger("stage")


class NoPlan(BadInput):
    """A network or a setting whose memory is not planned here."""


def device_bytes() -> int:
    """Return the memory of this machine's first GPU, 0 where there is none."""
    return int(torch.cuda.mem_get_info()[1]) if torch.cuda.is_available() else 0


def model_paths(node: Any) -> Iterator[str]:
    """Return the model folders that the components below a node are built from."""
    for component in model_nodes(node):
        yield component["path"]


def model_nodes(node: Any) -> Iterator[dict[str, Any]]:
    """Return the components below a node that are built from a model folder, their `path`."""
    if isinstance(node, dict):
        if "_target_" in node and isinstance(node.get("path"), str):
            yield node
        for value in node.values():
            yield from model_nodes(value)
    elif isinstance(node, list):
        for value in node:
            yield from model_nodes(value)


def shape_of(config: Any, parameters: int, outputs: int = 0) -> Shape:
    """Read the shape of a network off transformers' config. Raises NoPlan where it does not say one, and of a mixture
    of experts, whose passes are no decoder's."""
    text = config.get_text_config()
    if any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise NoPlan(f"no memory plan of a {config.model_type} network: it is a mixture of experts")
    try:
        heads, hidden, vocabulary = int(text.num_attention_heads), int(text.hidden_size), int(text.vocab_size)
        is_tied = not outputs and bool(getattr(text, "tie_word_embeddings", False))
        return Shape(
            parameters, int(text.num_hidden_layers), hidden, heads,
            int(getattr(text, "num_key_value_heads", None) or heads),
            int(getattr(text, "head_dim", None) or hidden // heads), int(text.intermediate_size), vocabulary, outputs,
            0 if is_tied else vocabulary * hidden,
        )  # fmt: skip
    except (AttributeError, TypeError) as error:
        raise NoPlan(f"no memory plan of a {config.model_type} network: {error}") from None


def network_of(path: str, num_labels: int | None = None, lora: Any = None, trains: str = "all") -> Network:
    """Count the parameters of a model folder's network, and those that are trained, without reading its weights.
    `num_labels`: of a scalar head on its body (None: as the folder says). Raises NoPlan where there is none."""
    if lora and lora.get("bits"):
        raise NoPlan(f"no memory plan of a base in {lora['bits']} bits")
    config = load_config(path)
    is_scalar = num_labels is not None or is_reward_model(path)
    outputs = 0
    if is_scalar:
        config.num_labels = outputs = int(num_labels or config.num_labels)
    with torch.device("meta"):
        model = (AutoModelForTokenClassification if is_scalar else AutoModelForCausalLM).from_config(config)
        shape = shape_of(config, sum(value.numel() for value in model.parameters()), outputs)
        if trains == "head":
            return Network(shape, sum(value.numel() for value in model.get_submodule("score").parameters()))
        if not lora:
            return Network(shape, shape.parameters, **weights_of(model))
        wrapped = build(lora).wrap(model)
    total = sum(value.numel() for value in wrapped.parameters())
    trained = sum(value.numel() for value in wrapped.parameters() if value.requires_grad)
    return Network(replace(shape, parameters=total), trained)


def weights_of(model: Any) -> dict[str, Any]:
    """Return what a `Network` holds of its weights: the largest ones, and what lookups by rows have to do with them."""
    lookups = set(plain_lookups(model))
    by_rows = {lookup for lookup in lookups if lookup.embedding_dim % VECTOR == 0}
    modules = [module for module in model.modules() if module not in by_rows]
    others = {value for module in modules for value in module.parameters(recurse=False)}
    return {
        "largest": max(value.numel() for value in model.parameters()),
        "multiplied": max(value.numel() for value in others),
        "by_rows": sum(value.numel() for value in {lookup.weight for lookup in by_rows} - others),
        "adds_rows": model.get_input_embeddings() in lookups,
    }


def of_node(node: Mapping[str, Any], lora: Any = None) -> Network:
    """Return the network that a config's `model` names."""
    labels = int(node["num_labels"]) if node.get("num_labels") else None
    return network_of(str(node["path"]), labels, lora, str(node.get("trains", "all")))


def cutting_of(deepspeed: Mapping[str, Any] | None, num_ranks: int, is_gpu: bool) -> dict[str, Any]:
    """Return the settings of a `Setup` that DeepSpeed's JSON decides, and on what a network computes."""
    zero = (deepspeed or {}).get("zero_optimization") or {}
    stage = int(zero.get("stage", 0))
    overlaps = zero.get("overlap_comm")
    return {
        "stage": stage,
        "ranks": num_ranks,
        "has_deepspeed": bool(deepspeed),
        "offloads_optimizer": (zero.get("offload_optimizer") or {}).get("device") == "cpu",
        "offloads_weights": (zero.get("offload_param") or {}).get("device") == "cpu",
        "bucket": int(zero.get("reduce_bucket_size", BUCKET)),
        "num_buckets": 2 if overlaps and stage < 3 else 1,
        "live": int(zero.get("stage3_max_live_parameters", LIVE)),
        "prefetch": int(zero.get("stage3_prefetch_bucket_size", PREFETCH)),
        "is_gpu": is_gpu,
        "max_scores": MAX_SCORES["cuda" if is_gpu else "cpu"],
        "least_scored": LEAST_TOKENS,
    }


def steps_rows(optimizer: Mapping[str, Any]) -> bool:
    """Say whether an optimizer leaves alone rows that never had a gradient (`training.lookup_rows`)."""
    return optimizer.get("_target_") in ("torch.optim.Adam", "torch.optim.AdamW")


def train_setup(config: TrainConfig, work: Work, num_ranks: int, num_read: float, is_gpu: bool) -> Setup:
    """Return how `trainer_base_ds_mul.py` would compute the largest pass of a run that reads `num_read` times as many
    examples as there are. Raises NoPlan where there is none."""
    if int(((config.deepspeed or {}).get("tensor_parallel") or {}).get("autotp_size") or 1) > 1:
        raise NoPlan("no memory plan of tensor parallelism")
    reference = config.objective.get("reference")
    is_online = config.reference_logprobs == "online" or (config.reference_logprobs == "auto" and num_read <= 1)
    is_start = bool(reference) and reference.get("path") == config.model["path"]
    kind = "cuda" if is_gpu else "cpu"
    is_half = is_bf16(config.precision, kind)
    return Setup(
        (of_node(config.model, config.lora),),
        work,
        reference=of_node(reference).shape if reference and not (config.lora and is_start) else None,
        is_start=is_start,
        is_asked_first=not is_online,
        is_bf16=is_half,
        is_bf16_fast=has_fast_bf16(kind),
        recomputes=recomputes(config.model.get("gradient_checkpointing")),
        is_eager=config.model.get("attention") == "eager",
        attention=kernel_of(str(config.model.get("attention", AUTO)), "cuda" if is_gpu else "cpu", is_half),
        steps_in_backward=config.update.step_in_backward,
        steps_rows=steps_rows(config.optimizer),
        **cutting_of(config.deepspeed, num_ranks, is_gpu),
    )


@dataclass(frozen=True)
class MicroBatch:
    """How the largest pass is cut: `size` rows, or, with `is_tokens`, at most so many tokens, which hold a row of at
    least `least`."""

    size: int
    is_tokens: bool = False
    least: int = 1

    @property
    def setting(self) -> str:
        """What a smaller one is set by: a budget of tokens takes the place of rows."""
        return "update.micro_batch_tokens" if self.is_tokens else "update.micro_batch_size"


def micro_batch_of(update: Any, longest: int) -> MicroBatch:
    """Return how a run with these settings of `update` cuts its passes; `longest`: tokens of its longest row."""
    if update.micro_batch_tokens:
        return MicroBatch(update.micro_batch_tokens, True, longest)
    return MicroBatch(update.micro_batch_size)


@dataclass(frozen=True)
class Change:
    """A setting and what it makes of a run."""

    setting: str
    setup: Setup


def changes(setup: Setup, batch: MicroBatch) -> Iterator[Change]:
    """Yield what may be set, the cheapest first, each on top of `setup`; `batch`: its micro-batches."""
    if setup.is_bf16_fast and not setup.is_bf16:
        yield Change("precision=bf16", replace(setup, is_bf16=True))
    further = {"": ("selective", "full"), "selective": ("full",), "full": ()}[setup.recomputes]
    for kind in further:
        setting = "true" if kind == "full" else kind
        yield Change(f"model.gradient_checkpointing={setting}", replace(setup, recomputes=kind))
    if setup.steps_in_backward:  # of one pass, of one process
        return
    work, size = setup.work, batch.size // 2
    while size >= max(1, batch.least):
        share = min(1.0, size / (min(batch.size, work.tokens) if batch.is_tokens else batch.size))
        tokens, reads, keys, pairs = (int(share * count) for count in (work.tokens, work.reads, work.copied_keys,
                                                                       work.pairs))  # fmt: skip
        smaller = Work(tokens, reads, keys, pairs, max(2, work.passes))
        yield Change(f"{batch.setting}={size}", replace(setup, work=smaller))
        size //= 2
    bucket = setup.bucket if setup.has_deepspeed else 50_000_000
    for name, stage, is_offloaded in (("zero2", 2, False), ("zero3", 3, False), ("zero2_offload", 2, True),
                                      ("zero3_offload", 3, True)):  # fmt: skip
        is_further = not setup.has_deepspeed or (setup.stage, setup.offloads_optimizer) < (stage, is_offloaded)
        if is_further and (setup.ranks > 1 or is_offloaded):
            cut = replace(setup, has_deepspeed=True, bucket=bucket, stage=stage, offloads_optimizer=is_offloaded,
                          offloads_weights=is_offloaded and stage == 3)  # fmt: skip
            if stage == 3 and setup.buffers and not setup.cuts_weights:  # weights are gathered as they are sent
                shape = setup.networks[0].shape
                cut = replace(cut, delivered=0, buffers=setup.buffers + 4 * shape.vocabulary * shape.hidden)
            yield Change(f"deepspeed={name}", cut)


def with_adapters(setup: Setup, rank: int = 16) -> Setup:
    """Return the run with adapters of `rank` on every linear layer but the head, and no copy of the policy's start;
    what an engine gets is merged, weight by weight."""
    policy, shape = setup.networks[0], setup.networks[0].shape
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    sides = 2 * (shape.hidden + queries) + 2 * (shape.hidden + keys) + 3 * (shape.hidden + shape.mlp)
    trained = rank * shape.layers * sides
    adapted = Network(replace(shape, parameters=policy.shape.parameters + trained), trained)
    delivered = merged_numbers(shape) if setup.buffers and not setup.cuts_weights else 0
    return replace(setup, networks=(adapted, *setup.networks[1:]), delivered=delivered,
                   reference=None if setup.is_start else setup.reference)  # fmt: skip


def fits(setup: Setup, limit: int) -> bool:
    """Say whether the fullest phase stays within `limit` bytes."""
    return memory_plan(setup).peak.bytes <= limit


def smallest_change(setup: Setup, batch: MicroBatch, limit: int) -> list[str]:
    """Return the settings that make a run fit; none where nothing here does."""
    for change in changes(setup, batch):
        if fits(change.setup, limit):
            return [change.setting]
    if setup.networks[0].is_whole and fits(with_adapters(setup), limit):
        return ["lora=lora"]
    chosen: dict[str, str] = {}  # on top of one another: of each kind the first that is enough, else the strongest
    for kind in dict.fromkeys(change.setting.partition("=")[0] for change in changes(setup, batch)):
        of_kind = [change for change in changes(setup, batch) if change.setting.startswith(f"{kind}=")]
        taken = next((change for change in of_kind if fits(change.setup, limit)), of_kind[-1])
        chosen[kind], setup = taken.setting, taken.setup
        if fits(setup, limit):
            return [*chosen.values()]
    if setup.networks[0].is_whole and fits(with_adapters(setup), limit):
        return [*chosen.values(), "lora=lora"]
    return []


def describe_memory(plan: Plan, limit: int) -> list[str]:
    """Return the plan as lines to read, in GiB."""
    lines = [f"memory, {phase.name}: {phase.bytes / GIB:.2f} GiB per rank ({_parts(phase.parts)})"
             for phase in plan.phases]  # fmt: skip
    if plan.host:
        lines.append(f"memory of the CPU beside it: {plan.host_bytes / GIB:.2f} GiB per rank ({_parts(plan.host)})")
    known = f"of {limit / GIB:.2f} GiB" if limit else "no limit is known to compare it with"
    return [*lines, f"memory: at most {plan.peak.bytes / GIB:.2f} GiB per rank ({plan.peak.name}), {known}"]


def _parts(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())


def check_memory_plan(setup: Setup, batch: MicroBatch, limit: int) -> Plan:
    """Return the plan of a run with micro-batches as `batch` says. Raises BadInput where it needs more than `limit`
    bytes (0: unknown), with the smallest change that makes it fit."""
    plan = memory_plan(setup)
    if not limit or plan.peak.bytes <= limit:
        return plan
    wanted = smallest_change(setup, batch, limit)
    remedy = f"set {' '.join(wanted)}" if wanted else "take more ranks, a larger device or a smaller network"
    raise BadInput(f"a rank needs {plan.peak.bytes / GIB:.2f} GiB in the {plan.peak.name} "
                   f"({_parts(plan.peak.parts)}), and has {limit / GIB:.2f}: {remedy}")  # fmt: skip


def check_memory_gib(memory_gib: float) -> None:
    """Raise BadInput on a limit below 0."""
    if not memory_gib >= 0:
        raise BadInput(f"stage.memory_gib must be at least 0 (0: the GPU that is here), got {memory_gib:g}")


def explain_memory(setup_of: Callable[[bool], Setup], batch: MicroBatch, memory_gib: float) -> dict[str, Any] | None:
    """Return the memory of a run as a document, and log it. `setup_of` gets whether it computes on a GPU, of which
    `memory_gib` says the size (0: the one that is here, else it computes on a CPU). None, with a line that says why,
    where a network has no plan or no folder. Raises BadInput where a rank has less, and where a limit is stated and
    there is no plan."""
    limit = int(memory_gib * GIB) or device_bytes()
    try:
        setup = setup_of(limit > 0)
    except (NoPlan, BadModel) as error:
        if memory_gib:
            raise BadInput(f"stage.memory_gib={memory_gib:g} cannot be compared with anything: {error}") from None
        log.info("memory: %s", error)
        return None
    for line in describe_memory(memory_plan(setup), limit):
        log.info("%s", line)
    kind, device = "bf16" if setup.is_bf16 else "fp32", "GPU" if limit else "CPU"
    log.info("computed in %s; attention of packed rows: %s on a %s", kind, setup.attention, device)
    return summary_of(check_memory_plan(setup, batch, limit), limit) | {"attention": setup.attention}


def warn_of_memory(planned: Callable[[], tuple[Setup, MicroBatch]]) -> None:
    """Warn, on the main rank, where a run that begins needs more than the GPU that is here has, with the smallest
    change that makes it fit. Nothing is said on a CPU, and of what has no plan; `planned` is asked on a GPU alone."""
    limit = device_bytes()
    if not limit or not is_main_rank():
        return
    try:
        setup, batch = planned()
    except (NoPlan, BadModel) as error:
        log.debug("memory: %s", error)
        return
    except Exception as error:  # what is wrong with the run is said where it begins
        log.warning("no memory plan of this run: %r", error)
        return
    try:
        check_memory_plan(setup, batch, limit)
    except BadInput as error:
        log.warning("by its memory plan this run does not fit: %s", error)


def summary_of(plan: Plan, limit: int) -> dict[str, Any]:
    """Return the plan as a JSON document."""
    return {
        "bytes_per_rank": plan.peak.bytes,
        "fullest": plan.peak.name,
        "phases": {phase.name: phase.parts for phase in plan.phases},
        "cpu_bytes_per_rank": plan.host_bytes,
        "limit_bytes": limit or None,
    }
