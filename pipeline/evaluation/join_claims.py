"""What a chat model read and checked → CheckedClaim: the claims of long texts, each with what its source says of it.

The confidence of a claim is the number that it states; where the list has none, that of its words (a percentage in the
claim is then something else: "owns 51 % of it"), or 1. Opinions are not checked and not written. A response that was
cut, or without a list of claims, is left out; so is a claim without a verdict, together with those that it excludes:
which of them is the most confident decides which one counts. All of that is counted. A response that makes no claim
adds none. Of several votes the first list counts, and what most verdicts say; a tie is no.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from espalier.data.answers.confidence_phrases import word_confidence
from espalier.data.claims import ClaimCheck, ListedClaims, claims_of
from espalier.data.forecasts import CheckedClaim
from espalier.data.jsonl import read_records
from espalier.data.left_out import leave_out
from espalier.data.reader_answers import most_say_yes
from espalier.data.records import BadInput, Trajectory
from espalier.pipeline.readings import check_readings
from espalier.pipeline.stage import StageContext

Verdicts = Mapping[str, bool]
"""claim id → whether the source supports it; claims without a verdict are not in it."""


@dataclass(frozen=True)
class JoinClaims:
    """Input: the trajectories that were split. `claims`: ListedClaims; `checks`: ClaimCheck rows."""

    claims: str
    checks: str

    def inputs(self) -> list[str]:
        """Return what the chat model said."""
        return [self.claims, self.checks]

    def run(self, input_path: str, context: StageContext) -> Iterator[CheckedClaim]:
        """Yield the claims that were checked, in the order of the responses. Raises BadInput where none was, and where
        the files are not of the same responses and claims."""
        check_readings(input_path, [self.claims])
        lists = claims_of(self.claims)
        verdicts = self._verdicts(lists)
        rows = read_records(Trajectory, input_path)
        self._check_responses(lists, rows, input_path)
        whole = [row for row in rows if row.finish_reason == "stop"]
        made = {row.id: lists[row.id].each() for row in whole if row.id in lists and lists[row.id].claims is not None}
        num_blank = sum(not row.response.strip() and row.id not in made for row in whole)
        num_facts = sum(not claim.is_subjective for claims in made.values() for claim in claims)
        found = [claim for name in made for claim in _checked(lists[name], verdicts)]
        if not found:
            raise BadInput(
                f"{input_path}: no claim was checked: are {self.claims} and {self.checks} of these responses?"
            )
        context.counts.update(
            cut=len(rows) - len(whole),
            not_split=len(whole) - num_blank - len(made),
            without_claims=num_blank + sum(not claims for claims in made.values()),
            opinions=sum(map(len, made.values())) - num_facts,
            not_checked=num_facts - len(found),
        )
        num_left_out = len(rows) - num_blank - len(made)
        leave_out(input_path, num_left_out, len(rows), "responses", "were cut, or have no list of claims")
        leave_out(self.checks, num_facts - len(found), num_facts, "claims", "have no verdict, or exclude one without")
        yield from found

    def _verdicts(self, lists: Mapping[str, ListedClaims]) -> Verdicts:
        """Return them. Raises BadInput where one is about a claim, or words, that the lists do not have."""
        asked = {name: claim.text for row in lists.values() for name, claim in row.to_check()}
        votes: dict[str, list[bool]] = {}
        for row in read_records(ClaimCheck, self.checks):
            if asked.get(row.claim_id) != row.claim:
                raise BadInput(f"{self.checks}: '{row.id}' checks another claim than {self.claims} has there: name "
                               "the list that was checked, or check this one")  # fmt: skip
            if row.is_supported is not None:
                votes.setdefault(row.claim_id, []).append(row.is_supported)
        return {name: most_say_yes(said) for name, said in votes.items()}

    def _check_responses(self, lists: Mapping[str, ListedClaims], rows: list[Trajectory], path: str) -> None:
        topics = {row.id: row.problem_id for row in rows}
        for name, row in lists.items():
            if topics.get(name) != row.problem_id:
                raise BadInput(f"{self.claims}: '{row.id}' is of the response '{name}' to '{row.problem_id}', which "
                               f"{path} does not have: name the file that was split")  # fmt: skip


def _checked(row: ListedClaims, verdicts: Verdicts) -> Iterator[CheckedClaim]:
    """Yield the claims of a response whose verdicts, and those of all that they exclude, are known. Alternatives are
    those of one response: their name begins with its id."""
    facts = list(row.to_check())
    unknown = {claim.alternatives for name, claim in facts if claim.alternatives and name not in verdicts}
    for name, claim in facts:
        if name in verdicts and claim.alternatives not in unknown:
            group = claim.alternatives and f"{row.trajectory_id}/{claim.alternatives}"
            confidence = word_confidence(claim.text) if claim.confidence is None else claim.confidence
            yield CheckedClaim(name, row.problem_id, claim.text, verdicts[name], confidence, alternatives=group)
