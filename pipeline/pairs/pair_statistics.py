"""What a set of preference pairs is made of: kinds, margins, lengths, problems. Printed and stored with the pairs."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from espalier.data.records import PreferencePair


def _spread(name: str, values: Sequence[float], digits: int) -> dict[str, float]:
    figures = {"mean": fmean(values), "lowest": min(values), "median": median(values), "highest": max(values)}
    return {f"{name}_{key}": round(value, digits) for key, value in figures.items()}


def pair_statistics(pairs: Sequence[PreferencePair]) -> dict[str, Any]:
    """Return flat figures: `pairs`, `pairs_<kind>`, `problems_with_pairs`, `most_pairs_of_a_problem`, `distinct_chosen`
    and `distinct_rejected` sides, pairs `against_scores` (the rejected side scores higher), and mean, lowest, median,
    highest of the margin (chosen less rejected score) and of the tokens of either side. `chosen_is_longer` is the share
    of pairs whose chosen side has more tokens.

    Without pairs only the counts stand there.
    """
    problems = Counter(pair.problem_id for pair in pairs)
    kinds = Counter(pair.kind for pair in pairs)
    statistics: dict[str, Any] = {
        "pairs": len(pairs),
        **{f"pairs_{kind}": kinds[kind] for kind in sorted(kinds)},
        "problems_with_pairs": len(problems),
    }
    if not pairs:
        return statistics
    chosen, rejected = [len(pair.chosen_ids) for pair in pairs], [len(pair.rejected_ids) for pair in pairs]
    statistics["most_pairs_of_a_problem"] = max(problems.values())
    for side, ids in (("chosen", "chosen_ids"), ("rejected", "rejected_ids")):
        sides = {(p.problem_id, tuple(p.prompt_ids), tuple(getattr(p, ids))) for p in pairs}
        statistics[f"distinct_{side}"] = len(sides)
    margins = [pair.chosen_score - pair.rejected_score for pair in pairs]
    statistics["against_scores"] = sum(margin < 0 for margin in margins)
    statistics |= _spread("margin", margins, 4)
    statistics |= _spread("chosen_tokens", chosen, 1) | _spread("rejected_tokens", rejected, 1)
    longer = sum(good > bad for good, bad in zip(chosen, rejected, strict=True))
    return statistics | {"chosen_is_longer": round(longer / len(pairs), 4)}
