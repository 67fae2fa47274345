"""What learner and engine take of one GPU that they share, phase by phase, from the shape of a network and a config.

    python run_stage.py -cn training/plan_gpu stage.experiment=exp/ppo/grpo_gsm8k_one_gpu stage.gpu_gib=24 \\
        'stage.overrides="model.path=M"' output=plan.json

Certain are weights, gradients and moments, and what the engine is given. Activations, scores and what two processes
take for themselves are estimates, made to be rather too large. Nothing of it was measured on a GPU.

Activations are those that a decoder's backward pass reads, of each token in each layer, with h the hidden size, q and k
the sizes of all query and of all key heads, m the MLP's, and c bytes per number that is computed with (2 in bf16):

    8 h                the input of both norms, in float32 as the residual stream is
    2 c h              what the norms give to the matrix products
    2 c (q + k)        queries, keys, values, and what attention makes of them
    4 c m              both projections of a gated MLP, the activation, the product

With gradient checkpointing each layer keeps its input (4 h) and one layer at a time has all of it. `eager` attention
keeps the shares of every pair of tokens of a row besides, in float32 and in what is computed with.
"""

from dataclasses import dataclass, field
from typing import Any

from espalier.data.records import BadInput
from espalier.models.token_scores import MAX_SCORES

GIB = 2**30
# weights, gradients, optimizer in bytes per trained parameter on the GPU of one rank (docs/launching.md)
BYTES_PER_PARAMETER = {
    "none": (4, 4, 8),
    "zero0": (4, 4, 8),
    "zero1": (4, 4, 12),
    "zero2": (4, 4, 12),
    "zero3": (4, 4, 12),
    "zero1_offload": (4, 4, 0),
    "zero2_offload": (4, 0, 0),
    "zero3_offload": (0, 0, 0),
}
_SCORE = 10  # bytes: the softmax and its gradient in float32, and the gradient as it is multiplied
_CONTEXT = GIB // 2  # of a process on a GPU: its CUDA context and libraries
_WORK = GIB  # of the engine's share: its own activations, when it computes the most tokens at once


@dataclass(frozen=True)
class Shape:
    """Of a decoder: its sizes, and its number of parameters (a tied head counted once)."""

    parameters: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    mlp: int
    vocabulary: int


def shape_of(config: Any, parameters: int) -> Shape:
    """Read the shape of a network off transformers' config. Raises BadInput where it does not say one."""
    text = config.get_text_config()
    try:
        heads, hidden = int(text.num_attention_heads), int(text.hidden_size)
        return Shape(
            parameters, int(text.num_hidden_layers), hidden, heads,
            int(getattr(text, "num_key_value_heads", None) or heads),
            int(getattr(text, "head_dim", None) or hidden // heads), int(text.intermediate_size), int(text.vocab_size),
        )  # fmt: skip
    except (AttributeError, TypeError) as error:
        raise BadInput(f"no memory plan of a {config.model_type} network: {error}") from None


@dataclass(frozen=True)
class Sharing:
    """How a run uses the GPU. `engine`: a name of conf/deepspeed. Bytes of `critic` (what else is trained) and `frozen`
    networks are per parameter: their numbers of parameters. `micro_batch` rows of at most `row` tokens go through the
    network at once. `num_engines` on this GPU, each cut over `cut` of them, take `utilization` of it each."""

    engine: str = "none"
    has_adapters: bool = False
    critic: int = 0
    frozen: int = 0
    micro_batch: int = 64
    row: int = 512
    has_checkpointing: bool = False
    is_eager: bool = False
    is_bf16: bool = True
    sleeps: bool = True
    num_engines: int = 1
    cut: int = 1
    utilization: float = 0.92


@dataclass(frozen=True)
class Phase:
    """A part of an iteration: what holds how many bytes. `estimated` are the names of parts that are no certainty."""

    name: str
    parts: dict[str, int]
    estimated: frozenset[str] = frozenset(("contexts", "activations", "scores", "copies to compute with"))

    @property
    def bytes(self) -> int:
        """In all."""
        return sum(self.parts.values())

    @property
    def certain_bytes(self) -> int:
        """Without what is estimated."""
        return sum(size for name, size in self.parts.items() if name not in self.estimated)


@dataclass(frozen=True)
class GpuPlan:
    """`total`: bytes of the GPU (0: unknown, and nothing is said of caches). `cache`: bytes of all key-value caches at
    most; `cache_tokens`: tokens that one of them holds. `largest_share`: of the GPU that engines may take between
    updates, for one that is shared so."""

    total: int
    phases: list[Phase] = field(default_factory=list)
    cache: int = 0
    cache_tokens: int = 0
    largest_share: float = 0.0

    @property
    def peak(self) -> Phase:
        """The phase that takes most."""
        return max(self.phases, key=lambda phase: phase.bytes)


def activation_bytes(shape: Shape, sharing: Sharing) -> int:
    """Return what a micro-batch keeps for its backward pass; see the module."""
    each = 2 if sharing.is_bf16 else 4
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    layer = 8 * shape.hidden + 2 * each * shape.hidden + 2 * each * (queries + keys) + 4 * each * shape.mlp
    if sharing.is_eager:
        layer += (4 + each) * shape.heads * sharing.row
    tokens = sharing.micro_batch * sharing.row
    if sharing.has_checkpointing:
        return tokens * (shape.layers * 4 * shape.hidden + layer)
    return tokens * shape.layers * layer


def score_bytes(shape: Shape, sharing: Sharing) -> int:
    """Return what log-probs over the vocabulary take at a time (`models.token_scores`)."""
    return _SCORE * min(sharing.micro_batch * sharing.row * shape.vocabulary, MAX_SCORES["cuda"])


def gpu_plan(shape: Shape, sharing: Sharing, total: int) -> GpuPlan:
    """Return the plan of one iteration. Raises BadInput on an engine of the learner that is not known, and where the
    engines' share holds no cache."""
    if sharing.engine not in BYTES_PER_PARAMETER:
        raise BadInput(f"deepspeed={sharing.engine}: no memory plan of it: one of {', '.join(BYTES_PER_PARAMETER)}")
    weight, gradient, moments = BYTES_PER_PARAMETER[sharing.engine]
    trained = sharing.critic + (0 if sharing.has_adapters else shape.parameters)
    held = weight * (shape.parameters + sharing.critic) if weight else 0
    rest = {"weights": held, "moments": moments * trained, "frozen networks": 4 * sharing.frozen,
            "contexts": (1 + sharing.num_engines) * _CONTEXT}  # fmt: skip
    served = sharing.num_engines * 2 * shape.parameters // sharing.cut
    share = sharing.num_engines * int(sharing.utilization * total)
    engines = {"engines": share} if total else {"engines' weights": served}
    asleep = {} if sharing.sleeps else engines
    is_copied = sharing.has_adapters or sharing.engine.startswith("zero3")
    update = rest | {
        "gradients": gradient * trained,
        "copies to compute with": 2 * (shape.parameters + sharing.critic) if sharing.is_bf16 else 0,
        "activations": activation_bytes(shape, sharing),
        "scores": score_bytes(shape, sharing),
    }
    delivery = rest | {"delivered copy": 4 * shape.parameters if is_copied else 0}
    phases = [
        Phase("rollouts", rest | engines),
        Phase("update", update | asleep),
        Phase("delivery", delivery | ({"engines' weights": served} if sharing.sleeps else engines)),
    ]
    phases = [Phase(phase.name, {name: size for name, size in phase.parts.items() if size}) for phase in phases]
    if not total:
        return GpuPlan(0, phases)
    cache = share - served - sharing.num_engines * _WORK
    token = 4 * shape.layers * shape.kv_heads * shape.head_size // sharing.cut
    between = max(0, total - sum(rest.values())) / total / sharing.num_engines
    return GpuPlan(total, phases, cache, cache // sharing.num_engines // token, int(100 * between) / 100)


def lines_of(plan: GpuPlan) -> list[str]:
    """Return the plan as lines to read, in GiB."""
    lines = []
    for phase in plan.phases:
        parts = ", ".join(f"{name} {'~' if name in phase.estimated else ''}{size / GIB:.2f}"
                          for name, size in phase.parts.items())  # fmt: skip
        lines.append(f"{phase.name}: {phase.bytes / GIB:.2f} GiB ({parts})")
    if plan.total:
        lines.append(f"caches: at most {plan.cache / GIB:.2f} GiB, {plan.cache_tokens:,} tokens in each engine")
    return [*lines, verdict(plan)]


def verdict(plan: GpuPlan) -> str:
    """Return in one line whether the GPU is large enough."""
    peak = plan.peak
    takes = f"the most is taken in the {peak.name}: {peak.bytes / GIB:.2f} GiB, {peak.certain_bytes / GIB:.2f} of it "
    takes += "certain"
    if not plan.total:
        return f"{takes}; no GPU is here to compare with, and an engine's share of it is not in these numbers"
    return f"{takes}, of {plan.total / GIB:.2f} GiB"


def remedies(plan: GpuPlan, sharing: Sharing) -> str:
    """Return what makes the phases smaller that take more than the GPU has, in settings."""
    found, names = [], {phase.name for phase in plan.phases if phase.bytes > plan.total}
    if "rollouts" in names:
        found.append(f"client.options.gpu_memory_utilization={plan.largest_share:g} at most")
    if not sharing.sleeps:
        found.append("engine.sleeps=true")
    if "update" in names:
        found += [] if sharing.has_checkpointing else ["model.gradient_checkpointing=true"]
        found.append(f"an update.micro_batch_size below {sharing.micro_batch}")
    return ", ".join([*found, "deepspeed=zero2_offload", "lora=lora"])
