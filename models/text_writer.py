"""A language model that continues short texts, in batches: for rewards that read by a model of their own."""

import zlib
from collections.abc import Sequence
from typing import ClassVar

import torch
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

from espalier.data.prompts import encode_text
from espalier.data.records import BadInput
from espalier.models.load import BadModel, check_model_folder, load_end_ids, load_tokenizer, max_length_of


class TextWriter:
    """The network of a folder with its own tokenizer; `max_tokens` of a continuation. At `temperature` 0 it writes the
    likeliest token, above it draws from all, for each prompt with random numbers of its own: whatever stands beside it,
    and without touching torch's. Raises BadModel on a folder that is no language model, BadInput on a temperature below
    0."""

    reads_texts: ClassVar[bool] = True

    def __init__(self, path: str, max_tokens: int, batch_size: int, temperature: float = 0.0):
        if temperature < 0:
            raise BadInput(f"reward.forecasts.extractor.temperature must be 0 (greedy) or more, got {temperature:g}")
        check_model_folder(path)
        self.path, self.max_tokens, self.batch_size, self.temperature = path, max_tokens, batch_size, temperature
        self.tokenizer = load_tokenizer(path)
        try:
            self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().requires_grad_(False)
        except (OSError, ValueError) as error:
            raise BadModel(f"{path}: cannot load the model: {str(error).splitlines()[0][:300]}") from error
        self.end_ids = sorted({*load_end_ids(path), self.tokenizer.eos_token_id})

    @torch.inference_mode()
    def __call__(self, prompts: Sequence[str]) -> list[str | None]:
        """Return continuations without their end token, in order; None where one did not end within `max_tokens`.

        Raises BadModel where a prompt and its continuation do not fit into the network's window.
        """
        rows = [encode_text(self.tokenizer, prompt, self.path) for prompt in prompts]
        window, longest = max_length_of(self.path), max(map(len, rows), default=0)
        if window is not None and longest + self.max_tokens > window:
            raise BadModel(f"{self.path}: a prompt of {longest} tokens and {self.max_tokens} more do not fit into the "
                           f"window of {window}: shorten responses, or take another model")  # fmt: skip
        order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
        texts: list[str | None] = [None] * len(rows)
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            for index, text in zip(batch, self._continue([rows[index] for index in batch]), strict=True):
                texts[index] = text
        return texts

    def _continue(self, rows: Sequence[list[int]]) -> list[str | None]:
        device, width = next(self.model.parameters()).device, max(map(len, rows))
        pad = self.tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
        draws = LogitsProcessorList([_Draws(rows, self.temperature)] if self.temperature else [])
        written = self.model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=self.max_tokens, do_sample=False, num_beams=1,
            pad_token_id=pad, eos_token_id=self.end_ids, use_cache=True, logits_processor=draws,
        )[:, width:].tolist()  # fmt: skip
        return [self._text(row) for row in written]

    def _text(self, ids: list[int]) -> str | None:
        ends = [place for place, token in enumerate(ids) if token in self.end_ids]
        return self.tokenizer.decode(ids[: ends[0]], skip_special_tokens=True) if ends else None


class _Draws(LogitsProcessor):
    """Adds to each row's logits / temperature Gumbel noise of a generator of its own, seeded by the row's tokens: the
    likeliest token is then a draw from the softmax (Gumbel 1954)."""

    def __init__(self, rows: Sequence[list[int]], temperature: float):
        self.generators = [torch.Generator().manual_seed(zlib.crc32(repr(row).encode())) for row in rows]
        self.temperature = temperature

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        drawn = [torch.empty(scores.shape[1]).exponential_(generator=one) for one in self.generators]
        return scores.float() / self.temperature - torch.stack(drawn).log().to(scores.device)
