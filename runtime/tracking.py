"""Metrics and progress: metrics.jsonl always, TensorBoard when asked, one live line on rank 0.

On a terminal progress is a bar; elsewhere a plain line every few seconds, with rate and time left.
"""

import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from runtime.ranks import is_main_rank


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
        self.fields = fields
        if self.bar is not None:
            self.bar.set_postfix(fields, refresh=False)
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
        shown = "".join(f"  {key} {value:.4g}" for key, value in self.fields.items())
        eta = f"{left:.0f} s left" if left < 36_000 else "time left unknown"
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
    """Appends `{"step": s, name: value, ...}` to metrics.jsonl on rank 0, and to TensorBoard when asked.

    After a resume, lines of steps that will be done again are dropped first.
    """

    def __init__(self, folder: Path, tensorboard: bool, first_step: int = 0):
        self.path = folder / "metrics.jsonl"
        self.writer: Any = None
        self.is_silent = not is_main_rank()
        if self.is_silent:
            return
        if self.path.is_file():
            lines = [line for line in self.path.read_text().split("\n") if line.endswith("}")]
            kept = [line for line in lines if json.loads(line)["step"] <= first_step]
            self.path.write_text("".join(line + "\n" for line in kept))
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One line for one step."""
        if self.is_silent:
            return
        values = {name: value for name, value in values.items() if math.isfinite(value)}  # JSON has no NaN
        row = {"step": step, **{name: round(float(value), 8) for name, value in values.items()}}
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if self.writer is not None:
            for name, value in values.items():
                self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush what TensorBoard holds."""
        if self.writer is not None:
            self.writer.close()
