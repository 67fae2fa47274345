"""How long a start takes on many training examples, and what memory files of any length take.

    bash scripts/bench.sh road streams [examples] [labels] [--examples N N] [--completions N N]

Made-up rows, more of them in the second round than in the first. **examples**: demonstrations are tokenised once; then
a process of its own loads them again, past the guards of a run, and makes the batches of 20 steps: seconds from its
first instruction on, imports with them, and the memory that is its own (anonymous pages). **labels**:
`values/estimate_values` on that many completions, a process of its own: its greatest resident memory. Run it with no
other program on the machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.processes.sides import load_before
from espalier.data.jsonl import write_records
from espalier.data.records import Completion, Demonstration, State, Trajectory

CELLS = ("examples", "labels")
_BATCH, _STEPS = 64, 20
_COMPLETIONS, _STATES, _TRAJECTORIES = 8, 4, 4  # per state, per trajectory, per problem
_TOKENS = 100  # of a completion


def demonstrations(number: int) -> Iterator[Demonstration]:
    """Yield demonstrations of about 60 to 100 tokens of the tiny tokenizer."""
    for place in range(number):
        steps = "".join(f"{place % 97} + {step} = {place % 97 + step}\n" for step in range(3 + place % 4))
        yield Demonstration(f"d{place}", f"Mia has {place} apples and buys some.\n", f"{steps}#### {place % 97}")


def trajectories(number: int) -> Iterator[Trajectory]:
    """Yield solutions of five steps of ten tokens, four to a problem, no two with a common step."""
    for place in range(number):
        problem, sample = divmod(place, _TRAJECTORIES)
        steps = [f"step {sample} {step}\n" for step in range(_STATES + 1)]
        ids = [10 + (sample * 50 + token) % 250 for token in range(10 * len(steps))]
        ends = [10 * (step + 1) for step in range(len(steps))]
        yield Trajectory(f"p{problem}/{sample}", f"p{problem}", "Q\n", "".join(steps), steps, [5, 6, 7], ids, ends,
                         "stop", "7", "7" if sample % 2 else "8", bool(sample % 2))  # fmt: skip


def states(number: int) -> Iterator[State]:
    """Yield the inner states of the trajectories."""
    for row in trajectories(number):
        for step in range(1, _STATES + 1):
            end = row.step_ends[step - 1]
            yield State(f"{row.id}#{step}", row.problem_id, row.id, step, row.prompt, "".join(row.steps[:step]),
                        row.prompt_ids, row.response_ids[:end], row.gold)  # fmt: skip


def completions(number: int) -> Iterator[Completion]:
    """Yield completions of the states, of which two in three are right."""
    for place, state in enumerate(states(number)):
        for sample in range(_COMPLETIONS):
            ids = [10 + (place + token) % 250 for token in range(_TOKENS)]
            yield Completion(f"{state.id}/{sample}", state.id, state.problem_id, "and so on\n#### 7", ids, "stop", "7",
                             (place + sample) % 3 > 0)  # fmt: skip


def start(policy: str, path: str) -> dict[str, float]:
    """Load examples as a run does and make the batches of some steps; in a process of its own."""
    began = time.monotonic()
    from espalier.data.batches.collate import collate_tokens
    from espalier.data.batches.loader import Loader
    from espalier.data.batches.packing import Layout
    from espalier.models.load import load_tokenizer
    from espalier.models.tokenizer_checks import model_limits
    from espalier.training.example_cache import stored_examples
    from espalier.training.guards import check_limits

    tokenizer = load_tokenizer(policy)
    imported = _anonymous_mib()
    target = "espalier.data.examples.token_examples.DemonstrationExamples"
    node = {"_target_": target, "path": path, "max_length": 256, "min_completion_tokens": 0}
    examples = stored_examples(node, tokenizer)
    check_limits(examples, path, model_limits(policy, tokenizer), 256)
    loader = Loader(examples, _BATCH, _BATCH, seed=0)
    tokens = sum(collate_tokens(group, Layout("shared")).num_tokens
                 for step in range(_STEPS) for group in loader.micro_batches(step))  # fmt: skip
    return {"seconds": round(time.monotonic() - began, 2), "tokens_of_20_steps": tokens,
            "imports_mib": imported, "own_mib": _anonymous_mib()}  # fmt: skip


def _anonymous_mib() -> float:
    """Return the memory of this process that no file stands behind."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return round(int(line.split()[1]) / 1024, 1)


def measure_examples(number: int, folder: Path) -> dict[str, Any]:
    """Return the first and the second start on `number` examples."""
    from espalier.models.tiny import build_tiny

    policy, path = folder / "policy", folder / f"examples-{number}.jsonl"
    if not policy.exists():
        texts = [row.prompt + row.completion for row in demonstrations(200)]
        build_tiny(policy, texts, hidden_size=64, num_layers=2, num_heads=2, vocab_size=320, max_length=512, seed=0)
    write_records(path, demonstrations(number))
    command = [sys.executable, "-m", "benchmarks.road.streams", "--start", str(policy), str(path)]
    surroundings = {**os.environ, "HF_DATASETS_CACHE": str(folder / "cache")}
    rounds = {}
    for name in ("first", "second"):
        done = subprocess.run(command, env=surroundings, capture_output=True, text=True, check=True, timeout=7200)
        rounds[name] = json.loads(done.stdout.splitlines()[-1])
    return {"examples": number, "file_mib": round(path.stat().st_size / 2**20, 1), **rounds}


def measure_labels(number: int, folder: Path) -> dict[str, Any]:
    """Return seconds and greatest resident memory of the stage on `number` completions."""
    num_rows = number // (_COMPLETIONS * _STATES)
    paths = {name: folder / f"{name}-{number}.jsonl" for name in ("trajectories", "states", "completions", "values")}
    write_records(paths["trajectories"], trajectories(num_rows))
    write_records(paths["states"], states(num_rows))
    made = write_records(paths["completions"], completions(num_rows))
    command = [sys.executable, "run_stage.py", "-cn", "values/estimate_values", f"input={paths['completions']}",
               f"stage.trajectories={paths['trajectories']}", f"stage.states={paths['states']}",
               f"output={paths['values']}"]  # fmt: skip
    began = time.monotonic()
    program = f"import resource, subprocess, sys; code = subprocess.run({command!r}).returncode; " \
              "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(code)"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=7200)
    mib = round(int(done.stdout.splitlines()[-1]) / 1024, 1)
    size = round(sum(path.stat().st_size for path in paths.values()) / 2**20, 1)
    for path in paths.values():
        path.unlink()
    return {"completions": made, "files_mib": size, "seconds": round(time.monotonic() - began, 1), "peak_mib": mib}


def _at_most(value: float, goal: float, unit: str, how: str) -> dict[str, Any]:
    return {"value": value, "low": value, "high": value, "unit": unit, "goal": goal, "better": "lower",
            "met": value <= goal, "how": how}  # fmt: skip


def figures_of(examples: list[dict[str, Any]], labels: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of the cells that ran, of the largest round; growth is that round less the first one."""
    figures: dict[str, Any] = {}
    if examples:
        first, last = examples[0], examples[-1]
        number, grown = f"{last['examples']:,} examples", last["second"]["own_mib"] - first["second"]["own_mib"]
        figures["second_start_seconds"] = _at_most(last["second"]["seconds"], 60, "s",
            f"a second start on {number}: imports, cache, guards, batches of {_STEPS} steps")  # fmt: skip
        figures["second_start_memory_grown"] = _at_most(round(grown, 1), 64, "MiB",
            f"memory of its own on {number}, less that on {first['examples']:,}")  # fmt: skip
    if labels:
        first, last = labels[0], labels[-1]
        figures["label_stage_peak"] = _at_most(last["peak_mib"], 1024, "MiB",
            f"greatest resident memory of values/estimate_values on {last['completions']:,} completions")  # fmt: skip
        figures["label_stage_peak_grown"] = _at_most(round(last["peak_mib"] - first["peak_mib"], 1), 64, "MiB",
            f"less that on {first['completions']:,}")  # fmt: skip
    return figures


def measure(words: Sequence[str]) -> dict[str, Any]:
    """Return figures, detail and tables of the cells that are asked for."""
    parser = argparse.ArgumentParser(prog="bash scripts/bench.sh road streams")
    parser.add_argument("cells", nargs="*", choices=[*CELLS, []], help="all where none is named")
    parser.add_argument("--examples", nargs="+", type=int, default=[100_000, 1_000_000])
    parser.add_argument("--completions", nargs="+", type=int, default=[500_000, 5_000_000])
    asked = parser.parse_args(list(words))
    cells, load = asked.cells or list(CELLS), load_before()
    with tempfile.TemporaryDirectory(prefix="espalier-road-") as name:
        folder = Path(name)
        examples = [measure_examples(number, folder) for number in asked.examples] if "examples" in cells else []
        labels = [measure_labels(number, folder) for number in asked.completions] if "labels" in cells else []
    rounds = {"load_before": load, "examples": examples, "labels": labels}
    return {"figures": figures_of(examples, labels), "tables": [], "rounds": rounds}


if __name__ == "__main__":
    print(json.dumps(start(*sys.argv[2:])))  # the process that starts: --start POLICY FILE
