"""Trajectory → State: the distinct intermediate states, all or a sample, in the order that serves a prefix cache.

Problems are worked on one by one (`data.row_index`): memory does not depend on the number of trajectories.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from espalier.data.prefix_tree import tree_order
from espalier.data.records import BadInput, State, Trajectory
from espalier.data.row_index import ProblemRows
from espalier.data.splits import check_shard, shard_of
from espalier.data.steps import step_tokens
from espalier.data.token_tree import TokenTree
from espalier.pipeline.stage import StageContext
from espalier.values.monte_carlo import StateKey, state_key
from espalier.values.state_sampling import StateSampler

Placed = list[tuple[int, Trajectory]]  # trajectories of a problem, each behind its place in the file

_STATES = 1 << 22  # more states than a problem has: what a place is multiplied by to order them
_READ_AT_ONCE = 1 << 17  # tokens without log-probs, beyond which a model reads them


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

    def run(self, input_path: str, context: StageContext) -> Iterator[State]:
        """Return the states. Raises BadInput on settings out of range, on trajectories without token ids, and where
        right ones are asked for and there is none."""
        if self.order not in ("tree", "trajectory"):
            raise BadInput(f"order must be tree or trajectory, got '{self.order}'")
        if self.solutions not in ("all", "right"):
            raise BadInput(f"stage.solutions must be all or right, got '{self.solutions}'")
        check_shard(self.shard, self.num_shards, "stage")
        sampler = self._sampler()
        rows = ProblemRows(context.output)
        number = rows.add(Trajectory, input_path)
        if self.solutions == "right" and number:
            groups = (rows.rows(0, problem) for problem in rows.problems())
            if not any(row.is_correct for group in groups for row in group):
                raise BadInput(f"{input_path}: none of {number} trajectories is right, and stage.solutions=right "
                               "cuts no other: sample more problems or train the policy first")  # fmt: skip
        return self._ordered(rows, sampler, context)

    def _ordered(self, rows: ProblemRows, sampler: StateSampler, context: StageContext) -> Iterator[State]:
        """Yield the states in the order of `_placed`'s numbers, and count them."""
        counts = dict.fromkeys(("trajectories", "states", "distinct_states", "prompt_tokens"), 0)
        with rows, TokenTree(context.output) as tree:
            yield from rows.in_file_order(self._placed(rows, sampler, tree, counts))
            context.counts.update(counts, distinct_prompt_tokens=tree.num_tokens())

    def _placed(
        self, rows: ProblemRows, sampler: StateSampler, tree: TokenTree, counts: dict[str, int]
    ) -> Iterator[tuple[int, State]]:
        """Yield the states of each problem with numbers to order them by: by the trajectory that reached it first, or
        problems by the first trajectory with a state and the states of each depth first over the tree of tokens."""
        for placed in self._problems(rows):
            counts["trajectories"] += len(placed)
            distinct: dict[StateKey, tuple[int, State]] = {}
            for place, trajectory in placed:
                for number, state in enumerate(sampler.states(trajectory)):
                    counts["states"] += 1
                    key = state_key(state.problem_id, state.prefix_ids)
                    distinct.setdefault(key, (place * _STATES + number, state))
            states = list(distinct.values())
            tokens = [state.prompt_ids + state.prefix_ids for _, state in states]
            counts["distinct_states"] += len(states)
            counts["prompt_tokens"] += sum(map(len, tokens))
            tree.add(tokens)
            if self.order == "tree" and states:
                first = states[0][0]
                states = [(first + number, states[index][1]) for number, index in enumerate(tree_order(tokens))]
            yield from states

    def _problems(self, rows: ProblemRows) -> Iterator[Placed]:
        """Yield the trajectories of each problem that states are cut from, with log-probs where they are read."""
        if self.smallest_alternative and self.policy:
            from espalier.models.load import load_policy
            from espalier.runtime.distributed import device

            yield from with_logprobs(self._chosen(rows), load_policy(self.policy).to(device()))
        else:
            yield from self._chosen(rows)

    def _chosen(self, rows: ProblemRows) -> Iterator[Placed]:
        for problem in rows.problems():
            placed = zip(rows.places(0, problem), rows.rows(0, problem), strict=True)
            chosen = [(place, row) for place, row in placed if self._is_chosen(row)]
            if chosen:
                yield chosen

    def _is_chosen(self, row: Trajectory) -> bool:
        is_here = shard_of(f"states/{row.problem_id}", self.num_shards) == self.shard
        return is_here and (row.is_correct or self.solutions == "all")


def with_logprobs(problems: Iterable[Placed], model: Any) -> Iterator[Placed]:
    """Yield the trajectories of each problem, those without log-probs with those of the model, which reads some
    problems at a time."""
    waiting: list[Placed] = []
    num_tokens = 0
    for placed in problems:
        waiting.append(placed)
        num_tokens += sum(len(row.prompt_ids) + len(row.response_ids) for _, row in placed if row.logprobs is None)
        if num_tokens >= _READ_AT_ONCE:
            yield from _read(waiting, model)
            waiting, num_tokens = [], 0
    yield from _read(waiting, model)


def _read(problems: Sequence[Placed], model: Any) -> Iterator[Placed]:
    from espalier.models.sampled_logprobs import sampled_logprobs

    lacking = [row for placed in problems for _, row in placed if row.logprobs is None]
    found = iter(sampled_logprobs(model, list(map(step_tokens, lacking))))
    for placed in problems:
        yield [(place, replace(row, logprobs=next(found)) if row.logprobs is None else row) for place, row in placed]
