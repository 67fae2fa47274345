"""Rows of this round, with a share of those of earlier rounds: what a round of iterated training learns from.

A rehearsal of old data keeps a reward model (or a policy) from forgetting the states its predecessors visited; Jiao et
al. 2024 add a tenth of the earlier reward model's data. Earlier rows keep their ids with `@round<number>` behind, so
that `p/3` of two rounds are two rows, and the file says where each came from.
"""

import hashlib
import json
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

from espalier.data.jsonl import read_records
from espalier.data.records import BadInput, Demonstration, PreferencePair, StepValues
from espalier.pipeline.pairs.trajectory_groups import check_choice
from espalier.pipeline.stage import StageContext

KINDS: dict[str, type] = {"StepValues": StepValues, "PreferencePair": PreferencePair, "Demonstration": Demonstration}


def content(row: Any) -> Hashable:
    """Return what a row teaches, without its id and its figures: equal ones of two rounds are one."""
    if isinstance(row, Demonstration):
        return row.prompt, row.completion
    if isinstance(row, PreferencePair):
        return row.problem_id, tuple(row.prompt_ids), tuple(row.chosen_ids), tuple(row.rejected_ids)
    return row.problem_id, tuple(row.prompt_ids), tuple(row.response_ids)


def kept_share(ids: list[str], share: float, stream: str) -> set[str]:
    """Return round(share * n) of the ids, by hash: the same whatever their order; a larger share keeps these and
    more."""
    ordered = sorted(ids, key=lambda name: (hashlib.sha256(json.dumps([stream, name]).encode()).digest(), name))
    return set(ordered[: int(share * len(ids) + 0.5)])


@dataclass(frozen=True, kw_only=True)
class ReplayRounds:
    """`<run>/round<k>/<file>` of every round k before `round`, a `share` of each; `kind` is what the rows are.

    Where an earlier row teaches what a later round's row already does, the later one stays alone (its values are the
    newer policy's).
    """

    run_dir: str
    round: int
    file: str
    kind: str
    share: float
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, tuple(KINDS))
        if self.round < 0 or not 0 <= self.share <= 1:
            raise BadInput(f"stage.round must be 0 or more and stage.share from 0 to 1, got {self.round}, {self.share}")

    def _earlier(self) -> list[tuple[int, str]]:
        """Return newest first."""
        return [(k, f"{self.run_dir}/round{k}/{self.file}") for k in reversed(range(self.round))] if self.share else []

    def inputs(self) -> list[str]:
        """Return the earlier rounds' files."""
        return [path for _, path in self._earlier()]

    def run(self, input_path: str, context: StageContext) -> list[Any]:
        """Return this round's rows, then the earlier ones', newest round first, each in the order of its file."""
        rows: list[Any] = read_records(KINDS[self.kind], input_path)
        context.counts["this_round"] = len(rows)
        seen = set(map(content, rows))
        for number, path in self._earlier():
            old: list[Any] = read_records(KINDS[self.kind], path)
            kept = kept_share([row.id for row in old], self.share, f"{self.seed}/{number}")
            new = [row for row in old if row.id in kept and content(row) not in seen]
            seen.update(map(content, new))
            context.counts[f"round{number}"] = len(new)
            context.counts[f"round{number}_repeated"] = len(kept) - len(new)
            rows += [replace(row, id=f"{row.id}@round{number}") for row in new]
        return rows
