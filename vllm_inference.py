"""Sample, or evaluate checkpoints, with a vLLM engine in this process.

    python vllm_inference.py -cn api/vllm/trajectories_in_process policy=MODEL output=trajectories.jsonl
    python vllm_inference.py -cn api/vllm/evaluate policies='[a/model,b/model]' output=evaluations
    python vllm_inference.py -cn api/vllm/evaluate policies='runs/*/model' output=evaluations

The first asks for the same requests and writes the same files as service_api_caller_v1.py. The others sample one
greedy and n random solutions of every problem from each policy, evaluate them, and write
`<output>/<name>/evaluation.json` and one table of all, `<output>/policies.md`. Policies that are evaluated already
are skipped; one that fails does not stop the rest, is listed, and makes the exit code 1.
"""

import logging
from pathlib import Path

from espalier.data.jsonl import open_atomic, write_json
from espalier.data.records import BadInput
from espalier.pipeline.evaluation.evaluation_table import read_evaluations
from espalier.pipeline.stage import run_stage
from espalier.runtime.entrypoint import build, entrypoint
from espalier.runtime.logs import set_up_logging
from espalier.runtime.process_lifetime import exclusive
from espalier.runtime.schemas import SampleConfig, StageConfig
from espalier.sampling.checkpoints import (
    PolicyCheckpoint,
    find_policy_checkpoints,
    is_evaluated,
    run_alone,
    run_each,
    sample_checkpoint,
)
from espalier.sampling.job import run_job
from espalier.sampling.job_record import asked_inputs

log = logging.getLogger("evaluate")


def evaluate_one(config: SampleConfig, checkpoint: PolicyCheckpoint) -> int:
    """Sample and evaluate one policy in this process; 1 if some requests were refused."""
    from espalier.models.load import check_model_folder, load_tokenizer

    code = sample_checkpoint(config, checkpoint, load_tokenizer, check_model_folder)
    stage = {
        "_target_": "espalier.pipeline.evaluation.evaluate.Evaluate",
        "greedy": str(checkpoint.file("greedy.jsonl")),
        "problems": str(checkpoint.file("problems.jsonl")),
    }
    output, samples = (str(checkpoint.file(name)) for name in ("evaluation.json", "samples.jsonl"))
    return max(code, run_stage(build(stage), None, StageConfig(output=output, input=samples, stage=stage)))


def evaluate_all(config: SampleConfig, checkpoints: list[PolicyCheckpoint]) -> int:
    """Run each in a process of its own; then print the table of all. 1 if one failed."""
    asked = asked_inputs(config, build(config.requests), build(config.task), may_lack_problems=True)
    failed = run_each(
        checkpoints,
        lambda checkpoint: is_evaluated(config, checkpoint, asked),
        lambda checkpoint: run_alone(__file__, config, checkpoint),
    )
    done = [checkpoint for checkpoint in checkpoints if is_evaluated(config, checkpoint, asked, with_refused=True)]
    found = read_evaluations({checkpoint.name: str(checkpoint.file("evaluation.json")) for checkpoint in done}, failed)
    write_json(Path(config.output) / "policies.json", found)
    with open_atomic(Path(config.output) / "policies.md", "utf-8") as file:
        file.write(found["table"]["markdown"])
    log.info("%d of %d policies\n%s", len(found["policies"]), len(checkpoints), found["table"]["plain"])
    return 1 if failed else 0


@entrypoint(SampleConfig, config_name="api/vllm/trajectories_in_process")
def main(config: SampleConfig) -> int:
    """Ask for what the output does not hold yet.

    Raises BadInput where the output for `policies` is a file, where `policy` is another than `policies`, and where a
    pilot is asked of `policies`.
    """
    set_up_logging()
    if not config.policies:
        from espalier.models.load import check_model_folder, load_tokenizer

        check_model_folder(config.policy)
        return run_job(config, load_tokenizer, check_model_folder)
    if config.pilot:
        raise BadInput(f"pilot={config.pilot}: a policy is evaluated on all problems: leave pilot out, or set "
                       "requests.limit")  # fmt: skip
    if Path(config.output).is_file():
        raise BadInput(f"{config.output} is a file: policies are evaluated into a folder: choose another output")
    checkpoints = find_policy_checkpoints(config.policies, config.output)
    if config.policy:
        if [checkpoint.path for checkpoint in checkpoints] != [config.policy]:
            raise BadInput("policy= and policies= name different policies: give one of them")
        return evaluate_one(config, checkpoints[0])
    with exclusive(Path(config.output) / "policies.json"):
        return evaluate_all(config, checkpoints)


if __name__ == "__main__":
    main()
