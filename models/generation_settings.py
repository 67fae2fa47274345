"""How a model's folder says that texts are drawn from it, in a form that transformers writes again.

It reads folders whose generation settings contradict themselves (`temperature` without `do_sample`: Vicuna, older
Llamas), and refuses to write them: a model that was trained from one could not be saved.
"""

import copy
import logging
import re
from collections.abc import Iterator
from typing import Any

from transformers import GenerationConfig

log = logging.getLogger(__name__)

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def make_savable(model: Any, path: str) -> Any:
    """Return the model, its generation settings changed as little as lets them be written, with a line that says so."""
    settings = getattr(model, "generation_config", None)
    if settings is None or not (problem := _problem(settings)):
        return model
    model.generation_config, how = next((one, how) for one, how in _amended(settings) if not _problem(one))
    log.warning("%s: its generation settings contradict themselves (%s): a model trained from it is saved %s", path,
                problem, how)  # fmt: skip
    return model


def _amended(settings: GenerationConfig) -> Iterator[tuple[GenerationConfig, str]]:
    """Return (settings, what was done to them), the gentlest change first."""
    kept = copy.deepcopy(settings)
    if (kept.pad_token_id or 0) < 0:
        kept.pad_token_id = None
    yield kept, "without pad_token_id"
    if kept.do_sample is None and kept.temperature != 0:
        sampled = copy.deepcopy(kept)
        sampled.do_sample = True
        yield sampled, "with do_sample=true"
    for name in _SAMPLING:
        setattr(kept, name, None)
    yield kept, f"without {', '.join(_SAMPLING[:3])} and the like"
    named = copy.deepcopy(kept)
    flags = [name for name in _flags(named) if hasattr(named, name)]
    for name in flags:
        setattr(named, name, None)
    yield named, f"without {', '.join(flags)}"
    yield GenerationConfig(**{name: getattr(kept, name) for name in _TOKENS}), "with its token ids alone"


def _problem(settings: GenerationConfig) -> str:
    """Return what keeps the settings from being written, in a few words; "" where nothing does."""
    return ", ".join(_flags(settings))


def _flags(settings: GenerationConfig) -> list[str]:
    """Return the names of the settings that are complained of, or the complaint where it names none."""
    try:
        settings.validate(strict=True)
    except ValueError as error:
        return re.findall(r"- `(\w+)`", str(error)) or [str(error).split("\n")[0][:200]]
    return []
