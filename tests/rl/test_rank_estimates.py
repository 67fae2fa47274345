"""Advantages on two gloo ranks are those of one process, with every question answered once."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.processes.forked import run_ranks
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.models.scalar_head import load_process_reward
from espalier.rl.advantages.grpo import GRPO
from espalier.rl.estimator_context import check_estimate
from espalier.rl.types import Estimate
from tests.support.rl_cases import make_trainer


def estimates(policy: Path, prm: Path, out: Path, num_ranks: int) -> list[tuple[dict[str, Any], int]]:
    """What each rank has: (advantages, metrics, values of states) by estimator (None but on rank 0); the tokens that it
    has read for `process_values`."""
    out.mkdir()
    log = out / "log"
    codes = run_ranks("tests/support/rank_estimates.py", [str(policy), str(prm), str(out)], log, num_ranks)
    assert codes == [0] * num_ranks, log.read_text()[-3000:]
    return [torch.load(out / f"{rank}.pt") for rank in range(num_ranks)]


def test_estimators_that_ask_have_the_same_advantages_with_two_ranks_as_in_one_process(
    tiny_policy: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    prm = load_process_reward(str(tiny_policy), 1)
    torch.nn.init.normal_(prm.get_parameter("score.weight"), std=0.1)
    prm.save_pretrained(tmp_path / "prm")
    ((alone, num_tokens),) = estimates(tiny_policy, tmp_path / "prm", tmp_path / "one", 1)
    (together, num_first), (nothing, num_second) = estimates(tiny_policy, tmp_path / "prm", tmp_path / "two", 2)
    assert nothing is None
    assert num_first + num_second == num_tokens
    assert 0.4 * num_tokens < num_first < 0.6 * num_tokens
    assert together.keys() == alone.keys()
    for name, (advantages, metrics, state_values) in together.items():
        if name in ("gold_likelihood", "process_values", "own"):  # each rank reads some of the rows, in other batches
            torch.testing.assert_close(advantages, alone[name][0], rtol=1e-4, atol=2e-6)
            torch.testing.assert_close(state_values, alone[name][2], rtol=1e-4, atol=1e-8)
            assert metrics == pytest.approx(alone[name][1], rel=1e-4, abs=2e-6)
            continue
        assert torch.equal(advantages, alone[name][0]), name
        assert (metrics, state_values) == alone[name][1:], name
    assert all(len(advantages.unique()) > 2 for advantages, _, _ in alone.values())
    assert alone["vineppo"][1]["completions_per_state"] > 2  # further rounds were asked for


def test_an_estimate_outside_the_responses_which_would_not_reach_the_others_is_refused() -> None:
    mask = torch.tensor([[False, True]])
    check_estimate(Estimate(torch.tensor([[0.0, 1.0]]), return_weights=torch.tensor([[0.0, 2.0]])), mask)
    bad = Estimate(torch.tensor([[0.0, 1.0]]), return_weights=torch.tensor([[2.0, 0.0]]))
    with pytest.raises(ValueError, match="return_weights are not 0 outside the responses"):
        check_estimate(bad, mask)


class Everywhere(GRPO):
    """A user's estimator that fills whole tensors."""

    def __call__(self, groups: Any, experience: Any, context: Any) -> Estimate:
        return Estimate(torch.ones(experience.ids.shape))


def test_a_run_whose_estimator_speaks_of_prompts_too_ends(
    tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path
) -> None:
    trainer = make_trainer(
        tiny_policy, task, tokenizer, tmp_path / "run", "", Everywhere(True), evaluation_every=0, num_iterations=1
    )
    with pytest.raises(ValueError, match="the estimator's advantages are not 0 outside the responses"):
        trainer.run()
