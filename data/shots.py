"""Worked examples for prompts: what is asked and a response to it, from a config or from a JSONL file."""

from dataclasses import dataclass, field

from espalier.data.records import BadInput, Demonstration, Problem, parse_record
from espalier.data.sources import read_json_rows


@dataclass(frozen=True)
class Shot:
    """A worked example: what is asked (as in `Problem`) and a response to it.

    `is_prompt`: `question` is the prompt of a published demonstration and may hold more than the question.
    """

    question: str
    response: str
    context: str = ""
    options: list[str] = field(default_factory=list)
    premises: list[str] = field(default_factory=list)
    id: str = ""
    is_prompt: bool = False

    def as_problem(self) -> Problem:
        """Return what is asked, for the template."""
        info = {"premises": self.premises} if self.premises else {}
        return Problem(self.id or "a worked example", self.question, "", info, self.context, self.options)

    def poses(self, problem: Problem) -> bool:
        """Say whether this is the problem itself: by its id, or by question and context but for white space."""
        if self.id and (self.id == problem.id or self.id.startswith(problem.id + "/")):
            return True
        mine, theirs = _squash(self.question), _squash(problem.question)
        if self.is_prompt:
            return bool(theirs) and theirs in mine and _squash(problem.context) in mine
        shot = self.as_problem()
        return mine == theirs and _squash(passage(shot)) == _squash(passage(problem))


def _squash(text: str) -> str:
    return " ".join(text.split())


def passage(problem: Problem) -> str:
    """Return the premises, one a line, where the problem lists them (`info["premises"]`); else its context."""
    premises = problem.info.get("premises")
    return "\n".join(map(str, premises)) if isinstance(premises, list) and premises else problem.context


def read_shots(path: str) -> list[Shot]:
    """Return worked examples of a JSONL file: rows of `Shot`, or of `Demonstration` (made with the plain prompt).

    Raises BadInput with file and line on a bad row, and on a file without any.
    """
    shots = []
    for row in read_json_rows(path):
        if row.error:
            raise BadInput(f"{row.place}: {row.error}: correct or remove this line")
        if "completion" in row.fields or "prompt" in row.fields:
            demonstration = parse_record(Demonstration, row.fields, row.place)
            prompt = demonstration.prompt.strip()
            shots.append(Shot(prompt, demonstration.completion, id=demonstration.id, is_prompt=True))
        else:
            shots.append(parse_record(Shot, row.fields, row.place))
    return shots
