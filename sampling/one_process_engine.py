"""A vLLM engine in this very process, on one device, that takes new weights: what `sampling.engine_process` runs.

Texts are decoded once, at the end of a sample, where no stop string has to be looked for: on two CPU cores, 512 short
samples with log-probs come in three quarters of a server's time.
"""

import asyncio
import os
from collections.abc import Sequence
from typing import Any

from espalier.data.steps import Decoder, TokenRow
from espalier.sampling.client import CACHE, LOOPBACK, WEIGHTS, EngineAsleep, ServerGone, one_line
from espalier.sampling.offline_client import OfflineClient


class OneProcessEngine(OfflineClient):
    """An `OfflineClient`, and a `sampling.client.TakesWeights`. Nothing can interrupt it from within when it hangs, and
    vLLM changes the process for good (environment, random numbers, threads): it needs one of its own.

    Args: `model` folder; where it `scores_tokens` the model has a head at every token and samples nothing; the rest as
    of an `OfflineClient`."""

    takes_weights = True
    process = 0
    is_coming = False
    _asleep: frozenset[str] = frozenset()

    def __init__(self, model: str, scores_tokens: bool = False, **settings: Any):
        super().__init__(model, **settings)
        self.scores_tokens = scores_tokens

    def _load(self) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        super()._load()
        if self.scores_tokens:
            return
        from transformers import PreTrainedTokenizerBase

        tokenizer = self.engine.get_tokenizer()
        if isinstance(tokenizer, PreTrainedTokenizerBase):
            self._decode = Decoder(tokenizer)

    async def logits_of_rows(self, rows: Sequence[TokenRow]) -> list[list[list[float]]]:
        """Return `token_logits` of every row, computed together. Raises as that does."""
        return list(await asyncio.gather(*map(self.token_logits, rows)))

    @property
    def host(self) -> str:
        """This machine."""
        return LOOPBACK

    async def worker_ranks(self) -> list[str]:
        """Return the rank of each worker within it."""
        found: list[str] = self.engine.collective_rpc("worker_rank")
        return found

    async def join_weights(self, invitation: dict[str, Any], first_rank: int) -> None:
        """Join the trainer's group. Raises ServerGone."""
        self._on_workers("join_weights", invitation=invitation, first_rank=first_rank)

    async def receive_weights(self, key: str, number: int) -> list[dict[str, str]]:
        """Serve delivery `number` of the trainer of the group `key`; the receipt of every worker. Raises ServerGone."""
        receipts: list[dict[str, str]] = self._on_workers("receive_weights", key=key, number=number)
        return receipts

    def _on_workers(self, method: str, **arguments: Any) -> list[Any]:
        try:
            found: list[Any] = self.engine.collective_rpc(method, kwargs=arguments)
        except Exception as error:  # whatever vLLM raises in the middle of a reload
            raise ServerGone(f"the vLLM engine takes no weights: {one_line(error)}") from error
        return found

    async def keep_random_state(self) -> None:
        """Remember the state that unseeded samples are drawn by."""
        self.engine.collective_rpc("keep_random_state")

    async def put_random_state_back(self) -> None:
        """Draw from now on as if nothing had been drawn since."""
        self.engine.collective_rpc("put_random_state_back")

    async def pause(self) -> None:
        """Draw no token until `resume`; requests are kept."""
        self._may_step.clear()

    async def resume(self) -> None:
        """Go on."""
        self._may_step.set()

    async def sleep(self) -> None:
        """Let go of weights and cache (vLLM's level 2, for which it needs enable_sleep_mode). vLLM keeps the buffers
        of its network, on the CPU; parameters are lost until they are delivered. Raises EngineAsleep where requests
        are under way, which vLLM would drop without a word, ServerGone."""
        if self._waiting:
            raise EngineAsleep(f"an engine that has {len(self._waiting)} requests under way is put to sleep")
        self._on_memory("sleep", level=2)
        self._asleep = frozenset((WEIGHTS, CACHE))
        if not self.engine.is_sleeping():
            raise ServerGone("the vLLM engine does not sleep, and does not say why")

    async def wake(self, part: str) -> None:
        """Take the memory of that part (WEIGHTS or CACHE) again, where it sleeps. Raises ServerGone."""
        if part not in self._asleep:
            return
        is_awake = self._on_memory("wake_up", tags=[part])
        self._asleep -= {part}
        if bool(is_awake) == bool(self._asleep):  # vLLM warns in its log, and does nothing
            raise ServerGone(f"the vLLM engine does not take its {part} again, and does not say why")

    def _on_memory(self, method: str, **arguments: Any) -> Any:
        try:
            return getattr(self.engine, method)(**arguments)
        except Exception as error:  # of CUDA, where another program has the memory
            raise ServerGone(f"the vLLM engine fails in {method}: {one_line(error)}") from error

    async def ask(self, prompt_ids: list[int], name: str = "", **params: Any) -> Any:
        """Return vLLM's finished output for one prompt. Raises EngineAsleep: vLLM would take the request and never
        step; and what an `OfflineClient` raises."""
        if self._asleep:
            raise EngineAsleep("the engine sleeps while the learner computes on its device: it can be asked again once "
                               "weights were delivered")  # fmt: skip
        return await super().ask(prompt_ids, name, **params)

    async def reset_cache(self) -> bool:
        """Empty the prefix cache; whether it is. What running requests have in it is computed anew, by the weights of
        now. Raises ServerGone."""
        try:
            return bool(self.engine.reset_prefix_cache(reset_running_requests=True))
        except Exception as error:  # of a broken engine
            raise ServerGone(f"the vLLM engine does not empty its prefix cache: {one_line(error)}") from error

    async def stamp(self, version: str) -> None:
        """Remember the version of the weights."""
        self.engine.set_weight_version(version)

    async def served_version(self) -> str:
        """Return the last stamp; "default" on an engine that was never stamped."""
        return str(self.engine.get_weight_version())

    async def cached_tokens(self, prompt: list[int]) -> int | None:
        """Return how many of the prompt's tokens came from the prefix cache; None where the engine does not say."""
        num_cached = (await self.ask(prompt, max_tokens=1)).num_cached_tokens
        return None if num_cached is None else int(num_cached)

    async def prompt_logprobs(self, ids: list[int]) -> list[float]:
        """Return the log-prob of every token but the first, without the prefix cache."""
        rows = (await self.ask(ids, max_tokens=1, prompt_logprobs=0)).prompt_logprobs
        return [float(row[token].logprob) for token, row in zip(ids[1:], rows[1:], strict=True)]
