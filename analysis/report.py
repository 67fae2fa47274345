"""A finished quick start → one HTML page to look at, and summary.json to compare.

    python run_stage.py -cn pages/report output=RUN/report.html stage.run_dir=RUN

`seconds.jsonl` and the X.meta.json files are read but are no inputs whose hashes must stay: the shell goes
on appending seconds whenever the quick start is run again, and that must not make a finished report stale. The same
holds for pages of a run of reinforcement learning within RUN (credit.html, timeline.html), which it links to.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote

from espalier.analysis.example_trajectories import read_examples
from espalier.analysis.page import ReportData, render_report
from espalier.analysis.run_files import (
    LossCurves,
    Meta,
    RunFiles,
    read_evaluation,
    read_losses,
    read_meta,
    read_prm,
    read_seconds,
)
from espalier.analysis.summary import all_differences, summarize
from espalier.data.jsonl import write_json
from espalier.pipeline.stage import StageContext

_COUNTED = ("trajectories", "states", "completions", "step_values", "label_signal", "step_scores")


@dataclass(frozen=True)
class Report:
    """`run_dir`: the run directory; `held_out_share`: the share the PRM was not trained on, from which
    `num_example_problems` examples are taken."""

    run_dir: str
    held_out_share: float
    num_example_problems: int = 3

    finds_inputs: ClassVar[bool] = True

    def inputs(self) -> list[str]:
        """List the files that the report needs and the optional ones there. Raises BadInput where one is missing."""
        files = RunFiles(Path(self.run_dir))
        files.check()
        needed = [*(files.evaluation(policy) for policy in files.policies()), files.prm]
        optional = [files.metrics(run) for run in files.training_runs()]
        optional += [files.rewards(f"{name}.jsonl") for name in ("trajectories", "step_values", "step_scores")]
        return [str(path) for path in [*needed, *(path for path in optional if path.is_file())]]

    def run(self, input_path: str, context: StageContext) -> str:
        """Write summary.json into the run directory and return the page."""
        files = RunFiles(Path(self.run_dir))
        files.check()
        evaluations = {policy: read_evaluation(files.evaluation(policy)) for policy in files.policies()}
        differences = all_differences(evaluations)
        prm, seconds = read_prm(files.prm), read_seconds(files.seconds)
        losses = _read_all_losses(files)
        examples = read_examples(files, self.held_out_share, self.num_example_problems)
        data = ReportData(
            name=files.root.resolve().name,
            evaluations=evaluations,
            differences=differences,
            prm=prm,
            losses=losses,
            missing_losses=[run for run in files.training_runs() if run not in losses],
            examples=examples,
            seconds=seconds,
            metas=_read_metas([files.rewards(f"{name}.meta.json") for name in _COUNTED]),
            pairs=_read_metas(sorted(files.root.glob("pairs/*.meta.json"))),
            credit_pages=_rl_pages(files, "credit.html", context.output.parent),
            timeline_pages=_rl_pages(files, "timeline.html", context.output.parent),
        )
        page = render_report(data)
        write_json(files.root / "summary.json", summarize(seconds, evaluations, prm, differences, data.metas))
        context.counts.update(policies=len(evaluations), examples=len(examples), stages=len(seconds))
        return page


def _read_all_losses(files: RunFiles) -> dict[str, LossCurves]:
    paths = {run: files.metrics(run) for run in files.training_runs()}
    losses = {run: read_losses(path) for run, path in paths.items() if path.is_file()}
    return {run: curves for run, curves in losses.items() if curves.train or curves.evaluation}


def _rl_pages(files: RunFiles, name: str, folder: Path) -> dict[str, str]:
    """Return by the name of a run of reinforcement learning the address of its page of that file name, as seen from
    `folder`; "" where it has none."""
    pages = {run: run / name for run in files.rl_runs()}
    addresses = {run: quote(os.path.relpath(page, folder)) if page.is_file() else "" for run, page in pages.items()}
    return {run.resolve().name: address for run, address in addresses.items()}


def _read_metas(paths: list[Path]) -> list[Meta]:
    return [read_meta(path) for path in paths if path.is_file()]
