"""Task → Demonstration: the solutions a policy is first taught."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace

from espalier.data.records import BadInput, Demonstration
from espalier.models.load import load_tokenizer
from espalier.pipeline.stage import StageContext

log = logging.getLogger("stage")


@dataclass(frozen=True)
class MakeDemonstrations:
    """The demonstrations of one split of the task. `policy`: the model folder whose tokenizer writes chat prompts,
    needed where the task's prompt is a chat."""

    split: str = "train"
    policy: str = ""

    def inputs(self) -> list[str]:
        """None: the task makes or reads them."""
        return []

    def run(self, input_path: str, context: StageContext) -> Iterable[Demonstration]:
        """Return the demonstrations in order.

        Raises BadInput where there is no task, or a chat prompt and no policy.
        """
        if context.task is None:
            raise BadInput("problems/make_demonstrations needs a task: add task=NAME")
        demonstrations: list[Demonstration] = context.task.demonstrations(self.split)
        template = getattr(context.task, "template", None)
        if template is None or template.is_chat is False:
            return demonstrations
        if not self.policy and template.is_chat is None:
            log.info("prompts are plain text: stage.policy=MODEL writes them as that policy is asked")
            return demonstrations
        if not self.policy:
            raise BadInput("a chat prompt is written by the policy's tokenizer: add stage.policy=MODEL_FOLDER")
        tokenizer = load_tokenizer(self.policy)
        problems = {problem.id: problem for problem in context.task.problems(self.split)}
        return [
            replace(row, prompt=template.encode(tokenizer, problems[row.id.rsplit("/", 1)[0]]).text)
            for row in demonstrations
        ]
