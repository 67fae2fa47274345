"""An engine without a server behind the same protocol: `vllm.LLM`, fed request by request.

Requests join the running batch as they come and leave it as they finish, so results are written as they
finish here too.
"""

import asyncio
import itertools
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from espalier.data.steps import Decoder, TokenRow
from espalier.data.token_text import added_text
from espalier.runtime.orphans import end_children_left_behind
from espalier.sampling.client import Refused, Sample, SampleRequest, SamplingParams, ServerGone, one_line
from espalier.sampling.engine_arguments import engine_arguments, engine_dtype, spelled, window_of_engine

_TASK: Any = "token_classify"  # a name of vLLM's: logits of a head at every token


class OfflineClient:
    """Args: `model` folder; `options` are vLLM's engine arguments (`tensor_parallel_size: 2`).

    The engine works in processes of its own, whose memory comes back when it is closed.
    """

    takes_weights = False
    scores_tokens = False

    def __init__(
        self,
        model: str,
        max_model_len: int = 512,
        dtype: str = "auto",
        kv_cache_gib: int = 1,
        seed: int = 0,
        options: dict[str, Any] | None = None,
    ):
        self.model = model
        self.name = "the engine"
        self.kv_cache_gib = kv_cache_gib
        self.seed = seed
        self.options = spelled(options or {})
        self.dtype = engine_dtype(dtype, self.options)
        self.max_model_length = window_of_engine(self.options, max_model_len)
        self._engine: Any = None
        self._decode: Decoder | None = None
        self._numbers = itertools.count()
        self._waiting: dict[str, asyncio.Future[Any]] = {}
        self._names: dict[str, str] = {}  # of requests for samples
        self._stepper: asyncio.Task[None] | None = None
        self._may_step = asyncio.Event()
        self._may_step.set()

    async def open(self) -> None:
        """Load the model; warm up with a prompt of 16 tokens (vLLM's CPU worker needs it first). Raises ServerGone."""
        try:
            self._load()
        except Exception as error:  # of many kinds: a config that does not validate, memory, a missing file
            raise ServerGone(f"no vLLM engine can be had for {self.model}: {one_line(error)}") from error

    def _load(self) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(self.kv_cache_gib))
        from vllm import LLM
        from vllm import SamplingParams as EngineParams

        how = (self.takes_weights, self.scores_tokens)
        own = engine_arguments(self.model, self.dtype, self.max_model_length, self.options, *how)
        end_children_left_behind()  # vLLM's own do not notice that this process was killed
        llm = LLM(**({"seed": self.seed, "disable_log_stats": True} | own))
        warm_up = [{"prompt_token_ids": [0] * 16}]
        if self.scores_tokens:
            llm.encode(warm_up, pooling_task=_TASK, use_tqdm=False)
        else:
            llm.generate(warm_up, EngineParams(max_tokens=2, temperature=0.0), use_tqdm=False)
        self._engine = llm.llm_engine

    async def close(self) -> None:
        """Let go of the engine."""
        if self._stepper is not None:
            self._stepper.cancel()
        self._engine = None

    @property
    def engine(self) -> Any:
        """vLLM's own engine, for its controls."""
        if self._engine is None:
            raise RuntimeError("OfflineClient.open() has not been called")
        return self._engine

    async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
        """Return `params.n` samples of one prompt. Raises Refused, ServerGone."""
        room = self.max_model_length - len(request.prompt_ids)
        if room < 1:
            raise Refused(f"prompt of {len(request.prompt_ids)} tokens leaves no room in {self.max_model_length}")
        has_text = bool(params.stop) or self._decode is None
        answer = await self.ask(
            request.prompt_ids,
            request.id,
            n=params.n,
            temperature=params.temperature,
            top_p=params.top_p,
            max_tokens=min(params.max_tokens, room),
            stop=params.stop or None,
            stop_token_ids=params.stop_token_ids or None,
            detokenize=has_text,
            seed=request.seed(self.seed) if params.is_seeded else None,
            logprobs=params.top_logprobs if params.return_logprobs or params.top_logprobs else None,
        )
        samples = [self._sample(request.prompt_ids, output, has_text) for output in answer.outputs]
        if not params.top_logprobs:
            return samples
        return [with_top_logprobs(one, out.logprobs) for one, out in zip(samples, answer.outputs, strict=True)]

    async def ask(self, prompt_ids: list[int], name: str = "", **params: Any) -> Any:
        """Return vLLM's finished output for one prompt; `params` are its own, `name` is what `drawn_so_far` calls it
        by. Raises Refused where vLLM takes no such request, ServerGone where the engine failed."""
        from vllm import SamplingParams as EngineParams
        from vllm.sampling_params import RequestOutputKind

        # with another kind of output only the sample that ends last comes back
        asked = EngineParams(flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY, **params)
        return await self._answer(prompt_ids, asked, name)

    async def token_logits(self, row: TokenRow) -> list[list[float]]:
        """Return the head's logits [L], without its activation, at every asked place of a row, in float32.

        Tokens that come from the prefix cache have none: a row with an asked place among them is computed whole.
        Raises Refused where vLLM takes no such row, ServerGone where the engine failed or its numbers are none.
        """
        try:
            found = await self._pooled(row.ids, reads_cache=True)
            if found.num_cached_tokens > row.places[0]:
                found = await self._pooled(row.ids, reads_cache=False)
        except Refused as error:
            raise Refused(f"{row.name}: {error}") from None
        start, logits = found.num_cached_tokens, found.outputs.data
        if len(logits) != len(row.ids) - start or not bool(logits.isfinite().all()):
            shape = tuple(logits.shape)
            raise ServerGone(f"{row.name}: the vLLM engine gave logits of shape {shape} for {len(row.ids)} tokens of "
                             f"which {start} were in its cache, or some that are no numbers")  # fmt: skip
        rows: list[list[float]] = logits.float()[[place - start for place in row.places]].tolist()
        return rows

    async def _pooled(self, ids: list[int], reads_cache: bool) -> Any:
        from vllm import PoolingParams

        asked = PoolingParams(task=_TASK, use_activation=False, skip_reading_prefix_cache=not reads_cache)
        return await self._answer(ids, asked)

    async def _answer(self, prompt_ids: list[int], asked: Any, name: str = "") -> Any:
        """Return vLLM's finished output. Raises as `ask`."""
        from vllm.exceptions import VLLMValidationError

        number = str(next(self._numbers))
        try:
            self.engine.add_request(number, {"prompt_token_ids": prompt_ids}, asked)
        except (ValueError, VLLMValidationError) as error:
            raise Refused(one_line(error)) from None
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        if name:
            self._names[number] = name
        if self._stepper is None or self._stepper.done():
            self._stepper = asyncio.create_task(self._step_while_busy())
        try:
            return await future
        except asyncio.CancelledError:
            if self._waiting.pop(number, None) is not None and self._engine is not None:
                self._engine.abort_request([number])
            raise
        finally:
            self._names.pop(number, None)

    def drawn_so_far(self) -> dict[str, int]:
        """Return by the ids of requests for samples how many tokens are drawn for those that have no answer yet."""
        processor = self.engine.output_processor
        states = [state for state in processor.request_states.values() if state.external_req_id in self._names]
        drawn = Counter[str]()
        for state in states:
            drawn[state.external_req_id] += state.detokenizer.num_output_tokens()
        for parent in {id(state.parent_req): state.parent_req for state in states if state.parent_req}.values():
            ended = [output for output in parent.output_aggregator if output is not None]
            drawn[parent.external_req_id] += sum(len(output.token_ids) for output in ended)
        return {self._names[number]: num for number, num in drawn.items()}

    async def is_working(self) -> bool:
        """Say whether it samples: whoever asks has got the loop between two of its steps."""
        return self._stepper is not None and not self._stepper.done()

    # --- requests ---------------------------------------------------------------------------------------------------

    async def _step_while_busy(self) -> None:
        """Step the engine until nothing is left; one step at a time, so that requests can join between."""
        try:
            while self._engine.has_unfinished_requests():
                await self._may_step.wait()
                for output in self._engine.step():
                    future = self._waiting.pop(output.request_id, None) if output.finished else None
                    if future is not None and not future.done():
                        future.set_result(output)
                await asyncio.sleep(0)
        except Exception as error:  # the engine's own failure belongs to every request in it
            gone = ServerGone(f"the vLLM engine failed: {one_line(error)}")
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(gone)
            self._waiting.clear()

    def _sample(self, prompt_ids: Sequence[int], output: Any, has_text: bool) -> Sample:
        ids, reason = list(output.token_ids), str(output.finish_reason)
        # without stop strings a sample stops at an end token, which is no part of the text
        text = output.text if has_text else self._text(prompt_ids, ids[:-1] if reason == "stop" else ids)
        logprobs = None if output.logprobs is None else list(output.logprobs.logprobs)  # of the sampled tokens alone
        stop = output.stop_reason if isinstance(output.stop_reason, str) else ""
        spans = getattr(output, "weight_versions", None) or ()
        versions = tuple((span.start, span.version) for span in spans)
        return Sample(text, ids, reason, logprobs, stop, versions)

    def _text(self, prompt_ids: Sequence[int], ids: Sequence[int]) -> str:
        assert self._decode is not None
        return added_text(prompt_ids, ids, self._decode)


def with_top_logprobs(sample: Sample, flat: Any) -> Sample:
    """Return the sample with what vLLM's `FlatLogprobs` has of every place: the sampled token and the likeliest."""
    spans = zip(flat.start_indices, flat.end_indices, strict=True)
    top = [dict(zip(flat.token_ids[start:end], flat.logprobs[start:end], strict=True)) for start, end in spans]
    own = [row[token] for token, row in zip(sample.token_ids, top, strict=True)]
    return replace(sample, logprobs=own, top_logprobs=tuple(top))
