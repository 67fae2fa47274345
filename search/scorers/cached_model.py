"""A process reward model in transformers that computes of every state only what no state before it had: the keys and
values of the states of a tree are kept until its search ends."""

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from espalier.data.steps import StepTokens
from espalier.models.precision import autocast
from espalier.models.row_limits import longest_together, unseen_limit
from espalier.models.scalar_head import scores_from_logits
from espalier.rewards.engine_scores import LARGEST_GAP
from espalier.rewards.process import score_step_tokens
from espalier.values.exact.cached_rows import CachedRows, join_rows

log = logging.getLogger(__name__)

Ids = tuple[int, ...]


class CachedScoredModel:
    """A `models.scalar_head.ScoresSteps` around `network`, a token classifier. Whether its keys and values can be kept
    (layers with a state cannot) is measured on the first row; where they cannot, whole texts are scored. So they are
    where a row's scores depend on its places, which a short row does not show: kept keys stand where the longest row
    of a batch puts them (sliding windows, chunks), or on the length of its batch (rotary frequencies that grow)."""

    def __init__(self, network: Any):
        self.network = network.requires_grad_(False).eval()
        self.is_exact: bool | None = None
        self.num_computed = 0  # tokens
        self._kept: dict[Ids, dict[Ids, CachedRows]] = defaultdict(dict)  # by prompt: the rows of one state each
        self._forgotten: set[Ids] = set()

    def eval(self) -> "CachedScoredModel":
        """Return itself: it is in evaluation mode."""
        return self

    def forget(self, prompt_ids: Sequence[int]) -> None:
        """Let go of the states of a prompt, before the next scores."""
        self._forgotten.add(tuple(prompt_ids))

    def scores(
        self, rows: Sequence[StepTokens], batch_tokens: int, on_progress: Callable[[int], None] = lambda done: None
    ) -> list[list[float]]:
        """Return the score in [0, 1] at every step end of every row. Raises BadInput on one that is too long."""
        for prompt in list(self._forgotten):
            self._kept.pop(prompt, None)
            self._forgotten.discard(prompt)
        if self.is_exact is None and rows:
            self.is_exact = self._check(rows[0])
        if not self.is_exact:
            self.num_computed += sum(len(row.prompt_ids) + len(row.response_ids) for row in rows)
            return score_step_tokens(self.network, rows, pad_id=0, batch_tokens=batch_tokens)
        found: list[list[float]] = []
        for batch in self._batches(rows, batch_tokens):
            found += self._score(batch)
            on_progress(len(found))
        return found

    def _batches(self, rows: Sequence[StepTokens], batch_tokens: int) -> list[list[StepTokens]]:
        """Cut rows, in their order, into batches of at most `batch_tokens` places (a longer row is one alone)."""
        batches: list[list[StepTokens]] = []
        longest = 0
        for row in rows:
            longest = max(longest, len(row.prompt_ids) + len(row.response_ids))
            if not batches or longest * (len(batches[-1]) + 1) > batch_tokens:
                batches.append([])
                longest = len(row.prompt_ids) + len(row.response_ids)
            batches[-1].append(row)
        return batches

    @torch.inference_mode()
    def _read_prompts(self, rows: Sequence[StepTokens]) -> None:
        """Compute the prompts that nothing is kept of, each once: the states of a tree's first step share it."""
        new = [prompt for prompt in dict.fromkeys(tuple(row.prompt_ids) for row in rows) if not self._kept[prompt]]
        if new:
            _, longer = self._extend([CachedRows.empty(len(new))], new)
            self.num_computed += sum(map(len, new))
            for k, prompt in enumerate(new):
                self._kept[prompt][()] = longer.pick(torch.tensor([k]))

    @torch.inference_mode()
    def _score(self, rows: Sequence[StepTokens]) -> list[list[float]]:
        self._read_prompts(rows)
        known = [self._longest(row) for row in rows]
        parts = [CachedRows.empty(1) if kept is None else kept for _, kept in known]
        added = [[*row.prompt_ids, *row.response_ids][num:] for row, (num, _) in zip(rows, known, strict=True)]
        self.num_computed += sum(map(len, added))
        hidden, longer = self._extend(parts, added)
        found: list[list[float]] = []
        for k, (row, (num, _)) in enumerate(zip(rows, known, strict=True)):
            places = [len(row.prompt_ids) + end - 1 - num for end in row.step_ends]
            with autocast(hidden.device):
                logits = self.network.get_submodule("score")(hidden[k, places])
            found.append([round(float(value), 6) for value in scores_from_logits(logits.cpu())])
            self._kept[tuple(row.prompt_ids)][tuple(row.response_ids)] = longer.pick(torch.tensor([k]))
        return found

    def _extend(self, parts: Sequence[CachedRows], added: Sequence[Sequence[int]]) -> tuple[torch.Tensor, CachedRows]:
        rows = join_rows(parts)
        with autocast(next(self.network.parameters()).device):
            return rows.extend_hidden(self.network, added)

    def _longest(self, row: StepTokens) -> tuple[int, CachedRows | None]:
        """Return (tokens, rows) of the longest kept state that the row's first asked place lies behind."""
        kept, response = self._kept[tuple(row.prompt_ids)], tuple(row.response_ids)
        fits = [ids for ids in kept if len(ids) < row.step_ends[0] and response[: len(ids)] == ids]
        if not fits:
            return 0, None
        ids = max(fits, key=len)
        return len(row.prompt_ids) + len(ids), kept[ids]

    @torch.inference_mode()
    def _check(self, row: StepTokens) -> bool:
        """Say whether the score of a row is the same computed whole and in two parts, beside a shorter row."""
        ids = [*row.prompt_ids, *row.response_ids]
        if len(ids) < 3:
            return False
        if limit := unseen_limit(self.network.config, ()) or longest_together(self.network.config):
            log.info(
                "scores are computed of whole texts: rows of several lengths would disturb one another (%s)", limit
            )
            return False
        cut, place = len(ids) // 2, len(row.prompt_ids) + row.step_ends[-1] - 1
        cut = min(cut, place)
        whole = score_step_tokens(self.network, [row], pad_id=0)[0][-1]
        try:
            _, first = self._extend([CachedRows.empty(2)], [ids[:cut], ids[:1]])
            hidden, _ = self._extend([first], [ids[cut:], ids[1:]])
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:  # of a network without such a cache
            log.info("scores are computed of whole texts: keys and values cannot be kept (%s)", error)
            return False
        with autocast(hidden.device):
            logits = self.network.get_submodule("score")(hidden[0, [place - cut]])
        gap = abs(float(scores_from_logits(logits.cpu())[0]) - whole)
        if gap > LARGEST_GAP:
            log.info("scores are computed of whole texts: with kept keys and values they are %.3f apart", gap)
        return gap <= LARGEST_GAP
