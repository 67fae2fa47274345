"""Trajectory → StepScores with a trained process reward model."""

from collections.abc import Iterable
from dataclasses import dataclass

from data.jsonl import read_records
from data.records import StepScores, Trajectory
from pipeline.stage import StageContext


@dataclass(frozen=True)
class ScoreSteps:
    """`model`: a process reward model's folder; `batch_tokens`: padded tokens of one forward pass."""

    model: str
    batch_tokens: int = 16384

    def inputs(self) -> list[str]:
        """The model's weights belong to the provenance."""
        return [f"{self.model}/model.safetensors"]

    def run(self, input_path: str, context: StageContext) -> Iterable[StepScores]:
        """One record a trajectory, in order."""
        from models.load import load_tokenizer
        from models.scalar_head import load_process_reward
        from rewards.process import score_trajectories
        from runtime.distributed import device

        trajectories = read_records(Trajectory, input_path)
        model = load_process_reward(self.model).to(device())
        pad_id = int(load_tokenizer(self.model).pad_token_id)
        with context.progress("score", len(trajectories), "trajectory") as progress:
            scores = score_trajectories(
                model, trajectories, pad_id=pad_id, batch_tokens=self.batch_tokens, on_progress=progress.update
            )
        context.counts["steps"] = sum(len(row) for row in scores)
        return [StepScores(t.id, t.problem_id, row) for t, row in zip(trajectories, scores, strict=True)]
