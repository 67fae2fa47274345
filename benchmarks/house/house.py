"""What the code looks like, in numbers: copies, names, docstrings, lengths, imports, configs, words.

    bash scripts/bench.sh house

Every number is a count over the source (benchmarks/house/, one module for each kind) and repeats exactly, but
for the seconds of an import, the median of five fresh processes. `detail` of results/house.json lists the places behind
each number, worst first.
"""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.house import copies, docstrings, imports, lengths, meanings, words
from benchmarks.house.source import Found, Source, product_sources
from benchmarks.processes.forked import ROOT
from benchmarks.result import count, write_result

HOW = "bash scripts/bench.sh house"
_NUM_PLACES = 40

# Figure → (what counts it in the product's source, its goal, its unit, which way is better).
COUNTS: dict[str, tuple[Callable[[Iterable[Source]], Found], float, str, str]] = {
    "duplicate_bodies": (copies.duplicate_bodies, 0, "functions", "lower"),
    "names_with_two_meanings": (meanings.names_with_two_meanings, 0, "names", "lower"),
    "public_docstrings": (docstrings.public_docstrings, 0.99, "share", "higher"),
    "tensor_docstrings_with_shapes": (docstrings.tensor_docstrings_with_shapes, 0.95, "share", "higher"),
    "raising_docstrings_with_errors": (docstrings.raising_docstrings_with_errors, 0.95, "share", "higher"),
    "longest_function": (lengths.longest_function, 60, "lines", "lower"),
    "longest_file": (lengths.longest_file, 330, "lines", "lower"),
    "rl_iteration_lines": (lengths.rl_iteration_lines, 45, "lines", "lower"),
}
# Figure → (what a task imports, the number of our modules that it loaded when this was first counted).
CLOSURES = {"modules_to_score_steps": (imports.SCORING, 31), "modules_of_a_grpo_run": (imports.GRPO, 102)}


def twins(root: Path) -> Found:
    """Count the pairs of larger configs that nearly agree."""
    from benchmarks.house.config_twins import config_twins, read_configs

    pairs = config_twins(read_configs(root / "conf"))
    return Found(len(pairs), [f"{one} = {other} ({share:.2f})" for one, other, share in pairs])


def options(root: Path) -> Found:
    """Count the settings that no config, script or page uses."""
    from benchmarks.house.unused_options import unused_options

    found = unused_options(root)
    return Found(len(found), found)


def seconds_figure(seconds: list[float]) -> dict[str, Any]:
    """Make the figure of `import espalier` from several measurements."""
    low, median, high = (sorted(seconds)[place] for place in (0, len(seconds) // 2, -1))
    figure = count(0, 0, "seconds", how=HOW, better="lower")
    rounded = {"value": round(median, 4), "low": round(low, 4), "high": round(high, 4)}
    return {**figure, **rounded, "goal": 0.3, "met": median <= 0.3}


def found_counts(root: Path) -> dict[str, tuple[Found, float, str, str]]:
    """Count everything in a tree: figure → (what was found, goal, unit, which way is better)."""
    sources = product_sources(root)
    rows = {name: (counter(sources), *rest) for name, (counter, *rest) in COUNTS.items()}
    rows["config_twins"] = (twins(root), 0, "pairs", "lower")
    rows["unused_options"] = (options(root), 0, "options", "lower")
    rows["dialect_words"] = (words.dialect_words(root), 0, "words", "lower")
    for name, (task, goal) in CLOSURES.items():
        rows[name] = (imports.closure(root, task), goal, "modules", "lower")
    return rows


def main() -> None:
    """Count, print the worst places, write results/house.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    rows = found_counts(ROOT)
    figures = {}
    for name, (found, goal, unit, better) in rows.items():
        value = found.value if unit != "share" else round(found.value, 4)
        figures[name] = count(value, goal, unit, how=HOW, better=better)
        if not figures[name]["met"]:
            print(f"{name}: {value} (goal {goal})", *(f"  {place}" for place in found.places[:_NUM_PLACES]), sep="\n")
    figures["import_seconds"] = seconds_figure(imports.import_seconds(ROOT))
    places = {name: found.places[:_NUM_PLACES] for name, (found, *_) in rows.items() if name not in CLOSURES}
    detail = {"import_loads_torch": imports.loads_torch(ROOT), "places": places}
    print(write_result("house", figures, detail))


if __name__ == "__main__":
    main()
