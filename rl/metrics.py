"""The metrics of an iteration from what it made: pure functions. docs/metrics.md defines every name."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import torch

from espalier.data.records import Problem
from espalier.rl.experience import logprob_gap
from espalier.rl.kl import divergence
from espalier.rl.types import Estimate, Experience, RolloutGroup, are_alike

_FEWEST_OF_SUBJECT = 4  # problems, in the mean: a quiz has a category for every other one


def agrees(group: RolloutGroup) -> bool:
    """Say whether the rewards of a group are alike (`are_alike`)."""
    return are_alike(group.rewards)


def is_replaceable(group: RolloutGroup, accuracy_range: Sequence[float]) -> bool:
    """Say whether dynamic sampling replaces a group: its rewards agree, or its share of right rollouts is outside the
    range (low, high)."""
    right = [rollout.trajectory.is_correct for rollout in group.rollouts]
    low, high = accuracy_range
    return agrees(group) or not low <= sum(right) / len(right) <= high


def describe_rollouts(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Return means over the rollouts of an iteration; lengths are tokens."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    trajectories = [rollout.trajectory for rollout in rollouts]
    num, lengths = len(trajectories), [len(t.response_ids) for t in trajectories]
    right = [[rollout.trajectory.is_correct for rollout in group.rollouts] for group in groups]
    distinct = sum(len({tuple(rollout.trajectory.response_ids) for rollout in group.rollouts}) for group in groups)
    return {
        "rollout/accuracy": sum(t.is_correct for t in trajectories) / num,
        "rollout/unparseable": sum(t.answer is None for t in trajectories) / num,
        "rollout/response_length": sum(lengths) / num,
        "rollout/response_length_min": float(min(lengths)),
        "rollout/response_length_max": float(max(lengths)),
        "rollout/truncated": sum(t.finish_reason == "length" for t in trajectories) / num,
        "rollout/steps": sum(len(t.steps) for t in trajectories) / num,
        "rollout/distinct": distinct / num,
        "rollout/solved_once": sum(any(row) for row in right) / len(right),
        "rollout/solved_always": sum(all(row) for row in right) / len(right),
        "rollout/logprob": sum(sum(rollout.logprobs) for rollout in rollouts) / num,
        "rollout/tokens": float(sum(len(rollout.drawn_ids) for rollout in rollouts)),
    }


def describe_rewards(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Return mean reward, its parts (over the rollouts that have them) and spread, and the share of groups whose
    rewards all agree."""
    scores = [score for group in groups for score in group.scores]
    names = sorted({name for score in scores for name in score.parts})
    columns = {name: [score.parts[name] for score in scores if name in score.parts] for name in names}
    parts = {f"reward/{name}": sum(column) / len(column) for name, column in columns.items()}
    totals = torch.tensor([score.total for score in scores], dtype=torch.float64)
    return {
        "rollout/reward": float(totals.mean()),
        "rollout/reward_std": float(totals.std(correction=0)),
        "rollout/zero_variance": sum(agrees(group) for group in groups) / len(groups),
        **parts,
    }


def subjects_of(problems: Sequence[Problem]) -> frozenset[str]:
    """Return the subjects of a data set ("subject" of a problem's info: its source, its verifiers, its topic) by which
    its metrics are given apart: none where it has one, or nearly as many as problems."""
    found = Counter(_subject(problem) for problem in problems)
    names = frozenset(name for name in found if name)
    return names if len(found) > 1 and _FEWEST_OF_SUBJECT * len(names) <= len(problems) else frozenset()


def describe_subjects(groups: Sequence[RolloutGroup], subjects: Collection[str]) -> dict[str, float]:
    """Return the accuracy of each of these subjects that is among the groups, and its mean reward where they are
    scored."""
    described: dict[str, float] = {}
    for name in sorted(subjects):
        own = [group for group in groups if _subject(group.problem) == name]
        right = [rollout.trajectory.is_correct for group in own for rollout in group.rollouts]
        rewards = [score.total for group in own for score in group.scores]
        described |= {f"accuracy_of/{name}": sum(right) / len(right)} if right else {}
        described |= {f"reward_of/{name}": sum(rewards) / len(rewards)} if rewards else {}
    return described


def _subject(problem: Problem) -> str:
    """Return the subject as metrics name it: a name in which "/" and blanks are "_"; "" where there is none."""
    subject = problem.info.get("subject")
    return "" if subject is None else "_".join(str(subject).replace("/", " ").split())


def kl_per_response(experience: Experience) -> float:
    """Estimate the distance from the reference by k1, in nats per response, by the policy before the update."""
    assert experience.reference_logprobs is not None
    mask = experience.response_mask
    return float((experience.old_logprobs[mask] - experience.reference_logprobs[mask]).sum()) / len(mask)


def describe_kl(experience: Experience, scores: torch.Tensor) -> dict[str, float]:
    """Measure distances from the reference in nats, by the policy before the update: k1 per token and per response,
    k2 and k3 per token. The rewards may have the KL term in them, which `scores` [N, T] have not: `penalty_in_reward`
    says how much per response, and `net_reward` what is left."""
    assert experience.reference_logprobs is not None
    assert experience.rewards is not None
    mask = experience.response_mask
    own, reference = experience.old_logprobs[mask], experience.reference_logprobs[mask]
    return {
        "kl/per_token": float((own - reference).mean()),
        "kl/per_response": kl_per_response(experience),
        "kl/k2": float(divergence(own, reference, "mse").mean()),
        "kl/k3": float(divergence(own, reference, "k3").mean()),
        "kl/penalty_in_reward": float((experience.rewards - scores).sum()) / len(mask),
        "kl/net_reward": float(experience.rewards.sum()) / len(mask),
    }


def describe_experience(experience: Experience, estimate: Estimate) -> dict[str, float]:
    """Return advantages as trained on, entropy, and how far the engine's log-probs are from the trainer's."""
    mask = experience.response_mask
    gap_mean, gap_max = logprob_gap(experience)
    assert experience.advantages is not None
    chosen = experience.advantages[mask]
    return {
        **{f"estimate/{name}": value for name, value in estimate.metrics.items()},
        "estimate/advantage_mean": float(chosen.mean()),
        "estimate/advantage_std": float(chosen.std(correction=0)),
        "estimate/advantage_zero": float((chosen == 0).double().mean()),
        "update/entropy": float(experience.entropies[mask].mean()),
        "engine/gap_mean": gap_mean,
        "engine/gap_max": gap_max,
    }


def speeds(values: Mapping[str, float], update_tokens: float) -> dict[str, float]:
    """Return tokens a second of every phase that has both: tokens made (rollout), or read with their prompts (forward;
    `update_tokens` in the update).

    Completions are begun while rollouts are drawn: both count, over the seconds of both. Where the batch was drawn
    ahead its own seconds count, and completions come beside whatever else goes on: there is no speed of those.
    """
    completed = values.get("estimate/completion_tokens", 0.0)
    tokens = {
        "rollout": values["rollout/drawn_tokens"] + completed,
        "forward": values["forward/tokens"],
        "update": update_tokens,
    }
    taken = {phase: values.get(f"seconds/{phase}", 0.0) for phase in tokens}
    if "queue/batch_seconds" in values:
        taken["rollout"] = 0.0 if completed else values["queue/batch_seconds"]
    elif completed:
        taken["rollout"] += values.get("seconds/completions", 0.0)
    pairs = ((phase, number, taken[phase]) for phase, number in tokens.items())
    return {f"tokens_per_second/{phase}": number / seconds for phase, number, seconds in pairs if number and seconds}
