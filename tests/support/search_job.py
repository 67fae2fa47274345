"""A sampling job that searches the table of `search_cases`, of many problems; run by tests/search/test_search_jobs.py
in a process of its own, which it kills.

    python -m tests.support.search_job POLICY OUTPUT SECONDS [overrides]
"""

import sys
from typing import Any

from espalier.data.records import Problem
from espalier.models.tokenizer import load_tokenizer
from espalier.runtime.entrypoint import compose_config
from espalier.runtime.schemas import SampleConfig
from espalier.sampling import job
from tests.support.search_cases import SOLUTIONS, LastNumber, TableSampler

NUM_PROBLEMS = 30


class ManyProblems(LastNumber):
    def __init__(self, tokenizer: Any):
        self.texts = [tokenizer.decode(tokenizer("abcabc").input_ids[k % 3 : k % 3 + 3]) for k in range(NUM_PROBLEMS)]

    def problems(self, split: str) -> list[Problem]:
        return [Problem(f"p{k}", text, "1") for k, text in enumerate(self.texts)]


def main(policy: str, output: str, seconds: str, *overrides: str) -> int:
    tokenizer = load_tokenizer(policy)
    settings = [f"policy={policy}", f"output={output}", "scorer@search.scorer=random", *overrides]
    config = compose_config(SampleConfig, "api/vllm/search", settings)
    build = job.build

    def build_here(node: Any, **arguments: Any) -> Any:
        if node.get("_target_") == config.client["_target_"]:
            return TableSampler(tokenizer, SOLUTIONS, seconds=float(seconds))
        return ManyProblems(tokenizer) if node is config.task else build(node, **arguments)

    job.build = build_here
    return job.run_job(config, lambda path: tokenizer, lambda path: None)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
