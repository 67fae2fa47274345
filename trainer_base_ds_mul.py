"""Train one model on a fixed dataset: SFT, process reward models, DPO and step-DPO.

    python trainer_base_ds_mul.py -cn exp/sft/word_arithmetic output_dir=experiments/sft
    python launch.py --nproc_per_node 2 trainer_base_ds_mul.py -cn ... deepspeed=zero2
    python trainer_base_ds_mul.py -cn ... lora=dora checkpoints.resume=step-40
    python trainer_base_ds_mul.py -cn ... mode=predict 'predict.checkpoints=[RUN]' output_dir=experiments/scores

The run directory holds config.yaml, metrics.jsonl, checkpoints/ and, last of all, model/: a run with a
model/ is finished and is not done again. SIGTERM saves and exits 143; the same command goes on.
"""

import logging
from contextlib import nullcontext
from pathlib import Path

from espalier.runtime.entrypoint import BadConfig, entrypoint
from espalier.runtime.logs import set_up_logging
from espalier.runtime.process_lifetime import exclusive
from espalier.runtime.ranks import is_main_rank
from espalier.runtime.run_dir import as_begun, check_run_dir, is_run_finished, open_run_dir
from espalier.runtime.schemas import TrainConfig
from espalier.runtime.tracking import check_tracking

log = logging.getLogger("train")


@entrypoint(TrainConfig, config_name="train", is_on_ranks=True)
def main(config: TrainConfig) -> None:
    """Train, or predict; what is finished is not done again.

    Raises BadConfig where there is no such mode, and where `resume` names a checkpoint of a run that is finished.
    """
    set_up_logging()
    check_tracking(config.tracking)
    if config.mode == "predict":
        from espalier.models.load import load_tokenizer
        from espalier.runtime.distributed import process_group
        from espalier.training.predict import predict
        from espalier.training.run_precision import settle_precision

        lock = exclusive(Path(config.output_dir)) if is_main_rank() else nullcontext()
        with lock, process_group(config.rank_timeout_seconds):
            tokenizer = load_tokenizer(config.model["path"])
            predict(settle_precision(config), tokenizer)
        return
    if config.mode != "train":
        raise BadConfig(f"mode must be train or predict, got '{config.mode}'")
    config = as_begun(config)
    run_dir = check_run_dir(config.output_dir, config)
    if is_run_finished(run_dir, config):
        if config.checkpoints.resume not in ("auto", "latest"):
            raise BadConfig(
                f"{run_dir} is finished: choose another output_dir to go on from "
                f"checkpoints.resume={config.checkpoints.resume}"
            )
        log.info("%s is finished: %s/model", run_dir, run_dir)
        return
    train(config, run_dir)


def train(config: TrainConfig, run_dir: Path) -> None:
    """Build everything, train, save the model to `run_dir`."""
    import torch  # here: neither --help nor a misspelt setting nor a finished run waits for it

    from espalier.models.load import load_tokenizer
    from espalier.runtime.distributed import barrier, process_group
    from espalier.training.loop_from_config import load_data, make_loop, save_model
    from espalier.training.run_precision import settle_precision

    torch.manual_seed(config.seed)
    lock = exclusive(run_dir) if is_main_rank() else nullcontext()
    with lock, process_group(config.rank_timeout_seconds, is_needed_alone=bool(config.deepspeed)):
        tokenizer = load_tokenizer(config.model["path"])
        examples, eval_examples = load_data(config, tokenizer)
        config = settle_precision(config)
        loop, sizes = make_loop(config, tokenizer, examples, eval_examples)
        open_run_dir(config.output_dir, config)  # only now: a mistake above leaves nothing behind
        set_up_logging(run_dir / "run.log")
        log.info("%s: %d examples, %d steps, %s", run_dir, len(examples), loop.max_steps, sizes)
        loop.run()
        save_model(loop, tokenizer)
        barrier()


if __name__ == "__main__":
    main()
