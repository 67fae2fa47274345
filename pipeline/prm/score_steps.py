"""AnnotatedSolution or Trajectory → StepScores with a reward model of steps or of outcomes: one trained here, one that
others published (`models.published`), or a folder of transformers' own classes; each laid out as it was trained. With
`layout=whole` an outcome reward model gives OutcomeScore: one score per sample.

With `other_model`, trained on the problems that `model` was not trained on, every solution is scored by the model that
has not seen its problem: scores of problems that a model was trained on flatter (cross-fitting in two folds).

Solutions are read, scored and kept one block after the other: memory does not grow with them, but for 8 bytes per
problem. A run that was stopped goes on by the same command. Several ranks share the solutions.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from espalier.data.jsonl import file_sha256
from espalier.data.process_data.published import content_key
from espalier.data.records import AnnotatedSolution, BadInput, StepScores
from espalier.data.steps import StepTokens
from espalier.data.training_problems import FILE, SeenProblems, problem_hash, read_policy_problems, read_seen_problems
from espalier.pipeline.evaluation.evaluation_inputs import OutcomeScore
from espalier.pipeline.prm.distinct import Distinct
from espalier.pipeline.prm.step_inputs import (
    WHOLE,
    Reader,
    Solution,
    check_sampled_ids,
    choose_layout,
    kind_of,
    make_reader,
    said_of_ends,
    solutions_of,
    warn_of_prompts,
    whole_reader,
)
from espalier.pipeline.prm.step_scorers import Scores, StepModel, shown
from espalier.pipeline.score_parts import ScoreParts, model_on_ranks, scored_by
from espalier.pipeline.stage import StageContext
from espalier.runtime.distributed import barrier, rank, world_size
from espalier.runtime.fingerprints import model_fingerprint
from espalier.runtime.manifest import weight_files

log = logging.getLogger("stage")

_PASSES = 4  # of a block: so many are sorted by length together
_SHARE = 64  # neighbours that one rank takes: solutions of one problem share its prompt


def choose_model(row: Solution, seen: Sequence[SeenProblems]) -> tuple[int, bool | None]:
    """Return (the place of the first model that was not trained on the problem of a solution, else of the first one of
    which nobody knows, else of the first one; whether that one was)."""
    is_judged = isinstance(row, AnnotatedSolution)
    text = row.question if isinstance(row, AnnotatedSolution) else row.prompt
    said = [one.says(row.problem_id, text, is_judged) for one in seen]
    place = next(said.index(answer) for answer in (False, None, True) if answer in said)
    return place, said[place]


@dataclass(frozen=True)
class KeptScores:
    """The scores of a solution; `row`: its place in the input, from 0."""

    row: int
    id: str
    problem_id: str
    scores: list[float]
    is_seen: bool | None = None

    @property
    def num_scored(self) -> int:
        """Return 1: a solution."""
        return 1

    @property
    def record(self) -> StepScores:
        """Return the row of the output."""
        return StepScores(self.id, self.problem_id, self.scores, self.is_seen)


@dataclass(frozen=True)
class ScoreSteps:
    """`model`: a folder or a hub name, `revision` of the latter; `other_model`: a second one, or empty; `layout`: how
    they read solutions (`pipeline.prm.step_inputs`), or "auto"; `split`: the task's that holds the problems of
    trajectories; `deviations` from how a published model's authors read it: names of `models.published.layouts` and
    `reads`, and other values; `max_length`: longer solutions get no scores (0: than the model's positions);
    `batch_tokens`: padded tokens of one forward pass, or of one call of an engine; `num_checked`:
    solutions of each model that transformers scores too where engines do, at the start (0: none)."""

    model: str
    other_model: str = ""
    revision: str = ""
    layout: str = "auto"
    split: str = "test"
    batch_tokens: int = 16384
    num_checked: int = 4
    deviations: Mapping[str, Any] | None = None
    max_length: int = 0
    asks_engines: ClassVar[bool] = True
    runs_on_ranks: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.deviations, Mapping | None):
            raise BadInput(f"stage.deviations must be names with values, {{NAME: VALUE}}, got {self.deviations!r}")
        if type(self.max_length) is not int or self.max_length < 0:
            raise BadInput(f"stage.max_length must be a number of tokens, 0 for the model's positions, "
                           f"got {self.max_length!r}")  # fmt: skip

    def inputs(self) -> list[str]:
        """Return the weights of local models, which belong to the provenance."""
        models = [Path(model) for model in (self.model, self.other_model) if model and Path(model).is_dir()]
        return [file for model in models for file in weight_files(model)]

    def run(self, input_path: str, context: StageContext) -> Iterator[StepScores | OutcomeScore]:
        """Return one record per solution, in order, without scores where it is longer than the model takes (counted,
        with a warning); counts `problems_seen`, those that their scorer was trained on. Raises BadInput for a solution
        that cannot be read, and where two models are named and one does not say what it was trained on."""
        scoring = _Scoring(self, input_path, context)
        context.kept.append(scoring.parts.folder)
        scoring.score()
        barrier()
        return scoring.output()


@dataclass(frozen=True)
class _Scoring:
    """One run of the stage."""

    stage: ScoreSteps
    input_path: str
    context: StageContext

    @cached_property
    def models(self) -> list[StepModel]:
        """Both models, laid out alike, with their tokenizers alone."""
        from espalier.models.load import load_tokenizer

        kind, found, said = kind_of(self.input_path), list[StepModel](), list[str]()
        for name, revision in ((self.stage.model, self.stage.revision), (self.stage.other_model, "")):
            if not name:
                continue
            folder = model_on_ranks(name, revision)
            said.append(said_of_ends(self.stage.layout, name, folder, kind))
            layout = choose_layout(self.stage.layout, name, folder, kind)
            sizes = self.stage.batch_tokens, self.stage.num_checked
            model = StepModel(folder, layout, load_tokenizer(folder), *sizes, self.stage.deviations or {})
            log.info("%s is read as %s", name, model.read_as)
            found.append(model)
        self.context.counts["ends"] = "; ".join(dict.fromkeys(said))
        if len({model.layout for model in found}) > 1:
            raise BadInput("stage.model and stage.other_model read solutions otherwise: set stage.layout for both")
        return found

    @cached_property
    def readers(self) -> list[Reader]:
        """What makes token ids of a solution, for each model."""
        task, split = self.context.task, self.stage.split
        return [
            whole_reader(model.folder, model.tokenizer, task, split)
            if model.layout == WHOLE
            else make_reader(model.layout, model.tokenizer, task, split, model.row)
            for model in self.models
        ]

    @cached_property
    def seen(self) -> list[SeenProblems] | None:
        """What each model was trained on; None where one does not say."""
        seen = [read_seen_problems(model.folder) for model in self.models]
        known = [one for one in seen if one is not None]
        if len(known) == len(seen):
            return known
        if self.stage.other_model:
            raise BadInput(f"{self.models[seen.index(None)].folder}: no {FILE} there, so that nobody knows which of "
                           "two models has not seen a problem: train it again, or score with one model")  # fmt: skip
        return None

    @cached_property
    def parts(self) -> ScoreParts[KeptScores]:
        """What is scored already."""
        from espalier.models.hub_snapshot import commit_of

        first = next((row for _, row in solutions_of(self.input_path)), None)
        if first is not None:
            for model, reader in zip(self.models, self.readers, strict=True):
                warn_of_prompts(model.folder, model.layout, model.tokenizer, reader(first))
                check_sampled_ids(model.layout, model.folder, model.tokenizer, first)
        return ScoreParts(
            KeptScores,
            self.context.output,
            {
                "commits": [commit_of(model.folder) for model in self.models],
                "input": file_sha256(self.input_path),
                "models": [model_fingerprint(model.folder) for model in self.models],
                "layout": self.models[0].read_as,
                "first row": content_key(list(vars(self.readers[0](first)).values())) if first else "",
                **scored_by(self.context.engines),
                **({"max_length": self.stage.max_length} if self.stage.max_length else {}),
            },
        )

    @cached_property
    def limits(self) -> list[int]:
        """How many tokens each model takes."""
        from espalier.models.load import load_config, positions_of

        own = [positions_of(load_config(model.folder)) for model in self.models]
        return [min(limit, self.stage.max_length or limit) for limit in own]

    def score(self) -> None:
        """Score what is missing, one model after the other; this rank's share of it."""
        with self.parts.progress(self.context, self._look(), "solution") as advance:
            for place in range(len(self.models)):
                for num in self._score_by(place):
                    advance(num)

    def _look(self) -> int:
        """Return the number of solutions; where engines score, first read them all: none may be longer than they take,
        which is better said before they start. Raises BadInput."""
        if self.context.engines is None:
            return sum(1 for _ in solutions_of(self.input_path))
        from espalier.rewards.engine_scores import check_lengths

        for model in self.models:
            model.engine_form()
        num = 0
        for _, row in solutions_of(self.input_path):
            place, _ = self._choice(row)
            check_lengths(self.context.engines, [self._tokens(place, row)])
            num += 1
        return num

    def _choice(self, row: Solution) -> tuple[int, bool | None]:
        """Return (the place of the model that scores a solution, whether that was trained on its problem)."""
        return (0, None) if self.seen is None else choose_model(row, self.seen)

    def _tokens(self, place: int, row: Solution) -> StepTokens:
        """Return a solution's token ids; without steps where it is too long."""
        tokens = self.readers[place](row)
        length = len(tokens.prompt_ids) + len(tokens.response_ids)
        return tokens if length <= self.limits[place] else StepTokens(tokens.prompt_ids[:1], [], [], tokens.name)

    def _score_by(self, place: int) -> Iterator[int]:
        """Score what one model is to score; after each block the number of its solutions."""
        blocks = self._blocks(self._missing(place))
        first = next(blocks, None)
        if first is None:
            return
        num = 0
        with self._scorer(place, [tokens for _, tokens in first]) as scores:
            began = time.monotonic()
            while first is not None:
                found = scores([tokens for _, tokens in first])
                self.parts.add(place, [replace(kept, scores=own) for (kept, _), own in zip(first, found, strict=True)])
                num += len(first)
                yield len(first)
                first = next(blocks, None)
        by = "this process" if self.context.engines is None else "engines"
        log.info("%s scored %d solutions in %.1f s", by, num, time.monotonic() - began)

    @contextmanager
    def _scorer(self, place: int, first: Sequence[StepTokens]) -> Iterator[Scores]:
        model = self.models[place]
        if self.context.engines is None:
            yield model.by_transformers()
            return
        with model.by_engines(first, self.context) as scores:
            yield scores

    def _missing(self, place: int) -> Iterator[tuple[KeptScores, StepTokens]]:
        """Return this rank's solutions of one model that are not done, in order."""
        for number, row in self.parts.missing(solutions_of(self.input_path)):
            chosen, is_seen = self._choice(row)
            if chosen == place and number // _SHARE % world_size() == rank():
                yield KeptScores(number, row.id, row.problem_id, [], is_seen), self._tokens(place, row)

    def _blocks(self, rows: Iterator[tuple[KeptScores, StepTokens]]) -> Iterator[list[tuple[KeptScores, StepTokens]]]:
        """Cut rows into blocks of so many tokens that engines and sorted batches are full."""
        engines = self.context.engines
        limit = self.stage.batch_tokens * _PASSES * (4 * engines.num_engines if engines is not None else 1)
        block, size = list[tuple[KeptScores, StepTokens]](), 0
        for row in rows:
            block.append(row)
            size += len(row[1].prompt_ids) + len(row[1].response_ids) + 1
            if size >= limit:
                yield block
                block, size = [], 0
        if block:
            yield block

    def output(self) -> Iterator[StepScores | OutcomeScore]:
        """Return every record in order, and count. Raises BadInput where one is missing."""
        counts, too_long, first_too_long, steps = self.context.counts, 0, "", 0
        problems, seen, unknown, below = Distinct(), Distinct(), Distinct(), Distinct()
        of_policies = [read_policy_problems(model.folder) for model in self.models]
        kept_rows = self.parts.rows()
        for number, row in solutions_of(self.input_path):
            kept = next(kept_rows, None)
            if kept is None or (kept.row, kept.id) != (number, row.id):
                raise BadInput(f"{self.parts.folder} lacks the scores of '{row.id}': remove it and score again")
            digest = problem_hash(row.problem_id)
            problems.add(digest)
            place = self._choice(row)[0]
            (seen if kept.is_seen else below if digest in of_policies[place] else problems).add(digest)
            if kept.is_seen is None and self.seen is not None:
                unknown.add(digest)
            steps += len(kept.scores)
            if row.steps and not kept.scores:
                too_long, first_too_long = too_long + 1, first_too_long or row.id
            if self.models[place].layout == WHOLE:
                yield OutcomeScore(row.id, row.problem_id, next(iter(kept.scores), None), kept.is_seen)
            else:
                yield kept.record
        counts.update(layout=self.models[0].layout, steps=steps, problems=len(problems), problems_seen=len(seen))
        if self.stage.deviations:
            counts["deviations"] = shown(self.stage.deviations)
            log.warning("%s: not read as published (%s): no figure of these scores is the published one",
                        self.context.output, counts["deviations"])  # fmt: skip
        counts["problems_seen_by_its_policy"] = len(below)
        if len(unknown):
            counts["problems_perhaps_seen"] = len(unknown)
            log.warning("of %d of %d problems nobody knows whether the model that scores them was trained on them: "
                        "rows have a name for an id, and it learned from ids of questions, or the other way round; "
                        "take its figures for flattered", len(unknown), len(problems))  # fmt: skip
        counts["too_long"] = too_long
        self._warn(len(problems), len(seen), len(below), too_long, first_too_long)

    def _warn(self, problems: int, seen: int, below: int, too_long: int, first_too_long: str) -> None:
        if seen:
            log.warning("%d of %d problems were in the training set of the model that scores them", seen, problems)
        if below:
            log.warning("%d of %d problems were in the pairs of the policy that the model which scores them was trained"
                        " from: train it from one that has not learned from them", below, problems)  # fmt: skip
        if too_long:
            limit = self.stage.max_length
            log.warning("%d solutions are longer than the model takes%s, without scores: %s, ...", too_long,
                        f" or stage.max_length={limit} says" if limit else "", first_too_long)  # fmt: skip
