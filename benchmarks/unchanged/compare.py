"""What two runs leave behind, number by number: every tensor of their models, every number of metrics.jsonl.

Times, rates and memory are left out. A number that the newer commit alone writes has nothing to be compared with: its
name is listed and is no difference; one that only the older commit writes is a difference.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.unchanged.names import metrics_after

_NOT_COMPARED = re.compile(r"seconds|per_second|_gib")
MODELS = ("model", "critic")


@dataclass(frozen=True)
class Comparison:
    """What was compared; `differences` say in words where the two runs part (empty: bit for bit alike)."""

    num_tensors: int
    num_moved: int
    num_numbers: int
    differences: list[str] = field(default_factory=list)
    only_after: list[str] = field(default_factory=list)

    @property
    def is_identical(self) -> bool:
        """Whether anything was compared, training moved weights, and no bit differs."""
        return not self.differences and min(self.num_tensors, self.num_moved, self.num_numbers) > 0


def tensors_of(run: Path) -> dict[str, torch.Tensor]:
    """Read `folder/name` → weights of every model of a finished run; a tensor has the shape it was saved with."""
    found = {}
    for folder in MODELS:
        for path in sorted((run / folder).glob("*.safetensors")):
            found.update({f"{folder}/{name}": value for name, value in load_file(path).items()})
    return found


def is_same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Say whether two tensors of any shapes have the same shape, type and bits."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return torch.equal(*(value.contiguous().view(-1).view(torch.uint8) for value in (first, second)))


def metrics_of(run: Path) -> list[dict[str, float]]:
    """Read metrics.jsonl without times, rates and memory."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not _NOT_COMPARED.search(name)} for row in rows]


def _text(value: object) -> str:
    """Return the JSON text of a number: NaN equals itself, 1 and 1.0 do not."""
    return json.dumps(value)


def different_tensors(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> list[str]:
    """List the tensors, of any shapes, that differ or stand on one side only."""
    one_side = [f"{name}: on one side only" for name in sorted(before.keys() ^ after.keys())]
    both = [name for name in before if name in after]
    return [*one_side, *(name for name in both if not is_same(before[name], after[name]))]


def different_metrics(before: list[dict[str, float]], after: list[dict[str, float]]) -> tuple[list[str], list[str]]:
    """List (numbers that differ or went missing, names that only the newer rows have); rows stand in order."""
    if len(before) != len(after):
        return [f"metrics.jsonl: {len(before)} lines before, {len(after)} after"], []
    wrong, more = [], set()
    for line, (old, new) in enumerate(zip(before, after, strict=True), 1):
        named = metrics_after(old)
        more |= new.keys() - named.keys()
        for name, value in named.items():
            if _text(value) != _text(new.get(name)):
                wrong.append(f"metrics.jsonl:{line}: {name}: {value} before, {new.get(name, 'nothing')} after")
    return wrong, sorted(more)


def compare_runs(before: Path, after: Path, began_from: Path) -> Comparison:
    """Compare two finished runs; `began_from` is the model folder that both trained."""
    old, new = tensors_of(before), tensors_of(after)
    rows, newer = metrics_of(before), metrics_of(after)
    wrong, more = different_metrics(rows, newer)
    start = {f"model/{name}": value for path in began_from.glob("*.safetensors")
             for name, value in load_file(path).items()}  # fmt: skip
    num_moved = sum(name not in start or not is_same(value, start[name]) for name, value in new.items())
    return Comparison(len(old), num_moved, sum(map(len, rows)), [*different_tensors(old, new), *wrong], more)
