"""What the published tasks share: ids, options, shards, split plans, files, the hub, bad rows, the listing stage."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from espalier.data.jsonl import read_records, write_records
from espalier.data.prompts import PromptTemplate
from espalier.data.records import BadInput, Problem
from espalier.data.sources import RejectedRow
from espalier.data.splits import SplitPlan, proportional_sizes, shard_of
from espalier.data.tasks.gsm8k import GSM8K
from espalier.data.tasks.logical_reading import LogiQA2
from espalier.data.tasks.problem_file import ProblemFile
from espalier.pipeline.problems.list_problems import ListProblems
from espalier.pipeline.stage import StageContext


def gsm8k(folder: Path, count: int, split: str = "train") -> GSM8K:
    """`count` invented rows in the published layout."""
    rows = [{"question": f"What is {i} + 1?", "answer": f"{i}+1={i + 1}\n#### {i + 1}"} for i in range(count)]
    write_lines(folder / f"{split}.jsonl", rows)
    return GSM8K(str(folder))


def write_lines(path: Path, rows: Sequence[Any]) -> None:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))


def own(ids: Iterable[str]) -> dict[str, str]:
    """The keys of problems without a passage: their ids."""
    return {identity: identity for identity in ids}


def choice(number: int, answer: int = 1, **more: Any) -> dict[str, Any]:
    options = [f"{word} {number}" for word in ("red", "green", "blue", "grey")]
    return {"id": number, "answer": answer, "text": "A passage.", "question": "Which?", "options": options, **more}


def logiqa(folder: Path, rows: Sequence[Any]) -> LogiQA2:
    write_lines(folder / "dev.txt", rows)
    return LogiQA2(str(folder))


def test_a_published_id_that_stands_again_gets_a_number(tmp_path: Path) -> None:
    problems = logiqa(tmp_path, [choice(7), choice(8), choice(7, answer=2), choice(7)]).problems("dev")
    assert [problem.id for problem in problems] == [
        "logiqa2-dev-7", "logiqa2-dev-8", "logiqa2-dev-7.2", "logiqa2-dev-7.3"
    ]  # fmt: skip
    assert [problem.info.get("published_id") for problem in problems] == [None, None, "7", "7"]


def test_an_order_of_options_moves_the_gold_along(tmp_path: Path) -> None:
    task = replace(logiqa(tmp_path, [choice(1, answer=1)]), option_order="BCAD")
    (problem,) = task.problems("dev")
    assert problem.options == ["green 1", "blue 1", "red 1", "grey 1"]
    assert problem.gold == "A"
    assert problem.info["option_order"] == [1, 2, 0, 3]


def test_an_order_longer_than_the_options_is_cut_and_a_shorter_one_refused(tmp_path: Path) -> None:
    task = logiqa(tmp_path, [choice(1, answer=3)])
    (problem,) = replace(task, option_order="EDCBA").problems("dev")
    assert (problem.options[0], problem.gold) == ("grey 1", "A")
    with pytest.raises(BadInput, match=r"logiqa2-dev-1 has 4 options: task\.option_order=CBA is too short"):
        replace(task, option_order="CBA").problems("dev")


def test_seeded_orders_differ_by_problem_and_keep_the_right_option(tmp_path: Path) -> None:
    task = logiqa(tmp_path, [choice(number, answer=number % 4) for number in range(40)])
    plain, shown = task.problems("dev"), replace(task, option_order="seeded", option_seed=3).problems("dev")
    assert shown == replace(task, option_order="seeded", option_seed=3).problems("dev")
    assert shown != replace(task, option_order="seeded", option_seed=4).problems("dev")
    assert len({tuple(problem.info["option_order"]) for problem in shown}) > 10
    for before, after in zip(plain, shown, strict=True):
        assert after.options["ABCD".index(str(after.gold))] == before.options["ABCD".index(str(before.gold))]
        assert [before.options[i] for i in after.info["option_order"]] == after.options


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"option_order": "ABD"}, "option_order must be"),
        ({"option_order": "AAB"}, "option_order must be"),
        ({"kind": "vibes"}, "kind must be one of"),
        ({"shard": 2, "num_shards": 2}, "shard must be 0 to 1"),
        ({"limit": -1}, "limit must be 0"),
    ],
)
def test_a_wrong_setting_is_refused_when_the_task_is_built(setting: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        GSM8K("anywhere", **setting)


def test_shards_are_a_partition_and_limit_comes_after(tmp_path: Path) -> None:
    task = gsm8k(tmp_path, 200)
    everything = [problem.id for problem in task.problems("train")]
    shards = [[p.id for p in replace(task, shard=i, num_shards=3).problems("train")] for i in range(3)]
    assert sorted(everything) == sorted(identity for shard in shards for identity in shard)
    assert all(shard_of(identity, 3) == i for i in range(3) for identity in shards[i])
    assert min(len(shard) for shard in shards) > 40
    limited = replace(task, shard=1, num_shards=3, limit=5).problems("train")
    assert [problem.id for problem in limited] == shards[1][:5]


def test_sizes_scale_by_largest_remainder() -> None:
    assert proportional_sizes({"train": 11500, "dev": 500, "test": 500}, 7500) == {
        "train": 6900, "dev": 300, "test": 300
    }  # fmt: skip
    assert proportional_sizes({"a": 1, "b": 1, "c": 1}, 5) == {"a": 2, "b": 2, "c": 1}
    assert proportional_sizes({"a": 9, "b": 1}, 0) == {"a": 0, "b": 0}


def test_a_plan_is_a_function_of_the_ids_and_gives_each_one_split() -> None:
    ids = [f"p-{i}" for i in range(20)]
    plan = SplitPlan({"train": 15, "dev": 5})
    assigned = plan.assign(own(ids))
    assert plan.assign(own(ids[::-1])) == assigned
    assert sorted(assigned) == sorted(ids)
    assert [list(assigned.values()).count(name) for name in ("train", "dev")] == [15, 5]
    assert SplitPlan({"train": 15, "dev": 5}, seed=1).assign(own(ids)) != assigned
    assert plan.note(20) == ""
    assert plan.note(8) == ("the plan is made for 20 problems and there are 8: divided in proportion (train 6, dev 2)")


def test_the_known_sizes_are_exact_where_the_data_is_whole() -> None:
    assigned = SplitPlan({"train": 11500, "dev": 500}).assign(own(f"math-train-{i}" for i in range(12000)))
    assert Counter(assigned.values()) == {"train": 11500, "dev": 500}


def test_version_one_of_the_draw_never_changes() -> None:
    assigned = SplitPlan({"train": 7, "dev": 3}).assign(own(f"gsm8k-train-{i}" for i in range(10)))
    assert [i for i in range(10) if assigned[f"gsm8k-train-{i}"] == "dev"] == [1, 2, 3]


def test_problems_of_one_passage_fall_into_one_split(tmp_path: Path) -> None:
    """White space does not make another passage; the sizes are off by less than the problems of one."""
    rows = [choice(n, text=f"Passage {n // 5}{' ' * (n % 2)} ends.") for n in range(100)]
    task = replace(logiqa(tmp_path, rows), splits=SplitPlan({"train": 82, "held": 18}, pool=("dev",)))
    parts = {split: task.problems(split) for split in ("train", "held")}
    assert not {p.passage_id for p in parts["train"]} & {p.passage_id for p in parts["held"]}
    assert len({p.passage_id for part in parts.values() for p in part}) == 20
    assert {split: len(part) for split, part in parts.items()} == {"train": 85, "held": 15}


def test_problems_without_a_passage_have_none_and_a_file_may_name_its_own(tmp_path: Path) -> None:
    assert {p.passage_id for p in gsm8k(tmp_path, 3).problems("train")} == {""}
    rows = [{"id": f"q{n}", "question": "So?", "gold": "yes", "context": f"Text {n}.", **more}
            for n, more in enumerate([{"passage_id": "story-7"}, {}])]  # fmt: skip
    write_lines(tmp_path / "own.jsonl", rows)
    named, hashed = ProblemFile(str(tmp_path / "own.jsonl"), kind="short_answer").problems("own")
    assert named.passage_id == "story-7"
    assert hashed.passage_id.startswith("passage-")


def test_a_context_that_many_problems_have_is_no_passage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An instruction before every question would leave nothing to hold out."""
    rows = [{"id": f"q{n}", "question": "So?", "gold": "yes", "context": "Read well." if n < 70 else f"Text {n // 2}."}
            for n in range(100)]  # fmt: skip
    write_lines(tmp_path / "own.jsonl", rows)
    found = [p.passage_id for p in ProblemFile(str(tmp_path / "own.jsonl"), kind="short_answer").problems("own")]
    assert found[:70] == [""] * 70
    assert len(set(found[70:])) == 15
    assert "70 problems have one context" in caplog.text
    write_lines(tmp_path / "own.jsonl", [{**one, "passage_id": "all"} for one in rows])
    assert {p.passage_id for p in ProblemFile(str(tmp_path / "own.jsonl"), kind="short_answer").problems("own")} == {
        "all"
    }


@pytest.mark.parametrize("bad", [{"sizes": {}}, {"sizes": {"train": 0}}, {"sizes": {"a": 1}, "version": 9}])
def test_a_plan_that_means_nothing_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=r"splits\."):
        SplitPlan(**bad)


def test_a_plan_divides_train_and_leaves_the_published_test(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gsm8k(tmp_path, 4, "test")
    task = replace(gsm8k(tmp_path, 20), splits=SplitPlan({"train": 15, "dev": 5}))
    parts = {split: [p.id for p in task.problems(split)] for split in ("train", "dev", "test")}
    assert {split: len(ids) for split, ids in parts.items()} == {"train": 15, "dev": 5, "test": 4}
    assert sorted(parts["train"] + parts["dev"]) == sorted(f"gsm8k-train-{i}" for i in range(20))
    assert parts["test"][0] == "gsm8k-test-0"
    assert not caplog.records
    assert len(replace(task, splits=SplitPlan({"train": 30, "dev": 10})).problems("dev")) == 5
    assert "the plan is made for 40 problems and there are 20" in caplog.text


def test_files_are_found_in_the_folder_above_it_and_gzipped(tmp_path: Path) -> None:
    inner = tmp_path / "gsm8k"
    inner.mkdir()
    expected = gsm8k(inner, 3).problems("train")
    import gzip

    for name, is_kept in (("train.jsonl", True), ("train.jsonl.gz", False)):
        if not is_kept:
            (inner / name).write_bytes(gzip.compress((inner / "train.jsonl").read_bytes()))
            (inner / "train.jsonl").unlink()
        for path in (inner, tmp_path, inner / name):
            assert GSM8K(str(path)).problems("train") == expected


def test_one_file_is_the_split_its_name_says_or_any(tmp_path: Path) -> None:
    task = gsm8k(tmp_path, 3)
    with pytest.raises(BadInput, match="holds the split 'train' and not 'test'"):
        GSM8K(str(tmp_path / "train.jsonl")).problems("test")
    (tmp_path / "mine.jsonl").write_bytes((tmp_path / "train.jsonl").read_bytes())
    assert GSM8K(str(tmp_path / "mine.jsonl")).problems("test")[0].id == "gsm8k-test-0"
    with pytest.raises(BadInput, match="no published split 'dev': it has train, test"):
        task.problems("dev")
    with pytest.raises(BadInput, match=r"set ESPALIER_DATA, task\.path=FOLDER or task\.hub=NAME"):
        GSM8K("").problems("train")
    (tmp_path / "other").mkdir()
    with pytest.raises(BadInput, match=r"none of train\.jsonl, .* is in "):
        GSM8K(str(tmp_path / "other")).problems("train")


def test_a_folder_in_the_place_of_the_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").mkdir()
    with pytest.raises(BadInput, match=r"train\.jsonl: is a folder where a file is expected"):
        GSM8K(str(tmp_path)).problems("train")


BAD_ROWS = [
    choice(0),
    choice(1, answer=4),
    "{torn\n",
    choice(2, options=["a", "b", 3, "d"]),
    choice(3, question="  "),
    {"id": 4, "text": "t", "question": "q", "options": ["a", "b"]},
    choice(5),
]
REASONS = [
    (2, "the gold option must be 0 to 3, got 4"),
    (3, "not a JSON object"),
    (4, "options must be a list of strings"),
    (5, "question is empty"),
    (6, "no gold answer, where other rows of the file have theirs"),
]


def test_bad_rows_are_returned_with_place_and_reason(tmp_path: Path) -> None:
    problems, rejected = logiqa(tmp_path, BAD_ROWS).read_rows("dev")
    assert [problem.id for problem in problems] == ["logiqa2-dev-0", "logiqa2-dev-5"]
    assert [(row.line, row.file) for row in rejected] == [(line, str(tmp_path / "dev.txt")) for line, _ in REASONS]
    assert all(reason in row.reason for (_, reason), row in zip(REASONS, rejected, strict=True))


def test_problems_refuses_the_first_bad_row_unless_told_to_skip(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = logiqa(tmp_path, BAD_ROWS)
    with pytest.raises(BadInput, match=r"dev\.txt:2: the gold option must be 0 to 3, got 4 \(and 4 more rows\)"):
        task.problems("dev")
    assert len(replace(task, skip_bad_rows=True).problems("dev")) == 2
    assert "5 rows left out" in caplog.text


def test_the_prompt_is_the_templates(tmp_path: Path) -> None:
    task = replace(gsm8k(tmp_path, 1), template=PromptTemplate("Q: {question}\nA:"))
    assert task.prompt(task.problems("train")[0]) == "Q: What is 0 + 1?\nA:"


def test_a_set_without_solutions_has_no_demonstrations(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="logiqa2 has no worked solutions"):
        logiqa(tmp_path, [choice(1)]).demonstrations("dev")


def test_the_hub_and_the_file_give_the_same_problems(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    (tmp_path / "files").mkdir()
    rows = [choice(1, type={"X": True}), choice(2), choice(1)]
    expected = logiqa(tmp_path / "files", rows).problems("dev")
    table = datasets.Dataset.from_list([{**row, "type": row.get("type")} for row in rows])
    datasets.DatasetDict({"validation": table}).save_to_disk(str(tmp_path / "saved"))
    assert LogiQA2(hub=str(tmp_path / "saved")).problems("dev") == expected
    table.save_to_disk(str(tmp_path / "one"))
    assert LogiQA2(hub=str(tmp_path / "one")).problems("dev") == expected
    with pytest.raises(BadInput, match=r"saved/test: cannot be loaded .*check its name, split and revision"):
        LogiQA2(hub=str(tmp_path / "saved")).problems("test")


def test_a_folder_that_the_datasets_library_reads_is_a_hub_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "data").mkdir()
    expected = gsm8k(tmp_path / "data", 3).problems("train")
    assert GSM8K(hub=str(tmp_path / "data")).problems("train") == expected


def test_the_stage_lists_problems_and_rejected_rows(tmp_path: Path) -> None:
    task = logiqa(tmp_path, [*BAD_ROWS, choice(5), choice(6, options=["a", "a", "b", "c"]), choice(7), choice(8)])
    context = StageContext(task, tmp_path / "out" / "problems.jsonl", 10.0)
    context.output.parent.mkdir()
    listed = list(ListProblems("dev").run("", context))
    write_records(context.output, listed)
    assert read_records(Problem, context.output) == listed
    rejects = [json.loads(line) for line in (tmp_path / "out" / "problems.rejected.jsonl").read_text().splitlines()]
    assert [RejectedRow(**row) for row in rejects] == task.read_rows("dev")[1]
    assert context.counts == {
        "loaded": 6, "unlabelled": 0, "repeated": 1, "repeated_ids": 1, "repeated_options": 1, "rejected": 5
    }  # fmt: skip


def test_listed_problems_are_a_task_again_and_orders_of_options_compose(tmp_path: Path) -> None:
    task = replace(logiqa(tmp_path, [choice(7), choice(7, answer=3), choice(9, answer=0)]), option_order="BCAD")
    listed = task.problems("dev")
    write_records(tmp_path / "mine.jsonl", listed)
    again = ProblemFile(str(tmp_path / "mine.jsonl"), kind="choice")
    assert again.problems("dev") == listed
    twice = replace(again, option_order="CABD").problems("dev")
    assert [problem.info["option_order"] for problem in twice] == [[0, 1, 2, 3]] * 3
    assert twice[0].options == choice(7)["options"]
    write_lines(tmp_path / "mine.jsonl", [vars(listed[0]), vars(listed[0]), {"id": "x", "question": "q"}])
    assert [row.reason.split(" (")[0] for row in again.read_rows("dev")[1]] == [
        "the id 'logiqa2-dev-7' is that of another line: give every line one of its own",
        "the row has no answer: it needs one of ground_truth, gold, answer",
    ]


def test_demonstrations_follow_the_template(tmp_path: Path) -> None:
    task = replace(gsm8k(tmp_path, 1), template=PromptTemplate("Q: {question}\nA:", before_response=" "))
    (row,) = task.demonstrations("train")
    assert (row.prompt, row.completion) == ("Q: What is 0 + 1?\nA:", " 0+1=1\n#### 1")


def test_an_unlabelled_problem_is_predicted_and_never_right(tmp_path: Path) -> None:
    grade = logiqa(tmp_path, [choice(1)]).grade("", "Finish[C]", 4)
    assert (grade.answer, grade.is_correct) == ("C", False)


def test_the_stage_leaves_no_list_of_rejected_rows_where_there_are_none(tmp_path: Path) -> None:
    context = StageContext(gsm8k(tmp_path, 2), tmp_path / "problems.jsonl", 10.0)
    (tmp_path / "problems.rejected.jsonl").write_text("old\n")
    assert len(list(ListProblems().run("", context))) == 2
    assert not (tmp_path / "problems.rejected.jsonl").exists()
