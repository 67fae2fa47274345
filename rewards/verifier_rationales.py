"""A generative verifier that writes before it judges, asked through engines: K rationales about a solution, and p(Yes)
where each gives a verdict. One verdict a rationale (GenRM with chain of thought, Zhang et al. 2024, arXiv 2408.15240),
or one per step (`data.step_verdicts`).

The same texts, tokens and verdicts as `prm/score_by_verifier` and `prm/score_by_step_verdicts` have of files. p(Yes) is
asked for by requests of one token each behind the rationale (`models.verdict_probs`).
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

from espalier.data.asked_texts import AskedText, Asks, WrittenText
from espalier.data.process_data.published import content_key
from espalier.data.prompts import encode_text
from espalier.data.records import BadInput, Trajectory
from espalier.data.step_verdicts import Mismatch, StepVerdict, StepVerdictFormat, mean_state_scores
from espalier.data.verification import Verdict, VerifierFormat
from espalier.models.tokenizer import load_tokenizer
from espalier.models.verdict_probs import VerdictTokens, YesProb, yes_probs_of_likeliest
from espalier.rewards.written_verdicts import Votes

VOTES = ("mean", "hard")
Read = list[Verdict] | list[StepVerdict]
"""The verdicts of a rationale, none where they cannot be read."""


class VerifierRationales:
    """Args: the verifier's folder `path`, how it is asked (`verifier`: one verdict about whole solutions, or one per
    step in one rationale), and `votes`: "mean" takes p(Yes) of each verdict, "hard" 1 for a Yes and 0 for a No.

    Raises BadInput on other votes, and on a verifier that is asked about every step by itself.
    """

    reads_texts: ClassVar[bool] = True

    def __init__(self, path: str, verifier: VerifierFormat | StepVerdictFormat, votes: str = "mean"):
        if verifier.unit == "step":
            raise BadInput("a generative verifier rewards whole solutions: choose verifier=solution for it, or "
                           "each_step for a verdict per step")  # fmt: skip
        if votes not in VOTES:
            raise BadInput(f"the votes of a verifier's rationales are {' or '.join(VOTES)}, got '{votes}'")
        self.path, self.verifier, self.has_probs = path, verifier, votes == "mean"
        self.tokenizer: Any = load_tokenizer(path)

    @property
    def _before_verdict(self) -> str:
        own = self.verifier
        return own.opening if isinstance(own, StepVerdictFormat) else own.question

    @cached_property
    def _verdicts(self) -> VerdictTokens:
        return VerdictTokens.of(self.tokenizer, self._before_verdict, self.verifier.yes, self.verifier.no)

    def votes(self, trajectories: Sequence[Trajectory], asks: Asks) -> list[Votes]:
        """See `Form`: of verdicts per step the lowest is a rationale's. Equal solutions are asked about once; a
        rationale that is cut has no verdict. A response without steps has none to judge: it is wrong, unasked."""
        text = self._before_verdict
        asks.open(self.path, text, list(self.tokenizer(text, add_special_tokens=False).input_ids))
        rest = iter(self._asked([row for row in trajectories if self._parts(row)], asks))
        return [next(rest) if self._parts(row) else Votes([0.0], 0, []) for row in trajectories]

    def _asked(self, trajectories: Sequence[Trajectory], asks: Asks) -> list[Votes]:
        asked = [self.verifier.ask(row.prompt, self._parts(row), has_rationale=True) for row in trajectories]
        distinct = list(dict.fromkeys(asked))
        answers = dict(zip(distinct, asks.texts([self._request(text) for text in distinct]), strict=True))
        read = [[self._read(one, row) for one in answers[text] or []]
                for text, row in zip(asked, trajectories, strict=True)]  # fmt: skip
        probs = self._probs(asked, read, asks)
        return [
            self._votes(row, own, len(answers[text] or []), is_refused=answers[text] is None)
            for text, row, own in zip(asked, trajectories, probs, strict=True)
        ]

    def _parts(self, row: Trajectory) -> Sequence[str]:
        return row.steps if isinstance(self.verifier, StepVerdictFormat) else [row.response]

    def _request(self, text: str) -> AskedText:
        return AskedText(f"verify/{content_key(text)}", text, encode_text(self.tokenizer, text, "a solution to verify"))

    def _read(self, written: WrittenText, row: Trajectory) -> Read:
        if isinstance(self.verifier, StepVerdictFormat):
            found = self.verifier.read(written.text, row.steps, written.is_whole)
            return [] if isinstance(found, Mismatch) else found
        verdict = self.verifier.read(written.text) if written.is_whole else None
        return [] if verdict is None else [verdict]

    def _probs(self, asked: Sequence[str], read: Sequence[Sequence[Read]], asks: Asks) -> list[list[list[YesProb]]]:
        """Return, of every solution, p(Yes) of each verdict of those rationales whose verdicts are all known."""
        verdicts = [(text, one) for text, own in zip(asked, read, strict=True) for row in own for one in row]
        shares: Sequence[YesProb | None]
        if self.has_probs:
            places = [text + one.before for text, one in verdicts]
            shares = yes_probs_of_likeliest(self.tokenizer, places, self._verdicts, asks.next_logprobs)
        else:
            shares = [YesProb(float(one.is_yes), 1.0) for _, one in verdicts]
        rest = iter(shares)
        found = []
        for own in read:
            rows = [[next(rest) for _ in row] for row in own]
            known = [[one for one in row if one is not None] for row in rows]
            found.append([row for row, all_ in zip(known, rows, strict=True) if row and len(row) == len(all_)])
        return found

    def _votes(self, row: Trajectory, known: list[list[YesProb]], num_asked: int, is_refused: bool) -> Votes:
        own, shares = self.verifier, [[one.share for one in rationale] for rationale in known]
        if isinstance(own, StepVerdictFormat):
            steps, has_own_verdict = mean_state_scores(shares, len(row.steps)), own.speaks_in(row.response)
        else:
            steps, has_own_verdict = [], own.question in row.response
        return Votes(
            [min(rationale) for rationale in shares],
            max(1, num_asked),
            [one.mass for rationale in known for one in rationale] if self.has_probs else [],
            is_refused=is_refused,
            has_own_verdict=has_own_verdict,
            steps=steps,
        )
