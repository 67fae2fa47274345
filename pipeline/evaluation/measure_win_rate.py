"""PairJudgement → how often the first solution of a pair wins, and how far the judge is to be trusted.

Every pair is judged in both orders. What most votes of one order say is its verdict (a tie where none has the most); a
pair is **won** or **lost** where both orders say so, **tied** where both say tie, and **disagreed** on where the
orders say different things: swapping places changed the verdict, so it counts as a tie (Zheng et al. 2023, arXiv
2306.05685). Figures, with 95 % intervals that draw problems:

- `win_rate` = (won + (tied + disagreed) / 2) / pairs; `won`, `lost`, `tied`, `disagreed`: shares of pairs;
- `position_bias`: the share of verdicts other than ties that go to the solution shown first, less 1/2;
- `unreadable`: the share of votes without a verdict.

Pairs without a verdict in one of the orders are left out of all but `unreadable`, and counted.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from espalier.data.jsonl import read_records
from espalier.data.judgements import ORDERS, VERDICTS, PairJudgement
from espalier.data.records import BadInput
from espalier.pipeline.evaluation.evaluation_table import make_row, make_table
from espalier.pipeline.prm.step_score_metrics import Figures, figure_intervals
from espalier.pipeline.stage import StageContext

COUNTS = ("won", "lost", "tied", "disagreed", "shown_first", "decided", "unreadable", "votes")


def order_verdict(votes: Sequence[str | None]) -> str | None:
    """Return what most of one order's votes say, a tie where no verdict has the most; None where none can be read."""
    counts = Counter(vote for vote in votes if vote is not None)
    if not counts:
        return None
    most = [vote for vote, count in counts.items() if count == max(counts.values())]
    return most[0] if len(most) == 1 else "tie"


def pair_outcome(verdicts: Sequence[str]) -> str:
    """ "won", "lost", "tied" or "disagreed" from the verdicts of both orders."""
    if len(set(verdicts)) > 1:
        return "disagreed"
    return dict(zip(VERDICTS, ("won", "lost", "tied"), strict=True))[verdicts[0]]


def win_figures(sums: np.ndarray) -> Figures:
    """Return the figures of counts [..., 8], NaN where there is nothing to share out."""
    won, lost, tied, disagreed, shown_first, decided, unreadable, votes = np.moveaxis(
        np.asarray(sums, dtype=np.float64), -1, 0
    )
    pairs = won + lost + tied + disagreed

    def share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
        return np.where(whole > 0, part / np.where(whole > 0, whole, 1.0), np.nan)

    return {
        "win_rate": share(won + (tied + disagreed) / 2, pairs),
        "won": share(won, pairs),
        "lost": share(lost, pairs),
        "tied": share(tied, pairs),
        "disagreed": share(disagreed, pairs),
        "position_bias": share(shown_first, decided) - 0.5,
        "unreadable": share(unreadable, votes),
    }


@dataclass(frozen=True)
class MeasureWinRate:
    """Input: the judgements."""

    def inputs(self) -> list[str]:
        """None beside the input."""
        return []

    def run(self, input_path: str, context: StageContext) -> dict[str, Any]:
        """Return `{"figures", "counts", "num_pairs", "num_left_out", "num_problems", "table"}`. Raises BadInput where
        no pair has a verdict in both orders, or a judgement names an unknown order or answer."""
        rows = read_records(PairJudgement, input_path)
        pairs: dict[str, list[PairJudgement]] = {}
        for row in rows:
            if row.order not in ORDERS or row.answer not in (*VERDICTS, None):
                raise BadInput(f"{input_path}: '{row.id}': order '{row.order}' and answer '{row.answer}': "
                               f"{', '.join(ORDERS)} and {', '.join(VERDICTS)} or null are known")  # fmt: skip
            pairs.setdefault(row.pair_id, []).append(row)
        problems: dict[str, Counter[str]] = {}
        num_left_out = 0
        for votes in pairs.values():
            counts, is_judged = _count(votes)
            problems.setdefault(votes[0].problem_id, Counter()).update(counts)
            num_left_out += not is_judged
        if num_left_out == len(pairs):
            raise BadInput(f"{input_path}: none of {len(pairs)} pairs has a verdict in both orders: read some of the "
                           "responses there, and let the judging run to its end")  # fmt: skip
        table = np.asarray([[counts[name] for name in COUNTS] for counts in problems.values()])
        figures = figure_intervals(table, win_figures)
        shown = make_table([make_row(name, figure) for name, figure in figures.items() if figure is not None])
        context.counts.update(pairs=len(pairs), left_out=num_left_out)
        return {
            "figures": figures,
            "counts": {name: int(count) for name, count in zip(COUNTS, table.sum(axis=0), strict=True)},
            "num_pairs": len(pairs) - num_left_out,
            "num_left_out": num_left_out,
            "num_problems": len(problems),
            "table": shown,
        }


def _count(votes: Sequence[PairJudgement]) -> tuple[Counter[str], bool]:
    """Return COUNTS of one pair's votes, and whether both orders have a verdict."""
    counts = Counter(votes=len(votes), unreadable=sum(vote.answer is None for vote in votes))
    verdicts = [order_verdict([vote.answer for vote in votes if vote.order == order]) for order in ORDERS]
    known = [verdict for verdict in verdicts if verdict is not None]
    if len(known) < len(ORDERS):
        return counts, False
    counts[pair_outcome(known)] += 1
    decided = [vote.shown_first_won for vote in votes if vote.shown_first_won is not None]
    counts.update(shown_first=sum(decided), decided=len(decided))
    return counts, True
