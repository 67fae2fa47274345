"""Sample from a vLLM server: trajectories of problems, or completions of intermediate states.

    python service_api_caller_v1.py -cn api/vllm/trajectories policy=MODEL output=trajectories.jsonl
    python service_api_caller_v1.py -cn api/vllm/completions policy=MODEL requests.states=... output=...

By default a server is started for the run and stopped after it; `server=none client.base_url=http://...`
asks one that runs already. Stopped at any moment, the same command goes on where it was.
"""

from espalier.models.tokenizer import check_model_folder, load_tokenizer
from espalier.runtime.entrypoint import entrypoint
from espalier.runtime.logs import set_up_logging
from espalier.runtime.schemas import SampleConfig
from espalier.sampling.job import run_job


@entrypoint(SampleConfig, config_name="api/vllm/trajectories")
def main(config: SampleConfig) -> int:
    """Ask for what the output does not hold yet."""
    set_up_logging()
    return run_job(config, load_tokenizer, check_model_folder)


if __name__ == "__main__":
    main()
