"""What a run writes down of its rollouts: which of them, and what further estimators say beside its own."""

import dataclasses
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.processes.repeatable_server import RepeatableServer
from espalier.data.jsonl import read_records
from espalier.data.records import Problem, SampledRollout, Trajectory
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.rewards.score import Score
from espalier.rl.advantages.gae import GAE
from espalier.rl.advantages.grpo import GRPO
from espalier.rl.advantages.rloo import RLOO
from espalier.rl.advantages.vineppo import VinePPO
from espalier.rl.combinations import check_combinations, check_samples
from espalier.rl.iteration_metrics import Clock
from espalier.rl.old_logprobs import OldLogprobs
from espalier.rl.rollout_checks import BadSampling
from espalier.rl.samples import (
    RolloutLog,
    evaluation_path,
    forget_evaluated,
    samples_path,
    values_at_step_starts,
    write_samples,
)
from espalier.rl.trainer_from_config import make_further_estimators
from espalier.rl.types import Estimate, Experience, Rollout, RolloutGroup
from espalier.runtime.entrypoint import BadConfig, compose_config
from espalier.runtime.schemas import RLConfig, SamplesConfig
from espalier.sampling.client import Sample, SampleRequest, SamplingParams, ServerGone
from tests.rl.test_rl_ranks import assert_same_weights, run
from tests.support.rl_cases import PARAMS, FakeClient, FakeEngine, make_trainer, on_repeatable, read_metrics

NOTHING_TO_ASK: Any = SimpleNamespace()  # a context for estimators that ask nothing


class Careless(GRPO):
    """Writes into what it is given, reads the old log-probs and draws random numbers."""

    num_asked = 0

    def __call__(self, groups: Any, experience: Experience, context: Any) -> Estimate:
        self.num_asked += 1
        experience.rewards.zero_()  # type: ignore[union-attr]
        experience.old_logprobs.zero_()
        noise = torch.rand(experience.ids.shape)
        context.policy.eval()
        return Estimate(noise * experience.response_mask)


def rollout_of(name: str, num_tokens: int = 3) -> Rollout:
    """Steps of two tokens and of what is left behind a prompt of one."""
    ids = list(range(5, 5 + num_tokens))
    steps, ends = (["x", "y"], [2, num_tokens]) if num_tokens > 2 else (["x"], [num_tokens])
    row = Trajectory(name, name.split("/")[0], "P", "".join(steps), steps, [1], ids, ends, "stop", "1", "1", True)
    return Rollout(row, [-1.0] * num_tokens, 0)


def groups_and_experience() -> tuple[list[RolloutGroup], Experience]:
    """Problem a with rewards 1, 0, 0 and b with 1, 1, 0; the critic says 0.1 everywhere."""
    groups = [
        RolloutGroup(Problem(name, "", "1"), [rollout_of(f"{name}/{k}") for k in range(3)], [Score(r) for r in rewards])
        for name, rewards in (("a", [1.0, 0.0, 0.0]), ("b", [1.0, 1.0, 0.0]))
    ]
    mask = torch.tensor([[False, True, True, True]] * 6)
    rewards = torch.zeros(6, 4)
    rewards[:, -1] = torch.tensor([1.0, 0, 0, 1, 1, 0])
    zeros = torch.zeros(6, 4)
    experience = Experience(
        mask.long(), mask.long(), mask, zeros, OldLogprobs(zeros, zeros), rewards=rewards, values=mask * 0.1
    )
    return groups, experience


def samples_of(tmp_path: Path, estimators: dict[str, Any], **settings: Any) -> RolloutLog:
    return RolloutLog(tmp_path, SamplesConfig(**settings), estimators)


def test_further_estimators_stand_beside_the_runs_own(tmp_path: Path) -> None:
    groups, experience = groups_and_experience()
    estimators = {"rloo": RLOO(), "drgrpo": GRPO(divide_by_std=False), "gae": GAE(gamma=1.0, lam=0.0)}
    samples = samples_of(tmp_path, estimators, num_problems=1, rollouts_per_problem=0)
    further = samples.ask(groups, experience, NOTHING_TO_ASK)
    own = experience.response_mask * 0.25
    samples.write(3, groups, dataclasses.replace(experience, advantages=own), Estimate(own), further)
    rows = read_records(SampledRollout, samples_path(tmp_path, 3))
    assert [row.id for row in rows] == ["a/0", "a/1", "a/2"]
    assert rows[0].step_advantages == [0.25, 0.25]
    # the reward is 1 beside 0 and 0: 1 - 0 above the others, 1 - 1/3 above the group
    assert rows[0].estimator_advantages["rloo"] == [1.0, 1.0]
    assert rows[0].estimator_advantages["drgrpo"] == [0.666667, 0.666667]
    assert rows[1].estimator_advantages["rloo"] == [-0.5, -0.5]
    # one step ahead: 0 within the response, and 1 - 0.1 at the last token, the only one of step 2
    assert rows[0].estimator_advantages["gae"] == [0.0, 0.9]
    assert rows[0].estimator_values == {"rloo": [], "drgrpo": [], "gae": [0.1, 0.1]}, "only gae reads the critic"


def test_the_probabilities_that_a_response_was_scored_by_are_kept_and_rows_of_before_have_none(tmp_path: Path) -> None:
    groups, experience = groups_and_experience()
    groups[0].scores[0] = Score(1.0, parts={"outcome": 1.0}, answers={"fish; a": 0.1234567, "rice": 0.5})
    experience = dataclasses.replace(experience, advantages=experience.response_mask * 1.0)
    write_samples(tmp_path, 1, groups, experience, Estimate(experience.response_mask * 1.0), 2)
    path = samples_path(tmp_path, 1)
    assert [row.reward_answers for row in read_records(SampledRollout, path)] == [
        {"fish; a": 0.123457, "rice": 0.5},
        {},
    ]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text(
        "".join(json.dumps({k: v for k, v in row.items() if k != "reward_answers"}) + "\n" for row in lines)
    )
    assert [row.reward_answers for row in read_records(SampledRollout, path)] == [{}, {}]


def test_so_many_rollouts_of_so_many_problems_are_written(tmp_path: Path) -> None:
    groups, experience = groups_and_experience()
    experience = dataclasses.replace(experience, advantages=experience.response_mask * torch.arange(6.0)[:, None])
    estimate = Estimate(experience.response_mask * 1.0)
    for number, expected in ((0, [0, 1, 2, 3, 4, 5]), (1, [0, 3]), (2, [0, 1, 3, 4]), (9, [0, 1, 2, 3, 4, 5])):
        write_samples(tmp_path, 1, groups, experience, estimate, num_problems=2, rollouts_per_problem=number)
        rows = read_records(SampledRollout, samples_path(tmp_path, 1))
        assert [row.step_advantages[0] for row in rows] == expected


def test_estimators_get_copies_of_the_rows_that_are_written(tmp_path: Path) -> None:
    groups, experience = groups_and_experience()
    seen: list[Any] = []

    def estimator(some: Any, part: Experience, context: Any) -> Estimate:
        seen.extend((len(some), len(part.ids), part.advantages))
        part.rewards.zero_()  # type: ignore[union-attr]
        return Estimate(part.response_mask * 1.0)

    estimator.needs_critic = False  # type: ignore[attr-defined]
    samples_of(tmp_path, {"one": estimator}, num_problems=1).ask(groups, experience, NOTHING_TO_ASK)
    assert seen == [1, 3, None]
    assert experience.rewards is not None
    assert float(experience.rewards.sum()) == 3.0


def test_old_logprobs_of_the_first_rows_are_scored_apart() -> None:
    asked: list[list[int]] = []

    def score(rows: torch.Tensor) -> list[torch.Tensor]:
        asked.append(rows.tolist())
        return [torch.arange(4.0)[:, None].expand(4, 2).clone(), torch.ones(4, 2)]

    whole = OldLogprobs.to_score((4, 2), score, Clock())
    whole.fill(torch.tensor([0]), torch.full((1, 2), 9.0), torch.ones(1, 2))
    part = whole.first(3)
    assert part.logprobs.tolist() == [[9.0, 9.0], [1.0, 1.0], [2.0, 2.0]]
    assert asked == [[1, 2]]
    assert not whole.is_scored
    assert not bool(whole.in_own_pass.any())


ONE_PASS: dict[str, Any] = {"num_iterations": 3, "rollout_num_problems": 3, "num_epochs": 1, "minibatch_size": 12,
                            "samples_every": 2, "samples_num_problems": 2}  # fmt: skip
COUNTED = ("samples/completions", "samples/completion_tokens")


@pytest.mark.slow
@pytest.mark.parametrize("update", [{}, {"minibatch_size": 6, "num_epochs": 2}])
def test_a_run_learns_the_same_bits_whatever_else_is_estimated(
    update: dict[str, Any], tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path
) -> None:
    settings = {**ONE_PASS, **update}
    careless = Careless(divide_by_std=True)
    further = {"careless": careless, "vineppo": VinePPO(completions_per_state=2, prompt_value="sampled")}
    plain = make_trainer(tiny_policy, task, tokenizer, tmp_path / "plain", "", num_lines=2, **settings)
    asked = make_trainer(tiny_policy, task, tokenizer, tmp_path / "asked", "", num_lines=2, further=further, **settings)
    assert plain.policy.makes_one_pass(12) == asked.policy.makes_one_pass(12) == (not update)
    states = []
    for trainer in (plain, asked):
        torch.manual_seed(3)
        trainer.run()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    assert careless.num_asked == 1, "iteration 2 alone is written"
    for name, value in plain.policy.engine.model.state_dict().items():
        assert torch.equal(value, asked.policy.engine.model.state_dict()[name]), name
    rows = read_metrics(tmp_path / "asked")
    assert [{k: v for k, v in row.items() if k not in COUNTED} for row in rows] == read_metrics(tmp_path / "plain")
    counted = [row for row in rows if COUNTED[0] in row]
    assert [row["step"] for row in counted] == [2]
    one = counted[0]
    assert one["samples/completions"] > 0
    assert one["samples/completion_tokens"] >= one["samples/completions"]
    seconds = [json.loads(line) for line in (tmp_path / "asked" / "metrics.jsonl").read_text().splitlines()]
    assert ["seconds/samples" in row for row in seconds if "rollout/reward" in row] == [False, True, False]
    written = read_records(SampledRollout, samples_path(tmp_path / "asked", 2))
    own = read_records(SampledRollout, samples_path(tmp_path / "plain", 2))
    assert [dataclasses.replace(row, estimator_values={}, estimator_advantages={}) for row in written] == own
    assert all(len(row.estimator_advantages["vineppo"]) == len(row.steps) for row in written)
    assert all(len(row.estimator_values["vineppo"]) == len(row.steps) for row in written)


class OneStream(FakeClient):
    """Draws by one stream whatever is asked, as an engine does for requests without a seed of their own."""

    def __init__(self, tokenizer: Any):
        super().__init__(tokenizer, num_lines=1)
        self.rng = random.Random(0)
        self.drawn: list[tuple[str, list[str]]] = []

    async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
        named = dataclasses.replace(request, id=f"{request.id}/{self.rng.random()}")
        samples = await super().sample(named, params)
        self.drawn.append((request.id, [sample.text for sample in samples]))
        return samples


class DrawingEngine(FakeEngine):
    """Has the random state of what the client draws by."""

    def __init__(self, path: Path, client: OneStream):
        super().__init__(path)
        self.client = client

    async def keep_random_state(self) -> None:
        self.kept = self.client.rng.getstate()

    async def put_random_state_back(self) -> None:
        self.client.rng.setstate(self.kept)


@pytest.mark.slow
def test_an_engine_of_one_random_stream_draws_the_same_whatever_further_estimators_ask(
    tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path
) -> None:
    clients, weights = [], []
    for name, further in (("plain", {}), ("asked", {"vineppo": VinePPO(completions_per_state=2)})):
        trainer = make_trainer(tiny_policy, task, tokenizer, tmp_path / name, "", further=further, **ONE_PASS)
        client = OneStream(tokenizer)
        trainer.rollout_source.sampler.client = client
        trainer.delivery.sync.engines = [DrawingEngine(tiny_policy, client)]
        torch.manual_seed(3)
        trainer.run()
        clients.append(client)
        weights.append(trainer.policy.engine.model.state_dict())
    plain, asked = (client.drawn for client in clients)
    assert len(asked) > len(plain) > 9
    rest = iter(asked)
    assert all(one in rest for one in plain), "every draw of the run, in its order, with other draws between them"
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name


def test_estimators_of_one_kind_get_completions_of_their_own_from_an_engine_that_draws_by_the_request(
    tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM does with params.is_seeded: equal requests have equal answers."""
    further = {name: VinePPO(completions_per_state=8, prompt_value="sampled") for name in ("one", "two")}
    trainer = make_trainer(tiny_policy, task, tokenizer, tmp_path, "", num_lines=2, further=further, **ONE_PASS)
    trainer.estimator = VinePPO(completions_per_state=8, prompt_value="sampled")
    asked: list[str] = []
    sample = trainer.rollout_source.sampler.client.sample

    async def noting(request: SampleRequest, params: SamplingParams) -> list[Sample]:
        asked.append(request.id)
        return await sample(request, params)

    monkeypatch.setattr(trainer.rollout_source.sampler.client, "sample", noting)
    trainer.run()
    completed = [name for name in asked if "#" in name]
    assert len(set(completed)) == len(completed) > 20
    (path,) = (tmp_path / "samples").glob("iteration-*.jsonl")
    assert read_records(SampledRollout, path)[0].estimator_values.keys() == {"one", "two"}


@pytest.mark.slow
def test_a_resume_writes_the_same_samples(
    tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path
) -> None:
    server = RepeatableServer(str(tiny_policy), max_model_len=512)
    few = {**ONE_PASS, "samples_every": 1, "samples_rollouts_per_problem": 0, "save_every": 1, "evaluation_every": 0}

    def start(name: str, dies_at: str = "") -> None:
        further = {"rloo": RLOO(), "vineppo": VinePPO(completions_per_state=2)}
        trainer = make_trainer(tiny_policy, task, tokenizer, tmp_path / name, "", further=further, **few)
        on_repeatable(trainer, server, dies_at).run()

    start("whole")
    with pytest.raises(ServerGone):
        start("cut", "rl-1")
    start("cut")
    for number in (1, 2, 3):
        whole, cut = (samples_path(tmp_path / name, number).read_bytes() for name in ("whole", "cut"))
        assert whole == cut
        assert len(whole.splitlines()) == 8


@pytest.mark.slow
def test_further_estimators_on_two_ranks_write_and_train_as_on_one(tiny_policy: Path, tmp_path: Path) -> None:
    run(tiny_policy, tmp_path / "plain", 1, "one_pass")
    for name, num_ranks in (("one", 1), ("two", 2)):
        run(tiny_policy, tmp_path / name, num_ranks, "one_pass", "further")
        assert_same_weights(tmp_path / "plain", tmp_path / name, 0.0 if num_ranks == 1 else 1e-4, ("model",))
    assert [row["samples/completions"] for row in read_metrics(tmp_path / "two")] == [4.0, 4.0, 4.0]
    for number in (1, 2, 3):
        one, two = (read_records(SampledRollout, samples_path(tmp_path / name, number)) for name in ("one", "two"))
        assert [row.estimator_advantages for row in one] == [row.estimator_advantages for row in two]
        assert all(row.step_advantages == row.estimator_advantages["asking"] for row in one), "both are GRPO"


# --- the config ---------------------------------------------------------------------------------------------


SPO = "samples.estimators.segments={_target_:espalier.rl.advantages.spo.SPO,completions_per_state:2}"
GAE_TOO = "+samples.estimators.gae={_target_:espalier.rl.advantages.gae.GAE,gamma:1.0,lam:0.9}"


def config_of(*overrides: str) -> RLConfig:
    return compose_config(RLConfig, "exp/ppo/grpo_word_arithmetic", ["model.path=M", "output_dir=D", *overrides])


def test_any_advantage_config_can_be_a_further_estimator() -> None:
    config = config_of("estimators=with_completions", "samples.estimators.vineppo.prompt_value=sampled", f"+{SPO}")
    check_combinations(config)
    before = torch.get_rng_state()
    made = make_further_estimators(config, dataclasses.replace(PARAMS, n=config.rollout.group_size))
    assert torch.equal(before, torch.get_rng_state())
    assert [type(one).__name__ for one in made.values()] == ["GRPO", "RLOO", "VinePPO", "SPO"]
    assert list(made) == ["grpo", "rloo", "vineppo", "segments"]


def test_the_true_values_can_stand_beside_the_runs_own_estimator() -> None:
    config = config_of("estimators=with_exact")
    check_combinations(config)
    made = make_further_estimators(config, dataclasses.replace(PARAMS, n=config.rollout.group_size))
    assert list(made) == ["grpo", "rloo", "exact"]
    assert not made["exact"].samples_more


@pytest.mark.parametrize("asks", ["advantage=exact", "estimators=with_exact"])
def test_true_values_by_a_policy_that_no_rank_holds_whole_are_refused_before_anything_starts(asks: str) -> None:
    check_combinations(config_of(asks, "deepspeed=zero2"))
    with pytest.raises(BadConfig, match=r"on rank 0, of which ZeRO-3 leaves it a part: set deepspeed=none or zero2"):
        check_combinations(config_of(asks, "deepspeed=zero3"))


@pytest.mark.parametrize("asks", ["advantage=exact", "estimators=with_exact"])
def test_true_values_of_a_task_that_cannot_be_enumerated_are_refused_before_anything_starts(asks: str) -> None:
    with pytest.raises(BadConfig, match=r"exact: ExactAdvantage computes values .* has no `position`|advantage: Exact"):
        check_combinations(config_of(asks, "task=gsm8k", "task.path=FOLDER"))
    check_combinations(config_of(asks, "task=rule_logic"))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([GAE_TOO], r"samples\.estimators\.gae: GAE reads a critic, and the run has"),
        (["estimators=from_groups", "samples.every=0"], r"samples\.every=0 .* writes none"),
        (["+samples.estimators.rloo=rloo"], r"samples\.estimators\.rloo must be an advantage config"),
        (["samples.rollouts_per_problem=-1"], r"samples\.rollouts_per_problem must be 0 \(all\) or more"),
    ],
)
def test_estimators_that_have_nothing_to_say_are_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(BadConfig, match=words):
        check_samples(config_of(*overrides))


def test_process_rewards_are_refused_for_a_further_estimator_too() -> None:
    overrides = ["estimators=with_completions", "reward=process", "reward.terms.process.path=M"]
    with pytest.raises(BadConfig, match=r"samples\.estimators\.vineppo VinePPO values whole responses"):
        check_combinations(config_of(*overrides))


def test_a_group_too_small_for_a_further_estimator_is_refused() -> None:
    config = config_of("estimators=from_groups", "rollout.group_size=1", "advantage=remax")
    with pytest.raises(BadSampling, match=r"rollout\.group_size must be at least 2"):
        make_further_estimators(config, dataclasses.replace(PARAMS, n=1))


def test_values_of_other_steps_than_the_trajectorys_are_not_written_at_its_steps() -> None:
    """As many segments as steps, cut elsewhere: tokens 1 | 2 3, the steps are tokens 1 2 | 3."""
    groups, experience = groups_and_experience()
    rollout = groups[0].rollouts[0]
    experience = dataclasses.replace(experience, values=None)
    found = {}
    for ends in ([1, 3], [2, 3]):
        estimate = Estimate(experience.response_mask * 1.0, state_values=[[0.5, 0.7, 1.0]] * 6, value_ends=[ends] * 6)
        found[ends[0]] = values_at_step_starts(rollout, 0, experience, estimate)
    assert found == {1: [], 2: [0.5, 0.7]}


def test_samples_of_older_runs_can_be_read(tmp_path: Path) -> None:
    groups, experience = groups_and_experience()
    experience = dataclasses.replace(experience, advantages=experience.response_mask * 1.0)
    write_samples(tmp_path, 1, groups, experience, Estimate(experience.response_mask * 1.0), num_problems=2)
    path = samples_path(tmp_path, 1)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    old = [{k: v for k, v in row.items() if not k.startswith("estimator_")} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in old))
    assert [row.estimator_advantages for row in read_records(SampledRollout, path)] == [{}, {}]


def test_evaluations_behind_the_point_where_a_run_goes_on_are_forgotten(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    for number in (0, 2, 4, 1000000):
        evaluation_path(tmp_path, number).write_text("")
    samples_path(tmp_path, 4).write_text("")
    forget_evaluated(tmp_path, 2)
    names = ["evaluation-000000.jsonl", "evaluation-000002.jsonl", "iteration-000004.jsonl"]
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == names
