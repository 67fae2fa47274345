"""An engine that sleeps in place of sampling: what is left is the control plane and who waits for whom.

    python -m benchmarks.cluster.sleeping_engine DESCRIPTOR

`options`: `seconds` that a request takes, `ids` and `text` of each of its samples.
"""

import asyncio
import contextlib
import sys
from typing import Any

from espalier.sampling.client import Sample, SampleRequest, SamplingParams
from espalier.sampling.engine_process import serve


class Sleeping:
    """What `sampling.engine_process` serves, as far as sampling goes; settings are those of a `OneProcessEngine`."""

    def __init__(self, options: dict[str, Any], **_: Any):
        self.seconds, self.ids, self.text = float(options["seconds"]), options["ids"], options["text"]

    async def open(self) -> None:
        """Load nothing."""

    async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
        """Return the samples after the seconds."""
        await asyncio.sleep(self.seconds)
        return [
            Sample(self.text, self.ids, "length", [-0.5 - k for k in range(len(self.ids))]) for _ in range(params.n)
        ]

    def drawn_so_far(self) -> dict[str, int]:
        """Nothing: all of a sample comes at once."""
        return {}

    async def is_working(self) -> bool:
        """It does."""
        return True


if __name__ == "__main__":
    with contextlib.suppress(EOFError):
        asyncio.run(serve(int(sys.argv[1]), Sleeping))
