"""Published process supervision on the published files, where they are there: read, written back, counted."""

import json
from pathlib import Path
from typing import Any

import pytest

from espalier.data.process_data.formats import published_rows, read_labelled, step_format
from espalier.data.records import AnnotatedSolution


def load(path: Path, name: str, **settings: Any) -> list[AnnotatedSolution]:
    return list(read_labelled(path, step_format(name, **settings)))


def exactly(value: Any) -> str:
    """JSON text that tells 1 from 1.0 and true, whatever the order of the fields."""
    return json.dumps(value, sort_keys=True)


PUBLISHED = {
    "prm800k/samples_prm800k.jsonl": ("prm800k", 6, 6),
    "prm800k/prm800k_example_rows.jsonl": ("prm800k", 4, 4),
    "math_shepherd/samples_math-shepherd.jsonl": ("math_shepherd", 7, 7),
    "math_shepherd/samples_math-aps.jsonl": ("math_aps", 3, None),
    "math_shepherd/samples_math-aps-tree.jsonl": ("math_aps", 3, None),
    "processbench/gsm8k.json": ("processbench", 400, 400),
    "bigbench_mistake/multistep_arithmetic.jsonl": ("bigbench_mistake", 300, 300),
    "bigbench_mistake/tracking_shuffled_objects.jsonl": ("bigbench_mistake", 300, 300),
}


def published_values(path: Path) -> list[Any]:
    text = path.read_text()
    return json.loads(text) if text.startswith("[") else [json.loads(line) for line in text.split("\n") if line.strip()]


def round_trip(path: Path, name: str, **settings: Any) -> list[AnnotatedSolution]:
    records = load(path, name, **settings)
    back = published_rows(records, step_format(name, **settings), str(path))
    assert [exactly(row) for row in back] == [exactly(row) for row in published_values(path)]
    return records


@pytest.mark.parametrize("file", PUBLISHED)
def test_every_published_row_is_read_and_written_back(file: str, datasets_dir: Path) -> None:
    name, num_rows, num_records = PUBLISHED[file]
    records = round_trip(datasets_dir / file, name)
    assert len({record.info["row"] for record in records}) == num_rows
    assert num_records in (len(records), None)


def test_every_class_of_prmbench_is_read_and_written_back(datasets_dir: Path) -> None:
    paths = sorted((datasets_dir / "prmbench").glob("*.jsonl"))
    records = [record for path in paths for record in round_trip(path, "prmbench")]
    modified = [record for record in records if record.id.endswith("/modified")]
    assert (len(paths), len(modified), len(records)) == (8, 143, 286)
    assert len({record.id for record in records}) == 286
    assert sum(record.info["num_errors_beyond_end"] > 0 for record in modified) == 16
    assert len({record.problem_id for record in records}) == 22


def test_the_published_counts_hold(datasets_dir: Path) -> None:
    bench = load(datasets_dir / "processbench/gsm8k.json", "processbench")
    assert sum(record.first_error == -1 for record in bench) == 193
    assert sum(bool(record.is_correct) and record.first_error != -1 for record in bench) == 7
    assert len({record.problem_id for record in bench}) == 375
    for file, without, defects, right_with_error in (("multistep_arithmetic", 62, 18, 1),
                                                     ("tracking_shuffled_objects", 40, 7, 12)):  # fmt: skip
        rows = load(datasets_dir / f"bigbench_mistake/{file}.jsonl", "bigbench_mistake")
        assert sum(row.first_error == -1 for row in rows) == without
        assert sum("defect" in row.info for row in rows) == defects
        assert sum(bool(row.is_correct) and row.first_error != -1 for row in rows) == right_with_error


def test_prm800k_rows_have_one_id_in_both_files(datasets_dir: Path) -> None:
    files = [datasets_dir / "prm800k" / name for name in ("samples_prm800k.jsonl", "prm800k_example_rows.jsonl")]
    first, second = ({record.id for record in load(path, "prm800k")} for path in files)
    assert (len(first | second), len(first & second)) == (8, 2)
    alternatives = round_trip(files[1], "prm800k", alternatives=True, neutral_label=0.5)
    completions = [s["completions"] or [] for row in published_values(files[1]) for s in row["label"]["steps"]]
    chosen = [
        s for row in published_values(files[1]) for s in row["label"]["steps"] if s["chosen_completion"] is not None
    ]
    assert sum(record.info["is_alternative"] for record in alternatives) == sum(map(len, completions)) - len(chosen) - 1
    assert sum(record.labels[-1] is None for record in alternatives if record.info["is_alternative"]) == 7


def test_paths_of_the_published_trees_lead_from_the_question_to_every_leaf(datasets_dir: Path) -> None:
    path = datasets_dir / "math_shepherd/samples_math-aps.jsonl"
    records = load(path, "math_aps")
    for row in published_values(path):
        own = [record for record in records if record.question == row["question"]]
        texts = {entry["solution_prefix"] for entry in row["reasoning_steps"]} - {row["question"]}
        reached = {row["question"] + "".join(r.steps[: n + 1]) for r in own for n in range(len(r.steps))}
        assert reached == texts


def num_leaves(node: dict[str, Any]) -> int:
    return sum(map(num_leaves, node["children"])) or 1


def test_a_published_tree_has_a_record_for_every_leaf(datasets_dir: Path) -> None:
    path = datasets_dir / "math_shepherd/samples_math-aps-tree.jsonl"
    records = load(path, "math_aps")
    assert len(records) == sum(num_leaves(row["reasoning_steps"]) for row in published_values(path))
