"""A policy is not trained on a benchmark's prompts by reinforcement learning, and a run of before goes on."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from espalier.data.jsonl import write_records
from espalier.data.ranked_responses import RankedResponses
from espalier.data.records import BadInput, Problem
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.rl import trainer_from_config
from espalier.rl.held_out_benchmarks import check_benchmark_prompts
from espalier.runtime.entrypoint import compose_config
from espalier.runtime.run_dir import check_run_dir, open_run_dir
from espalier.runtime.schemas import RLConfig
from tests.support.root_config import root_config


class Asked:
    """Two problems to train on and one of dev."""

    def problems(self, split: str) -> list[Problem]:
        found = {"train": [Problem("p1", "How many pens?", "3", context="Mia has 3 pens. "), Problem("p2", "Why?", "")],
                 "dev": [Problem("d1", "Who?", "")]}  # fmt: skip
        return found[split]

    def prompt(self, problem: Problem) -> str:
        return f"Question: {problem.question}\nAnswer:"


def row(prompt: str, *turns: tuple[str, str], is_implicit: bool = False) -> RankedResponses:
    both = [{"role": role, "content": content} for role, content in turns]
    return RankedResponses("s/1", "s", prompt, ["yes"], ["no"], has_implicit_prompt=is_implicit, turns=both)


def check(folder: Path, *rows: RankedResponses) -> None:
    path = folder / "rows.jsonl"
    write_records(path, rows)
    check_benchmark_prompts(Asked(), [str(path)])


@pytest.mark.parametrize(
    ("seen", "problem"),
    [
        (row(" how MANY\npens? "), "p1"),
        (row("Mia has 3 pens. How many pens?"), "p1"),
        (row("Question: Why?\nAnswer:"), "p2"),
        (row("system: Be brief.\n\nuser: Why?", ("system", "Be brief."), ("user", "Why?")), "p2"),
    ],
)
def test_a_prompt_of_a_benchmark_is_refused(seen: RankedResponses, problem: str, tmp_path: Path) -> None:
    other = RankedResponses("s/0", "s", "Other?", ["a"], ["b"])
    line = (rf"training problems have the prompts of 1 of 2 rows of .*rows\.jsonl \('s/1' is the first, problem "
            rf"'{problem}'; reinforcement learning is compared by prompts\)")  # fmt: skip
    with pytest.raises(BadInput, match=line):
        check(tmp_path, other, seen)


def test_other_prompts_pass(tmp_path: Path) -> None:
    check(tmp_path, row("Who?"))  # of dev
    check(tmp_path, row("Why not?"))
    spoken = [("user", "Mia is late."), ("assistant", "I see."), ("user", "Why?")]
    check(tmp_path, row("user: Mia is late.\n\nassistant: I see.\n\nuser: Why?", *spoken))
    check_benchmark_prompts(Asked(), [])


def test_rows_without_a_prompt_of_their_own_are_not_passed_over_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    implicit = row("Why? Bec", is_implicit=True)
    with pytest.raises(BadInput, match=r"none of 1 rows of .* has one of its own: import it with prompts"):
        check(tmp_path, implicit)
    check(tmp_path, implicit, RankedResponses("s/2", "s", "Other?", ["a"], ["b"]))
    assert "1 of 2 rows of" in caplog.text
    assert "have no prompt of their own and cannot be compared" in caplog.text


def test_a_run_is_refused_before_a_network_is_loaded(
    tiny_policy: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = WordArithmetic().problems("train")[3]
    path = tmp_path / "rows.jsonl"
    write_records(path, [row(problem.question.upper())])
    monkeypatch.setattr(trainer_from_config, "load_trained", lambda *_: pytest.fail("loaded"))
    given = [f"model.path={tiny_policy}", f"output_dir={tmp_path}/run", f"held_out_benchmarks=[{path}]"]
    config = compose_config(RLConfig, "exp/ppo/grpo_word_arithmetic", given)
    with pytest.raises(BadInput, match=rf"problem '{problem.id}'"):
        trainer_from_config.make_trainer(config, tokenizer, None, None)  # type: ignore[arg-type]


def test_a_run_of_before_the_setting_goes_on(tmp_path: Path) -> None:
    folder, made = tmp_path / "run", root_config(RLConfig, output_dir=str(tmp_path / "run"))
    open_run_dir(str(folder), made)
    stored = yaml.safe_load((folder / "config.yaml").read_text())
    del stored["held_out_benchmarks"]
    (folder / "config.yaml").write_text(yaml.safe_dump(stored))
    assert check_run_dir(str(folder), made) == folder
