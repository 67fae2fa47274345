"""The plan against what was paid: a pilot of 100 problems is sampled and completed, then the whole run is predicted.

The pilot's problems are the first of the run's; its own runs give the rates and the server's start. `tokens` are all
generated tokens of sampling and completing, `seconds` the two stages with their servers' starts.
"""

import json
from pathlib import Path
from typing import Any

from benchmarks.sampling.prm_budget import run


def measure(run_dir: Path, folder: Path, num_pilot: int, how: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (figures, detail). `run_dir`: a finished quick start, `folder`: the pilot's place."""
    policy = str((run_dir / "sft" / "model").resolve())
    paid = [(run_dir / "process_rewards" / f"{name}.meta.json").resolve() for name in ("trajectories", "completions")]
    pilot, states, done = (f"{folder}/{name}.jsonl" for name in ("pilot", "states", "completions"))
    ask, common = "service_api_caller_v1.py", [f"policy={policy}"]
    run(ask, "api/vllm/trajectories", f"output={pilot}", f"requests.limit={num_pilot}", *common)
    run("run_stage.py", "values/cut_states", f"input={pilot}", f"output={states}")
    run(ask, "api/vllm/completions", f"output={done}", f"requests.states={states}", *common)
    size = json.loads(paid[0].read_text())["counts"]["requests"]
    plans = {}
    for name, source in (("pilot", pilot), ("demonstrations", "")):
        output = folder / f"plan_{name}.json"
        run("run_stage.py", "values/plan", f"stage.policy={policy}", f"stage.num_problems={size}", f"output={output}",
            f"stage.pilot={source!r}" if not source else f"stage.pilot={source}",
            f"stage.measured=[{folder}/pilot.meta.json,{folder}/completions.meta.json]",
            f"stage.actual=[{paid[0]},{paid[1]}]")  # fmt: skip
        told = output.read_text().replace(str(folder), "FOLDER").replace(str(run_dir.resolve()), "RUN")
        plans[name] = json.loads(told)
    return {name: _figure(plans["pilot"], kind, goal, how)
            for name, kind, goal in (("plan_tokens_error", "generated_tokens", 0.1),
                                     ("plan_seconds_error", "seconds", 0.25))}, plans  # fmt: skip


def _figure(plan: dict[str, Any], kind: str, goal: float, how: str) -> dict[str, Any]:
    """Return the error of both stages together; low and high are the smaller and the larger of the two stages'."""
    paid = sum(row["paid"][kind] for row in plan["actual"])
    error = abs(plan["total"][kind] / paid - 1)
    stages = sorted(abs(row["error"][kind]) for row in plan["actual"])
    return {"value": round(error, 4), "low": round(stages[0], 4), "high": round(stages[-1], 4), "unit": "share",
            "goal": goal, "better": "lower", "met": error <= goal, "how": how}  # fmt: skip
