"""Problems that a reward model was trained on, by what its scores say (`StepScores.is_seen`)."""

import logging
from collections.abc import Collection, Mapping

from espalier.data.jsonl import read_records
from espalier.data.records import StepScores
from espalier.pipeline.stage import StageContext

log = logging.getLogger("stage")

Flags = Mapping[str, list[bool | None]]  # problem id → what the scores of each of its trajectories say


def note_seen(
    problems: Collection[str], scores: str, context: StageContext, consequence: str, name: str = ""
) -> set[str]:
    """Return which of the problems the reward model behind the scores was trained on. Warn of them with their number
    and the `consequence`, and of those of which the scores do not say it; count both, by the scores' `name` where there
    are several."""
    mine = _flags(problems, scores)
    seen = {problem for problem, is_seen in mine.items() if True in is_seen}
    context.counts[_key("problems_seen_by_the_reward_model", name)] = len(seen)
    if seen:
        log.warning("%s: %d of %d problems were in the reward model's training set and %s", scores, len(seen),
                    len(mine), consequence)  # fmt: skip
    _warn_of_unknown(mine, scores, context, name)
    return seen


def note_unknown(problems: Collection[str], scores: str, context: StageContext, name: str = "") -> None:
    """Warn of the problems of which the scores do not say whether the reward model was trained on them, and count them,
    by the scores' `name` where there are several."""
    _warn_of_unknown(_flags(problems, scores), scores, context, name)


def _key(count: str, name: str) -> str:
    return f"{count}_{name}" if name else count


def _flags(problems: Collection[str], scores: str) -> Flags:
    flags: dict[str, list[bool | None]] = {}
    for row in read_records(StepScores, scores):
        flags.setdefault(row.problem_id, []).append(row.is_seen)
    return {problem: flags.get(problem, []) for problem in problems}


def _warn_of_unknown(mine: Flags, scores: str, context: StageContext, name: str) -> None:
    unknown = sum(None in is_seen for is_seen in mine.values())
    if unknown:
        context.counts[_key("problems_perhaps_seen", name)] = unknown
        log.warning("%s: of %d of %d problems nobody knows whether the reward model was trained on them: score again "
                    "with a model that has training_problems.json", scores, unknown, len(mine))  # fmt: skip
