"""Completions of the middle states of wrong trajectories, round after round: what `values.first_error` asks for."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from espalier.data.jsonl import read_records
from espalier.data.records import BadInput, Completion, Trajectory
from espalier.sampling.rounds import RoundCompletions
from espalier.values.first_error import search_state, states_on_right_ways
from espalier.values.monte_carlo import Count, StateKey, state_key


@dataclass
class FirstErrorCompletions(RoundCompletions):
    """Asks `params.n` completions of the middle state of every wrong trajectory, round after round.

    `states` must hold every state of the `trajectories` (`values/cut_states` without sampling). `needs_solved` leaves
    out problems none of whose trajectories is right: their prompt may be lost already, and an error before the first
    step cannot be found. Raises BadInput where a state that is to be asked is not in the file.
    """

    trajectories: str = ""
    needs_solved: bool = True
    _counts: dict[StateKey, Count] = field(default_factory=dict, init=False, repr=False)
    _ids: dict[StateKey, str] = field(default_factory=dict, init=False, repr=False)
    _wrong: list[Trajectory] = field(default_factory=list, init=False, repr=False)
    _good: set[StateKey] = field(default_factory=set, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.trajectories:
            raise BadInput("set requests.trajectories: the file whose first errors are to be found")

    def inputs(self) -> list[str]:
        """Return states and trajectories."""
        return [*super().inputs(), self.trajectories]

    def first_states(self) -> list[str]:
        """Return the middle states before anything is known."""
        self._ids = {state_key(state.problem_id, state.prefix_ids): state.id for state in self._states.values()}
        rows = read_records(Trajectory, self.trajectories)
        solved = {row.problem_id for row in rows if row.is_correct}
        self._wrong = [
            row for row in rows if not row.is_correct and (row.problem_id in solved or not self.needs_solved)
        ]
        self._good = states_on_right_ways(rows)
        return self._middles()

    def choose(self, number: int, rows: Sequence[Completion], num_samples: int) -> list[str]:
        """Return the middle states that are not known yet."""
        for row in rows:
            state = self._states[row.state_id]
            key = state_key(state.problem_id, state.prefix_ids)
            count = self._counts.get(key, Count(0, 0))
            self._counts[key] = Count(count.num_correct + row.is_correct, count.num_completions + 1)
        return self._middles()

    def _middles(self) -> list[str]:
        """Return each once, in the order of the trajectories. A state that was refused is not asked again: nothing more
        is asked of its trajectories."""
        chosen: dict[str, None] = {}
        for row in self._wrong:
            search = search_state(row, self._counts, self._good)
            if search.is_over:
                continue
            key = state_key(row.problem_id, row.response_ids[: row.step_ends[search.middle - 1]])
            if key not in self._ids:
                raise BadInput(f"{self.states}: there is no state after step {search.middle} of '{row.id}': cut every "
                               "state of these trajectories")  # fmt: skip
            chosen[self._ids[key]] = None
        asked = {state.id for state in self._by_request.values()}
        return [state_id for state_id in chosen if state_id not in asked]
