"""Requests for rationales about solutions: to a generative verifier, and to the teacher of one; verdicts read strictly.

A **verifier** continues the solution and the request for a check, as its demonstrations do. A **teacher** is a chat
model that is sent instructions; with `shows_gold` they hold the right answer, so that more verdicts are true (the
reference-guided rationales of Zhang et al. 2024). Which of its rationales become demonstrations says
`pipeline.problems.verifier_demonstrations`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from espalier.data.judge_texts import check_template, fill
from espalier.data.judgements import Verification
from espalier.data.prompts import PromptTemplate, encode_text
from espalier.data.records import BadInput
from espalier.data.solutions_to_verify import Question, questions_about, read_solutions
from espalier.data.step_verdicts import Mismatch, StepVerdictFormat
from espalier.data.tasks.task import Task
from espalier.data.verification import VerifierFormat, verdict_name
from espalier.sampling.client import Sample, SampleRequest

_SHOWN = """\
Check every step: calculate anew what it calculates, and say of each step whether it is right. A right final answer \
does not make a wrong step right.

<problem>
{question}
</problem>

<solution>
{solution}
</solution>
{gold}
Do not mention that you were shown the right answer."""

TEACHER_PROMPT = f"""\
Here are a problem and a solution to it, or its first steps. {_SHOWN} End with one line that repeats this question and \
answers it with "{{yes}}" or "{{no}}" alone: {{verdict_question}}"""

STEPS_TEACHER_PROMPT = f"""\
Here are a problem and a solution to it in numbered steps. {_SHOWN} Write a section for each step, in their order, and \
number the sections as the steps are. A section begins a line with the number of its step, written as in \
"{{heading}}"{{quote}}. Then comes your check of this step, and the section ends with {{right}} or {{wrong}}; write \
neither anywhere else. End behind the first section that says {{wrong}}, or behind the last step."""
_QUOTE = ", and repeats the step word for word"


@dataclass
class VerificationRequests:
    """A verifier's rationales of the solutions in a file of `kind` (`data.solutions_to_verify`), asked as `verifier`
    says; `template` asks the question of a labelled solution (null: the question and a newline)."""

    solutions: str
    verifier: VerifierFormat | StepVerdictFormat
    kind: str = "trajectories"
    template: PromptTemplate | None = None
    _questions: dict[str, Question] = field(default_factory=dict, init=False, repr=False)

    def load(self, task: Task, tokenizer: Any) -> list[SampleRequest]:
        """Return one request a question. Raises BadInput where there is none, or no tokenizer."""
        self._read()
        if tokenizer is None:
            raise BadInput("a verifier continues token ids: set policy to its folder, or ask a teacher "
                           "(requests=teacher_rationales)")  # fmt: skip
        requests = []
        for name, asked in self._questions.items():
            text = self.verifier.ask(asked.solution.prompt, asked.steps, has_rationale=True)
            ids = encode_text(tokenizer, text, name)
            requests.append(SampleRequest(name, text, ids, problem_id=asked.solution.problem_id))
        return requests

    def _read(self) -> None:
        solutions = read_solutions(self.solutions, self.kind, self.template)
        self._questions = {asked.id: asked for asked in questions_about(solutions, self.verifier) if asked.num_steps}
        if not self._questions:
            raise BadInput(f"{self.solutions}: no solution with steps to verify")

    def records(self, task: Task, tokenizer: Any, request: SampleRequest, samples: Sequence[Sample]) -> list[Any]:
        """Return one verification a sample; one that was cut by its length has no verdict."""
        asked = self._questions[request.id]
        records = []
        for k, sample in enumerate(samples):
            answer = self._answer(asked, sample.text) if sample.finish_reason == "stop" else None
            records.append(Verification(f"{request.id}/{k}", asked.id, asked.solution.problem_id, asked.digest, answer,
                                        sample.text, sample.finish_reason))  # fmt: skip
        return records

    def _answer(self, asked: Question, text: str) -> str | None:
        """Return the verdict about all that is asked: of verdicts per step, whether none is a No."""
        if isinstance(self.verifier, StepVerdictFormat):
            steps = self.verifier.read(text, asked.steps)
            return None if isinstance(steps, Mismatch) else verdict_name(all(one.is_yes for one in steps))
        verdict = self.verifier.read(text)
        return None if verdict is None else verdict_name(verdict.is_yes)

    def inputs(self) -> list[str]:
        """Return the solutions."""
        return [self.solutions]


@dataclass
class TeacherRationaleRequests(VerificationRequests):
    """A chat model's rationales, with one verdict or one for each step. `teacher_prompt` "" is TEACHER_PROMPT or
    STEPS_TEACHER_PROMPT; another one holds {question}, {solution}, {verdict_question} (of verdicts per step {right} and
    {wrong}), and {gold} where `shows_gold`."""

    shows_gold: bool = True
    teacher_prompt: str = ""

    def load(self, task: Task, tokenizer: Any) -> list[SampleRequest]:
        """Return one request a question. Raises BadInput where there is none, a solution has no right answer to show,
        or the prompt lacks a part."""
        self._read()
        is_by_step = isinstance(self.verifier, StepVerdictFormat)
        prompt = self.teacher_prompt or (STEPS_TEACHER_PROMPT if is_by_step else TEACHER_PROMPT)
        verdicts = ("right", "wrong") if is_by_step else ("verdict_question",)
        names = ("question", "solution", *verdicts, *(["gold"] if self.shows_gold else []))
        check_template(prompt, names, "requests.teacher_prompt")
        requests = []
        for name, asked in self._questions.items():
            solution = asked.solution
            if self.shows_gold and not solution.gold:
                raise BadInput(f"{self.solutions}: '{solution.id}' has no right answer to show: set "
                               "requests.shows_gold=false")  # fmt: skip
            parts = {
                "question": solution.prompt.strip(),
                **self._verdict_parts(asked.steps),
                "gold": f"\nThe right final answer is {solution.gold}.\n" if self.shows_gold else "",
            }
            text = fill(prompt, parts)
            requests.append(SampleRequest(name, text, [], [{"role": "user", "content": text}]))
        return requests

    def _verdict_parts(self, steps: Sequence[str]) -> dict[str, str]:
        """Return the steps as they are judged, and the words of a verdict."""
        own = self.verifier
        if isinstance(own, StepVerdictFormat):
            return {"solution": own.numbered(steps).strip(), "heading": own.head(1), "right": own.verdict(True),
                    "wrong": own.verdict(False), "quote": _QUOTE if own.quotes_steps else ""}  # fmt: skip
        return {"solution": "".join(steps).strip(), "verdict_question": own.question, "yes": own.yes[0].strip(),
                "no": own.no[0].strip()}  # fmt: skip
