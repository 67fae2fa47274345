"""Which intermediate states of a trajectory are completed: all of them, or a sample.

Planning-based trajectory collection (Jiao et al. 2024) drops the last step, starts at a share of the others, stops at
a share, and keeps each state with a probability; some of its forms leave out short or malformed responses, take states
after certain step types only, take Action steps out, count labelled lines alone, take the middle state alone, or leave
out more than the last step (mathematics). All of it is an option here; the defaults keep every state.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from espalier.data.records import BadInput, State, Trajectory
from espalier.data.splitters.lines import first_text
from espalier.data.splitters.react import ReactStep, cleaned_react, react_steps
from espalier.values.monte_carlo import states_of

STEP_TYPES = ("Thought", "Action", "Observation", "State")


@dataclass(frozen=True)
class StateSampler:
    """The states of a trajectory of S steps, terminal state never among them.

    Candidates are the states after steps 1 .. S - 1. Of these C candidates the first int(C * start_ratio) and those
    from int(C * end_ratio) on are left out; each other one is kept with probability `keep_ratio`, drawn from a hash
    of `seed` and its id, so that neither order nor sharding changes the draw. A state stays only from step
    `first_step` on (0 adds the prompt state, which no ratio touches) and after one of `step_types` ([]: any).
    Trajectories of fewer than `min_steps` steps give none.

    `smallest_alternative`: a state stays only where the trajectory's own next step leaves at least this probability
    for others, by its log-probs (those of the model itself, whatever the temperature): from where the policy is sure of
    the next step, completions say nothing that the state behind it does not say.

    `drop_last` steps at the end are no candidates (1: the terminal one alone; 2: no state before the last step).
    `which` "middle" keeps one state of those that the ratios leave, the candidate at int(number / 2).

    `removes_actions` takes Action steps out before positions are counted, so ratios count the other steps; the
    text of a state still holds the actions before it: states are prefixes of sampled tokens. `step_types` filters
    after positions were counted. `labelled_only`: an unlabelled first step (the content of Thought 1, whose label ends
    the prompt) is no candidate and is not counted. `rejects_malformed`: responses that
    `data.splitters.react.cleaned_react` rejects (no Finish step, or several) give no states. These four read the ReAct
    layout. Raises BadInput on values out of range.
    """

    first_step: int = 1
    start_ratio: float = 0.0
    end_ratio: float = 1.0
    keep_ratio: float = 1.0
    min_steps: int = 0
    step_types: list[str] = field(default_factory=list)
    removes_actions: bool = False
    seed: int = 0
    labelled_only: bool = False
    rejects_malformed: bool = False
    drop_last: int = 1
    which: str = "all"
    smallest_alternative: float = 0.0

    def __post_init__(self) -> None:
        for name in ("start_ratio", "end_ratio", "keep_ratio", "smallest_alternative"):
            if not 0 <= getattr(self, name) <= 1:
                raise BadInput(f"{name} must be from 0 to 1, got {getattr(self, name)}")
        if self.start_ratio > self.end_ratio:
            raise BadInput(
                f"start_ratio {self.start_ratio} is above end_ratio {self.end_ratio}: no state would be left"
            )
        for name, number in (("first_step", self.first_step), ("min_steps", self.min_steps)):
            if number < 0:
                raise BadInput(f"{name} must be at least 0, got {number}")
        if self.drop_last < 1:
            raise BadInput(f"drop_last must be at least 1 (the terminal state is the outcome), got {self.drop_last}")
        if self.which not in ("all", "middle"):
            raise BadInput(f"which must be all or middle, got '{self.which}'")
        unknown = [name for name in self.step_types if name not in STEP_TYPES]
        if unknown:
            raise BadInput(f"there is no step type '{unknown[0]}': choose from {', '.join(STEP_TYPES)}")

    def states(self, trajectory: Trajectory) -> list[State]:
        """Return the chosen states in the order of their steps. Raises BadInput for a trajectory without token ids, and
        without log-probs where they are read."""
        states = states_of(trajectory, first_step=0)
        if len(trajectory.steps) < self.min_steps or self._is_malformed(trajectory):
            return []
        reads_types = self.step_types or self.removes_actions or self.labelled_only
        kinds = self._react_steps(trajectory) if reads_types else []
        steps = list(range(1, len(trajectory.steps) + 1 - self.drop_last))
        if self.labelled_only:
            steps = [step for step in steps if step > 1 or kinds[0].is_labelled]
        if self.removes_actions:
            steps = [step for step in steps if kinds[step - 1].type != "Action"]
        # a ratio written in decimals can fall a hair below the whole number it means: 0.29 * 100
        first, last = (int(len(steps) * ratio + 1e-9) for ratio in (self.start_ratio, self.end_ratio))
        steps = steps[first:last]
        if self.which == "middle":
            steps = steps[len(steps) // 2 :][:1]
        chosen = {step for step in steps if not self.step_types or kinds[step - 1].type in self.step_types}
        if trajectory.steps:
            chosen.add(0)
        if self.smallest_alternative:
            chosen = {step for step in chosen if alternative(trajectory, step) >= self.smallest_alternative}
        return [
            state for state in states if state.step in chosen and state.step >= self.first_step and self._is_kept(state)
        ]

    def _is_malformed(self, trajectory: Trajectory) -> bool:
        return self.rejects_malformed and cleaned_react(trajectory.response, joins_lines=False).text is None

    def _react_steps(self, trajectory: Trajectory) -> list[ReactStep]:
        """Return the ReAct step of each step; a token may have moved white space over a border. Raises BadInput where
        the steps are not those of the layout."""
        text, kinds = trajectory.response, react_steps(trajectory.response)
        types = dict(zip(_starts(text, [kind.text for kind in kinds]), kinds, strict=True))
        starts = _starts(text, trajectory.steps)
        if list(dict.fromkeys(starts)) != list(types):
            raise BadInput(f"trajectory '{trajectory.id}': its steps are not ReAct steps: split them with the react "
                           "splitter, or leave step_types, removes_actions and labelled_only out")  # fmt: skip
        return [types[start] for start in starts]

    def _is_kept(self, state: State) -> bool:
        if self.keep_ratio >= 1 or state.step == 0:
            return True
        digest = hashlib.sha256(f"state/{self.seed}/{state.id}".encode()).digest()
        return int.from_bytes(digest[:8], "big") < self.keep_ratio * 2**64


def alternative(trajectory: Trajectory, step: int) -> float:
    """Return the probability that the policy leaves the state after `step` steps by other tokens than the trajectory's
    own next step. Raises BadInput for a trajectory without log-probs."""
    logprobs = trajectory.logprobs
    if logprobs is None or len(logprobs) != len(trajectory.response_ids):
        raise BadInput(f"trajectory '{trajectory.id}' has no log-probs of its tokens: set stage.policy to the "
                       "model folder that it was sampled from, or sample with params.return_logprobs=true")  # fmt: skip
    start, end = ([0, *trajectory.step_ends][place] for place in (step, step + 1))
    return -math.expm1(math.fsum(logprobs[start:end]))


def _starts(text: str, steps: Sequence[str]) -> list[int]:
    """Say where the first character of each step stands that is no white space."""
    return [first_text(text, end - len(step)) for step, end in zip(steps, accumulate(map(len, steps)), strict=True)]
