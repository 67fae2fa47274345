"""Run one offline stage: JSONL in, JSONL (or one document) out.

    python run_stage.py -cn values/cut_states input=trajectories.jsonl output=states.jsonl
    python run_stage.py -cn values/estimate_values input=completions.jsonl stage.trajectories=... stage.states=... \\
        output=...

The stages are the files of conf/stage/, in folders (docs/stages.md). An output that exists is complete and is not made
again. A stage that can share its work runs on several ranks (`python launch.py --nproc_per_node 8 run_stage.py ...`).
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from espalier.pipeline.stage import run_stage
from espalier.runtime.entrypoint import build, entrypoint
from espalier.runtime.logs import set_up_logging
from espalier.runtime.ranks import world_size
from espalier.runtime.schemas import StageConfig


@entrypoint(StageConfig, config_name="values/cut_states", config_folder="stage", must_name=True, is_on_ranks=True)
def main(config: StageConfig) -> int:
    """Build the stage and its task, run it."""
    set_up_logging()
    task = build(config.task) if config.task else None
    with _ranks():
        return run_stage(build(config.stage), task, config, _engines(config))


def _ranks() -> AbstractContextManager[None]:
    """Return the process group, where a launcher started several ranks."""
    if world_size() == 1:
        return nullcontext()
    from espalier.runtime.distributed import process_group

    return process_group()


def _engines(config: StageConfig) -> Any:
    """Return the engines that the config's client has, None where it names none."""
    if not config.client:
        return None
    from espalier.sampling.engine_scorer import EngineScorer

    return EngineScorer(build(config.client, seed=config.seed), f"{config.output}.engine.log")


if __name__ == "__main__":
    main()
