"""Solutions of a file, one after the other, as the token ids that a reward model reads.

Four ways to read them: `tokens`, the ids that the policy sampled, for models that were trained on such; `task`, their
text behind the task's prompt, for the same models on other people's solutions; a row of `models.published.table`; or
`whole`, for outcome reward models: one score at the end of a sample.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from espalier.data.conversations import ended_response, responses_of_turns
from espalier.data.jsonl import iter_rows
from espalier.data.prompts import encode_prompt, encode_text
from espalier.data.records import AnnotatedSolution, BadInput, Problem, Trajectory, parse_record
from espalier.data.seen_responses import FILE as RESPONSES_FILE
from espalier.data.steps import StepTokens, check_ends, step_tokens
from espalier.data.token_text import tokenise_steps
from espalier.data.training_layout import CHAT, PROMPTS_IN_WORDS, RESPONSES, STEPS, other_prompts, read_training_layout
from espalier.data.training_problems import FILE

log = logging.getLogger("stage")
TOKENS, TASK, WHOLE = "tokens", "task", "whole"
Solution = AnnotatedSolution | Trajectory
Reader = Callable[[Solution], StepTokens]


def kind_of(path: str) -> type[Solution]:
    """Say what a file of solutions holds, by its first row."""
    first = next((row for _, row in iter_rows(path)), {})
    return AnnotatedSolution if "question" in first else Trajectory


def solutions_of(path: str) -> Iterator[tuple[int, Solution]]:
    """Return every solution with its place in the file, from 0. Raises BadInput on a line that is none."""
    kind = kind_of(path)
    for number, (place, row) in enumerate(iter_rows(path)):
        yield number, parse_record(kind, row, place)


def said_of_ends(wanted: str, name: str, folder: str, kind: type[Solution]) -> str:
    """Say for the provenance where a model is read, after every step or (`whole`) at the end, and what says that it was
    trained there. Raises BadInput on one that was trained on whole responses, unless a layout is named."""
    from espalier.models.trained_ends import trained_ends

    own = TOKENS if kind is Trajectory else TASK
    remedy = (f"an outcome model is for samples by stage.layout={WHOLE}, and for pairs by evaluation/score_responses; "
              f"stage.layout={own} reads it after every step")  # fmt: skip
    return trained_ends(folder, name).read_at(RESPONSES if wanted == WHOLE else STEPS, name, wanted != "auto", remedy)


def choose_layout(wanted: str, name: str, folder: str, kind: type[Solution]) -> str:
    """Return how a model reads solutions: as `wanted`, or with "auto" by what its folder says, then its `name`, then
    its config. Raises BadInput on a layout that does not exist or does not fit, BadModel where nothing says it."""
    from espalier.models.load import load_config
    from espalier.models.log_ratio_reward import is_log_ratio_reward
    from espalier.models.published.load import name_by_config, row_by_name
    from espalier.models.published.table import PUBLISHED

    own = TOKENS if kind is Trajectory else TASK
    if wanted == "auto":
        is_from_here = _is_from_here(folder)
        if not is_from_here and (row := row_by_name(name)):
            return row
        if is_from_here or is_log_ratio_reward(folder) or (own == TOKENS and _has_own_head(load_config(folder))):
            return own
        return name_by_config(folder)
    if wanted == WHOLE and kind is not Trajectory:
        raise BadInput(f"stage.layout={WHOLE} gives one score to each sample, and judged solutions need a score for "
                       "every step: score them by a process reward model")  # fmt: skip
    if wanted not in (TOKENS, TASK, WHOLE, *PUBLISHED):
        raise BadInput(
            f"stage.layout must be auto, {TOKENS}, {TASK}, {WHOLE} or one of {', '.join(PUBLISHED)}, got '{wanted}'"
        )
    if wanted == TOKENS and kind is not Trajectory:
        raise BadInput(f"stage.layout={TOKENS} reads the ids of trajectories, and these solutions are text: set it to "
                       f"{TASK}, or to a published model's")  # fmt: skip
    return wanted


def _is_from_here(folder: str) -> bool:
    """Say whether a folder is of a model that was trained here."""
    return any((Path(folder) / name).is_file() for name in (FILE, RESPONSES_FILE))


def _has_own_head(config: Any) -> bool:
    """Say whether a head is one that is trained here and is no published row's: one label, or several classes."""
    names = config.architectures or []
    if any(name.endswith("ForSequenceClassification") for name in names):
        return True
    return config.num_labels != 2 and any(name.endswith("ForTokenClassification") for name in names)


def make_reader(layout: str, tokenizer: Any, task: Any, split: str, row: Any = None) -> Reader:
    """Return what makes token ids of a solution; `row`: that of a published model. Raises BadInput where the layout
    needs a task and there is none; the reader raises it, with the solution's name."""
    if layout == TOKENS:
        return _sampled_tokens
    questions = _Questions(task, split)
    if layout == TASK:
        if task is None:
            raise BadInput(
                f"stage.layout={TASK} reads a solution behind the task's prompt: set task=NAME (for problems of your "
                "own task=problem_file task.path=FOLDER task.kind=KIND)"
            )
        return lambda row: _behind_prompt(row, questions(row), task, tokenizer)
    from espalier.models.published import scoring

    return lambda one: scoring.read_as(row, tokenizer, scoring.Solution(one.id, questions(one), one.steps))


def whole_reader(folder: str, tokenizer: Any, task: Any, split: str) -> Reader:
    """Return what makes token ids of a sample for an outcome reward model, which is read at the last of them: of one
    that was trained here the sampled ids, of another one the question and the response's text, as turns of its own
    chat template where it has one, as `evaluation/score_responses` lays them out. The reader raises BadInput."""
    if _reads_sampled_ids(WHOLE, folder):
        return lambda row: _read_at_the_end(_sampled_tokens(row))
    questions = _Questions(task, split)

    def read(row: Solution) -> StepTokens:
        question, text, place = questions(row), _sampled(row).response, f"solution '{row.id}'"
        if tokenizer.chat_template:
            answer = [{"role": "assistant", "content": text}]
            (both,) = responses_of_turns(tokenizer, [{"role": "user", "content": question}], [answer], place)
            return StepTokens(both.prompt_ids, both.response_ids, [len(both.response_ids)], place)
        prompt_ids = encode_text(tokenizer, question + "\n", place)
        response_ids = ended_response(tokenizer, prompt_ids, text)
        return StepTokens(prompt_ids, response_ids, [len(response_ids)], place)

    return read


def _reads_sampled_ids(layout: str, folder: str) -> bool:
    return layout == TOKENS or (layout == WHOLE and (_is_from_here(folder) or bool(read_training_layout(folder))))


def check_sampled_ids(layout: str, folder: str, tokenizer: Any, row: Solution) -> None:
    """Raise BadInput where a model would read the sampled ids of a trajectory, which are not its text by the model's
    tokenizer: a policy with another one sampled them."""
    from espalier.models.tokenizer_checks import check_reads_ids

    if _reads_sampled_ids(layout, folder):
        sampled = _sampled(row)
        name = f"trajectory '{row.id}'"
        check_reads_ids(tokenizer, folder, sampled.prompt_ids, sampled.response_ids, sampled.response, name)


def _read_at_the_end(tokens: StepTokens) -> StepTokens:
    return replace(tokens, step_ends=[len(tokens.response_ids)] if tokens.response_ids else [])


def _sampled(row: Solution) -> Trajectory:
    assert isinstance(row, Trajectory)
    return row


def warn_of_prompts(folder: str, layout: str, tokenizer: Any, first: StepTokens) -> None:
    """Say in one line where a model that was trained here reads chat turns and was trained on plain text, or the other
    way round, by the first solution's tokens."""
    words = other_prompts(folder, tokenizer, lambda: first.prompt_ids) if layout in (TOKENS, TASK, WHOLE) else None
    if words:
        is_chat = words[0] == PROMPTS_IN_WORDS[CHAT]
        remedy = f"set task.template.is_chat={str(is_chat).lower()}" if layout == TASK else (
            "sample its solutions as those that it was trained on")  # fmt: skip
        log.warning("%s was trained on prompts that are %s, and those of these solutions are %s: %s", folder, *words,
                    remedy)  # fmt: skip


def _sampled_tokens(row: Solution) -> StepTokens:
    sampled = _sampled(row)
    check_ends(sampled.steps, sampled.step_ends, sampled.id)
    return step_tokens(sampled)


def _behind_prompt(row: Solution, question: str, task: Any, tokenizer: Any) -> StepTokens:
    prompt = encode_prompt(task, tokenizer, Problem(row.problem_id, question, ""))
    found = tokenise_steps(tokenizer, prompt.ids, [step.rstrip() + "\n" for step in row.steps], is_finished=False)
    if found is None:
        raise BadInput(f"'{row.id}': its text does not come back from the model's tokens")
    return StepTokens(found.prompt_ids, found.response_ids, found.step_ends, f"solution '{row.id}'")


class _Questions:
    """The problem of a solution in words: its own, or for trajectories the task's."""

    def __init__(self, task: Any, split: str):
        self.task, self.split = task, split
        self._problems: dict[str, Problem] | None = None

    def __call__(self, row: Solution) -> str:
        """Raises BadInput where it is not known, or the trajectory answers another one."""
        if isinstance(row, AnnotatedSolution):
            return row.question
        if self.task is None:
            raise BadInput(f"trajectory '{row.id}' does not hold its problem in words: set task and stage.split as it "
                           "was sampled")  # fmt: skip
        if self._problems is None:
            self._problems = {problem.id: problem for problem in self.task.problems(self.split)}
        problem = self._problems.get(row.problem_id)
        if problem is None:
            raise BadInput(f"trajectory '{row.id}': the task's split {self.split} has no problem '{row.problem_id}': "
                           "set stage.split and task as they were sampled")  # fmt: skip
        if problem.question not in row.prompt or problem.gold != row.gold:
            raise BadInput(f"trajectory '{row.id}' answers another problem than the task's '{row.problem_id}': set "
                           "task, task.* and stage.split as they were sampled")  # fmt: skip
        return problem.question
