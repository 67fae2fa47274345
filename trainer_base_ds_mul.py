"""Train one model on a fixed dataset: SFT, process reward models, DPO and step-DPO.

    python trainer_base_ds_mul.py -cn exp/sft/word_arithmetic output_dir=experiments/sft
    torchrun --nproc_per_node 2 trainer_base_ds_mul.py -cn ... deepspeed=zero2
    python trainer_base_ds_mul.py -cn ... lora=dora resume=step-40

The run directory holds config.yaml, metrics.jsonl, checkpoints/ and, last of all, model/: a run with a
model/ is finished and is not done again. SIGTERM saves and exits 143; the same command goes on.
"""

import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from data.loader import Loader
from models.load import load_tokenizer
from models.lora import PolicyWithoutAdapters, merge_adapter
from runtime.distributed import barrier, device, process_group, rank, world_size
from runtime.entrypoint import BadConfig, build, entrypoint
from runtime.life import exclusive
from runtime.logs import set_up_logging
from runtime.run_dir import check_run_dir, is_finished, open_run_dir
from runtime.schemas import TrainConfig
from training import checkpoint
from training.deepspeed_engine import DeepSpeedEngine
from training.engine import Engine, TorchEngine
from training.loop import Loop

log = logging.getLogger("train")


def make_engine(config: TrainConfig, model: Any) -> Engine:
    """DeepSpeed where the config has its JSON, else plain torch."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = build(config.optimizer, params=trained, lr=config.learning_rate)
    if not config.deepspeed:
        return TorchEngine(model, optimizer, device(), config.max_grad_norm)
    num_micro_batches = config.batch_size // (config.micro_batch_size * world_size())
    return DeepSpeedEngine(
        model,
        optimizer,
        config.deepspeed,
        micro_batch_size=config.micro_batch_size,
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


@entrypoint(TrainConfig, config_name="train")
def main(config: TrainConfig) -> None:
    """Build everything, train, save the model."""
    set_up_logging()
    run_dir = check_run_dir(config.output_dir, config)
    if is_finished(run_dir, config):
        if config.resume not in ("auto", "latest"):
            raise BadConfig(f"{run_dir} is finished: choose another output_dir to go on from resume={config.resume}")
        log.info("%s is finished: %s/model", run_dir, run_dir)
        return
    torch.manual_seed(config.seed)
    lock = exclusive(run_dir) if rank() == 0 else nullcontext()
    with lock, process_group(is_needed_alone=bool(config.deepspeed)):
        tokenizer = load_tokenizer(config.model["path"])
        examples = build(config.examples).load(tokenizer)
        sizes = (config.batch_size, config.micro_batch_size, config.seed, rank(), world_size())
        loader = Loader(examples, *sizes)
        eval_loader = Loader(build(config.eval_examples).load(tokenizer), *sizes) if config.eval_examples else None
        model = make_model(config)
        numbers = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
        engine = make_engine(config, model)
        objective = make_objective(config, engine.model)
        open_run_dir(config.output_dir, config)  # only now: a mistake above leaves nothing behind
        set_up_logging(run_dir / "run.log")
        loop = Loop(config, engine, objective, loader, eval_loader, int(tokenizer.pad_token_id), run_dir)
        trained, total = sum(count for count, is_trained in numbers if is_trained), sum(row[0] for row in numbers)
        share = f" ({trained:,} trained)" if trained < total else ""
        log.info("%s: %d examples, %d steps, %.2fM parameters%s", run_dir, len(examples), loop.max_steps,
                 total / 1e6, share)  # fmt: skip
        loop.run()
        _save_model(loop, tokenizer)
        barrier()


def _save_model(loop: Loop, tokenizer: Any) -> None:
    """model/, a standard folder; with adapters also adapter/, from which model/ is merged."""
    config, adapter = loop.config, loop.run_dir / "adapter"

    def write_adapter(folder: Path) -> None:
        loop.engine.save_model(folder)
        (folder / "README.md").unlink(missing_ok=True)  # peft's empty model card

    def write(folder: Path) -> None:
        if not config.lora:
            loop.engine.save_model(folder)
        elif rank() == 0:
            merge_adapter(adapter, lambda: build(config.model)).save_pretrained(folder)
        if rank() == 0:
            tokenizer.save_pretrained(folder)

    if config.lora:
        checkpoint.write_folder(adapter, write_adapter)
    checkpoint.write_folder(loop.run_dir / "model", write)
    log.info("saved %s/model", loop.run_dir)


if __name__ == "__main__":
    main()
