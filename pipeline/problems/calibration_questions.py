"""Questions that the published rows of linguistic calibration speak of by `question_id`.

TriviaQA's and BioASQ's are the published ids. SciQ and Jeopardy have none: there the number is the question's place,
from 0, in the published splits, one after the other (`PLACED`), whichever of them are named.
"""

from collections.abc import Sequence

from espalier.data.records import BadInput, Problem
from espalier.data.tasks.published import PublishedTask
from espalier.pipeline.stage import StageContext

BY_PLACE = ("sciq", "jeopardy")
PLACED = ("train", "dev", "test")
"""The order in which a set's splits are counted."""


def questions_by_id(context: StageContext, splits: Sequence[str]) -> dict[str, Problem]:
    """Return published id or place → problem of the task's splits. Raises BadInput without the task."""
    task = context.task
    if task is None:
        raise BadInput("the questions are a published set's: set task=triviaqa task.path=FOLDER")
    if isinstance(task, PublishedTask) and task.name in BY_PLACE:
        return _by_place(task, splits)
    return {
        str(problem.info.get("published_id", problem.id.removeprefix(f"{task.name}-{split}-"))): problem
        for split in splits
        for problem in task.problems(split)
    }


def _by_place(task: PublishedTask, splits: Sequence[str]) -> dict[str, Problem]:
    """A row that cannot be read keeps its place; `task.limit` and shards change none, nor do splits that are not
    named: their rows are counted all the same."""
    found, before = {}, 0
    published = [split for split in PLACED if split in task.files]
    for split in published[: max((published.index(split) for split in splits), default=-1) + 1]:
        problems, rejected = task.read_published(split)
        if split in splits:
            for problem in problems:
                found[str(before + int(problem.id.removeprefix(f"{task.name}-{split}-")))] = problem
        before += len(problems) + len(rejected)
    return found
