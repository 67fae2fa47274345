"""A world of recorded completions: what a value costs with a real policy, against values from 256 completions.

Every distinct state of the trajectories of some problems is completed 256 + 64 times by the real engine. The first 256
give the value that estimates are held against; the ways of `benchmarks.sampling.value_budget` draw from the other 64,
in an order that the seed shuffles, so that no completion is on both sides. With v = 0.5 the 256 err by 0.031
themselves: that error stands in every way's, plain K = 9's included.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.sampling.prefill import IN_FLIGHT, SAMPLES, ask, engine_options, short_trajectories
from espalier.data.records import State, Trajectory
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.sampling.client import SampleRequest, SamplingParams
from espalier.sampling.server import VLLMServer
from espalier.values.monte_carlo import StateKey, distinct_states, state_key
from espalier.values.state_tree import state_tree

TRUTH = 256
SPARE = 64
A_REQUEST = 64  # samples asked at once


@dataclass(frozen=True)
class Recorded:
    """The completions of one state in the order they were drawn: right or wrong, generated tokens."""

    rights: list[bool]
    tokens: list[int]


def record(
    model: str, folder: Path, num_problems: int, num_threads: int = 0
) -> tuple[list[Trajectory], dict[StateKey, Recorded]]:
    """Return trajectories of the first problems, and the completions of their states."""
    task = WordArithmetic()
    log = str(folder / "server.log")
    with VLLMServer(
        model, log, has_controls=True, num_threads=num_threads, options=engine_options("partial_block_cache")
    ) as server:
        trajectories = short_trajectories(model, server.base_url, num_problems)
        states = distinct_states(trajectories)
        parts = [(state, part) for state in states for part in range((TRUTH + SPARE) // A_REQUEST)]
        requests = [SampleRequest(f"{s.id}@{part}", "", s.prompt_ids + s.prefix_ids) for s, part in parts]
        answers, _ = ask(server.base_url, requests, SamplingParams(n=A_REQUEST, temperature=1.0, max_tokens=128))
    found: dict[StateKey, Recorded] = {}
    for (state, _), samples in zip(parts, answers, strict=True):
        row = found.setdefault(state_key(state.problem_id, state.prefix_ids), Recorded([], []))
        for sample in samples:
            is_right = task.grade(state.gold, state.prefix + sample.text).is_correct
            row.rights.append(is_right and sample.finish_reason == "stop")
            row.tokens.append(len(sample.token_ids))
    return trajectories, found


class RecordedWorld:
    """The same interface as `benchmarks.sampling.value_budget.World`."""

    def __init__(self, seed: int, trajectories: Sequence[Trajectory], table: dict[StateKey, Recorded]):
        self.seed = seed
        self.trajectories = list(trajectories)
        self.states: list[State] = distinct_states(self.trajectories)
        self.keys = [state_key(state.problem_id, state.prefix_ids) for state in self.states]
        self.truth = {key: sum(table[key].rights[:TRUTH]) / TRUTH for key in self.keys}
        self.tree = state_tree(self.trajectories)
        self.outcomes = [row.is_correct for row in self.trajectories]
        self._table = table
        self._order: dict[StateKey, list[int]] = {}

    def ask(self, key: StateKey, number: int, rng: random.Random) -> tuple[list[bool], int]:
        """Return (outcomes, tokens) of the next `number` spare completions of a state, none twice for one way.

        Each way comes with a generator of its own; where that changes, the spare ones are shuffled anew.
        """
        if rng is not getattr(self, "_rng", None):
            self._rng, self._order = rng, {}
        if key not in self._order:
            self._order[key] = rng.sample(range(TRUTH, TRUTH + SPARE), SPARE)
        chosen, self._order[key] = self._order[key][:number], self._order[key][number:]
        if len(chosen) < number:
            raise ValueError(f"state {key[0]} has {SPARE} spare completions, all of them drawn")
        row = self._table[key]
        return [row.rights[place] for place in chosen], sum(row.tokens[place] for place in chosen)

    def error(self, values: dict[StateKey, float]) -> float:
        """Return root mean square over the states."""
        return math.sqrt(sum((values[key] - self.truth[key]) ** 2 for key in self.keys) / len(self.keys))


def description(trajectories: Sequence[Trajectory], table: dict[StateKey, Recorded]) -> dict[str, int | str]:
    """Return what was recorded."""
    return {
        "policy": "the tiny policy of the quick start",
        "trajectories": len(trajectories),
        "samples_a_problem": SAMPLES,
        "states": len(table),
        "completions": sum(len(row.rights) for row in table.values()),
        "in_flight": IN_FLIGHT,
    }
