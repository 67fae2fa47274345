"""An engine in this process behind the same protocol: `vllm.LLM`, fed request by request.

Requests join the running batch as they come and leave it as they finish, so results are written as they
finish here too.
"""

import asyncio
import os
from typing import Any

from sampling.client import Refused, Sample, SampleRequest, SamplingParams


class OfflineClient:
    """Args: `model` folder; `options` are vLLM's engine arguments (`tensor_parallel_size: 2`)."""

    def __init__(
        self,
        model: str,
        max_model_len: int = 512,
        dtype: str = "bfloat16",
        kv_cache_gib: int = 1,
        seed: int = 0,
        options: dict[str, Any] | None = None,
    ):
        self.model = model
        self.max_model_length = max_model_len
        self.dtype = dtype
        self.kv_cache_gib = kv_cache_gib
        self.seed = seed
        self.options = options or {}
        self._engine: Any = None
        self._waiting: dict[str, asyncio.Future[Any]] = {}
        self._stepper: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Load the model; warm up with a prompt of 16 tokens (vLLM's CPU worker needs it first)."""
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(self.kv_cache_gib))
        from vllm import LLM
        from vllm import SamplingParams as EngineParams

        llm = LLM(
            model=self.model,
            dtype=self.dtype,
            max_model_len=self.max_model_length,
            seed=self.seed,
            disable_log_stats=True,
            **self.options,
        )
        warm_up = EngineParams(max_tokens=2, temperature=0.0)
        llm.generate([{"prompt_token_ids": [0] * 16}], warm_up, use_tqdm=False)
        self._engine = llm.llm_engine

    async def close(self) -> None:
        """Let go of the engine."""
        if self._stepper is not None:
            self._stepper.cancel()
        self._engine = None

    async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
        """`params.n` samples of one prompt."""
        from vllm import SamplingParams as EngineParams
        from vllm.sampling_params import RequestOutputKind

        room = self.max_model_length - len(request.prompt_ids)
        if room < 1:
            raise Refused(f"prompt of {len(request.prompt_ids)} tokens leaves no room in {self.max_model_length}")
        engine_params = EngineParams(
            n=params.n,
            temperature=params.temperature,
            top_p=params.top_p,
            max_tokens=min(params.max_tokens, room),
            stop=params.stop or None,
            seed=request.seed(self.seed) if params.is_seeded else None,
            logprobs=0 if params.has_logprobs else None,
            output_kind=RequestOutputKind.FINAL_ONLY,  # else only the sample that ends last comes back
        )
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = future
        self._engine.add_request(request.id, {"prompt_token_ids": request.prompt_ids}, engine_params)
        if self._stepper is None or self._stepper.done():
            self._stepper = asyncio.create_task(self._step_while_busy())
        return [self._sample(output) for output in (await future).outputs]

    async def _step_while_busy(self) -> None:
        """Step the engine until nothing is left; one step at a time, so that requests can join between."""
        try:
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    if output.finished:
                        self._waiting.pop(output.request_id).set_result(output)
                await asyncio.sleep(0)
        except Exception as error:  # the engine's own failure belongs to every request in it
            for future in self._waiting.values():
                future.set_exception(error)
            self._waiting.clear()

    def _sample(self, output: Any) -> Sample:
        ids = list(output.token_ids)
        logprobs = None
        if output.logprobs is not None:
            logprobs = [float(row[token].logprob) for row, token in zip(output.logprobs, ids, strict=True)]
        return Sample(output.text, ids, str(output.finish_reason), logprobs)
