"""The parts of a training run from its config: model, adapters, engine, objective; and the folders it leaves."""

import logging
import os
import sys
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from espalier.data.batches.loader import Loader
from espalier.data.batches.packing import Layout
from espalier.data.examples.example_view import of_each_kind, token_text, view
from espalier.data.examples.stored_examples import StoredExamples, longest_of
from espalier.data.trained_on import copy_trained_on
from espalier.models.in_parts import whole_shape
from espalier.models.lora import merge_adapter, write_bits
from espalier.models.packing_check import choose_layout, is_cut, packing_of
from espalier.models.tokenizer_checks import check_stop_tokens, check_tokenizer, model_limits
from espalier.models.without_adapters import PolicyWithoutAdapters
from espalier.runtime.base_model import base_of_run, check_base, write_base
from espalier.runtime.distributed import device, is_main_rank, rank, world_size
from espalier.runtime.entrypoint import build
from espalier.runtime.manifest import write_folder
from espalier.runtime.schemas import TrainConfig
from espalier.training.deepspeed_engine import (
    BadSettings,
    DeepSpeedEngine,
    cut_over_ranks,
    cuts_weights,
    loading,
    tensor_parallel_size,
)
from espalier.training.engine import Engine, TorchEngine
from espalier.training.example_cache import EVALUATION, TRAINING, stored_examples
from espalier.training.explain import warn_of_training_memory
from espalier.training.guards import (
    check_amount,
    check_evaluations,
    check_held_out,
    check_limits,
    check_margins,
    check_rate,
    check_targets,
)
from espalier.training.loop import Loop
from espalier.training.step_in_backward import StepInBackwardEngine, check_step_in_backward
from espalier.training.trained_on import check_benchmarks, write_trained_on

log = logging.getLogger("train")


def data_ranks(config: TrainConfig) -> tuple[int, int]:
    """Return (this rank's place, how many there are) among those that read different examples: the ranks over which
    tensor parallelism cuts a layer read the same ones."""
    size = tensor_parallel_size(config.deepspeed)
    return rank() // size, world_size() // size


def make_loader(config: TrainConfig, examples: Sequence[Any]) -> Loader:
    """Return this rank's batches of the examples."""
    sizes = (config.update.batch_size, config.update.micro_batch_size, config.seed)
    return Loader(examples, *sizes, *data_ranks(config), micro_batch_tokens=config.update.micro_batch_tokens)


def load_data(config: TrainConfig, tokenizer: Any) -> tuple[StoredExamples, Sequence[Any]]:
    """Return training and evaluation examples, past the guards; no evaluation examples where the config has none."""
    check_rate(config.update.learning_rate)
    check_stop_tokens(tokenizer, config.model["path"])
    examples = load_examples(config, config.examples, tokenizer)
    eval_examples: Sequence[Any] = []
    if config.eval_examples:
        eval_examples = load_examples(config, config.eval_examples, tokenizer, EVALUATION)
    if eval_examples:
        check_held_out(examples, eval_examples, str(config.eval_examples.get("path")))
    check_evaluations(config.evaluation.every, eval_examples)
    check_amount(examples, config.update.batch_size)
    check_targets(examples, config.objective.get("hard_above"), str(config.examples.get("path")))
    check_margins(examples, config.objective, config.examples, str(config.examples.get("path")))
    check_benchmarks(examples, config.held_out_benchmarks, tokenizer, str(config.examples.get("path", "examples")))
    if config.debug:
        show_examples(chain(examples, eval_examples), tokenizer)
    return examples, eval_examples


def load_examples(config: TrainConfig, node: Any, tokenizer: Any, role: str = TRAINING) -> StoredExamples:
    """Return the examples of one source, in its place in the config (`stored_examples`), past the guards."""
    limits = model_limits(config.model["path"], tokenizer)
    check_tokenizer(tokenizer, limits)
    examples = stored_examples(node, tokenizer, role)
    check_limits(examples, str(node.get("path", "examples")), limits, node.get("max_length"))
    return examples


def show_examples(examples: Iterable[Any], tokenizer: Any) -> None:
    """Print one example of each kind, in colour on a terminal (unless NO_COLOR is set); on rank 0."""
    is_colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for example in of_each_kind(examples) if is_main_rank() else []:
        print(view(example, token_text(tokenizer), is_colour), end="\n\n", flush=True)


def make_engine(config: TrainConfig, model: Any) -> Engine:
    """Make a DeepSpeed engine where the config has its JSON, else one of plain torch.

    Raises BadSettings where its adapters cannot go with ZeRO-3 (quantised ones) or with tensor parallelism, and
    BadInput where steps in the backward pass cannot be had (`check_step_in_backward`).
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = build(config.optimizer, params=trained, lr=config.update.learning_rate)
    check_step_in_backward(config, world_size())
    if config.update.step_in_backward:
        return StepInBackwardEngine(model, optimizer, device())
    if not config.deepspeed:
        return TorchEngine(model, optimizer, device(), config.update.max_grad_norm)
    if config.lora and config.lora.get("bits") and config.deepspeed.get("zero_optimization", {}).get("stage") == 3:
        raise BadSettings(
            "lora.bits cannot be had with ZeRO stage 3, which cuts weights as they are: set deepspeed=zero2"
        )
    if config.lora and tensor_parallel_size(config.deepspeed) > 1:
        raise BadSettings("adapters cannot be had with tensor parallelism: set lora=none or deepspeed=zero3")
    # of its own books only: see start_step
    size = config.update.micro_batch_size if not config.update.micro_batch_tokens else 1
    num_micro_batches = config.update.batch_size // (size * data_ranks(config)[1])
    return DeepSpeedEngine(
        model,
        optimizer,
        config.deepspeed,
        micro_batch_size=size,
        num_micro_batches=num_micro_batches,
        max_grad_norm=config.update.max_grad_norm,
        precision=config.precision,
    )


def make_model(config: TrainConfig) -> Any:
    """Return the model, with adapters where the config has them. How its rows may be computed together is measured
    here, on weights of full precision, before adapters round them; by the engine where weights are cut. Raises
    BadSettings where adapters of a body are asked for that is frozen."""
    if config.lora and config.model.get("trains", "all") != "all":
        raise BadSettings(
            "adapters train the body, and model.trains=head freezes it: set lora=none or model.trains=all"
        )
    # The magnitudes of DoRA are made of whole weights.
    is_whole = bool(config.lora and config.lora.get("is_dora"))
    with loading(None if is_whole else config.deepspeed):
        model = build(config.model)
    if not (config.lora and config.lora.get("bits")):
        model = model.to(device())
    if not is_cut(model):
        packing_of(model)
    return (build(config.lora).wrap(model) if config.lora else model).to(device())


def make_layout(config: TrainConfig, objective: Any, model: Any, longest: int, pad_id: int) -> Layout:
    """Return how batches lie in memory: as the config says, which policy and reference have to be able to take; `auto`
    is what both can. `longest`: tokens of the longest example. Raises BadAttention where packed rows are forced on a
    network that mixes them up."""
    reference = getattr(objective, "reference", None)
    networks = [model, *([reference.to(device())] if reference is not None else [])]
    kinds = {choose_layout(one, config.update.layout, longest) for one in networks}
    return Layout("padded" if "padded" in kinds else kinds.pop(), pad_id)


def make_loop(
    config: TrainConfig, tokenizer: Any, examples: StoredExamples, eval_examples: Sequence[Any]
) -> tuple[Loop, str]:
    """Return (the loop with model, engine, objective and loaders, its sizes in words); nothing is written yet. Warns
    where the run does not fit the GPU by its memory plan."""
    warn_of_training_memory(config, examples, world_size())
    loader = make_loader(config, examples)
    eval_loader = make_loader(config, eval_examples) if eval_examples else None
    model = make_model(config)
    numbers = [(whole_shape(parameter).numel(), parameter.requires_grad) for parameter in model.parameters()]
    engine = make_engine(config, model)
    objective = make_objective(config, engine.model)
    longest = longest_of(examples, eval_examples)
    layout = make_layout(config, objective, engine.model, longest, int(tokenizer.pad_token_id))
    loop = Loop(config, engine, objective, loader, eval_loader, layout, Path(config.output_dir))
    trained, total = sum(count for count, is_trained in numbers if is_trained), sum(row[0] for row in numbers)
    return loop, f"{total / 1e6:.2f}M parameters" + (f" ({trained:,} trained)" if trained < total else "")


def make_objective(config: TrainConfig, policy: Any) -> Any:
    """Return the objective. Where adapters are trained, a reference of the policy's own path is the policy without
    them."""
    node = config.objective
    reference = node.get("reference")
    if not config.lora or not reference or reference.get("path") != config.model["path"]:
        with loading(config.deepspeed, config.precision):
            objective = build(node)
        if reference and cuts_weights(config.deepspeed):
            objective.reference = cut_over_ranks(objective.reference, config.deepspeed, config.precision)
        return objective
    objective = build({**node, "reference": None})
    objective.reference = PolicyWithoutAdapters(policy)
    return objective


def save_model(loop: Loop, tokenizer: Any) -> None:
    """model/, a standard folder; with adapters also adapter/, from which model/ is merged. Both say what was trained on
    (`data.trained_on`). Raises BadConfig, with adapter/ saved, where the base is no longer the one that it was trained
    on."""
    config, adapter = loop.config, loop.run_dir / "adapter"
    trained_on = base_of_run(loop.run_dir)

    def write_adapter(folder: Path) -> None:
        loop.engine.save_model(folder)
        (folder / "README.md").unlink(missing_ok=True)  # peft's empty model card
        if rank() == 0:
            write_bits(folder, int(config.lora.get("bits", 0)))
            write_base(folder, trained_on)
            write_trained_on(folder, loop.loader.examples, tokenizer, config.model)

    def write(folder: Path) -> None:
        if not config.lora:
            loop.engine.save_model(folder)
            if rank() == 0:
                write_trained_on(folder, loop.loader.examples, tokenizer, config.model)
        elif rank() == 0:
            check_base(trained_on, config.model["path"], adapter)
            merge_adapter(adapter, lambda: build(config.model)).save_pretrained(folder)
            copy_trained_on(adapter, folder)
        if rank() == 0:
            tokenizer.save_pretrained(folder)

    if config.lora:
        write_folder(adapter, write_adapter)
    write_folder(loop.run_dir / "model", write)
    log.info("saved %s/model", loop.run_dir)
