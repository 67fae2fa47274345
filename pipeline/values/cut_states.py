"""Trajectory → State: the distinct intermediate states, all or a sample, in the order that serves a prefix cache."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from espalier.data.jsonl import read_records
from espalier.data.prefix_tree import num_distinct_tokens, tree_order
from espalier.data.records import BadInput, State, Trajectory
from espalier.data.splits import check_shard, shard_of
from espalier.data.steps import step_tokens
from espalier.pipeline.stage import StageContext
from espalier.values.monte_carlo import StateKey, state_key
from espalier.values.state_sampling import StateSampler


@dataclass(frozen=True)
class CutStates:
    """The options of `values.state_sampling.StateSampler`; `first_step` 1 leaves out the prompt state (its value is
    the mean of the samples that exist).

    The terminal state is never cut: its value is the outcome. States that several trajectories share are written
    once, under the id of the first that reached them. `order` is "tree" (depth first over the token ids of a
    problem: what shares most is sent together) or "trajectory". `shard` of `num_shards` cuts that part of the
    problems. `solutions` "right" cuts the states of right trajectories alone, as `values/label_by_contrast` reads them.
    With `policy`, the model folder that the trajectories were sampled from, log-probs that `smallest_alternative`
    reads are computed where they were not kept. States at improbable tokens are those of trajectories that
    `pipeline.values.split_steps` has split there.
    """

    first_step: int = 1
    start_ratio: float = 0.0
    end_ratio: float = 1.0
    keep_ratio: float = 1.0
    min_steps: int = 0
    step_types: list[str] = field(default_factory=list)
    removes_actions: bool = False
    labelled_only: bool = False
    rejects_malformed: bool = False
    drop_last: int = 1
    which: str = "all"
    smallest_alternative: float = 0.0
    policy: str = ""
    sample_seed: int = 0
    shard: int = 0
    num_shards: int = 1
    order: str = "tree"
    solutions: str = "all"

    def inputs(self) -> list[str]:
        """Return nothing: model folders that the config names are inputs of every stage."""
        return []

    def _sampler(self) -> StateSampler:
        return StateSampler(
            first_step=self.first_step,
            start_ratio=self.start_ratio,
            end_ratio=self.end_ratio,
            keep_ratio=self.keep_ratio,
            min_steps=self.min_steps,
            step_types=self.step_types,
            removes_actions=self.removes_actions,
            seed=self.sample_seed,
            labelled_only=self.labelled_only,
            rejects_malformed=self.rejects_malformed,
            drop_last=self.drop_last,
            which=self.which,
            smallest_alternative=self.smallest_alternative,
        )

    def run(self, input_path: str, context: StageContext) -> Iterable[State]:
        """Return the states. Raises BadInput on settings out of range, on trajectories without token ids, and where
        right ones are asked for and there is none."""
        if self.order not in ("tree", "trajectory"):
            raise BadInput(f"order must be tree or trajectory, got '{self.order}'")
        if self.solutions not in ("all", "right"):
            raise BadInput(f"stage.solutions must be all or right, got '{self.solutions}'")
        check_shard(self.shard, self.num_shards, "stage")
        sampler = self._sampler()
        rows = read_records(Trajectory, input_path)
        trajectories = [row for row in rows if shard_of(f"states/{row.problem_id}", self.num_shards) == self.shard]
        if self.solutions == "right":
            if rows and not any(row.is_correct for row in rows):
                raise BadInput(f"{input_path}: none of {len(rows)} trajectories is right, and stage.solutions=right "
                               "cuts no other: sample more problems or train the policy first")  # fmt: skip
            trajectories = [row for row in trajectories if row.is_correct]
        if self.smallest_alternative and self.policy:
            trajectories = with_logprobs(trajectories, self.policy)
        distinct: dict[StateKey, State] = {}
        num_states = 0
        for trajectory in trajectories:
            for state in sampler.states(trajectory):
                num_states += 1
                distinct.setdefault(state_key(state.problem_id, state.prefix_ids), state)
        states = list(distinct.values())
        if self.order == "tree":
            states = in_tree_order(states)
        tokens = [state.prompt_ids + state.prefix_ids for state in states]
        context.counts["trajectories"] = len(trajectories)
        context.counts["states"] = num_states
        context.counts["distinct_states"] = len(states)
        context.counts["prompt_tokens"] = sum(map(len, tokens))
        context.counts["distinct_prompt_tokens"] = num_distinct_tokens(tokens)
        return states


def with_logprobs(trajectories: Sequence[Trajectory], policy: str) -> list[Trajectory]:
    """Return the trajectories, those without log-probs with those of the model in the folder `policy`."""
    from espalier.models.load import load_policy
    from espalier.models.sampled_logprobs import sampled_logprobs
    from espalier.runtime.distributed import device

    lacking = [row for row in trajectories if row.logprobs is None]
    found = iter(sampled_logprobs(load_policy(policy).to(device()), list(map(step_tokens, lacking))))
    return [replace(row, logprobs=next(found)) if row.logprobs is None else row for row in trajectories]


def in_tree_order(states: list[State]) -> list[State]:
    """Return problems in the order they come, the states of each depth first over the tree of their tokens."""
    groups: dict[str, list[State]] = {}
    for state in states:
        groups.setdefault(state.problem_id, []).append(state)
    return [group[i] for group in groups.values() for i in tree_order([s.prompt_ids + s.prefix_ids for s in group])]
