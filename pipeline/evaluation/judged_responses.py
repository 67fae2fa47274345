"""What a judge said of a benchmark's row → the scores of its responses; no scores where some of it cannot be read.

**Verdicts about a pair**, asked in both orders (`PairJudgement`): a side's score is its share of the verdicts, a tie
half for each, so that a judge who goes by the place is a tie. **Ratings** of each response by itself
(`ResponseRating`): the mean of its votes; rows may have any number of responses.
"""

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from espalier.data.jsonl import iter_rows
from espalier.data.judgements import PairJudgement, ResponseRating
from espalier.data.ranked_responses import RankedResponses, ResponseScores
from espalier.data.records import BadInput

_WORTH = {"first": 1.0, "tie": 0.5, "second": 0.0}


def judgement_kind(path: str) -> tuple[type[PairJudgement] | type[ResponseRating], str]:
    """Return the kind of a file's rows, and the field that names the row they are about. Raises BadInput on an empty
    file."""
    first = next((row for _, row in iter_rows(path)), None)
    if first is None:
        raise BadInput(f"{path}: no judgements: have the rows judged first")
    return (ResponseRating, "row_id") if "rating" in first else (PairJudgement, "pair_id")


def judge_scores(row: RankedResponses, said: Sequence[PairJudgement | ResponseRating]) -> ResponseScores:
    """Return the scores of a row by what was said of it. Raises as `judged_scores` and `rated_scores`."""
    ratings = [one for one in said if isinstance(one, ResponseRating)]
    verdicts = [one for one in said if isinstance(one, PairJudgement)]
    return rated_scores(row, ratings) if ratings else judged_scores(row, verdicts)


def judged_scores(row: RankedResponses, judgements: Sequence[PairJudgement]) -> ResponseScores:
    """Return the shares of a row's verdicts for each side; no scores where no verdict of one of the orders can be read.
    Raises BadInput on a row with more than two responses, and without judgements in both orders."""
    if len(row.chosen) != 1 or len(row.rejected) != 1:
        raise BadInput(f"'{row.id}' has more than two responses: a judge of pairs cannot score it: have each response "
                       "rated (requests=rate_responses)")  # fmt: skip
    answers: dict[str, list[str | None]] = defaultdict(list)
    for judgement in judgements:
        answers[judgement.order].append(judgement.answer)
    if len(answers) < 2:
        raise BadInput(f"'{row.id}' has no judgements in both orders: judge these rows")
    means = []
    for votes in answers.values():
        read = [_WORTH[vote] for vote in votes if vote is not None]
        means += [sum(read) / len(read)] if read else []
    share = sum(means) / 2 if len(means) == 2 else None
    sides = ([], []) if share is None else ([share], [1 - share])
    return ResponseScores(row.id, row.subset, *sides)


def rated_scores(row: RankedResponses, ratings: Sequence[ResponseRating]) -> ResponseScores:
    """Return the mean rating of every response of a row; no scores where one of them has none that can be read. Raises
    BadInput where other responses were rated than it has."""
    votes: dict[tuple[str, int], list[float]] = defaultdict(list)
    for one in ratings:
        votes[one.side, one.place] += [] if one.rating is None else [one.rating]
    sides = {"chosen": len(row.chosen), "rejected": len(row.rejected)}
    wanted = {(side, place) for side, number in sides.items() for place in range(number)}
    if votes.keys() != wanted:
        raise BadInput(f"'{row.id}' has ratings of {len(votes)} responses and {len(wanted)} responses: rate these rows")
    if not all(votes.values()):
        return ResponseScores(row.id, row.subset, [], [])
    return ResponseScores(row.id, row.subset, *([fmean(votes[side, place]) for place in range(number)]
                                                for side, number in sides.items()))  # fmt: skip
