"""Texts that a chat model writes for linguistic calibration (Band et al. 2024, arXiv 2404.00474; the prompts are our
own): open-ended requests made from questions, and summaries of sampled paragraphs whose confidences are the samples'
shares.

An answer without its marked part, or that was cut by its length, has no text: it is never guessed.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from espalier.data.jsonl import read_records
from espalier.data.judge_texts import check_template, fill
from espalier.data.prompts import PromptTemplate
from espalier.data.reader_answers import WrittenText
from espalier.data.records import BadInput, Problem, Trajectory
from espalier.data.tasks.task import Task
from espalier.sampling.client import Sample, SampleRequest
from espalier.sampling.llm_judge import chat_request, read_whole

log = logging.getLogger("sample")

QUERY_PROMPT = """\
Somebody has to answer a quiz question, and will read a paragraph about its subject first. Write the request for that \
paragraph: one sentence that asks to write a paragraph about the subject, from which the answer could be \
concluded. The \
request must not contain the answer, nor ask the question itself.

Question: Which river flows through Vienna?
Request: Write a paragraph about the waterways of the city of Vienna.

Question: Who painted the ceiling of the Sistine Chapel?
Request: Write a paragraph about how the Sistine Chapel was decorated and by whom.

Question: {question}

End with one line that begins with "Request: "."""

SUMMARY_PROMPT = """\
The same request was answered {num_paragraphs} times by somebody who is not sure of the facts:

<request>
{request}
</request>

{paragraphs}

Write one paragraph in the first person that says what this person believes, and how firmly. Where the texts \
differ, name \
each alternative with the share of the {num_paragraphs} texts that support it as a percentage of confidence, the most \
supported first; where all agree, say so with high confidence; leave out what only embellishes. Never mention \
that there \
were several texts, and add nothing that you know yourself. First list the claims on which the texts differ and \
count who \
supports what; check the counts; then write a line that is exactly "Paragraph:" and behind it the paragraph alone."""

_REQUEST = re.compile(r"^\W*Request:\W*(\S.*?)\s*$", re.MULTILINE)
_PARAGRAPH = re.compile(r"^\W*Paragraph:\W*$", re.MULTILINE)


def parse_request(response: str) -> str | None:
    """Return the one request behind "Request: "; None without one, or with different ones."""
    found = set(_REQUEST.findall(response))
    return found.pop() if len(found) == 1 else None


def parse_paragraph(response: str) -> str | None:
    """Return what stands behind the last line "Paragraph:"; None without it, or where nothing follows."""
    parts = _PARAGRAPH.split(response)
    return (parts[-1].strip() or None) if len(parts) > 1 else None


@dataclass
class WritingRequests:
    """What both kinds share. `template` "" is the built-in one."""

    template: str = ""
    _asked: dict[str, str] = field(default_factory=dict, init=False, repr=False)

    def parse(self, response: str) -> str | None:
        """Return the text of a response."""
        raise NotImplementedError

    def records(self, task: Task, tokenizer: Any, request: SampleRequest, samples: list[Sample]) -> list[WrittenText]:
        """Return one text a vote."""
        return [
            WrittenText(
                f"{request.id}/{k}", request.id, self._asked[request.id],
                read_whole(self.parse, sample), sample.text, sample.finish_reason,
            )
            for k, sample in enumerate(samples)
        ]  # fmt: skip


@dataclass
class QueryRequests(WritingRequests):
    """An open-ended request for every problem of a split; limit 0: all."""

    split: str = "train"
    limit: int = 0

    def parse(self, response: str) -> str | None:
        """Return the request."""
        return parse_request(response)

    def asked_problems(self, task: Task) -> list[Problem]:
        """Return the problems."""
        problems = task.problems(self.split)
        return problems[: self.limit] if self.limit else problems

    def load(self, task: Task, tokenizer: Any) -> list[SampleRequest]:
        """Return one request a problem."""
        template = self.template or QUERY_PROMPT
        check_template(template, ("question",))
        self._asked = {row.id: row.question for row in self.asked_problems(task)}
        return [chat_request(name, fill(template, {"question": asked.strip()})) for name, asked in self._asked.items()]

    def inputs(self) -> list[str]:
        """None: the problems are the task's (`asked_problems`)."""
        return []


@dataclass
class SummaryRequests(WritingRequests):
    """A summary of the trajectories of every problem, at most `num_paragraphs` each; problems with fewer are left out,
    with a warning, and samples that were cut by their length do not count. What they answer is their prompt, or, where
    `problems` names a file, the problem's question as the plain prompt asks it: for samples behind worked examples. It
    shows no context, so problems with one are refused there."""

    trajectories: str = ""
    problems: str = ""
    num_paragraphs: int = 8

    def parse(self, response: str) -> str | None:
        """Return the paragraph."""
        return parse_paragraph(response)

    def load(self, task: Task, tokenizer: Any) -> list[SampleRequest]:
        """Return one request a problem. Raises BadInput where no problem has enough samples, and on a problem that
        `problems` lacks or has with a context."""
        template = self.template or SUMMARY_PROMPT
        check_template(template, ("request", "paragraphs"))
        known = {row.id: row for row in read_records(Problem, self.problems)} if self.problems else {}
        rows: dict[str, list[Trajectory]] = {}
        for row in read_records(Trajectory, self.trajectories):
            rows.setdefault(row.problem_id, []).extend([row] if row.finish_reason == "stop" else [])
        requests = []
        for problem_id, samples in rows.items():
            if len(samples) < self.num_paragraphs:
                continue
            self._asked[problem_id] = self._plain_prompt(problem_id, known) if self.problems else samples[0].prompt
            requests.append(chat_request(problem_id, self._text(template, problem_id, samples[: self.num_paragraphs])))
        if not requests:
            raise BadInput(f"{self.trajectories}: no problem has {self.num_paragraphs} whole samples: sample more, or "
                           "set requests.num_paragraphs")  # fmt: skip
        if len(requests) < len(rows):
            log.warning("%s: %d of %d problems have fewer than %d whole samples and are left out", self.trajectories,
                        len(rows) - len(requests), len(rows), self.num_paragraphs)  # fmt: skip
        return requests

    def _plain_prompt(self, problem_id: str, known: Mapping[str, Problem]) -> str:
        """Return the question of a problem as the plain prompt asks it."""
        if problem_id not in known:
            raise BadInput(f"{self.problems}: has no problem '{problem_id}' of {self.trajectories}: name the file "
                           "that the task read")  # fmt: skip
        if known[problem_id].context:
            raise BadInput(f"{self.problems}: problem '{problem_id}' has a context, which the plain prompt does not "
                           "show: write it into the question, or sample without worked examples and leave "
                           "requests.problems empty")  # fmt: skip
        return PromptTemplate().render(known[problem_id])

    def _text(self, template: str, problem_id: str, samples: Sequence[Trajectory]) -> str:
        shown = "\n".join(f"<text_{n}>\n{row.response.strip()}\n</text_{n}>" for n, row in enumerate(samples, 1))
        parts = {"request": self._asked[problem_id].strip(), "paragraphs": shown, "num_paragraphs": str(len(samples))}
        return fill(template, parts)

    def inputs(self) -> list[str]:
        """Return the samples, and the problems where they are named."""
        return [self.trajectories, *filter(None, [self.problems])]
