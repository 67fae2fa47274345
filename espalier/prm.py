"""A process reward model (PRM) for code of your own: load it, turn steps into tokens, score every step.

The same network, tokens and places that Espalier's programs train on and score, so the same scores.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from espalier.data.prompts import encode_text
from espalier.data.records import BadInput
from espalier.data.steps import StepTokens
from espalier.data.token_text import tokenise_steps
from espalier.data.training_layout import STEPS, other_prompts
from espalier.models.evaluating import evaluating
from espalier.models.frozen_reward import check_trained_ends
from espalier.models.load import load_tokenizer
from espalier.models.scalar_head import load_process_reward
from espalier.rewards.process import score_step_tokens
from espalier.runtime.distributed import device as default_device

log = logging.getLogger(__name__)


@dataclass(frozen=True, repr=False)
class ProcessRewardModel:
    """`network` is transformers' token-classification model, `tokenizer` its tokenizer; `path` is their folder."""

    path: str
    network: Any
    tokenizer: Any

    def __repr__(self) -> str:
        """Return one line, as a notebook shows it; the network's and the tokenizer's own are a thousand."""
        return f"ProcessRewardModel({self.path!r}, {type(self.network).__name__} on {_device_of(self.network)})"


def _device_of(network: Any) -> torch.device:
    place: torch.device = next(network.parameters()).device
    return place


def load_prm(
    path: str | os.PathLike[str], num_labels: int | None = None, device: str = "", attention: str = "auto"
) -> ProcessRewardModel:
    """Load a trained process reward model: a folder in Hugging Face's token-classification format, or a hub name.

    `num_labels` gives a policy a fresh head of zeros, to train: every score is 1/2 until then. `device`: "" for the
    GPU where there is one, else the CPU. `attention`: as `model.attention` of a config, auto is the fastest that is
    here. Raises BadInput in one line where the folder is missing, incomplete or no PRM, and where it is an outcome
    model, trained on whole responses. Warns of one that looks published: such ones are read by prm/score_steps.

    >>> import espalier
    >>> prm = espalier.load_prm("prm")  # the folder that training wrote: experiments/quickstart/prm/model
    >>> prm.network.config.num_labels
    1
    """
    if not isinstance(path, str | os.PathLike):
        raise BadInput(f"path must be a folder or a hub name, got {repr(path)[:60]}")
    if num_labels is not None and num_labels < 1:
        raise BadInput(f"num_labels must be at least 1, got {num_labels}")
    try:
        place = torch.device(device) if device else default_device()
    except RuntimeError:
        raise BadInput(f"device must be one of torch's, as cpu or cuda:0, got {device!r}") from None
    name = os.fspath(path)
    network = load_process_reward(name, num_labels, attention)
    if num_labels is None:
        check_trained_ends(name, STEPS)
    return ProcessRewardModel(name, network.to(place).eval(), load_tokenizer(name))  # type: ignore[arg-type]


def encode_steps(tokenizer: Any, prompt: str, steps: Sequence[str], is_finished: bool = True) -> StepTokens:
    r"""Tokenise a prompt and the steps of a solution, and find the tokens at which steps end.

    `prompt` is the text exactly as the model sees it (of a chat model what
    `tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)` writes); `steps` join to the
    response, their newlines included. What comes back has `prompt_ids`, `response_ids` and `step_ends`: the number of
    response tokens up to and including each step. A step ends with the token that holds its last character; with
    `is_finished` the end token belongs to the last step, as in a sampled solution that ended by itself. Raises BadInput
    where a step is empty, where the tokenizer changes the text, or has no end token that is asked for.

    >>> import espalier
    >>> prm = espalier.load_prm("prm")
    >>> tokens = espalier.encode_steps(prm.tokenizer, "2 + 3 + 4 = ?\n", ["2 + 3 = 5\n", "5 + 4 = 9"])
    >>> prm.tokenizer.decode(tokens.response_ids[: tokens.step_ends[0]])
    '2 + 3 = 5\n'
    """
    return _encode(tokenizer, prompt, steps, is_finished, "the solution")


def score_steps(
    prm: ProcessRewardModel,
    solutions: Sequence[tuple[str, Sequence[str]] | StepTokens],
    is_finished: bool = True,
    batch_tokens: int = 16384,
) -> list[list[float]]:
    r"""Score every step of every solution: one list per solution, one score in [0, 1] per step.

    A score is the model's estimate of the value of the state that the step leads to (for the last step: that the answer
    is right). A solution is (prompt, steps) as text, tokenised by `encode_steps`, or `StepTokens`, the sampler's own
    ids, which are not tokenised again. `is_finished`: texts end with the end token; False for solutions that still go
    on. Computed in bf16 where the machine multiplies it fast, else in float32, `batch_tokens` tokens at a time, equal
    solutions once; a head's scores have six decimals. The network scores without dropout, and is left in the mode it
    was in. A line of the log, once, says where the model was trained on chat turns and the first prompt is plain text,
    or the other way round. Raises BadInput, with the number of the solution from 0, on a solution that cannot be read
    or is longer than the network takes.

    >>> import espalier
    >>> prm = espalier.load_prm("prm")
    >>> scores = espalier.score_steps(prm, [("2 + 3 + 4 = ?\n", ["2 + 3 = 5\n", "5 + 4 = 9"]), ("1 + 1 = ?\n", ["2"])])
    >>> [len(row) for row in scores], all(0 <= score <= 1 for row in scores for score in row)
    ([2, 1], True)
    """
    if not isinstance(prm, ProcessRewardModel):
        raise BadInput(f"prm must be what load_prm returns, got {repr(prm)[:60]}")
    rows = [_tokens(prm.tokenizer, solution, is_finished, number) for number, solution in enumerate(solutions)]
    settings = prm.network.config.get_text_config()
    positions, size = getattr(settings, "max_position_embeddings", None), getattr(settings, "vocab_size", None)
    for row in rows:
        ids = [*row.prompt_ids, *row.response_ids]
        if not ids or (size is not None and not all(0 <= token < size for token in ids)):
            known = "" if size is None else f" from 0 to {size - 1}"
            raise BadInput(f"{row.name}: token ids{known} are wanted, one at least, got {ids[:8]}")
        length = len(ids)
        if positions is not None and length > positions:
            raise BadInput(f"{row.name} has {length} tokens and the model {positions} positions: leave it out")
    if rows and (words := other_prompts(prm.path, prm.tokenizer, lambda: rows[0].prompt_ids)):
        _warn_once(prm.path, *words)
    with evaluating(prm.network):
        return score_step_tokens(prm.network, rows, pad_id=int(prm.tokenizer.pad_token_id), batch_tokens=batch_tokens)


@cache
def _warn_once(path: str, trained: str, given: str) -> None:
    log.warning("%s was trained on prompts that are %s, and these are %s: its scores may say nothing", path, trained,
                given)  # fmt: skip


def _tokens(
    tokenizer: Any, solution: tuple[str, Sequence[str]] | StepTokens, is_finished: bool, number: int
) -> StepTokens:
    """Return one solution as ids that can be scored, named by its number. Raises BadInput."""
    name = f"solution {number}"
    if not isinstance(solution, StepTokens):
        if not isinstance(solution, tuple | list) or len(solution) != 2:
            raise BadInput(f"{name} must be (prompt, steps) or StepTokens, got {repr(solution)[:60]}: a list of "
                           "solutions is scored")  # fmt: skip
        prompt, steps = solution
        return _encode(tokenizer, prompt, steps, is_finished, name)
    ends, length = list(solution.step_ends), len(solution.response_ids)
    if ends != sorted(ends) or not all(1 <= end <= length for end in ends):
        raise BadInput(f"{name}: step_ends must rise from 1 to its {length} response tokens at most, got {ends[:8]}")
    return StepTokens(list(solution.prompt_ids), list(solution.response_ids), ends, name)


def _encode(tokenizer: Any, prompt: str, steps: Sequence[str], is_finished: bool, name: str) -> StepTokens:
    if not isinstance(prompt, str):
        raise BadInput(f"{name}: the prompt must be a text, got {repr(prompt)[:60]}: chat turns are written by "
                       "tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)")  # fmt: skip
    if not isinstance(steps, list | tuple) or not all(isinstance(step, str) and step for step in steps):
        raise BadInput(f"{name}: steps must be a list of texts that are not empty, got {str(steps)[:60]!r}")
    if is_finished and tokenizer.eos_token_id is None:
        raise BadInput(f"{name}: the tokenizer has no end token: set its eos_token, or is_finished=False")
    found = tokenise_steps(tokenizer, encode_text(tokenizer, prompt, name), steps, is_finished)
    if found is None:
        raise BadInput(f"{name}: the tokenizer changes the text of its steps: leave special tokens out (is_finished "
                       "adds the end token), or give StepTokens of the sampler's own ids")  # fmt: skip
    return StepTokens(found.prompt_ids, found.response_ids, found.step_ends, name)
