"""Trajectory → StepScores with a trained process reward model, or with two: each scores what the other has seen.

Scores of problems that a model was trained on flatter. With `other_model`, trained on the problems that `model` was not
trained on, every trajectory is scored by the model that has not seen its problem (cross-fitting in two folds).
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from espalier.data.jsonl import read_records
from espalier.data.records import BadInput, StepScores, Trajectory
from espalier.data.steps import check_ends, step_tokens
from espalier.data.training_problems import FILE, problem_hash, read_policy_problems, read_training_problems
from espalier.pipeline.prm.score_parts import ScoreParts
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


Chosen = dict[str, tuple[int, bool | None]]
"""Problem → (the place of its model, whether that one has seen it; None: not known)."""


@dataclass(frozen=True)
class ScoreSteps:
    """`model`: a process reward model's folder; `other_model`: a second one, or empty; `batch_tokens`: padded tokens of
    one forward pass, or of one call of an engine; `num_checked`: solutions of each model that transformers scores too
    where engines do, at the start (0: none)."""

    model: str
    other_model: str = ""
    batch_tokens: int = 16384
    num_checked: int = 4
    asks_engines: ClassVar[bool] = True

    def inputs(self) -> list[str]:
        """Return the models' weights belong to the provenance."""
        models = [Path(model) for model in (self.model, self.other_model) if model]
        return [file for model in models for file in weight_files(model)]

    def run(self, input_path: str, context: StageContext) -> Iterable[StepScores]:
        """Return one record a trajectory, in order; counts `problems_seen`, those that their scorer was trained on.
        Raises BadInput where two models are named and one does not say what it was trained on."""
        trajectories = read_records(Trajectory, input_path)
        models, chosen = self._choose(trajectories)
        if context.engines is None:
            scores = self._by_transformers(models, chosen, trajectories, context)
        else:
            scores = self._by_engines(models, chosen, trajectories, input_path, context)
        num_seen = sum(bool(is_seen) for _, is_seen in chosen.values())
        context.counts.update(steps=sum(map(len, scores.values())), problems=len(chosen), problems_seen=num_seen)
        if num_seen:
            log.warning(
                "%d of %d problems were in the training set of the model that scores them", num_seen, len(chosen)
            )
        self._note_policy(models, chosen, context)
        return [StepScores(t.id, t.problem_id, scores[t.id], chosen[t.problem_id][1]) for t in trajectories]

    def _by_transformers(
        self, models: Sequence[str], chosen: Chosen, trajectories: Sequence[Trajectory], context: StageContext
    ) -> dict[str, list[float]]:
        """Return the scores of every trajectory, computed in this process."""
        scores: dict[str, list[float]] = {}
        with context.progress("score", len(trajectories), "solution") as progress:
            for place, path in enumerate(models):
                mine = [t for t in trajectories if chosen[t.problem_id][0] == place]
                before = len(scores)

                def show(done: int, before: int = before) -> None:
                    progress.update(before + done)

                rows = self._scored(path, mine, show)
                scores.update((t.id, row) for t, row in zip(mine, rows, strict=True))
        return scores

    def _scored(
        self,
        path: str,
        rows: Sequence[Trajectory],
        on_progress: Callable[[int], None] = lambda done: None,
        on_cpu: bool = False,
    ) -> list[list[float]]:
        """Return the scores of these trajectories by one model; `on_cpu`: the GPU is left to engines."""
        from espalier.models.load import load_tokenizer
        from espalier.models.scalar_head import load_process_reward
        from espalier.rewards.process import score_trajectories
        from espalier.runtime.distributed import device

        if not rows:
            return []
        model, pad_id = load_process_reward(path), int(load_tokenizer(path).pad_token_id)
        model.to("cpu" if on_cpu else device())
        return score_trajectories(model, rows, pad_id=pad_id, batch_tokens=self.batch_tokens, on_progress=on_progress)

    def _by_engines(
        self,
        models: Sequence[str],
        chosen: Chosen,
        trajectories: Sequence[Trajectory],
        input_path: str,
        context: StageContext,
    ) -> dict[str, list[float]]:
        """Return the scores of every trajectory: those that a run before has left, and what engines say of the rest."""
        from espalier.rewards.engine_scores import check_engine_model

        for path in models:
            check_engine_model(path)
        for trajectory in trajectories:
            check_ends(trajectory.steps, trajectory.step_ends, trajectory.id)
        parts = ScoreParts(context.output, input_path, models, [t.id for t in trajectories])
        context.kept.append(parts.folder)
        is_seen = {problem_id: seen for problem_id, (_, seen) in chosen.items()}
        try:
            for place, path in enumerate(models):
                mine = [t for t in trajectories if chosen[t.problem_id][0] == place]
                if any(t.id not in parts.scores for t in mine):
                    self._ask_engines(path, mine, parts, is_seen, context)
        except BaseException:
            if parts.scores:
                kept = f"{len(parts.scores)} of {len(trajectories)} solutions are scored and kept in {parts.folder}"
                log.warning("%s: run the same command to go on", kept)
            raise
        return parts.scores

    def _ask_engines(
        self,
        path: str,
        mine: Sequence[Trajectory],
        parts: ScoreParts,
        is_seen: Mapping[str, bool | None],
        context: StageContext,
    ) -> None:
        """Have one model's trajectories scored that are not done. Raises ScoresDiffer, and what engines raise."""
        from espalier.rewards.engine_scores import check_lengths, check_scores, score_by_engines

        check_lengths(context.engines, list(map(step_tokens, mine)))
        missing = [t for t in mine if t.id not in parts.scores]
        checked = [t for t in mine if t.steps][: self.num_checked]
        expected = self._scored(path, checked, on_cpu=True)
        try:
            context.engines.open(path)
            if checked:
                found = check_scores(context.engines, list(map(step_tokens, checked)), expected)
                log.info("engines agree with transformers: %s", found)
                largest = max(found.largest_gap, context.counts.get("largest_gap", 0.0))
                context.counts["largest_gap"] = round(largest, 6)
            done, began = len(parts.scores), time.monotonic()
            with context.progress("score", done + len(missing), "solution", done) as progress:

                def add(places: list[int], scores: list[list[float]]) -> None:
                    parts.add([missing[place] for place in places], scores, is_seen)
                    progress.update(len(parts.scores))

                score_by_engines(context.engines, list(map(step_tokens, missing)), self.batch_tokens, add)
            log.info("engines scored %d solutions in %.1f s", len(missing), time.monotonic() - began)
        finally:
            context.engines.close()

    def _note_policy(self, models: Sequence[str], chosen: Chosen, context: StageContext) -> None:
        """Count and warn of problems that only the policy below the scoring head has learned from."""
        below = [read_policy_problems(model) for model in models]
        number = sum(not is_seen and problem_hash(name) in below[place] for name, (place, is_seen) in chosen.items())
        context.counts["problems_seen_by_its_policy"] = number
        if number:
            log.warning("%d of %d problems were in the pairs of the policy that the model which scores them was trained"
                        " from: train it from one that has not learned from them", number, len(chosen))  # fmt: skip

    def _choose(self, trajectories: Sequence[Trajectory]) -> tuple[list[str], Chosen]:
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
