"""Model folders that a run leaves: the policy on the way, and at the end all that it trained."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from espalier.rl.critic import Critic
from espalier.rl.ema import MovingAverage
from espalier.rl.policy import Policy
from espalier.runtime.distributed import is_main_rank
from espalier.runtime.manifest import write_folder

log = logging.getLogger(__name__)


def write_model(save: Callable[[Path], None], tokenizer: Any, folder: Path) -> None:
    """A standard model folder with its tokenizer, complete or absent; `save` is called on every rank."""

    def write(partial: Path) -> None:
        save(partial)
        if is_main_rank():
            tokenizer.save_pretrained(partial)

    write_folder(folder, write)


def save_models(
    policy: Policy, critic: Critic | None, average: MovingAverage | None, tokenizer: Any, run_dir: Path
) -> None:
    """`critic/`, `adapter/` and `model_ema/` where there is one, and last of all `model/`, with adapters merged: a run
    that has a model/ is finished."""
    if critic is not None:
        write_model(critic.engine.save_model, tokenizer, run_dir / "critic")
    if policy.has_adapters:
        write_folder(run_dir / "adapter", policy.save_adapter)
    if average is not None:
        weights = average.weights()
        write_model(lambda folder: policy.save_weights(weights, folder), tokenizer, run_dir / "model_ema")
    write_model(policy.save_model, tokenizer, run_dir / "model")
    log.info("saved %s/model", run_dir)
