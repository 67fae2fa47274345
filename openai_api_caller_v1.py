"""Sample from a chat API (OpenAI or compatible): a stronger model's solutions, graded, as trajectories.

    OPENAI_API_KEY=... python openai_api_caller_v1.py client.model=NAME policy=TOKENIZER output=teacher.jsonl

The key is read from the environment and written nowhere. `run_stage.py -cn select_demonstrations` turns the
right solutions into demonstrations.
"""

from models.load import check_model_folder, load_tokenizer
from runtime.entrypoint import entrypoint
from runtime.logs import set_up_logging
from runtime.schemas import SampleConfig
from sampling.job import run_job


@entrypoint(SampleConfig, config_name="api/openai/distil")
def main(config: SampleConfig) -> int:
    """Ask for what the output does not hold yet."""
    set_up_logging()
    return run_job(config, load_tokenizer, check_model_folder)


if __name__ == "__main__":
    main()
