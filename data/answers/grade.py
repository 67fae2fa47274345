"""What a grader says: right, wrong or unparseable, what it read, and why."""

from dataclasses import dataclass

# One gold answer, or several any of which is right (short answers with aliases). "" says that the problem is
# published without its answer.
Gold = str | list[str]


@dataclass(frozen=True)
class Grade:
    """`answer` is what was extracted from the response, None where nothing could be (unparseable)."""

    answer: str | None
    is_correct: bool
    reason: str = ""

    @property
    def verdict(self) -> str:
        """ "right", "wrong" or "unparseable"."""
        return "right" if self.is_correct else "wrong" if self.answer is not None else "unparseable"
