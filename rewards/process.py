"""A process reward model's score of every step: one forward pass a trajectory, read at step ends.

As a reward in reinforcement learning (`ProcessReward`) scores become rewards at step ends in one of three forms.
A sum of positive scores pays for more steps whatever they say; "progress" cannot, because its sum telescopes.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from espalier.data.batches.packing import Layout, in_batches, place_rows
from espalier.data.records import BadInput, Trajectory
from espalier.data.steps import StepTokens, check_ends, step_tokens
from espalier.data.training_layout import STEPS
from espalier.models.frozen_reward import PromptWatch, check_trained_ends, load_frozen_reward, place
from espalier.models.inputs import model_inputs
from espalier.models.log_ratio_reward import LogRatioReward
from espalier.models.logits import all_logits
from espalier.models.packing_check import packing_of, packs_rows
from espalier.models.precision import autocast
from espalier.models.scalar_head import ScoresSteps, scores_from_logits
from espalier.rewards.score import ANYTHING, PROCESS, Interval, Score, ScoreRange, clipped, hull


def row_logits(
    model: Any, rows: Sequence[Sequence[int]], pad_id: int, batch_tokens: int
) -> Iterator[list[tuple[int, torch.Tensor]]]:
    """Batch by batch: (number of a row, its logits [T, L] on the CPU), in bf16 where the device does it fast,
    without padding where the network allows it. Call it in inference mode."""
    device = next(model.parameters()).device
    is_packed = packing_of(model).choice_for(max(map(len, rows), default=0)) == "packed"
    for batch in in_batches(rows, is_packed, batch_tokens):
        placed = place_rows([rows[index] for index in batch], Layout("shared" if is_packed else "padded", pad_id))
        inputs = {name: v.to(device) if torch.is_tensor(v) else v for name, v in model_inputs(placed).items()}
        with autocast(device):
            logits = all_logits(model, inputs).flatten(0, 1).cpu()
        yield [(index, logits[path]) for path, index in zip(placed.paths, batch, strict=True)]


def packs_prompts(model: Any) -> bool:
    """Say whether a pass of a reward model computes a prompt once that its rows begin with alike."""
    return packs_rows(model.policy if isinstance(model, LogRatioReward) else model)


def score_trajectories(
    model: Any,
    trajectories: Sequence[Trajectory],
    *,
    pad_id: int,
    batch_tokens: int = 16384,
    on_progress: Callable[[int], None] = lambda done: None,
) -> list[list[float]]:
    """Return scores in [0, 1] of every step of every trajectory, in order.

    Trajectories with the same ids are scored once; `on_progress` gets the number of distinct ones done.
    Raises BadInput for a trajectory without token ids, or longer than the network takes.
    """
    for trajectory in trajectories:
        check_ends(trajectory.steps, trajectory.step_ends, trajectory.id)
    rows = list(map(step_tokens, trajectories))
    return score_step_tokens(model, rows, pad_id=pad_id, batch_tokens=batch_tokens, on_progress=on_progress)


@torch.inference_mode()
def score_step_tokens(
    model: Any,
    solutions: Sequence[StepTokens],
    *,
    pad_id: int,
    batch_tokens: int = 16384,
    on_progress: Callable[[int], None] = lambda done: None,
    read: Callable[[torch.Tensor], torch.Tensor] = scores_from_logits,
) -> list[list[float]]:
    """Score solutions given as token ids: one score in [0, 1] (or what is `read` off logits) for every step end, at the
    step's last token; a model without a head scores itself (in the dtype of its networks, half as many tokens at a
    time).

    Equal solutions (ids and step ends) are scored once; `on_progress` gets the number of distinct ones done.
    Raises BadInput for a solution that is longer than the network takes.
    """
    model.eval()
    if isinstance(model, ScoresSteps):
        return model.scores(solutions, max(1, batch_tokens // 2), on_progress)
    keys = [(tuple(s.prompt_ids), tuple(s.response_ids), tuple(s.step_ends)) for s in solutions]
    distinct = list(dict.fromkeys(keys))
    first = dict(zip(reversed(keys), reversed(solutions), strict=True))
    chosen = [first[key] for key in distinct]
    scores: dict[Any, list[float]] = {}
    rows = [[*s.prompt_ids, *s.response_ids] for s in chosen]
    _check_longest(model, chosen, rows)
    for batch in row_logits(model, rows, pad_id, batch_tokens):
        for index, logits in batch:
            start = len(chosen[index].prompt_ids)
            at_ends = logits[[start + end - 1 for end in chosen[index].step_ends]]
            scores[distinct[index]] = [round(float(value), 6) for value in read(at_ends)]
        on_progress(len(scores))
    return [scores[key] for key in keys]


def _check_longest(model: Any, solutions: Sequence[StepTokens], rows: Sequence[Sequence[int]]) -> None:
    """Raise BadInput, with the solution, for a row that the network does not take."""
    if not rows:
        return
    row, solution = max(zip(rows, solutions, strict=True), key=lambda pair: len(pair[0]))
    try:
        packing_of(model).choice_for(len(row))
    except BadInput as error:
        raise BadInput(f"{solution.name}: {error}") from None


def minimum_weights(scores: Sequence[float], temperature: float) -> list[float]:
    """Return shares that sum to 1 and go to the lowest scores: softmax(-score / temperature).

    PURE (Cheng et al. 2025, eq. 8): with process rewards times these shares, the sum over the steps to come is
    nearly the minimum over them; the temperature says how nearly.
    """
    lowest = min(scores, default=0.0)
    weights = [math.exp((lowest - score) / temperature) for score in scores]
    total = sum(weights)
    return [weight / total for weight in weights]


def step_rewards(scores: Sequence[float], form: str, offset: float, temperature: float) -> list[float]:
    """Scores in [0, 1] of S steps → rewards of S steps.

    - "score": score - offset (0.5 makes a doubtful step cost);
    - "progress": the change of the score from step to step, the first against `offset` (PAV, Setlur et al. 2024):
      they sum to last - offset, so that more steps pay nothing;
    - "minimum": (score - offset) times its `minimum_weights`: they sum to nearly the lowest.
    """
    moved = [score - offset for score in scores]
    if form == "progress":
        return [after - before for before, after in zip([0.0, *moved], moved, strict=False)]
    if form == "minimum":
        weights = minimum_weights(moved, temperature)
        return [value * weight for value, weight in zip(moved, weights, strict=True)]
    return moved


def step_reward_range(form: str, offset: float, limit: float) -> Interval:
    """Of the sum of `step_rewards` from any step on, each clipped to at most `limit` away from 0 (0: not clipped)."""
    low, high = -offset, 1 - offset
    if form == "progress":  # the last score minus the one before the sum: another score, or the offset
        largest = hull((low, high), (-1.0, 1.0))
        return largest if limit <= 0 or limit >= max(map(abs, largest)) else ANYTHING
    if form == "minimum":  # shares of the scores, which sum to 1 at most
        return hull((low, high), (0.0, 0.0))
    low, high = clipped((low, high), limit)
    return (low if low >= 0 else -math.inf, high if high <= 0 else math.inf)


def _network(path: str, attention: str, engines: Any) -> Any:
    if engines is None:
        return load_frozen_reward(path, STEPS, attention)
    from espalier.rewards.engine_scores import EngineScoredModel

    check_trained_ends(path, STEPS)
    return EngineScoredModel(path, engines)


FORMS = ("score", "progress", "minimum")


def check_form(form: str, temperature: float) -> None:
    """Raise BadInput on a form that does not exist, and a temperature not above 0."""
    if form not in FORMS:
        raise BadInput(f"the form of a process reward is one of {', '.join(FORMS)}, got '{form}'")
    if temperature <= 0:
        raise BadInput(f"the temperature of a process reward must be above 0, got {temperature:g}")


class ProcessReward:
    """A trained process reward model (`path`) as rewards at step ends; see `step_rewards` for the forms.

    Each reward is clipped to at most `limit` away from 0 where `limit` is above 0. `batch_tokens` bounds the
    padded size of a forward pass. With `engines` (a `rewards.engine_scores.TokenScorer`) these score, and start with
    the first solutions; None: transformers in this process. Raises BadInput on a form that does not exist, a
    temperature not above 0, and an outcome model.
    """

    reads_frozen_reward = True

    def __init__(
        self,
        path: str,
        form: str = "progress",
        offset: float = 0.5,
        temperature: float = 0.1,
        limit: float = 0.0,
        batch_tokens: int = 16384,
        attention: str = "auto",
        engines: Any = None,
    ):
        check_form(form, temperature)
        self.model: Any = _network(path, attention, engines)
        self.prompts = PromptWatch(path)
        self.form, self.offset, self.temperature = form, offset, temperature
        self.limit, self.batch_tokens = limit, batch_tokens

    @classmethod
    def score_range(cls, settings: Mapping[str, Any]) -> ScoreRange:
        """No outcome; with the form "score" there is no bound, because there is none to the number of steps."""
        return ScoreRange(to_come=step_reward_range(settings["form"], settings["offset"], settings["limit"]))

    def to(self, device: torch.device) -> None:
        """Move the network."""
        place(self.model, device)

    @property
    def has_engines(self) -> bool:
        """Whether engines score."""
        return not isinstance(self.model, torch.nn.Module)

    def close(self) -> None:
        """End the engines, where they score."""
        if self.has_engines:
            self.model.close()

    def networks(self) -> dict[str, Any]:
        """Return the one network."""
        return {"process reward model": self.model}

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Return outcome 0 and one reward a step. Raises BadInput for a trajectory without token ids."""
        self.prompts(trajectories)
        rows = score_trajectories(self.model, trajectories, pad_id=0, batch_tokens=self.batch_tokens)
        rewarded = []
        for scores in rows:
            rewards = step_rewards(scores, self.form, self.offset, self.temperature)
            if self.limit > 0:
                rewards = [min(max(value, -self.limit), self.limit) for value in rewards]
            mean = sum(scores) / len(scores) if scores else 0.0
            rewarded.append(Score(0.0, rewards, {PROCESS: mean}))
        return rewarded
