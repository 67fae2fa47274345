"""One set of rollouts for both sides, and this project's loss and gradient on it.

Rollouts are random ids after random prompts, of unequal lengths, in groups with rewards; their "old" log-probs are
those of a perturbed policy, so that ratios leave 1 and some are clipped.
"""

from pathlib import Path
from typing import Any

import torch

from espalier.data.records import Problem, Trajectory
from espalier.models.load import load_policy
from espalier.rewards.score import Score
from espalier.rl.advantages.grpo import group_advantages
from espalier.rl.experience import make_experience
from espalier.rl.kl import KLController
from espalier.rl.policy import Policy
from espalier.rl.policy_loss import PolicyLoss
from espalier.rl.types import Experience, Rollout, RolloutGroup
from espalier.rl.update import Update
from espalier.runtime.schemas import RLConfig, RLUpdateConfig
from espalier.training.engine import TorchEngine

GROUP_SIZE = 4


def make_groups(vocabulary: int, num_groups: int, seed: int) -> list[RolloutGroup]:
    """Return random ids: prompts of 8 to 19 tokens, responses of 5 to 40."""
    generator = torch.Generator().manual_seed(seed)

    def ids(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (1,), generator=generator))
        return torch.randint(5, vocabulary, (length,), generator=generator).tolist()

    groups = []
    for number in range(num_groups):
        prompt, rollouts = ids(8, 20), []
        for k in range(GROUP_SIZE):
            answer = ids(5, 41)
            rewards_1 = k == number % GROUP_SIZE
            trajectory = Trajectory(f"{number}/{k}", str(number), "", "", [], prompt, answer, [], "stop", gold="1",
                                    answer="1", is_correct=rewards_1)  # fmt: skip
            rollouts.append(Rollout(trajectory, [-1.0] * len(answer), 0))
        scores = [Score(float(rollout.trajectory.is_correct)) for rollout in rollouts]
        groups.append(RolloutGroup(Problem(str(number), "", "1"), rollouts, scores))
    return groups


def perturbed(path: str, seed: int) -> Any:
    """Return the policy with noise of half its size on every weight."""
    model: Any = load_policy(path, "eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.5 * parameter.square().mean().sqrt()
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return model


def make_rollouts(path: str, num_groups: int = 4, seed: int = 0) -> Experience:
    """Return the experience with old log-probs of the perturbed policy and GRPO's advantages."""
    model = perturbed(path, seed)
    groups = make_groups(int(model.config.vocab_size), num_groups, seed)
    experience, _ = make_experience(groups, model, pad_id=0, micro_batch_size=8, precision="fp32", temperature=1.0)
    experience.old.score()  # by this policy, and not by the one that is trained
    rows = [value for group in groups for value in group_advantages(group.rewards, divide_by_std=True)]
    advantages = torch.tensor(rows)[:, None] * experience.response_mask
    return Experience(**{**experience.__dict__, "advantages": advantages})


def for_peer(experience: Experience, path: Path) -> None:
    """The same rows as TRL holds them: prompts padded on the left, completions on the right."""
    assert experience.advantages is not None
    num = len(experience.ids)
    starts = experience.response_mask.int().argmax(1).tolist()
    lengths = experience.response_mask.sum(1).tolist()
    before, after = max(starts), max(lengths)
    rows: dict[str, torch.Tensor] = {
        "prompt_ids": torch.zeros(num, before, dtype=torch.long),
        "prompt_mask": torch.zeros(num, before, dtype=torch.long),
        "completion_ids": torch.zeros(num, after, dtype=torch.long),
        "completion_mask": torch.zeros(num, after, dtype=torch.long),
        "old_per_token_logps": torch.zeros(num, after),
        "advantages": torch.zeros(num),
    }
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        rows["prompt_ids"][row, before - start :] = experience.ids[row, :start]
        rows["prompt_mask"][row, before - start :] = 1
        rows["completion_ids"][row, :length] = experience.ids[row, start : start + length]
        rows["completion_mask"][row, :length] = 1
        rows["old_per_token_logps"][row, :length] = experience.old_logprobs[row, start : start + length]
        rows["advantages"][row] = experience.advantages[row, start]
    torch.save(rows, path)


def own_loss(path: str, experience: Experience) -> dict[str, float]:
    """Of `rl.update.Update`, by one step of plain gradient descent of rate 0."""
    model: Any = load_policy(path, "eager")
    config = RLConfig(
        precision="fp32",
        update=RLUpdateConfig(minibatch_size=len(experience.ids), micro_batch_size=3, learning_rate=0.0),
    )
    engine = TorchEngine(model, torch.optim.SGD(model.parameters(), lr=0.0), torch.device("cpu"), 0.0)
    policy = Policy(PolicyLoss(engine, config, temperature=1.0, kl=KLController(0.0, 0.0, 1)), max_tokens=64)
    found = Update(config, [policy])(experience, iteration=0)
    return {"loss": found["surrogate_loss"], "grad_norm": found["grad_norm"], "clip_share": found["clip_share"]}
