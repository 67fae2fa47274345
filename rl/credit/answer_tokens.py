"""A problem's gold answer as token ids, to be set behind a state of a solution."""

from dataclasses import dataclass
from typing import Any

from espalier.data.prompts import encode_text
from espalier.data.records import BadInput, Problem
from espalier.data.steps import Decode
from espalier.data.token_text import read_tokens
from espalier.rl.credit.state_cutters import at_least_one_step
from espalier.rl.estimator_context import EstimatorContext
from espalier.rl.types import RolloutGroup

MARK = "{gold}"


@dataclass(frozen=True)
class AnswerTokens:
    """An answer as token ids: `given` announce it, `counted` are it."""

    given: list[int]
    counted: list[int]

    def __len__(self) -> int:
        """All of them."""
        return len(self.given) + len(self.counted)


def check_answer_template(template: str) -> None:
    """Raise BadInput unless the template holds {gold} once."""
    if template.count(MARK) != 1:
        raise BadInput(f"advantage.answer_template must hold {MARK} once, got {template!r}")


def answer_tokens(
    problem: Problem, template: str, tokenizer: Any, decode: Decode, *, counts_end: bool
) -> list[AnswerTokens]:
    """Tokenise each of the gold answers in the template, as they stand behind a newline.

    Tokens before the one that holds the gold answer's first character are given; with `counts_end` the end token is
    counted too. Raises BadInput where there is no gold answer.
    """
    golds = [gold for gold in (problem.gold if isinstance(problem.gold, list) else [problem.gold]) if gold]
    if not golds:
        raise BadInput(f"problem '{problem.id}' has no gold answer, whose likelihood advantage=gold_likelihood reads")
    head, tail = template.split(MARK)
    place = f"the answer of problem '{problem.id}'"
    line = encode_text(tokenizer, "\n", place, is_complete=True)
    end = [int(tokenizer.eos_token_id)] if counts_end else []
    found = []
    for text in (head + gold + tail for gold in golds):
        ids = encode_text(tokenizer, "\n" + text, place, is_complete=True)
        # by itself a text may get a space before it (SentencePiece)
        ids = ids[len(line) :] if ids[: len(line)] == line else encode_text(tokenizer, text, place, is_complete=True)
        read = read_tokens(line, ids, decode)
        if read.text != text:
            raise BadInput(f"{place} is {text!r}, and its tokens read as {read.text!r}: change "
                           "advantage.answer_template")  # fmt: skip
        num_given = sum(stop <= len(head) for stop in read.ends[1:])
        found.append(AnswerTokens(ids[:num_given], ids[num_given:] + end))
    return found


@dataclass(frozen=True)
class AnswersBehindStates:
    """Of the rollouts of one problem: tokens that are given (a state and how an answer is announced) beside those that
    are counted, every answer behind every state; `numbers`: of each rollout its states and the answers."""

    prefixes: list[list[int]]
    counted: list[list[int]]
    numbers: list[tuple[int, int]]


def answers_behind_states(
    group: RolloutGroup, template: str, context: EstimatorContext, counts_end: bool
) -> AnswersBehindStates:
    """Set the problem's answers behind the states before each step of its rollouts, as long as these leave room for
    them below `params.max_tokens`."""
    answers = answer_tokens(group.problem, template, context.sampler.tokenizer, context.decode, counts_end=counts_end)
    last = context.params.max_tokens - max(map(len, answers))
    found = AnswersBehindStates([], [], [])
    for trajectory in (at_least_one_step(rollout.trajectory) for rollout in group.rollouts):
        starts = [0, *trajectory.step_ends[:-1]][: len(trajectory.step_ends)]
        starts = [start for start in starts if start <= last]
        for start in starts:
            state = trajectory.prompt_ids + trajectory.response_ids[:start]
            found.prefixes.extend(state + answer.given for answer in answers)
            found.counted.extend(answer.counted for answer in answers)
        found.numbers.append((len(starts), len(answers)))
    return found
