"""What the tests of reinforcement learning share: a sampler and an engine that need no server, a small run."""

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.processes.repeatable_server import RepeatableServer
from espalier.data.records import Trajectory
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.models.load import load_policy
from espalier.models.scalar_head import load_critic
from espalier.models.without_adapters import PolicyWithoutAdapters
from espalier.rewards.outcome import OutcomeReward
from espalier.rewards.score import Reward, Score
from espalier.rl.advantages.grpo import GRPO
from espalier.rl.critic import Critic
from espalier.rl.delivery.weight_sync import WeightSync
from espalier.rl.estimator_context import AdvantageEstimator
from espalier.rl.implicit_reward import ImplicitReward
from espalier.rl.kl import KLController
from espalier.rl.policy import Policy
from espalier.rl.policy_loss import PolicyLoss
from espalier.rl.rollout import Sampler
from espalier.rl.trainer import Trainer
from espalier.rl.trainer_from_config import assemble
from espalier.rl.training_engines import load_frozen, make_training_engine
from espalier.rl.update import Update, steps_per_iteration
from espalier.runtime.entrypoint import build
from espalier.runtime.schemas import ProbesConfig, RLConfig
from espalier.sampling.client import LOOPBACK, Sample, SampleRequest, SamplingParams, ServerGone
from espalier.sampling.weight_chain import Invitation
from espalier.sampling.weight_stream import WeightReceiver
from tests.support.pass_logprobs import token_logprobs
from tests.support.root_config import root_config

PARAMS = SamplingParams(n=4, temperature=1.0, max_tokens=16, return_logprobs=True)


class FakeClient:
    """Answers `#### d` and the end token, d drawn by the request's id; dies of requests `{dies_at}/...`.

    With `num_lines` a whole response has so many lines before it, also drawn by the id.
    """

    def __init__(self, tokenizer: Any, dies_at: str = "", num_lines: int = 0):
        self.tokenizer = tokenizer
        self.dies_at = dies_at
        self.num_lines = num_lines
        self.num_open = self.num_most = 0

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
        if request.id.split("/")[0] == self.dies_at:
            raise ServerGone("the server has died")
        self.num_open += 1
        self.num_most = max(self.num_most, self.num_open)
        try:
            await asyncio.sleep(0)
        finally:  # also of one that is given up
            self.num_open -= 1
        rng = random.Random(request.id)
        num_lines = 0 if "#" in request.id else self.num_lines
        texts = [
            "".join(f"{rng.randint(1, 9)} + 1\n" for _ in range(num_lines)) + f"#### {rng.randint(1, 9)}"
            for _ in range(params.n)
        ]
        rows = [[*self.tokenizer(text).input_ids, self.tokenizer.eos_token_id] for text in texts]
        return [Sample(text, ids, "stop", [-1.0] * len(ids)) for text, ids in zip(texts, rows, strict=True)]


class StreamEnd:
    """One worker on this machine, at the end of the stream of weights."""

    name = "the engine"
    host = LOOPBACK
    process = 0
    is_coming = False
    weights: WeightReceiver

    async def worker_ranks(self) -> list[str]:
        return ["0"]

    async def join_weights(self, invitation: Invitation, first_rank: int) -> None:
        self.weights = await asyncio.to_thread(WeightReceiver, invitation, first_rank)

    async def received(self) -> dict[str, torch.Tensor]:
        return await asyncio.to_thread(lambda: dict(self.weights.receive()))


class FakeEngine(StreamEnd):
    """A copy of the policy that takes every delivered weight but those in `stale`."""

    def __init__(self, path: Path, stale: Sequence[str] = ()):
        self.model: Any = load_policy(str(path), "eager")
        self.model.train(False)
        self.stale = stale

    async def load(self, key: str, number: int) -> None:
        kept = {name: value for name, value in (await self.received()).items() if name not in self.stale}
        self.model.load_state_dict(kept, strict=False)

    @torch.no_grad()
    async def prompt_logprobs(self, ids: list[int]) -> list[float]:
        row = torch.tensor([ids])
        found: list[float] = token_logprobs(self.model(input_ids=row).logits, row)[0][0].tolist()
        return found


class Repeatable(StreamEnd):
    """Sampler and live engine in one: what it samples is a function of the request and the delivered weights."""

    def __init__(self, server: RepeatableServer, dies_at: str = ""):
        self.server, self.dies_at = server, dies_at

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
        if self.dies_at and request.id.startswith(f"{self.dies_at}/"):
            raise ServerGone("the server has died")
        body = {"prompt": request.prompt_ids, "n": params.n, "temperature": params.temperature,
                "max_tokens": params.max_tokens}  # fmt: skip
        await asyncio.sleep(0)
        return [
            Sample(row["text"], row["token_ids"], row["finish_reason"], row["logprobs"]["token_logprobs"])
            for row in self.server.sample(body)
        ]

    async def load(self, key: str, number: int) -> None:
        self.server.load_weights(await self.received())

    async def prompt_logprobs(self, ids: list[int]) -> list[float]:
        rows = self.server.prompt_logprobs(ids)[1:]
        return [row[str(token)]["logprob"] for token, row in zip(ids[1:], rows, strict=True)]


def share_of_even_tokens(trajectories: Sequence[Trajectory]) -> list[Score]:
    """A reward that an untrained policy gets some of."""
    rows = [trajectory.response_ids for trajectory in trajectories]
    return [Score(sum(token % 2 == 0 for token in row) / len(row)) for row in rows]


def on_repeatable(trainer: Trainer, server: RepeatableServer, dies_at: str = "") -> Trainer:
    """The trainer, sampling from `server` and delivering to it."""
    both = Repeatable(server, dies_at)
    source = trainer.rollout_source
    source.sampler.client = both
    trainer.delivery.sync.engines = [both]
    source.reward = share_of_even_tokens
    source.params = replace(source.params, max_tokens=6)
    return trainer


def make_policy(path: Path, config: RLConfig) -> Any:
    """With the adapters of the config."""
    torch.manual_seed(0)
    model = load_policy(str(path), "eager")
    return build(config.lora).wrap(model) if config.lora else model


def make_update(
    engine: Any, config: RLConfig, reference: Any = None, temperature: float = 1.0, max_tokens: int = 16
) -> Update:
    """Of a policy alone."""
    kl = KLController(config.kl.coefficient, config.kl.target, config.kl.horizon)
    return Update(config, [Policy(PolicyLoss(engine, config, temperature, kl, reference), max_tokens, may_wait=True)])


def critic_of(trainer: Trainer) -> Critic:
    _, critic = trainer.update.learners
    assert isinstance(critic, Critic)
    return critic


def make_trainer(
    tiny_policy: Path,
    task: WordArithmetic,
    tokenizer: Any,
    run_dir: Path,
    dies_at: str,
    estimator: AdvantageEstimator | None = None,
    num_lines: int = 0,
    window: int | None = None,
    further: dict[str, Any] | None = None,
    reward: Reward | None = None,
    **changes: Any,
) -> Trainer:
    """Six iterations by a sampler whose answers are a function of the request's id."""
    settings: dict[str, Any] = {
        "output_dir": str(run_dir), "seed": 5, "precision": "fp32", "num_iterations": 6, "rollout_num_problems": 6,
        "group_size": 4, "num_epochs": 2, "minibatch_size": 10, "micro_batch_size": 4, "learning_rate": 1e-3,
        "warmup_steps": 7, "evaluation_every": 2, "evaluation_num_problems": 10, "save_every": 2,
        "optimizer": {"_target_": "torch.optim.AdamW"},
        "probes": ProbesConfig(on_fault="warn"),  # this sampler's log-probs are no policy's
    }  # fmt: skip
    config = root_config(RLConfig, **{**settings, **changes})
    rates = (config.update.learning_rate, config.update.max_grad_norm)
    engine = make_training_engine(config, make_policy(tiny_policy, config), config.optimizer, *rates)
    critic = None
    if config.critic is not None:
        torch.manual_seed(0)
        network = load_critic(str(tiny_policy), "policy", "eager")
        fitted = make_training_engine(config, network, config.optimizer, *rates)
        num_steps = config.num_iterations * steps_per_iteration(config)
        critic = Critic(fitted, config.critic, "fp32", config.update.micro_batch_size, num_steps)
    implicit_reward = None
    if config.implicit_reward is not None:
        settings = config.implicit_reward
        network = load_policy(str(tiny_policy), "eager")
        fitted = make_training_engine(config, network, config.optimizer, settings.learning_rate, settings.max_grad_norm)
        start = load_frozen(config, str(tiny_policy), "eager")
        sizes = (config.update.minibatch_size, config.update.micro_batch_size, config.update.micro_batch_tokens)
        implicit_reward = ImplicitReward(fitted, settings, start, PARAMS.temperature, "fp32", *sizes)
    reference: Any = load_frozen(config, str(tiny_policy), "eager") if config.kl.coefficient > 0 else None
    if reference is not None and config.lora:
        reference = PolicyWithoutAdapters(engine.model)
    run_dir.mkdir(exist_ok=True)
    client = FakeClient(tokenizer, dies_at, num_lines)
    trainer = assemble(
        config,
        engine,
        critic,
        reference,
        reward or OutcomeReward(),
        estimator or GRPO(divide_by_std=True),
        Sampler(client, task, tokenizer, concurrency=4, stall_seconds=60),
        PARAMS,
        WeightSync(FakeEngine(tiny_policy), precision="fp32", dtype=torch.float32),
        window,
        further=further,
        implicit_reward=implicit_reward,
    )
    trainer.watch._has_reported = config.probes.on_fault == "warn"  # why they differ is known, and costs many passes
    return trainer


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    timed = ("seconds/", "tokens_per_second/", "ranks/")
    return [{name: value for name, value in row.items() if not name.startswith(timed)} for row in rows]
