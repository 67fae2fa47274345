"""A reward model that is read and not trained, by rewards, advantages, filters and searches: at the ends that it was
trained on, and with a word where its prompts are others than those of its training."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from espalier.data.records import Trajectory
from espalier.data.training_layout import RESPONSES, STEPS, other_prompts, read_training_layout
from espalier.data.training_problems import FILE as PROBLEMS_FILE
from espalier.models.hub_snapshot import local_model
from espalier.models.in_parts import hold_in_halves
from espalier.models.load import is_reward_model, load_config, load_tokenizer
from espalier.models.log_ratio_reward import LogRatioReward
from espalier.models.packing_check import is_cut
from espalier.models.precision import AUTO, is_bf16
from espalier.models.published.load import is_plain, row_by_name
from espalier.models.scalar_head import load_process_reward
from espalier.models.trained_ends import trained_ends

log = logging.getLogger(__name__)
_REMEDIES = {
    STEPS: "name a process reward model; an outcome model is for reward=outcome_model (of a search "
    "scorer@search.scorer=outcome_model search.scorer.reward.path={path})",
    RESPONSES: "name an outcome model; a process reward model is for reward=process (of a search "
    "scorer@search.scorer=process), and takes_last_step=true of an outcome_model takes its score of the last step for "
    "the response's",
}


def check_trained_ends(path: str, ends: str, is_asked_for: bool = False) -> None:
    """Raise BadInput where a model was trained on other `ends` (STEPS or RESPONSES) than those at which it is read,
    unless that `is_asked_for`; warn where nothing says on which, and of one that others published."""
    folder = local_model(path)
    trained_ends(folder, path).read_at(ends, path, is_asked_for, _REMEDIES[ends].format(path=path))
    if ends == STEPS and (layout := published_layout(folder, path)):
        log.warning("%s looks like one of layout %s, which may be read at a mark of its own, and is read here at the "
                    "last token of every step, as one that was trained here: prm/score_steps stage.layout=%s reads "
                    "finished solutions as it was trained", path, layout, layout)  # fmt: skip


def published_layout(folder: str, name: str) -> str:
    """Return the layout (docs/published_prms.md) of a reward model that others published, or that looks like it; "" of
    one that was trained here, and of others."""
    if read_training_layout(folder) is not None or (Path(folder) / PROBLEMS_FILE).is_file():
        return ""
    return row_by_name(name) or ("trl" if is_plain(folder) and load_config(folder).num_labels == 2 else "")


class Cuts(Protocol):
    """How networks are cut over the ranks (`training.cut_networks`)."""

    def loading(self, precision: str) -> AbstractContextManager[None]:
        """Have what is loaded within cut; it computes in `precision`."""

    def take(self, model: Any, precision: str) -> torch.nn.Module:
        """Return what is called in place of a network that was loaded so."""


_cuts: ContextVar[Cuts | None] = ContextVar("cuts", default=None)


@contextmanager
def cut_by(cuts: Cuts | None) -> Iterator[None]:
    """Have reward models that are loaded within, to be read, cut over the ranks; None: whole on each."""
    token = _cuts.set(cuts)
    try:
        yield
    finally:
        _cuts.reset(token)


def load_frozen_reward(path: str, ends: str, attention: str = "auto", is_asked_for: bool = False) -> Any:
    """Return a reward model without gradients (`load_process_reward`), to be read at `ends`. Raises BadInput as
    `check_trained_ends` does."""
    check_trained_ends(path, ends, is_asked_for)
    if (cuts := _cuts.get()) is None:
        return load_process_reward(path, attention=attention).requires_grad_(False)
    precision = AUTO if is_reward_model(path) else "fp32"  # see is_held_in_halves
    with cuts.loading(precision):
        model = load_process_reward(path, attention=attention).requires_grad_(False)
    if not isinstance(model, LogRatioReward):
        return cuts.take(model, precision)
    model.policy = cuts.take(model.policy, precision)
    if model.reference is not None:
        model.reference = cuts.take(model.reference, precision)
    return model


def is_held_in_halves(path: str, device_type: str) -> bool:
    """Say whether `place` holds the network of a folder in bf16 on that kind of device: a reward model with a head is
    computed in bf16 where that is fast (`rewards.process.row_logits`), the log-probs of policies in float32."""
    return is_reward_model(path) and is_bf16(AUTO, device_type)


def place(model: Any, device: torch.device) -> None:
    """Move a reward model to the device that it is read on, where its linear layers are held in bf16 if they are
    computed so; one that is cut over the ranks is there already."""
    if isinstance(model, torch.nn.Module) and is_cut(model):
        return
    if isinstance(model, PreTrainedModel) and is_bf16(AUTO, device.type):
        hold_in_halves(model)
    model.to(device)


class PromptWatch:
    """Warns once where a model that was trained here on turns of a chat template reads plain text, or the other way
    round, by the first trajectory that it is asked about."""

    def __init__(self, path: str):
        self.path, self._is_done = path, False

    def __call__(self, trajectories: Sequence[Trajectory]) -> None:
        """Look at the first prompt that has token ids, and never again."""
        first = next((row for row in trajectories if row.prompt_ids), None)
        if self._is_done or first is None:
            return
        self._is_done = True
        folder = local_model(self.path)
        if read_training_layout(folder) is None:
            return
        if words := other_prompts(folder, load_tokenizer(folder), lambda: first.prompt_ids):
            log.warning("%s was trained on prompts that are %s, and the policy's are %s: its scores may say nothing",
                        self.path, *words)  # fmt: skip
