"""What an RL run amounts to: the arithmetic of published runs by hand, and what the stage writes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from espalier.checks.rehearsal import in_small
from espalier.data.records import BadInput
from espalier.models.log_ratio_reward import Scale, write_log_ratio_reward
from espalier.models.scalar_head import load_process_reward
from espalier.rl import trainer_from_config
from espalier.rl.explain import ExplainRL, RunSize, describe, run_size
from espalier.rl.memory_of_run import rl_setup, warn_of_learner_memory
from espalier.runtime.entrypoint import compose_config
from espalier.runtime.schemas import CriticConfig, RLConfig
from espalier.training import memory_of_run
from espalier.training.memory_of_run import network_of
from espalier.training.memory_plan import Setup, memory_plan
from tests.support.root_config import root_config

RLVR = 29_946  # GSM8K 7,473 + MATH 7,500 + instructions 14,973
GIVEN = ("model.path=M", "output_dir=D", "task.path=F", "task.kind=math", "critic.model.path=R")
MATH = ("model.path=M", "output_dir=D")


class Context:
    """Where a stage counts."""

    def __init__(self) -> None:
        self.counts: dict[str, Any] = {}


def size_of(name: str, given: tuple[str, ...] = GIVEN, num: int = RLVR) -> RunSize:
    return run_size(compose_config(RLConfig, f"exp/{name}", list(given)), num)


def test_the_published_run_of_two_nodes_by_hand() -> None:
    size = size_of("ppo/ppo_tulu_8b")
    assert (size.ranks, size.engines, size.devices_per_engine) == (4 + 8, 1, 4)
    assert size.rollouts_per_iteration == 12 * 16 == 192
    assert (size.minibatches_per_epoch, size.passes_per_rank_and_step) == (1, 16 // 2)
    assert size.iterations == 2_000_000 // 192 == 10_416
    assert size.steps == size.critic_steps == 10_416 * 4 == 41_664
    assert (size.warmup_steps, size.steps_per_iteration) == (0, 4)
    assert 10_416 // 100 == 104
    assert size.evaluations == 1 + 100 + 1  # the first policy, every 104th, the last
    assert size.checkpoints == 10_416 // 80
    assert size.iterations_per_epoch == pytest.approx(155.97, abs=0.01)


def test_the_run_of_one_node_as_it_was_released_by_hand() -> None:
    size = size_of("ppo/ppo_tulu_8b_one_node")
    assert (size.ranks, size.engines, size.devices_per_engine) == (7, 1, 1)
    assert size.rollouts_per_iteration == 7 * 32 == 224
    assert size.iterations == 10_000_000 // 224 == 44_642
    assert (size.passes_per_rank_and_step, size.minibatches_per_epoch) == (16, 1)
    assert int(size.iterations_per_epoch) == 133
    assert 44_642 // 3 == 14_880
    assert size.evaluations == 1 + 3 + 1


def test_the_run_of_70_billion_parameters_by_hand() -> None:
    size = size_of("ppo/ppo_tulu_70b")
    assert (size.ranks, size.engines, size.devices_per_engine) == (40, 1, 4)
    assert size.rollouts_per_iteration == 640
    assert size.iterations == 400_000 // 640 == 625
    assert size.steps == 2_500
    assert size.warmup_steps == 250
    assert size.passes_per_rank_and_step == 16


def test_the_rehearsal_is_the_published_debug_run_in_size() -> None:
    size = size_of("debug/ppo/tulu", MATH, 4000)
    assert (size.ranks, size.engines, size.devices_per_engine) == (1, 1, 1)
    assert size.iterations == 32 // 4 == 8
    assert (size.rollouts, size.steps, size.evaluations) == (32, 8, 5)  # max(1, 8 // 3) = 2: 0, 2, 4, 6, 8


@pytest.mark.parametrize(("layout", "learners", "engines"), [("one_node", 4, 4), ("four_nodes", 8, 24)])
def test_vineppo_of_7_billion_parameters_has_its_batch_in_every_layout(
    layout: str, learners: int, engines: int
) -> None:
    size = size_of("ppo/vineppo_deepseek_math", (*MATH, f"layout={layout}"), 11_500)
    assert (size.ranks, size.engines) == (learners, engines)
    assert learners + engines in (8, 32)
    assert size.rollouts_per_iteration == 64 * 8 == 512
    assert size.passes_per_rank_and_step == 64 // learners // 8
    assert (size.steps_per_iteration, size.steps, size.warmup_steps) == (16, 16_000, 480)
    assert (size.critic_steps, size.completions_per_state) == (0, 9)
    lines = describe(size, compose_config(RLConfig, "exp/ppo/vineppo_deepseek_math", [*MATH]), 11_500)
    assert f"of rollouts of 8 steps or segments {7 * 9 * 512:,} in an iteration" in " ".join(lines)


def test_completions_are_counted_where_every_state_may_have_them() -> None:
    given = [*MATH, "advantage=vineppo", "advantage.max_completions=16"]
    assert size_of("ppo/grpo_word_arithmetic", tuple(given)).completions_per_state == 17  # 9 and two rounds of 4
    size = size_of("ppo/grpo_word_arithmetic", (*MATH, "advantage=online_process_values"))
    assert size.completions_per_state == 0
    lines = describe(size, compose_config(RLConfig, "exp/ppo/grpo_word_arithmetic", [*MATH]), RLVR)
    assert not any(line.startswith("completions") for line in lines)


def test_numbers_of_a_run_without_engines_of_its_own() -> None:
    config = root_config(RLConfig, output_dir="", rollout_num_problems=6, group_size=4, minibatch_size=10,
                         num_iterations=5, num_epochs=2, micro_batch_size=3, save_every=2, client={},
                         critic=CriticConfig(num_warmup_iterations=2))  # fmt: skip
    size = run_size(config, 30, num_ranks=2)
    assert (size.rollouts_per_iteration, size.minibatches_per_epoch, size.steps_per_iteration) == (24, 3, 6)
    assert (size.steps, size.critic_steps) == (18, 30)
    assert (size.ranks, size.engines, size.passes_per_rank_and_step) == (2, 0, 2)  # 5 rollouts of 10, 3 at a time
    assert (size.evaluations, size.checkpoints, size.epochs) == (0, 2, 1.0)
    some = run_size(root_config(config, stop_after=3), 30, num_ranks=2)
    assert (some.iterations, some.rollouts, some.steps, some.critic_steps, some.checkpoints) == (3, 72, 6, 18, 1)
    for tokens, passes in ((400, 5), (1000, 5), (1100, 3), (1500, 3)):  # windows of 512
        by_tokens = root_config(config, micro_batch_tokens=tokens)
        assert run_size(by_tokens, 30, num_ranks=2).passes_per_rank_and_step == passes
    with pytest.raises(BadInput, match=r"rollout\.num_problems=6 of 5 problems: lower it"):
        run_size(config, 5)


def test_the_stage_counts_the_problems_of_the_task_and_refuses_settings_that_contradict_each_other() -> None:
    context = Context()
    given = ["model.path=M", "task.num_train=40", "task.num_demonstrations=50"]
    found = ExplainRL("exp/debug/ppo/tulu", given).run("", context)
    assert context.counts == {"iterations": 8, "rollouts": 32, "steps": 8}
    assert (found["num_problems"], found["iterations_per_epoch"], found["steps"]) == (40, 10.0, 8)
    with pytest.raises(ValueError, match="corrects nothing"):
        ExplainRL("exp/debug/ppo/tulu", "model.path=M update.tis_cap=0", 40).run("", context)
    with pytest.raises(BadInput, match=r"stage\.num_ranks must be at least 1"):
        ExplainRL("exp/debug/ppo/tulu", num_ranks=0)


def test_the_memory_of_a_learner_is_planned_where_its_networks_are_there(tiny_policy: Path) -> None:
    given = [f"model.path={tiny_policy}", "kl.coefficient=0.05"]
    found = ExplainRL("exp/ppo/grpo_word_arithmetic", given, 4000).run("", Context())["memory"]
    assert found["phases"]["between steps"].keys() == {"frozen networks", "weights", "moments"}
    assert [*found["phases"]] == ["between steps", "backward pass", "optimizer step", "delivery", "start-up proof"]
    little = found["bytes_per_rank"] / 2**31
    with pytest.raises(BadInput, match="a rank needs"):
        ExplainRL("exp/ppo/grpo_word_arithmetic", given, 4000, memory_gib=little).run("", Context())
    assert ExplainRL("exp/debug/ppo/tulu", "model.path=M", 40).run("", Context())["memory"] is None


def test_a_learner_that_does_not_fit_the_gpu_that_is_here_is_warned_of(
    tiny_policy: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = compose_config(RLConfig, "exp/ppo/grpo_word_arithmetic", [f"model.path={tiny_policy}", "output_dir=D"])
    foreign = compose_config(RLConfig, "exp/debug/ppo/tulu", ["model.path=M", "output_dir=D"])
    for size, given, is_warned in ((0, config, False), (2**40, config, False), (2**20, config, True),
                                   (2**20, foreign, False)):  # fmt: skip
        caplog.clear()
        monkeypatch.setattr(memory_of_run, "device_bytes", lambda size=size: size)
        warn_of_learner_memory(given, 1)
        assert ("by its memory plan this run does not fit: a rank needs" in caplog.text) == is_warned


def test_what_a_reward_reads_is_planned_as_it_is_held(tiny_policy: Path, tmp_path: Path) -> None:
    """A head in halves on a GPU, a generative verifier in float32, and two policies of a log-ratio, both."""
    load_process_reward(str(tiny_policy), 1).save_pretrained(tmp_path / "prm")
    write_log_ratio_reward(tmp_path / "ratio", str(tiny_policy), str(tiny_policy), Scale())

    def planned(reward: str, key: str, path: Path) -> int:
        given = [f"model.path={tiny_policy}", "output_dir=D", f"reward={reward}", f"{key}={path}", "advantage=rloo"]
        return read_by(rl_setup(compose_config(RLConfig, "exp/ppo/grpo_word_arithmetic", given), 1, is_gpu=True))

    def read_by(setup: Setup) -> int:
        (phase, *_) = memory_plan(replace(setup, reference=None)).phases
        assert phase.parts.get("frozen networks", 0) == 4 * (setup.frozen + sum(setup.frozen_cut))
        return setup.frozen + sum(setup.frozen_cut)

    whole = network_of(str(tiny_policy)).shape
    assert planned("generative_verifier", "reward.terms.verifier.path", tiny_policy) == whole.parameters
    assert planned("process", "reward.terms.process.path", tmp_path / "ratio") == 2 * whole.parameters
    prm = network_of(str(tmp_path / "prm")).shape
    halves = (prm.parameters + prm.vocabulary * prm.hidden) // 2
    assert planned("process", "reward.terms.process.path", tmp_path / "prm") == halves
    assert planned("process_by_engines", "reward.terms.process.path", tmp_path / "prm") == 0
    assert planned("step_verdicts", "reward.terms.process.verdicts.path", tiny_policy) == 0
    given = ["filter=prof", f"filter.path={tmp_path / 'prm'}", "+samples.estimators.own._target_=x",
             f"+samples.estimators.own.path={tmp_path / 'prm'}", "reward=outcome", f"model.path={tiny_policy}",
             "output_dir=D"]  # fmt: skip
    config = compose_config(RLConfig, "exp/ppo/grpo_word_arithmetic", given)
    assert read_by(rl_setup(config, 8, is_gpu=True)) == 2 * halves  # whole on each of the ranks, which share the rows
    # with ZeRO-3 the n-th part, but of networks that others than models/frozen_reward.py load, or rank 0 alone reads
    config = compose_config(RLConfig, "exp/ppo/grpo_word_arithmetic", [*given, "deepspeed=zero3"])
    cut = rl_setup(config, 8, is_gpu=True)
    assert (cut.frozen, cut.frozen_cut) == (halves, (halves,))
    held = [plan.phases[0].parts["frozen networks"] for plan in map(memory_plan, (cut, replace(cut, frozen=0)))]
    assert held == [4 * halves + -(-4 * halves // 8), -(-4 * halves // 8)]
    gathered = {phase.name: phase.parts for phase in memory_plan(cut).phases}["reward model's pass"]["gathered weights"]
    assert gathered == 4 * halves
    ahead = ["rollout.max_staleness=1", "rollout.dynamic_sampling_rounds=2"]
    engines = ["+reward.terms.judge._target_=x", "+reward.terms.judge.asking._target_=y"]
    for name, more, are_cut in (("ratio", [], 2), ("prm", [], 1), ("prm", ahead, 0), ("prm", engines, 0)):
        given = [f"model.path={tiny_policy}", "output_dir=D", "reward=process", "advantage=rloo", "deepspeed=zero3",
                 f"reward.terms.process.path={tmp_path / name}"]  # fmt: skip
        config = compose_config(RLConfig, "exp/ppo/grpo_word_arithmetic", [*given, *more])
        for run in (config, in_small(config, tmp_path)):  # a rehearsal reads them as its run does
            cut = rl_setup(run, 8, is_gpu=True)
            assert (len(cut.frozen_cut), bool(cut.frozen)) == (are_cut, not are_cut)
    given = [f"model.path={tiny_policy}", "output_dir=D", "reward=generative_verifier", "advantage=rloo",
             f"reward.terms.verifier.path={tiny_policy}", "deepspeed=zero3"]  # fmt: skip
    cut = rl_setup(compose_config(RLConfig, "exp/ppo/grpo_word_arithmetic", given), 8, is_gpu=True)
    assert (cut.frozen, cut.frozen_cut) == (whole.parameters, ())
    reads = [f"reward.forecasts.forecaster.path={tmp_path / 'prm'}", "reward.forecasts.problems=P"]
    for reward, held in (("linguistic_calibration_models", whole.parameters), ("linguistic_calibration_engines", 0)):
        given = [f"model.path={tiny_policy}", "output_dir=D", "task.path=P", f"reward={reward}", *reads]
        given.append(f"reward.forecasts.extractor.path={tiny_policy}")
        config = compose_config(RLConfig, "exp/ppo/linguistic_calibration", given)
        assert read_by(rl_setup(config, 1, is_gpu=True)) == halves + held


def test_a_learner_asks_its_memory_plan_before_it_loads_a_network(
    tiny_policy: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(config: RLConfig, num_ranks: int) -> None:
        raise KeyboardInterrupt(num_ranks)

    monkeypatch.setattr(trainer_from_config, "warn_of_learner_memory", stop)
    monkeypatch.setattr(trainer_from_config, "load_trained", lambda *_: pytest.fail("loaded"))
    config = compose_config(RLConfig, "exp/ppo/grpo_word_arithmetic", [f"model.path={tiny_policy}", "output_dir=D"])
    with pytest.raises(KeyboardInterrupt, match="1"):
        trainer_from_config.make_trainer(config, tokenizer, None, None)  # type: ignore[arg-type]
