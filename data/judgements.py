"""What a judge said: one record an answer, with the verdict read from it and the answer as it came.

pair judgement   `{pair}/{order}/{vote}`    order `ab`: the pair's first solution was shown first, `ba`: last
rating           `{row}/{side}-{place}/{vote}`    side: `chosen` or `rejected`, place: from 0 in that list
step judgement   `{trajectory}/{vote}`
verification     `{trajectory}/{vote}`, or `{trajectory}#{steps}/{vote}` of its first steps
"""

from dataclasses import dataclass

ORDERS = ("ab", "ba")
VERDICTS = ("first", "second", "tie")


@dataclass(frozen=True)
class PairJudgement:
    """What a judge said of two solutions of a problem, shown in one order."""

    id: str
    """`{pair}/{order}/{vote}`"""
    pair_id: str
    """the pair of solutions"""
    problem_id: str
    order: str
    """ab: the pair's first solution was shown first; ba: last"""
    answer: str | None
    """which solution of the pair won, whatever place it was shown in: first, second, tie; null where the response
    ends in no verdict"""
    response: str
    """the judge's text"""
    finish_reason: str

    @property
    def shown_first_won(self) -> bool | None:
        """Whether the solution that was shown first won; None for a tie or no verdict."""
        if self.answer not in VERDICTS[:2]:
            return None
        return (self.answer == "first") == (self.order == "ab")


@dataclass(frozen=True)
class ResponseRating:
    """How good a judge takes one response to be, by itself."""

    id: str
    """`{row}/{side}-{place}/{vote}`"""
    row_id: str
    """the row of a reward-model benchmark"""
    side: str
    """chosen or rejected: the list of the row that holds the response"""
    place: int
    """of the response in that list, from 0"""
    rating: float | None
    """in [0, 1]; null where the answer ends in none"""
    response: str
    """the judge's text"""
    finish_reason: str


@dataclass(frozen=True)
class StepJudgement:
    """What a judge said of the steps of a solution."""

    id: str
    """`{trajectory}/{vote}`"""
    trajectory_id: str
    """the trajectory that was judged"""
    problem_id: str
    num_steps: int
    """number of its steps"""
    answer: str | None
    """the verdict as it was read, null where the response ends in none"""
    labels: list[float | None]
    """of each step: 1 right, 0 wrong, null where the judge says nothing of it (the steps behind a first error);
    empty where there is no verdict"""
    response: str
    """the judge's text"""
    finish_reason: str

    @property
    def states(self) -> list[float]:
        """1 for each state that no error has led to, else 0: a step called wrong spoils all states from it on."""
        states: list[float] = []
        for label in self.labels:
            is_good = label == 1 and (not states or states[-1] == 1)
            states.append(float(is_good))
        return states


@dataclass(frozen=True)
class Verification:
    """What a generative verifier, or the teacher of one, wrote about a solution or its first steps."""

    id: str
    """`{question}/{vote}`"""
    question_id: str
    """the trajectory's id; `{trajectory}#{steps}` where its first steps are asked about"""
    problem_id: str
    asked: str
    """hash of the problem and the steps it is about: ids alone are those of every sampling run"""
    answer: str | None
    """yes or no: the verdict as it was read; null where the response ends in none"""
    response: str
    """the rationale with its verdict, as it was written"""
    finish_reason: str
