"""Other people's solutions scored by other people's models, and by one's own behind the task's prompt."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForTokenClassification

from espalier.data.jsonl import read_records, write_records
from espalier.data.prompts import encode_prompt
from espalier.data.records import AnnotatedSolution, BadInput, Problem, StepScores
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.data.token_text import tokenise_steps
from espalier.models.load import load_config, load_tokenizer
from espalier.models.published.load import load_published
from espalier.models.published.scoring import PublishedScorer, Solution
from espalier.models.published.table import PUBLISHED
from espalier.models.scalar_head import load_process_reward
from espalier.pipeline.prm import score_solutions
from espalier.pipeline.prm.evaluate_prm_benchmarks import EvaluatePRMBenchmarks
from espalier.pipeline.prm.import_steps import ImportSteps
from espalier.pipeline.prm.score_solutions import ScoreSolutions
from espalier.pipeline.stage import StageContext
from espalier.rewards.process import score_step_tokens

ROWS = [
    AnnotatedSolution(f"s{n}", f"p{n % 2}", f"How many are {n} and 2?", [f"{n} + 2 = {n + 2}", "So it is that."],
                      [1.0, 1.0], -1, True)
    for n in range(5)
]  # fmt: skip


@pytest.fixture(scope="module")
def two_classes(tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as TRL's trainer leaves it."""
    folder = tmp_path_factory.mktemp("published") / "model"
    config = load_config(str(tiny_policy))
    config.num_labels = 2
    AutoModelForTokenClassification.from_config(config).save_pretrained(folder)
    load_tokenizer(str(tiny_policy)).save_pretrained(folder)
    return folder


def score(folder: Path, rows: Path, output: Path, task: Any = None, **settings: Any) -> list[StepScores]:
    context = StageContext(task, output, 10.0)
    return list(ScoreSolutions(str(folder), **settings).run(str(rows), context))


def test_solutions_are_scored_by_the_row_that_the_config_names(two_classes: Path, tmp_path: Path) -> None:
    write_records(tmp_path / "rows.jsonl", ROWS)
    found = score(two_classes, tmp_path / "rows.jsonl", tmp_path / "out.jsonl")
    row = PUBLISHED["trl"]
    scorer = PublishedScorer(load_published(str(two_classes), row), load_tokenizer(str(two_classes)), row)
    expected = scorer.scores([Solution(one.id, one.question, one.steps) for one in ROWS])
    assert [one.id for one in found] == [one.id for one in ROWS]
    assert [one.scores for one in found] == expected
    assert {one.is_seen for one in found} == {None}, "its folder does not say what it was trained on"


def test_a_run_that_was_stopped_goes_on(two_classes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_solutions, "_BLOCK", 2)
    write_records(tmp_path / "rows.jsonl", [*ROWS, AnnotatedSolution("bad", "p", "", ["\u200b"], [1.0], -1, True)])
    broken = PublishedScorer.scores
    calls = []

    def dies(self: PublishedScorer, solutions: Any, *arguments: Any, **named: Any) -> Any:
        calls.append(len(solutions))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return broken(self, solutions, *arguments, **named)

    monkeypatch.setattr(PublishedScorer, "scores", dies)
    with pytest.raises(KeyboardInterrupt):
        score(two_classes, tmp_path / "rows.jsonl", tmp_path / "out.jsonl")
    found = score(two_classes, tmp_path / "rows.jsonl", tmp_path / "out.jsonl")
    assert calls == [2, 2, 2, 2], "the first two are kept"
    assert len(found) == 6
    with pytest.raises(BadInput, match=r"holds scores of another input or of other models"):
        score(two_classes, tmp_path / "rows.jsonl", tmp_path / "out.jsonl", layout="pure")


def test_a_model_trained_here_reads_solutions_behind_its_tasks_prompt(
    tiny_policy: Path, task: WordArithmetic, tmp_path: Path
) -> None:
    tokenizer, folder = load_tokenizer(str(tiny_policy)), tmp_path / "prm"
    load_process_reward(str(tiny_policy), 1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_records(tmp_path / "rows.jsonl", ROWS)
    found = score(folder, tmp_path / "rows.jsonl", tmp_path / "out.jsonl", task, layout="task")
    solutions = []
    for row in ROWS:
        prompt = encode_prompt(task, tokenizer, Problem(row.problem_id, row.question, ""))
        tokens = tokenise_steps(tokenizer, prompt.ids, [f"{step}\n" for step in row.steps], False)
        assert tokens is not None
        solutions.append(tokens)
    expected = score_step_tokens(load_process_reward(str(folder)), solutions, pad_id=0)
    assert [row.scores for row in found] == expected


def test_what_cannot_be_scored_is_one_line(two_classes: Path, tiny_policy: Path, tmp_path: Path) -> None:
    write_records(tmp_path / "rows.jsonl", ROWS)
    paths = (tmp_path / "rows.jsonl", tmp_path / "out.jsonl")
    with pytest.raises(BadInput, match=r"stage\.layout must be auto, task or one of math_shepherd, .*, got 'qwenn'"):
        score(two_classes, *paths, layout="qwenn")
    with pytest.raises(BadInput, match=r"stage\.layout=task reads a solution behind the task's prompt: set task"):
        score(two_classes, *paths, layout="task")


def test_processbench_goes_from_its_file_to_a_table(
    two_classes: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A random model finds no error that its index would not tell; the table shows both."""
    file = Path(os.environ.get("ESPALIER_DATA", "../shared/datasets")) / "processbench" / "gsm8k.json"
    if not file.is_file():
        pytest.skip("processbench/gsm8k.json is not there: set ESPALIER_DATA")
    rows = list(ImportSteps("processbench").run(str(file), StageContext(None, tmp_path / "rows.jsonl", 10.0)))
    kept = sorted(rows, key=lambda row: sum(map(len, row.steps)))[:100]
    write_records(tmp_path / "rows.jsonl", kept)
    caplog.set_level(logging.WARNING)
    found = score(two_classes, tmp_path / "rows.jsonl", tmp_path / "scores.jsonl")
    write_records(tmp_path / "scores.jsonl", found)
    context = StageContext(None, tmp_path / "out.json", 10.0)
    table = EvaluatePRMBenchmarks(str(tmp_path / "scores.jsonl"), tune_share=0.4).run(
        str(tmp_path / "rows.jsonl"), context
    )
    assert len(read_records(StepScores, tmp_path / "scores.jsonl")) == 100
    assert {"first_error f1", "index alone: first_error f1", "steps inner_auc"} <= {
        row["metric"] for row in table["table"]["rows"]
    }
    num_too_long = sum(not row.scores for row in found)
    assert num_too_long > 0, "its tokenizer was made for small sums"
    assert table["left_out"]["no score was given"] == num_too_long
    assert f"{num_too_long} of 100 solutions are longer than the model takes" in caplog.text
