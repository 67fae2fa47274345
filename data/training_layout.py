"""How a reward model was trained to read a text: `training_layout.json` in its folder.

A head says nothing of it: one trained on the ends of steps and one trained on the ends of responses are the same
network, and so are one that read chat turns and one that read plain text. Scored otherwise, each gives numbers that
look like scores. So the folder of a model trained on steps, on pairs or on judged responses says what its rows were.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from espalier.data.prompts import write_chat
from espalier.data.records import BadInput

FILE = "training_layout.json"
STEPS, RESPONSES = "steps", "responses"
CHAT, TEXT, BOTH = "chat", "text", "both"
_MARK = "THE-QUESTION"


@dataclass(frozen=True)
class TrainingLayout:
    """`scores`: the ends of steps, or of responses; `prompts`: turns of the tokenizer's chat template (chat), plain
    text (text), or some of each (both)."""

    scores: str
    prompts: str

    def __post_init__(self) -> None:
        if self.scores not in (STEPS, RESPONSES) or self.prompts not in (CHAT, TEXT, BOTH):
            raise BadInput(f"scores must be {STEPS} or {RESPONSES}, prompts {CHAT}, {TEXT} or {BOTH}, got "
                           f"{self.scores!r} and {self.prompts!r}")  # fmt: skip


@dataclass(frozen=True)
class PromptReader:
    """Says of token ids whether their prompt is a turn of the tokenizer's chat template: whether they hold what the
    template writes between a question and its answer."""

    tokenizer: Any

    @cached_property
    def _between(self) -> str:
        """What the template writes there, without white space; "" where there is no template, or it writes nothing."""
        if not getattr(self.tokenizer, "chat_template", None):
            return ""
        try:
            text = write_chat(self.tokenizer, [{"role": "user", "content": _MARK}])
        except BadInput:  # it wants other turns than a question
            return ""
        return "".join(text.partition(_MARK)[2].split())

    def is_chat(self, ids: Sequence[int]) -> bool:
        """Say it of the ids of a prompt, or of a prompt and what follows it."""
        if not self._between:
            return False
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        return self._between in "".join(text.split())

    def layout(self, prompts: Iterable[Sequence[int]]) -> str:
        """Return `chat`, `text` or `both` of several."""
        found = {self.is_chat(ids) for ids in prompts}
        return BOTH if len(found) == 2 else CHAT if found == {True} else TEXT


PROMPTS_IN_WORDS = {CHAT: "turns of a chat template", TEXT: "plain text"}


def other_prompts(folder: str, tokenizer: Any, prompt_ids: Callable[[], Sequence[int]]) -> tuple[str, str] | None:
    """Return, in words, (what prompts a model was trained on, what `prompt_ids` gives), where it was trained here on
    chat turns and this prompt is plain text, or the other way round; None where not. Raises BadInput as
    `read_training_layout`."""
    trained = read_training_layout(folder)
    if trained is None or trained.prompts == BOTH or not (ids := prompt_ids()):
        return None
    found = CHAT if PromptReader(tokenizer).is_chat(ids) else TEXT
    return (PROMPTS_IN_WORDS[trained.prompts], PROMPTS_IN_WORDS[found]) if found != trained.prompts else None


def write_training_layout(folder: Path, layout: TrainingLayout) -> None:
    """Write the file of a model that was trained so."""
    (folder / FILE).write_text(json.dumps(vars(layout)) + "\n")


def read_training_layout(folder: str) -> TrainingLayout | None:
    """Return how a model was trained to read; None where its folder does not say. Raises BadInput on a file that cannot
    be read."""
    path = Path(folder) / FILE
    if not path.is_file():
        return None
    try:
        return TrainingLayout(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise BadInput(f"{path} cannot be read ({error}): train the model again, or remove the file") from None
