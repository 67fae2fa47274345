"""Sample with a vLLM engine in this process: the same requests and files as service_api_caller_v1.py.

python vllm_inference.py -cn api/vllm/trajectories_in_process policy=MODEL output=trajectories.jsonl
"""

from models.load import check_model_folder, load_tokenizer
from runtime.entrypoint import entrypoint
from runtime.logs import set_up_logging
from runtime.schemas import SampleConfig
from sampling.job import run_job


@entrypoint(SampleConfig, config_name="api/vllm/trajectories_in_process")
def main(config: SampleConfig) -> int:
    """Ask for what the output does not hold yet."""
    set_up_logging()
    check_model_folder(config.policy)
    return run_job(config, load_tokenizer, check_model_folder)


if __name__ == "__main__":
    main()
