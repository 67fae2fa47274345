"""The life of a reinforcement-learning run: samples, timings, early stop, retention, resume at every iteration."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.processes.repeatable_server import RepeatableServer
from espalier.data.jsonl import read_records
from espalier.data.records import BadInput, Problem, SampledRollout, Trajectory
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.models.scalar_head import load_critic
from espalier.rewards.score import Score
from espalier.rewards.verifiers import VerifierReward
from espalier.rl.advantages.gae import GAE
from espalier.rl.advantages.grpo import GRPO
from espalier.rl.advantages.rloo import RLOO
from espalier.rl.advantages.spo import SPO
from espalier.rl.estimator_context import EstimatorContext
from espalier.rl.evaluation import Evaluation, evaluations_since_best, is_budget_spent, read_evaluations, spent
from espalier.rl.iteration_metrics import Clock
from espalier.rl.old_logprobs import OldLogprobs
from espalier.rl.samples import samples_path, write_samples
from espalier.rl.trainer import Trainer
from espalier.rl.types import Estimate, Experience, Rollout, RolloutGroup
from espalier.runtime.schemas import CriticConfig, KLConfig, RLConfig
from espalier.sampling.client import ServerGone
from tests.support.metrics_page import is_defined
from tests.support.rl_cases import critic_of, make_trainer, on_repeatable, read_metrics
from tests.support.root_config import root_config

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def server(tiny_policy: Path) -> RepeatableServer:
    return RepeatableServer(str(tiny_policy), max_model_len=512)


SMALL: dict[str, Any] = {
    "num_iterations": 4, "rollout_num_problems": 3, "num_epochs": 1, "minibatch_size": 6, "save_every": 1,
    "evaluation_every": 2,
    "evaluation_num_problems": 2, "samples_every": 2, "samples_num_problems": 2,
}  # fmt: skip
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ppo": (GAE(gamma=1.0, lam=0.95),
            {"critic": CriticConfig(learning_rate=1e-3),
             "kl": KLConfig(coefficient=0.1, kind="k1", place="reward", target=1e-4, horizon=100)}),
    "spo": (SPO(completions_per_state=2, num_segments=2, masks_other_tokens=False), {}),
}  # fmt: skip


def test_a_reward_that_a_problem_does_not_suit_ends_the_run_before_anything_is_drawn(
    tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=r"problem .*: the gold is no list of verifiers"):
        make_trainer(tiny_policy, task, tokenizer, tmp_path / "run", "", reward=VerifierReward(), **SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ppo", "spo"])
def test_a_run_cut_in_every_iteration_ends_bit_for_bit_as_one_that_never_was(
    kind: str, tiny_policy: Path, task: WordArithmetic, tokenizer: Any, server: RepeatableServer, tmp_path: Path
) -> None:
    estimator, settings = KINDS[kind]

    def make(name: str, dies_at: str = "") -> Trainer:
        trainer = make_trainer(tiny_policy, task, tokenizer, tmp_path / name, "", estimator, **SMALL, **settings)
        return on_repeatable(trainer, server, dies_at)

    whole = make("whole")
    whole.run()
    for iteration in (0, 1, 2, 3):
        with pytest.raises(ServerGone):
            make("cut", f"rl-{iteration}").run()
    cut = make("cut")
    cut.run()
    rows = read_metrics(tmp_path / "whole")
    assert read_metrics(tmp_path / "cut") == rows
    assert all(row["engine/policy_moved"] > 0 for row in rows if "rollout/reward" in row)
    if kind == "spo":
        assert all(row["estimate/num_states"] > 0 for row in rows if "rollout/reward" in row)
    pairs = [(whole.policy.engine, cut.policy.engine)]
    if len(whole.update.learners) > 1:
        pairs.append((critic_of(whole).engine, critic_of(cut).engine))
        assert whole.policy.loss.kl.coefficient == cut.policy.loss.kl.coefficient != 0.1
    for one, other in pairs:
        assert all(torch.equal(v, other.model.state_dict()[k]) for k, v in one.model.state_dict().items())
    numbers = {"evaluation": (0, 2, 4), "iteration": (2, 4)}
    names = [f"samples/{kind}-{number:06d}.jsonl" for kind, of_kind in numbers.items() for number in of_kind]
    assert sorted(path.name for path in (tmp_path / "cut" / "samples").iterdir()) == [Path(n).name for n in names]
    for name in names:
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_new_weights_change_what_the_repeatable_server_samples_and_old_ones_bring_it_back(
    tiny_policy: Path, server: RepeatableServer
) -> None:
    data = load_file(tiny_policy / "model.safetensors")
    body = {"prompt": list(range(5, 25)), "n": 2, "temperature": 1.0, "max_tokens": 6}
    server.load_weights(data)
    first = server.sample(body)
    server.load_weights({name: value * 1.01 for name, value in data.items()})
    assert server.sample(body) != first
    server.load_weights(data)
    assert server.sample(body) == first


@pytest.mark.slow
def test_every_phase_of_an_iteration_is_timed_and_every_metric_is_defined(
    tiny_policy: Path, task: WordArithmetic, tokenizer: Any, server: RepeatableServer, tmp_path: Path
) -> None:
    for kind, (estimator, settings) in KINDS.items():
        few = {**SMALL, "num_iterations": 2}
        further = {"rloo": RLOO()} if kind == "ppo" else {}
        trainer = make_trainer(
            tiny_policy, task, tokenizer, tmp_path / kind, "", estimator, further=further, **few, **settings
        )
        on_repeatable(trainer, server).run()
    rows = [json.loads(line) for kind in KINDS for line in (tmp_path / kind / "metrics.jsonl").read_text().splitlines()]
    names = {name for row in rows for name in row} - {"step"}
    phases = ["rollout", "reward", "forward", "completions", "advantage", "update", "weight_sync", "evaluate", "save"]
    phases += ["probes", "samples", "iteration"]
    assert {name for name in names if name.startswith("seconds/")} == {f"seconds/{phase}" for phase in phases}
    speeds = {name.split("/")[1] for name in names if name.startswith("tokens_per_second/")}
    assert speeds == {"rollout", "forward", "update", "evaluate"}
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert [name for name in sorted(names) if not is_defined(name, page)] == []
    for row in rows:
        if "seconds/iteration" in row:
            parts = [v for k, v in row.items() if k.startswith("seconds/") and k not in ("seconds/iteration",
                                                                                         "seconds/save")]  # fmt: skip
            assert sum(parts) <= row["seconds/iteration"] + 1e-6


class _ThatCounts(GRPO):
    """Keeps the tokens of the rollouts that it gives credit, and of all."""

    def __init__(self) -> None:
        super().__init__(divide_by_std=True)
        self.learnt: list[tuple[int, int]] = []

    def __call__(self, groups: Sequence[RolloutGroup], experience: Experience, context: EstimatorContext) -> Estimate:
        estimate = super().__call__(groups, experience, context)
        has_credit = (estimate.advantages != 0).any(1)
        self.learnt.append((int(experience.attention_mask[has_credit].sum()), int(experience.attention_mask.sum())))
        return estimate


def test_the_updates_tokens_per_second_count_what_its_passes_read(
    tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path
) -> None:
    estimator, settings = _ThatCounts(), {**SMALL, "num_iterations": 2, "num_epochs": 2, "evaluation_every": 0}
    make_trainer(tiny_policy, task, tokenizer, tmp_path / "run", "", estimator, **settings).run()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any(0 < learnt < whole for learnt, whole in estimator.learnt), "a group agrees"
    found = [row.get("tokens_per_second/update", 0.0) * row["seconds/update"] for row in rows]
    assert found == pytest.approx([2 * learnt for learnt, _ in estimator.learnt])


def test_the_samples_table_holds_every_steps_value_and_advantage(tmp_path: Path) -> None:
    # prompt of 2 tokens, steps of 2 and 1 tokens; advantages 1, 3 | 5; critic's values 0.1, 0.2 | 0.3
    trajectory = Trajectory(
        "a/0", "a", "P", "xy", ["x", "y"], [5, 6], [7, 8, 1], [2, 3], "stop", gold="1", answer="1", is_correct=True
    )
    rollouts = [Rollout(trajectory, [-1.0] * 3, policy_version=3)]
    group = RolloutGroup(Problem("a", "", "1"), rollouts, [Score(1.0, [0.5, 0.25], {"outcome": 1.0})])
    mask = torch.tensor([[False, False, True, True, True]])
    rows = torch.tensor([[0, 0, 1.0, 3.0, 5.0]])
    values = torch.tensor([[0, 0, 0.1, 0.2, 0.3]])
    experience = Experience(
        mask.long(), mask.long(), mask, rows, OldLogprobs(rows, rows), values=values, advantages=rows
    )
    write_samples(tmp_path, 4, [group], experience, Estimate(rows), num_problems=8)
    (found,) = read_records(SampledRollout, samples_path(tmp_path, 4))
    assert found.step_advantages == [2.0, 5.0]
    assert found.step_values == [0.1, 0.3]
    assert (found.step_rewards, found.reward, found.num_tokens) == ([0.5, 0.25], 1.75, 3)
    assert (found.iteration, found.policy_version) == (4, 3)
    sampled = Estimate(rows, state_values=[[0.5, 0.75, 1.0]])
    write_samples(tmp_path, 4, [group], experience, sampled, num_problems=8)
    (found,) = read_records(SampledRollout, samples_path(tmp_path, 4))
    assert found.step_values == [0.5, 0.75]


def test_evaluations_since_the_first_best_one_are_counted() -> None:
    assert evaluations_since_best([]) == 0
    assert evaluations_since_best([0.1, 0.3, 0.2]) == 1
    assert evaluations_since_best([0.3, 0.3, 0.3]) == 2


def test_evaluations_before_the_policys_first_step_count_once() -> None:
    """A critic is trained alone for 6 iterations: the policy that is evaluated meanwhile is the same."""
    critic = CriticConfig(num_warmup_iterations=6)
    config = root_config(RLConfig, output_dir="", num_iterations=20, evaluation_every=2, patience=2, critic=critic)
    found: Any = None
    evaluation = Evaluation(config, [], found, found, Clock())
    for version, accuracy in {0: 0.5, 2: 0.5, 3: 0.5, 4: 0.5, 6: 0.5, 8: 0.4}.items():
        evaluation.found[version] = accuracy
        assert not evaluation.is_patience_over(version)
    evaluation.found[10] = 0.5
    assert evaluation.is_patience_over(10)


@pytest.mark.slow
def test_a_run_ends_after_its_patience_and_a_resume_counts_on(
    tiny_policy: Path, task: WordArithmetic, tokenizer: Any, server: RepeatableServer, tmp_path: Path
) -> None:
    def make() -> Trainer:
        few: dict[str, Any] = {**SMALL, "evaluation_every": 1, "patience": 2, "learning_rate": 0.0}
        return on_repeatable(make_trainer(tiny_policy, task, tokenizer, tmp_path / "run", "", **few), server)

    make().run()  # at rate 0 no evaluation is better than the one before the first iteration
    evaluated = [row["step"] for row in read_metrics(tmp_path / "run") if "eval/accuracy" in row]
    assert evaluated == [0, 1, 2]
    assert len(set(read_evaluations(tmp_path / "run" / "metrics.jsonl", "accuracy").values())) == 1
    make().run()  # from the checkpoint after iteration 2: the patience is over already
    assert [row["step"] for row in read_metrics(tmp_path / "run") if "rollout/reward" in row] == [1, 2]


def test_a_run_ends_at_the_first_evaluation_behind_its_budgets(tmp_path: Path) -> None:
    rows = [
        {"step": 1, "sampling/tokens": 60.0, "seconds/iteration": 2.0},
        {"step": 1, "eval/accuracy": 0.5},
        {"step": 2, "sampling/tokens": 60.0, "seconds/iteration": 2.0},
        {"step": 2, "seconds/evaluate": 9.0},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def is_over(tokens: int, seconds: float, done: int = 2) -> bool:
        config = root_config(RLConfig(), evaluation_every=2, stop_after_tokens=tokens, stop_after_seconds=seconds)
        return is_budget_spent(path, config, done)

    assert is_over(120, 0.0)
    assert not is_over(121, 0.0)
    assert not is_over(120, 0.0, done=1)  # no evaluation there
    assert is_over(0, 4.0)
    assert not is_over(120, 4.5)  # both have to be spent
    assert not is_over(0, 0.0)


def test_what_an_iteration_generates_is_counted_whatever_it_is_for(
    tiny_policy: Path, task: WordArithmetic, tokenizer: Any, server: RepeatableServer, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {**SMALL, "num_iterations": 2, "stop_after_tokens": 1, "evaluation_samples": 4}
    estimator = SPO(completions_per_state=2, num_segments=2)
    made = make_trainer(tiny_policy, task, tokenizer, tmp_path, "", estimator=estimator, **settings)
    on_repeatable(made, server).run()
    rows = [row for row in read_metrics(tmp_path) if "sampling/tokens" in row]
    assert [row["step"] for row in rows] == [1, 2]  # one token is spent after iteration 1, the evaluation is after 2
    for row in rows:
        assert row["estimate/completion_tokens"] > 0
        assert row["sampling/tokens"] == row["rollout/drawn_tokens"] + row["estimate/completion_tokens"]


@pytest.mark.slow
def test_what_further_estimators_cost_ends_no_run_sooner(
    tiny_policy: Path, task: WordArithmetic, tokenizer: Any, server: RepeatableServer, tmp_path: Path
) -> None:
    """Nothing is trained with their completions: neither these tokens nor these seconds are in the budget."""
    settings: dict[str, Any] = {**SMALL, "num_iterations": 2, "samples_every": 1}
    further = {"spo": SPO(completions_per_state=2, num_segments=2)}
    made = make_trainer(tiny_policy, task, tokenizer, tmp_path, "", further=further, **settings)
    on_repeatable(made, server).run()
    rows = [row for row in read_metrics(tmp_path) if "sampling/tokens" in row]
    assert len(rows) == 2
    for row in rows:
        assert row["samples/completion_tokens"] > 0
        assert row["sampling/tokens"] == row["rollout/drawn_tokens"]
    path = tmp_path / "budget.jsonl"
    path.write_text(json.dumps({"step": 1, "seconds/iteration": 5.0, "seconds/samples": 3.0}) + "\n")
    assert spent(path) == (0.0, 2.0)


@pytest.mark.slow
def test_stop_after_ends_early_with_the_schedule_of_the_whole_run(
    tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path
) -> None:
    few = {"rollout_num_problems": 3, "num_epochs": 1, "evaluation_every": 0, "schedule": "linear", "num_iterations": 4}
    long = make_trainer(tiny_policy, task, tokenizer, tmp_path / "long", "", export_every=2, **few)
    long.run()
    short = make_trainer(tiny_policy, task, tokenizer, tmp_path / "short", "", stop_after=2, **few)
    short.run()
    exports = sorted(path.name for path in (tmp_path / "long" / "policies").iterdir())
    assert exports == ["iteration-000002", "iteration-000004"]
    exported = load_file(tmp_path / "long" / "policies" / "iteration-000002" / "model.safetensors")
    for name, value in short.policy.engine.model.state_dict().items():
        assert torch.equal(value, exported[name]), name
    assert read_metrics(tmp_path / "short") == read_metrics(tmp_path / "long")[:2]


def test_the_critic_of_single_iterations_stays_beside_their_policies(
    tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path
) -> None:
    """So that a critic is measured on the way, beside the policy whose values it says."""
    estimator, settings = KINDS["ppo"]
    few = {"rollout_num_problems": 2, "num_epochs": 1, "evaluation_every": 0, "num_iterations": 2, "export_every": 1}
    trainer = make_trainer(tiny_policy, task, tokenizer, tmp_path, "", estimator, **settings, **few)
    trainer.run()
    kept = [load_critic(str(tmp_path / "critics" / f"iteration-00000{number}"), "reward_model") for number in (1, 2)]
    one, two, last = (model.state_dict() for model in (*kept, critic_of(trainer).engine.model))
    assert all(torch.equal(value, two[name]) for name, value in last.items())
    assert any(not torch.equal(value, one[name]) for name, value in last.items())
    assert {path.name for path in (tmp_path / "policies").iterdir()} == {"iteration-000001", "iteration-000002"}


def test_a_checkpoint_holds_what_rounding_made_and_a_resumed_run_goes_on_from_it(
    tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path
) -> None:
    few = {"rollout_num_problems": 2, "num_epochs": 1, "evaluation_every": 0, "save_every": 1}
    first = make_trainer(tiny_policy, task, tokenizer, tmp_path, "", num_iterations=2, **few)
    first.run()
    again = make_trainer(tiny_policy, task, tokenizer, tmp_path, "", num_iterations=2, **few)
    again.run()  # from the checkpoint after iteration 1: the last one leaves none
    assert [rows for rows, _ in again.watch._roundings] == [rows for rows, _ in first.watch._roundings]
    assert len(again.watch._roundings) == 2
    for (_, found), (_, kept) in zip(again.watch._roundings, first.watch._roundings, strict=True):
        assert torch.equal(found, kept)


def test_an_evaluation_by_reward_scores_its_answers_and_keeps_the_best(
    tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path
) -> None:
    few = {"rollout_num_problems": 2, "num_epochs": 1, "evaluation_every": 1, "save_every": 1, "num_iterations": 1}
    trainer = make_trainer(tiny_policy, task, tokenizer, tmp_path / "run", "", evaluation_metric="reward", **few)

    def by_length(rows: Sequence[Trajectory]) -> list[Score]:
        return [Score(float(len(row.response_ids))) for row in rows]

    trainer.evaluation.source.reward = by_length
    trainer.run()
    rows = [row for row in read_metrics(tmp_path / "run") if "eval/reward" in row]
    assert [row["eval/reward"] for row in rows] == [row["eval/response_length"] for row in rows]
    assert trainer.evaluation.found == {row["step"]: row["eval/reward"] for row in rows}
    assert len(rows) == 2
    assert read_evaluations(tmp_path / "run" / "metrics.jsonl", "reward") == trainer.evaluation.found


@pytest.mark.slow
def test_the_checkpoint_with_the_best_accuracy_is_kept(
    tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path
) -> None:
    few = {
        "rollout_num_problems": 3,
        "num_epochs": 1,
        "evaluation_every": 1,
        "save_every": 1,
        "num_iterations": 4,
        "keep_best": 1,
    }
    trainer = make_trainer(tiny_policy, task, tokenizer, tmp_path / "run", "", **few)
    accuracies = {0: 0.1, 1: 0.6, 2: 0.2, 3: 0.3, 4: 0.2}
    trainer._evaluate = lambda version: {"eval/accuracy": accuracies[version]}  # type: ignore[method-assign]
    trainer.run()
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")) == [
        "step-00000001", "step-00000003"]  # fmt: skip
