"""Whether a scorer's networks can read what is sampled: the policy's tokenizer, and what a reward model was trained on.

A head is read where the scorer reads it, at the ends of steps or of responses, whatever it was trained on, and gives
numbers either way. So one that was trained on the others is refused, as `prm/score_steps` and
`evaluation/score_responses` refuse it; one of other prompts, or one of which nothing is known, is warned of.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from espalier.data.training_layout import other_prompts
from espalier.models.frozen_reward import check_trained_ends
from espalier.models.hub_snapshot import local_model
from espalier.models.tokenizer_checks import check_same_tokenizer
from espalier.sampling.engine_arguments import has_gpu
from espalier.search.scorers.scorer import HoldsNetworks, Scorer

log = logging.getLogger(__name__)


def warn_of_cpu(paths: Iterable[str], remedy: str = "") -> None:
    """Warn of networks that score in this process, on the CPU, beside a GPU: that is the engine's of the policy."""
    if (names := ", ".join(paths)) and has_gpu():
        log.warning("%s scores in this process, on the CPU, which takes its time%s", names, remedy and f": {remedy}")


def check_networks(scorer: Scorer, tokenizer: Any, prompt_ids: Callable[[], Sequence[int]]) -> None:
    """Raise BadInput on a network of another tokenizer than the policy's, and on a reward model that was trained on
    responses and is read after steps (of a reward's, the reward does). `prompt_ids` gives a prompt of the search."""
    for path, ends in scorer.models().items() if isinstance(scorer, HoldsNetworks) else ():
        check_same_tokenizer(tokenizer, path, "scorer")
        if not ends:
            continue
        check_trained_ends(path, ends)
        if words := other_prompts(local_model(path), tokenizer, prompt_ids):
            log.warning("%s was trained on prompts that are %s, and those of this search are %s: search with prompts "
                        "like those that it was trained on", path, *words)  # fmt: skip
