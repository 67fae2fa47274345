"""What sampling for reinforcement learning must be, and how many problems a server may refuse."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from espalier.data.records import BadInput
from espalier.sampling.client import SamplingParams

log = logging.getLogger("rl")


class BadSampling(ValueError):
    """Sampling parameters that reinforcement learning cannot use."""

    exit_code = 2


def check_params(params: SamplingParams, group_size: int, smallest_group: int = 2) -> None:
    """Raise BadSampling unless log-probs come back and are those of the distribution that is trained.

    `smallest_group` is 2 where a rollout is compared with others of its group, else 1.
    """
    for is_good, need in (
        (params.n == group_size, f"params.n must be rollout.group_size ({group_size}), got {params.n}"),
        (
            group_size >= smallest_group,
            f"rollout.group_size must be at least {smallest_group}, got {group_size}: a rollout needs others to "
            "compare",
        ),
        (params.return_logprobs, "params.return_logprobs must be true"),
        (params.temperature > 0, "params.temperature must be above 0: a greedy policy explores nothing"),
        (
            params.top_p == 1,
            f"params.top_p must be 1, got {params.top_p}: log-probs are of the whole vocabulary",
        ),
    ):
        if not is_good:
            raise BadSampling(need)


@dataclass(frozen=True)
class Refusal:
    """A problem whose prompt the server refuses, and why."""

    problem_id: str
    reason: str


def check_refused(refused: Sequence[Refusal], num_asked: int, max_share: float) -> None:
    """Say which of `num_asked` problems the server refuses. Raises BadInput where they are more than `max_share` of
    them (one may always be, unless that is 0), or all."""
    if not refused:
        return
    ids = ", ".join(f"'{one.problem_id}'" for one in refused[:5]) + (" …" if len(refused) > 5 else "")
    message = f"{len(refused)} of {num_asked} problems are refused by the server: {ids} ({refused[0].reason})"
    limit = max(max_share * num_asked, 1.0) if max_share > 0 else 0.0
    if len(refused) == num_asked or len(refused) > limit:
        raise BadInput(
            f"{message}: leave them out of the task's file, or raise rollout.max_refused_share ({max_share:g})"
        )
    log.warning("%s; they are left out", message)
