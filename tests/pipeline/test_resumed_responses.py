"""Scores of responses are kept as they come: a killed run goes on, and ranks share the work, to the same bytes."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.processes.forked import exit_code, run_ranks, start
from espalier.data.jsonl import write_records
from espalier.data.ranked_responses import RankedResponses
from espalier.data.records import BadInput
from espalier.data.steps import StepTokens
from espalier.models import precision
from espalier.models.load import load_policy, load_tokenizer
from espalier.pipeline.evaluation.response_scorers import NetworkScorer
from espalier.pipeline.evaluation.score_responses import ScoreResponses
from espalier.pipeline.stage import run_stage
from espalier.runtime.schemas import StageConfig
from tests.support.slow import slow_unless
from tests.support.token_scorer import Engines

ROWS = [RankedResponses(f"r{n}", "ab"[n % 2], "Mia has 3 apples. " * (n % 3 + 1), [f"{n} " * (n % 5 + 1)],
                        ["4", f"{n}"]) for n in range(12)]  # fmt: skip
IMPLICIT = [RankedResponses(f"i{n}", "", "So it is blu", [f"eish {n}."], ["est."], True) for n in range(4)]


def run(tmp_path: Path, name: str, engines: Any = None, **settings: Any) -> Path:
    """Run the stage as the program does; the output."""
    output = tmp_path / name
    config = StageConfig(output=str(output), input=str(tmp_path / "rows.jsonl"), stage={})
    run_stage(ScoreResponses(batch_tokens=60, **settings), None, config, engines)
    return output


@pytest.fixture(params=slow_unless(lambda name: name != "outcome model", ["outcome model", "log-ratio", "chat policy"]))
def scorer(
    request: pytest.FixtureRequest, tiny_prm: Path, tiny_policy: Path, chat_model: Path, tmp_path: Path
) -> dict[str, Any]:
    """Write rows, the last of them with implicit prompts, and return a scorer's settings."""
    write_records(tmp_path / "rows.jsonl", [*ROWS, *IMPLICIT])
    if request.param == "outcome model":
        return {"model": str(tiny_prm)}
    if request.param == "chat policy":
        return {"model": str(chat_model), "is_reference_free": True}
    other = load_policy(str(tiny_policy))
    other.lm_head.weight.data.mul_(1.5)
    other.save_pretrained(tmp_path / "other")
    load_tokenizer(str(tiny_policy)).save_pretrained(tmp_path / "other")
    return {"model": str(tmp_path / "other"), "reference": str(tiny_policy), "aggregate": "average"}


def count_rows(monkeypatch: pytest.MonkeyPatch, deadly: int = 0) -> list[int]:
    """Note the rows of every call of a network's scorer; the process is killed at call `deadly`."""
    calls: list[int] = []
    unbroken = NetworkScorer.__call__

    def counted(self: NetworkScorer, rows: Sequence[StepTokens]) -> list[float]:
        calls.append(len(rows))
        if len(calls) == deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return unbroken(self, rows)

    monkeypatch.setattr(NetworkScorer, "__call__", counted)
    return calls


def test_a_killed_run_goes_on_to_the_bytes_of_an_undisturbed_one(
    scorer: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with monkeypatch.context() as patch:
        calls = count_rows(patch)
        expected = run(tmp_path, "whole.jsonl", **scorer)
    assert len(calls) > 4
    with monkeypatch.context() as patch:
        count_rows(patch, deadly=4)
        assert exit_code(start(lambda: print(run(tmp_path, "out.jsonl", **scorer)))) == -signal.SIGKILL
    assert not (tmp_path / "out.jsonl").exists()
    (parts,) = (tmp_path / "out.jsonl.parts").glob("scores-*.jsonl")
    with parts.open("a") as file:
        file.write('{"row": 3, "numb')  # a line that a kill has torn
    again = count_rows(monkeypatch)
    assert run(tmp_path, "out.jsonl", **scorer).read_bytes() == expected.read_bytes()
    assert again == calls[3:], "three batches are kept"
    assert f"going on after {sum(calls[:3])} of {sum(calls)} responses" in caplog.text
    assert not (tmp_path / "out.jsonl.parts").exists()


def test_kept_scores_are_not_mixed_with_those_of_something_else(
    tiny_prm: Path, chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_records(tmp_path / "rows.jsonl", ROWS)
    policy = {"model": str(chat_model), "is_reference_free": True}

    def stop(self: NetworkScorer, rows: Sequence[StepTokens]) -> list[float]:
        if any((tmp_path / "out.jsonl.parts").glob("scores-*")):
            raise KeyboardInterrupt
        return unbroken(self, rows)

    unbroken = NetworkScorer.__call__
    with monkeypatch.context() as patch:
        patch.setattr(NetworkScorer, "__call__", stop)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, "out.jsonl", **policy)
    assert "responses are scored and kept in" in caplog.text
    others: list[tuple[str, dict[str, Any]]] = [
        ("models", {"model": str(tiny_prm)}),
        ("layout", {**policy, "is_chat": False}),
        ("score", {**policy, "aggregate": "average"}),
        ("models", {"model": str(chat_model), "reference": str(chat_model)}),
    ]
    for what, settings in others:
        with pytest.raises(BadInput, match=rf"scores of another input or of other models \({what} differs\): remove"):
            run(tmp_path, "out.jsonl", **settings)
    is_fast = precision.has_fast_bf16("cpu")
    with monkeypatch.context() as patch:
        patch.setattr(precision, "has_fast_bf16", lambda kind: not is_fast)
        with pytest.raises(BadInput, match=r"holds scores in (bf16|fp32), and this machine scores in (bf16|fp32)"):
            run(tmp_path, "out.jsonl", **policy)
    write_records(tmp_path / "rows.jsonl", ROWS[1:])
    with pytest.raises(BadInput, match=r"\(input differs\)"):
        run(tmp_path, "out.jsonl", **policy)
    write_records(tmp_path / "rows.jsonl", ROWS)
    assert len(run(tmp_path, "out.jsonl", **policy).read_text().splitlines()) == len(ROWS)


def test_engines_go_on_where_they_ended(tiny_prm: Path, tmp_path: Path) -> None:
    write_records(tmp_path / "rows.jsonl", ROWS)
    expected = run(tmp_path, "whole.jsonl", Engines(), model=str(tiny_prm))
    with pytest.raises(RuntimeError, match="no engine is left"):
        run(tmp_path, "out.jsonl", Engines(num_rows=30), model=str(tiny_prm))
    engines = Engines()
    assert run(tmp_path, "out.jsonl", engines, model=str(tiny_prm)).read_bytes() == expected.read_bytes()
    assert len(engines.asked) < 36, "some were kept"


@pytest.mark.slow
def test_two_ranks_give_the_file_that_one_process_gives(scorer: dict[str, Any], tmp_path: Path) -> None:
    words = ["-cn", "evaluation/score_responses", f"input={tmp_path}/rows.jsonl", "stage.batch_tokens=60"]
    words += [f"stage.{name}={str(value).lower() if value is True else value}" for name, value in scorer.items()]
    for num in (1, 2):
        log = tmp_path / f"{num}.log"
        codes = run_ranks("run_stage.py", [*words, f"output={tmp_path}/{num}.jsonl"], log, num)
        assert codes == [0] * num, log.read_text()[-3000:]
    assert (tmp_path / "2.jsonl").read_bytes() == (tmp_path / "1.jsonl").read_bytes()
