"""What a reader believes after a response, and claims of long texts with the confidence they are stated with."""

from dataclasses import dataclass

from espalier.data.records import BadInput


@dataclass(frozen=True)
class AnswerForecast:
    """The answers that a response offers and how probable a reader takes them to be."""

    id: str
    """the trajectory's id"""
    problem_id: str
    answers: list[str]
    """those that the response offers, each once, in its order; empty where it offers none"""
    probabilities: list[float]
    """of each answer, in [0, 1]"""
    gold_probability: float
    """of the gold answer, whether or not the response offers it"""
    is_correct: bool
    """whether the most confident answer (the first of equals) is right"""
    level: str = ""
    """what figures are broken down by, where the problem has it"""
    true_probability: float | None = None
    """of the most confident answer, in tasks whose answers have known frequencies"""

    def __post_init__(self) -> None:
        numbers = [*self.probabilities, self.gold_probability]
        if len(self.answers) != len(self.probabilities) or not all(0 <= number <= 1 for number in numbers):
            raise BadInput(f"'{self.id}' has {len(self.answers)} answers and the probabilities {self.probabilities} "
                           f"(gold {self.gold_probability}): one in [0, 1] for each is wanted")  # fmt: skip
        if not self.answers and self.is_correct:
            raise BadInput(f"'{self.id}' is right and offers no answer")

    @property
    def confidence(self) -> float:
        """The highest probability; 1 where nothing is offered, which counts as wrong."""
        return max(self.probabilities, default=1.0)


@dataclass(frozen=True)
class CheckedClaim:
    """An atomic claim of a long text, checked against a source."""

    id: str
    """unique in the file"""
    topic_id: str
    """what the text is about: intervals draw topics"""
    text: str
    """the claim with the words that say how sure it is"""
    is_supported: bool
    """whether the source supports it"""
    confidence: float | None = None
    """in [0, 1]; null: a percentage or the words in `text` say it, or it is stated plainly"""
    is_subjective: bool = False
    """an opinion, which is left out"""
    alternatives: str = ""
    """claims of a topic with the same name here exclude each other: they count once, by the most confident"""

    def __post_init__(self) -> None:
        if self.confidence is not None and not 0 <= self.confidence <= 1:
            raise BadInput(f"'{self.id}' has the confidence {self.confidence}: it must be in [0, 1]")
