"""Process rewards in RL by engines of their own: the same rewards, held against transformers, ended with the run."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.models.load import BadModel
from espalier.rewards.composed import ComposedReward
from espalier.rewards.engine_scores import ScoresDiffer
from espalier.rewards.outcome import OutcomeReward
from espalier.rewards.process import ProcessReward
from espalier.rewards.score import HoldsModels
from espalier.runtime.entrypoint import build, compose_config
from espalier.runtime.schemas import RLConfig
from espalier.sampling.client import ServerGone
from espalier.sampling.engine_scorer import EngineScorer
from tests.rewards.test_rewards import CUT, RIGHT, WRONG
from tests.support.rl_cases import make_trainer
from tests.support.token_scorer import Engines

ROWS = [replace(row, id=f"{k}{row.id}", prompt_ids=[3 + k, 9]) for k in range(3) for row in (RIGHT, CUT, WRONG)]


def test_engines_give_the_rewards_that_transformers_give(tiny_prm: Path) -> None:
    engines = Engines()
    by_engines = ProcessReward(str(tiny_prm), engines=engines)
    assert engines.models == []  # not before they are asked
    expected = ProcessReward(str(tiny_prm))(ROWS)
    for _ in range(2):
        for own, wanted in zip(by_engines(ROWS), expected, strict=True):
            assert own.steps == pytest.approx(wanted.steps, abs=0.02)
            assert own.parts == pytest.approx(wanted.parts, abs=0.02)
    assert engines.models == [str(tiny_prm)]
    assert len(engines.asked) == 4 + 4 + 9 + 9  # the first four are checked, once


def test_engines_that_read_otherwise_end_the_run_at_the_first_rewards(tiny_prm: Path) -> None:
    wrong = Engines(wrong=lambda logits: [[[value + 1 for value in at] for at in row] for row in logits])
    with pytest.raises(ScoresDiffer, match="score the same solutions differently"):
        ProcessReward(str(tiny_prm), engines=wrong)(ROWS)


def test_they_end_with_the_run_and_their_vocabulary_is_known(tiny_prm: Path, tiny_policy: Path) -> None:
    engines = Engines()
    reward = ComposedReward({"outcome": OutcomeReward(), "process": ProcessReward(str(tiny_prm), engines=engines)})
    assert isinstance(reward, HoldsModels)
    reward.to(torch.device("cpu"))
    config = reward.networks()["process reward model"].config
    assert (config.vocab_size, config.name_or_path) == (320, str(tiny_prm))
    reward(ROWS)
    assert engines.is_open
    reward.close()
    assert not engines.is_open
    ProcessReward(str(tiny_prm)).close()  # without engines there is nothing to end
    with pytest.raises(BadModel, match=r"is no reward model \(LlamaForCausalLM\)"):
        ProcessReward(str(tiny_policy), engines=engines)


@pytest.mark.parametrize("more", [[], ["client@reward.terms.process.engines.client=ray_engines"]])
def test_a_run_names_them_by_its_reward(more: list[str], tiny_prm: Path) -> None:
    settings = ["reward=process_by_engines", f"reward.terms.process.path={tiny_prm}", "model.path=M", "output_dir=D"]
    settings += ["reward.terms.process.engines.client.num_engines=3", *more]
    config = compose_config(RLConfig, "exp/ppo/grpo_word_arithmetic", settings)
    node = config.reward["terms"]["process"]["engines"]
    engines = build(node)
    assert isinstance(engines, EngineScorer)
    assert (engines.num_engines, engines.client.log) == (3, "D/process_reward.log")
    assert type(engines.client).__name__ == ("RayEngines" if more else "DataParallelEngines")


@pytest.mark.parametrize("num_rows", [pytest.param(1000, marks=pytest.mark.slow), 40])
def test_a_run_ends_them_whether_it_comes_to_its_end_or_not(
    num_rows: int, tiny_prm: Path, tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path
) -> None:
    engines = Engines(num_rows=num_rows)
    trainer = make_trainer(tiny_policy, task, tokenizer, tmp_path / "run", "", num_lines=1, num_iterations=2)
    trainer.rollout_source.reward = ProcessReward(str(tiny_prm), engines=engines)
    ends = nullcontext() if num_rows == 1000 else pytest.raises(ServerGone, match="no engine is left")
    with ends:
        trainer.run()
    assert len(engines.asked) == 40 if num_rows == 40 else 40 < len(engines.asked) <= 4 + 4 + 2 * 6 * 4
    assert engines.models == [str(tiny_prm)]
    assert not engines.is_open
