"""Published process supervision: invented rows in the published layouts, read by hand and written back."""

import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from espalier.data.examples.step_examples import AnnotatedSolutionExamples
from espalier.data.jsonl import read_records, write_records
from espalier.data.process_data.formats import published_rows, read_labelled, step_format, to_step_texts
from espalier.data.process_data.published import content_key, problem_key
from espalier.data.records import AnnotatedSolution, BadInput
from espalier.models.tiny import build_tokenizer
from espalier.pipeline.prm.export_steps import ExportSteps
from espalier.pipeline.prm.import_steps import ImportSteps
from espalier.pipeline.stage import StageContext

MARK = "\u043a\u0438"


def completion(text: str, rating: int | None) -> dict[str, Any]:
    return {"text": text, "rating": rating, "flagged": None}


def prm800k_step(
    *ratings: int | None, chosen: int | None = None, human: dict[str, Any] | None = None
) -> dict[str, Any]:
    options = [completion(f"option {number} rated {rating}", rating) for number, rating in enumerate(ratings)]
    return {"completions": options or None, "human_completion": human, "chosen_completion": chosen}


def prm800k_row(*steps: dict[str, Any], finish_reason: str = "solution", **question: Any) -> dict[str, Any]:
    return {
        "labeler": "l-1",
        "timestamp": "2022-07-01",
        "generation": None,
        "question": {"problem": "What is 2 + 3?", "ground_truth_answer": "5", **question},
        "label": {"steps": list(steps), "total_time": 12, "finish_reason": finish_reason},
    }


PRM800K = [
    prm800k_row(
        prm800k_step(1, chosen=0),
        prm800k_step(-1, 0, human={"text": "By hand.", "rating": None, "source": "human", "flagged": False}),
        {
            "completions": [completion("No.", 0), completion("So it is 5.\n\n# Answer\n\n5", 1)],
            "human_completion": None,
            "chosen_completion": 1,
        },
    ),
    prm800k_row(
        prm800k_step(0, chosen=0), prm800k_step(1, -1, -1), finish_reason="found_error", pre_generated_steps=["a", "b"]
    ),
    prm800k_row(prm800k_step(1, chosen=0), prm800k_step(None, None), finish_reason="give_up"),
    prm800k_row(prm800k_step(1, chosen=0), prm800k_step(), finish_reason="give_up"),
]
MATH_SHEPHERD = [
    {
        "input": "A cart has 4 wheels. And 3 carts? "
        f"Step 1: 3*4=<<3*4=12>>12. {MARK}\nStep 2: So 13. The answer is: 13 {MARK}",
        "label": "A cart has 4 wheels. And 3 carts? Step 1: 3*4=<<3*4=12>>12. +\nStep 2: So 13. The answer is: 13 -",
        "task": "GSM8K",
    },
    {"input": f"Q?\n\nStep 1: one{MARK}\n\nStep 2: two  {MARK} Step 3: no mark",
     "label": "Q?\n\nStep 1: one-\n\nStep 2: two  + Step 3: no mark"},
]  # fmt: skip
FLAT = {
    "question": "What is 6 * 7?",
    "final_answer": "42",
    "question_id": 3,
    "reasoning_steps": [
        {"solution_prefix": "What is 6 * 7?", "mc_value": 0.75},
        {"solution_prefix": "What is 6 * 7?\n\n\nSix sevens.", "mc_value": 0.5},
        {"solution_prefix": "What is 6 * 7?\n\n\nSix sevens.\n\nSo 42.", "mc_value": 1.0},
        {"solution_prefix": "What is 6 * 7?\n\n\nSix sevens.", "mc_value": 0.25},
        {"solution_prefix": "What is 6 * 7?\n\n\nSix sevens.\n\nSo 41.", "mc_value": 0.0},
    ],
}
TREE = {
    "question": "What is 6 * 7?",
    "final_answer": "42",
    "question_id": "t",
    "reasoning_steps": {
        "text": "What is 6 * 7?",
        "mc_value": 0.75,
        "children": [
            {"text": "It is 42.", "mc_value": 1.0, "children": []},
            {"text": "Six sevens.", "mc_value": 0.5, "children": [
                {"text": "So 41.", "mc_value": 0, "children": []}, {"text": "So 42.", "mc_value": 1, "children": []}]},
        ],
    },
}  # fmt: skip
MATH_APS = [FLAT, TREE, {**TREE, "reasoning_steps": {"text": "What is 6 * 7?", "mc_value": None, "children": []}}]
PROCESSBENCH = [
    {"id": "gsm8k-0", "generator": "m", "problem": "P?", "steps": ["a", "b", "c"], "label": 1,
     "final_answer_correct": False},
    {"id": "gsm8k-1", "generator": "m", "problem": "P?", "steps": ["a", "b"], "label": -1,
     "final_answer_correct": True},
]  # fmt: skip
PRMBENCH = [
    {"original_question": "O?", "modified_question": "M?", "original_process": ["a", "b"], "idx": "p_1",
     "modified_process": ["a", "x", "y"], "modified_steps": [2], "error_steps": [2, 3, 7], "reason": "r",
     "question": "O ?", "classification": "redundency"},
    {"original_question": "O?", "modified_question": "O?", "original_process": ["a", "b"], "idx": "p_1",
     "modified_process": ["a"], "modified_steps": [1], "error_steps": [5], "reason": "r", "question": "O ?",
     "classification": "circular"},
]  # fmt: skip
BIGBENCH = [
    {"input": "1 - 2 =", "steps": ["a", "b", "c"], "target": "-1", "answer": "3", "mistake_index": 1},
    {"input": "1 + 2 =", "steps": ["a"], "target": "3", "answer": " 3", "mistake_index": None},
    {"input": "1 * 2 =", "steps": ["a"], "target": "2", "answer": "3", "mistake_index": None},
]
TRL = [
    {"prompt": "P?", "completions": ["a", "b"], "labels": [True, False], "index": 4},
    {"prompt": "P?", "completions": ["a", "b"], "labels": [1, 0]},
    {"prompt": "P?", "completions": ["a", "b"], "labels": [0.5, 1.0]},
    {"prompt": "P?", "completions": [], "labels": []},
]
ROWS: dict[str, list[dict[str, Any]]] = {
    "prm800k": PRM800K,
    "math_shepherd": MATH_SHEPHERD,
    "math_aps": MATH_APS,
    "processbench": PROCESSBENCH,
    "prmbench": PRMBENCH,
    "bigbench_mistake": BIGBENCH,
    "trl": TRL,
}


def as_lines(rows: Sequence[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def load(path: Path, name: str, **settings: Any) -> list[AnnotatedSolution]:
    return list(read_labelled(path, step_format(name, **settings)))


def labelled(tmp_path: Path, name: str, rows: Sequence[Any] | None = None, **settings: Any) -> list[AnnotatedSolution]:
    return load(write(tmp_path / "rows.jsonl", as_lines(ROWS[name] if rows is None else rows)), name, **settings)


def exactly(value: Any) -> str:
    """JSON text that tells 1 from 1.0 and true, whatever the order of the fields."""
    return json.dumps(value, sort_keys=True)


@pytest.mark.parametrize("name", ROWS)
def test_what_is_read_is_written_back_as_the_same_json_value(name: str, tmp_path: Path) -> None:
    rows = [*ROWS[name], {**ROWS[name][0], "another_column": {"kept": [1, None]}}]
    if name in ("prmbench", "processbench"):
        rows[-1]["idx" if name == "prmbench" else "id"] = "p_9"
    write_records(tmp_path / "labelled.jsonl", labelled(tmp_path, name, rows))
    records = read_records(AnnotatedSolution, tmp_path / "labelled.jsonl")
    back = published_rows(records, step_format(name), "labelled.jsonl")
    assert [exactly(row) for row in back] == [exactly(row) for row in rows]


@pytest.mark.parametrize("name", ROWS)
def test_a_row_that_stands_twice_is_kept_twice(name: str, tmp_path: Path) -> None:
    records = labelled(tmp_path, name, [ROWS[name][0]] * 3)
    assert len({record.id for record in records}) == len(records)
    assert published_rows(records, step_format(name), "x") == [ROWS[name][0]] * 3


@pytest.mark.parametrize("name", ROWS)
def test_records_are_whole_and_of_one_problem(name: str, tmp_path: Path) -> None:
    for record in labelled(tmp_path, name):
        assert len(record.steps) == len(record.labels)
        assert all(label is None or 0 <= label <= 1 for label in record.labels)
        assert record.info["format"] == name
        assert record.id.startswith(f"{name}-")


def test_the_chosen_path_takes_chosen_then_human_then_the_error_found(tmp_path: Path) -> None:
    solved, error, given_up, without = labelled(tmp_path, "prm800k")
    assert solved.steps == ["option 0 rated 1", "By hand.", "So it is 5.\n\n# Answer\n\n5"]
    assert solved.labels == [1.0, None, 1.0]
    assert (solved.first_error, solved.is_correct, solved.gold) == (-1, True, "5")
    assert error.steps == ["option 0 rated 0", "option 1 rated -1"]
    assert (error.labels, error.first_error, error.is_correct) == ([1.0, 0.0], 1, None)
    assert [given_up.steps, without.steps] == [["option 0 rated 1"]] * 2
    assert [given_up.first_error, without.first_error] == [-1, -1]
    assert [given_up.is_correct, without.is_correct] == [None, None]


def test_the_wrong_step_of_the_pre_generated_solution_ends_the_path(tmp_path: Path) -> None:
    step = prm800k_step(-1, 1, -1)
    row = prm800k_row(step, finish_reason="found_error", pre_generated_steps=["option 2 rated -1"])
    assert labelled(tmp_path, "prm800k", [row])[0].steps == ["option 2 rated -1"]


def test_a_corrected_rating_of_a_human_step_is_its_label(tmp_path: Path) -> None:
    human = {"text": "By hand.", "rating": None, "source": "human", "flagged": False, "corrected_rating": -1}
    record = labelled(tmp_path, "prm800k", [prm800k_row(prm800k_step(human=human))])[0]
    assert (record.labels, record.first_error) == ([0.0], 0)


def test_alternatives_are_the_path_before_them_and_one_completion(tmp_path: Path) -> None:
    records = labelled(tmp_path, "prm800k", PRM800K[:1], alternatives=True, neutral_label=0.5)
    others = [record for record in records if record.info["is_alternative"]]
    assert [(r.steps[-1], r.labels[-1], r.first_error) for r in others] == [
        ("option 0 rated -1", 0.0, 1),
        ("option 1 rated 0", 0.5, -1),
        ("No.", 0.5, -1),
    ]
    assert all(r.steps[:-1] == records[0].steps[: r.info["step"]] for r in others)
    assert published_rows(records, step_format("prm800k", neutral_label=0.5), "x") == PRM800K[:1]


def test_prm800k_is_not_written_from_changed_labels(tmp_path: Path) -> None:
    record = labelled(tmp_path, "prm800k", PRM800K[:1])[0]
    with pytest.raises(BadInput, match="steps or labels were changed since it was read"):
        published_rows([replace(record, labels=[0.0, None, 1.0])], step_format("prm800k"), "x")
    with pytest.raises(BadInput, match="with the record of the chosen path"):
        published_rows([replace(record, info={**record.info, "is_alternative": True})], step_format("prm800k"), "x")


def test_math_shepherd_steps_join_to_the_text_without_its_marks(tmp_path: Path) -> None:
    first, second = labelled(tmp_path, "math_shepherd")
    assert first.question == "A cart has 4 wheels. And 3 carts?"
    assert first.steps == ["Step 1: 3*4=<<3*4=12>>12.\n", "Step 2: So 13. The answer is: 13"]
    assert (first.labels, first.first_error, first.is_correct) == ([1.0, 0.0], 1, False)
    assert first.info["group"] == "GSM8K"
    assert second.steps == ["Step 1: one\n\n", "Step 2: two ", " Step 3: no mark"]
    assert (second.labels, second.first_error, second.is_correct) == ([0.0, 1.0, None], 0, None)
    for record, row in zip((first, second), MATH_SHEPHERD, strict=True):
        plain = row["input"].replace(f" {MARK}", "").replace(MARK, "")
        assert record.question + record.info["border"] + "".join(record.steps) == plain


def test_changed_labels_are_written_to_math_shepherd(tmp_path: Path) -> None:
    record = replace(labelled(tmp_path, "math_shepherd")[0], labels=[0.0, 0.3])
    row = published_rows([record], step_format("math_shepherd"), "x")[0]
    assert row["input"] == MATH_SHEPHERD[0]["input"]
    assert row["label"].endswith("Step 1: 3*4=<<3*4=12>>12. -\nStep 2: So 13. The answer is: 13 +")


@pytest.mark.parametrize(
    ("label", "said"),
    [
        ("Q? Step 1: a +\nStep 2: b ", "differs at mark 2"),
        ("Q? Step 1: a *\nStep 2: b -", "differs at mark 1"),
        ("Q! Step 1: a +\nStep 2: b -", "differs at mark 0"),
        ("Q? Step 1: a +\nStep 2: b -\n", "label is longer than input"),
    ],
)
def test_a_label_of_another_text_is_named(label: str, said: str, tmp_path: Path) -> None:
    row = {"input": f"Q? Step 1: a {MARK}\nStep 2: b {MARK}", "label": label, "task": "MATH"}
    with pytest.raises(BadInput, match=f"rows.jsonl:1: .*{said}"):
        labelled(tmp_path, "math_shepherd", [row])


def test_flat_prefixes_become_paths_from_the_question_to_each_leaf(tmp_path: Path) -> None:
    records = labelled(tmp_path, "math_aps", [FLAT])
    assert [(record.steps, record.labels, record.first_error) for record in records] == [
        (["\n\n\nSix sevens.", "\n\nSo 42."], [0.5, 1.0], -1),
        (["\n\n\nSix sevens."], [0.25], -1),  # the prefix that stands twice
        (["\n\n\nSix sevens.", "\n\nSo 41."], [0.5, 0.0], 1),
    ]
    texts = [entry["solution_prefix"] for entry in FLAT["reasoning_steps"]]  # type: ignore[index]
    assert all(record.question + "".join(record.steps) in texts for record in records)


def test_a_tree_gives_the_same_paths(tmp_path: Path) -> None:
    records = labelled(tmp_path, "math_aps", [TREE])
    assert [(record.steps, record.labels) for record in records] == [
        (["It is 42."], [1.0]),
        (["Six sevens.", "So 41."], [0.5, 0]),
        (["Six sevens.", "So 42."], [0.5, 1]),
    ]
    assert records[1].gold == "42"
    assert to_step_texts(records[1])[1] == ["Six sevens.\n\n", "So 41."]


def test_a_tree_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    records = labelled(tmp_path, "math_aps", [TREE])
    with pytest.raises(BadInput, match="2 of the 3 records of its row"):
        published_rows(records[:2], step_format("math_aps"), "x")
    changed = replace(records[1], labels=[0.25, 0.0])
    with pytest.raises(BadInput, match="another text or label for the step at"):
        published_rows([records[0], changed, records[2]], step_format("math_aps"), "x")


def test_steps_after_the_first_error_are_not_judged(tmp_path: Path) -> None:
    wrong, right = labelled(tmp_path, "processbench")
    assert (wrong.labels, wrong.first_error, wrong.is_correct) == ([1.0, 0.0, None], 1, False)
    assert (right.labels, right.first_error, right.is_correct) == ([1.0, 1.0], -1, True)
    assert wrong.problem_id == right.problem_id == problem_key("P?")
    assert wrong.info["group"] == "gsm8k"


def test_error_steps_count_from_one_and_those_beyond_the_end_are_kept(tmp_path: Path) -> None:
    modified, original, beyond, _ = labelled(tmp_path, "prmbench")
    assert modified.id == "prmbench-p_1-redundency/modified"
    assert (modified.labels, modified.first_error) == ([1.0, 0.0, 0.0], 1)
    assert modified.info["num_errors_beyond_end"] == 1
    assert (modified.question, original.question) == ("M?", "O?")
    assert (original.labels, original.first_error, original.info["pair"]) == ([1.0, 1.0], -1, modified.info["pair"])
    assert (beyond.labels, beyond.first_error) == ([1.0], None)
    assert beyond.problem_id == modified.problem_id


def test_half_a_pair_is_not_written_to_prmbench(tmp_path: Path) -> None:
    records = labelled(tmp_path, "prmbench")
    with pytest.raises(BadInput, match="wants the two records of a row, modified and original"):
        published_rows(records[1:], step_format("prmbench"), "x")


def test_a_wrong_answer_without_a_mistake_is_kept_and_flagged(tmp_path: Path) -> None:
    wrong, right, defect = labelled(tmp_path, "bigbench_mistake")
    assert (wrong.labels, wrong.first_error, wrong.is_correct) == ([1.0, 0.0, None], 1, False)
    assert (right.first_error, right.is_correct, "defect" in right.info) == (-1, True, False)
    assert (defect.first_error, defect.is_correct, "defect" in defect.info) == (-1, False, True)


def test_trl_labels_are_bools_ints_or_floats(tmp_path: Path) -> None:
    records = labelled(tmp_path, "trl")
    assert [record.labels for record in records] == [[1.0, 0.0], [1.0, 0.0], [0.5, 1.0], []]
    assert [record.first_error for record in records] == [1, 1, None, -1]


def test_what_is_true_as_a_bool_and_no_good_step_is_never_learnt_as_one(tmp_path: Path) -> None:
    """bool(-1) and bool(-100) are true: PRM800K's -1 is a bad step, and a step that nobody judged is not learnt."""
    records = [*labelled(tmp_path, "prm800k"), AnnotatedSolution("a", "p", "P?", ["a\n", "b"], [1.0, None], None, None)]
    assert [record.labels for record in records] == [[1.0, None, 1.0], [1.0, 0.0], [1.0], [1.0], [1.0, None]]
    assert [row["labels"] for row in published_rows(records, step_format("trl"), "x")] == [
        [True], [True, False], [True], [True], [True],
    ]  # fmt: skip
    tokenizer = build_tokenizer(["What is 2 + 3? option 0 rated 1"], 300)
    (tmp_path / "rows.jsonl").unlink()
    write_records(tmp_path / "rows.jsonl", records)
    examples = AnnotatedSolutionExamples(str(tmp_path / "rows.jsonl"), 512, is_distinct=False).load(tokenizer)
    assert [example.values for example in examples] == [[1.0, 1.0], [1.0, 0.0], [1.0], [1.0], [1.0]]
    write_records(tmp_path / "rows.jsonl", [AnnotatedSolution("a", "p", "P?", ["a"], [-100.0], None, None)])
    with pytest.raises(BadInput, match=r"rows\.jsonl: 'a': label 1 .* must be in \[0, 1\], got -100"):
        AnnotatedSolutionExamples(str(tmp_path / "rows.jsonl"), 512).load(tokenizer)


def test_step_texts_join_with_the_separator_of_the_format(tmp_path: Path) -> None:
    record = labelled(tmp_path, "processbench")[0]
    assert to_step_texts(record) == ("P?\n", ["a\n\n", "b\n\n", "c"], [1.0, 0.0, None])
    empty = AnnotatedSolution("i", "p", "Q", [], [], None, None)
    assert to_step_texts(empty) == ("Q\n", [], [])


def test_records_of_one_format_are_written_as_another_that_can_hold_them(tmp_path: Path) -> None:
    records = labelled(tmp_path, "processbench")
    assert published_rows(records, step_format("trl"), "x") == [
        {"prompt": "P?", "completions": ["a", "b"], "labels": [True, False]},
        {"prompt": "P?", "completions": ["a", "b"], "labels": [True, True]},
    ]
    assert published_rows(records[:1], step_format("math_shepherd"), "x") == [
        {"input": f"P? Step 1: a {MARK}\nStep 2: b {MARK}", "label": "P? Step 1: a +\nStep 2: b -", "task": "gsm8k"}
    ]
    shepherd = labelled(tmp_path, "math_shepherd")[:1]
    row = published_rows(shepherd, step_format("processbench"), "x")[0]
    assert (row["steps"], row["label"]) == (["Step 1: 3*4=<<3*4=12>>12.", "Step 2: So 13. The answer is: 13"], 1)
    for name in ("prm800k", "math_aps", "prmbench"):
        with pytest.raises(BadInput, match=name):
            published_rows(records, step_format(name), "x")


def test_the_same_row_has_one_key_whatever_the_order_of_its_fields() -> None:
    assert content_key({"a": 1, "b": [None]}) == content_key({"b": [None], "a": 1})
    assert content_key({"a": 1}) != content_key({"a": 1.5})
    assert problem_key(" What  is\n2?") == problem_key("What is 2?")


@pytest.mark.parametrize("form", ["array", "gzip", "mark", "crlf"])
def test_every_way_a_file_is_packed_gives_the_same_records(form: str, tmp_path: Path) -> None:
    lines = as_lines(BIGBENCH)
    packed = {
        "array": json.dumps(BIGBENCH, indent=1).encode(),
        "gzip": gzip.compress(lines),
        "mark": b"\xef\xbb\xbf" + lines,
        "crlf": lines.replace(b"\n", b"\r\n"),
    }
    assert load(write(tmp_path / "packed", packed[form]), "bigbench_mistake") == labelled(tmp_path, "bigbench_mistake")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (b"[]", "no row"),
        (as_lines(BIGBENCH)[:-20], "rows.jsonl:3: "),
        (as_lines(BIGBENCH) + b"3\n", "rows.jsonl:4: .*must be a JSON object"),
        (gzip.compress(as_lines(BIGBENCH), mtime=0)[:-9], "gzip"),
        (as_lines([{**BIGBENCH[0], "steps": "a"}]), r"rows.jsonl:1: steps must be list\[str\]"),
        (as_lines([BIGBENCH[0], {"input": "x"}]), "rows.jsonl:2: .* lacks the field 'steps'"),
        (as_lines([{**BIGBENCH[0], "mistake_index": 3}]), "rows.jsonl:1: mistake_index must be null or a step of 0..2"),
        (as_lines([{**BIGBENCH[0], "mistake_index": True}]), "rows.jsonl:1: mistake_index must be"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_one_line(content: bytes, said: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=said) as raised:
        load(write(tmp_path / "rows.jsonl", content), "bigbench_mistake")
    assert "\n" not in str(raised.value)
    assert str(tmp_path / "rows.jsonl") in str(raised.value)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("processbench", {"label": 3}, "label must be -1 or a step of 0..2, got 3"),
        ("prmbench", {"error_steps": [0]}, "error_steps are counted from 1"),
        ("trl", {"labels": [True]}, "2 steps and 1 labels"),
        ("trl", {"labels": [True, 1]}, "all bools or all numbers"),
        ("trl", {"labels": [0.5, 1.5]}, r"lie in \[0, 1\], got 1.5"),
        ("trl", {"labels": [1, -100]}, r"lie in \[0, 1\], got -100: end the solution before a step that nobody judged"),
        ("trl", {"labels": [True, -100]}, "all bools or all numbers"),
        ("prm800k", prm800k_row(prm800k_step(-100, chosen=0)), "rating must be -1, 0, 1 or null, got -100"),
        ("math_shepherd", {"input": "Q? Step 1: a", "label": "Q? Step 1: a"}, f"input has no '{MARK}'"),
        ("math_shepherd", {"input": f"Q? a {MARK}", "label": "Q? a +"}, "input has no 'Step 1:'"),
        ("math_aps", {"question": "Another?"}, "prefix 0 does not begin with the question"),
        ("math_aps", {"reasoning_steps": [{"solution_prefix": "What is 6 * 7?", "mc_value": 2}]}, r"lie in \[0, 1\]"),
        ("math_aps", {"reasoning_steps": {"text": "x", "mc_value": 1, "children": []}}, "root's text is not the quest"),
        ("math_aps", {"reasoning_steps": {"text": "What is 6 * 7?", "mc_value": 1}}, "root: Node lacks .*children"),
        ("prm800k", {"label": {"steps": []}}, "label: Label lacks the field 'finish_reason'"),
        ("prm800k", prm800k_row(prm800k_step(2, chosen=0)), "step 0: completion 0: rating must be -1, 0, 1 or null"),
        ("prm800k", prm800k_row(prm800k_step(1, chosen=1)), "chosen_completion must be null or 0..0, got 1"),
        ("prm800k", {"question": {"problem": "P?", "ground_truth_answer": 5}}, "ground_truth_answer must be"),
    ],
)
def test_what_is_wrong_with_a_row_is_said_with_its_place(
    name: str, change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=r"rows\.jsonl:2: .*" + said):
        labelled(tmp_path, name, [ROWS[name][1 if name != "math_aps" else 0], {**ROWS[name][0], **change}])


@pytest.mark.parametrize(("name", "field"), [("processbench", "id"), ("prmbench", "idx")])
def test_rows_that_differ_under_one_published_id_are_kept_and_counted(
    name: str, field: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = ROWS[name][0]
    others = [{**first, "another_column": number} for number in range(3)]
    records = labelled(tmp_path, name, [first, *others])
    assert len({record.id for record in records}) == len(records)
    assert {record.info["row"].partition("~")[2] for record in records} == {"", "2", "3", "4"}
    assert "3 rows have the id of an earlier row" in caplog.text
    assert published_rows(records, step_format(name), "x") == [first, *others]
    assert {first[field]} == {row[field] for row in published_rows(records, step_format(name), "x")}


def test_an_unknown_format_names_those_there_are() -> None:
    with pytest.raises(BadInput, match="no step format 'prm80k': there are prm800k, math_shepherd"):
        step_format("prm80k")


def test_the_stages_import_and_export_a_file(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.json.gz", gzip.compress(json.dumps(PROCESSBENCH).encode()))
    context = StageContext(None, tmp_path / "labelled.jsonl", 10.0)
    write_records(context.output, ImportSteps("processbench").run(str(path), context))
    assert context.counts == {
        "published_rows": 2, "steps": 5, "unjudged_steps": 1, "with_error": 1, "first_error_unknown": 0, "defects": 0,
    }  # fmt: skip
    back = ExportSteps("processbench").run(str(context.output), context)
    assert isinstance(back, str)
    assert json.loads(back) == PROCESSBENCH
    assert len(ExportSteps("trl").run(str(context.output), context)) == 2
    assert context.counts["steps_left_out"] == 1
