"""What the frozen reference thinks of the data, computed once: sums of log-probs by the content of a row.

The passes are those of the first epoch, micro-batch by micro-batch, and of an evaluation: before the first step a
margin is exactly 0 as it is when reference and policy run side by side. Then the reference's weights are let go. The
sums lie in the run directory under the reference's own digest, so that a resume reads them back bit for bit.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from espalier.data.batches.batch import Batch
from espalier.data.records import BadInput
from espalier.models.in_parts import whole_shape
from espalier.models.inputs import network
from espalier.models.logprobs import target_scores
from espalier.models.without_adapters import PolicyWithoutAdapters
from espalier.runtime.distributed import gather_over_ranks, is_main_rank
from espalier.training.deepspeed_engine import whole_weights

log = logging.getLogger(__name__)
FILE = "reference_logprobs.json"
_SAMPLED = 256  # numbers of each weight that its digest reads


def weights_digest(model: Any) -> str:
    """Return a hash of the names and shapes of all weights and of some of their numbers, spread evenly: the same one
    however they are cut over the ranks, all of which make the call. Of a policy without its adapters the base alone
    counts: adapters that a resume has loaded leave the reference what it was."""
    digest = hashlib.sha256()
    is_base = isinstance(model, PolicyWithoutAdapters)
    for name, value in model.base_parameters() if is_base else network(model).named_parameters():
        with whole_weights([value]):
            flat = value.detach().reshape(-1)
            sampled = flat[:: max(1, flat.numel() // _SAMPLED)].float().cpu().numpy().copy()
        digest.update(f"{name} {tuple(whole_shape(value))}".encode() + sampled.tobytes())
    return digest.hexdigest()[:16]


class ReferenceLogprobs:
    """Stands where an objective has its reference: `sums` instead of passes."""

    def __init__(self, model: Any, temperature: float, folder: Path):
        self.model = model
        self.temperature = temperature
        self.path = folder / FILE
        self.table: dict[str, float] = {}

    def fill(self, batches: Callable[[int], Iterable[Batch]], num_steps: int) -> None:
        """Read the sums back, and compute those that are missing of `num_steps` steps; called on every rank.
        `batches`: from a step on, this rank's own."""
        digest = weights_digest(self.model)
        first = self._read(digest)
        if first < num_steps:
            for batch in batches(first):
                for part in (batch, batch.mismatched):
                    if part is not None:
                        self._add(part)
            for table in gather_over_ranks(self.table):
                self.table = table | self.table
            self._write(digest, num_steps)
        log.info("the reference's log-probs of %d rows are in %s", len(self.table), self.path)
        self.model = None

    @torch.no_grad()
    def _add(self, batch: Batch) -> None:
        sums = batch.row_sums(target_scores(self.model, batch, self.temperature).logprobs)
        for key, value in zip(batch.row_keys, sums.tolist(), strict=True):
            self.table.setdefault(key, value)

    def _read(self, digest: str) -> int:
        """Return how many steps the file holds of this reference, 0 where there is none; it is written whole or not at
        all."""
        if not self.path.is_file():
            return 0
        stored = json.loads(self.path.read_text())
        if (stored["reference"], stored["temperature"]) != (digest, self.temperature):
            log.warning("%s is of another reference and computed again", self.path)
            return 0
        self.table = stored["sums"]
        return int(stored.get("steps", 0))  # a file of before does not say

    def _write(self, digest: str, num_steps: int) -> None:
        if not is_main_rank():
            return
        partial = self.path.with_suffix(".partial")
        with partial.open("w") as file:
            stored = {"reference": digest, "temperature": self.temperature, "steps": num_steps, "sums": self.table}
            json.dump(stored, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.path)

    def sums(self, batch: Batch) -> torch.Tensor:
        """Return summed log-probs [rows] of a batch's targets, on its device. Raises BadInput for a row that was not
        there."""
        if any(key not in self.table for key in batch.row_keys):
            names = ", ".join(batch.example_ids[:4])
            raise BadInput(f"{self.path} does not hold all of {names} ...: the data have changed since it was written: "
                           "delete it, or choose another output_dir")  # fmt: skip
        return torch.tensor([self.table[key] for key in batch.row_keys], device=batch.ids.device)
