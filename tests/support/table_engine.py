"""`engine_stand_in` that draws from the table of `search_cases` with the tokenizer of the folder that is its model, and
says in the log-probs which engine it is (-1 of the first, -2 of the second).

python -m tests.support.table_engine DESCRIPTOR
"""

import asyncio
import contextlib
import sys
from typing import Any

from espalier.models.tokenizer import load_tokenizer
from espalier.sampling.client import Sample, SampleRequest, SamplingParams
from espalier.sampling.engine_process import serve
from tests.support.engine_stand_in import StandIn
from tests.support.search_cases import SOLUTIONS, TableSampler


class TableEngine(StandIn):
    async def open(self) -> None:
        self.table = TableSampler(load_tokenizer(self.model), SOLUTIONS, seed=int(self.options["seed"]), seconds=0.01)

    async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
        samples: list[Any] = await self.table.sample(request, params)
        number = -1.0 - int(self.options["seed"])
        return [Sample(one.text, one.token_ids, one.finish_reason, [number] * len(one.token_ids), one.stop)
                for one in samples]  # fmt: skip


if __name__ == "__main__":
    with contextlib.suppress(EOFError):
        asyncio.run(serve(int(sys.argv[1]), TableEngine))
