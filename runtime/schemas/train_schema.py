"""The config of trainer_base_ds_mul.py."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from espalier.runtime.schemas.shared_topics import TrackingConfig


@dataclass
class TrainUpdateConfig:
    """One optimizer step: its examples, how they are cut and laid out, the learning rate."""

    batch_size: int = 64
    """examples of one optimizer step, over all ranks"""
    micro_batch_size: int = 64
    """examples of one pass; the gradient does not depend on the cut"""
    micro_batch_tokens: int = 0
    """above 0: a step is cut by computed tokens, at most so many each, in place of `micro_batch_size`"""
    layout: str = "auto"
    """how the rows of a batch are put together: shared (no padding, and tokens that rows begin with in common are
    computed once), packed (no padding), padded, or auto: shared where the network passes the check
    (models.packing_check), else padded, with a line that says why; a network that does not pass refuses shared and
    packed; no result depends on it"""
    learning_rate: float = 1e-5
    """the highest rate of the schedule"""
    warmup_steps: int = 10
    """optimizer steps over which the rate rises"""
    warmup_share: float = 0.0
    """above 0: the warm-up is this share of all steps, in place of `warmup_steps`"""
    schedule: str = "cosine"
    """after the warm-up: constant, linear or cosine, the last two down to 0"""
    max_grad_norm: float = 1.0
    """the gradient of a step is scaled down to this norm; 0 does not clip"""
    step_in_backward: bool = False
    """each weight is updated as soon as its gradient is there, which is then dropped: 4 bytes per parameter less; one
    process, one pass a step, nothing is clipped"""
    on_nonfinite: str = "stop"
    """a loss or gradient that is not finite ends the run (stop), or its step is left out (skip)"""
    max_skipped: int = 10
    """steps that `on_nonfinite=skip` may leave out before the run ends"""


@dataclass
class TrainEvaluationConfig:
    """The evaluation on `eval_examples`, at the end and on the way."""

    every: int = 0
    """optimizer steps from one evaluation to the next; 0: only at the end"""


@dataclass
class TrainCheckpointsConfig:
    """What is saved on the way, and which checkpoint a run goes on from."""

    save_every: int = 0
    """optimizer steps from one checkpoint to the next; 0: none on the way"""
    keep: int = 1
    """the newest checkpoints that are kept"""
    keep_best: int = 0
    """checkpoints with the best `best_metric` that are kept beside them; each evaluation that is one of them is
    saved"""
    best_metric: str = "eval/loss"
    """the metric of an evaluation that says which is best"""
    best_is: str = "lowest"
    """the best value is the lowest, or the highest"""
    resume: str = "auto"
    """where to go on: auto (the newest whole checkpoint, or the start), latest, best, step-N, or none: at the start"""


@dataclass
class PredictConfig:
    """Prediction with checkpoints, with `mode=predict`."""

    checkpoints: Any = None
    """folders or patterns of them, or a mapping of names to folders; null: the model itself"""
    batch_tokens: int = 16384
    """padded tokens of one forward pass; lower it when memory runs out"""


@dataclass
class TrainConfig:
    """`trainer_base_ds_mul.py`: one model on one fixed dataset."""

    output_dir: str = MISSING
    """the run directory: config.yaml, metrics.jsonl, checkpoints/ and, last of all, model/"""
    seed: int = 0
    """of the order of the examples and of every random draw"""
    mode: str = "train"
    """train, or predict: score `examples` with checkpoints (`predict`), files in `output_dir`"""
    model: Any = MISSING
    """the network, and the folder or hub name of its weights (`model.path`)"""
    objective: Any = MISSING
    """what is learnt: sft, dpo, process_reward, …"""
    examples: Any = MISSING
    """what it is learnt from: a file and how it is read"""
    eval_examples: Any = None
    """what is evaluated on; null: nothing"""
    held_out_benchmarks: Any = field(default_factory=list)
    """files of `evaluation/import_comparisons` whose rows must not be trained on: a run whose preferences, judged
    responses, demonstrations (with what a verifier's judge) or conversations hold some is refused, and one on steps,
    which cannot be compared"""
    max_steps: int = 0
    """optimizer steps of the run; 0: as many as `num_epochs` takes"""
    num_epochs: float = 1.0
    """passes over the examples, where `max_steps` is 0"""
    update: TrainUpdateConfig = field(default_factory=TrainUpdateConfig)
    evaluation: TrainEvaluationConfig = field(default_factory=TrainEvaluationConfig)
    checkpoints: TrainCheckpointsConfig = field(default_factory=TrainCheckpointsConfig)
    optimizer: Any = MISSING
    """the optimizer and its settings, but for the learning rate"""
    reference_logprobs: str = "auto"
    """log-probs of the reference that preferences are compared with: precomputed before the first step (and the
    reference's weights let go), online in every step, or auto: precomputed where an example is read more than once"""
    precision: str = "auto"
    """bf16 or fp32, of the computation, or auto: bf16 where this machine multiplies it fast; weights stay float32"""
    deepspeed: Any = None
    """DeepSpeed's own JSON; null for one process, or several with plain sums of gradients"""
    lora: Any = None
    """adapters to train in place of the weights; null: the weights"""
    launcher: Any = None
    """who starts the ranks: null, and it is launch.py, torchrun or deepspeed; `ray`: the nodes of a Ray cluster"""
    rank_timeout_seconds: float = 600.0
    """on several ranks: seconds that a collective may take, and a rank be without a sign of life (runtime/peers.py);
    phases in which one rank works for all have no such limit"""
    log_every: int = 10
    """optimizer steps from one line of metrics to the next"""
    debug: bool = False
    """show examples first, with what the loss reads of them"""
    predict: PredictConfig = field(default_factory=PredictConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
