"""Groups of independent rollouts → a tree per problem, whose every sampled token stays (SPO tree, Guo et al. 2025;
TreeRPO, Yang et al. 2025).

A rollout is cut behind its first steps and more rollouts are sampled from there: beside the one that was cut they are
the children of that state. Each of them is cut again further on, and so forth, one level per entry of `branches`. The
leaves are whole solutions, scored as any; a branch knows which rollout it leaves, and after how many tokens
(`rl.types.Branch`). A level is sampled as a whole, after the one above it.

Where a rollout is cut depends on nothing behind the cut, so that its own way on is one more sample from that state.
(With one exception: a rollout that ends at the very end of a step, with nothing but its end token behind it, is not cut
there.)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from espalier.data.records import State
from espalier.rl.rollout import Cut, Sampler
from espalier.rl.types import Rollout, RolloutGroup
from espalier.sampling.client import SamplingParams
from espalier.values.monte_carlo import states_of


def next_state(rollout: Rollout, behind: int, num_steps: int) -> State | None:
    """Find the state after `num_steps` more steps than end within the first `behind` response tokens; None where the
    rollout ends before, or with that step."""
    index = sum(end <= behind for end in rollout.trajectory.step_ends) + num_steps
    found = [state for state in states_of(rollout.trajectory) if state.step == index]
    return found[0] if found else None


@dataclass(frozen=True)
class TreeRollouts:
    """`branches[l]` children for every state of level l + 1 (those of the prompt are the group), `segment_steps` steps
    from one level to the next."""

    branches: Sequence[int]
    segment_steps: int

    async def grow(
        self, groups: Sequence[RolloutGroup], sampler: Sampler, params: SamplingParams
    ) -> list[RolloutGroup]:
        """Return the groups with the branches behind their rollouts, level by level. Raises ServerGone, BadInput."""
        grown = [list(group.rollouts) for group in groups]
        # (group, rollout, response tokens above its last cut) of all that may be cut next
        tips = [(g, k, 0) for g, rollouts in enumerate(grown) for k in range(len(rollouts))]
        for number in self.branches:
            cuts: list[tuple[int, Cut]] = []
            for g, k, behind in tips:
                state = next_state(grown[g][k], behind, self.segment_steps)
                if state is not None:
                    cuts.append((g, Cut(groups[g].problem, grown[g][k], k, state)))
            sampled = await sampler.branch([cut for _, cut in cuts], number - 1, params)
            tips = []
            for (g, cut), rollouts in zip(cuts, sampled, strict=True):
                first = len(grown[g])
                grown[g] += rollouts
                numbers = [cut.parent, *range(first, len(grown[g]))]
                tips += [(g, k, len(cut.state.prefix_ids)) for k in numbers]
        return [replace(group, rollouts=rollouts) for group, rollouts in zip(groups, grown, strict=True)]
