"""prm/score_steps by engines: the same file as by transformers, kept as it comes, held against transformers first."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import espalier
from espalier.data.jsonl import read_records, write_records
from espalier.data.records import BadInput, StepScores, Trajectory
from espalier.data.steps import StepTokens, step_tokens
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.models.load import BadModel
from espalier.models.log_ratio_reward import Scale, write_log_ratio_reward
from espalier.models.precision import has_fast_bf16
from espalier.models.scalar_head import load_process_reward, outcome_scores
from espalier.pipeline.prm.score_steps import ScoreSteps
from espalier.pipeline.stage import run_stage
from espalier.rewards.engine_scores import ScoresDiffer, check_engine_model, check_scores, read_scores, score_by_engines
from espalier.runtime.entrypoint import build, compose_config
from espalier.runtime.schemas import StageConfig
from espalier.sampling.client import ServerGone
from espalier.sampling.engine_scorer import EngineScorer
from tests.pipeline.test_training_problems import reward_model
from tests.programs.test_prm import as_sampled
from tests.support.token_scorer import Engines, Logits

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def trajectories(task: WordArithmetic, tokenizer: Any) -> list[Trajectory]:
    """Twelve demonstrations as samples, the last with the tokens of the first, the one before without steps."""
    found = []
    for number, row in enumerate(task.demonstrations("train")[:12]):
        found.append(as_sampled(tokenizer, number, row.prompt, espalier.split_steps(row.completion)))
    none = Trajectory("none/0", "none", "Q", "", [], found[0].prompt_ids, [], [], "length", "", None, False)
    again = Trajectory(**{**asdict(found[0]), "id": "p0/1"})
    return [*found, none, again]


@pytest.fixture
def config(tiny_prm: Path, trajectories: list[Trajectory], tmp_path: Path) -> StageConfig:
    write_records(tmp_path / "in.jsonl", trajectories)
    stage = {"_target_": "espalier.pipeline.prm.score_steps.ScoreSteps", "model": str(tiny_prm)}
    return StageConfig(output=str(tmp_path / "out.jsonl"), input=str(tmp_path / "in.jsonl"), stage=stage)


def scores_at(path: str | Path) -> list[float]:
    return [score for row in read_records(StepScores, path) for score in row.scores]


def test_engines_write_the_file_that_transformers_write(
    config: StageConfig, tiny_prm: Path, trajectories: list[Trajectory], tmp_path: Path
) -> None:
    engines = Engines()
    assert run_stage(ScoreSteps(str(tiny_prm)), None, config, engines) == 0
    alone = StageConfig(output=str(tmp_path / "alone.jsonl"), input=config.input, stage=config.stage)
    run_stage(ScoreSteps(str(tiny_prm)), None, alone)
    own, theirs = read_records(StepScores, config.output), read_records(StepScores, alone.output)
    assert [(row.id, row.problem_id, row.is_seen) for row in own] == [
        (row.id, row.problem_id, row.is_seen) for row in theirs
    ]
    assert [len(row.scores) for row in own] == [len(row.steps) for row in trajectories]
    assert scores_at(config.output) == pytest.approx(scores_at(alone.output), abs=0.01)
    assert len(engines.asked) == 4 + 4 + 12  # checked twice; equal ones once, none without steps
    assert not engines.is_open
    counts = json.loads((tmp_path / "out.meta.json").read_text())["counts"]
    gap = counts.pop("largest_gap")
    assert gap < 0.01
    # these engines compute in float32, and so do transformers on a CPU that is slow at bf16
    assert (gap > 1e-5) is has_fast_bf16("cpu")
    assert counts == json.loads((tmp_path / "alone.meta.json").read_text())["counts"]
    assert not (tmp_path / "out.jsonl.parts").exists()


def test_a_run_that_lost_its_engines_goes_on_where_it_ended(
    config: StageConfig, tiny_prm: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stage = ScoreSteps(str(tiny_prm), num_checked=0, batch_tokens=16)  # blocks of 256 tokens
    with pytest.raises(ServerGone, match="no engine is left"):
        run_stage(stage, None, config, Engines(num_rows=8))
    parts = tmp_path / "out.jsonl.parts" / "scores-0-0-0.jsonl"
    num_kept = len(parts.read_text().splitlines())
    assert 0 < num_kept <= 8
    kept = f"{num_kept} of 14 solutions are scored and kept in {tmp_path}/out.jsonl.parts: run the same command"
    assert kept in caplog.text
    assert not Path(config.output).exists()
    with parts.open("a") as file:
        file.write('{"id":"p0/0","problem')  # a line that a kill has torn
    again = Engines()
    assert run_stage(stage, None, config, again) == 0
    assert len(again.asked) == 14 - num_kept - 1  # one has no steps
    whole = StageConfig(output=str(tmp_path / "whole.jsonl"), input=config.input, stage=config.stage)
    run_stage(stage, None, whole, Engines())
    assert Path(config.output).read_bytes() == Path(whole.output).read_bytes()
    assert run_stage(stage, None, config, Engines(num_rows=0)) == 0  # complete: nobody is asked


def test_parts_of_something_else_are_refused(
    config: StageConfig, tiny_prm: Path, trajectories: list[Trajectory]
) -> None:
    stage = ScoreSteps(str(tiny_prm), num_checked=0, batch_tokens=16)
    with pytest.raises(ServerGone):
        run_stage(stage, None, config, Engines(num_rows=8))
    write_records(config.input, trajectories[1:])
    with pytest.raises(BadInput, match=r"of another input or of other models \(input differs\): remove it"):
        run_stage(stage, None, config, Engines())


def test_each_of_two_models_is_asked_about_the_problems_it_has_not_seen(
    config: StageConfig, tiny_policy: Path, tmp_path: Path
) -> None:
    one = reward_model(tiny_policy, tmp_path / "one", 1, [f"p{k}" for k in range(6)])
    other = reward_model(tiny_policy, tmp_path / "other", 2, [f"p{k}" for k in range(6, 12)])
    engines, stage = Engines(), ScoreSteps(one, other, num_checked=1)
    assert run_stage(stage, None, config, engines) == 0
    assert engines.models == [one, other]
    alone = StageConfig(output=str(tmp_path / "alone.jsonl"), input=config.input, stage=config.stage)
    run_stage(stage, None, alone)
    assert scores_at(config.output) == pytest.approx(scores_at(alone.output), abs=0.02)


def probabilities(logits: Logits) -> Logits:
    """What vLLM gives where its own activation is left on."""
    return [torch.sigmoid(torch.tensor(row)).tolist() for row in logits]


def steep(tiny_prm: Path, folder: Path) -> Path:
    """The reward model with a head ten times as steep, as training leaves it."""
    model = load_process_reward(str(tiny_prm))
    with torch.no_grad():
        model.get_parameter("score.weight").mul_(10)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny_prm / name).read_bytes())
    return folder


def test_engines_that_read_otherwise_end_the_run_before_anything_is_written(
    config: StageConfig, tiny_prm: Path, tmp_path: Path
) -> None:
    prm = steep(tiny_prm, tmp_path / "steep")
    shifted = Engines()
    shifted.shift = 1
    for engines in (Engines(wrong=probabilities), shifted):
        with pytest.raises(ScoresDiffer, match=r"apart on average and 0\.\d+ at most, where bf16 explains") as caught:
            run_stage(ScoreSteps(str(prm)), None, config, engines)
        assert caught.value.exit_code == 2
        assert not engines.is_open
    assert not (tmp_path / "out.jsonl").exists()
    assert not list((tmp_path / "out.jsonl.parts").glob("scores*"))
    assert run_stage(ScoreSteps(str(prm)), None, config, Engines()) == 0


def test_a_cache_of_something_else_is_seen(tiny_prm: Path, trajectories: list[Trajectory], tmp_path: Path) -> None:
    """Rows asked at their last place alone come from the prefix cache."""
    rows = list(map(step_tokens, trajectories[:4]))
    engines = Engines(wrong=lambda logits: [[[row[0][0] + 4]] if len(row) == 1 else row for row in logits])
    engines.open(str(tiny_prm))
    expected: list[list[float]] = [[] for _ in rows]

    def keep(places: list[int], scores: list[list[float]]) -> None:
        for place, row in zip(places, scores, strict=True):
            expected[place] = row

    score_by_engines(engines, rows, 1000, keep)
    with pytest.raises(ScoresDiffer):
        check_scores(engines, rows, expected)


def test_large_logits_that_are_read_as_such_are_compared_as_such(
    tiny_prm: Path, trajectories: list[Trajectory]
) -> None:
    """As shares 18 and 25 are both 1."""
    rows = [replace(row, step_ends=row.step_ends[-1:]) for row in map(step_tokens, trajectories[:4])]
    for factor, is_alike in ((1.01, True), (1.4, False)):
        engines = Engines(wrong=lambda logits, factor=factor: [[[18.0 * factor]] for _ in logits])
        engines.open(str(tiny_prm))
        expected = [[18.0] for _ in rows]
        with nullcontext() if is_alike else pytest.raises(ScoresDiffer):
            check_scores(engines, rows, expected, outcome_scores)


def test_scores_are_read_off_logits_as_heads_say() -> None:
    assert read_scores([[0.0], [2.0]]) == [0.5, pytest.approx(0.880797)]
    assert read_scores([[0.0, 0.0, 0.0]]) == [0.5]  # classes 0, 1 and 2 of 2
    assert read_scores([[0.0, 0.0]]) == [0.5]
    assert read_scores([[0.0, 3.0]]) == [pytest.approx(0.952574)]  # softmax, class 1


def test_a_row_that_is_too_long_is_named_with_the_remedy(tiny_prm: Path) -> None:
    engines = Engines()
    engines.max_length = 10
    rows = [StepTokens([5, 6], [7, 8], [2], "short"), StepTokens([5] * 8, [7, 8, 9], [3], "trajectory 'p/0'")]
    with pytest.raises(BadInput, match=r"trajectory 'p/0' has 11 tokens and the engines take 10: set client.max_model"):
        score_by_engines(engines, rows, 100, lambda places, scores: None)
    assert engines.asked == []


def test_a_row_that_is_too_long_ends_the_stage_before_an_engine_starts(config: StageConfig, tiny_prm: Path) -> None:
    engines = Engines()
    engines.max_length = 40
    with pytest.raises(BadInput, match=r"and the engines take 40: set client\.max_model_len="):
        run_stage(ScoreSteps(str(tiny_prm)), None, config, engines)
    assert engines.models == []


def test_folders_without_a_head_are_refused_before_an_engine_starts(
    config: StageConfig, tiny_policy: Path, tmp_path: Path
) -> None:
    two = tmp_path / "two"
    write_log_ratio_reward(two, str(tiny_policy), str(tiny_policy), Scale())
    for path, why in (
        (two, "log-ratio of two policies .*leave client out"),
        (tiny_policy, "is no reward model"),
    ):
        with pytest.raises(BadModel, match=why):
            check_engine_model(str(path))
        engines = Engines()
        with pytest.raises(BadModel, match=why):
            run_stage(ScoreSteps(str(path), layout="tokens"), None, config, engines)
        assert engines.models == []


def test_a_stage_that_asks_no_engines_refuses_them(config: StageConfig) -> None:
    class Other:
        def inputs(self) -> list[str]:
            return []

        def run(self, input_path: str, context: Any) -> Any:
            return {}

    with pytest.raises(BadInput, match="Other asks no engines: leave client out"):
        run_stage(Other(), None, config, Engines())


@pytest.mark.parametrize("client", ["data_parallel_engines", "ray_engines"])
def test_the_stage_takes_a_client_by_name(client: str) -> None:
    words = ["stage.model=prm", "input=t.jsonl", "output=s.jsonl", f"client={client}", "client.num_engines=3"]
    config = compose_config(StageConfig, "stage/prm/score_steps", words)
    scorer = EngineScorer(build(config.client, seed=config.seed), "s.jsonl.engine.log")
    assert (scorer.num_engines, scorer.max_length, scorer.client.log) == (3, 512, "s.jsonl.engine.log")
    assert scorer.client.settings(0)["scores_tokens"] is True


@pytest.mark.slow
@pytest.mark.server
def test_two_real_engines_write_what_transformers_write(config: StageConfig, tiny_prm: Path, tmp_path: Path) -> None:
    prm = str(steep(tiny_prm, tmp_path / "steep"))
    command = [sys.executable, "run_stage.py", "-cn", "prm/score_steps", f"stage.model={prm}", f"input={config.input}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for output, more in (("alone", []), ("out", ["client=data_parallel_engines", "client.num_engines=2"])):
        asked = [*command, f"output={tmp_path}/{output}.jsonl", *more]
        done = subprocess.run(
            asked, capture_output=True, text=True, timeout=280, cwd=ROOT, env=environment, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
    assert "engines agree with transformers" in done.stderr
    expected = scores_at(tmp_path / "alone.jsonl")
    assert max(expected) - min(expected) > 0.3
    assert scores_at(config.output) == pytest.approx(expected, abs=0.05)
    assert (tmp_path / "out.jsonl.engine-1.log").is_file()
