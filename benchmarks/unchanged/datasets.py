"""The datasets of the compared runs, one file for each kind, the same rows for both commits.

Rows are plain JSON and not record classes: a field that one of the two trees calls otherwise is written by its name.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.unchanged.names import name_in
from espalier.data.records import Demonstration
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.models.load import load_tokenizer
from espalier.models.tiny import build_tiny

TASK = {"num_train": 100, "num_dev": 10, "num_test": 10, "num_demonstrations": 1000, "max_total": 12,
        "min_operations": 1, "max_operations": 2}  # fmt: skip
_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 2,
    "vocab_size": 320,
    "max_length": 512,
    "seed": 0,
}
_NUM_ROWS = 60

Row = dict[str, Any]


def _demonstrations() -> list[Demonstration]:
    return WordArithmetic(**TASK).demonstrations("train")


def write_tiny(folder: Path) -> Path:
    """Write the network with random weights that the first run begins from; its folder."""
    return build_tiny(folder, [row.prompt + row.completion for row in _demonstrations()], **_SHAPE)


def demonstration(row: Demonstration) -> Row:
    """Return the row as it is."""
    return {"id": row.id, "prompt": row.prompt, "completion": row.completion}


def _is_wrong(row: Demonstration) -> bool:
    return sum(row.id.encode()) % 2 == 1


def _steps(row: Demonstration, tokenizer: Any, *, is_wrong: bool) -> tuple[list[str], list[list[int]]]:
    """Return (texts, ids) of the lines of the solution, the end token behind the last; a wrong one ends in another
    digit."""
    steps = row.completion.splitlines(keepends=True)
    if is_wrong:
        steps[-1] = steps[-1][:-1] + str((int(steps[-1][-1]) + 1) % 10)
    ids = [list(tokenizer(step).input_ids) for step in steps]
    ids[-1].append(tokenizer.eos_token_id)
    return steps, ids


def _solution(row: Demonstration, tokenizer: Any, *, is_wrong: bool) -> Row:
    """Return the fields that a trajectory and its step values have in common."""
    steps, ids = _steps(row, tokenizer, is_wrong=is_wrong)
    return {
        "id": f"{row.id}/0",
        "problem_id": row.id,
        "prompt": row.prompt,
        "steps": steps,
        "prompt_ids": tokenizer(row.prompt).input_ids,
        "response_ids": [*chain(*ids)],
        "step_ends": [sum(map(len, ids[: end + 1])) for end in range(len(ids))],
        "is_correct": not is_wrong,
    }


def trajectory(row: Demonstration, tokenizer: Any) -> Row:
    """Return a sampled solution with its outcome; half of them are wrong."""
    solution = _solution(row, tokenizer, is_wrong=_is_wrong(row))
    answer = solution["steps"][-1].split()[-1]
    gold = row.completion.split()[-1]
    return {**solution, "response": "".join(solution["steps"]), "finish_reason": "stop", "gold": gold, "answer": answer}


def step_values(row: Demonstration, tokenizer: Any) -> Row:
    """Return a solution with drawn values of its inner states, each of 4 completions."""
    solution = _solution(row, tokenizer, is_wrong=_is_wrong(row))
    rng = random.Random(row.id)
    num_correct = [rng.randint(0, 4) for _ in solution["steps"][:-1]]
    counts = [4] * len(num_correct)
    outcome = int(solution["is_correct"])
    values = [correct / 4 for correct in num_correct] + [float(outcome)]
    return {**solution, "values": values, "num_correct": [*num_correct, outcome], "num_completions": [*counts, 1]}


def _pair(row: Demonstration, tokenizer: Any, kind: str, num_shared: int) -> Row:
    """Return the right solution preferred over the wrong one, both behind the first `num_shared` steps."""
    chosen, chosen_ids = _steps(row, tokenizer, is_wrong=False)
    rejected, rejected_ids = _steps(row, tokenizer, is_wrong=True)
    shared_ids = chain(*chosen_ids[:num_shared])
    return {
        "id": f"{row.id}/0>{row.id}/1",
        "problem_id": row.id,
        "kind": kind,
        "prompt": row.prompt + "".join(chosen[:num_shared]),
        "chosen": "".join(chosen[num_shared:]),
        "rejected": "".join(rejected[num_shared:]),
        "prompt_ids": [*tokenizer(row.prompt).input_ids, *shared_ids],
        "chosen_ids": [*chain(*chosen_ids[num_shared:])],
        "rejected_ids": [*chain(*rejected_ids[num_shared:])],
        "chosen_score": 1.0,
        "rejected_score": 0.0,
    }


def pair(row: Demonstration, tokenizer: Any) -> Row:
    """Return a pair of whole solutions."""
    return _pair(row, tokenizer, "outcome", 0)


def step_pair(row: Demonstration, tokenizer: Any) -> Row:
    """Return a pair of last steps: its prompt ends mid-solution."""
    return _pair(row, tokenizer, "step", len(row.completion.splitlines()) - 1)


# File → (its record kind, one row).
KINDS: Mapping[str, tuple[str, Callable[[Demonstration, Any], Row]]] = {
    "trajectories": ("Trajectory", trajectory),
    "step_values": ("StepValues", step_values),
    "pairs": ("PreferencePair", pair),
    "step_pairs": ("PreferencePair", step_pair),
}


def _write(path: Path, kind: str, rows: Sequence[Row], tree: Path) -> None:
    """Write rows with the field names of the tree (renamed as `Kind.field`)."""
    lines = []
    for row in rows:
        named = {name_in(tree, f"{kind}.{field}").removeprefix(f"{kind}."): value for field, value in row.items()}
        lines.append(json.dumps(named) + "\n")
    path.write_text("".join(lines))


def write_datasets(folder: Path, tiny: Path, tree: Path) -> None:
    """Write every file that the runs read to a new folder."""
    folder.mkdir(parents=True)
    rows, tokenizer = _demonstrations(), load_tokenizer(str(tiny))
    _write(folder / "demonstrations.jsonl", "Demonstration", [demonstration(row) for row in rows[:900]], tree)
    _write(folder / "held_out.jsonl", "Demonstration", [demonstration(row) for row in rows[900:940]], tree)
    for name, (kind, make) in KINDS.items():
        _write(folder / f"{name}.jsonl", kind, [make(row, tokenizer) for row in rows[:_NUM_ROWS]], tree)
