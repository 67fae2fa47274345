"""All that was measured of one or several step scorers → one HTML page: first errors, single steps, pairs, AUC of inner
and terminal steps, calibration, best of n and votes, each beside what the step's index alone says.

    python run_stage.py -cn pages/show_scorers input='' output=scorers.html 'stage.folders=[RUN/1,RUN/2]'

A folder is one scorer's and holds some of prm_benchmark.json (`prm/evaluate_prm_benchmarks`), evaluation.json
(`evaluation/evaluate`), prm.json (`prm/prm_calibration`) and pairs.json (of preference pairs, by
`prm/evaluate_prm_benchmarks` or `evaluation/evaluate_reward_model`), and the X.meta.json of its scores, which names it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from espalier.analysis.scorers_page import Scorer, render_scorers
from espalier.data.records import BadInput
from espalier.pipeline.stage import StageContext

DOCUMENTS = ("prm_benchmark.json", "evaluation.json", "prm.json", "pairs.json")
SCORES = ("step_scores.meta.json", "sample_scores.meta.json", "pair_scores.meta.json", "response_scores.meta.json")


@dataclass(frozen=True)
class ShowScorers:
    """`folders`: one for each scorer, in the order of the columns."""

    folders: Sequence[str]

    finds_inputs: ClassVar[bool] = True

    def inputs(self) -> list[str]:
        """Return the documents that are there. Raises BadInput on a folder without one."""
        found = []
        for folder in self.folders:
            own = [Path(folder) / name for name in DOCUMENTS]
            there = [str(path) for path in own if path.is_file()]
            if not there:
                raise BadInput(f"{folder}: holds none of {', '.join(DOCUMENTS)}: evaluate a scorer there first "
                               "(scripts/prm_benchmark.sh)")  # fmt: skip
            found += there
        return found

    def run(self, input_path: str, context: StageContext) -> str:
        """Return the page. Raises BadInput on a document that is of another stage."""
        scorers = [_read(Path(folder)) for folder in self.folders]
        context.counts["scorers"] = len(scorers)
        return render_scorers(scorers)


def _read(folder: Path) -> Scorer:
    documents = {name: _document(folder / name) for name in DOCUMENTS}
    metas = [meta for name in SCORES if (meta := _document(folder / name)) is not None]
    stage: Mapping[str, Any] = metas[0]["config"]["stage"] if metas else {}
    counts: Mapping[str, Any] = metas[0].get("counts", {}) if metas else {}
    names = [str(stage[key]) for key in ("model", "other_model") if stage.get(key)]
    name = " and ".join(names) or folder.name
    if deviations := counts.get("deviations"):
        name += f" (not as published: {deviations})"
    return Scorer(name, counts, *(documents[name] for name in DOCUMENTS))


def _document(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise BadInput(f"{path}: no JSON document ({error}): make it again") from None
    if not isinstance(found, dict):
        raise BadInput(f"{path}: one JSON object is expected: make it again")
    return found
