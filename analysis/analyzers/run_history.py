"""What any run of reinforcement learning leaves, read once for all analyzers: its lines of metrics by iteration, its
sampled rollouts by iteration.

    RUN/metrics.jsonl                       {"step", name: value}, docs/metrics.md
    RUN/samples/iteration-000012.jsonl      SampledRollout
    RUN/config.yaml                         the run's config; a run without one is taken as it is
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from espalier.data.jsonl import iter_rows, read_records
from espalier.data.records import BadInput, SampledRollout
from espalier.pipeline.evaluation.evaluation_inputs import named_paths
from espalier.runtime.run_dir import stored_config

Values = dict[str, float]


def named_folders(value: Any, setting: str) -> dict[str, str]:
    """Return name → folder of a setting: one folder, a pattern, a list of these (named by the folders' last names), or
    a mapping. Raises BadInput where there is none, or two have one name."""
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list | tuple):
        value = [path for item in value for path in (sorted(glob(item)) if has_magic(str(item)) else [item])]
    folders = named_paths(value, setting)
    if not folders:
        raise BadInput(f"{setting} names no folder: give one, a pattern, a list or a mapping of names to folders")
    for folder in folders.values():
        if not folder or not Path(folder).is_dir():
            raise BadInput(f"{setting}: '{folder}': no such folder: check the path")
    return folders


@dataclass(frozen=True)
class RunHistory:
    """`root`: the run directory of `main.py`."""

    root: Path

    @property
    def metrics(self) -> Path:
        """Numbers by iteration."""
        return self.root / "metrics.jsonl"

    def reward_models(self) -> list[str]:
        """List the models other than the policy that the run's credit is made by, as its config names them: what they
        were trained on was sampled before the run."""
        config = stored_config(self.root)
        own = (config.get("model") or {}).get("path")
        parts = (config.get(name) for name in ("advantage", "reward", "filter", "critic"))
        return sorted({path for part in parts for path in _paths(part) if path != own})

    def left_out_of_groups(self) -> int:
        """Return how many rollouts of each written group its samples leave out; 0 where the config does not say."""
        config = stored_config(self.root)
        written = (config.get("samples") or {}).get("rollouts_per_problem") or 0
        return max(0, int((config.get("rollout") or {}).get("group_size", 0)) - written) if written else 0

    def samples(self) -> list[Path]:
        """List the files of sampled rollouts, the first iteration first. Raises BadInput where there is none."""
        files = sorted(self.root.glob("samples/iteration-*.jsonl"))
        if not files:
            raise BadInput(f"{self.root}: holds no samples/iteration-*.jsonl: give the run directory of main.py, run "
                           "with samples.every=1")  # fmt: skip
        return files

    def read_samples(self) -> dict[int, list[SampledRollout]]:
        """Return iteration → its rollouts. Raises BadInput where all files are empty."""
        rows = [row for path in self.samples() for row in read_records(SampledRollout, path)]
        if not rows:
            raise BadInput(f"{self.root}/samples: no rollout in any file: run with samples.num_problems above 0")
        found: dict[int, list[SampledRollout]] = {}
        for row in rows:
            found.setdefault(row.iteration, []).append(row)
        return found

    def read_metrics(self) -> tuple[dict[int, Values], dict[int, Values]]:
        """Return (iteration from 1 → its numbers, updates done → the numbers of the evaluation behind them).

        Raises BadInput where there is no iteration or one is missing: nothing could be summed over them.
        """
        iterations: dict[int, Values] = {}
        evaluations: dict[int, Values] = {}
        for place, row in iter_rows(self.metrics):
            step = row.pop("step", None)
            if type(step) is not int or any(isinstance(value, bool) or not isinstance(value, int | float)
                                            for value in row.values()):  # fmt: skip
                raise BadInput(f"{place}: must hold a step (int) and numbers: give a metrics.jsonl that a run wrote")
            kind = evaluations if any(name.startswith("eval/") for name in row) else iterations
            kind[step] = {name: float(value) for name, value in row.items()}
        if not any("rollout/accuracy" in values for values in iterations.values()):
            raise BadInput(f"{self.metrics}: no iteration of reinforcement learning (rollout/accuracy) in it: give the "
                           "run directory of main.py")  # fmt: skip
        missing = set(range(1, max(iterations) + 1)) - set(iterations)
        if missing:
            raise BadInput(f"{self.metrics}: iteration {min(missing)} of {max(iterations)} is missing: costs cannot be "
                           "summed: run it again from a checkpoint before")  # fmt: skip
        return iterations, evaluations


def _paths(node: Any) -> Iterator[str]:
    """Yield every `path` within a node of a config."""
    if not isinstance(node, Mapping):
        return
    for name, value in node.items():
        if name == "path" and isinstance(value, str) and value:
            yield value
        yield from _paths(value)
