"""The decisions of a network on a task whose solutions are lines: all spellings of a step are one decision.

A decision leads to the position that the task reads off the lines (`data/tasks/enumerable.py`). Prefixes with equal
position are one state (`merges`), whatever spellings led there: exact for a policy that depends on its prefix through
the position alone, an approximation for a network, whose size `values/exact/merge_error.py` measures. Text outside the
grammar, and after the final answer, is merged with nothing. A response is graded where it ends, as the task grades it;
one that has no room for an end token is wrong.
"""

from collections.abc import Hashable, Sequence
from typing import cast

from espalier.data.records import Problem
from espalier.data.steps import Decoder
from espalier.data.tasks.enumerable import EnumerableTask
from espalier.data.token_text import added_text
from espalier.values.exact.decision_values import DecisionState, Transition
from espalier.values.exact.line_search import Line, LineSearch, LineStart

Ids = tuple[int, ...]
Prefix = tuple[int, Ids]  # number of the question, response tokens


class LineDecisions:
    """Decides for several problems at once.

    `questions` are (problem, the tokens of its prompt). `max_tokens` is the longest response. Without `merges` every
    prefix is a state of its own, and a response that is cut is wrong; with it the lengths of merged prefixes differ, so
    a cut one is not followed.
    """

    def __init__(
        self,
        task: EnumerableTask,
        questions: Sequence[tuple[Problem, Ids]],
        decode: Decoder,
        search: LineSearch,
        max_tokens: int,
        merges: bool,
    ):
        self.task, self.questions, self.decode, self.search = task, questions, decode, search
        self.max_tokens, self.merges = max_tokens, merges
        self._read: dict[Prefix, DecisionState] = {}
        self._ends_outside: dict[Hashable, float] = {}

    def __call__(self, states: Sequence[DecisionState]) -> list[list[Transition]]:
        """Return the decisions in each state, those that lead to one place together."""
        prefixes: list[Prefix] = [state.prefix for state in states]  # type: ignore[misc]
        starts = [LineStart((*self.questions[number][1], *ids), self.max_tokens - len(ids)) for number, ids in prefixes]
        found = self.search(starts)
        return [self._transitions(prefix, lines) for prefix, lines in zip(prefixes, found, strict=True)]

    def state(self, prefix: Prefix, is_asked: bool = False) -> DecisionState:
        """Return the state after a prefix; an asked one is a state of its own, so that its next decision is exact."""
        if prefix not in self._read:
            number, ids = prefix
            problem, prompt_ids = self.questions[number]
            text = added_text(prompt_ids, ids, self.decode)
            steps = self.task.split_steps(text)
            position = self.task.position(problem, steps) if self.merges else None
            key: Hashable = prefix
            if position is not None and not position.is_finished:
                key = (number, position.key)
            self._read[prefix] = DecisionState(text.count("\n"), key, prefix)  # a line may go on with a step
        state = self._read[prefix]
        return DecisionState(state.depth, prefix, prefix) if is_asked else state

    def _transitions(self, prefix: Prefix, lines: Sequence[Line]) -> list[Transition]:
        """Group the lines by where they lead; the most probable spelling stands for its group."""
        number, before = prefix
        groups: dict[object, list[Transition]] = {}
        ended = [
            line for line in lines if line.ending == "end" and self._is_outside((number, (*before, *line.ids[:-1])))
        ]
        self._ends_outside[prefix] = sum(line.probability for line in ended)
        for line in lines:
            ids = (*before, *line.ids)
            if line.ending == "line":
                state = self.state((number, ids))
                groups.setdefault(state.node, []).append(Transition(line.probability, state))
            elif line.ending == "end" or not self.merges:
                outcome = float(line.ending == "end" and self.is_right(number, ids[:-1]))
                groups.setdefault(outcome, []).append(Transition(line.probability, outcome))
        return [Transition(sum(one.probability for one in group), group[0].to) for group in groups.values()]

    def leaves_grammar(self, prefix: Hashable) -> float:
        """Return 1 where a prefix has a line that is none of the task's grammar, else how probable it is that the
        response ends with one there: known once its decisions were."""
        return 1.0 if self._is_outside(cast("Prefix", prefix)) else self._ends_outside.get(prefix, 0.0)

    def _is_outside(self, prefix: Prefix) -> bool:
        number, ids = prefix
        problem, prompt_ids = self.questions[number]
        steps = self.task.split_steps(added_text(prompt_ids, ids, self.decode))
        return bool(steps) and self.task.position(problem, steps) is None

    def is_right(self, number: int, ids: Ids) -> bool:
        """Grade a whole response, without its end token, to question `number`."""
        problem, prompt_ids = self.questions[number]
        text = added_text(prompt_ids, ids, self.decode)
        return self.task.grade(problem.gold, text, len(problem.options)).is_correct
