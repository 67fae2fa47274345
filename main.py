"""Reinforcement learning with a live vLLM engine: rollout, reward, advantage, update, weight sync.

    python main.py -cn exp/ppo/group_relative_word_arithmetic model.path=MODEL output_dir=experiments/rl

Group-relative learning (GRPO, and Dr. GRPO with advantage.divide_by_std=false) on one process. The run
directory holds config.yaml, metrics.jsonl, server.log, checkpoints/ and, last of all, model/: a run with a
model/ is finished. Stopped at any moment, the same command goes on from the last checkpoint.
"""

import logging
from pathlib import Path
from typing import Any

import torch

from models.load import check_model_folder, load_reference, load_tokenizer
from rl.rollout import Sampler, check_params
from rl.trainer import Trainer
from rl.update import PolicyUpdate
from rl.weight_sync import VLLMEngine, WeightSync
from runtime.distributed import device, world_size
from runtime.entrypoint import BadConfig, build, entrypoint
from runtime.life import exclusive
from runtime.logs import set_up_logging
from runtime.run_dir import check_run_dir, is_finished, open_run_dir
from runtime.schemas import RLConfig
from runtime.tracking import check_tracking
from sampling.server import VLLMServer
from sampling.vllm_client import VLLMClient
from training.engine import TorchEngine
from training.guards import check_tokenizer, model_limits

log = logging.getLogger("rl")


def make_trainer(config: RLConfig, tokenizer: Any, server: VLLMServer, client: VLLMClient) -> Trainer:
    """Every component of the run, built from its config, before the server starts."""
    params, task = build(config.params), build(config.task)
    check_params(params, config.group_size)
    model = build(config.model).to(device())
    optimizer = build(config.optimizer, params=model.parameters(), lr=config.learning_rate)
    engine = TorchEngine(model, optimizer, device(), config.max_grad_norm)
    reference: Any = None
    if config.kl_coefficient > 0:
        reference = load_reference(config.model["path"], config.model["attention"])
        reference = reference.to(device())
    update = PolicyUpdate(
        engine,
        config.precision,
        params.temperature,
        config.num_epochs,
        config.minibatch_size,
        config.micro_batch_size,
        config.learning_rate,
        config.warmup_steps,
        config.clip_low,
        config.clip_high,
        config.kl_coefficient,
        config.seed,
    )
    return Trainer(
        config,
        engine,
        reference,
        task,
        build(config.reward),
        build(config.advantage),
        Sampler(client, task, tokenizer, config.num_in_flight, config.stall_seconds, server.check),
        params,
        update,
        WeightSync(VLLMEngine(client), config.max_logprob_gap, config.precision),
        int(tokenizer.pad_token_id),
        Path(config.output_dir),
    )


@entrypoint(RLConfig, config_name="rl")
def main(config: RLConfig) -> None:
    """Start the server, train, save the model."""
    if world_size() > 1:
        raise BadConfig("main.py runs on one process: start it with python, not with a launcher")
    check_tracking(config.tracking)
    check_model_folder(config.model["path"])
    set_up_logging()
    run_dir = check_run_dir(config.output_dir, config)
    if is_finished(run_dir, config):
        log.info("%s is finished: %s/model", run_dir, run_dir)
        return
    torch.manual_seed(config.seed)
    tokenizer = load_tokenizer(config.model["path"])
    check_tokenizer(tokenizer, model_limits(config.model["path"], tokenizer))
    server, client = build(config.server), build(config.client, seed=config.seed)
    if not isinstance(client, VLLMClient):
        raise BadConfig("reinforcement learning needs client=vllm: new weights are delivered over HTTP")
    trainer = make_trainer(config, tokenizer, server, client)
    with exclusive(run_dir):
        open_run_dir(config.output_dir, config)  # only now: a mistake above leaves nothing behind
        set_up_logging(run_dir / "run.log")
        _train(config, trainer, server, client)
        trainer.save_model(tokenizer)


def _train(config: RLConfig, trainer: Trainer, server: VLLMServer, client: VLLMClient) -> None:
    log.info("starting a vLLM server for %s", config.model["path"])
    with server:
        client.base_url = server.base_url  # its port is known only now
        trainer.run()


if __name__ == "__main__":
    main()
