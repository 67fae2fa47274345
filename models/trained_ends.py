"""Whether a reward model's head was trained on the ends of steps or on the ends of whole responses: the same network,
whose score at the other place is a number all the same.

| a folder, or its name | says |
|---|---|
| `training_layout.json`, as training here writes it | what its rows were |
| `training_responses.json`, of a head trained here before that file was | responses: steps have none |
| `...ForSequenceClassification` | responses: transformers reads the last token alone |
| a published process reward model, by name or class | steps |
| `...ForTokenClassification` with two labels, as TRL's PRMTrainer leaves it | steps |
| two policies (`log_ratio_reward.json`) | both: they have no head |
| anything else: one label or several at every token | nothing |
"""

import logging
from dataclasses import dataclass
from pathlib import Path

from espalier.data.records import BadInput
from espalier.data.seen_responses import FILE as RESPONSES_FILE
from espalier.data.training_layout import FILE as LAYOUT_FILE
from espalier.data.training_layout import RESPONSES, STEPS, read_training_layout
from espalier.data.training_problems import FILE as PROBLEMS_FILE
from espalier.models.load import load_config
from espalier.models.log_ratio_reward import is_log_ratio_reward

log = logging.getLogger(__name__)
BOTH, NOT_KNOWN = "both", ""


@dataclass(frozen=True)
class TrainedEnds:
    """`ends`: steps, responses, both, or "" where nothing says it; `why`: what says it, in words."""

    ends: str
    why: str

    def read_at(self, ends: str, name: str, is_asked_for: bool, remedy: str) -> str:
        """Say for the provenance at which `ends` the model `name` is read, and what says that it was trained there.
        Raises BadInput, with the `remedy`, where it was trained on the others, unless it `is_asked_for`: then, and
        where nothing says it, one line of the log does."""
        if self.ends in (ends, BOTH):
            return f"{ends}: {self.why}"
        if self.ends == NOT_KNOWN:
            if is_asked_for:
                return f"{ends}, as asked for: {self.why}"
            log.warning("%s is read at the ends of %s, which is an assumption: %s: %s", name, ends, self.why, remedy)
            return f"{ends}, assumed: {self.why}"
        if not is_asked_for:
            raise BadInput(f"{name} was trained on {self.ends} and not on {ends} ({self.why}): {remedy}")
        log.warning("%s was trained on %s (%s) and is read at the ends of %s, as asked for", name, self.ends, self.why,
                    ends)  # fmt: skip
        return f"{ends}, as asked for, of a model that was trained on {self.ends}: {self.why}"


def trained_ends(folder: str, name: str = "") -> TrainedEnds:
    """Return what the head of a folder was trained on, by the table of the module; `name`: what its user calls it,
    where that is another name than the folder's. Raises BadModel where there is no config, BadInput on a file that
    cannot be read."""
    from espalier.models.published.load import row_by_name

    if is_log_ratio_reward(folder):
        return TrainedEnds(BOTH, "two policies and no head")
    if layout := read_training_layout(folder):
        return TrainedEnds(layout.scores, f"its {LAYOUT_FILE} says so")
    config = load_config(folder)
    kinds = config.architectures or []
    if any(kind.endswith("ForSequenceClassification") for kind in kinds):
        return TrainedEnds(RESPONSES, f"a {kinds[0]}, which is read at the last token")
    if (Path(folder) / RESPONSES_FILE).is_file():
        return TrainedEnds(RESPONSES, f"its {RESPONSES_FILE} names whole responses")
    is_from_here = (Path(folder) / PROBLEMS_FILE).is_file()
    if not is_from_here and (row := row_by_name(name or folder)):
        return TrainedEnds(STEPS, f"{row} by its name")
    if any("ForProcessRewardModel" in kind for kind in kinds):
        return TrainedEnds(STEPS, f"a {kinds[0]}")
    if not is_from_here and config.num_labels == 2 and any(kind.endswith("ForTokenClassification") for kind in kinds):
        return TrainedEnds(STEPS, "two labels at every token, as TRL's PRMTrainer leaves it")
    return TrainedEnds(NOT_KNOWN, "nothing in its folder says it")
