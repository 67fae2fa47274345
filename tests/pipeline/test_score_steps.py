"""Other people's solutions scored by other people's models, and by one's own behind the task's prompt."""

import json
import logging
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from benchmarks.processes.forked import run_ranks
from espalier.data.jsonl import read_records, write_records
from espalier.data.prompts import encode_prompt
from espalier.data.records import AnnotatedSolution, BadInput, Problem, StepScores, Trajectory
from espalier.data.steps import StepTokens
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.data.token_text import tokenise_steps
from espalier.data.training_layout import TrainingLayout, write_training_layout
from espalier.models import precision
from espalier.models.load import BadModel, load_config, load_tokenizer
from espalier.models.published.layouts import Pieces
from espalier.models.published.load import load_published
from espalier.models.published.scoring import PublishedScorer, Solution
from espalier.models.published.table import PUBLISHED, deviate
from espalier.models.scalar_head import load_process_reward
from espalier.pipeline.evaluation.evaluate import Evaluate
from espalier.pipeline.evaluation.evaluation_inputs import OutcomeScore
from espalier.pipeline.prm.evaluate_prm_benchmarks import EvaluatePRMBenchmarks
from espalier.pipeline.prm.import_steps import ImportSteps
from espalier.pipeline.prm.score_steps import ScoreSteps, _Scoring
from espalier.pipeline.prm.step_inputs import choose_layout
from espalier.pipeline.prm.step_scorers import shown
from espalier.pipeline.stage import StageContext
from espalier.rewards.process import score_step_tokens
from espalier.runtime.entrypoint import build, compose_config
from espalier.runtime.schemas import StageConfig

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
    return list(ScoreSteps(str(folder), **settings).run(str(rows), context))


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
    rows = tmp_path / "rows.jsonl"
    write_records(rows, [*ROWS, AnnotatedSolution("bad", "p", "", ["\u200b"], [1.0], -1, True)])
    whole = score(two_classes, rows, tmp_path / "whole.jsonl", batch_tokens=16)
    unbroken = PublishedScorer.scores_of
    calls = []

    def dies(self: PublishedScorer, solutions: Any, *arguments: Any, **named: Any) -> Any:
        calls.append(len(solutions))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return unbroken(self, solutions, *arguments, **named)

    monkeypatch.setattr(PublishedScorer, "scores_of", dies)
    with pytest.raises(KeyboardInterrupt):
        score(two_classes, rows, tmp_path / "out.jsonl", batch_tokens=16)
    found = score(two_classes, rows, tmp_path / "out.jsonl", batch_tokens=16)
    assert calls[1] == calls[2] > 0, "the first block is kept"
    assert sum(calls) - calls[1] == 6
    assert [row.id for row in found] == [row.id for row in whole]
    assert found == whole
    with pytest.raises(BadInput, match=r"holds scores of another input or of other models \(layout differs\)"):
        score(two_classes, rows, tmp_path / "out.jsonl", layout="pure")
    is_fast = precision.has_fast_bf16("cpu")
    monkeypatch.setattr(precision, "has_fast_bf16", lambda kind: not is_fast)
    with pytest.raises(BadInput, match=r"holds scores in (bf16|fp32), and this machine scores in (bf16|fp32): go on"):
        score(two_classes, rows, tmp_path / "out.jsonl", batch_tokens=16)


def test_rows_that_other_starts_and_ranks_left_are_put_into_the_inputs_order(
    two_classes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks took every second row; one of them was done and the other had begun."""
    write_records(tmp_path / "rows.jsonl", ROWS)
    expected = score(two_classes, tmp_path / "rows.jsonl", tmp_path / "whole.jsonl")
    folder = tmp_path / "out.jsonl.parts"
    score(two_classes, tmp_path / "rows.jsonl", tmp_path / "out.jsonl")
    lines = (folder / "scores-0-0-0.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 5
    (folder / "scores-0-0-0.jsonl").write_text("".join(lines[0::2]))
    (folder / "scores-0-0-1.jsonl").write_text(lines[1] + lines[3][:20])
    found = score(two_classes, tmp_path / "rows.jsonl", tmp_path / "out.jsonl")
    again = found.pop(3)
    assert again.scores == pytest.approx(expected.pop(3).scores, abs=2**-8), "alone now: bf16 rounds by the shape"
    assert replace(again, scores=[]) == StepScores("s3", "p1", [])
    assert found == expected
    (anew,) = (json.loads(line) for line in (folder / "scores-1-0-0.jsonl").read_text().splitlines())
    assert (anew["row"], anew["id"], anew["scores"]) == (3, "s3", again.scores)


def test_a_hub_model_that_has_moved_is_not_mixed_with_what_is_kept(
    two_classes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache of a hub, as its client writes it, without a network."""
    write_records(tmp_path / "rows.jsonl", ROWS)
    model = tmp_path / "hub" / "models--org--scorer"
    for commit, factor in (("a" * 40, 1.0), ("b" * 40, -1.0)):
        network = AutoModelForTokenClassification.from_pretrained(two_classes)
        network.score.weight.data.mul_(factor)
        network.save_pretrained(model / "snapshots" / commit)
        load_tokenizer(str(two_classes)).save_pretrained(model / "snapshots" / commit)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))

    def run(output: str, **settings: Any) -> list[StepScores]:
        return score(Path("org/scorer"), tmp_path / "rows.jsonl", tmp_path / output, layout="trl", **settings)

    first = run("out.jsonl")
    (model / "refs" / "main").write_text("b" * 40)
    with pytest.raises(BadInput, match=rf"by commit \['{'a' * 40}'\] .* at \['{'b' * 40}'\] now: set stage\.revision"):
        run("out.jsonl")
    assert run("out.jsonl", revision="a" * 40) == first
    assert run("new.jsonl") != first
    with pytest.raises(BadModel, match="is a folder, which has no revision"):
        score(two_classes, tmp_path / "rows.jsonl", tmp_path / "n.jsonl", revision="main")


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


def test_an_outcome_model_of_others_scores_the_whole_behind_the_last_step(
    tiny_policy: Path, task: WordArithmetic, tmp_path: Path
) -> None:
    """transformers' classifier of whole texts, as trainers of reward models leave it: read where it reads itself."""
    config, folder = load_config(str(tiny_policy)), tmp_path / "model"
    config.num_labels = 1
    torch.manual_seed(0)
    network = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
    network.get_submodule("score").weight.data.mul_(5.0)  # scores that are not all 1/2
    network.save_pretrained(folder)
    tokenizer = load_tokenizer(str(tiny_policy))
    tokenizer.save_pretrained(folder)
    rows, expected = [], []
    for row in ROWS:
        prompt = encode_prompt(task, tokenizer, Problem(row.problem_id, row.question, ""))
        tokens = tokenise_steps(tokenizer, prompt.ids, [f"{step}\n" for step in row.steps], False)
        assert tokens is not None
        ids = [*tokens.prompt_ids, *tokens.response_ids]
        with torch.inference_mode():
            expected.append(float(torch.sigmoid(network(torch.tensor([ids])).logits[0, 0])))
        rows.append(Trajectory(row.id, row.problem_id, prompt.text, "".join(f"{step}\n" for step in row.steps),
                               [f"{step}\n" for step in row.steps], tokens.prompt_ids, tokens.response_ids,
                               tokens.step_ends, "stop", "", None, False))  # fmt: skip
    assert max(expected) - min(expected) > 0.01
    write_records(tmp_path / "sampled.jsonl", rows)
    write_records(tmp_path / "written.jsonl", ROWS)
    for name in ("sampled", "written"):
        says = r"trained on responses and not on steps \(a LlamaForSeq.* evaluation/score_responses; stage\.layout=t"
        with pytest.raises(BadInput, match=says):
            score(folder, tmp_path / f"{name}.jsonl", tmp_path / "c.jsonl")
    sampled = score(folder, tmp_path / "sampled.jsonl", tmp_path / "a.jsonl", layout="tokens")
    written = score(folder, tmp_path / "written.jsonl", tmp_path / "b.jsonl", task, layout="task")
    assert [row.scores[-1] for row in sampled] == pytest.approx(expected, abs=2e-3)
    assert [len(row.scores) for row in sampled] == [2] * len(ROWS), "and one behind every step before"
    assert [row.scores for row in written] == [row.scores for row in sampled]


TURNS = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}"


@pytest.mark.parametrize("template", ["", TURNS + "{% if add_generation_prompt %}assistant: {% endif %}"])
def test_an_outcome_model_of_others_reads_samples_whole_in_its_own_layout_and_picks_the_best_of_n(
    template: str, tiny_policy: Path, task: WordArithmetic, tmp_path: Path
) -> None:
    """The question and the response's text, by its own tokenizer: nothing of how they were sampled. Its logits are as
    large as those of published ones, whose shares are all 1 or 0."""
    config, folder = load_config(str(tiny_policy)), tmp_path / "model"
    config.num_labels = 1
    torch.manual_seed(0)
    network = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
    network.get_submodule("score").weight.data.mul_(5_000.0)
    network.save_pretrained(folder)
    tokenizer = load_tokenizer(str(tiny_policy))
    tokenizer.chat_template = template or None
    tokenizer.save_pretrained(folder)
    rows, expected = [], []
    for problem in task.problems("test")[:2]:
        for number, total in enumerate("789"):
            steps = [f"{number} + 1 = {total}\n", f"#### {total}"]
            rows.append(Trajectory(f"{problem.id}/{number}", problem.id, f"Asked otherwise: {problem.question}",
                                   "".join(steps), steps, [5, 6], [7, 8], [1, 2], "stop", problem.gold, total,
                                   total == "7"))  # fmt: skip
            asked = f"user: {problem.question}<|end|>assistant: " if template else f"{problem.question}\n"
            ids = [*tokenizer(asked, add_special_tokens=False).input_ids,
                   *tokenizer("".join(steps), add_special_tokens=False).input_ids, tokenizer.eos_token_id]  # fmt: skip
            with torch.inference_mode():
                expected.append(float(network(torch.tensor([ids])).logits[0, 0]))
    assert all(len({float(torch.sigmoid(torch.tensor(one))) for one in expected[k : k + 3]}) < 3 for k in (0, 3))
    write_records(tmp_path / "rows.jsonl", rows)
    found: Any = score(folder, tmp_path / "rows.jsonl", tmp_path / "out.jsonl", task, layout="whole")
    assert all(type(row) is OutcomeScore for row in found)
    assert [row.score for row in found] == pytest.approx(expected, rel=0.02, abs=1.0)
    write_records(tmp_path / "scores.jsonl", found)
    context = StageContext(None, tmp_path / "evaluation.json", 10.0)
    table = Evaluate(scores=str(tmp_path / "scores.jsonl")).run(str(tmp_path / "rows.jsonl"), context)
    right = [expected[start] == max(expected[start : start + 3]) for start in (0, 3)]
    assert table["accuracy"]["best_of_3_outcome"]["mean"] == sum(right) / 2


def test_an_outcome_model_trained_here_reads_the_sampled_ids_and_steps_are_not_read_whole(
    tiny_prm: Path, task: WordArithmetic, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(tiny_prm, tmp_path / "orm")
    write_training_layout(folder, TrainingLayout("responses", "text"))
    row = Trajectory("t/0", "t", "$%", "&'(", ["&", "'("], [5, 6], [7, 8, 9], [1, 3], "stop", "", None, False)
    long = replace(row, id="t/1", response_ids=[7] * 9)
    write_records(tmp_path / "rows.jsonl", [row, long])
    found: Any = score(folder, tmp_path / "rows.jsonl", tmp_path / "out.jsonl", layout="whole", max_length=8)
    tokens = StepTokens([5, 6], [7, 8, 9], [3])
    ((expected,),) = score_step_tokens(load_process_reward(str(folder)), [tokens], pad_id=0)
    assert torch.sigmoid(torch.tensor(found[0].score)) == pytest.approx(expected, abs=1e-5)
    assert found == [OutcomeScore("t/0", "t", found[0].score), OutcomeScore("t/1", "t", None)]
    assert "1 solutions are longer than the model takes" in caplog.text
    write_records(tmp_path / "judged.jsonl", ROWS)
    with pytest.raises(BadInput, match="judged solutions need a score for every step"):
        score(folder, tmp_path / "judged.jsonl", tmp_path / "b.jsonl", task, layout="whole")


@pytest.mark.parametrize("num_files", [1, 2])
def test_a_model_whose_weights_are_files_of_torch_is_scored_by_the_program(
    num_files: int, two_classes: Path, tmp_path: Path
) -> None:
    write_records(tmp_path / "rows.jsonl", ROWS)
    folder = shutil.copytree(two_classes, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if num_files == 1:
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        names = [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
        places = {name: names[name.startswith("score.")] for name in weights}
        for file in names:
            torch.save({name: value for name, value in weights.items() if places[name] == file}, folder / file)
        index = {"metadata": {"total_size": 0}, "weight_map": places}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    words = [f"input={tmp_path}/rows.jsonl", f"output={tmp_path}/out.jsonl", f"stage.model={folder}"]
    codes = run_ranks("run_stage.py", ["-cn", "prm/score_steps", *words], tmp_path / "log", 1)
    assert codes == [0], (tmp_path / "log").read_text()[-3000:]
    expected = score(two_classes, tmp_path / "rows.jsonl", tmp_path / "b.jsonl")
    assert read_records(StepScores, tmp_path / "out.jsonl") == expected


@pytest.mark.slow
def test_two_ranks_score_what_one_process_does(two_classes: Path, tmp_path: Path) -> None:
    """Each takes 64 neighbours, then the next ones are the other's."""
    rows = [replace(row, id=f"{row.id}-{n}", question=f"{row.question} ({n})") for n in range(40) for row in ROWS]
    write_records(tmp_path / "rows.jsonl", rows)
    words = ["-cn", "prm/score_steps", f"input={tmp_path}/rows.jsonl", f"stage.model={two_classes}"]
    for num in (1, 2):
        log = tmp_path / f"{num}.log"
        codes = run_ranks("run_stage.py", [*words, f"output={tmp_path}/{num}.jsonl"], log, num)
        assert codes == [0] * num, log.read_text()[-3000:]
    alone, shared = (read_records(StepScores, tmp_path / f"{num}.jsonl") for num in (1, 2))
    assert [row.id for row in shared] == [row.id for row in rows]
    assert shared == alone
    said = re.findall(r"this process scored (\d+) solutions", (tmp_path / "2.log").read_text())
    assert "128" in said, "of rank 0; the other 72 are rank 1's"


def test_a_deviation_is_named_recorded_and_not_mixed_with_what_is_published(
    two_classes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL's documented inference puts a separator behind the prompt too; its training does not. By hand: ids put
    together, and one plain pass."""
    monkeypatch.setattr(precision, "has_fast_bf16", lambda device_type: False)
    write_records(tmp_path / "rows.jsonl", ROWS[:2])
    tokenizer = load_tokenizer(str(two_classes))
    network = AutoModelForTokenClassification.from_pretrained(two_classes).eval()
    changed = {"after_question": "\n", "separator": "\n\n"}
    context = StageContext(None, tmp_path / "out.jsonl", 10.0)
    found = list(ScoreSteps(str(two_classes), deviations=changed).run(str(tmp_path / "rows.jsonl"), context))
    for row, scored in zip(ROWS, found, strict=False):
        parts = [f"{row.question}\n", *(part for step in row.steps for part in (step, "\n\n"))]
        encoded = [tokenizer(part, add_special_tokens=False).input_ids for part in parts]
        ids = [tokenizer.bos_token_id] * (tokenizer.bos_token_id is not None) + [k for part in encoded for k in part]
        ends = [len(ids) - 1 - sum(map(len, encoded[3:])), len(ids) - 1]
        with torch.no_grad():
            shares = torch.softmax(network(torch.tensor([ids])).logits[0, ends], dim=-1)[:, 1]
        assert scored.scores == pytest.approx(shares.tolist(), abs=2e-5)
    assert context.counts["layout"] == "trl"
    assert context.counts["deviations"] == "after_question='\\n', separator='\\n\\n'"
    with pytest.raises(BadInput, match=r"holds scores of another input or of other models \(layout differs\)"):
        score(two_classes, tmp_path / "rows.jsonl", tmp_path / "out.jsonl")


def test_deviations_are_given_on_the_command_line_as_the_page_writes_them() -> None:
    words = ["stage.model=m", "input=i", "output=o", 'stage.deviations={separator: "\\n\\n", begins: false}']
    stage = build(compose_config(StageConfig, "stage/prm/score_steps", words).stage)
    assert deviate(PUBLISHED["trl"], stage.deviations).layout == Pieces("\n\n")
    assert shown(stage.deviations) == "separator='\\n\\n', begins=False"


def test_solutions_beyond_the_length_that_is_set_get_no_scores(two_classes: Path, tmp_path: Path) -> None:
    long = replace(ROWS[0], id="long", steps=[ROWS[0].steps[0], "So it is that. " * 20])
    write_records(tmp_path / "rows.jsonl", [*ROWS, long])
    found = score(two_classes, tmp_path / "rows.jsonl", tmp_path / "out.jsonl", max_length=100)
    assert [len(one.scores) for one in found] == [2, 2, 2, 2, 2, 0]
    with pytest.raises(BadInput, match=r"other models \(max_length differs\)"):
        score(two_classes, tmp_path / "rows.jsonl", tmp_path / "out.jsonl")


def test_what_cannot_be_scored_is_one_line(two_classes: Path, tiny_policy: Path, tmp_path: Path) -> None:
    write_records(tmp_path / "rows.jsonl", ROWS)
    paths = (tmp_path / "rows.jsonl", tmp_path / "out.jsonl")
    with pytest.raises(
        BadInput, match=r"stage\.layout must be auto, tokens, task, whole or one of math_s.*, got 'qwenn'"
    ):
        score(two_classes, *paths, layout="qwenn")
    with pytest.raises(BadInput, match=r"stage\.layout=task reads a solution behind the task's prompt: set task"):
        score(two_classes, *paths, layout="task")
    with pytest.raises(BadInput, match=r"layout=tokens reads the ids of trajectories, and these solutions are text"):
        score(two_classes, *paths, layout="tokens")
    with pytest.raises(BadInput, match=r"stage\.deviations\.system: this layout is made of separator, after_q"):
        score(two_classes, *paths, deviations={"system": "x"})
    with pytest.raises(BadInput, match=r"stage\.deviations\.separator must be a text, as '\\n' is, got 3"):
        score(two_classes, *paths, deviations={"separator": 3})
    with pytest.raises(BadInput, match=r"stage\.deviations\.begins must be true or false, as True is, got 'no'"):
        score(two_classes, *paths, deviations={"begins": "no"})
    for wrong in ("system", ["a"], 3):
        with pytest.raises(BadInput, match=r"stage\.deviations must be names with values, \{NAME: VALUE\}, got"):
            score(two_classes, *paths, deviations=wrong)
    for wrong in (-1, "no", 0.5):
        with pytest.raises(BadInput, match=r"stage\.max_length must be a number of tokens, 0 for the model's pos"):
            score(two_classes, *paths, max_length=wrong)
    with pytest.raises(BadInput, match=r"stage\.deviations are of how others' models are read, and .* as task"):
        score(two_classes, *paths, task=WordArithmetic(), layout="task", deviations={"separator": " "})


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
    assert f"{num_too_long} solutions are longer than the model takes" in caplog.text


def test_a_head_that_may_be_of_steps_or_of_responses_is_read_after_steps_with_a_warning(
    tiny_prm: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row = Trajectory("t/0", "t", "$%", "&'", ["&'"], [5, 6], [7, 8], [2], "stop", "", None, False)
    write_records(tmp_path / "rows.jsonl", [row])
    for scores, prompts in ((None, ""), ("steps", "text"), ("steps", "chat"), ("responses", "text")):
        folder = shutil.copytree(tiny_prm, tmp_path / f"{scores}-{prompts}")
        if scores:
            write_training_layout(folder, TrainingLayout(scores, prompts))
        caplog.clear()
        context = StageContext(None, tmp_path / f"{folder.name}.jsonl", 10.0)
        if scores == "responses":
            with pytest.raises(BadInput, match=r"trained on responses .*\(its training_layout\.json says so\)"):
                list(ScoreSteps(str(folder)).run(str(tmp_path / "rows.jsonl"), context))
            continue
        list(ScoreSteps(str(folder)).run(str(tmp_path / "rows.jsonl"), context))
        assert ("is read at the ends of steps, which is an assumption" in caplog.text) == (scores is None)
        assert context.counts["ends"].startswith("steps: its" if scores else "steps, assumed: nothing")
        assert ("was trained on prompts that are turns of a chat template" in caplog.text) == (prompts == "chat")
    both = StageContext(None, tmp_path / "both.jsonl", 10.0)
    scoring = _Scoring(ScoreSteps(str(tmp_path / "None-"), other_model=str(tmp_path / "steps-text")),
                       str(tmp_path / "rows.jsonl"), both)  # fmt: skip
    assert len(scoring.models) == 2
    assert re.fullmatch(r"steps, assumed: nothing .*; steps: its training_layout\.json says so", both.counts["ends"])


@pytest.mark.parametrize(("layout", "ends"), [("whole", "responses"), ("tokens", "steps")])
def test_ids_that_a_policy_of_another_tokenizer_sampled_are_not_read(
    layout: str, ends: str, tiny_prm: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_prm, tmp_path / "model")
    write_training_layout(folder, TrainingLayout(ends, "text"))
    row = Trajectory("t/0", "t", "Q", "ab", ["a", "b"], [5, 6], [7, 8], [1, 2], "stop", "", None, False)
    write_records(tmp_path / "rows.jsonl", [row])
    with pytest.raises(BadInput, match=r"sampled ids of trajectory 't/0': .* must be that of the policy which sampled"):
        score(folder, tmp_path / "rows.jsonl", tmp_path / "out.jsonl", layout=layout)


@pytest.mark.parametrize("says", ["training_problems.json", "training_responses.json"])
def test_a_two_class_model_that_was_trained_here_reads_sampled_ids_whatever_it_was_trained_on(
    says: str, two_classes: Path, tmp_path: Path
) -> None:
    """Of an outcome model that learnt from judged responses only the latter file is there."""
    folder = shutil.copytree(two_classes, tmp_path / "model")
    assert choose_layout("auto", str(folder), str(folder), Trajectory) == "trl"
    (folder / says).write_text("{}")
    assert choose_layout("auto", str(folder), str(folder), Trajectory) == "tokens"
    assert choose_layout("auto", str(folder), str(folder), AnnotatedSolution) == "task"
