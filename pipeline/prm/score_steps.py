"""Trajectory → StepScores with a trained process reward model, or with two: each scores what the other has seen.

Scores of problems that a model was trained on flatter. With `other_model`, trained on the problems that `model` was not
trained on, every trajectory is scored by the model that has not seen its problem (cross-fitting in two folds).
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from espalier.data.jsonl import read_records
from espalier.data.records import BadInput, StepScores, Trajectory
from espalier.data.training_problems import FILE, problem_hash, read_policy_problems, read_training_problems
from espalier.pipeline.stage import StageContext
from espalier.runtime.manifest import weight_files

log = logging.getLogger("stage")


def choose_models(problem_ids: Iterable[str], seen: Sequence[frozenset[str]]) -> dict[str, tuple[int, bool]]:
    """Problem → (the place of the first model that was not trained on it, else of the first one; whether that one
    was), from the hashes of each model's training problems."""
    models = {}
    for problem_id in problem_ids:
        digest = problem_hash(problem_id)
        place = next((place for place, hashes in enumerate(seen) if digest not in hashes), 0)
        models[problem_id] = place, digest in seen[place]
    return models


@dataclass(frozen=True)
class ScoreSteps:
    """`model`: a process reward model's folder; `other_model`: a second one, or empty; `batch_tokens`: padded tokens of
    one forward pass."""

    model: str
    other_model: str = ""
    batch_tokens: int = 16384

    def inputs(self) -> list[str]:
        """Return the models' weights belong to the provenance."""
        models = [Path(model) for model in (self.model, self.other_model) if model]
        return [file for model in models for file in weight_files(model)]

    def run(self, input_path: str, context: StageContext) -> Iterable[StepScores]:
        """Return one record a trajectory, in order; counts `problems_seen`, those that their scorer was trained on.
        Raises BadInput where two models are named and one does not say what it was trained on."""
        from espalier.models.load import load_tokenizer
        from espalier.models.scalar_head import load_process_reward
        from espalier.rewards.process import score_trajectories
        from espalier.runtime.distributed import device

        trajectories = read_records(Trajectory, input_path)
        models, chosen = self._choose(trajectories)
        scores: dict[str, list[float]] = {}
        with context.progress("score", len(trajectories), "solution") as progress:
            for place, path in enumerate(models):
                mine = [t for t in trajectories if chosen[t.problem_id][0] == place]
                if not mine:
                    continue
                model, pad_id = load_process_reward(path).to(device()), int(load_tokenizer(path).pad_token_id)
                before = len(scores)

                def show(done: int, before: int = before) -> None:
                    progress.update(before + done)

                rows = score_trajectories(model, mine, pad_id=pad_id, batch_tokens=self.batch_tokens, on_progress=show)
                scores.update((t.id, row) for t, row in zip(mine, rows, strict=True))
        num_seen = sum(bool(is_seen) for _, is_seen in chosen.values())
        context.counts.update(steps=sum(map(len, scores.values())), problems=len(chosen), problems_seen=num_seen)
        if num_seen:
            log.warning(
                "%d of %d problems were in the training set of the model that scores them", num_seen, len(chosen)
            )
        self._note_policy(models, chosen, context)
        return [StepScores(t.id, t.problem_id, scores[t.id], chosen[t.problem_id][1]) for t in trajectories]

    def _note_policy(
        self, models: Sequence[str], chosen: Mapping[str, tuple[int, bool | None]], context: StageContext
    ) -> None:
        """Count and warn of problems that only the policy below the scoring head has learned from."""
        below = [read_policy_problems(model) for model in models]
        number = sum(not is_seen and problem_hash(name) in below[place] for name, (place, is_seen) in chosen.items())
        context.counts["problems_seen_by_its_policy"] = number
        if number:
            log.warning("%d of %d problems were in the pairs of the policy that the model which scores them was trained"
                        " from: train it from one that has not learned from them", number, len(chosen))  # fmt: skip

    def _choose(self, trajectories: Sequence[Trajectory]) -> tuple[list[str], dict[str, tuple[int, bool | None]]]:
        """(models, problem → (place of its model, whether that one has seen it; None: not known))."""
        models = [model for model in (self.model, self.other_model) if model]
        seen = [read_training_problems(model) for model in models]
        problem_ids = dict.fromkeys(t.problem_id for t in trajectories)
        known = [hashes for hashes in seen if hashes is not None]
        if len(known) == len(models):
            return models, dict(choose_models(problem_ids, known))
        if self.other_model:
            raise BadInput(f"{models[seen.index(None)]}: no {FILE} there, so that nobody knows which of two models has "
                           "not seen a problem: train it again, or score with one model")  # fmt: skip
        return models, dict.fromkeys(problem_ids, (0, None))
