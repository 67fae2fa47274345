"""Several verifiers per row: what a row names is its gold, as one JSON text, and travels with it through every file.

    [{"name": "gsm8k", "ground_truth": "18", "weight": 1.0}, {"name": "format", "ground_truth": ""}]

So a trajectory, a state and a completion carry what they are judged by, and no list stands beside them that a cut into
batches could shift. Names, ground truths and weights are read when rows are loaded; a wrong one ends the program there.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from espalier.data.answers.grade import Gold, Grade
from espalier.data.sources import BadRow
from espalier.data.verifiers.answer_verifiers import ANSWER_VERIFIERS
from espalier.data.verifiers.code_verifier import CODE_VERIFIERS
from espalier.data.verifiers.form_verifiers import FORM_VERIFIERS
from espalier.data.verifiers.response import Needs, Response, Result, Verifier

JUDGE = "judge"
"""A model that the reward asks (`rewards.verifiers`); its ground truth is the right answer, or nothing."""


def _read_reference(truth: Any) -> str:
    if truth is not None and (isinstance(truth, bool) or not isinstance(truth, str | int | float)):
        raise BadRow(f"the right answer for a judge is a text, a number or nothing, got {str(truth)[:40]!r}")
    return "" if truth is None else str(truth).strip()


VERIFIERS: Mapping[str, Verifier] = {
    **ANSWER_VERIFIERS,
    **FORM_VERIFIERS,
    **CODE_VERIFIERS,
    JUDGE: Verifier(_read_reference, None, needs="judge"),
}


@dataclass(frozen=True)
class Check:
    """A verifier by name, what it compares with, and what its score counts."""

    name: str
    ground_truth: Any
    weight: float = 1.0


@dataclass(frozen=True)
class Verdict:
    """What one verifier said."""

    name: str
    weight: float
    result: Result


def write_checks(checks: Sequence[Check]) -> str:
    """Return checks as the gold of a problem. Raises BadRow where one is unknown or its ground truth no use."""
    text = json.dumps([asdict(check) for check in checks], ensure_ascii=False)
    _read(text)
    return text


@lru_cache(maxsize=8192)
def _read(gold: str) -> tuple[tuple[Check, Verifier, Any], ...]:
    """Return the checks of a gold, each with its verifier and what that made of the ground truth. Raises BadRow."""
    try:
        rows = json.loads(gold)
    except ValueError:
        rows = None
    if not isinstance(rows, list) or not rows:
        raise BadRow("the gold is no list of verifiers: read the rows with task=verifiable")
    checks = tuple(_read_one(row) for row in rows)
    if sum(verifier.needs == "judge" for _, verifier, _ in checks) > 1:
        raise BadRow("a row has one judge, with one weight and one right answer")
    return checks


def _read_one(row: Any) -> tuple[Check, Verifier, Any]:
    if not isinstance(row, Mapping) or not isinstance(row.get("name"), str):
        raise BadRow(f"a verifier is an object with a name and a ground_truth, got {str(row)[:60]!r}")
    strange = [key for key in row if key not in ("name", "ground_truth", "weight")]
    if strange:
        raise BadRow(f"a verifier has name, ground_truth and weight, not '{strange[0]}'")
    check = Check(row["name"], row.get("ground_truth"), row.get("weight", 1.0))
    if check.name not in VERIFIERS:
        raise BadRow(f"there is no verifier '{check.name}': use one of {', '.join(sorted(VERIFIERS))}, or rename it "
                     "(task.rename)")  # fmt: skip
    is_number = isinstance(check.weight, int | float) and not isinstance(check.weight, bool)
    if not is_number or not math.isfinite(check.weight):
        raise BadRow(f"the weight of {check.name} must be a number, got {check.weight!r}")
    verifier = VERIFIERS[check.name]
    try:
        return check, verifier, verifier.read(check.ground_truth)
    except BadRow as error:
        raise BadRow(f"verifier {check.name}: {error}") from None


class _NotKept(Exception):
    """Verdicts that a busy machine may have cost: asked again, they may be others."""

    def __init__(self, verdicts: tuple[Verdict, ...]):
        self.verdicts = verdicts


def verify(text: str, gold: str, num_tokens: int | None = None) -> tuple[Verdict, ...]:
    """Return the verdict of every verifier of a gold but its judge; those that count tokens last, and only where these
    are known.

    Repeats come from a cache, so that what was run to grade a response is not run again to reward it. Raises BadRow
    where the gold names no verifiers.
    """
    by_length = _verify(text, gold, num_tokens) if num_tokens is not None and _of(gold, "tokens") else ()
    try:
        return _verify(text, gold, None) + by_length
    except _NotKept as undecided:
        return undecided.verdicts + by_length


@lru_cache(maxsize=4096)
def _verify(text: str, gold: str, num_tokens: int | None) -> tuple[Verdict, ...]:
    """Return the verdicts of those that read texts or, where `num_tokens` is given, of those that count tokens."""
    response = Response(text, num_tokens)
    verdicts = tuple(
        Verdict(check.name, check.weight, verifier.check(response, truth))
        for check, verifier, truth in _of(gold, "text" if num_tokens is None else "tokens")
        if verifier.check is not None
    )
    if any("no verdict" in verdict.result.reason for verdict in verdicts):
        raise _NotKept(verdicts)
    return verdicts


def is_never_right(gold: str) -> bool:
    """Say whether no verifier of a gold, of a weight above 0, judges a text: then no response is ever graded right."""
    return all(check.weight <= 0 for check, _, _ in _of(gold, "text"))


@dataclass(frozen=True)
class Judged:
    """What a gold wants of a judge: its `weight`, and the right answer, "" where none is said."""

    weight: float
    reference: str


def judged(gold: str) -> Judged | None:
    """Return what a gold wants of a judge, None of nothing. Raises BadRow where the gold names no verifiers."""
    return next((Judged(check.weight, reference) for check, _, reference in _of(gold, "judge")), None)


def _of(gold: str, needs: Needs) -> list[tuple[Check, Verifier, Any]]:
    return [row for row in _read(gold) if row[1].needs == needs]


def has_answer(gold: str) -> bool:
    """Say whether a verifier of a weight above 0 reads an answer or runs a program. Raises BadRow on no verifiers."""
    return any(check.weight > 0 and check.name in {**ANSWER_VERIFIERS, **CODE_VERIFIERS} for check, _, _ in _read(gold))


def gold_answer(gold: str) -> str:
    """Return the ground truth of a gold with one verifier, of answers; "" of any other. Raises BadRow on none."""
    checks = _read(gold)
    is_answer = len(checks) == 1 and checks[0][0].name in ANSWER_VERIFIERS
    return str(checks[0][2][0]) if is_answer else ""


def grade_by_verifiers(text: str, gold: Gold) -> Grade:
    """Return right where every verifier that judges texts gives its full score; one of a weight below or at 0 says
    what is not wanted, and does not count. Never raises on a text or a gold."""
    if not isinstance(gold, str):
        return Grade(None, False, "several golds: verifiers are one text")
    try:
        verdicts = verify(text, gold)
    except BadRow as error:
        return Grade(None, False, str(error))
    needed = [verdict for verdict in verdicts if verdict.weight > 0]
    if not needed:
        return Grade(None, False, "no verifier of a weight above 0 judges a text")
    answer = next((verdict.result.answer for verdict in verdicts if verdict.result.answer is not None), None)
    scores = ", ".join(f"{verdict.name} {verdict.result.score:g}" for verdict in verdicts)
    is_right = all(verdict.result.score >= 1 for verdict in needed)
    return Grade(answer if answer is not None or not is_right else "", is_right, scores)
