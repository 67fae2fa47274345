"""What a set of preference pairs is made of: kinds, margins, lengths, problems. Printed and stored with the pairs."""

import math
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Sequence
from tempfile import gettempdir
from typing import Any

from espalier.data.records import PreferencePair
from espalier.data.row_index import on_disk


class PairStatistics:
    """Takes in pairs problem by problem. What is held does not depend on how many there are: token counts are counted
    by value, and margins lie in a nameless file of SQLite's once they are many."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._kinds: Counter[str] = Counter()
        self._most = 0
        self._tokens: dict[str, Counter[int]] = {"chosen": Counter(), "rejected": Counter()}
        self._margins = sqlite3.connect("", isolation_level=None)
        self._margins.executescript("PRAGMA synchronous=OFF; CREATE TABLE margins (margin); BEGIN")

    def add(self, pairs: Sequence[PreferencePair]) -> None:
        """Take in all pairs of one problem."""
        if not pairs:
            return
        self._counts.update(pairs=len(pairs), problems_with_pairs=1)
        self._most = max(self._most, len(pairs))
        self._kinds.update(pair.kind for pair in pairs)
        for side, lengths in self._tokens.items():
            ids = [getattr(pair, f"{side}_ids") for pair in pairs]
            lengths.update(map(len, ids))
            prompts = (tuple(pair.prompt_ids) for pair in pairs)
            self._counts[f"distinct_{side}"] += len(set(zip(prompts, map(tuple, ids), strict=True)))
        margins = [pair.chosen_score - pair.rejected_score for pair in pairs]
        self._counts["against_scores"] += sum(margin < 0 for margin in margins)
        self._counts["chosen_is_longer"] += sum(len(pair.chosen_ids) > len(pair.rejected_ids) for pair in pairs)
        with on_disk(gettempdir()):
            self._margins.executemany("INSERT INTO margins VALUES (?)", ((margin,) for margin in margins))

    def figures(self) -> dict[str, Any]:
        """Return flat figures: `pairs`, `pairs_<kind>`, `problems_with_pairs`, `most_pairs_of_a_problem`,
        `distinct_chosen` and `distinct_rejected` sides, pairs `against_scores` (the rejected side scores higher), and
        mean, lowest, median, highest of the margin (chosen less rejected score) and of the tokens of either side.
        `chosen_is_longer` is the share of pairs whose chosen side has more tokens.

        Without pairs only the counts stand there.
        """
        num_pairs = self._counts["pairs"]
        kinds = {f"pairs_{kind}": self._kinds[kind] for kind in sorted(self._kinds)}
        figures: dict[str, Any] = {"pairs": num_pairs, **kinds}
        figures["problems_with_pairs"] = self._counts["problems_with_pairs"]
        if not num_pairs:
            return figures
        figures["most_pairs_of_a_problem"] = self._most
        figures |= {key: self._counts[key] for key in ("distinct_chosen", "distinct_rejected", "against_scores")}
        with on_disk(gettempdir()):
            figures |= self._margin_figures(num_pairs)
        for side, lengths in self._tokens.items():
            figures |= _token_figures(f"{side}_tokens", lengths)
        return figures | {"chosen_is_longer": round(self._counts["chosen_is_longer"] / num_pairs, 4)}

    def _margin_figures(self, number: int) -> dict[str, float]:
        read = self._margins.execute
        ordered = "SELECT margin FROM margins ORDER BY margin LIMIT ? OFFSET ?"
        middle = read(ordered, (2 - number % 2, (number - 1) // 2)).fetchall()
        lowest, highest = read("SELECT min(margin), max(margin) FROM margins").fetchone()
        mean = math.fsum(margin for (margin,) in read("SELECT margin FROM margins")) / number
        return _rounded("margin", mean, lowest, [margin for (margin,) in middle], highest, 4)


def _token_figures(name: str, lengths: Counter[int]) -> dict[str, float]:
    number, order = lengths.total(), sorted(lengths)
    mean = sum(length * times for length, times in lengths.items()) / number
    middle = [_nth(lengths, order, place) for place in range((number - 1) // 2, number // 2 + 1)]
    return _rounded(name, mean, order[0], middle, order[-1], 1)


def _nth(lengths: Counter[int], order: Sequence[int], place: int) -> int:
    """Return the length at a place, from 0, of all lengths in their order."""
    for length in order:
        place -= lengths[length]
        if place < 0:
            return length
    raise IndexError(place)


def _rounded(
    name: str, mean: float, lowest: float, middle: Sequence[float], highest: float, digits: int
) -> dict[str, float]:
    median = middle[0] if len(middle) == 1 else sum(middle) / 2
    figures = {"mean": mean, "lowest": lowest, "median": median, "highest": highest}
    return {f"{name}_{key}": round(value, digits) for key, value in figures.items()}


def pair_statistics(pairs: Sequence[PreferencePair]) -> dict[str, Any]:
    """Return the figures (`PairStatistics.figures`) of pairs in any order."""
    by_problem: dict[str, list[PreferencePair]] = defaultdict(list)
    for pair in pairs:
        by_problem[pair.problem_id].append(pair)
    statistics = PairStatistics()
    for group in by_problem.values():
        statistics.add(group)
    return statistics.figures()
