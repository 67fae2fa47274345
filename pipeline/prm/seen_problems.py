"""Problems that a reward model was trained on, by what its scores say (`StepScores.is_seen`)."""

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from espalier.data.jsonl import iter_rows
from espalier.data.records import StepScores, parse_record
from espalier.pipeline.stage import StageContext

log = logging.getLogger("stage")

Flags = Mapping[str, set[bool | None]]  # problem id → what the scores of its trajectories say


@dataclass
class SeenCounts:
    """Takes in problem by problem what the scores of its trajectories say."""

    scores: str
    """their file"""
    name: str = ""
    """the scorer's, where there are several"""
    num_problems: int = 0
    num_seen: int = 0
    num_unknown: int = 0

    def add(self, flags: Iterable[bool | None]) -> bool:
        """Take in a problem; whether the reward model was trained on it."""
        kinds = set(flags)
        self.num_problems += 1
        self.num_seen += True in kinds
        self.num_unknown += None in kinds
        return True in kinds

    def note(self, context: StageContext, consequence: str) -> None:
        """Count the problems that were seen and warn of them, with the `consequence`; then `note_unknown`."""
        context.counts[self._key("problems_seen_by_the_reward_model")] = self.num_seen
        if self.num_seen:
            log.warning("%s: %d of %d problems were in the reward model's training set and %s", self.scores,
                        self.num_seen, self.num_problems, consequence)  # fmt: skip
        self.note_unknown(context)

    def note_unknown(self, context: StageContext) -> None:
        """Count the problems of which the scores do not say it, and warn of them."""
        if self.num_unknown:
            context.counts[self._key("problems_perhaps_seen")] = self.num_unknown
            log.warning("%s: of %d of %d problems nobody knows whether the reward model was trained on them: score "
                        "again with a model that has training_problems.json", self.scores, self.num_unknown,
                        self.num_problems)  # fmt: skip

    def _key(self, count: str) -> str:
        return f"{count}_{self.name}" if self.name else count


def note_seen(
    problems: Collection[str], scores: str, context: StageContext, consequence: str, name: str = ""
) -> set[str]:
    """Return which of the problems the reward model behind the scores was trained on; `SeenCounts.note`."""
    flags, counts = _flags(scores), SeenCounts(scores, name)
    seen = {problem for problem in problems if counts.add(flags.get(problem, ()))}
    counts.note(context, consequence)
    return seen


def note_unknown(problems: Collection[str], scores: str, context: StageContext, name: str = "") -> None:
    """Warn of the problems of which the scores do not say whether the reward model was trained on them, and count them,
    by the scores' `name` where there are several."""
    flags, counts = _flags(scores), SeenCounts(scores, name)
    for problem in problems:
        counts.add(flags.get(problem, ()))
    counts.note_unknown(context)


def _flags(scores: str) -> Flags:
    flags: dict[str, set[bool | None]] = {}
    for place, row in iter_rows(scores):
        record = parse_record(StepScores, row, place)
        flags.setdefault(record.problem_id, set()).add(record.is_seen)
    return flags
