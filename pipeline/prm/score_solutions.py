"""AnnotatedSolution or Trajectory → StepScores with a process reward model that others published, or a folder of
transformers' own classes: the text is laid out as that model was trained to read it.

A model that was trained here reads the token ids of its policy (`prm/score_steps`); with `layout=task` it reads other
people's solutions too, behind the task's own prompt.
"""

import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier.data.jsonl import iter_rows, read_records
from espalier.data.process_data.published import content_key
from espalier.data.records import AnnotatedSolution, BadInput, Problem, StepScores, Trajectory
from espalier.data.steps import StepTokens
from espalier.data.training_problems import problem_hash, read_training_problems
from espalier.pipeline.prm.score_parts import ScoreParts
from espalier.pipeline.stage import StageContext
from espalier.runtime.manifest import weight_files

log = logging.getLogger("stage")

TASK = "task"
_BLOCK = 64  # solutions that are written together


@dataclass(frozen=True)
class Text:
    """What is scored: the problem in words and the steps of a solution."""

    id: str
    problem_id: str
    question: str
    steps: Sequence[str]


@dataclass(frozen=True)
class ScoreSolutions:
    """`model`: a folder or a hub name; `layout`: a row of `models.published.table`, "auto" (the row that the model's
    name or config says), or "task" (the prompt of `task`, and a model that was trained here); `split`: the task's that
    holds the problems of trajectories; `batch_tokens`: padded tokens of one forward pass."""

    model: str
    layout: str = "auto"
    split: str = "test"
    batch_tokens: int = 16384

    def inputs(self) -> list[str]:
        """Return the weights of a local model, which belong to the provenance."""
        return weight_files(Path(self.model)) if Path(self.model).is_dir() else []

    def run(self, input_path: str, context: StageContext) -> Iterable[StepScores]:
        """Return one record per solution, in order, without scores where it is longer than the model takes (counted,
        with a warning). What is scored is kept as it comes: a run that was stopped goes on by the same command. Raises
        BadInput for a solution that cannot be laid out."""
        rows = self._read(input_path, context.task)
        layout, scorer = self._scorer(context.task)
        context.counts.update(layout=layout, steps=sum(len(row.steps) for row in rows))
        asked = [(row.id, row.question, list(row.steps)) for row in rows]
        how = f"{layout}, {self.model}, {content_key([asked, self._prompt(rows, context.task)])}"
        parts = ScoreParts(context.output, input_path, [self.model], [row.id for row in rows], how)
        context.kept.append(parts.folder)
        is_seen = self._seen(rows, context)
        missing = [row for row in rows if row.id not in parts.scores]
        done = len(rows) - len(missing)
        with context.progress("score", len(rows), "solution", done) as progress:
            for start in range(0, len(missing), _BLOCK):
                block = missing[start : start + _BLOCK]
                parts.add(block, scorer(block), is_seen)
                progress.update(done + start + len(block))
        too_long = [row.id for row in rows if row.steps and not parts.scores[row.id]]
        context.counts["too_long"] = len(too_long)
        if too_long:
            log.warning("%d of %d solutions are longer than the model takes, without scores: %s, ...", len(too_long),
                        len(rows), too_long[0])  # fmt: skip
        return [StepScores(row.id, row.problem_id, parts.scores[row.id], is_seen[row.problem_id]) for row in rows]

    def _read(self, input_path: str, task: Any) -> list[Text]:
        first = next((row for _, row in iter_rows(input_path)), {})
        if "question" in first:
            found = read_records(AnnotatedSolution, input_path)
            return [Text(row.id, row.problem_id, row.question, row.steps) for row in found]
        if task is None:
            raise BadInput(f"{input_path}: trajectories do not hold their problem in words: set task and stage.split "
                           "as they were sampled")  # fmt: skip
        problems = {problem.id: problem for problem in task.problems(self.split)}
        rows = []
        for row in read_records(Trajectory, input_path):
            problem = problems.get(row.problem_id)
            if problem is None:
                raise BadInput(f"trajectory '{row.id}': the task's split {self.split} has no problem "
                               f"'{row.problem_id}': set stage.split and task as they were sampled")  # fmt: skip
            if problem.question not in row.prompt or problem.gold != row.gold:
                raise BadInput(f"trajectory '{row.id}' answers another problem than the task's '{row.problem_id}': set "
                               "task, task.* and stage.split as they were sampled")  # fmt: skip
            rows.append(Text(row.id, row.problem_id, problem.question, row.steps))
        return rows

    def _prompt(self, rows: Sequence[Text], task: Any) -> str:
        """Return what stands before the first solution, where that is the task's affair."""
        if self.layout != TASK or not rows:
            return ""
        problem = Problem(rows[0].problem_id, rows[0].question, "")
        return str(task.template.render(problem) if hasattr(task, "template") else task.prompt(problem))

    def _scorer(self, task: Any) -> tuple[str, Any]:
        """Return (the layout's name, a function that scores solutions)."""
        from espalier.models.load import load_tokenizer
        from espalier.runtime.distributed import device

        tokenizer = load_tokenizer(self.model)
        if self.layout == TASK:
            return TASK, self._task_scorer(task, tokenizer)
        from espalier.models.published.load import load_published, published_name
        from espalier.models.published.scoring import PublishedScorer, Solution
        from espalier.models.published.table import PUBLISHED

        name = published_name(self.model) if self.layout == "auto" else self.layout
        if name not in PUBLISHED:
            raise BadInput(f"stage.layout must be auto, {TASK} or one of {', '.join(PUBLISHED)}, got '{name}'")
        model = load_published(self.model, PUBLISHED[name])
        model.to(device())
        scorer = PublishedScorer(model, tokenizer, PUBLISHED[name])
        log.info("%s is read as %s", self.model, name)

        def scores(rows: Sequence[Text]) -> list[list[float]]:
            solutions = [Solution(row.id, row.question, row.steps) for row in rows]
            return scorer.scores(solutions, self.batch_tokens, on_too_long=log.info)

        return name, scores

    def _task_scorer(self, task: Any, tokenizer: Any) -> Any:
        from espalier.data.prompts import encode_prompt
        from espalier.data.token_text import tokenise_steps
        from espalier.models.scalar_head import load_process_reward
        from espalier.rewards.process import score_step_tokens
        from espalier.runtime.distributed import device

        if task is None:
            raise BadInput("stage.layout=task reads a solution behind the task's prompt: set task")
        model = load_process_reward(self.model)
        model.to(device())
        limit = getattr(model.config, "max_position_embeddings", None) or sys.maxsize

        def scores(rows: Sequence[Text]) -> list[list[float]]:
            solutions = []
            for row in rows:
                prompt = encode_prompt(task, tokenizer, Problem(row.problem_id, row.question, ""))
                steps = [step.rstrip() + "\n" for step in row.steps]
                found = tokenise_steps(tokenizer, prompt.ids, steps, is_finished=False)
                if found is None:
                    raise BadInput(f"'{row.id}': its text does not come back from the model's tokens")
                is_short = len(found.prompt_ids) + len(found.response_ids) <= limit
                solutions.append(found if is_short else StepTokens(found.prompt_ids[:1], [], []))
            return score_step_tokens(
                model, solutions, pad_id=int(tokenizer.pad_token_id), batch_tokens=self.batch_tokens
            )

        return scores

    def _seen(self, rows: Sequence[Text], context: StageContext) -> Mapping[str, bool | None]:
        """Return of every problem whether the model was trained on it; None where its folder does not say."""
        hashes = read_training_problems(self.model) if Path(self.model).is_dir() else None
        problems = dict.fromkeys(row.problem_id for row in rows)
        if hashes is None:
            return dict.fromkeys(problems, None)
        seen = {problem: problem_hash(problem) in hashes for problem in problems}
        context.counts.update(problems=len(problems), problems_seen=sum(seen.values()))
        return seen
