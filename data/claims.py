"""The claims of a long text as a chat model lists them, the sources they are checked against, and the verdicts.

listed claims   `{trajectory}/{vote}`
claim check     `{trajectory}~{place}/{vote}`    place: that of the claim in the list
"""

from collections.abc import Iterator
from dataclasses import dataclass

from espalier.data.jsonl import read_records
from espalier.data.records import BadInput


@dataclass(frozen=True)
class Claim:
    """An atomic claim: `text` with the words that say how sure it is, `confidence` where a number says it;
    `alternatives` is the name of those in the text that exclude each other, "" of one that stands alone."""

    text: str
    confidence: float | None
    is_subjective: bool
    alternatives: str


@dataclass(frozen=True)
class ListedClaims:
    """The atomic claims of a response, as a chat model lists them; the lists have one entry for each."""

    id: str
    """`{trajectory}/{vote}`"""
    trajectory_id: str
    """the response that was split"""
    problem_id: str
    claims: list[str] | None
    """each once, as a sentence that can be read alone, with the words that say how sure it is; empty where the response
    makes none; null where the model gave no list that can be read"""
    confidences: list[float | None]
    """as stated by a number, in [0, 1]; null: the words say it, or it is stated plainly"""
    are_subjective: list[bool]
    """whether each is an opinion"""
    alternatives: list[str]
    """a name that claims of this response share which exclude each other; "" where a claim stands alone"""
    response: str
    """the model's answer"""
    finish_reason: str

    def __post_init__(self) -> None:
        number = len(self.claims or [])
        if not len(self.confidences) == len(self.are_subjective) == len(self.alternatives) == number:
            raise BadInput(f"'{self.id}' has {number} claims, {len(self.confidences)} confidences, "
                           f"{len(self.are_subjective)} are_subjective and {len(self.alternatives)} alternatives: give "
                           "one for each claim")  # fmt: skip

    def each(self) -> list[Claim]:
        """Return the claims, in their order."""
        parts = (self.claims or [], self.confidences, self.are_subjective, self.alternatives)
        return [Claim(*row) for row in zip(*parts, strict=True)]

    def to_check(self) -> Iterator[tuple[str, Claim]]:
        """Yield (`{trajectory}~{place}`, claim) of those that are no opinions."""
        for place, claim in enumerate(self.each()):
            if not claim.is_subjective:
                yield f"{self.trajectory_id}~{place}", claim


@dataclass(frozen=True)
class ClaimCheck:
    """Whether a source supports a claim."""

    id: str
    """`{trajectory}~{place}/{vote}`"""
    claim_id: str
    """`{trajectory}~{place}`"""
    problem_id: str
    claim: str
    """the claim that was asked about"""
    is_supported: bool | None
    """null where the model did not say"""
    response: str
    """the model's answer"""
    finish_reason: str


@dataclass(frozen=True)
class SourceDocument:
    """A text about a topic, to check claims against; a topic may have several."""

    topic_id: str
    """the id of the problem that asks for a text about it"""
    text: str
    """the whole document"""


def claims_of(path: str) -> dict[str, ListedClaims]:
    """Return trajectory → its first vote with a list, else its first, from a file of ListedClaims."""
    found: dict[str, ListedClaims] = {}
    for row in read_records(ListedClaims, path):
        if row.trajectory_id not in found or found[row.trajectory_id].claims is None:
            found[row.trajectory_id] = row
    return found
