"""A language model that continues short texts, in batches: for rewards that read by a model of their own."""

import zlib
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM

from espalier.models.load import BadModel, check_model_folder, load_end_ids, load_tokenizer, max_length_of


class TextWriter:
    """The network of a folder with its own tokenizer; `max_tokens` of a continuation. At `temperature` 0 it writes the
    likeliest token, above it draws from all: the same for the same prompts in the same order, and without touching
    torch's own random numbers. Raises BadModel on a folder that is no language model."""

    def __init__(self, path: str, max_tokens: int, batch_size: int, temperature: float = 0.0):
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
        rows = [self.tokenizer(prompt, add_special_tokens=True)["input_ids"] for prompt in prompts]
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
        draws = {"temperature": self.temperature, "top_k": 0, "top_p": 1.0} if self.temperature else {}
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(zlib.crc32(repr(rows).encode()))
            written = self.model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=self.max_tokens, do_sample=bool(draws), num_beams=1,
                pad_token_id=pad, eos_token_id=self.end_ids, use_cache=True, **draws,
            )[:, width:].tolist()  # fmt: skip
        return [self._text(row) for row in written]

    def _text(self, ids: list[int]) -> str | None:
        ends = [place for place, token in enumerate(ids) if token in self.end_ids]
        return self.tokenizer.decode(ids[: ends[0]], skip_special_tokens=True) if ends else None
