"""Solutions and rationales with a verdict per step → StepScores (docs/generative_verifiers.md).

A step's verdict is p(Yes) where a rationale gives it (`votes=mean`, by `model`), or 1 or 0 (`votes=hard`, no model).
Its score is the lowest verdict up to it, averaged over the rationales. A rationale whose verdicts cannot be put down to
our steps with certainty is missing and counted by its reason (`data.step_verdicts`); a solution of which all are has no
scores.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from espalier.data.failed_rows import read_failed
from espalier.data.jsonl import read_records
from espalier.data.judgements import Verification
from espalier.data.prompts import PromptTemplate
from espalier.data.records import BadInput, StepScores
from espalier.data.solutions_to_verify import Solution, check_asked, questions_about, read_solutions
from espalier.data.step_verdicts import Mismatch, StepVerdict, StepVerdictFormat, mean_state_scores
from espalier.data.training_problems import read_seen_problems
from espalier.pipeline.prm.score_by_verifier import check_votes, verifier_files
from espalier.pipeline.stage import StageContext

log = logging.getLogger("stage")

_MOST_MISALIGNED = 0.5


@dataclass(frozen=True)
class ScoreByStepVerdicts:
    """`verifications`: the rationales; `model`: the verifier's folder, of which `votes=hard` reads its list of training
    problems alone ("": nobody knows them); `kind` of the input and
    `template` as of `data.solutions_to_verify`; `batch_tokens`: padded tokens of one forward pass."""

    verifications: str
    verifier: StepVerdictFormat
    model: str = ""
    votes: str = "mean"
    kind: str = "trajectories"
    template: PromptTemplate | None = None
    batch_tokens: int = 16384

    def __post_init__(self) -> None:
        check_votes(self.votes, self.model)

    def inputs(self) -> list[str]:
        """Return the rationales; the model's weights belong to the provenance."""
        return [*verifier_files(self.model, self.votes), self.verifications]

    def run(self, input_path: str, context: StageContext) -> Iterable[StepScores]:
        """Return one record a solution, in order.

        Counts `rationales`, those that are `misaligned` (and each reason), `without_score` (solutions), and `accuracy`
        of single verdicts where labels are known. Raises BadInput where a solution was not asked about, or none gets
        scores.
        """
        solutions = read_solutions(input_path, self.kind, self.template)
        verdicts = self._read(solutions, context)
        probs = self._probs(solutions, verdicts, context)
        trained = read_seen_problems(self.model) if self.model else None
        records = []
        for row in solutions:
            scores = mean_state_scores(probs[row.id], len(row.steps))
            is_seen = trained.says(row.problem_id, row.prompt) if trained else None
            records.append(StepScores(row.id, row.problem_id, scores, is_seen))
        context.counts.update(solutions=len(solutions), **_accuracy(solutions, verdicts))
        without = context.counts["without_score"] = sum(not row.scores for row in records)
        if records and without == len(records):
            raise BadInput(f"{self.verifications}: none of {without} solutions gets scores: {self._why(context)}: ask "
                           "the verifier as it was trained to be asked (stage.verifier.*)")  # fmt: skip
        if without:
            log.warning("%d of %d solutions have no score: no step, or no rationale that can be aligned with them",
                        without, len(records))  # fmt: skip
        if context.counts["misaligned"] > _MOST_MISALIGNED * context.counts["rationales"]:
            log.warning("%d of %d rationales are not aligned with the steps and left out: %s",
                        context.counts["misaligned"], context.counts["rationales"], self._why(context))  # fmt: skip
        return records

    @staticmethod
    def _why(context: StageContext) -> str:
        return ", ".join(f"{name} {count}" for name, count in context.counts.items() if name.startswith("misaligned ("))

    def _read(self, solutions: Sequence[Solution], context: StageContext) -> dict[str, list[list[StepVerdict]]]:
        """Return of each solution the verdicts of every rationale that can be aligned."""
        known = {asked.id: asked for asked in questions_about(solutions, self.verifier) if asked.num_steps}
        found: dict[str, list[list[StepVerdict]]] = defaultdict(list)
        reasons, seen, num = Counter[str](), set[str](), 0
        for row in read_records(Verification, self.verifications):
            if row.question_id not in known:
                continue
            check_asked(row, known[row.question_id].digest, self.verifications)
            seen.add(row.question_id)
            num += 1
            read = self.verifier.read(row.response, known[row.question_id].steps, row.finish_reason == "stop")
            if isinstance(read, Mismatch):
                reasons[f"misaligned ({read.reason})"] += 1
            else:
                found[row.question_id].append(read)
        missing = known.keys() - seen - read_failed(self.verifications).keys()
        if missing:
            raise BadInput(f"{self.verifications}: nothing was written about '{min(missing)}' ({len(missing)} of "
                           f"{len(known)} solutions): ask about these solutions, with this verifier")  # fmt: skip
        context.counts.update(rationales=num, misaligned=sum(reasons.values()), **reasons)
        return found

    def _probs(
        self, solutions: Sequence[Solution], verdicts: dict[str, list[list[StepVerdict]]], context: StageContext
    ) -> dict[str, list[list[float]]]:
        """Return the verdict in [0, 1] of each step that a rationale speaks of, for every solution."""
        if self.votes == "hard":
            return {row.id: [[float(one.is_yes) for one in own] for own in verdicts[row.id]] for row in solutions}
        asked = {row.id: self.verifier.ask(row.prompt, row.steps) for row in solutions}
        texts = [asked[row.id] + one.before for row in solutions for own in verdicts[row.id] for one in own]
        shares = iter(self._yes_probs(texts, context))
        return {row.id: [[next(shares) for _ in own] for own in verdicts[row.id]] for row in solutions}

    def _yes_probs(self, texts: Sequence[str], context: StageContext) -> list[float]:
        from espalier.models.load import load_policy, load_tokenizer
        from espalier.models.verdict_probs import VerdictTokens, warn_of_mass, yes_probs
        from espalier.runtime.distributed import device

        tokenizer, own = load_tokenizer(self.model), self.verifier
        verdicts = VerdictTokens.of(tokenizer, own.opening, own.yes, own.no)
        network = load_policy(self.model).to(device())
        with context.progress("verify", len(texts), "text") as progress:
            found = yes_probs(network, tokenizer, texts, verdicts, batch_tokens=self.batch_tokens,
                              on_progress=progress.update)  # fmt: skip
        if found:
            context.counts["verdict_mass"] = round(fmean(one.mass for one in found), 4)
        warn_of_mass([one.mass for one in found], self.model)
        return [one.share for one in found]


def _accuracy(solutions: Sequence[Solution], verdicts: dict[str, list[list[StepVerdict]]]) -> dict[str, float]:
    """Return the share of verdicts that agree with the labels, up to the first wrong step of each solution."""
    agree: list[bool] = []
    for row in solutions:
        truths = row.steps_right
        first = next((n for n, is_right in enumerate(truths) if not is_right), len(truths))
        for own in verdicts[row.id]:
            pairs = zip(own[: first + 1], truths[: first + 1], strict=False)
            agree += [one.is_yes == is_right for one, is_right in pairs if is_right is not None]
    return {"accuracy": round(fmean(agree), 4)} if agree else {}
