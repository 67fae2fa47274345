"""`kill -9` a program at random moments, start it again until it ends, and compare what it leaves with an uninterrupted
run's: what `benchmarks.training.training_kills` and `benchmarks.rl.rl_kills` have in common.

Kinds of runs take turns. A run is killed and started again until it ends; then the next begins, until there were as
many kills as asked for. Every checkpoint that a kill leaves is read through. Moments are drawn evenly over the length
of an uninterrupted run, the second of its kind (the first warms caches, and both must leave the same bits).
"""

import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes.forked import exit_code, start_program
from espalier.runtime.manifest import find_damage
from espalier.training.checkpoint import checkpoints


@dataclass(frozen=True)
class Killed:
    """`program` with `settings` and those of each kind, in runs below `folder`; `digest_of` a finished run."""

    program: str
    settings: Sequence[str]
    kinds: Mapping[str, Sequence[str]]
    digest_of: Callable[[Path], str]
    folder: Path

    @property
    def log(self) -> Path:
        """What all runs print."""
        return self.folder / "runs.log"

    def _settings(self, kind: str, run: Path) -> list[str]:
        return [*self.settings, *self.kinds[kind], f"output_dir={run}"]

    def measure(self, num_kills: int, seed: int) -> tuple[Counter[str], list[int]]:
        """Return what was counted, and the newest checkpoint at each kill."""
        rng = random.Random(seed)
        straight: dict[str, str] = {}
        seconds: dict[str, float] = {}
        for kind in self.kinds:
            straight[kind], _ = self._uninterrupted(kind, "first")
            again, seconds[kind] = self._uninterrupted(kind, "second")
            if again != straight[kind]:
                raise SystemExit(f"two uninterrupted runs of '{kind}' differ: kills cannot be judged by them")
        counts: Counter[str] = Counter()
        steps: list[int] = []
        while counts["kills"] < num_kills or counts["runs"] < len(self.kinds):
            kind = list(self.kinds)[counts["runs"] % len(self.kinds)]
            run = self.folder / f"killed-{counts['runs']}"
            counts += self._until_done(kind, run, steps, rng, seconds[kind], num_kills - counts["kills"])
            counts["runs"] += 1
            counts["identical"] += self.digest_of(run) == straight[kind]
            print(f"{counts['kills']} kills, {counts['runs']} runs, {counts['identical']} identical", file=sys.stderr)
            shutil.rmtree(run)
        return counts, steps

    def _uninterrupted(self, kind: str, name: str) -> tuple[str, float]:
        """Return (digest, seconds) of a run that nothing disturbs."""
        started, run = time.monotonic(), self.folder / f"{kind}-{name}"
        code = exit_code(start_program(self.program, self._settings(kind, run), self.log))
        if code:
            raise SystemExit(f"the uninterrupted run ended with exit code {code}: see {self.log}")
        return self.digest_of(run), time.monotonic() - started

    def _until_done(
        self, kind: str, run: Path, steps: list[int], rng: random.Random, seconds: float, kills_left: int
    ) -> Counter[str]:
        """Make one run, killed at most `kills_left` times; what was counted. Raises where it ends with an error."""
        counts: Counter[str] = Counter()
        while True:
            pid = start_program(self.program, self._settings(kind, run), self.log)
            if counts["kills"] < kills_left:
                time.sleep(rng.uniform(0.0, seconds))
                os.kill(pid, signal.SIGKILL)
            code = exit_code(pid)
            if code == 0:
                return counts
            if code != -signal.SIGKILL:
                raise SystemExit(f"a run ended with exit code {code}: see {self.log}")
            found = checkpoints(run)
            counts["kills"] += 1
            counts["kills_in_a_save"] += bool(list(run.glob("checkpoints/*.partial")))
            counts["damaged"] += sum(bool(find_damage(path)) for path in found)
            steps.append(int(found[-1].name.removeprefix("step-")) if found else 0)


def figures(counts: Counter[str], exact: str, whole: str, how: str) -> dict[str, Any]:
    """`exact`: the share of runs that ended with the same bits; `whole`: damaged checkpoints that were seen."""
    share, damaged = counts["identical"] / counts["runs"], counts["damaged"]
    same = {"value": share, "low": share, "high": share, "unit": "share", "goal": 1.0, "better": "higher"}
    none = {"value": damaged, "low": damaged, "high": damaged, "unit": "checkpoints", "goal": 0, "better": "lower"}
    return {exact: {**same, "met": share == 1.0, "how": how}, whole: {**none, "met": damaged == 0, "how": how}}
