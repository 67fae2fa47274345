"""Reinforcement learning with a live vLLM engine: rollout, reward, advantage, update, weight sync.

    python main.py -cn exp/ppo/grpo_word_arithmetic model.path=MODEL output_dir=experiments/rl
    python main.py -cn exp/ppo/vineppo_word_arithmetic model.path=MODEL output_dir=experiments/vineppo
    python launch.py --nproc_per_node 2 main.py -cn exp/ppo/ppo_word_arithmetic model.path=MODEL output_dir=RUN

PPO, VinePPO, GRPO and the like differ in `advantage` (and `critic`) alone. With `client=data_parallel_engines
server=none` several engines work beside one another without a server, which is the fastest on one CPU machine. Of
several servers that run already (`server=none client.base_url=[...]`) every one follows the policy. The run directory
holds config.yaml, metrics.jsonl, server.log (or engine-0.log, …), samples/, checkpoints/, policies/ where they are
asked for, critic/ where there is one and, last of all, model/: a run with a model/ is finished. Stopped at any moment,
the same command goes on from the last checkpoint.
"""

import dataclasses
import logging
from contextlib import nullcontext

from espalier.runtime.entrypoint import entrypoint
from espalier.runtime.logs import set_up_logging
from espalier.runtime.process_lifetime import exclusive
from espalier.runtime.ranks import is_main_rank
from espalier.runtime.run_dir import as_begun, check_run_dir, is_run_finished, open_run_dir
from espalier.runtime.schemas import RLConfig
from espalier.runtime.tracking import check_tracking

log = logging.getLogger("rl")


@entrypoint(RLConfig, config_name="rl", is_on_ranks=True)
def main(config: RLConfig) -> None:
    """Start the server, train, save the model."""
    import torch  # here: neither --help nor a misspelt setting waits for it

    from espalier.models.load import check_model_folder, load_tokenizer
    from espalier.models.tokenizer_checks import check_stop_tokens, check_tokenizer, model_limits
    from espalier.rl.engines_from_config import make_client, serving
    from espalier.rl.trainer_from_config import make_trainer
    from espalier.runtime.distributed import barrier, process_group
    from espalier.sampling.api_keys import check_keys, require_keys
    from espalier.training.run_precision import settle_precision

    check_keys(dataclasses.asdict(config))
    check_tracking(config.tracking)
    check_model_folder(config.model["path"])
    set_up_logging()
    config = as_begun(config)
    run_dir = check_run_dir(config.output_dir, config)
    if is_run_finished(run_dir, config):
        log.info("%s is finished: %s/model", run_dir, run_dir)
        return
    require_keys(dataclasses.asdict(config))
    torch.manual_seed(config.seed)
    tokenizer = load_tokenizer(config.model["path"])
    check_tokenizer(tokenizer, model_limits(config.model["path"], tokenizer))
    check_stop_tokens(tokenizer, config.model["path"])
    lock = exclusive(run_dir) if is_main_rank() else nullcontext()
    with lock, process_group(config.rank_timeout_seconds, is_needed_alone=bool(config.deepspeed)):
        config = settle_precision(config)
        server, client = make_client(config)
        trainer = make_trainer(config, tokenizer, server, client)
        barrier()
        open_run_dir(config.output_dir, config)  # only now: a mistake above leaves nothing behind
        set_up_logging(run_dir / "run.log")
        with serving(server, client):
            trainer.run()
        trainer.save_model()


if __name__ == "__main__":
    main()
