"""What calibration rewards do to stated confidences, on held-out questions whose answers have known frequencies.

    bash scripts/bench.sh calibration                              every arm, seeds 1 to 3
    bash scripts/bench.sh calibration --arms rlcr --seeds 1        one run: two to three minutes on one free core
    bash scripts/bench.sh calibration --seeds                      the figures of the runs that are kept

A run teaches a fresh tiny policy to imitate the overconfident teacher of `qa_world`, then trains it by reinforcement
learning; both policies answer the same held-out questions (one sampled response each) and are measured by
`evaluation/measure_calibration`. Arms: `rlcr` (correctness and Brier score), `rlcr_divided` (the same, divided by the
group's standard deviation: GRPO as published), `outcome` (correctness alone) and `linguistic_calibration` (paragraphs
with alternatives, the log score). A finished run is one record in benchmarks/results/calibration/.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.credit.intervals import Mean, mean_over_seeds
from benchmarks.result import RESULTS, machine, write_result
from benchmarks.rl.policy import run_program, train
from espalier.analysis.reliability_figure import reliability_figure
from espalier.data.jsonl import write_json
from espalier.runtime.run_dir import code_commit

HOW = "bash scripts/bench.sh calibration"
RECORDS = RESULTS / "calibration"
PICTURE = Path("docs/reliability_diagram.svg")
NUM_SFT_STEPS, NUM_LAYERS = 300, 2
SHOWN = ("accuracy", "ece", "ece_equal_width", "brier", "confidence", "truth_error")


@dataclass(frozen=True)
class Arm:
    """An experiment, its form of responses, the most tokens of one, and further settings of main.py."""

    experiment: str
    form: str
    max_tokens: int
    settings: tuple[str, ...] = ()


ARMS = {
    "rlcr": Arm("exp/ppo/rlcr_qa_world", "confidence", 32),
    "linguistic_calibration": Arm("exp/ppo/linguistic_calibration_qa_world", "paragraph", 64),
    "rlcr_divided": Arm("exp/ppo/rlcr_qa_world", "confidence", 32, ("advantage.divide_by_std=true",)),
    "outcome": Arm("exp/ppo/rlcr_qa_world", "confidence", 32, ("reward=outcome",)),
}


def sft_policy(form: str, seed: int, folder: Path) -> Path:
    """Return the policy that imitates the teacher, made where it is not there yet."""
    log, demonstrations, run = folder / "programs.log", folder / "demonstrations.jsonl", folder / "sft"
    if not (run / "model").is_dir():
        if not demonstrations.is_file():
            run_program(log, "run_stage.py", "-cn", "problems/make_demonstrations", "task=qa_world",
                        f"task.form={form}", f"output={demonstrations}")  # fmt: skip
        run_program(log, "run_stage.py", "-cn", "training/make_policy", f"input={demonstrations}",
                    f"output={folder / 'base'}", f"stage.num_layers={NUM_LAYERS}", f"seed={seed}")  # fmt: skip
        settings = [f"max_steps={NUM_SFT_STEPS}", f"seed={seed}"]
        train(run, folder / "base", demonstrations, log, "exp/sft/qa_world", settings)
    return run / "model"


def measure(policy: Path, arm: Arm, folder: Path) -> dict[str, Any]:
    """Return measure_calibration's figures of one sampled response to every test question."""
    log, names = folder / "programs.log", ("samples.jsonl", "forecasts.jsonl", "calibration.json")
    samples, forecasts, measured = (folder / name for name in names)
    task = ["task=qa_world", f"task.form={arm.form}"]
    run_program(log, "vllm_inference.py", "-cn", "api/vllm/trajectories_in_process", f"policy={policy}", *task,
                "requests.split=test", "params.n=1", f"params.max_tokens={arm.max_tokens}",
                f"output={samples}")  # fmt: skip
    run_program(log, "run_stage.py", "-cn", "evaluation/read_forecasts", *task, f"input={samples}",
                f"output={forecasts}")  # fmt: skip
    run_program(log, "run_stage.py", "-cn", "evaluation/measure_calibration", f"input={forecasts}",
                f"output={measured}")  # fmt: skip
    found: dict[str, Any] = json.loads(measured.read_text())
    return {name: found[name] for name in ("figures", "equal_width_bins", "by_level", "num_without_answer")}


def run_arm(name: str, seed: int, folder: Path) -> dict[str, Any]:
    """Make one run, or what is missing of it, and return its record."""
    arm = ARMS[name]
    start = folder / f"{arm.form}-{seed}"
    policy, run = sft_policy(arm.form, seed, start), folder / f"{name}-{seed}"
    run_program(
        run.with_suffix(".log"), "main.py", "-cn", arm.experiment, f"output_dir={run}", f"model.path={policy}",
        f"seed={seed}", "client=data_parallel_engines", "server=none", "client.num_engines=1", "client.num_threads=1",
        "engine.concurrency=64", "evaluation.every=100", "samples.every=0", *arm.settings,
    )  # fmt: skip
    record = {
        "arm": name,
        "seed": seed,
        "sft": measure(policy, arm, start),
        "rl": measure(run / "model", arm, run / "evaluation"),
        "machine": machine(),
        "commit": code_commit(),
    }
    write_json(RECORDS / f"{name}-{seed}.json", record)
    return record


def changes(records: Sequence[dict[str, Any]], figure: str) -> Mean:
    """Return how far a figure is after reinforcement learning above that before, over seeds."""
    return mean_over_seeds([row["rl"]["figures"][figure]["mean"] - row["sft"]["figures"][figure]["mean"]
                            for row in records])  # fmt: skip


def figures_of(name: str, records: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return an arm's changes: the calibration error must fall (the interval below 0), the accuracy must not be lower
    (the interval reaches 0)."""
    figures = {}
    for figure, unit in (("ece", "calibration error"), ("accuracy", "accuracy"), ("truth_error", "distance")):
        mean = changes(records, figure)
        low, high = (None if bound is None else round(bound, 4) for bound in (mean.low, mean.high))
        is_met = (high is not None and high >= 0) if figure == "accuracy" else (high is not None and high < 0)
        figures[f"{name}_{figure}_change"] = {
            "value": round(mean.value, 4), "low": low, "high": high,
            "unit": f"{unit}{', met where its interval reaches 0' * (figure == 'accuracy')}, "
                    f"{mean.n} seed{'s' * (mean.n > 1)}",
            "goal": 0.0, "better": "higher" if figure == "accuracy" else "lower", "met": is_met, "how": HOW,
        }  # fmt: skip
    return figures


def write(records: Sequence[dict[str, Any]]) -> None:
    """Write figures, the table of all runs and the diagram of the first seed of each calibrated arm."""
    figures: dict[str, dict[str, Any]] = {}
    rows, series = [], []
    for name in ARMS:
        mine = sorted((row for row in records if row["arm"] == name), key=lambda row: int(row["seed"]))
        if not mine:
            continue
        figures |= figures_of(name, mine)
        for row in mine:
            for stage in ("sft", "rl"):
                found = row[stage]["figures"]
                rows.append([name, str(row["seed"]), stage, *(f"{found[key]['mean']:.3f}" for key in SHOWN)])
        if name in ("rlcr", "linguistic_calibration"):
            parts = (("sft", "imitation"), ("rl", "reward")) if name == "rlcr" else (("rl", "reward"),)
            for stage, word in parts:
                error = mine[0][stage]["figures"]["ece_equal_width"]["mean"]
                label = f"{name}, {word}: calibration error {error:.3f}"
                series.append((label, mine[0][stage]["equal_width_bins"]))
    detail = {"sft_steps": NUM_SFT_STEPS, "layers": NUM_LAYERS,
              "arms": {name: arm.experiment for name, arm in ARMS.items()},
              "questions": "1000 held-out, one sampled response each, temperature 1"}  # fmt: skip
    table = {"title": "Before (sft) and after (rl)", "columns": ["arm", "seed", "policy", *SHOWN], "rows": rows}
    write_result("calibration", figures, detail, tables=[table])
    PICTURE.write_text(f"{reliability_figure('What is stated, and how often it is right', series)}\n", encoding="utf-8")


def main() -> None:
    """Run what is asked for, then write the figures of all records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="*", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3])
    parser.add_argument("--folder", type=Path, default=Path("experiments/calibration"))
    arguments = parser.parse_args()
    for name in arguments.arms:
        for seed in arguments.seeds:
            if not (RECORDS / f"{name}-{seed}.json").is_file():
                run_arm(name, seed, arguments.folder.resolve())
    records = [json.loads(path.read_text()) for path in sorted(RECORDS.glob("*.json"))]
    if not records:
        raise SystemExit(f"{RECORDS}: no record of a run: give --seeds")
    write(records)


if __name__ == "__main__":
    main()
