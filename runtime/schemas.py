"""The root dataclasses behind every config: a misspelt or ill-typed key fails before anything runs.

Nodes typed `Any` hold components: a `_target_` and its keyword arguments, for `runtime.entrypoint.build`.
Lengths are in tokens, times in seconds.
"""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class TrackingConfig:
    """Where metrics go beside metrics.jsonl, and how often a plain progress line is printed.

    `wandb`: null, offline or online, in `project`; the package wandb is an extra (requirements-wandb.txt).
    """

    tensorboard: bool = False
    wandb: str | None = None
    project: str = "espalier"
    line_every_seconds: float = 10.0


@dataclass
class PredictConfig:
    """Prediction with the `checkpoints`: folders or patterns of them, or a mapping of names to folders (none: the
    model itself). `batch_tokens`: padded tokens of one forward pass."""

    checkpoints: Any = None
    batch_tokens: int = 16384


@dataclass
class TrainConfig:
    """`trainer_base_ds_mul.py`: one model on one fixed dataset.

    `batch_size` examples make one optimizer step over all ranks, in micro-batches of `micro_batch_size`, or of at
    most `micro_batch_tokens` tokens if that is above 0.
    The warm-up lasts `warmup_share` of all steps if that is above 0, else `warmup_steps`.
    Training lasts `max_steps` if that is above 0, else `num_epochs`. `deepspeed` is null for one process
    (or several with plain gradient sums), else DeepSpeed's own JSON. `lora` trains adapters instead of
    the weights. `layout` of a batch: shared (no padding, and tokens that rows begin with in common are computed
    once), packed (no padding), padded, or auto: shared where the network passes the check (models.packing_check), else
    padded, with a line that says why. A network that does not pass refuses shared and packed. No result depends on it.
    `reference_logprobs` of preferences: precomputed before the first step (and the reference's weights let go), online
    in every step, or auto: precomputed where an example is read more than once.

    `resume` says where to go on: `auto` (the newest whole checkpoint, or the start), `latest`, `best`,
    `step-N`, `none`. The newest `keep_checkpoints` are kept, and the `keep_best` with the best `best_metric`
    (`best_is` lowest or highest; each evaluation that is one of them is saved). `on_nonfinite`: a loss or
    gradient that is not finite stops the run, or (skip) its step is left out, `max_skipped` times at most.

    `rank_timeout_seconds`, on several ranks: how long a collective may take, and a rank be without a sign of life
    (runtime/peers.py). Phases in which one rank works for all have no such limit.

    `debug` first shows examples with what the loss reads of them (data.examples.example_view). `mode` is train, or
    predict: score `examples` with checkpoints (training.predict), files in `output_dir`.
    """

    output_dir: str = MISSING
    seed: int = 0
    model: Any = MISSING
    objective: Any = MISSING
    examples: Any = MISSING
    eval_examples: Any = None
    optimizer: Any = MISSING
    deepspeed: Any = None
    lora: Any = None
    rank_timeout_seconds: float = 600.0
    precision: str = "bf16"
    layout: str = "auto"
    batch_size: int = 64
    micro_batch_size: int = 64
    micro_batch_tokens: int = 0
    reference_logprobs: str = "auto"
    max_steps: int = 0
    num_epochs: float = 1.0
    learning_rate: float = 1e-5
    warmup_steps: int = 10
    warmup_share: float = 0.0
    schedule: str = "cosine"
    max_grad_norm: float = 1.0
    log_every: int = 10
    eval_every: int = 0
    save_every: int = 0
    keep_checkpoints: int = 1
    keep_best: int = 0
    best_metric: str = "eval/loss"
    best_is: str = "lowest"
    resume: str = "auto"
    on_nonfinite: str = "stop"
    max_skipped: int = 10
    debug: bool = False
    mode: str = "train"
    predict: PredictConfig = field(default_factory=PredictConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)


@dataclass
class SampleConfig:
    """`service_api_caller_v1.py`, `vllm_inference.py`, `openai_api_caller_v1.py`: requests to a sampler.

    `requests` says what is asked (problems or states) and what is made of the answers, `client` who is
    asked, `server` (may be null) the vLLM server to start first, only if something is left to ask.
    `policy` is the model folder whose tokenizer writes the prompts. `policies` (vllm_inference.py) are the
    model folders to evaluate one after the other: a list, a pattern, or a mapping of names to folders.
    Where at most `max_failed_share` of the requests are refused (too long, say) the run is finished without them:
    exit code 0, the counts said, the requests listed in X.failed.jsonl. Beyond it: 1.
    """

    output: str = MISSING
    policy: str = MISSING
    policies: Any = None
    seed: int = 0
    task: Any = MISSING
    requests: Any = MISSING
    params: Any = MISSING
    client: Any = MISSING
    server: Any = None
    concurrency: int = 64
    stall_seconds: float = 180.0
    max_failed_share: float = 0.0
    tracking: TrackingConfig = field(default_factory=TrackingConfig)


@dataclass
class StageConfig:
    """`run_stage.py`: one offline stage, JSONL in and JSONL (or one document) out."""

    output: str = MISSING
    input: str = ""
    seed: int = 0
    task: Any = None
    stage: Any = MISSING
    tracking: TrackingConfig = field(default_factory=TrackingConfig)


@dataclass
class KLConfig:
    """The penalty for leaving the reference; a `coefficient` of 0 has none, and no reference is loaded.

    `kind` (k1, abs, mse, k3, full: rl/kl.py) is estimated per token and added to the `loss` or, as a cost of each
    token, to the `reward`. Above 0, `max_token` bounds a token's term, and `target` (nats a response) makes the
    coefficient adapt itself over `horizon` rollouts.
    """

    coefficient: float = 0.0
    kind: str = "k3"
    place: str = "loss"
    max_token: float = 0.0
    target: float = 0.0
    horizon: int = 10000


@dataclass
class CriticConfig:
    """The value network: a model with a value at every position, its own optimizer and schedule.

    `form`: a value is the head's output (linear: any number) or its sigmoid (probability: 0 to 1, as process reward
    models are trained); a run whose returns leave that range is refused. `clip_range` bounds how far a value may move
    in one iteration (0: nothing is clipped). For the first `num_warmup_iterations` the critic alone is trained; the
    policy's warm-up and schedule take up the rest of the run.
    """

    model: Any = MISSING
    form: str = "linear"
    optimizer: Any = MISSING
    learning_rate: float = 1e-5
    warmup_steps: int = 0
    schedule: str = "constant"
    max_grad_norm: float = 1.0
    clip_range: float = 0.2
    num_warmup_iterations: int = 0


@dataclass
class EMAConfig:
    """A moving average of the policy's versions (rl/ema.py), saved as model_ema/; a `decay` of 0 has none."""

    decay: float = 0.0


@dataclass
class ProbesConfig:
    """What stops a run, or is warned of (`on_fault`: stop, or warn), before anything is learnt from it
    (rl/probes/checks.py).

    `max_gap`: the mean absolute difference of the engine's and the trainer's log-probs, in nats a token (0: what
    rounding makes of this policy, measured in every iteration, decides; an engine with quantised weights needs a number
    of its own). `max_step`: KL between one version and the next on fixed responses, and `max_update_kl`,
    `max_reference_kl`, in nats per token (0: any). Rollouts of another version than the one that is trained are never
    learnt from.
    """

    on_fault: str = "stop"
    max_gap: float = 0.0
    max_step: float = 1.0
    max_update_kl: float = 1.0
    max_reference_kl: float = 3.0


@dataclass
class RLConfig:
    """`main.py`: reinforcement learning with a live engine.

    One iteration samples `num_problems` x `group_size` rollouts and makes `num_epochs` passes over them
    in minibatches of `minibatch_size` rollouts. Groups whose rewards agree are replaced by groups of other
    problems up to `dynamic_sampling_rounds` times an iteration (DAPO's dynamic sampling). `whitening` of advantages
    over the whole iteration: none, scale or standard. A minibatch's loss is divided by what `loss_aggregation`
    says: token, sequence or constant (rl/losses.py). One whose mean ratio is above `max_mean_ratio` (0: any)
    is skipped and counted. `tis_cap` above 0 weighs tokens by the ratio of the trainer's and the engine's
    policy, truncated there (Yao et al. 2025). `critic` is null where the estimator needs none. `server` is null
    where `client.base_url` names a running one (with controls), or the client has its engines itself.

    `deepspeed` is null for one process (or several with plain gradient sums), else DeepSpeed's own JSON, for the
    policy and the critic alike. `lora` trains adapters instead of the policy's weights, which are then shared with the
    reference.

    The newest `keep_checkpoints` are kept, and of those saved right after an evaluation the `keep_best` with the
    highest accuracy. Every `export_every` iterations the policy is saved as a model folder that stays
    (policies/iteration-N), for evaluation apart. Training ends before `num_iterations`, schedules unchanged, after
    iteration `stop_after`, or after `patience` evaluations in a row without a new best (0: neither). Every
    `samples_every` iterations the first rollouts of `num_samples` problems are written down (samples/).

    A problem of which the server refuses the prompt (HTTP 400) gives no group; where they are more than
    `max_refused_share` of an iteration's or an evaluation's problems the run ends (one may always be, unless it is 0).
    `rank_timeout_seconds` is that of TrainConfig.
    """

    output_dir: str = MISSING
    seed: int = 0
    task: Any = MISSING
    model: Any = MISSING
    deepspeed: Any = None
    lora: Any = None
    ema: EMAConfig = field(default_factory=EMAConfig)
    critic: CriticConfig | None = None
    reward: Any = MISSING
    advantage: Any = MISSING
    kl: KLConfig = field(default_factory=KLConfig)
    server: Any = None
    client: Any = MISSING
    params: Any = MISSING
    optimizer: Any = MISSING
    rank_timeout_seconds: float = 600.0
    precision: str = "bf16"
    num_iterations: int = 10
    num_problems: int = 64
    group_size: int = 8
    dynamic_sampling_rounds: int = 0
    max_refused_share: float = 0.05
    num_epochs: int = 1
    minibatch_size: int = 512
    micro_batch_size: int = 64
    learning_rate: float = 1e-6
    warmup_steps: int = 0
    schedule: str = "constant"
    max_grad_norm: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    entropy_bonus: float = 0.0
    max_mean_ratio: float = 0.0
    tis_cap: float = 0.0
    loss_aggregation: str = "token"
    whitening: str = "none"
    eval_every: int = 0
    num_eval_problems: int = 200
    save_every: int = 0
    keep_checkpoints: int = 1
    keep_best: int = 0
    export_every: int = 0
    stop_after: int = 0
    patience: int = 0
    num_samples: int = 8
    samples_every: int = 1
    probes: ProbesConfig = field(default_factory=ProbesConfig)
    concurrency: int = 64
    stall_seconds: float = 180.0
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
