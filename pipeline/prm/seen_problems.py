"""Problems that a reward model was trained on, by what its scores say (`StepScores.is_seen`)."""

import logging
from collections.abc import Collection

from espalier.data.jsonl import read_records
from espalier.data.records import StepScores
from espalier.pipeline.stage import StageContext

log = logging.getLogger("stage")


def note_seen(problems: Collection[str], scores: str, context: StageContext, consequence: str) -> set[str]:
    """Return which of the problems the reward model behind the scores was trained on. Warn of them with their number
    and the `consequence`, and of those of which the scores do not say it; count both."""
    flags: dict[str, list[bool | None]] = {}
    for row in read_records(StepScores, scores):
        flags.setdefault(row.problem_id, []).append(row.is_seen)
    mine = {problem: flags.get(problem, []) for problem in problems}
    seen = {problem for problem, is_seen in mine.items() if True in is_seen}
    unknown = sum(None in is_seen for is_seen in mine.values())
    context.counts.update(problems_seen_by_the_reward_model=len(seen))
    if seen:
        log.warning("%s: %d of %d problems were in the reward model's training set and %s", scores, len(seen),
                    len(mine), consequence)  # fmt: skip
    if unknown:
        context.counts.update(problems_perhaps_seen=unknown)
        log.warning("%s: of %d of %d problems nobody knows whether the reward model was trained on them: score again "
                    "with a model that has training_problems.json", scores, unknown, len(mine))  # fmt: skip
    return seen
