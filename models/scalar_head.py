"""Scalars or classes at every position: the process reward model's network.

It is transformers' own token-classification model (`AutoModelForTokenClassification`), so a trained one is
a standard Hugging Face folder, and one forward pass scores all steps of a trajectory: the head is read at
step ends. With one label the score is sigmoid(logit), the value of the state the step leads to; with K + 1
labels class k means "k of K completions are correct" and the score is the expected share E[k] / K. As a critic
(`load_critic`) the same network is read before every token.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from transformers import (
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GenericForTokenClassification

from espalier.data.steps import StepTokens
from espalier.models.fused_norm import fuse_norms
from espalier.models.in_parts import whole_shape
from espalier.models.last_layer import read_last_layer
from espalier.models.load import BadModel, checkpoint_gradients, from_pretrained, load_config, on_kernel
from espalier.models.recompute import recomputes


def load_process_reward(
    path: str,
    num_labels: int | None = None,
    attention: str = "auto",
    gradient_checkpointing: bool | str = False,
    trains: str = "all",
) -> Any:
    """Return a process reward model: a trained folder (transformers' classifiers of whole texts too, whose head has no
    bias), or a policy's body with a fresh head of `num_labels`; or the two policies of a folder of
    `models.log_ratio_reward`, which have no head.

    The fresh head is zero: before training every score is 1/2 (one label) or the middle of the classes. `trains`: all,
    or head: the body is frozen here, before there is an optimizer, which then holds the head alone: no state, no
    gradient and no weight decay for the body. A phase of the head alone is a run of its own, and the next one starts
    from its folder. Raises BadModel on a critic whose values are no shares, and where a head is asked for that a folder
    cannot have.
    """
    if _is_log_ratio_reward(path):
        from espalier.models.log_ratio_reward import load_log_ratio_reward

        if num_labels is not None or gradient_checkpointing or trains != "all":
            raise BadModel(f"{path} scores by the log-ratio of two policies and has no head to train: train a reward "
                           "model from a policy")  # fmt: skip
        return load_log_ratio_reward(path, attention)
    form = critic_form(load_config(path))
    if form not in (None, "probability"):
        raise BadModel(
            f"{path} is a critic of form {form}, whose values are no scores from 0 to 1: name a reward model"
        )
    if trains not in ("all", "head"):
        raise BadModel(f"model.trains must be all or head, got '{trains}'")
    model = _load(path, num_labels, attention, gradient_checkpointing)
    if trains == "head":
        model.requires_grad_(False)
        model.get_submodule("score").requires_grad_(True)
    return model


def critic_form(config: PretrainedConfig) -> str | None:
    """Return the form of values that a network was saved as a critic with; None where it was none."""
    form: str | None = getattr(config, "critic_form", None)
    return form


def _is_log_ratio_reward(path: str) -> bool:
    """Say whether a folder holds two policies (`models.log_ratio_reward`, which most programs need not load)."""
    return (Path(path) / "log_ratio_reward.json").is_file()


@runtime_checkable
class ScoresSteps(Protocol):
    """A reward model that scores whole solutions itself, without a head to be read."""

    def scores(
        self, rows: Sequence[StepTokens], batch_tokens: int, on_progress: Callable[[int], None] = ...
    ) -> list[list[float]]:
        """Return the score in (0, 1) after every step of every solution."""


def _is_scalar(config: PretrainedConfig) -> bool:
    """Say whether a folder holds a scalar head of any kind."""
    return _scores_whole(config) or any(name.endswith("ForTokenClassification") for name in config.architectures or [])


def _scores_whole(config: PretrainedConfig) -> bool:
    """Say whether a folder holds transformers' reward model of whole texts: the same head without a bias, read at the
    last token (`AutoModelForSequenceClassification`)."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or [])


def _check_head(path: str, config: PretrainedConfig) -> None:
    """Raise BadModel on a network whose classifier of tokens is not transformers' general one, which has its head at
    `score`: there scores are read, trained, frozen and saved."""
    kind = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING.get(type(config), None)
    remedy = "take a model of another family (Llama, Qwen, Mistral, Gemma, Phi, ...)"
    if kind is None:
        what = f"transformers has no network of {type(config).__name__} with a head of tokens"
        raise BadModel(f"{path}: {what}: {remedy}")
    if not issubclass(kind, GenericForTokenClassification):
        what = f"its head, of transformers' {kind.__name__}, is not named score, where scores are read"
        raise BadModel(f"{path}: {what}: {remedy}")


def _load(
    path: str, num_labels: int | None, attention: str, gradient_checkpointing: bool | str, has_fresh_head: bool = False
) -> PreTrainedModel:
    """Return the network of a folder; with `has_fresh_head`, or from a policy, a head of zeros on its body."""
    recomputes(gradient_checkpointing)  # another setting is refused before anything is read
    config = load_config(path)
    is_trained = _is_scalar(config) and not has_fresh_head
    if is_trained and num_labels not in (None, config.num_labels):
        raise BadModel(f"{path} has {config.num_labels} labels, not {num_labels}: set model.num_labels=null")
    if not is_trained and num_labels is None:
        raise BadModel(f"{path} is no process reward model: train one, or set model.num_labels (of load_prm "
                       "num_labels) for a fresh head; prm/score_steps reads published ones whose heads are others "
                       "(docs/published_prms.md)")  # fmt: skip
    _check_head(path, config)
    config.classifier_dropout = 0.0
    if num_labels is not None:
        config.num_labels = num_labels
    lacks_bias = is_trained and _scores_whole(config)
    new, dropped = (["score.bias"] if lacks_bias else [], []) if is_trained else (["score."], ["lm_head."])
    model = from_pretrained(
        AutoModelForTokenClassification,
        path,
        may_lack=new,
        may_add=dropped,
        config=config,
        attention=attention,
    )
    model.config.use_cache = False
    checkpoint_gradients(model, gradient_checkpointing)
    head = model.get_submodule("score")
    if lacks_bias:
        torch.nn.init.zeros_(head.get_parameter("bias"))
    for name, value in () if is_trained else list(head.named_parameters()):
        # A new one: what the folder has under this name may be cut already, and what is written to that is lost.
        setattr(head, name, torch.nn.Parameter(torch.zeros(whole_shape(value), device=value.device)))
    return model


CRITIC_SOURCES = ("auto", "policy", "reward_model", "reward_model_body", "scratch")
FRESH_HEADS = ("drawn", "zero")


def load_critic(
    path: str,
    source: str = "auto",
    attention: str = "auto",
    gradient_checkpointing: bool | str = False,
    head: str = "drawn",
) -> PreTrainedModel:
    """Return a value at every position. `source` says what `path` is:

    - "policy": a causal language model, whose body gets a fresh head;
    - "reward_model": a trained folder with one label (process or outcome reward model, also one that others published
      as transformers' classifier of whole texts, or an earlier critic): body and head as they are;
    - "reward_model_body": a trained folder with any number of labels; its body gets a fresh head as a policy's does,
      for returns that are not on the reward model's scale;
    - "scratch": either; only the sizes are taken, all weights are drawn anew;
    - "auto": "reward_model" where the folder is one, else "policy".

    The weights of a fresh head are drawn from a normal distribution of standard deviation 1/sqrt(hidden + 1) (Huang et
    al. 2024, "The N+ implementation details of RLHF"), or with `head` "zero" 0, so that every first value is; its bias
    is 0.

    Raises BadModel where the folder is not what `source` says, or has several labels, and where no head is fresh that
    could be zero.
    """
    if head not in FRESH_HEADS:
        raise BadModel(f"critic.model.head must be one of {', '.join(FRESH_HEADS)}, got '{head}'")
    if source not in CRITIC_SOURCES:
        raise BadModel(f"critic.model.source must be one of {', '.join(CRITIC_SOURCES)}, got '{source}'")
    if _is_log_ratio_reward(path):
        raise BadModel(f"{path} scores by the log-ratio of two policies and has no head that a critic could begin "
                       "with: name the policy, or a reward model that was trained on step values")  # fmt: skip
    config = load_config(path)
    is_reward = _is_scalar(config)
    if source in ("policy", "reward_model", "reward_model_body") and is_reward != (source != "policy"):
        raise BadModel(f"{path} is {'a' if is_reward else 'no'} reward model: set critic.model.source=auto")
    has_fresh_head = not is_reward or source in ("reward_model_body", "scratch")
    if not has_fresh_head and head != "drawn":
        raise BadModel(f"{path} keeps its trained head, and critic.model.head={head} is for a fresh one: set "
                       "critic.model.head=drawn, or critic.model.source=reward_model_body")  # fmt: skip
    if not has_fresh_head and config.num_labels != 1:
        raise BadModel(f"{path} has {config.num_labels} labels and a critic needs one: source=reward_model_body gives "
                       "it a fresh head")  # fmt: skip
    if source == "scratch":
        _check_head(path, config)
        config.num_labels, config.classifier_dropout = 1, 0.0
        draw = partial(AutoModelForTokenClassification.from_config, config, dtype=torch.float32)
        drawn = on_kernel(lambda name: draw(attn_implementation=name), attention)
        model: PreTrainedModel = read_last_layer(fuse_norms(drawn))
        model.config.use_cache = False
        checkpoint_gradients(model, gradient_checkpointing)
    else:
        model = _load(path, 1, attention, gradient_checkpointing, has_fresh_head)
    if has_fresh_head:
        model.config.critic_form = None  # whatever stood there
        score = model.get_submodule("score")
        spread = (config.hidden_size + 1) ** -0.5 if head == "drawn" else 0.0
        torch.nn.init.normal_(score.get_parameter("weight"), std=spread)
        torch.nn.init.zeros_(score.get_parameter("bias"))
    return model


@torch.no_grad()
def rescale_head(model: Any, mean: float, deviation: float) -> None:
    """Have the head of a network of one label say (logit - mean) / deviation, before an engine takes it. What ZeRO-3
    has cut is changed part by part, on every rank."""
    head = model.get_submodule("score")
    parts = {name: getattr(value, "ds_tensor", value) for name, value in head.named_parameters()}
    parts["bias"].sub_(mean)
    for part in parts.values():
        part.div_(deviation)


def scores_from_logits(logits: torch.Tensor) -> torch.Tensor:
    """Return logits [..., L] → scores [...] in [0, 1] (L = 1: sigmoid; L = K + 1: expected share of K)."""
    logits = logits.float()
    num_labels = logits.shape[-1]
    if num_labels == 1:
        return torch.sigmoid(logits.squeeze(-1))
    values = torch.arange(num_labels, device=logits.device) / (num_labels - 1)
    return (torch.softmax(logits, dim=-1) * values).sum(-1)


def outcome_scores(logits: torch.Tensor) -> torch.Tensor:
    """Return logits [..., L] → what an outcome model says of whole responses [...]: the logit (L = 1), whose share in
    [0, 1] would be the same 1 for all good ones; the expected share of a model with classes."""
    return logits.float().squeeze(-1) if logits.shape[-1] == 1 else scores_from_logits(logits)
