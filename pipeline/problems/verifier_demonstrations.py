"""Solutions of which the truth is known → Demonstration: what a generative verifier learns (arXiv 2408.15240).

- **direct**: the question about every solution, and ` Yes` or ` No`;
- **chain of thought** (`verifications` are named): those rationales whose verdict agrees with the truth; with a verdict
  per step, all of them up to the first wrong step.

Right and wrong ones are equally many in the end: first at most `max_per_problem` of each class per problem, then as
many of the larger class as of the smaller, drawn by the seed. Everything that is left out is counted with its reason.
"""

import logging
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from espalier.data.jsonl import read_records
from espalier.data.judgements import Verification
from espalier.data.prompts import PromptTemplate
from espalier.data.records import BadInput, Demonstration
from espalier.data.solutions_to_verify import Question, check_asked, questions_about, read_solutions, with_task_truth
from espalier.data.step_verdicts import Mismatch, StepVerdictFormat
from espalier.data.verification import VerifierFormat
from espalier.pipeline.pairs.trajectory_groups import ProblemPart, capped, check_counts, sample_order
from espalier.pipeline.stage import StageContext

log = logging.getLogger("stage")


@dataclass(frozen=True)
class Candidate:
    """A demonstration that may be chosen, with its problem and the truth that it teaches."""

    row: Demonstration
    problem_id: str
    is_right: bool


@dataclass(frozen=True, kw_only=True)
class MakeVerifierDemonstrations(ProblemPart):
    """`verifications`: rationales of the input's solutions, "" for direct verdicts; `kind` of the input and `template`
    as of `data.solutions_to_verify`; `split`: of the task that knows the truth about steps of trajectories;
    `max_per_problem`: of each class, 0 for no cap; `seed`: for what is drawn."""

    verifier: VerifierFormat | StepVerdictFormat
    verifications: str = ""
    kind: str = "trajectories"
    template: PromptTemplate | None = None
    split: str = "train"
    max_per_problem: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        self.check_part()
        check_counts(max_per_problem=self.max_per_problem)

    def inputs(self) -> list[str]:
        """Return the rationales, if they are named."""
        return [self.verifications] if self.verifications else []

    def run(self, input_path: str, context: StageContext) -> Iterable[Demonstration]:
        """Return demonstrations in the order of their ids. Raises BadInput where nobody knows the truth, a rationale is
        about no solution of the input, or one class is empty."""
        reasons: Counter[str] = Counter()
        questions = self._questions(input_path, context, reasons)
        found = self._with_rationales(questions, reasons) if self.verifications else self._direct(questions)
        first: dict[tuple[str, str, str], Candidate] = {}
        for one in found:
            first.setdefault((one.problem_id, one.row.prompt, one.row.completion), one)
        distinct = list(first.values())
        reasons["repeated"] += len(found) - len(distinct)
        chosen = self._balanced(distinct, reasons)
        if not chosen:
            raise BadInput(f"{input_path}: no demonstration: "
                           + self._why(found, reasons))  # fmt: skip
        chosen.sort(key=lambda one: (sample_order(one.problem_id), sample_order(one.row.id)))
        number = len(chosen) // 2
        context.counts.update(right=number, wrong=number, problems=len({one.problem_id for one in chosen}))
        context.counts.update({f"left out ({reason})": count for reason, count in reasons.items() if count})
        return [one.row for one in chosen]

    def _why(self, found: Sequence[Candidate], reasons: Counter[str]) -> str:
        right = sum(one.is_right for one in found)
        others = "".join(f", {count} left out ({reason})" for reason, count in reasons.items() if count)
        return f"{right} are of right and {len(found) - right} of wrong solutions{others}: both kinds are needed"

    def _questions(self, path: str, context: StageContext, reasons: Counter[str]) -> list[Question]:
        solutions = [row for row in read_solutions(path, self.kind, self.template) if self.holds(row)]
        if self.verifier.unit != "solution" and self.kind == "trajectories":
            solutions = with_task_truth(solutions, context.task, self.split)
        kept = []
        for asked in questions_about(solutions, self.verifier):
            is_cut = asked.solution.is_cut and asked.num_steps == len(asked.solution.steps)
            if not asked.num_steps or is_cut or asked.is_right is None:
                reasons["cut by its length" if is_cut else "empty" if not asked.num_steps else "truth unknown"] += 1
            else:
                kept.append(asked)
        return kept

    def _direct(self, questions: Sequence[Question]) -> list[Candidate]:
        if isinstance(self.verifier, StepVerdictFormat):
            raise BadInput("verdicts per step are learnt from rationales: name stage.verifications")
        return [_candidate(self.verifier, asked, asked.id, None) for asked in questions]

    def _with_rationales(self, questions: Sequence[Question], reasons: Counter[str]) -> list[Candidate]:
        known = {asked.id: asked for asked in questions}
        found, num_about = [], 0
        for row in read_records(Verification, self.verifications):
            if row.question_id not in known:
                reasons["about a solution that takes no part"] += 1
                continue
            num_about += 1
            asked = known[row.question_id]
            check_asked(row, asked.digest, self.verifications)
            learnt = _learnt(self.verifier, row, asked)
            if isinstance(learnt, str):
                reasons[learnt] += 1
            else:
                found.append(learnt)
        if not num_about:
            raise BadInput(f"{self.verifications}: no rationale of it is about a solution of the input: name the file "
                           "that was made from the input, with the same verifier")  # fmt: skip
        return found

    def _balanced(self, found: Sequence[Candidate], reasons: Counter[str]) -> list[Candidate]:
        """Return equally many of both classes, capped per problem."""
        by_class: dict[bool, list[Candidate]] = {}
        for is_right in (True, False):
            groups: dict[str, list[Candidate]] = defaultdict(list)
            for one in found:
                if one.is_right == is_right:
                    groups[one.problem_id].append(one)
            by_class[is_right] = [one for group in groups.values() for one in capped(group, self.max_per_problem)]
        capped_number = sum(map(len, by_class.values()))
        reasons["more than max_per_problem"] += len(found) - capped_number
        number = min(map(len, by_class.values()))
        reasons["more than of the other class"] += capped_number - 2 * number
        rng = random.Random(f"verifier/{self.seed}")
        return [one for is_right in (True, False) for one in rng.sample(by_class[is_right], number)]


def _candidate(verifier: VerifierFormat, asked: Question, name: str, rationale: str | None) -> Candidate:
    assert asked.is_right is not None
    prompt = verifier.ask(asked.solution.prompt, asked.steps, has_rationale=rationale is not None)
    problem_id = asked.solution.problem_id
    answer = verifier.answer(asked.is_right, rationale)
    row = Demonstration(name, prompt, answer, problem_id, "".join(asked.solution.steps))
    return Candidate(row, problem_id, asked.is_right)


def _learnt(verifier: VerifierFormat | StepVerdictFormat, row: Verification, asked: Question) -> Candidate | str:
    """Return what is learnt from a rationale, or why nothing is."""
    if isinstance(verifier, StepVerdictFormat):
        return _learnt_per_step(verifier, row, asked)
    verdict = verifier.read(row.response) if row.finish_reason == "stop" else None
    if verdict is None:
        return "no verdict to read"
    if verdict.is_yes != asked.is_right:
        return "verdict is not the truth"
    if not verdict.rationale:
        return "no rationale before the verdict"
    if verifier.asks_twice(verdict):
        return "several verdicts"
    return _candidate(verifier, asked, row.id, verdict.rationale)


def _learnt_per_step(verifier: StepVerdictFormat, row: Verification, asked: Question) -> Candidate | str:
    found = verifier.read(row.response, asked.steps, row.finish_reason == "stop")
    if isinstance(found, Mismatch):
        return found.reason
    truths = asked.solution.steps_right
    if None in truths:
        return "truth unknown"
    first = next((n for n, is_right in enumerate(truths) if not is_right), len(truths))
    if [one.is_yes for one in found[: first + 1]] != truths[: first + 1]:
        return "verdict is not the truth"
    problem_id = asked.solution.problem_id
    asking = verifier.ask(asked.solution.prompt, asked.steps)
    demonstrated = Demonstration(row.id, asking, row.response.strip(), problem_id, "".join(asked.solution.steps))
    return Candidate(demonstrated, problem_id, first == len(truths))
