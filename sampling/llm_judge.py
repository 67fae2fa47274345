"""A judge's requests: pairs of solutions in both orders, and the steps of one solution; verdicts parsed strictly.

A judge that is asked once prefers, to some degree, what it is shown first (or last; Zheng et al. 2023, arXiv
2306.05685), so every pair is asked twice, with the places swapped. The verdict is the last line of the answer and
nothing else; an answer that ends otherwise, contradicts itself or was cut by its length has none, and is never guessed.
"""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from espalier.data.jsonl import read_records
from espalier.data.judge_texts import check_template, fill, last_line_says, said_lines
from espalier.data.judgements import ORDERS, PairJudgement, StepJudgement
from espalier.data.prompts import check_unicode
from espalier.data.ranked_responses import RankedResponses
from espalier.data.records import AnnotatedSolution, BadInput, PreferencePair, Trajectory
from espalier.data.tasks.task import Task
from espalier.sampling.client import Sample, SampleRequest

log = logging.getLogger("sample")
T = TypeVar("T")

PAIR_PROMPT = """\
Here are a problem and two solutions to it. Judge which of them is better: first whether its answer and its reasoning \
are right, then whether it is clear. Neither their order nor their length should matter.

<problem>
{question}
</problem>

<solution_a>
{solution_a}
</solution_a>

<solution_b>
{solution_b}
</solution_b>

Compare them in a few sentences. Then end with one line that is exactly "Verdict: A", "Verdict: B" or "Verdict: tie"."""

FIRST_ERROR_PROMPT = """\
Here are a problem and a solution to it in {num_steps} numbered steps. Find the first step that is wrong: one that \
makes a mistake, contradicts what is given, or does not follow from what stands before it.

<problem>
{question}
</problem>

{steps}

Check the steps one after the other. Then end with one line that is exactly "First error: N", where N is the number of \
that step, or "First error: none" where every step is right."""

EACH_STEP_PROMPT = """\
Here are a problem and a solution to it in {num_steps} numbered steps. Say of each step by itself whether it is right.

<problem>
{question}
</problem>

{steps}

Check the steps one after the other. Then end with {num_steps} lines, one for each step in their order, each exactly \
"Step N: right" or "Step N: wrong"."""

FORMS = {"first_error": FIRST_ERROR_PROMPT, "each_step": EACH_STEP_PROMPT}
_VERDICT = re.compile(r"Verdict: (A|B|tie)")
_FIRST_ERROR = re.compile(r"First error: (none|[1-9][0-9]*)")
_STEP = re.compile(r"Step ([1-9][0-9]*): (right|wrong)")


def parse_verdict(response: str) -> str | None:
    """ "A", "B", "tie"; None where the answer does not end in one verdict."""
    return last_line_says(_VERDICT, response)


def parse_first_error(response: str, num_steps: int) -> int | None:
    """Return the 0-based index of the first wrong step, -1 where none is; None without a verdict on `num_steps`
    steps."""
    said = last_line_says(_FIRST_ERROR, response)
    if said is None or said == "none":
        return None if said is None else -1
    return int(said) - 1 if int(said) <= num_steps else None


def parse_each_step(response: str, num_steps: int) -> list[float] | None:
    """1 or 0 for each step; None unless the answer ends in exactly one line for each, in order."""
    lines = said_lines(response)
    verdicts = [match for match in map(_STEP.fullmatch, lines) if match]
    tail = [match for match in map(_STEP.fullmatch, lines[-num_steps:]) if match]
    if len(verdicts) != num_steps or [int(match.group(1)) for match in tail] != list(range(1, num_steps + 1)):
        return None
    return [float(match.group(2) == "right") for match in tail]


def chat_request(request_id: str, text: str) -> SampleRequest:
    """Return a request of one message. Raises BadInput where the text is not Unicode, which no service takes."""
    check_unicode(text, f"request '{request_id}'")
    return SampleRequest(request_id, text, [], [{"role": "user", "content": text}])


def read_whole(parse: Callable[[str], T | None], sample: Sample) -> T | None:
    """Return what `parse` reads in an answer that ended by itself; None of one that was cut."""
    return parse(sample.text) if sample.finish_reason == "stop" else None


@dataclass(frozen=True)
class SolutionPair:
    """Two solutions of one problem, as the judge sees them."""

    id: str
    problem_id: str
    question: str
    first: str
    second: str


@dataclass
class PairRequests:
    """Pairs, each asked in both orders under the ids `{pair}/ab` and `{pair}/ba`; subclasses say which.

    `template` "" is PAIR_PROMPT; another one holds {question}, {solution_a}, {solution_b} and asks for its lines.
    """

    template: str = ""
    _pairs: dict[str, SolutionPair] = field(default_factory=dict, init=False, repr=False)

    def pairs(self) -> list[SolutionPair]:
        """Return all pairs. Raises BadInput where files do not fit."""
        raise NotImplementedError

    def load(self, task: Task, tokenizer: Any) -> list[SampleRequest]:
        """Return two requests per pair. Raises BadInput where two pairs have one id, or the template lacks a part."""
        template = self.template or PAIR_PROMPT
        check_template(template, ("question", "solution_a", "solution_b"))
        requests = []
        for pair in self.pairs():
            for order in ORDERS:
                shown = (pair.first, pair.second) if order == "ab" else (pair.second, pair.first)
                parts = {"question": pair.question.strip(), "solution_a": shown[0].strip(),
                         "solution_b": shown[1].strip()}  # fmt: skip
                self._pairs[f"{pair.id}/{order}"] = pair
                requests.append(chat_request(f"{pair.id}/{order}", fill(template, parts)))
        if len(self._pairs) < len(requests):
            raise BadInput("two pairs have the same id: give every pair once")
        return requests

    def records(self, task: Task, tokenizer: Any, request: SampleRequest, samples: list[Sample]) -> list[PairJudgement]:
        """Return one judgement a vote."""
        pair, order = self._pairs[request.id], request.id[-2:]
        sides = {"A": "first", "B": "second"} if order == "ab" else {"A": "second", "B": "first"}
        records = []
        for k, sample in enumerate(samples):
            verdict = read_whole(parse_verdict, sample)
            answer = None if verdict is None else sides.get(verdict, verdict)
            records.append(
                PairJudgement(
                    f"{request.id}/{k}", pair.id, pair.problem_id, order, answer, sample.text, sample.finish_reason
                )
            )
        return records


@dataclass
class PolicyPairRequests(PairRequests):
    """Trajectories of two policies: the k-th of a problem against the k-th of the same problem, for the first
    `pairs_per_problem`. Problems that only one of the files has are left out, with a warning."""

    first: str = ""
    second: str = ""
    pairs_per_problem: int = 1

    def pairs(self) -> list[SolutionPair]:
        """Return them in the order of the first file. Raises BadInput where no problem is in both files."""
        ours, theirs = _by_problem(self.first), _by_problem(self.second)
        found = [
            SolutionPair(f"{one.id}>{other.id}", problem_id, one.prompt, one.response, other.response)
            for problem_id, rows in ours.items()
            for one, other in list(zip(rows, theirs.get(problem_id, []), strict=False))[: self.pairs_per_problem]
        ]
        alone = len(set(ours) ^ set(theirs))
        if alone:
            log.warning("%d problems are in only one of %s and %s and are left out", alone, self.first, self.second)
        if not found:
            raise BadInput(f"{self.first} and {self.second} have no problem in common: nothing to compare")
        return found

    def inputs(self) -> list[str]:
        """Return both files."""
        return [self.first, self.second]


@dataclass
class PreferencePairRequests(PairRequests):
    """Preference pairs: does the judge prefer what they call chosen?"""

    preferences: str = ""

    def pairs(self) -> list[SolutionPair]:
        """In file order."""
        return [SolutionPair(row.id, row.problem_id, row.prompt, row.chosen, row.rejected)
                for row in read_records(PreferencePair, self.preferences)]  # fmt: skip

    def inputs(self) -> list[str]:
        """Return the pairs."""
        return [self.preferences]


@dataclass
class RankedResponseRequests(PairRequests):
    """The rows of a reward-model benchmark with one chosen and one rejected response."""

    rows: str = ""

    def pairs(self) -> list[SolutionPair]:
        """Return them in file order, the chosen response first. Raises BadInput on a row with more responses."""
        found = read_records(RankedResponses, self.rows)
        many = next((row.id for row in found if len(row.chosen) + len(row.rejected) > 2), None)
        if many is not None:
            raise BadInput(
                f"{self.rows}: '{many}' has more than two responses: a judge of pairs cannot be asked about it: have "
                "each response rated (api/openai/rate_responses)"
            )
        return [SolutionPair(row.id, row.id, row.prompt, row.chosen[0], row.rejected[0]) for row in found]

    def inputs(self) -> list[str]:
        """Return the rows."""
        return [self.rows]


def _by_problem(path: str) -> dict[str, list[Trajectory]]:
    by_problem: dict[str, list[Trajectory]] = {}
    for row in read_records(Trajectory, path):
        by_problem.setdefault(row.problem_id, []).append(row)
    return by_problem


@dataclass(frozen=True)
class _Solution:
    id: str
    problem_id: str
    num_steps: int


@dataclass
class StepRequests:
    """The steps of every solution in a file of `kind` "trajectories" or "labelled" (`AnnotatedSolution`).

    `form`: "first_error" asks for the first wrong step, "each_step" for every step by itself. `template` "" is the
    form's own; another one holds {question}, {steps} and asks for the same lines.
    """

    solutions: str
    kind: str = "trajectories"
    form: str = "first_error"
    template: str = ""

    def load(self, task: Task, tokenizer: Any) -> list[SampleRequest]:
        """Return one request a solution that has steps. Raises BadInput on an unknown kind or form."""
        if self.form not in FORMS:
            raise BadInput(f"requests.form must be {' or '.join(FORMS)}, got '{self.form}'")
        template = self.template or FORMS[self.form]
        check_template(template, ("question", "steps"))
        self._solutions: dict[str, _Solution] = {}
        requests = []
        for solution_id, problem_id, question, steps in self._read():
            if not steps:
                continue
            numbered = (f"<step_{n}>\n{step.strip()}\n</step_{n}>" for n, step in enumerate(steps, 1))
            parts = {"question": question.strip(), "steps": "\n".join(numbered), "num_steps": str(len(steps))}
            requests.append(chat_request(solution_id, fill(template, parts)))
            self._solutions[solution_id] = _Solution(solution_id, problem_id, len(steps))
        if not requests:
            raise BadInput(f"{self.solutions}: no solution with steps to judge")
        return requests

    def _read(self) -> list[tuple[str, str, str, list[str]]]:
        if self.kind == "trajectories":
            return [(row.id, row.problem_id, row.prompt, row.steps) for row in read_records(Trajectory, self.solutions)]
        if self.kind == "labelled":
            rows = read_records(AnnotatedSolution, self.solutions)
            return [(row.id, row.problem_id, row.question, row.steps) for row in rows]
        raise BadInput(f"requests.kind must be trajectories or labelled, got '{self.kind}'")

    def _labels(self, response: str, num_steps: int) -> tuple[str | None, list[float | None]]:
        """Return (the verdict as it was read, its labels)."""
        if self.form == "each_step":
            each = parse_each_step(response, num_steps)
            return ("".join(str(int(label)) for label in each), [*each]) if each is not None else (None, [])
        first = parse_first_error(response, num_steps)
        if first is None:
            return None, []
        if first < 0:
            return "none", [1.0] * num_steps
        return str(first + 1), [1.0] * first + [0.0] + [None] * (num_steps - first - 1)

    def records(self, task: Task, tokenizer: Any, request: SampleRequest, samples: list[Sample]) -> list[StepJudgement]:
        """Return one judgement a vote."""
        solution = self._solutions[request.id]
        records = []
        for k, sample in enumerate(samples):
            is_whole = sample.finish_reason == "stop"
            answer, labels = self._labels(sample.text, solution.num_steps) if is_whole else (None, [])
            records.append(
                StepJudgement(
                    f"{request.id}/{k}", solution.id, solution.problem_id, solution.num_steps, answer, labels,
                    sample.text, sample.finish_reason,
                )
            )  # fmt: skip
        return records

    def inputs(self) -> list[str]:
        """Return the solutions."""
        return [self.solutions]
