"""The config of main.py."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from espalier.runtime.schemas.shared_topics import EngineConfig, TrackingConfig


@dataclass
class RolloutConfig:
    """The rollouts of one iteration: `num_problems` x `group_size`, and what branches off from them."""

    num_problems: int = 64
    """problems of one iteration"""
    group_size: int = 8
    """rollouts of one problem that are sampled from its prompt"""
    branches: list[int] = field(default_factory=list)
    """a tree of rollouts: children of every state where rollouts are cut, level by level below the prompt ([3, 2]: 6
    times as many rollouts at most, each with its own part of the tokens); empty: independent rollouts"""
    segment_steps: int = 1
    """steps from one level of the tree to the next"""
    order: str = "random"
    """problems of an iteration: random (drawn anew of all in every iteration) or epochs: every problem once before any
    comes again, each time in a new order"""
    max_staleness: int = 0
    """versions that the policy may be ahead of the one that drew a token; 0: nothing is drawn while the policy is
    trained; above 0 (1 is usual): the next iterations' rollouts are drawn meanwhile"""
    dynamic_sampling_rounds: int = 0
    """above 0: every group whose rewards agree is replaced, as soon as it is scored, by a group of another problem
    (DAPO's dynamic sampling), by at most so many times num_problems further ones per iteration"""
    accuracy_range: list[float] = field(default_factory=lambda: [0.0, 1.0])
    """with dynamic_sampling_rounds, groups whose share of right rollouts is outside are replaced too ([0.2, 0.8]:
    PRIME's); where too few are within in the end, those outside fill up"""
    max_refused_share: float = 0.05
    """share of an iteration's, or an evaluation's, problems of which the server may refuse the prompt (HTTP 400); such
    a problem gives no group; beyond the share the run ends (one may always be refused, unless it is 0)"""


@dataclass
class RLUpdateConfig:
    """What an iteration's rollouts do to the policy: passes, minibatches, the loss, the learning rate."""

    num_epochs: int = 1
    """passes over an iteration's rollouts"""
    minibatch_size: int = 512
    """rollouts of one optimizer step, over all ranks"""
    micro_batch_size: int = 64
    """rollouts of one pass; the gradient does not depend on the cut"""
    micro_batch_tokens: int = 0
    """above 0: a pass has as many rollouts as have so many tokens with their prompts (padding counted where rows are
    padded), one at least, in place of `micro_batch_size`"""
    learning_rate: float = 1e-6
    """the highest rate of the schedule"""
    warmup_steps: int = 0
    """optimizer steps over which the rate rises"""
    schedule: str = "constant"
    """after the warm-up: constant, linear or cosine, the last two down to 0 over all iterations"""
    max_grad_norm: float = 1.0
    """the gradient of a step is scaled down to this norm; 0 does not clip"""
    clip_low: float = 0.2
    """a token's ratio is clipped below at 1 - this"""
    clip_high: float = 0.2
    """a token's ratio is clipped above at 1 + this; 0.28 is DAPO's clip-higher, against entropy that falls early (Yu et
    al. 2025)"""
    dual_clip: float = 0.0
    """above 1 (3 is usual): the loss of a token with a negative advantage is at most this times the advantage's size,
    where ratios explode (Ye et al. 2020); 0: no such bound"""
    entropy_bonus: float = 0.0
    """the weight of the policy's entropy in the loss; 0: none"""
    max_mean_ratio: float = 0.0
    """a minibatch whose mean ratio is above this is skipped and counted; 0: any may be"""
    tis_cap: float = 0.0
    """above 0: tokens are weighed by the ratio of the trainer's policy and the one that drew them, bounded here (TIS,
    Yao et al. 2025); conf/rl.yaml sets 2"""
    tis_floor: float = 0.0
    """the ratio's bound below; 0: none"""
    tis_level: str = "token"
    """the ratio of each token, or sequence: the geometric mean over its response"""
    correction: str = "clamp"
    """what becomes of a ratio beyond its bounds: clamp, or mask: the token counts nothing (IcePop); divergence: clamp,
    and a token counts nothing that the loss would drive further from who drew it than divergence_limit (DPPO); none: no
    token is weighed, whatever the bounds"""
    divergence_limit: float = 0.2
    """with correction=divergence: how far a token's probability may be from that under the policy that drew it"""
    loss_aggregation: str = "token"
    """what a minibatch's loss is divided by: token, sequence or constant (rl/losses.py)"""
    reward_scaling: str = "none"
    """over the run: none, scale (every reward is divided by the standard deviation of all responses' rewards so far) or
    standard (their mean is taken off too, at a response's last token); before a KL penalty, for estimators that read
    rewards of tokens"""
    reward_limit: float = 0.0
    """with reward_scaling, no reward of a token is further from 0 behind it; 0: any may be"""
    whitens_rewards: bool = False
    """the rewards of all tokens, a KL penalty in them too, are set to a standard deviation of 1 over the whole
    iteration, around their mean, before advantages are estimated"""
    whitening: str = "none"
    """of the advantages over the whole iteration: none, scale (divided by their standard deviation) or standard (their
    mean taken off too)"""


@dataclass
class RLEvaluationConfig:
    """The evaluation by answers to problems of dev, and when it ends the run."""

    every: int = 0
    """iterations from one evaluation to the next, one before the first; 0: none"""
    num_problems: int = 200
    """problems of dev that are asked"""
    samples: int = 0
    """answers per problem, sampled as rollouts are, whose mean is the accuracy; 0: one greedy answer"""
    metric: str = "accuracy"
    """what the best evaluation has most of: accuracy, or reward, for which the run's reward scores the answers too"""
    patience: int = 0
    """evaluations in a row without a new best after which training ends, schedules unchanged; 0: never"""


@dataclass
class RLCheckpointsConfig:
    """What is saved on the way."""

    save_every: int = 0
    """iterations from one checkpoint to the next; 0: none on the way"""
    keep: int = 1
    """the newest checkpoints that are kept"""
    keep_best: int = 0
    """of the checkpoints saved right after an evaluation, those with the highest accuracy or reward
    (`evaluation.metric`) that are kept beside them"""
    export_every: int = 0
    """iterations from one model folder that stays (policies/iteration-N, and critics/ or implicit_rewards/ of a run
    that has these), for evaluation apart, to the next; 0: none"""


@dataclass
class SamplesConfig:
    """Rollouts that are written down to be read (samples/)."""

    every: int = 1
    """iterations from one file to the next; 0: none, of evaluations neither"""
    num_problems: int = 8
    """problems of which rollouts are written down"""
    rollouts_per_problem: int = 1
    """the first rollouts of each of these problems; 0: all"""
    estimators: dict[str, Any] = field(default_factory=dict)
    """name → an advantage config (conf/advantage/): what further estimators say of these problems' rollouts, for
    comparison; nothing is trained with it"""


@dataclass
class KLConfig:
    """The penalty for leaving the reference (rl/kl.py)."""

    coefficient: float = 0.0
    """the weight of the penalty; 0: none, and no reference is loaded"""
    kind: str = "k3"
    """how a token's term is estimated: k1, abs, mse, k3, or full: over the whole vocabulary"""
    place: str = "loss"
    """added to the loss, or to the reward as a cost of each token"""
    max_token: float = 0.0
    """above 0: bounds a token's term"""
    cuts_negative: bool = False
    """a token's term below 0 counts as 0, for kind=k1: no token is rewarded for being less likely than under the
    reference; the cost is no longer an estimate of the KL divergence"""
    target: float = 0.0
    """above 0: the coefficient adapts itself to reach so many nats per response"""
    horizon: int = 10000
    """rollouts over which it adapts; fewer react faster"""


@dataclass
class CriticConfig:
    """The value network: a model with a value at every position, its own optimizer and schedule."""

    model: Any = MISSING
    """where its weights come from: critic=policy, reward_model, reward_model_body or scratch"""
    form: str = "linear"
    """a value is the head's output (linear: any number) or its sigmoid (probability: 0 to 1, as process reward models
    are trained); a run whose returns leave that range is refused"""
    loss: str = "squared"
    """of a value and its target: squared, or cross_entropy (with form=probability and clip_range=0), as process reward
    models are trained"""
    loss_coefficient: float = 1.0
    """multiplies its loss: beside an optimizer of its own this changes what max_grad_norm leaves of a gradient, and
    update/loss"""
    optimizer: Any = MISSING
    """the optimizer and its settings, but for the learning rate"""
    learning_rate: float = 1e-5
    """the highest rate of its schedule"""
    warmup_steps: int = 0
    """optimizer steps over which the rate rises"""
    schedule: str = "constant"
    """after the warm-up: constant, linear or cosine"""
    max_grad_norm: float = 1.0
    """the gradient of a step is scaled down to this norm; 0 does not clip"""
    clip_range: float = 0.2
    """how far a value may move in one iteration; 0 clips nothing, for rewards whose scale is far above 1"""
    num_warmup_iterations: int = 0
    """first iterations in which the critic alone is trained; the policy's warm-up and schedule take up the rest of the
    run"""


@dataclass
class ImplicitRewardConfig:
    """A causal LM whose log-ratio to a reference is a reward of every token, trained along on outcomes (PRIME)."""

    model: Any = MISSING
    """where its weights come from: implicit_reward=policy"""
    reference: str = "start"
    """what its log-probs are compared with: start (the policy that the run begins with, which stays) or policy (the one
    before the update, which moves on)"""
    beta: float = 0.05
    """times the log-ratio: of a token its reward, of a response the logit of its success"""
    weight: float = 1.0
    """times its rewards, which are added to the rewards of tokens before advantage=gae or reinforce_plus_plus discounts
    them: behind update.reward_scaling and a KL penalty, before update.whitens_rewards; advantage=prime has
    advantage.process_weight"""
    update: str = "before"
    """before: it is trained on an iteration's outcomes, then asked for its rewards, which is a pass more; after: its
    rewards are read off the passes that train it"""
    optimizer: Any = MISSING
    """the optimizer and its settings, but for the learning rate"""
    learning_rate: float = 1e-6
    """of every step: one pass over an iteration's rollouts"""
    max_grad_norm: float = 10.0
    """the gradient of a step is scaled down to this norm; 0 does not clip"""


@dataclass
class EMAConfig:
    """A moving average of the policy's versions (rl/ema.py), saved as model_ema/."""

    decay: float = 0.0
    """the share of the average that stays in every iteration; 0: no average is kept"""


@dataclass
class ProbesConfig:
    """What stops a run, or is warned of, before anything is learnt from it (rl/probes/checks.py)."""

    on_fault: str = "stop"
    """stop, or warn; rollouts of another version than the one that is trained are never learnt from"""
    max_gap: float = 0.0
    """mean absolute difference of the engine's and the trainer's log-probs, in nats per token; 0: what rounding makes
    of this policy, measured in every iteration, decides (an engine with quantised weights needs a number of its own)"""
    max_step: float = 1.0
    """KL between one version and the next on fixed responses, in nats per token; 0: any"""
    max_update_kl: float = 1.0
    """KL that an update makes on its own rollouts, in nats per token; 0: any"""
    max_reference_kl: float = 3.0
    """KL from the reference, in nats per token; 0: any"""


@dataclass
class RLEngineConfig(EngineConfig):
    """How the sampler is asked, and whether it shares its device with the learner; no answer depends on it."""

    sleeps: bool = False
    """engines of the run's own let go of their weights and caches while the learner computes, which may then have the
    same GPU (docs/launching.md); they are woken for every delivery"""


@dataclass
class RLConfig:
    """`main.py`: reinforcement learning with a live engine."""

    output_dir: str = MISSING
    """the run directory: config.yaml, metrics.jsonl, samples/, checkpoints/ and, last of all, model/"""
    seed: int = 0
    """of the problems that are drawn and of every random draw"""
    task: Any = MISSING
    """the task of the problems: how a prompt is written and an answer is graded"""
    held_out_benchmarks: Any = field(default_factory=list)
    """files of `evaluation/import_comparisons` whose prompts must not be trained on: a run whose training problems have
    some is refused (responses are the policy's own and are not compared)"""
    model: Any = MISSING
    """the policy, and the folder or hub name of its weights (`model.path`)"""
    num_iterations: int = 10
    """iterations of the run: rollouts, rewards, advantages, update, delivery"""
    stop_after: int = 0
    """above 0: training ends after this iteration, schedules unchanged"""
    stop_after_tokens: int = 0
    """above 0: training ends at the first evaluation behind so many generated tokens (sampling/tokens), and so many
    seconds where stop_after_seconds is set too"""
    stop_after_seconds: float = 0.0
    """above 0: training ends at the first evaluation behind so many seconds of iterations, and so many tokens where
    stop_after_tokens is set too"""
    reward: Any = MISSING
    """how good a rollout is, and each of its steps"""
    advantage: Any = MISSING
    """the estimator: grpo, rloo, gae, vineppo, …"""
    filter: Any = None
    """which of a group's rollouts are trained on (conf/filter); null: all that are drawn"""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    update: RLUpdateConfig = field(default_factory=RLUpdateConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    critic: CriticConfig | None = None
    """the value network; null where the estimator needs none"""
    implicit_reward: ImplicitRewardConfig | None = None
    """a reward of every token that is trained along; null where the estimator reads none"""
    evaluation: RLEvaluationConfig = field(default_factory=RLEvaluationConfig)
    checkpoints: RLCheckpointsConfig = field(default_factory=RLCheckpointsConfig)
    samples: SamplesConfig = field(default_factory=SamplesConfig)
    probes: ProbesConfig = field(default_factory=ProbesConfig)
    ema: EMAConfig = field(default_factory=EMAConfig)
    params: Any = MISSING
    """sampling parameters of the rollouts: temperature, `max_tokens`, stop strings (`n` is `rollout.group_size`)"""
    client: Any = MISSING
    """who is asked: a vLLM server, or engines without one"""
    server: Any = None
    """the vLLM server to start; null: `client.base_url` names a running one (with controls), or the client has its
    engines itself"""
    engine: RLEngineConfig = field(default_factory=RLEngineConfig)
    optimizer: Any = MISSING
    """the policy's optimizer and its settings, but for the learning rate"""
    precision: str = "auto"
    """bf16 or fp32, of the computation, or auto: bf16 where this machine multiplies it fast; weights stay float32"""
    deepspeed: Any = None
    """DeepSpeed's own JSON, for the policy and the critic alike; null for one process, or several with plain sums of
    gradients"""
    lora: Any = None
    """adapters to train in place of the policy's weights, which are then shared with the reference; null: the
    weights"""
    launcher: Any = None
    """who starts the ranks: null, and it is launch.py, torchrun or deepspeed; `ray`: the nodes of a Ray cluster"""
    rank_timeout_seconds: float = 600.0
    """on several ranks: seconds that a collective may take, and a rank be without a sign of life (runtime/peers.py);
    phases in which one rank works for all have no such limit"""
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
