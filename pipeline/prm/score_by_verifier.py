"""Solutions → the scores of a generative verifier: OutcomeScore of whole solutions, or StepScores of their steps.

- **direct** (no `verifications`): p(Yes) of the question, one forward pass and nothing sampled;
- **chain of thought**: the mean over K rationales of p(Yes) where each of them gives its verdict (`votes=mean`; arXiv
  2408.15240), or the share of them that say Yes (`votes=hard`, which needs no model).

A rationale without a verdict is missing, not a No: it is left out of the mean and counted. Where all rationales of a
solution are, its score is null; of a solution of which one step has none, no step is scored (`scores` is []).
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from espalier.data.failed_rows import read_failed
from espalier.data.jsonl import read_records
from espalier.data.judgements import Verification
from espalier.data.prompts import PromptTemplate
from espalier.data.records import BadInput, StepScores
from espalier.data.solutions_to_verify import Question, Solution, check_asked, questions_about, read_solutions
from espalier.data.training_problems import FILE, SeenProblems, read_seen_problems
from espalier.data.verification import Verdict, VerifierFormat
from espalier.pipeline.evaluation.evaluation_inputs import OutcomeScore
from espalier.pipeline.prm.prm_calibration import auc
from espalier.pipeline.stage import StageContext
from espalier.runtime.manifest import weight_files

log = logging.getLogger("stage")

VOTES = ("mean", "hard")


def check_votes(votes: str, model: str) -> None:
    """Raise BadInput on votes that do not exist, means without a model, and hard votes of a model that has no folder
    here."""
    if votes not in VOTES:
        raise BadInput(f"stage.votes must be {' or '.join(VOTES)}, got '{votes}'")
    if votes == "mean" and not model:
        raise BadInput("stage.votes=mean needs stage.model, the verifier's folder")
    if votes == "hard" and model and not Path(model).is_dir():
        raise BadInput(f"stage.model={model} is no folder: hard votes read there which problems it was trained on; "
                       "name the verifier's folder, or leave it empty")  # fmt: skip


def verifier_files(model: str, votes: str) -> list[str]:
    """Return what scores by a verifier read of its folder `model`, if one is named: its weights, or for hard votes its
    list of training problems."""
    if votes == "mean":
        return weight_files(Path(model))
    listed = Path(model) / FILE
    return [str(listed)] if model and listed.is_file() else []


@dataclass(frozen=True)
class ScoreByVerifier:
    """`model`: the verifier's folder, of which hard votes read its list of training problems alone ("": nobody knows
    them); `verifications`: its rationales, "" for direct verdicts, of which the first
    `max_votes` of a question count (0: all); `kind` of the input and `template` as of `data.solutions_to_verify`;
    `batch_tokens`: padded tokens of one forward pass."""

    model: str
    verifier: VerifierFormat
    verifications: str = ""
    votes: str = "mean"
    max_votes: int = 0
    kind: str = "trajectories"
    template: PromptTemplate | None = None
    batch_tokens: int = 16384

    def __post_init__(self) -> None:
        if self.max_votes < 0:
            raise BadInput(f"stage.max_votes must be 0 or more, got {self.max_votes}")
        if self.votes == "hard" and not self.verifications:
            raise BadInput("stage.votes=hard counts the verdicts of stage.verifications: name them")
        check_votes(self.votes, self.model)

    def inputs(self) -> list[str]:
        """Return the rationales; the model's weights belong to the provenance."""
        return [*verifier_files(self.model, self.votes), *([self.verifications] if self.verifications else [])]

    def run(self, input_path: str, context: StageContext) -> Iterable[Any]:
        """Return one record a solution, in order.

        Counts `verdict_mass` (the mean of p(Yes) + p(No), near 1 where the model answers the question),
        `without_verdict` (rationales), `without_score` (solutions), and where the truth is known the AUC and the
        accuracy at 1/2, each class weighing alike. Raises BadInput where a question was not asked, or no solution gets
        a score.
        """
        solutions = read_solutions(input_path, self.kind, self.template)
        questions = [asked for asked in questions_about(solutions, self.verifier) if asked.num_steps]
        scores = self._voted(questions, context) if self.verifications else self._direct(questions, context)
        context.counts.update(solutions=len(solutions), **_accuracy(questions, scores))
        trained = read_seen_problems(self.model) if self.model else None
        records = [self._record(solution, scores, trained) for solution in solutions]
        number = sum(record.score is None if isinstance(record, OutcomeScore) else not record.scores and bool(row.steps)
                     for record, row in zip(records, solutions, strict=True))  # fmt: skip
        context.counts["without_score"] = number
        if records and number == len(records):
            raise BadInput(f"{self.verifications or input_path}: none of {number} solutions gets a score: no text ends "
                           "in a verdict: train the verifier longer, or ask it as its demonstrations did")  # fmt: skip
        if number:
            log.warning("%d of %d solutions have no score: no step, or no verdict", number, len(records))
        return records

    def _record(
        self, solution: Solution, scores: Mapping[str, float | None], trained: SeenProblems | None
    ) -> OutcomeScore | StepScores:
        is_seen = trained.says(solution.problem_id, solution.prompt) if trained else None
        if self.verifier.unit == "solution":
            return OutcomeScore(solution.id, solution.problem_id, scores.get(solution.id), is_seen)
        found = [scores[f"{solution.id}#{number}"] for number in range(1, len(solution.steps) + 1)]
        known = [score for score in found if score is not None]
        return StepScores(solution.id, solution.problem_id, known if len(known) == len(found) else [], is_seen)

    def _direct(self, questions: Sequence[Question], context: StageContext) -> dict[str, float | None]:
        texts = [self.verifier.ask(one.solution.prompt, one.steps, has_rationale=False) for one in questions]
        return dict(zip((one.id for one in questions), self._yes_probs(texts, context), strict=True))

    def _voted(self, questions: Sequence[Question], context: StageContext) -> dict[str, float | None]:
        """Return the mean over the rationales of each question that give a verdict."""
        verdicts = self._verdicts({one.id: one.digest for one in questions}, context)
        if self.votes == "hard":
            return {one.id: _mean([float(verdict.is_yes) for verdict in verdicts[one.id]]) for one in questions}
        asked = {one.id: self.verifier.ask(one.solution.prompt, one.steps, has_rationale=True) for one in questions}
        texts = [asked[one.id] + verdict.before for one in questions for verdict in verdicts[one.id]]
        probs = iter(self._yes_probs(texts, context))
        return {one.id: _mean([next(probs) for _ in verdicts[one.id]]) for one in questions}

    def _verdicts(self, digests: Mapping[str, str], context: StageContext) -> dict[str, list[Verdict]]:
        rows: dict[str, list[Verification]] = defaultdict(list)
        ids = digests.keys()
        for row in read_records(Verification, self.verifications):
            if row.question_id in ids:
                check_asked(row, digests[row.question_id], self.verifications)
            if row.question_id in ids and not (self.max_votes and len(rows[row.question_id]) >= self.max_votes):
                rows[row.question_id].append(row)
        missing = ids - rows.keys() - read_failed(self.verifications).keys()
        if missing:
            raise BadInput(f"{self.verifications}: nothing was written about '{min(missing)}' ({len(missing)} of "
                           f"{len(ids)} questions): ask about these solutions, with this verifier")  # fmt: skip
        found: dict[str, list[Verdict]] = {name: [] for name in ids}
        for name, votes in rows.items():
            for vote in votes:
                verdict = self.verifier.read(vote.response) if vote.finish_reason == "stop" else None
                if verdict is not None:
                    found[name].append(verdict)
        num_read, num_votes = sum(map(len, found.values())), sum(map(len, rows.values()))
        context.counts.update(rationales=num_votes, without_verdict=num_votes - num_read)
        return found

    def _yes_probs(self, texts: Sequence[str], context: StageContext) -> list[float]:
        from espalier.rewards.generative_verifier import GenerativeVerifier
        from espalier.runtime.distributed import device

        model = GenerativeVerifier(self.model, self.verifier, self.batch_tokens)
        model.model.to(device())
        with context.progress("verify", len(texts), "text") as progress:
            found = model.probs(texts, progress.update)
        if found:
            context.counts["verdict_mass"] = round(fmean(one.mass for one in found), 4)
        return [one.share for one in found]


def _mean(votes: Sequence[float]) -> float | None:
    return fmean(votes) if votes else None


def _accuracy(questions: Sequence[Question], scores: Mapping[str, float | None]) -> dict[str, float]:
    """Return the AUC and the balanced accuracy of a Yes from 1/2 on, over the questions with truth and score; {} where
    a class is empty."""
    known = [(score, one.is_right) for one in questions if (score := scores[one.id]) is not None
             and one.is_right is not None]  # fmt: skip
    area = auc([score for score, _ in known], [is_right for _, is_right in known])
    if area is None:
        return {}
    yes_shares = {truth: fmean([float(score >= 0.5) for score, is_right in known if is_right == truth])
                  for truth in (True, False)}  # fmt: skip
    return {"auc": round(area, 4), "balanced_accuracy": round((yes_shares[True] + 1 - yes_shares[False]) / 2, 4)}
