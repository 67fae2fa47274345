"""A generative verifier that writes before it judges, asked through engines: K rationales about a solution, and p(Yes)
where each gives its verdict (GenRM with chain of thought, Zhang et al. 2024, arXiv 2408.15240).

The same texts, tokens and verdicts as `prm/score_by_verifier` has of files. p(Yes) is asked for by requests of one
token each behind the rationale (`models.verdict_probs`).
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from espalier.data.asked_texts import AskedText, Asks, WrittenText
from espalier.data.process_data.published import content_key
from espalier.data.prompts import encode_text
from espalier.data.records import BadInput, Trajectory
from espalier.data.verification import Verdict, VerifierFormat
from espalier.models.tokenizer import load_tokenizer
from espalier.models.verdict_probs import VerdictTokens, YesProb, yes_probs_of_likeliest
from espalier.rewards.written_verdicts import Votes

VOTES = ("mean", "hard")


class VerifierRationales:
    """Args: the verifier's folder `path`, how it is asked (`verifier`, about whole solutions), and `votes`: "mean"
    takes p(Yes) of each rationale, "hard" 1 for a Yes and 0 for a No.

    Raises BadInput on other votes, and on a verifier that is asked about steps.
    """

    def __init__(self, path: str, verifier: VerifierFormat, votes: str = "mean"):
        if verifier.unit != "solution":
            raise BadInput("a generative verifier rewards whole solutions: choose verifier=solution for it")
        if votes not in VOTES:
            raise BadInput(f"the votes of a verifier's rationales are {' or '.join(VOTES)}, got '{votes}'")
        self.path, self.verifier, self.has_probs = path, verifier, votes == "mean"
        self.tokenizer: Any = load_tokenizer(path)

    @cached_property
    def _verdicts(self) -> VerdictTokens:
        return VerdictTokens.of(self.tokenizer, self.verifier.question, self.verifier.yes, self.verifier.no)

    def votes(self, trajectories: Sequence[Trajectory], asks: Asks) -> list[Votes]:
        """See `Form`. Equal solutions are asked about once; a rationale that is cut has no verdict."""
        question = self.verifier.question
        asks.open(self.path, question, list(self.tokenizer(question, add_special_tokens=False).input_ids))
        asked = [self.verifier.ask(row.prompt, [row.response], has_rationale=True) for row in trajectories]
        distinct = list(dict.fromkeys(asked))
        answers = dict(zip(distinct, asks.texts([self._request(text) for text in distinct]), strict=True))
        read = {text: [self._read(one) for one in answer or []] for text, answer in answers.items()}
        probs = self._probs(read, asks)
        found = []
        for text, row in zip(asked, trajectories, strict=True):
            known = [one for one in probs[text] if one is not None]
            found.append(
                Votes(
                    [one.share for one in known],
                    max(1, len(read[text])),
                    [one.mass for one in known] if self.has_probs else [],
                    is_refused=answers[text] is None,
                    has_own_verdict=question in row.response,
                )
            )
        return found

    def _request(self, text: str) -> AskedText:
        return AskedText(f"verify/{content_key(text)}", text, encode_text(self.tokenizer, text, "a solution to verify"))

    def _read(self, written: WrittenText) -> Verdict | None:
        return self.verifier.read(written.text) if written.is_whole else None

    def _probs(self, read: dict[str, list[Verdict | None]], asks: Asks) -> dict[str, list[YesProb | None]]:
        """Return of every text p(Yes) of each rationale; None where it has no verdict."""
        verdicts = [(text, one) for text, row in read.items() for one in row if one is not None]
        if self.has_probs:
            places = [text + one.before for text, one in verdicts]
            shares = yes_probs_of_likeliest(self.tokenizer, places, self._verdicts, asks.next_logprobs)
        else:
            shares = [YesProb(float(one.is_yes), 1.0) for _, one in verdicts]
        found: dict[str, list[YesProb | None]] = {text: [] for text in read}
        for (text, _), share in zip(verdicts, shares, strict=True):
            found[text].append(share)
        return found
