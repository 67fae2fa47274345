"""Which labels a first sample calls for, and step scores beside the truth."""

from dataclasses import replace
from pathlib import Path

import pytest

from espalier.data.jsonl import write_records
from espalier.data.records import BadInput, StepScores, Trajectory
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.pipeline.prm.compare_with_truth import CompareWithTruth
from espalier.pipeline.stage import StageContext
from espalier.pipeline.values.choose_labels import ChooseLabels

ROW = Trajectory(
    id="p/0",
    problem_id="p",
    prompt="?",
    response="a",
    steps=["a"],
    prompt_ids=[1],
    response_ids=[2],
    step_ends=[1],
    finish_reason="stop",
    gold="",
    answer="",
    is_correct=False,
)


def choice(path: Path, num_right: int, **settings: object) -> dict[str, object]:
    """Return the choice for 200 trajectories of which so many are right."""
    write_records(path, [replace(ROW, id=f"p/{k}", is_correct=k < num_right) for k in range(200)])
    return ChooseLabels(**settings).run(str(path), StageContext(None, path, 60))  # type: ignore[arg-type]


def test_rare_success_calls_for_contrast_and_other_success_for_values(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    assert choice(path, 39)["labels"] == "contrast"
    assert choice(path, 40)["labels"] == "values"
    assert choice(path, 39, labels="values")["labels"] == "values"
    assert choice(path, 39, labels="relative")["labels"] == "relative"


def test_the_choice_says_by_which_rule_it_was_made(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    solved = "1 of 1 problems solved"
    assert choice(path, 39)["why"] == f"19.5% of 200 trajectories are right (below stage.rare_below=0.2), {solved}"
    assert choice(path, 40)["why"] == f"20.0% of 200 trajectories are right (not below stage.rare_below=0.2), {solved}"
    assert "(below stage.rare_below=0.2, but fewer than 30 right trajectories)" in str(choice(path, 29)["why"])
    assert "(as stage.labels says)" in str(choice(path, 39, labels="values")["why"])


def test_too_few_right_trajectories_to_contrast_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert choice(tmp_path / "t.jsonl", 5)["labels"] == "values"
    assert "5 right trajectories are too few to label steps by contrast" in caplog.text


@pytest.mark.parametrize("labels", ["auto", "contrast"])
def test_where_no_trajectory_is_right_nothing_is_completed_but_by_name(labels: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is none, and values would be next to 0 everywhere: sample more problems"):
        choice(tmp_path / "t.jsonl", 0, labels=labels)
    for name in ("values", "relative"):
        assert choice(tmp_path / "t.jsonl", 0, labels=name)["labels"] == name


def test_a_pilot_foresees_the_labels_of_all_and_refuses_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """5 of 200 are right: 25 of 1,000, which are too few, and 50 of 2,000, which are not."""
    path = tmp_path / "t.jsonl"
    assert choice(path, 5, of_trajectories=1000)["labels"] == "values"
    assert "25 right trajectories are too few" in caplog.text
    found = choice(path, 5, of_trajectories=2000)
    assert found["labels"] == "contrast"
    assert str(found["why"]).endswith("1 of 1 problems solved; some 50 right ones if there are 2000")
    assert choice(path, 40, of_trajectories=2000)["labels"] == "values"
    assert choice(path, 0, of_trajectories=2000)["labels"] == "values"
    with pytest.raises(BadInput, match=r"stage\.of_trajectories is a number of trajectories"):
        ChooseLabels(of_trajectories=-1)


def test_an_unknown_kind_of_labels_is_refused() -> None:
    with pytest.raises(BadInput, match=r"stage\.labels must be auto"):
        ChooseLabels(labels="best")


def test_a_share_above_one_is_refused() -> None:
    with pytest.raises(BadInput, match=r"stage\.rare_below is a share"):
        ChooseLabels(rare_below=20)


def solved(index: int, steps: list[str]) -> Trajectory:
    """Return a response to dev problem `index`, a token per step."""
    problem = WordArithmetic(num_dev=2).problems("dev")[index]
    ids = list(range(10, 10 + len(steps)))
    ends = list(range(1, len(steps) + 1))
    return replace(ROW, id=f"{problem.id}/0", problem_id=problem.id, response="".join(steps), steps=steps,
                   response_ids=ids, step_ends=ends, prompt=f"{problem.question}\n", gold=problem.gold)  # fmt: skip


def test_scores_that_follow_the_truth_have_an_auc_of_one_and_their_index_less(tmp_path: Path) -> None:
    """One true solution, and one whose first line is outside the grammar: right steps score 0.9, wrong ones 0.1."""
    task = WordArithmetic(num_dev=2)
    true = [line + "\n" for line in task.demonstrations("dev")[0].completion.split("\n")]
    true[-1] = true[-1].rstrip("\n")
    rows = [solved(0, true), solved(1, ["nothing\n"] * (len(true) - 1) + ["#### 1"])]
    write_records(tmp_path / "t.jsonl", rows)
    scores = [
        StepScores(row.id, row.problem_id, [value] * len(row.steps))
        for row, value in zip(rows, (0.9, 0.1), strict=True)
    ]
    write_records(tmp_path / "s.jsonl", scores)
    stage = CompareWithTruth(str(tmp_path / "s.jsonl"))
    found = stage.run(str(tmp_path / "t.jsonl"), StageContext(task, tmp_path / "out.json", 60))
    assert found["inner_auc"]["mean"] == 1.0
    assert found["index_auc"]["mean"] == 0.5
    assert found["right_share"] == 0.5
    assert found["num_steps"] == 2 * (len(true) - 1)


def test_problems_that_the_reward_model_may_have_seen_are_counted_and_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two problems: one held out, and one of which the scores say nothing, then that it was trained on."""
    rows = [solved(0, ["nothing\n", "#### 1"]), solved(1, ["nothing\n", "#### 1"])]
    write_records(tmp_path / "t.jsonl", rows)
    for is_seen, num_problems, counts, message in (
        (False, 2, (0, None), ""),
        (None, 2, (0, 1), "of 1 of 2 problems nobody knows whether the reward model was trained on them"),
        (True, 1, (1, None), "1 of 2 problems were in the reward model's training set and take no part"),
    ):
        flags = (False, is_seen)
        scores = [StepScores(r.id, r.problem_id, [0.5, 0.5], flag) for r, flag in zip(rows, flags, strict=True)]
        write_records(tmp_path / "s.jsonl", scores)
        caplog.clear()
        context = StageContext(WordArithmetic(num_dev=2), tmp_path / "out.json", 60)
        found = CompareWithTruth(str(tmp_path / "s.jsonl")).run(str(tmp_path / "t.jsonl"), context)
        assert found["num_problems"] == num_problems
        names = ("problems_seen_by_the_reward_model", "problems_perhaps_seen")
        assert tuple(context.counts.get(name) for name in names) == counts
        assert message in caplog.text
        assert bool(message) == ("trained" in caplog.text or "training" in caplog.text)


def test_a_task_that_knows_no_truth_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="only an enumerable task"):
        CompareWithTruth("s").run("t", StageContext(None, tmp_path / "out.json", 60))


def test_another_problem_of_the_same_id_is_refused(tmp_path: Path) -> None:
    """Ids count the problems of a split: those of a task with other settings are other problems."""
    row = solved(0, ["nothing\n", "#### 1"])
    write_records(tmp_path / "t.jsonl", [row])
    write_records(tmp_path / "s.jsonl", [StepScores(row.id, row.problem_id, [0.1, 0.1])])
    stage = CompareWithTruth(str(tmp_path / "s.jsonl"))
    other = WordArithmetic(num_dev=2, min_operations=6, max_operations=7)
    with pytest.raises(BadInput, match="answers another problem than the task's 'wa-dev-0'"):
        stage.run(str(tmp_path / "t.jsonl"), StageContext(other, tmp_path / "out.json", 60))


def test_steps_that_are_not_the_tasks_are_refused_and_not_called_wrong(tmp_path: Path) -> None:
    """A true solution that was split anew (values/split_steps): its first step ends within a line."""
    task = WordArithmetic(num_dev=2)
    text = task.demonstrations("dev")[0].completion
    row = solved(0, [text[:5], text[5:]])
    write_records(tmp_path / "t.jsonl", [row])
    write_records(tmp_path / "s.jsonl", [StepScores(row.id, row.problem_id, [0.9, 0.9])])
    with pytest.raises(BadInput, match=f"'{row.id}' is not cut into steps as the task cuts it"):
        CompareWithTruth(str(tmp_path / "s.jsonl")).run(
            str(tmp_path / "t.jsonl"), StageContext(task, tmp_path / "out.json", 60)
        )


def test_contrast_of_multiple_choice_answers_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "t.jsonl"
    write_records(path, [replace(ROW, id=f"p/{k}", is_correct=k < 10, num_options=10) for k in range(100)])
    ChooseLabels(labels="contrast").run(str(path), StageContext(None, path, 60))
    assert "of 10 options one in 10 answers is right by luck" in caplog.text
