"""This project's side: `trainer_base_ds_mul.py` itself, run in this process with the settings a user writes.

    python -m benchmarks.training.product FOLDER sft

The program is run whole; only `Loop.train_step` is watched. A run is timed from the begin of its first step to the
end of its last one, logging between them included. What the loop does before its first step (reference log-probs
that are computed once, say) is `prepare_seconds`, all of it.
"""

import argparse
import json
import logging
import runpy
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.processes.forked import ROOT
from benchmarks.processes.sides import serve
from benchmarks.training.clock import Moment, StepClock
from benchmarks.training.corpus import read_ids, tokens_of
from benchmarks.training.settings import BETAS, DPO_BETA, SETTINGS, read_settings
from espalier.training.loop import Loop

PROGRAM = "trainer_base_ds_mul.py"
# The settings of each kind that are chosen for speed; all else is given by the comparison.
FAST = {
    "sft": ["update.micro_batch_size=16", "model.attention=eager"],
    "dpo": ["update.micro_batch_size=8", "model.attention=eager", "reference_logprobs=precomputed"],
    "prm": ["update.micro_batch_size=8", "model.attention=eager"],
}


def given(folder: Path, kind: str) -> list[str]:
    """Return what the comparison asks for: model, data, objective, batch, learning rate."""
    settings = read_settings(folder, kind)
    own = {
        "sft": [f"model.path={folder}/policy"],
        "dpo": ["examples=preferences", "objective=dpo", f"objective.beta={DPO_BETA}", f"model.path={folder}/policy"],
        "prm": [
            *("examples=step_values", "objective=process_reward", "objective.hard_above=0.5"),
            *("model=process_reward", f"model.path={folder}/prm", "model.num_labels=null"),
        ],
    }
    return [
        *own[kind],
        f"examples.path={folder}/{kind}.jsonl",
        "examples.max_length=1024",
        f"update.batch_size={settings.batch_size}",
        f"update.learning_rate={settings.learning_rate}",
        "update.schedule=constant",
        "update.warmup_steps=0",
        f"optimizer.betas=[{BETAS[0]},{BETAS[1]}]",
        f"precision={settings.precision}",
    ]


class Watch:
    """What `Loop.train_step` did and when."""

    def __init__(self) -> None:
        self.began = Moment()
        self.step = StepClock()
        self.values: list[dict[str, float]] = []
        self.step_ids: list[list[str]] = []

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Watch while the block runs."""
        run, train_step = Loop.run, Loop.train_step

        def watched_run(loop: Loop) -> None:
            self.began = Moment()
            run(loop)

        def watched_step(loop: Loop, step: int) -> dict[str, float]:
            self.step_ids.append([example.id for example in loop.loader.step_examples(step)])
            if not self.values:
                self.step.start()
            self.values.append(train_step(loop, step))
            self.step.end()
            return self.values[-1]

        setattr(Loop, "run", watched_run)  # noqa: B010
        setattr(Loop, "train_step", watched_step)  # noqa: B010
        try:
            yield
        finally:
            setattr(Loop, "run", run)  # noqa: B010
            setattr(Loop, "train_step", train_step)  # noqa: B010


class Product:
    """One kind; `run` trains from the initial weights."""

    def __init__(self, folder: Path, kind: str, overrides: list[str]):
        self.settings = [*given(folder, kind), *FAST[kind], *overrides]
        self.tokens = {row["id"]: tokens_of(row) for row in read_ids(folder, kind)}

    def run(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return `max_steps` steps of data order `seed`: seconds, losses, examples of each step, tokens without
        padding."""
        watch = Watch()
        with tempfile.TemporaryDirectory() as scratch, watch.attached():
            length = [f"max_steps={question['max_steps']}", f"seed={question.get('seed', 0)}"]
            sys.argv = [PROGRAM, "-cn", "train", *self.settings, *length, f"output_dir={scratch}/run"]
            try:
                runpy.run_path(str(ROOT / PROGRAM), run_name="__main__")
            except SystemExit as stop:
                if stop.code:
                    raise
        return {
            **watch.step.result(),
            "prepare_seconds": watch.step.moments[0].wall - watch.began.wall,
            "prepare_cpu_seconds": watch.step.moments[0].cpu - watch.began.cpu,
            "losses": [values["loss"] for values in watch.values],
            "step_ids": watch.step_ids,
            "tokens": sum(self.tokens[name] for step in watch.step_ids for name in step),
        }


def main() -> None:
    """Serve runs; `key=value` arguments are settings beside `FAST`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("kind", choices=list(SETTINGS))
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--once", type=int, default=0, help="do one run of so many steps, print it, end")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    product = Product(arguments.folder, arguments.kind, arguments.overrides)
    if arguments.once:
        print(json.dumps({**product.run({"max_steps": arguments.once}), "step_ids": None}))
    else:
        serve(product.run)


if __name__ == "__main__":
    main()
