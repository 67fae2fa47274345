"""The memory that one rank needs to train a network, part by part, from shapes and settings alone.

P is the number of parameters, T that of the trained ones, n of ranks, c the bytes of a number that is computed with (2
in bf16, else 4), R a loss's tokens, V the vocabulary, h the hidden size, q all query heads together, m the MLP.

States (docs/launching.md): weights, gradients and AdamW's two moments are float32. DeepSpeed keeps a second copy of the
weights beside the moments and fills buckets of gradients; ZeRO 3 cuts everything, and gathers weights up to
`stage3_max_live_parameters`.

Activations are what the backward pass reads, of each token in each layer:

    8 h                both norms, in float32 as the residual stream is
    2 c h              what they give to the matrix products
    5 c q              queries, keys and values (repeated for every query head), what attention makes of them, twice
    4 c m              both projections of a gated MLP, the activation, the product

The last layer's MLP is computed at tokens alone that are read, where those are few (`models.last_layer`). Segments
behind a shared prompt copy its keys and values (2 c q for each). `eager` attention keeps c bytes for each pair of
tokens and head. With gradient checkpointing a layer keeps its input (4 h), and one layer at a time has all of it; a
selective one keeps beside it what products give, c (2 q + 2 k + 2 h + 2 m), k all key heads together
(`models.recompute`).
Scores over the vocabulary are computed in chunks (`models.token_scores`).

Libraries, kernels' own work space and what an allocator cannot reuse are in none of these numbers.
"""

from dataclasses import dataclass, field

from espalier.data.batches.packing import PlacedRows
from espalier.training.lookup_rows import PORTION

GIB = 2**30
BUCKET = 500_000_000  # DeepSpeed's own defaults, in numbers
LIVE = 1_000_000_000
PREFETCH = 50_000_000


@dataclass(frozen=True)
class Shape:
    """Of a decoder: its sizes, and its number of parameters (a tied head counted once). `outputs`: of its head, the
    vocabulary (0) or the labels of a scalar head; `looked_up`: parameters that no matrix product reads, the embedding
    of a head that is not tied to it."""

    parameters: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    mlp: int
    vocabulary: int
    outputs: int = 0
    looked_up: int = 0

    @property
    def is_scalar(self) -> bool:
        """Whether its head says no tokens."""
        return self.outputs > 0


@dataclass(frozen=True)
class Network:
    """One that is trained, `trained` of its parameters; fewer with adapters or a frozen body. `largest`: numbers of its
    largest weight, `multiplied` of the largest one whose gradient is not that of lookups alone
    (`training.lookup_rows`), `by_rows` of those whose is; `adds_rows`: whether those of lookups are rows at least until
    they are added to a head's. 0 where that was not looked at."""

    shape: Shape
    trained: int
    largest: int = 0
    multiplied: int = 0
    by_rows: int = 0
    adds_rows: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether embeddings and head are trained too."""
        return self.trained >= self.shape.parameters


@dataclass(frozen=True)
class Work:
    """What goes through a network at once: `tokens` computed, `reads` of them read by the loss; `copied_keys`: keys of
    the segments behind a shared prompt; `pairs` of tokens that see one another; `passes` of a step."""

    tokens: int
    reads: int
    copied_keys: int = 0
    pairs: int = 0
    passes: int = 2


def work_of(placed: PlacedRows, reads: int, passes: int) -> Work:
    """Return the work of rows as they are placed for a network; `reads` and `passes` as of `Work`."""
    segments, tokens = placed.segments, placed.ids.numel()
    if segments is None:
        return Work(tokens, reads, pairs=tokens * placed.ids.shape[1], passes=passes)
    copied = pairs = 0
    for own, above in enumerate(segments.above):
        keys = segments.lengths[own] + sum(segments.lengths[segment] for segment in above)
        copied += keys if above else 0
        pairs += keys * segments.lengths[own]
    return Work(tokens, reads, copied, pairs, passes)


@dataclass(frozen=True)
class Setup:
    """How a run computes. `networks` are trained in turn, `frozen` parameters are only read, whole on every rank;
    `frozen_cut` are those of each network that ZeRO 3 cuts, where it is chosen. `reference` is the network of a
    reference, which ZeRO 3 cuts: the policy's start (`is_start`), asked before the first step alone (`is_asked_first`).
    `bucket`, `live`, `prefetch`: numbers that ZeRO keeps for gradients on their way, gathers, and gathers at once.
    `delivered`: numbers that one weight takes whose adapters are merged for an engine (`merged_numbers`); `buffers`:
    bytes that a delivery holds; `averaged`: parameters of a moving average on rank 0's CPU. `max_scores`: tokens x
    vocabulary at a time, or `least_scored` tokens. `is_bf16_fast`: whether bfloat16 would be a remedy. `recomputes`:
    what gradient checkpointing does (`models.recompute.recomputes`). `attention`: the kernel of packed rows, to be
    shown. `steps_in_backward`: whether a gradient is dropped before there is the next (`training.step_in_backward`),
    `steps_rows`: by an optimizer that leaves other rows alone."""

    networks: tuple[Network, ...]
    work: Work
    stage: int = 0
    ranks: int = 1
    offloads_optimizer: bool = False
    offloads_weights: bool = False
    has_deepspeed: bool = False
    bucket: int = BUCKET
    num_buckets: int = 1
    live: int = LIVE
    prefetch: int = PREFETCH
    frozen: int = 0
    frozen_cut: tuple[int, ...] = ()
    reference: Shape | None = None
    is_start: bool = False
    is_asked_first: bool = False
    is_bf16: bool = True
    is_bf16_fast: bool = True
    recomputes: str = ""
    is_eager: bool = False
    attention: str = ""
    is_gpu: bool = True
    max_scores: int = 2**28
    least_scored: int = 0
    delivered: int = 0
    buffers: int = 0
    averaged: int = 0
    steps_in_backward: bool = False
    steps_rows: bool = False

    @property
    def share(self) -> int:
        """Over how many ranks an optimizer is cut."""
        return self.ranks if self.has_deepspeed and self.stage >= 1 else 1

    @property
    def keeps_rows(self) -> bool:
        """Whether gradients of lookups are kept as rows (`training.engine.TorchEngine`)."""
        return not self.is_gpu and self.ranks == 1 and not self.has_deepspeed

    @property
    def cuts_weights(self) -> bool:
        """Whether no rank holds whole networks."""
        return self.has_deepspeed and self.stage == 3


@dataclass(frozen=True)
class Phase:
    """A part of an iteration or a step: what holds how many bytes. `estimated` are the names of parts that are no
    certainty."""

    name: str
    parts: dict[str, int]
    estimated: frozenset[str] = frozenset(
        ("contexts", "activations", "kept passes", "scores", "copies to compute with", "gathered weights")
    )

    @property
    def bytes(self) -> int:
        """In all."""
        return sum(self.parts.values())

    @property
    def certain_bytes(self) -> int:
        """Without what is estimated."""
        return sum(size for name, size in self.parts.items() if name not in self.estimated)


@dataclass(frozen=True)
class Plan:
    """`phases` of the device that computes; `host`: what lies on the CPU beside it."""

    phases: list[Phase]
    host: dict[str, int] = field(default_factory=dict)

    @property
    def peak(self) -> Phase:
        """The phase that takes most."""
        return max(self.phases, key=lambda phase: phase.bytes)

    @property
    def host_bytes(self) -> int:
        """In all."""
        return sum(self.host.values())


def layer_bytes(shape: Shape, setup: Setup, work: Work) -> tuple[int, int]:
    """Return the bytes that one layer keeps for its backward pass: (of attention, of what is behind it)."""
    each, queries = 2 if setup.is_bf16 else 4, shape.heads * shape.head_size
    attention = work.tokens * (4 * shape.hidden + each * shape.hidden + 5 * each * queries)
    attention += 2 * each * queries * work.copied_keys
    if setup.is_eager:
        attention += each * shape.heads * work.pairs
    return attention, work.tokens * (4 * shape.hidden + each * shape.hidden + 4 * each * shape.mlp)


def kept_products(shape: Shape, setup: Setup, work: Work) -> tuple[int, int]:
    """Return, as `layer_bytes`, what selective checkpointing keeps of a layer: its input, and what products give."""
    each, queries, keys = 2 if setup.is_bf16 else 4, shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    attention = work.tokens * (4 * shape.hidden + each * (2 * queries + 2 * keys))
    return attention, work.tokens * each * (2 * shape.hidden + 2 * shape.mlp)


def activation_bytes(shape: Shape, setup: Setup) -> int:
    """Return what one pass keeps for its backward pass; see the module."""
    work = setup.work
    last_tokens = work.reads if work.reads <= 0.6 * work.tokens else work.tokens
    attention, behind = layer_bytes(shape, setup, work)
    ends = 4 * work.tokens * shape.hidden + (2 if setup.is_bf16 else 4) * work.reads * shape.hidden  # the last norm
    if setup.recomputes == "full":
        return work.tokens * shape.layers * 4 * shape.hidden + attention + behind + ends
    if setup.recomputes == "selective":
        one_layer = attention + behind
        attention, behind = kept_products(shape, setup, work)
        ends += one_layer - attention - behind
    return shape.layers * attention + int((shape.layers - 1 + last_tokens / max(work.tokens, 1)) * behind) + ends


def score_bytes(shape: Shape, setup: Setup, has_gradient: bool = True) -> int:
    """Return what log-probs over the vocabulary take at a time: logits as they are computed, and their gradient, which
    a CPU writes over logits that are computed again."""
    asked, at_a_time = setup.work.reads * shape.vocabulary, max(setup.max_scores, setup.least_scored * shape.vocabulary)
    copies = 2 if has_gradient and (setup.is_gpu or asked <= at_a_time) else 1
    return 0 if shape.is_scalar else copies * (2 if setup.is_bf16 else 4) * min(asked, at_a_time)


def head_gradient_bytes(network: Network, setup: Setup) -> int:
    """Return what the gradient of the output head takes while it is summed up: in float32, and rounded in bf16."""
    shape = network.shape
    if not network.is_whole or shape.is_scalar:
        return 0
    return (6 if setup.is_bf16 else 4) * shape.vocabulary * shape.hidden


def state_bytes(network: Network, setup: Setup) -> tuple[dict[str, int], dict[str, int]]:
    """Return what a network holds between its steps: (on the device, on the CPU beside it)."""
    total, trained, cut = network.shape.parameters, network.trained, setup.share
    if not setup.has_deepspeed or setup.stage == 0:
        return {"weights": 4 * total, "moments": 8 * trained}, {}
    weights = 4 * total if setup.stage < 3 else -(-4 * total // cut)
    moments = {"moments": -(-8 * trained // cut), "second copy of weights": -(-4 * trained // cut)}
    buckets = {"buckets": 4 * setup.bucket} if setup.stage == 3 else {}
    gradients = {"gradients": -(-4 * trained // cut)} if setup.stage == 3 else {}
    if not setup.offloads_optimizer:
        return {"weights": weights, **moments, **gradients, **buckets}, {}
    gradients = {"gradients": -(-4 * trained // cut)} if setup.stage > 1 else {}
    weights_at = {"weights": weights}
    host = {**moments, **gradients, **(weights_at if setup.offloads_weights else {})}
    return {**({} if setup.offloads_weights else weights_at), **buckets}, host


def copied_bytes(shape: Shape, setup: Setup) -> int:
    """Return what a pass in bf16 rounds of the weights: all that is multiplied, or, where they are cut, one at a time
    of those that are gathered, the largest of which is the head."""
    multiplied = shape.parameters - shape.looked_up
    return 2 * (min(multiplied, shape.vocabulary * shape.hidden) if setup.cuts_weights else multiplied)


def held_numbers(shape: Shape, is_half: bool) -> int:
    """Return what a network that is only read holds, in numbers of 4 bytes: in bf16 all but the embeddings is held in
    halves."""
    return (shape.parameters + shape.vocabulary * shape.hidden) // 2 if is_half else shape.parameters


def largest_weight(shape: Shape) -> int:
    """Return the numbers of the largest weight, which is the embedding or one of the MLP."""
    return shape.hidden * max(shape.vocabulary, shape.mlp)


def merged_numbers(shape: Shape) -> int:
    """Return the numbers that are there while adapters are merged into the largest weight that has some: the sum, and
    what is added."""
    return 2 * shape.hidden * max(shape.mlp, shape.heads * shape.head_size)


def reference_bytes(shape: Shape, setup: Setup) -> int:
    """Return what a reference holds, or the rank's share of it."""
    return -(-4 * held_numbers(shape, setup.is_bf16) // (setup.ranks if setup.cuts_weights else 1))


def asked_bytes(rest: dict[str, int], held: dict[str, int], shape: Shape, setup: Setup) -> dict[str, int]:
    """Return what is there while a reference that is `held` is asked before the first step, beside the `rest`: plain
    AdamW has no moments yet, and of weights that have no gradient one is rounded at a time. A run that goes on has its
    moments and does not ask, but holds the reference for a while too."""
    scores = {"scores": score_bytes(shape, setup, False)}
    copies = {"copies to compute with": 2 * min(shape.parameters, shape.vocabulary * shape.hidden)}
    has_moments = setup.has_deepspeed and setup.stage > 0
    begun = {name: size for name, size in rest.items() if name != "moments" or has_moments}
    found = [_added(begun, held, scores, copies if setup.is_bf16 else {}), _added(rest, held)]
    return max(found, key=lambda parts: sum(parts.values()))


def pass_bytes(network: Network, setup: Setup) -> dict[str, int]:
    """Return what a backward pass takes beside the states as it begins, when all activations are there: of a step's
    only pass the gradient of the head is then the first one."""
    shape, trained, stage = network.shape, network.trained, setup.stage if setup.has_deepspeed else 0
    parts = {"activations": activation_bytes(shape, setup), "scores": score_bytes(shape, setup)}
    if setup.is_bf16:
        parts["copies to compute with"] = copied_bytes(shape, setup)
    whole = trained - numbers_by_rows(network, setup)
    kept = {0: 4 * whole + row_bytes(network, setup), 1: 4 * trained, 2: -(-4 * trained // setup.share)}.get(stage, 0)
    is_first = setup.work.passes == 1 or (stage == 2 and setup.offloads_optimizer)
    parts["gradients"] = head_gradient_bytes(network, setup) + (0 if is_first else kept)
    if stage in (1, 2):  # made as the first gradient is there, when the scores are not any more
        parts["buckets"] = 4 * setup.bucket * setup.num_buckets
        parts["scores"] = max(0, parts["scores"] - parts["buckets"])
    if stage == 3:  # a bucket of them once more until the last of it is used, which is before there are scores
        sent = 4 * min(shape.parameters, setup.prefetch)
        parts["gathered weights"] = 4 * min(shape.parameters, setup.live) + sent
        parts["scores"] = max(0, parts["scores"] - sent)
    return parts


def numbers_by_rows(network: Network, setup: Setup) -> int:
    """Return how many of the trained numbers have no gradient but rows."""
    return network.by_rows if setup.keeps_rows and setup.steps_rows else 0


def row_bytes(network: Network, setup: Setup) -> int:
    """Return what rows of lookups take: of a step's tokens where the optimizer takes them, twice while those of a pass
    are added, else of a pass."""
    if not (setup.keeps_rows and network.adds_rows):
        return 0
    passes = setup.work.passes if numbers_by_rows(network, setup) else 1
    copies = 2 if passes > 1 else 1
    return 4 * network.shape.hidden * copies * min(setup.work.tokens * passes, network.shape.vocabulary)


def step_bytes(network: Network, setup: Setup) -> dict[str, int]:
    """Return what the end of the last backward pass and the optimizer's step take beside the states: all gradients,
    that of the embedding once more on its way to those of earlier passes, or to its own as a head, or as rows (that
    alone, and copies of a portion, where no head shares it); where they are cut, flat copies of a part, with ZeRO 3
    also of a bucket on its way to all ranks, while weights are still gathered. Where weights are updated in the
    backward pass: the largest gradient, of lookups alone that of a portion of the rows and their copies."""
    shape = network.shape
    if setup.steps_in_backward:
        largest = network.largest or largest_weight(shape)
        if setup.steps_rows and network.multiplied:
            largest = min(largest, max(network.multiplied, 4 * PORTION))
        return {"gradients": 4 * min(network.trained, largest)}
    is_added_to = setup.work.passes > 1 or shape.looked_up == 0
    added = 4 * shape.vocabulary * shape.hidden if network.is_whole and is_added_to else 0
    if setup.keeps_rows and network.adds_rows:
        copies = 4 * 4 * PORTION if numbers_by_rows(network, setup) else 0
        added = row_bytes(network, setup) + copies
    if not setup.has_deepspeed or setup.stage == 0:
        return {"gradients": 4 * (network.trained - numbers_by_rows(network, setup)) + added}
    cut = 0 if setup.offloads_optimizer else -(-4 * network.trained // setup.share)
    if setup.stage == 3:
        sent = 4 * min(network.trained, setup.bucket)
        return {"gradients": sent + 2 * cut, "gathered weights": 4 * min(shape.parameters, setup.live)}
    return {"gradients": (4 * network.trained if setup.stage == 1 else 0) + 2 * cut}


def _added(*rows: dict[str, int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in rows:
        for name, size in row.items():
            found[name] = found.get(name, 0) + size
    return {name: size for name, size in found.items() if size}


def memory_plan(setup: Setup) -> Plan:
    """Return what one rank holds at most, in each phase."""
    states = [state_bytes(network, setup) for network in setup.networks]
    held = {"frozen networks": reference_bytes(setup.reference, setup) if setup.reference is not None else 0}
    is_beside = setup.cuts_weights and setup.offloads_weights
    on_device = {} if setup.is_asked_first or is_beside else held
    num_parts = setup.ranks if setup.cuts_weights else 1
    read = {"frozen networks": sum(-(-4 * numbers // num_parts) for numbers in setup.frozen_cut)}
    whole = {"frozen networks": 4 * setup.frozen}
    rest = _added(whole, {} if is_beside else read, on_device, *(device for device, _ in states))
    passes = [_added(rest, pass_bytes(network, setup)) for network in setup.networks]
    steps = [_added(rest, step_bytes(network, setup)) for network in setup.networks]
    largest = [max(rows, key=lambda parts: sum(parts.values())) for rows in (passes, steps)]
    phases = [Phase("between steps", rest), Phase("backward pass", largest[0]), Phase("optimizer step", largest[1])]
    if setup.reference is not None and setup.is_asked_first:
        asked = asked_bytes(rest, {} if is_beside else held, setup.reference, setup)
        phases.insert(0, Phase("reference's pass", asked))
    if setup.frozen_cut and setup.cuts_weights:
        gathered = {"gathered weights": 4 * (min(max(setup.frozen_cut), setup.live + setup.prefetch))}
        phases.append(Phase("reward model's pass", _added(rest, gathered)))
    if setup.delivered or setup.buffers:
        sent = {"merged weight": 4 * setup.delivered, "delivery buffers": setup.buffers}
        phases.append(Phase("delivery", _added(rest, sent)))
        noisy = {"weight with noise": 4 * largest_weight(setup.networks[0].shape)}
        phases.append(Phase("start-up proof", _added(rest, sent, noisy)))
    host = _added(
        *(beside for _, beside in states),
        _added(held, read) if is_beside else {},
        {"moving average": 4 * setup.averaged},
    )
    return Plan(phases, host)
