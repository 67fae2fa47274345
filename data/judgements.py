"""What a judge said: one record an answer, with the verdict read from it and the answer as it came.

pair judgement   `{pair}/{order}/{vote}`    order `ab`: the pair's first solution was shown first, `ba`: last
step judgement   `{trajectory}/{vote}`
"""

from dataclasses import dataclass

ORDERS = ("ab", "ba")
VERDICTS = ("first", "second", "tie")


@dataclass(frozen=True)
class PairJudgement:
    """`answer` says which solution of the pair won, whatever place it was shown in: "first", "second", "tie"; None
    where the response ends in no verdict. `order` is one of ORDERS."""

    id: str
    pair_id: str
    problem_id: str
    order: str
    answer: str | None
    response: str
    finish_reason: str

    @property
    def shown_first_won(self) -> bool | None:
        """Whether the solution that was shown first won; None for a tie or no verdict."""
        if self.answer not in VERDICTS[:2]:
            return None
        return (self.answer == "first") == (self.order == "ab")


@dataclass(frozen=True)
class StepJudgement:
    """`labels[i]`: 1 where the judge calls step i right, 0 wrong, None where it says nothing of it (the steps behind a
    first error); [] where the response ends in no verdict, and then `answer`, the verdict as it was read, is None."""

    id: str
    trajectory_id: str
    problem_id: str
    num_steps: int
    answer: str | None
    labels: list[float | None]
    response: str
    finish_reason: str

    @property
    def states(self) -> list[float]:
        """1 for each state that no error has led to, else 0: a step called wrong spoils all states from it on."""
        found: list[float] = []
        for label in self.labels:
            is_good = label == 1 and (not found or found[-1] == 1)
            found.append(float(is_good))
        return found
