"""The true value of a state under the policy, on a task that can be enumerated (docs/exact_values.md): the ceiling that
a scorer is compared with.

The policy's lines are followed once per problem, from the prompt; states of equal position share a value.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from espalier.data.records import BadInput
from espalier.data.steps import Decoder
from espalier.models.load import load_config, load_policy, positions_of
from espalier.sampling.client import SamplingParams
from espalier.search.expander import Expander
from espalier.search.scorers.scorer import Batches
from espalier.search.tree import Node, Tree
from espalier.values.exact.decision_values import Nodes, evaluate_policy
from espalier.values.exact.line_decisions import LineDecisions
from espalier.values.exact.line_search import LineSearch
from espalier.values.exact.state_values import ExactSettings, end_ids_of, enumerable

_KEPT = 256  # problems whose values are remembered


@dataclass
class _Solved:
    decisions: LineDecisions
    nodes: Nodes


@dataclass(frozen=True)
class _Asked:
    node: Node
    expander: Expander


class ExactScorer:
    """`policy`: the folder of the policy that draws. The rest as of `values.exact.state_values.ExactSettings`;
    `max_tokens` and the temperature are the run's. Raises BadInput (where it is asked) on a task that cannot be
    enumerated, and on samples of another distribution than the policy's at a temperature."""

    aggregate = "last"

    def __init__(
        self,
        policy: str,
        line_mass: float = 5e-3,
        state_mass: float = 1e-3,
        max_width: int = 16,
        merges: bool = True,
    ):
        self.policy, self.merges = policy, merges
        self.line_mass, self.state_mass, self.max_width = line_mass, state_mass, max_width
        self._network: Any = None
        self._search: LineSearch | None = None
        self._solved: OrderedDict[str, _Solved] = OrderedDict()
        self._batches = Batches[_Asked, float](self._compute)

    @property
    def is_computing(self) -> bool:
        """Whether scores are under way."""
        return self._batches.is_computing

    def models(self) -> dict[str, str]:
        """Return the policy's folder."""
        return {self.policy: ""}

    def longest(self) -> int:
        """Return what the policy takes."""
        return positions_of(load_config(self.policy))

    async def open(self) -> None:
        """Load the policy in transformers, once."""
        self._network = self._network or load_policy(self.policy).requires_grad_(False).eval()

    async def score(self, nodes: Sequence[Node], expander: Expander) -> list[float]:
        """Return values in [0, 1], the middle of what is known of each; of a finished state its outcome."""
        _check_sampling(expander.params)
        return await self._batches.ask([_Asked(node, expander) for node in nodes])

    def _compute(self, asked: list[_Asked]) -> list[float]:
        return [self._value(one.node, one.expander) for one in asked]

    def _value(self, node: Node, expander: Expander) -> float:
        if node.is_finished:
            return float(node.answered().is_correct)
        solved = self._solve(node.tree, expander)
        prefix = (0, tuple(node.response_ids()))
        state = solved.decisions.state(prefix)
        if state.node not in solved.nodes:
            state = solved.decisions.state(prefix, is_asked=True)
            solved.nodes |= evaluate_policy([state], solved.decisions, self.state_mass)
        return solved.nodes[state.node].value.mid

    def _solve(self, tree: Tree, expander: Expander) -> _Solved:
        key = tree.problem.id
        if key not in self._solved:
            limits = ExactSettings(expander.params.max_tokens, expander.params.temperature, self.line_mass,
                                   self.state_mass, self.max_width, self.merges)  # fmt: skip
            decisions = self._decisions(tree, expander, limits)
            root = decisions.state((0, ()), is_asked=True)
            self._solved[key] = _Solved(decisions, evaluate_policy([root], decisions, limits.state_mass))
            decisions.search.forget()
            while len(self._solved) > _KEPT:
                self._solved.popitem(last=False)
        return self._solved[key]

    def _decisions(self, tree: Tree, expander: Expander, limits: ExactSettings) -> LineDecisions:
        decode = expander.decode
        assert isinstance(decode, Decoder)
        if self._search is None:
            ends = end_ids_of(self._network, decode.tokenizer)
            self._search = LineSearch(
                self._network, decode, ends, limits.temperature, limits.line_mass, limits.max_width
            )
        questions = [(tree.problem, tuple(tree.prompt_ids))]
        return LineDecisions(
            enumerable(expander.task), questions, decode, self._search, limits.max_tokens, limits.merges
        )

    def forget(self, tree: Tree) -> None:
        """The values of the last problems are kept: another search may ask for them."""

    async def close(self) -> None:
        """Let go of the thread; the network and what was computed stay for another search."""
        self._batches.close()


def _check_sampling(params: SamplingParams) -> None:
    for name, is_known in (("top_p", params.top_p == 1), ("temperature", params.temperature > 0)):
        if not is_known:
            raise BadInput(f"params.{name}={getattr(params, name):g} with scorer=exact: exact values are of all tokens "
                           f"at a temperature above 0: set params.{name}=1.0")  # fmt: skip
