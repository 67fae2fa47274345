"""Sample from a chat API (OpenAI or compatible): a stronger model's solutions, or its judgement of ours.

    OPENAI_API_KEY=... python openai_api_caller_v1.py client.model=NAME policy=TOKENIZER output=teacher.jsonl
    OPENAI_API_KEY=... python openai_api_caller_v1.py -cn api/openai/judge_pairs client.model=NAME \\
        requests.first=ours.jsonl requests.second=theirs.jsonl output=judgements.jsonl

The key is read from the environment and written nowhere. `X.budget.jsonl` beside the output X holds what is spent;
a run that reaches `client.max_total_tokens` or `client.max_cost` ends with exit code 5, and goes on when the cap is
raised. `run_stage.py -cn problems/select_demonstrations` turns the right solutions into demonstrations; docs/judging.md
says what is made of judgements.
"""

import dataclasses

from espalier.models.tokenizer import check_model_folder, load_tokenizer
from espalier.runtime.entrypoint import entrypoint
from espalier.runtime.logs import set_up_logging
from espalier.runtime.schemas import SampleConfig
from espalier.sampling.api_keys import check_keys
from espalier.sampling.job import run_job


@entrypoint(SampleConfig, config_name="api/openai/distil")
def main(config: SampleConfig) -> int:
    """Ask for what the output does not hold yet."""
    set_up_logging()
    check_keys(dataclasses.asdict(config))
    return run_job(config, lambda path: load_tokenizer(path) if path else None, check_model_folder)


if __name__ == "__main__":
    main()
