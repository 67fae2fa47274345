"""A config in small, for real: its engine starts and answers, its first step is made. Nothing is left of it.

What a run would write goes to a folder that is removed. Each function returns the line of a check that passed and
raises what the program itself would raise.
"""

import asyncio
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from espalier.checks.check import CheckFailed, Skipped
from espalier.data.examples.stored_examples import StoredExamples
from espalier.models.load import check_model_folder
from espalier.rl.engines_from_config import make_client, serving
from espalier.rl.trainer_from_config import make_trainer
from espalier.rl.update import most_rollouts
from espalier.runtime.distributed import process_group
from espalier.runtime.entrypoint import build
from espalier.runtime.schemas import RLConfig, SampleConfig, TrackingConfig, TrainConfig
from espalier.sampling.client import SampleRequest, SamplingParams
from espalier.sampling.job import open_client
from espalier.sampling.stop_tokens import with_stop_tokens
from espalier.training.loop_from_config import make_loop

_NUM_PROBLEMS = 4
_FEW_TOKENS = 16
_QUIET = TrackingConfig(line_every_seconds=1e9)


@contextmanager
def _folder() -> Iterator[Path]:
    """Give a folder for what the program writes; its progress lines are not shown."""
    with tempfile.TemporaryDirectory(prefix="espalier-doctor-") as name, redirect_stderr(StringIO()):
        yield Path(name)


def rehearse_rl(config: RLConfig, tokenizer: Any) -> str:
    """Run one iteration with a few problems: the engine starts, takes every weight (each is perturbed once),
    samples; its log-probs are compared with the trainer's; rewards, advantages and a step are computed, and
    delivered."""
    with _folder() as folder:
        small = in_small(config, folder / "run")
        torch.manual_seed(config.seed)
        server, client = make_client(small)
        with process_group(config.rank_timeout_seconds, is_needed_alone=bool(config.deepspeed)):
            trainer = make_trainer(small, tokenizer, server, client)
            Path(small.output_dir).mkdir(parents=True)
            with serving(server, client):
                trainer.run()
        rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    last = {name: value for row in rows for name, value in row.items()}
    return (f"starts, takes every weight, and draws from the policy: {last['rollout/tokens']:.0f} tokens, log-probs "
            f"{last['engine/gap_mean']:.2g} from the trainer's on average, mean reward {last['rollout/reward']:.3g}"
            )  # fmt: skip


def in_small(config: RLConfig, run_dir: Path) -> RLConfig:
    """Return the run with one iteration of a few problems, in another folder, without evaluations and checkpoints."""
    number = min(_NUM_PROBLEMS, config.rollout.num_problems)
    rounds = min(1, config.rollout.dynamic_sampling_rounds)  # of replaced groups: who reads rewards hangs on it
    rollout = replace(config.rollout, num_problems=number, dynamic_sampling_rounds=rounds)
    small = replace(config, rollout=rollout)
    server, client = dict(config.server or {}), dict(config.client)
    if "log" in server:
        server["log"] = str(run_dir / "server.log")
    if "log" in client:
        client["log"] = str(run_dir / "engine.log")
    return replace(
        small, output_dir=str(run_dir), server=server, client=client, num_iterations=1, stop_after=0,
        update=replace(
            config.update, minibatch_size=min(config.update.minibatch_size, most_rollouts(small)), warmup_steps=0
        ),
        critic=config.critic and replace(config.critic, warmup_steps=0, num_warmup_iterations=0),
        evaluation=replace(config.evaluation, every=0, patience=0),
        checkpoints=replace(config.checkpoints, save_every=0, keep_best=0, export_every=0),
        samples=replace(config.samples, num_problems=0), tracking=_QUIET,
    )  # fmt: skip


def rehearse_sampling(config: SampleConfig, tokenizer: Any) -> str:
    """Start the server of the config's own, or reach the one that runs; have its tokenizer compared with the policy's;
    ask for a few tokens of the first request.

    Raises Skipped for a chat API, which costs money, and CheckFailed where the engine answers with no token.
    """
    if "key_variable" in config.client and "max_total_tokens" in config.client:
        raise Skipped("a chat API costs money: nothing is asked")
    with _folder() as folder:
        server, client = dict(config.server or {}), dict(config.client)
        if "log" in server:
            server["log"] = str(folder / "server.log")
        if "log" in client:
            client["log"] = str(folder / "engine.log")
        small = replace(config, output=str(folder / "output.jsonl"), server=server, client=client, tracking=_QUIET)
        request: SampleRequest = build(config.requests).load(build(config.task), tokenizer)[0]
        params: SamplingParams = with_stop_tokens(build(config.params), tokenizer)
        few = replace(params, n=1, max_tokens=min(_FEW_TOKENS, params.max_tokens))

        async def ask(client: Any) -> Any:
            await client.open()
            try:
                return (await client.sample(request, few))[0]
            finally:
                await client.close()

        with open_client(small, tokenizer, check_model_folder) as (sampler, _):
            sample = asyncio.run(ask(sampler))
    if not sample.token_ids:
        raise CheckFailed(
            f"the engine answers request '{request.id}' with no token: look at its log and at params.stop"
        )
    return f"answers: {sample.text[:40]!r} ({len(sample.token_ids)} tokens, {sample.finish_reason})"


def rehearse_training(config: TrainConfig, tokenizer: Any, examples: StoredExamples) -> str:
    """Take one optimizer step on the first batch, in memory."""
    with _folder() as folder:
        small = replace(
            config, output_dir=str(folder), max_steps=1, eval_examples=None, tracking=_QUIET, debug=False,
            evaluation=replace(config.evaluation, every=0),
            checkpoints=replace(config.checkpoints, save_every=0, keep_best=0, resume="none"),
        )  # fmt: skip
        torch.manual_seed(config.seed)
        with process_group(config.rank_timeout_seconds, is_needed_alone=bool(config.deepspeed)):
            loop, sizes = make_loop(small, tokenizer, examples, [])
            loop.run()
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = {name: value for row in rows for name, value in row.items()}
    return f"{sizes}, one step of {config.update.batch_size} examples: loss {found['train/loss']:.4g}"
