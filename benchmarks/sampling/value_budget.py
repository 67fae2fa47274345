"""What a value costs: error against exact values for plain K = 9 and for every cheaper way, in generated tokens.

    bash scripts/bench.sh value_budget [--problems 120] [--seeds 5]

The policy is synthetic, so that every value is known exactly: each problem is a tree of reasoning moves of its own,
with a difficulty, moves that settle the outcome, moves that change nothing, traps that a part of the continuations
mends, and answers whose lengths differ. Values are computed by backward induction over the tree; completions are
drawn from the very same tree. States are those of 8 trajectories a problem, as the pipeline cuts them, distinct, the
prompt state apart. The error is the root mean square over states; tokens are those that the completions generate
(trajectories exist anyway). Ways that ask in rounds run on the real request sources, without a server.

`tokens_for_equal_value_error` is the share of the tokens of plain K = 9 that the best way needs for the same error:
the way is run at several budgets, and tokens are interpolated (log tokens over log error) where it meets that error.
`bash scripts/bench.sh sampling values` measures the same with a real policy (`benchmarks.sampling.recorded_values`).
"""

import argparse
import math
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from benchmarks.result import write_result
from espalier.data.jsonl import write_records
from espalier.data.records import Completion, State, Trajectory
from espalier.sampling.adaptive_completions import AdaptiveCompletions
from espalier.values.monte_carlo import Count, StateKey, distinct_states, state_key
from espalier.values.smoothed import smooth
from espalier.values.state_tree import StateTree, state_tree

GOAL = 0.5
PLAIN = 9
SAMPLES = 8
Prefix = tuple[int, ...]


@dataclass(frozen=True)
class Move:
    """One step a state can go on with: its probability, its tokens, whether it ends the response right or wrong."""

    chance: float
    tokens: int
    outcome: bool | None


class Problem:
    """A tree of moves, grown where it is visited; every state's moves are a function of the problem and its prefix.

    `skill` drifts along a path: most steps keep it, some raise or lower it, a few lose everything or settle it.
    """

    def __init__(self, seed: int):
        rng = random.Random(f"problem {seed}")
        self.name = f"p{seed}"
        self.seed = seed
        self.depth = rng.randint(4, 9)
        self.width = rng.choice([2, 3, 4])
        self.start = rng.betavariate(0.9, 0.9)
        self.turn = rng.uniform(0.08, 0.35)
        self._moves: dict[Prefix, list[Move]] = {}
        self._skills: dict[Prefix, float] = {(): self.start}
        self._values: dict[Prefix, float] = {}

    def moves(self, prefix: Prefix) -> list[Move]:
        """Return what can follow a prefix."""
        if prefix not in self._moves:
            self._moves[prefix] = self._grow(prefix)
        return self._moves[prefix]

    def _grow(self, prefix: Prefix) -> list[Move]:
        rng = random.Random(f"{self.seed}/{prefix}")
        skill = self._skills[prefix]
        if len(prefix) >= self.depth or (len(prefix) >= 2 and rng.random() < 0.1):
            right = min(0.99, max(0.01, skill))
            return [Move(right, rng.randint(5, 12), True), Move(1 - right, rng.randint(5, 12), False)]
        weights = [rng.gammavariate(0.8, 1.0) + 1e-6 for _ in range(self.width)]
        found = []
        for number, weight in enumerate(weights):
            self._skills[(*prefix, number)] = self._turned(skill, rng)
            found.append(Move(weight / sum(weights), rng.randint(8, 40), None))
        return found

    def _turned(self, skill: float, rng: random.Random) -> float:
        draw = rng.random()
        if draw < self.turn * 0.35:
            return skill * rng.uniform(0.0, 0.15)  # an error, seldom mended
        if draw < self.turn * 0.6:
            return 1 - (1 - skill) * rng.uniform(0.0, 0.3)  # the decisive idea
        return min(1.0, max(0.0, skill + rng.gauss(0, 0.05)))

    def value(self, prefix: Prefix) -> float:
        """Return the exact probability of a right answer after a prefix."""
        if prefix not in self._values:
            self._values[prefix] = sum(
                move.chance * (self.value((*prefix, number)) if move.outcome is None else move.outcome)
                for number, move in enumerate(self.moves(prefix))
            )
        return self._values[prefix]

    def complete(self, prefix: Prefix, rng: random.Random) -> tuple[Prefix, int, bool]:
        """Return (the moves that follow, their tokens, whether the answer is right)."""
        found: list[int] = []
        tokens = 0
        while True:
            here = (*prefix, *found)
            moves = self.moves(here)
            number = rng.choices(range(len(moves)), [move.chance for move in moves])[0]
            found.append(number)
            tokens += moves[number].tokens
            outcome = moves[number].outcome
            if outcome is not None:
                return tuple(found), tokens, outcome


class World:
    """The problems of one seed, their trajectories, and the states that are to be valued."""

    def __init__(self, seed: int, num_problems: int):
        self.seed = seed
        self.problems = {f"p{seed * 100_000 + k}": Problem(seed * 100_000 + k) for k in range(num_problems)}
        rng = random.Random(f"world {seed}")
        self.trajectories = [
            self._sample(problem, k, rng) for problem in self.problems.values() for k in range(SAMPLES)
        ]
        self.states = distinct_states(self.trajectories)
        self.keys = [state_key(state.problem_id, state.prefix_ids) for state in self.states]
        self.truth = {key: self.problems[key[0]].value(tuple(token - 1 for token in key[1])) for key in self.keys}
        self.tree = state_tree(self.trajectories)
        self.outcomes = [row.is_correct for row in self.trajectories]

    def _sample(self, problem: Problem, index: int, rng: random.Random) -> Trajectory:
        moves, _, is_right = problem.complete((), rng)
        ids = [move + 1 for move in moves]
        steps = ["s"] * len(ids)
        return Trajectory(f"{problem.name}/{index}", problem.name, "Q", "s" * len(ids), steps, [9], ids,
                          list(range(1, len(ids) + 1)), "stop", "7", "7", is_right)  # fmt: skip

    def ask(self, key: StateKey, number: int, rng: random.Random) -> tuple[list[bool], int]:
        """Return (outcomes, tokens) of `number` completions of a state."""
        drawn = [self.problems[key[0]].complete(tuple(token - 1 for token in key[1]), rng) for _ in range(number)]
        return [right for _, _, right in drawn], sum(tokens for _, tokens, _ in drawn)

    def error(self, values: dict[StateKey, float]) -> float:
        """Return root mean square over the states."""
        return math.sqrt(sum((values[key] - self.truth[key]) ** 2 for key in self.keys) / len(self.keys))


class Valued(Protocol):
    """What the ways need of a world: `World`, or recorded completions of a real policy."""

    seed: int
    trajectories: list[Trajectory]
    states: list[State]
    keys: list[StateKey]
    tree: StateTree
    outcomes: list[bool]

    def ask(self, key: StateKey, number: int, rng: random.Random) -> tuple[list[bool], int]:
        """Return (outcomes, tokens) of `number` completions."""

    def error(self, values: dict[StateKey, float]) -> float:
        """Return root mean square over the states."""


Asked = tuple[dict[StateKey, Count], int]


def plain(world: Valued, number: int) -> Asked:
    """Return `number` completions of every state."""
    rng = random.Random(f"plain {world.seed} {number}")
    counts, tokens = {}, 0
    for key in world.keys:
        rights, cost = world.ask(key, number, rng)
        counts[key], tokens = Count(sum(rights), number), tokens + cost
    return counts, tokens


def in_rounds(world: Valued, budget: float, num_samples: int, estimator: str) -> Asked:
    """Return the adaptive source with `budget` completions a state on average, `num_samples` a request."""
    rng = random.Random(f"rounds {world.seed} {budget} {estimator}")
    with tempfile.TemporaryDirectory() as folder:
        write_records(Path(folder) / "states.jsonl", world.states)
        write_records(Path(folder) / "trajectories.jsonl", world.trajectories)
        source = AdaptiveCompletions(
            str(Path(folder) / "states.jsonl"), trajectories=str(Path(folder) / "trajectories.jsonl"),
            max_completions=60, max_width=0.0, estimator=estimator, mean_completions=budget, round_share=0.15,
            weighs_visits=False,
        )  # fmt: skip
        asked = [request.id for request in source.load(None, None)]  # type: ignore[arg-type]
        keys = dict(zip((state.id for state in world.states), world.keys, strict=True))
        counts, tokens, number = dict.fromkeys(world.keys, Count(0, 0)), 0, 0
        while asked:
            rows = []
            for request_id in asked:
                state_id = request_id.partition("@")[0]
                rights, cost = world.ask(keys[state_id], num_samples, rng)
                old = counts[keys[state_id]]
                counts[keys[state_id]] = Count(old.num_correct + sum(rights), old.num_completions + num_samples)
                tokens += cost
                rows += [Completion(f"{request_id}/{k}", state_id, "p", "", [], "stop", None, right)
                         for k, right in enumerate(rights)]  # fmt: skip
            number += 1
            asked = source.next_round(number, rows, num_samples)
    return counts, tokens


def counted(world: Valued, counts: dict[StateKey, Count]) -> dict[StateKey, float]:
    """Return the share of right completions."""
    return {key: count.value for key, count in counts.items()}


def smoothed(world: Valued, counts: dict[StateKey, Count]) -> dict[StateKey, float]:
    """Return `values.smoothed`."""
    return {key: one.value for key, one in smooth(world.tree, world.outcomes, counts).items()}


Value = Callable[[Valued, dict[StateKey, Count]], dict[StateKey, float]]
Ask = Callable[[Valued, float], Asked]
# name -> (how states are asked for a budget of completions a state, how counts become values, budgets)
WAYS: dict[str, tuple[Ask, Value, list[float]]] = {
    "plain": (lambda world, budget: plain(world, int(budget)), counted, [2, 3, 4, 6, 9, 12]),
    "smoothed": (lambda world, budget: plain(world, int(budget)), smoothed, [1, 2, 3, 4, 6, 9]),
    "adaptive": (lambda world, budget: in_rounds(world, budget, 2, "counted"), counted, [3, 4, 6, 9]),
    "adaptive, smoothed": (lambda world, budget: in_rounds(world, budget, 1, "smoothed"), smoothed, [1.5, 2, 3, 4, 6]),
}


def tokens_at(error: float, points: list[tuple[int, float]]) -> float | None:
    """Return the tokens at which a way meets an error, interpolated; None outside what was measured."""
    ordered = sorted(points)
    for (low, worse), (high, better) in pairwise(ordered):
        if better <= error <= worse:
            share = (math.log(worse) - math.log(error)) / max(1e-12, math.log(worse) - math.log(better))
            return math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
    return None


def measure(world: Valued) -> dict[str, list[tuple[int, float]]]:
    """Return way -> (tokens, error) at every budget."""
    found: dict[str, list[tuple[int, float]]] = {}
    for name, (ask, value, budgets) in WAYS.items():
        asked = [ask(world, budget) for budget in budgets]
        found[name] = [(tokens, world.error(value(world, counts))) for counts, tokens in asked]
    return found


CHOSEN = "adaptive, smoothed"  # conf/requests/smoothed_completions.yaml with stage/values/smoothed_values


def shares_of(points: dict[str, list[tuple[int, float]]]) -> dict[str, float]:
    """Return way -> the share of the tokens of plain K = 9 at which it meets its error; ways that do not are left
    out."""
    tokens, error = points["plain"][WAYS["plain"][2].index(PLAIN)]
    needed = {name: tokens_at(error, row) for name, row in points.items() if name != "plain"}
    return {name: found / tokens for name, found in needed.items() if found is not None}


def summary(shares: list[dict[str, float]], how: str) -> dict[str, dict[str, Any]]:
    """Return one figure for each way that met the error in every world: median, lowest and highest share."""
    figures = {}
    for name in WAYS:
        ordered = sorted(row[name] for row in shares if name in row)
        if ordered and len(ordered) == len(shares):
            middle = median(ordered)
            figures[name] = {"value": round(middle, 4), "low": round(ordered[0], 4), "high": round(ordered[-1], 4),
                             "unit": "ratio", "goal": GOAL, "better": "lower", "met": middle <= GOAL,
                             "how": how}  # fmt: skip
    return figures


def measure_recorded(
    model: str, num_problems: int, num_seeds: int, how: str, num_threads: int = 0
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (figures by way, detail) with a real policy: `benchmarks.sampling.recorded_values`."""
    from benchmarks.sampling.recorded_values import RecordedWorld, description, record

    with tempfile.TemporaryDirectory() as folder:
        trajectories, table = record(model, Path(folder), num_problems, num_threads)
    points = [measure(RecordedWorld(seed, trajectories, table)) for seed in range(num_seeds)]
    rows = [{"seed": seed, "way": name, "budget": budget, "tokens": tokens, "error": round(error, 5)}
            for seed, found in enumerate(points) for name, row in found.items()
            for budget, (tokens, error) in zip(WAYS[name][2], row, strict=True)]  # fmt: skip
    return summary([shares_of(found) for found in points], how), {**description(trajectories, table), "table": rows}


def main() -> None:
    """Print the table of the synthetic policy and write results/value_budget.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--problems", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    how = f"bash scripts/bench.sh value_budget --problems {options.problems} --seeds {options.seeds}"
    shares: list[dict[str, float]] = []
    table: list[dict[str, object]] = []
    for seed in range(options.seeds):
        world = World(seed, options.problems)
        points = measure(world)
        tokens_plain, error_plain = points["plain"][WAYS["plain"][2].index(PLAIN)]
        print(f"seed {seed}: {len(world.keys)} states, plain K={PLAIN}: {tokens_plain} tokens, error {error_plain:.4f}")
        shares.append(shares_of(points))
        for name, row in points.items():
            for budget, (tokens, error) in zip(WAYS[name][2], row, strict=True):
                table.append({"seed": seed, "way": name, "budget": budget, "tokens": tokens, "error": round(error, 5)})
                print(f"  {name:20} {budget:5} a state: {tokens / tokens_plain:.3f} of the tokens, error {error:.4f}")
    figures = summary(shares, how)
    if not figures:
        raise SystemExit("no way meets the error of plain K within its budgets: nothing is written")
    named = {f"tokens_for_equal_value_error ({name})": row for name, row in figures.items()}
    for name, row in named.items():
        print(f"{name}: {row['value']} ({row['low']} to {row['high']})")
    detail = {"policy": "synthetic, exact values", "problems": options.problems, "table": table}
    print(write_result("value_budget", named, detail))


if __name__ == "__main__":
    main()
