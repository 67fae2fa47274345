"""What learner and engine take of one GPU that they share, phase by phase, from the shape of a network and a config.

    python run_stage.py -cn training/plan_gpu stage.experiment=exp/ppo/grpo_gsm8k_one_gpu stage.gpu_gib=24 \\
        'stage.overrides="model.path=M"' output=plan.json

What the learner takes is `training.memory_plan`'s. Certain are weights, gradients and moments, and what the engine is
given. Activations, scores and what two processes take for themselves are estimates. Measured on a GPU was one run
(docs/sizes.md: 0.2 % more than planned, with a vocabulary of 400).
"""

from dataclasses import dataclass, field

from espalier.rl.probes.canary import MAX_LOGITS
from espalier.rl.probes.kept_pass import MOST_BYTES
from espalier.sampling.shared_buckets import kept_bytes, receiver_bytes
from espalier.training.memory_of_run import MicroBatch
from espalier.training.memory_plan import GIB, Phase, Setup, memory_plan

_CONTEXT = GIB // 2  # of a process on a GPU: its CUDA context and libraries
_WORK = GIB  # of the engine's share: its own activations, when it computes the most tokens at once
_SCORED = 20  # bytes of a logit of the canaries while they are scored: float32, and what is read off it


@dataclass(frozen=True)
class Sharing:
    """How a run uses the GPU: `setup`, the learner; a `row` of the engine's window. `num_engines` on this GPU (0: they
    have others), each cut over `cut` of them, take `utilization` of it each, as `owner` says ("client" or "server",
    which does not sleep) where `names_share`; `beside` is what each engine of a reward or estimator takes, and none of
    these sleeps."""

    setup: Setup
    micro_batch: MicroBatch
    row: int = 512
    sleeps: bool = True
    num_engines: int = 1
    cut: int = 1
    utilization: float = 0.92
    owner: str = "client"
    names_share: bool = True
    beside: tuple[float, ...] = ()

    @property
    def share(self) -> str:
        """The setting of `utilization`, with the `+` of one that the config does not name yet."""
        return f"{'' if self.names_share else '+'}{self.owner}.options.gpu_memory_utilization"


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


def gpu_plan(sharing: Sharing, total: int) -> GpuPlan:
    """Return the plan of one iteration on a GPU of `total` bytes (0: unknown)."""
    shape = sharing.setup.networks[0].shape
    held, backward, step, delivery, proven = memory_plan(sharing.setup).phases
    contexts = {"contexts": (1 + sharing.num_engines + len(sharing.beside)) * _CONTEXT}
    if total and sharing.beside:
        contexts["engines of the reward"] = int(sum(sharing.beside) * total)
    served = sharing.num_engines * 2 * shape.parameters // sharing.cut
    share = sharing.num_engines * int(sharing.utilization * total)
    waking = {"engines' weights": served} if sharing.num_engines else {}
    engines = {"engines": share} if waking and total else waking
    asleep = {} if sharing.sleeps else engines
    update = max(backward, step, key=lambda phase: phase.bytes)
    row = sharing.row * shape.vocabulary
    scored = _SCORED * min(8 * row, max(MAX_LOGITS, row))
    passes = min(MOST_BYTES, 4 * shape.layers * shape.hidden * 8 * sharing.row)
    proof = proven.parts | {"scores": scored, "kept passes": passes}  # with moments, which a resume has
    arriving, kept = {}, {}
    if sharing.num_engines and sharing.cut == 1:  # else they come through the machine's memory
        arriving = {"weights that arrive": sharing.num_engines * receiver_bytes(shape.vocabulary, shape.hidden)}
        kept = {"buckets of deliveries": kept_bytes(sharing.num_engines)}
    phases = [
        Phase("start-up proof", proof | contexts | engines | arriving),
        Phase("rollouts", held.parts | contexts | engines | kept),
        Phase("update", update.parts | contexts | asleep | kept),
        Phase(
            "delivery",
            delivery.parts | contexts | (waking if sharing.sleeps else engines) | arriving,
        ),
    ]
    if not total or not sharing.num_engines:
        return GpuPlan(total, phases)
    cache = share - served - sharing.num_engines * _WORK
    token = 4 * shape.layers * shape.kv_heads * shape.head_size // sharing.cut
    learner = max(held.bytes, sum((proof | arriving).values()))
    between = max(0, total - learner - sum(contexts.values())) / total / sharing.num_engines
    return GpuPlan(total, phases, cache, cache // sharing.num_engines // token, int(100 * between) / 100)


def lines_of(plan: GpuPlan) -> list[str]:
    """Return the plan as lines to read, in GiB."""
    lines = []
    for phase in plan.phases:
        parts = ", ".join(f"{name} {'~' if name in phase.estimated else ''}{size / GIB:.2f}"
                          for name, size in phase.parts.items())  # fmt: skip
        lines.append(f"{phase.name}: {phase.bytes / GIB:.2f} GiB ({parts})")
    if plan.cache:
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
    if sharing.beside:
        found.append("a smaller options.gpu_memory_utilization of the reward's client")
    if names & {"rollouts", "start-up proof"} and plan.largest_share > 0:
        found.append(f"{sharing.share}={plan.largest_share:g} at most")
    if sharing.num_engines and sharing.owner == "client" and not sharing.sleeps:
        found.append("engine.sleeps=true")
    if "update" in names:
        further = {"": "selective, or true", "selective": "true"}.get(sharing.setup.recomputes)
        found += [f"model.gradient_checkpointing={further}"] if further else []
        batch = sharing.micro_batch
        found += [f"an {batch.setting} below {batch.size}"] if batch.size > batch.least else []
    return ", ".join([*found, "deepspeed=zero2_offload", "lora=lora"])
