"""Metrics and progress: metrics.jsonl always, TensorBoard and W&B when asked, one live line on rank 0.

All of them have the same names. On a terminal progress is a bar; elsewhere a plain line every few seconds, with
rates, time left and memory.
"""

import dataclasses
import importlib.util
import json
import math
import resource
import secrets
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from espalier.runtime.entrypoint import BadConfig
from espalier.runtime.ranks import is_main_rank
from espalier.runtime.run_dir import code_commit
from espalier.runtime.schemas import TrackingConfig

WANDB_MODES = ("offline", "online")


def check_tracking(tracking: TrackingConfig) -> None:
    """Raise BadConfig where W&B is asked for and cannot be had: before a model is loaded, not after."""
    if tracking.wandb is None:
        return
    if tracking.wandb not in WANDB_MODES:
        raise BadConfig(f"tracking.wandb must be null, {' or '.join(WANDB_MODES)}, got '{tracking.wandb}'")
    if importlib.util.find_spec("wandb") is None:
        raise BadConfig(f"tracking.wandb={tracking.wandb} needs the package wandb, which is not installed: pip install "
                        "-r requirements-wandb.txt, or set tracking.wandb=null")  # fmt: skip


def peak_memory() -> dict[str, float]:
    """`rss_gib`: the most memory this process has had, in GiB; with a GPU `gpu_gib`: the most its tensors took."""
    found = {"rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}  # Linux counts KiB
    torch = sys.modules.get("torch")  # a program that samples from a server does without
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        found["gpu_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return found


def clock_time(seconds: float) -> str:
    """Return `42 s`, `3:05` (minutes), `2:03:05` (hours), `4 d 2:03:05`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if not hours and not days:
        return f"{minutes}:{rest:02}"
    return (f"{days} d " if days else "") + f"{hours}:{minutes:02}:{rest:02}"


class Progress:
    """`with Progress("train", total, "step") as progress: progress.update(done, loss=0.3)`."""

    def __init__(self, name: str, total: int, unit: str, initial: int = 0, line_every_seconds: float = 10.0):
        self.name, self.total, self.unit = name, total, unit
        self.done, self.initial = initial, initial
        self.line_every_seconds = line_every_seconds
        self.started = self.last_line = time.monotonic()
        self.fields: dict[str, float] = {}
        self.is_silent = not is_main_rank()
        is_terminal = sys.stderr.isatty() and not self.is_silent
        self.bar = tqdm(total=total, desc=name, unit=unit, initial=initial) if is_terminal else None

    def update(self, done: int, **fields: float) -> None:
        """`done` in all, not since the last call; `fields` are shown behind the rate."""
        self.fields = {name.replace("_per_second", "/s"): value for name, value in fields.items()}
        if self.bar is not None:
            self.bar.set_postfix({**self.fields, **peak_memory()}, refresh=False)
            self.bar.update(done - self.done)
        self.done = done
        now = time.monotonic()
        if self.bar is None and not self.is_silent and now - self.last_line >= self.line_every_seconds:
            self.last_line = now
            self._print_line()

    def extend(self, total: int) -> None:
        """There is more to do than was known."""
        self.total = total
        if self.bar is not None:
            self.bar.total = total

    def _print_line(self) -> None:
        seconds = time.monotonic() - self.started
        rate = (self.done - self.initial) / max(seconds, 1e-9)
        left = (self.total - self.done) / rate if rate > 0 else float("inf")
        shown = "".join(f"  {key} {value:.4g}" for key, value in {**self.fields, **peak_memory()}.items())
        eta = f"{clock_time(left)} left" if math.isfinite(left) else "time left unknown"
        print(f"{self.name}: {self.done}/{self.total} {self.unit}s  {rate:.3g}/s  {eta}{shown}", file=sys.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.close()
        elif not self.is_silent and self.done > self.initial:
            self._print_line()


class Metrics:
    """Appends `{"step": s, name: value, ...}` to metrics.jsonl on rank 0, and to TensorBoard and W&B when asked.

    After a resume, lines of steps that will be done again are dropped first; W&B gets such steps again.
    `config` is the run's, for W&B.
    """

    def __init__(self, folder: Path, tracking: TrackingConfig, first_step: int = 0, config: Any = None):
        self.path = folder / "metrics.jsonl"
        self.writer: Any = None
        self.wandb: Any = None
        self.is_silent = not is_main_rank()
        if self.is_silent:
            return
        if self.path.is_file():
            lines = [line for line in self.path.read_text().split("\n") if line.endswith("}")]
            kept = [line for line in lines if json.loads(line)["step"] <= first_step]
            partial = self.path.with_suffix(".partial")
            partial.write_text("".join(line + "\n" for line in kept))
            partial.replace(self.path)  # a kill here loses no line
        if tracking.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)
            settings = json.dumps(dataclasses.asdict(config), indent=1, default=str) if config is not None else ""
            self.writer.add_text("settings", f"commit {code_commit()}\n\n```\n{settings}\n```", first_step)
        if tracking.wandb is not None:
            self.wandb = _open_wandb(folder, tracking, config)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One line for one step."""
        if self.is_silent:
            return
        values = {name: value for name, value in values.items() if math.isfinite(value)}  # JSON has no NaN
        row = {"step": step, **{name: as_written(float(value)) for name, value in values.items()}}
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if self.writer is not None:
            for name, value in values.items():
                self.writer.add_scalar(name, value, step)
        if self.wandb is not None:
            self.wandb.log(dict(values), step=step)

    def close(self) -> None:
        """Flush what TensorBoard and W&B hold."""
        if self.writer is not None:
            self.writer.close()
        if self.wandb is not None:
            self.wandb.finish()


def as_written(value: float) -> float:
    """Return a number as metrics.jsonl holds it: with nine digits, whole ones with all."""
    return value if value.is_integer() else float(f"{value:.9g}")


def _open_wandb(folder: Path, tracking: TrackingConfig, config: Any) -> Any:
    """Return the W&B run of this run directory, the same one after every start: its id is kept in `wandb_id`. Its files
    are in `wandb/`; `wandb sync FOLDER/wandb/offline-run-*` sends what was written offline."""
    check_tracking(tracking)
    import wandb

    id_path = folder / "wandb_id"
    if not id_path.is_file():
        id_path.write_text(secrets.token_hex(8) + "\n")
    return wandb.init(
        project=tracking.project,
        name=folder.resolve().name,
        id=id_path.read_text().strip(),
        resume="allow",
        mode=tracking.wandb,
        dir=str(folder),
        config=dataclasses.asdict(config) if config is not None else None,
        tags=[code_commit()],
        settings=wandb.Settings(silent=True, console="off"),
    )
