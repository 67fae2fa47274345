"""What scoring all steps of a trajectory costs in forward passes: the product's own function against S passes."""

import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from espalier.data.jsonl import read_records
from espalier.data.records import StepValues, Trajectory
from espalier.models.load import load_tokenizer
from espalier.models.scalar_head import load_process_reward
from espalier.rewards.process import score_trajectories


def trajectories(path: Path, count: int) -> list[Trajectory]:
    """Return the first `count` judged trajectories of the corpus, as sampled ones."""
    return [
        Trajectory(row.id, row.problem_id, row.prompt, "".join(row.steps), row.steps, row.prompt_ids, row.response_ids,
                   row.step_ends, "stop", "", None, row.is_correct)
        for row in read_records(StepValues, path)[:count]
    ]  # fmt: skip


def up_to_step(trajectory: Trajectory, step: int) -> Trajectory:
    """Return the trajectory cut after its first `step` steps, with its last step alone to be scored."""
    end = trajectory.step_ends[step - 1]
    text = "".join(trajectory.steps[:step])
    return replace(trajectory, id=f"{trajectory.id}#{step}", response=text, steps=[text], step_ends=[end],
                   response_ids=trajectory.response_ids[:end])  # fmt: skip


def measure(folder: Path, count: int) -> dict[str, Any]:
    """Return passes for each of `count` trajectories scored alone, at once and a prefix at a time; the largest
    difference of a score; the ratio of the seconds."""
    model = load_process_reward(str(folder / "prm"))
    pad_id = int(load_tokenizer(str(folder / "policy")).pad_token_id)
    passes = 0

    def count_pass(*_: Any) -> None:
        nonlocal passes
        passes += 1

    model.register_forward_hook(count_pass)
    rows: list[tuple[int, int, int]] = []
    ratios, difference = [], 0.0
    for trajectory in trajectories(folder / "prm.jsonl", count):
        passes, started = 0, time.perf_counter()
        at_once = score_trajectories(model, [trajectory], pad_id=pad_id)[0]
        num_at_once, seconds = passes, time.perf_counter() - started
        passes, started = 0, time.perf_counter()
        parts = [up_to_step(trajectory, step + 1) for step in range(len(trajectory.steps))]
        one_by_one = [score_trajectories(model, [part], pad_id=pad_id)[0][0] for part in parts]
        ratios.append((time.perf_counter() - started) / seconds)
        difference = max(difference, *(abs(a - b) for a, b in zip(at_once, one_by_one, strict=True)))
        rows.append((len(trajectory.steps), num_at_once, passes))
    return {"passes": rows, "score_difference": difference, "seconds_ratio": round(median(ratios), 2)}
