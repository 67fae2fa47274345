"""SFT by a bare loop written by hand: what PyTorch and transformers give without a trainer around them.

    python -m benchmarks.training.plain_loop FOLDER

It goes over the batches it is given (those of the product), each step's examples sorted by length and cut into
micro-batches padded to their longest row. Nothing is logged but the loss.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from benchmarks.processes.sides import serve
from benchmarks.training.corpus import read_ids
from benchmarks.training.settings import BETAS, read_settings

MICRO_BATCH = 8
ATTENTION = "sdpa"


def collate(rows: list[dict[str, Any]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (ids, labels, attention mask) [B, T]."""
    length = max(len(row["input_ids"]) for row in rows)
    ids = torch.full((len(rows), length), pad_id)
    labels = torch.full((len(rows), length), -100)
    mask = torch.zeros((len(rows), length), dtype=torch.long)
    for index, row in enumerate(rows):
        size = len(row["input_ids"])
        ids[index, :size] = torch.tensor(row["input_ids"])
        labels[index, :size] = torch.tensor(row["labels"])
        mask[index, :size] = 1
    return ids, labels, mask


class PlainLoop:
    """`run` trains from the initial weights."""

    def __init__(self, folder: Path):
        self.path, self.settings = folder / "policy", read_settings(folder, "sft")
        self.rows = {row["id"]: row for row in read_ids(folder, "sft")}

    def run(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return the steps of `step_ids`: seconds, losses, tokens without and with padding."""
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32, attn_implementation=ATTENTION)
        model.config.use_cache = False
        model.train()
        settings = self.settings
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=settings.learning_rate, betas=BETAS, weight_decay=0.0, fused=True
        )
        is_bf16 = settings.precision == "bf16"
        steps = [[self.rows[name] for name in step] for step in question["step_ids"]]
        losses, computed = [], 0
        started, cpu_started = time.perf_counter(), time.process_time()
        for step in steps:
            batches, loss = self._batches(step, model.config.pad_token_id), 0.0
            count = sum(int((labels[:, 1:] != -100).sum()) for _, labels, _ in batches)
            for ids, labels, mask in batches:
                with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
                    logits = model(input_ids=ids, attention_mask=mask).logits
                part = cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
                (part / count).backward()
                loss += float(part.detach()) / count
                computed += ids.numel()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss)
        return {
            "seconds": time.perf_counter() - started,
            "cpu_seconds": time.process_time() - cpu_started,
            "losses": losses,
            "tokens": sum(len(row["input_ids"]) for step in steps for row in step),
            "computed_tokens": computed,
        }

    @staticmethod
    def _batches(step: list[dict[str, Any]], pad_id: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        rows = sorted(step, key=lambda row: len(row["input_ids"]))
        return [collate(rows[start : start + MICRO_BATCH], pad_id) for start in range(0, len(rows), MICRO_BATCH)]


def main() -> None:
    """Serve runs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    serve(PlainLoop(parser.parse_args().folder).run)


if __name__ == "__main__":
    main()
