"""Run one offline stage: JSONL in, JSONL (or one document) out.

    python run_stage.py -cn values/cut_states input=trajectories.jsonl output=states.jsonl
    python run_stage.py -cn values/estimate_values input=completions.jsonl stage.trajectories=... stage.states=... \\
        output=...

The stages are the files of conf/stage/, in folders (docs/stages.md). An output that exists is complete and is not made
again.
"""

from typing import Any

from espalier.pipeline.stage import run_stage
from espalier.runtime.entrypoint import build, entrypoint
from espalier.runtime.logs import set_up_logging
from espalier.runtime.schemas import StageConfig


@entrypoint(StageConfig, config_name="values/cut_states", config_folder="stage", must_name=True)
def main(config: StageConfig) -> int:
    """Build the stage and its task, run it."""
    set_up_logging()
    task = build(config.task) if config.task else None
    return run_stage(build(config.stage), task, config, _engines(config))


def _engines(config: StageConfig) -> Any:
    """Return the engines that the config's client has, None where it names none."""
    if not config.client:
        return None
    from espalier.sampling.engine_scorer import EngineScorer

    return EngineScorer(build(config.client, seed=config.seed), f"{config.output}.engine.log")


if __name__ == "__main__":
    main()
