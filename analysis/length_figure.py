"""Problem, Demonstration or PreferencePair → how long its texts are in tokens, by source, as an SVG file that stands
alone.

    python run_stage.py -cn analysis/draw_lengths input=mixed.jsonl stage.tokenizer=MODEL output=lengths.svg

A problem's prompt is written by `stage.template`; a demonstration has a prompt and a completion, a pair a prompt and
two sides. All are counted as text, by `stage.tokenizer`. The source of a problem is `info["subject"]`; that of another
row is the name in `X.statistics.json` that begins its id. problems/mix_datasets writes both. Without them all rows are
of one source.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from espalier.analysis.charts import NUM_SERIES, Axis, dashes, frame
from espalier.analysis.curve_figure import STYLE
from espalier.analysis.markup import Markup, join, tag
from espalier.data.jsonl import read_records
from espalier.data.prompts import PromptTemplate
from espalier.data.records import BadInput, Demonstration, PreferencePair, Problem
from espalier.models.tokenizer import load_tokenizer
from espalier.pipeline.stage import StageContext

_NUM_BINS, _WIDTH, _HEIGHT, _LEFT = 30, 760, 300, 64
_ALL = "all"  # the source of rows that name none
_TEXTS: dict[str, tuple[type[Demonstration | PreferencePair], tuple[str, ...]]] = {
    "completion": (Demonstration, ("prompt", "completion")),
    "chosen": (PreferencePair, ("prompt", "chosen", "rejected")),
}
"""A key that only such rows have → their kind, the fields that are counted."""
Lengths = dict[str, list[int]]
"""Source → number of tokens of each of its texts."""


@dataclass(frozen=True)
class DrawLengths:
    """One histogram per text (prompt, completion, side of a pair), one outline per source, all on common axes of 30
    bins."""

    tokenizer: str
    template: PromptTemplate = field(default_factory=PromptTemplate)

    def inputs(self) -> list[str]:
        """None beside the rows."""
        return []

    def run(self, input_path: str, context: StageContext) -> str:
        """Return the figure; lowest, mean and highest number of tokens go to the counts. Raises BadInput on a file
        without rows."""
        texts = self._texts(input_path)
        tokenizer = load_tokenizer(self.tokenizer)
        lengths = {name: count_tokens(rows, tokenizer) for name, rows in texts.items()}
        for name, by_source in lengths.items():
            for source, numbers in by_source.items():
                mean = sum(numbers) / len(numbers)
                spread = f"{min(numbers)} to {max(numbers)}, mean {mean:.1f}, n {len(numbers)}"
                context.counts[f"{name}/{source}"] = spread
        return f"{figure(lengths)}\n"

    def _texts(self, path: str) -> dict[str, dict[str, list[str]]]:
        """Return text's name → source → texts."""
        found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        keys = first_keys(path)
        name = next((key for key in _TEXTS if key in keys), None)
        if name is None:
            for problem in read_records(Problem, path):
                found["prompt"][str(problem.info.get("subject", _ALL))].append(self.template.render(problem))
            return found
        kind, texts = _TEXTS[name]
        sources = sources_of(path)
        for row in read_records(kind, path):
            source = source_of(row.id, sources, path)
            for text in texts:
                found[text][source].append(getattr(row, text))
        return found


def first_keys(path: str) -> set[str]:
    """Return the keys of a file's first row; none where that is no object, which its reader says. Raises BadInput on a
    file without rows."""
    with open(path, encoding="utf-8") as file:
        first = file.readline()
    if not first.strip():
        raise BadInput(f"{path}: holds no row")
    try:
        row = json.loads(first)
    except ValueError:
        return set()
    return set(row) if isinstance(row, dict) else set()


def sources_of(path: str) -> list[str]:
    """Return the names of a mixture's sources, none where no statistics lie beside it."""
    statistics = Path(path).with_name(f"{Path(path).stem}.statistics.json")
    return list(json.loads(statistics.read_text(encoding="utf-8"))["sources"]) if statistics.is_file() else []


def source_of(identity: str, sources: Sequence[str], path: str) -> str:
    """Return the source that begins a row's id, no other of whose rows can (`problems.mix_datasets`). Raises BadInput
    where none does."""
    if not sources:
        return _ALL
    found = next((name for name in sources if identity.startswith(f"{name}-")), None)
    if found is None:
        raise BadInput(f"{path}: '{identity}' begins with no source of its statistics ({', '.join(sources)}): mix the "
                       "rows anew, or rename the statistics")  # fmt: skip
    return found


def count_tokens(texts: Mapping[str, Sequence[str]], tokenizer: Any) -> Lengths:
    """Return the number of tokens of every text, without those that a tokenizer adds."""
    return {source: [len(ids) for ids in tokenizer(list(rows), add_special_tokens=False).input_ids]
            for source, rows in texts.items()}  # fmt: skip


def bin_counts(numbers: Sequence[int], low: int, width: float, num_bins: int = _NUM_BINS) -> list[int]:
    """Return how many numbers fall into each bin of a width from `low` on; the highest is in the last."""
    counts = [0] * num_bins
    for number in numbers:
        counts[min(int((number - low) / width), num_bins - 1)] += 1
    return counts


def figure(lengths: Mapping[str, Lengths]) -> Markup:
    """Return one panel per text, below one another."""
    panels = [tag("g", _panel(name, by_source), transform=f"translate(0 {56 + number * _HEIGHT})")
              for number, (name, by_source) in enumerate(lengths.items())]  # fmt: skip
    height = 64 + len(panels) * _HEIGHT
    return tag(
        "svg",
        tag("style", STYLE),
        tag("rect", width=_WIDTH, height=height, rx=8, fill="#faf9f5"),
        tag("text", "Token lengths by source", x=24, y=30, class_="row"),
        join(panels),
        xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {_WIDTH} {height}", width=_WIDTH, height=height,
    )  # fmt: skip


def _panel(name: str, by_source: Lengths) -> Markup:
    every = [number for numbers in by_source.values() for number in numbers]
    low = min(every)
    width = max((max(every) - low) / _NUM_BINS, 1.0)
    counts = {source: bin_counts(numbers, low, width) for source, numbers in by_source.items()}
    x = Axis(low, low + width * _NUM_BINS, _LEFT, _WIDTH - 190)
    y = Axis(0, max(max(row) for row in counts.values()), _HEIGHT - 60, 18)
    parts = [frame(x, y, f"tokens of the {name}", "rows")]
    for series, (source, row) in enumerate(counts.items()):
        colour = f"c{series % NUM_SERIES}"
        edges = [x.place(low + width * index) for index in range(_NUM_BINS + 1)]
        steps = [(at, y.place(count)) for (a, b), count in zip(pairwise(edges), row, strict=True) for at in (a, b)]
        points = " ".join(f"{at:.1f},{up:.1f}" for at, up in [(edges[0], y.start), *steps, (edges[-1], y.start)])
        parts.append(tag("polygon", points=points, class_=f"band {colour}"))
        dashed = dashes(series)
        parts.append(tag("polyline", points=points, class_=f"line {colour}", stroke_dasharray=dashed))
        at = 30 + 20 * series
        place = {"x1": _WIDTH - 176, "x2": _WIDTH - 152, "y1": at, "y2": at}
        sign = tag("line", **place, class_=f"line {colour}", stroke_dasharray=dashed)
        parts.append(sign)
        parts.append(tag("text", f"{source} ({len(by_source[source]):,})", x=_WIDTH - 146, y=at + 4))
    return join(parts)
