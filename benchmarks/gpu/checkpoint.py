"""Checkpoints on a GPU: a network goes on with one engine after another, beside one that never stopped.

Fused AdamW keeps its number of steps on the device, ZeRO its flat tensors, offload them in the CPU's memory: a
checkpoint is written by each of them and read by the next. A Llama of 100M random parameters in bf16 (autocast), one
rank.
"""

import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.gpu.rows import Row
from benchmarks.gpu.training import SHAPES, write_model
from espalier.runtime.distributed import process_group
from espalier.runtime.entrypoint import compose_config
from espalier.runtime.schemas import TrainConfig
from espalier.training.engine import Engine
from espalier.training.loop_from_config import make_engine, make_model

ENGINES = ("none", "zero3", "zero2_offload", "zero1", "zero3_offload", "none")


def engine_of(name: str, folder: Path) -> Engine:
    """Return an engine of that name over the network in `folder`."""
    words = [f"model.path={folder}/model", "examples.path=none", "output_dir=none", f"deepspeed={name}",
             "precision=bf16", "optimizer.fused=true", "update.batch_size=1", "update.micro_batch_size=1"]  # fmt: skip
    config = compose_config(TrainConfig, "train", words)
    return make_engine(config, make_model(config))


def step(engine: Engine, number: int) -> None:
    """Take the optimizer step `number` on tokens of its own."""
    rng = torch.Generator().manual_seed(number)
    ids = torch.randint(3, 200, (1, 64), generator=rng).to(engine.device)
    with engine.computing_in("bf16"):
        loss = engine.model(input_ids=ids, labels=ids).loss
    engine.start_step(1)
    engine.backward(loss.float())
    engine.step(1e-3)


def weights_of(engine: Engine, folder: Path) -> dict[str, torch.Tensor]:
    """Return what the engine would save as a model."""
    folder.mkdir(parents=True)
    engine.save_model(folder)
    return load_file(folder / "model.safetensors")


def measure(is_rehearsal: bool, folder: Path) -> Iterator[Row]:
    """Hand one network from engine to engine."""
    write_model(folder / "model", SHAPES["tiny" if is_rehearsal else "100m"])
    with process_group(timeout_seconds=120, is_needed_alone=True):
        straight, engine = (engine_of("none", folder) for _ in range(2))
        for number in range(2):
            step(straight, number)
            step(engine, number)
        for hop, (before, name) in enumerate(pairwise(ENGINES)):
            written, began = folder / f"state-{hop}", time.perf_counter()
            written.mkdir()
            engine.save_state(written)
            seconds = [time.perf_counter() - began]
            engine, began = engine_of(name, folder), time.perf_counter()
            engine.load_state(written)
            seconds.append(time.perf_counter() - began)
            step(straight, 2 + hop)
            step(engine, 2 + hop)
            want, found = weights_of(straight, folder / f"straight-{hop}"), weights_of(engine, folder / f"handed-{hop}")
            gap = max(float((want[key].float() - found[key].float()).abs().max()) for key in want)
            yield Row(f"{before} to {name}: largest difference of a weight after a step", gap, "",
                      f"written in {seconds[0]:.1f} s, read in {seconds[1]:.1f} s")  # fmt: skip
