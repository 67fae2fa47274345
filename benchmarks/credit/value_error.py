"""How well states are valued: PPO's value network and Monte-Carlo estimates of K completions, beside the truth.

    bash scripts/bench.sh value_error experiments/credit/word_arithmetic/ppo-*      finished runs of PPO

States are the step ends of rollouts on held-out problems, by the policy that the critic was last fitted to. The truth
is the mean of `NUM_TRUE` completions, independent of those the estimates are made of. Two figures: mean absolute
error, and how often of two steps from one state the better comes first (pairs whose true values differ by `MARGIN`
or more; a tie of the estimate counts one half).
"""

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.result import figure, write_result
from espalier.analysis.analyzers.action_ranking import pair_points, siblings
from espalier.analysis.analyzers.critic_estimates import critic_values_at
from espalier.data.records import State, Trajectory
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.models.load import load_tokenizer
from espalier.rl.rollout import Sampler
from espalier.sampling.client import SamplingParams
from espalier.sampling.server import VLLMServer
from espalier.sampling.vllm_client import VLLMClient
from espalier.values.monte_carlo import StateKey, state_key, states_of

KS = (1, 3, 9)
NUM_TRUE = 64
MARGIN = 0.1


def mean_error(estimates: Mapping[StateKey, float], truth: Mapping[StateKey, float]) -> float:
    """Return mean absolute error over the states."""
    return fmean(abs(estimates[key] - value) for key, value in truth.items())


def ranked_first(
    estimates: Mapping[StateKey, float], truth: Mapping[StateKey, float], families: Sequence[Sequence[StateKey]]
) -> tuple[float, int]:
    """Return (share of pairs whose better step is first, pairs)."""
    points = [point for family in families for point in pair_points(estimates, truth, family, MARGIN)]
    return (fmean(points) if points else float("nan")), len(points)


def critic_estimates(folder: Path, states: Mapping[StateKey, State]) -> dict[StateKey, float]:
    """Return what the value network says of every state: read at the state's last token."""
    rows = [[*state.prompt_ids, *state.prefix_ids] for state in states.values()]
    found = critic_values_at(str(folder), rows, [[len(row)] for row in rows])
    return {key: value for key, [value] in zip(states, found, strict=True)}


def states_and_parents(
    trajectories: Sequence[Trajectory],
) -> tuple[dict[StateKey, State], dict[StateKey, StateKey]]:
    """Return distinct states after at least one step, and the state each is one step behind."""
    states: dict[StateKey, State] = {}
    parents: dict[StateKey, StateKey] = {}
    for trajectory in trajectories:
        before = state_key(trajectory.problem_id, [])
        for state in states_of(trajectory):
            key = state_key(state.problem_id, state.prefix_ids)
            states.setdefault(key, state)
            parents.setdefault(key, before)
            before = key
    return states, parents


async def sample(
    client: VLLMClient, model: Path, num_problems: int
) -> tuple[dict[StateKey, State], dict[StateKey, StateKey], dict[StateKey, list[bool]]]:
    """Return states, their parents, and whether each of their completions is right."""
    task = WordArithmetic()
    sampler = Sampler(client, task, load_tokenizer(str(model)), concurrency=32, stall_seconds=180)
    params = SamplingParams(n=8, temperature=1.0, max_tokens=96, return_logprobs=True)
    await client.open()
    try:
        groups = await sampler.rollout(task.problems("dev")[:num_problems], params, "value-error", 0)
        trajectories = [rollout.trajectory for group in groups for rollout in group.rollouts]
        states, parents = states_and_parents(trajectories)
        many = replace(params, n=NUM_TRUE + max(KS), return_logprobs=False)
        rows = await sampler.complete(list(states.values()), [many] * len(states))
    finally:
        await client.close()
    right = {key: [row.is_correct for row in sampled] for key, sampled in zip(states, rows, strict=True)}
    return states, parents, right


def measure(run: Path, num_problems: int, log: Path) -> dict[str, Any]:
    """Return the errors of the critic of a finished PPO run and of K completions, by that run's last policy."""
    model = run / "model"
    client = VLLMClient()
    options = {"enforce_eager": True, "max_num_seqs": 256, "disable_uvicorn_access_log": True}
    with VLLMServer(str(model), str(log), options=options) as server:
        client.base_url = server.base_url
        states, parents, right = asyncio.run(sample(client, model, num_problems))
    truth = {key: fmean(rows[:NUM_TRUE]) for key, rows in right.items()}
    estimates = {f"k{k}": {key: fmean(rows[NUM_TRUE : NUM_TRUE + k]) for key, rows in right.items()} for k in KS}
    estimates["critic"] = critic_estimates(run / "critic", states)
    families = siblings(states, parents)
    found: dict[str, Any] = {"states": len(states)}
    for name, values in estimates.items():
        share, found["pairs"] = ranked_first(values, truth, families)
        found[name] = {"error": round(mean_error(values, truth), 4), "better_first": round(share, 4)}
    return found


def main() -> None:
    """Measure the runs, write the figure and the mean errors."""
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", nargs="+", type=Path, help="directories of finished PPO runs")
    parser.add_argument("--problems", type=int, default=48)
    arguments = parser.parse_args()
    runs = [run for run in arguments.runs if (run / "critic").is_dir()]
    if not runs:
        parser.error("none of these directories has a critic/: give finished runs of PPO")
    errors = [measure(run, arguments.problems, run / "value_error.log") for run in runs]
    ratios = [row["critic"]["error"] / max(row["k9"]["error"], 1e-9) for row in errors]
    how = "bash scripts/bench.sh value_error RUN ..."
    rows = [[name, round(fmean(row[name]["error"] for row in errors), 4),
             round(fmean(row[name]["better_first"] for row in errors), 3)]
            for name in ("critic", *(f"k{k}" for k in KS))]  # fmt: skip
    table = {"title": f"State values beside the mean of {NUM_TRUE} completions, means over {len(runs)} runs.",
             "columns": ["estimate", "mean absolute error", "better of two steps first"], "rows": rows}  # fmt: skip
    figures = {"value_error_critic_over_k9": figure(ratios, goal=1.0, how=how)}
    print(write_result("value_error", figures, {"runs": errors}, tables=[table]))


if __name__ == "__main__":
    main()
