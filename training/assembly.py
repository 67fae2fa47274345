"""The parts of a training run from its config: model, adapters, engine, objective; and the folders it leaves."""

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.example_view import of_each_kind, token_text, view
from data.loader import Loader
from data.training_problems import write_training_problems
from models.lora import PolicyWithoutAdapters, merge_adapter, write_bits
from runtime.distributed import device, is_main_rank, rank, world_size
from runtime.entrypoint import build
from runtime.manifest import write_folder
from runtime.schemas import TrainConfig
from training.deepspeed_engine import BadSettings, DeepSpeedEngine, tensor_parallel_size
from training.engine import Engine, TorchEngine
from training.guards import (
    check_amount,
    check_examples,
    check_held_out,
    check_targets,
    check_tokenizer,
    model_limits,
)
from training.loop import Loop

log = logging.getLogger("train")


def data_ranks(config: TrainConfig) -> tuple[int, int]:
    """(this rank's place, how many there are) among those that read different examples: the ranks over which tensor
    parallelism cuts a layer read the same ones."""
    size = tensor_parallel_size(config.deepspeed)
    return rank() // size, world_size() // size


def make_loader(config: TrainConfig, examples: Sequence[Any]) -> Loader:
    """This rank's batches of the examples."""
    sizes = (config.batch_size, config.micro_batch_size, config.seed)
    return Loader(examples, *sizes, *data_ranks(config), micro_batch_tokens=config.micro_batch_tokens)


def load_data(config: TrainConfig, tokenizer: Any) -> tuple[list[Any], list[Any]]:
    """Training and evaluation examples, past the guards; no evaluation examples where the config has none."""
    examples = load_examples(config, config.examples, tokenizer)
    eval_examples = load_examples(config, config.eval_examples, tokenizer) if config.eval_examples else []
    if eval_examples:
        check_held_out(examples, eval_examples, str(config.eval_examples.get("path")))
    check_amount(examples, config.batch_size)
    check_targets(examples, config.objective.get("hard_above"), str(config.examples.get("path")))
    if config.debug:
        show_examples([*examples, *eval_examples], tokenizer)
    return examples, eval_examples


def load_examples(config: TrainConfig, node: Any, tokenizer: Any) -> list[Any]:
    """The examples of one source, past the guards."""
    limits = model_limits(config.model["path"], tokenizer)
    check_tokenizer(tokenizer, limits)
    examples: list[Any] = build(node).load(tokenizer)
    return check_examples(examples, str(node.get("path", "examples")), limits, node.get("max_length"))


def show_examples(examples: Sequence[Any], tokenizer: Any) -> None:
    """Print one example of each kind, in colour on a terminal (unless NO_COLOR is set); on rank 0."""
    is_colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for example in of_each_kind(examples) if is_main_rank() else []:
        print(view(example, token_text(tokenizer), is_colour), end="\n\n", flush=True)


def make_engine(config: TrainConfig, model: Any) -> Engine:
    """DeepSpeed where the config has its JSON, else plain torch."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = build(config.optimizer, params=trained, lr=config.learning_rate)
    if not config.deepspeed:
        return TorchEngine(model, optimizer, device(), config.max_grad_norm)
    if config.lora and config.lora.get("bits") and config.deepspeed.get("zero_optimization", {}).get("stage") == 3:
        raise BadSettings(
            "lora.bits cannot be had with ZeRO stage 3, which cuts weights as they are: set deepspeed=zero2"
        )
    if config.lora and tensor_parallel_size(config.deepspeed) > 1:
        raise BadSettings("adapters cannot be had with tensor parallelism: set lora=none or deepspeed=zero3")
    size = config.micro_batch_size if not config.micro_batch_tokens else 1  # of its own books only: see start_step
    num_micro_batches = config.batch_size // (size * data_ranks(config)[1])
    return DeepSpeedEngine(
        model,
        optimizer,
        config.deepspeed,
        micro_batch_size=size,
        num_micro_batches=num_micro_batches,
        max_grad_norm=config.max_grad_norm,
        precision=config.precision,
    )


def make_model(config: TrainConfig) -> Any:
    """The model, with adapters where the config has them."""
    model = build(config.model)
    return (build(config.lora).wrap(model) if config.lora else model).to(device())


def make_objective(config: TrainConfig, policy: Any) -> Any:
    """The objective. Where adapters are trained, a reference of the policy's own path is the policy without them."""
    node = config.objective
    reference = node.get("reference")
    if not config.lora or not reference or reference.get("path") != config.model["path"]:
        return build(node)
    objective = build({**node, "reference": None})
    objective.reference = PolicyWithoutAdapters(policy)
    return objective


def save_model(loop: Loop, tokenizer: Any) -> None:
    """model/, a standard folder; with adapters also adapter/, from which model/ is merged. A model trained on steps
    says of which problems they were (`data.training_problems`)."""
    config, adapter = loop.config, loop.run_dir / "adapter"

    def write_adapter(folder: Path) -> None:
        loop.engine.save_model(folder)
        (folder / "README.md").unlink(missing_ok=True)  # peft's empty model card
        if rank() == 0:
            write_bits(folder, int(config.lora.get("bits", 0)))

    def write(folder: Path) -> None:
        if not config.lora:
            loop.engine.save_model(folder)
        elif rank() == 0:
            merge_adapter(adapter, lambda: build(config.model)).save_pretrained(folder)
        if rank() == 0:
            tokenizer.save_pretrained(folder)
            problems = {getattr(example, "problem_id", "") for example in loop.loader.examples} - {""}
            if problems:
                write_training_problems(folder, problems, config.model["path"])

    if config.lora:
        write_folder(adapter, write_adapter)
    write_folder(loop.run_dir / "model", write)
    log.info("saved %s/model", loop.run_dir)
