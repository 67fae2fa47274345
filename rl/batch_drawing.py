"""The drawing of one batch: groups are sampled, scored and valued as they come, and replaced where they teach
nothing."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from espalier.data.prompts import encode_prompt
from espalier.data.records import Problem
from espalier.data.timeline import DRAWING
from espalier.rewards.score import Reward
from espalier.rl.estimator_context import NamesCompletions
from espalier.rl.group_scores import GroupScores, computes_here, trajectories_of, with_scores
from espalier.rl.ledger import tokens_of
from espalier.rl.metrics import is_replaceable
from espalier.rl.problem_order import draw_problems
from espalier.rl.rank_scores import RankScores, is_shared
from espalier.rl.replacements import Asked, Drawn, needed
from espalier.rl.rollout import Sampler
from espalier.rl.rollout_checks import Refusal, check_refused
from espalier.rl.rollouts_ahead import RolloutsAhead
from espalier.rl.timeline import Timeline
from espalier.rl.tree_rollouts import TreeRollouts
from espalier.rl.types import RolloutGroup
from espalier.runtime.schemas import RLConfig
from espalier.runtime.schemas.rl_schema import RolloutConfig
from espalier.sampling.client import SamplingParams
from espalier.sampling.requests import decode


@dataclass
class DrawnBatch:
    """What was drawn for one iteration: all groups in the order of drawing, refusals, seconds in all and those that the
    trainer waited for scores once all was drawn."""

    groups: list[RolloutGroup] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    seconds: float = 0.0
    reward_seconds: float = 0.0
    is_scored: bool = True


def is_good(group: RolloutGroup, rollout: RolloutConfig) -> bool:
    """Say whether a group is not replaced, for what its rewards say."""
    return rollout.dynamic_sampling_rounds == 0 or not is_replaceable(group, rollout.accuracy_range)


@dataclass
class BatchDrawing:
    """Draws the batch of `iteration`; called once. `version`: what the policy has at the moment. `on_come` gets what
    has come: (iteration, groups, tokens of theirs that it has had before).

    Graders and engines score groups as they come. Networks of this process score whole batches, for their numbers
    depend on which rows stand beside one another: on all ranks, where these wait for the batch. One that is drawn ahead
    stays unscored until its turn, when they do (`score_in_turn`); but where groups are replaced for their scores, rank
    0 scores it, while all ranks train.
    """

    iteration: int
    config: RLConfig
    problems: Sequence[Problem]
    sampler: Sampler
    params: SamplingParams
    reward: Reward
    ahead: RolloutsAhead
    ranks: RankScores[Any]
    timeline: Timeline
    _: KW_ONLY
    tree: TreeRollouts | None
    valued_by: NamesCompletions | None
    """Whose completions of a group are begun as soon as it is certain that this group is trained on."""
    version: Callable[[], int]
    on_come: Callable[[int, Sequence[RolloutGroup], int], None]

    def __post_init__(self) -> None:
        rollout, shared = self.config.rollout, is_shared(self.reward)
        is_left = shared and rollout.max_staleness > 0 and rollout.dynamic_sampling_rounds == 0
        by_ranks = self.ranks.score if shared and rollout.max_staleness == 0 else None
        self._batch = DrawnBatch(is_scored=not is_left)
        self._asked = Asked(rollout.num_problems, self._candidates(), self._draw, self._is_good)
        self._waits = self.tree is not None or computes_here(self.reward)
        self._scores = GroupScores(self.reward, self._waits, self._look, by_ranks)

    async def __call__(self) -> DrawnBatch:
        """Return the batch. Raises what a reward or the engines raise, and BadInput where too many problems are
        refused."""
        rollout, batch, asked, begun = self.config.rollout, self._batch, self._asked, time.monotonic()
        try:
            asked.ask()
            for part in asked.parts:  # grows meanwhile
                drawn, refused = await asked.drawn(part)
                if self.tree is not None:
                    roots, drawn = drawn, await self.tree.grow(drawn, self.sampler, self.params)
                    self.on_come(self.iteration, drawn, tokens_of(roots))
                batch.refused += refused
                if part is asked.parts[0]:
                    check_refused(batch.refused, len(drawn) + len(refused), rollout.max_refused_share)
                is_waited_for = asked.is_drawn and rollout.max_staleness == 0  # else it goes on beside training
                scored, seconds = await self._scores.finish(drawn) if batch.is_scored else (drawn, 0.0)
                await self._look(scored if self._waits else [], refused)
                batch.groups += scored
                batch.reward_seconds += seconds if is_waited_for else 0.0
            if len(asked.parts) > 1 and batch.groups:
                last = needed(batch.groups, rollout.num_problems, self._is_good)[-1]
                check_refused(*asked.up_to(last, batch.refused), rollout.max_refused_share)
        except BaseException:
            await asked.give_up()
            await self._scores.give_up()
            await self.sampler.begun.stop(self.iteration)
            raise
        finally:
            await self._scores.give_up()
        ended = time.monotonic()
        batch.seconds = ended - begun
        counts = {"requests": len(batch.groups), "samples": sum(len(group.rollouts) for group in batch.groups)}
        done = self.iteration + 1
        self.timeline.add(DRAWING, f"batch {done}", begun, ended, done, tokens=tokens_of(batch.groups), **counts)
        return batch

    async def _draw(self, problems: list[Problem], name: str) -> Drawn:
        known = self._known(problems, name)
        for group in known.values():
            self._add(name, group)

        def come(group: RolloutGroup) -> None:
            self.on_come(self.iteration, [group], 0)
            self._add(name, group)

        asked = [problem for problem in problems if problem.id not in known]
        drawn, refused = await self.sampler.draw(asked, self.params, name, self.version, self.iteration, on_group=come)
        known |= {group.problem.id: group for group in drawn}
        return [known[problem.id] for problem in problems if problem.id in known], refused

    def _add(self, name: str, group: RolloutGroup) -> None:
        self.ahead.add(self.iteration, name, group)
        self._scores.add(group)

    async def _look(self, groups: Sequence[RolloutGroup], refused: Sequence[Refusal] = ()) -> None:
        """Take in scored groups (unscored ones where no score decides), and begin the completions of those that are
        certain to be trained on."""
        certain = self._asked.look(groups, refused)
        for group in certain if self.valued_by is not None else ():
            assert self.valued_by is not None
            text_of = decode(self.sampler.tokenizer)
            found = await asyncio.to_thread(self.valued_by.first_completions, group, text_of, self.params)
            states, params = [state for state, _ in found], [one for _, one in found]
            self.sampler.begin_completions(states, params, self.iteration)

    def _is_good(self, group: RolloutGroup) -> bool:
        return is_good(group, self.config.rollout)

    def _known(self, problems: Sequence[Problem], name: str) -> dict[str, RolloutGroup]:
        """Return by problem the groups that came with the checkpoint."""
        sampler, found = self.sampler, dict[str, RolloutGroup]()
        for problem in problems if self.ahead.has(self.iteration) else ():
            ids = encode_prompt(sampler.task, sampler.tokenizer, problem).ids
            if (group := self.ahead.take(self.iteration, name, problem, ids, self.params)) is not None:
                found[problem.id] = group
        return found

    def _candidates(self) -> Iterator[tuple[str, Problem]]:
        """Yield (what its requests are named by, problem) of all that may be asked, in order."""
        rollout, iteration, seed = self.config.rollout, self.iteration, self.config.seed
        for number in range(rollout.dynamic_sampling_rounds + 1):
            name = f"rl-{iteration}" if number == 0 else f"rl-{iteration}-{number}"
            drawn = draw_problems(self.problems, rollout.num_problems, seed, iteration, number, rollout.order)
            yield from ((name, problem) for problem in drawn)


async def score_in_turn(batch: DrawnBatch, ranks: RankScores[Any]) -> DrawnBatch:
    """Return the batch with its scores: all ranks, which wait for it, score one that is not scored."""
    if batch.is_scored:
        return batch
    begun = time.monotonic()
    scores = await ranks.score(trajectories_of(batch.groups))
    groups, seconds = with_scores(batch.groups, scores), time.monotonic() - begun
    return replace(batch, groups=groups, reward_seconds=seconds, is_scored=True)
