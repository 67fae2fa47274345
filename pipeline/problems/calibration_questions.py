"""Questions that the published rows of linguistic calibration speak of by `question_id`.

TriviaQA's and BioASQ's are the published ids. SciQ and Jeopardy have none: there the number is the question's place,
from 0, in the published splits that are named, one after the other (SciQ: train, dev, test).
"""

from collections.abc import Sequence

from espalier.data.records import BadInput, Problem
from espalier.data.tasks.published import PublishedTask
from espalier.pipeline.stage import StageContext

BY_PLACE = ("sciq", "jeopardy")


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
    """A row that cannot be read keeps its place; `task.limit` and shards change none."""
    found, before = {}, 0
    for split in splits:
        problems, rejected = task.read_published(split)
        for problem in problems:
            found[str(before + int(problem.id.removeprefix(f"{task.name}-{split}-")))] = problem
        before += len(problems) + len(rejected)
    return found
