"""One finished round → `round.json` in its folder, and `rounds.json`, the manifest of all rounds of the run.

What a round made, from the provenance beside its files: counts, seconds, commit, inputs' hashes; which policy it
started from, the last metrics of what was trained, which candidates were compared with what accuracy, and which one
the next round samples from.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espalier.data.jsonl import iter_rows, write_json
from espalier.data.records import BadInput
from espalier.pipeline.pairs.trajectory_groups import sample_order
from espalier.pipeline.stage import StageContext


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file. Raises BadInput where it cannot be read or holds no object."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read ({error}): remove it and run the same command again") from None
    if not isinstance(value, dict):
        raise BadInput(f"{path}: holds no JSON object: remove it and run the same command again")
    return value


def _last_row(path: Path) -> dict[str, Any]:
    """Return the last metrics of a training run, its step and loss among them."""
    rows = list(iter_rows(path))
    return rows[-1][1] if rows else {}


@dataclass(frozen=True)
class RecordRound:
    """`settings`: the script's arguments. `policy_before` made the samples, `start` was trained on; `folder` is the
    round's, in which `policy` is the link to the chosen candidate. The input is the evaluation of the candidates."""

    folder: str
    round: int
    policy_before: str
    start: str
    settings: dict[str, Any]

    def inputs(self) -> list[str]:
        """None beside the evaluation."""
        return []

    def run(self, input_path: str, context: StageContext) -> dict[str, Any]:
        """Return the round's document; the manifest is written first.

        Raises BadInput where there is no policy, or a file is damaged.
        """
        folder = Path(self.folder)
        policy = folder / "policy"
        if not policy.is_dir():
            raise BadInput(f"{policy}: no such policy: choose a checkpoint first")
        files = {}
        for path in sorted(folder.rglob("*.meta.json")):
            meta = read_object(path)
            name = str(path.relative_to(folder)).removesuffix(".meta.json")
            files[name] = {key: meta.get(key) for key in ("counts", "seconds", "commit", "inputs")}
        evaluated = read_object(Path(input_path)).get("policies")
        candidates = {name: row.get("accuracy") for name, row in evaluated.items()} if evaluated else {}
        document = {
            "round": self.round,
            "settings": dict(self.settings),
            "policy_before": self.policy_before,
            "trained_from": self.start,
            "policy": os.path.relpath(policy.resolve(), folder.resolve()),
            "candidates": candidates,
            "training": {path.parent.name: _last_row(path) for path in sorted(folder.glob("*/metrics.jsonl"))},
            "files": files,
            "seconds": round(sum(float(row["seconds"] or 0) for row in files.values()), 2),
        }
        write_json(folder.parent / "rounds.json", {"rounds": [*self._others(folder), document]})
        context.counts["files"] = len(files)
        return document

    def _others(self, folder: Path) -> list[dict[str, Any]]:
        """Return the rounds before this one, in their order."""
        paths = sorted(folder.parent.glob("round*/round.json"), key=lambda path: sample_order(str(path)))
        rounds = [read_object(path) for path in paths]
        return [row for row in rounds if int(row.get("round", -1)) < self.round]
