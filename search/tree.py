"""The tree of one problem while it is searched: nodes of token ids, which are never tokenised again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from espalier.data.answers.grade import Grade
from espalier.data.records import Problem, Trajectory
from espalier.data.search_tree import SearchTree
from espalier.rewards.aggregate import aggregate


@dataclass(eq=False)
class Node:
    """A state: the prompt and the steps on the way to it. `token_ids` and `text` are those of its own step, `logprobs`
    matches `token_ids` or is empty. `ending` is "" where it can go on; `stop` is the stop string that ended it.
    `draws`: how many samples drew these tokens. `completions`: the ends of whole responses that the run's own sampling
    drew from here, one per sample. `is_read`: whether a scorer was given its tokens. `visits`, `value` and
    `score` as in `data.search_tree.SearchTree`."""

    tree: "Tree" = field(repr=False)
    number: int
    parent: "Node | None" = field(repr=False)
    token_ids: list[int]
    text: str
    ending: str = ""
    stop: str = ""
    draws: int = 0
    logprobs: list[float] = field(default_factory=list, repr=False)
    tokens_so_far: int = 0
    score: float | None = None
    value: float | None = None
    visits: int = 0
    depth: int = 0
    num_tokens: int = 0
    children: list["Node"] = field(default_factory=list, repr=False)
    grade: Grade | None = None
    is_read: bool = False
    completions: list["Node"] = field(default_factory=list, repr=False)

    @property
    def is_finished(self) -> bool:
        """Whether the response ended here by itself or was cut by its length."""
        return bool(self.ending)

    def way(self) -> list["Node"]:
        """Return the nodes from the first step to this one."""
        way, node = list["Node"](), self
        while node.parent is not None:
            way.append(node)
            node = node.parent
        return way[::-1]

    def response_ids(self) -> list[int]:
        """Return the tokens behind the prompt."""
        return [token for node in self.way() for token in node.token_ids]

    def response(self) -> str:
        """Return the text of these tokens, as far as a stop string."""
        text = "".join(node.text for node in self.way())
        return text[: text.index(self.stop)] if self.stop and self.stop in text else text

    def rank(self) -> float:
        """Return what it is ranked by: the scores on its way, aggregated; those that were not asked are left out."""
        scores = [node.score for node in self.way() if node.score is not None]
        return aggregate(scores, self.tree.aggregate)

    def own_text(self) -> str:
        """Return the text of its step, as far as a stop string."""
        if not self.stop:
            return self.text
        return self.response()[sum(len(node.text) for node in self.way()[:-1]) :]

    def answered(self) -> Grade:
        """Return the graded answer of a finished node; a response that was cut is wrong."""
        if self.grade is None:
            found = self.tree.grade(self.response())
            self.grade = Grade(found.answer, found.is_correct and self.ending == "stop")
        return self.grade


class Tree:
    """The tree of `problem` under its prompt. `grade` grades the text of a whole response, `aggregate` says how scores
    on a way become one."""

    def __init__(
        self,
        problem: Problem,
        prompt: str,
        prompt_ids: Sequence[int],
        grade: Callable[[str], Grade],
        aggregate: str = "last",
    ):
        self.problem, self.prompt, self.prompt_ids = problem, prompt, list(prompt_ids)
        self.grade, self.aggregate = grade, aggregate
        self.root = Node(self, 0, None, [], "")
        self.nodes = [self.root]
        self.num_tokens = self.num_scores = self.num_scored_tokens = 0

    def add(
        self, parent: Node, token_ids: Sequence[int], text: str, ending: str, stop: str, logprobs: Sequence[float]
    ) -> Node:
        """Return the child of these tokens, drawn once more: a new node, or the one that is there already."""
        ids = list(token_ids)
        for child in parent.children:
            if child.token_ids == ids and child.ending == ending:
                child.draws += 1
                return child
        node = Node(self, len(self.nodes), parent, ids, text, ending, stop, 1, list(logprobs), self.num_tokens)
        node.depth, node.num_tokens = parent.depth + 1, parent.num_tokens + len(ids)
        parent.children.append(node)
        self.nodes.append(node)
        return node

    def finished(self) -> list[Node]:
        """Return the nodes that a response ended in, in the order in which they came."""
        return [node for node in self.nodes if node.is_finished]

    def trajectory(self, node: Node) -> Trajectory:
        """Return the solution of a node; one that can go on is cut there (`length`). Its steps are those of the
        tree."""
        way = [one for one in node.way() if one.text]
        found = node.answered() if node.is_finished else Grade(None, False)
        ends = [one.num_tokens for one in way]
        response, steps, length = node.response(), list[str](), 0
        for one in way:
            piece = response[length : length + len(one.text)]
            steps, length = [*steps, piece], length + len(piece)
        if ends:
            ends[-1] = node.num_tokens
        logprobs = [value for one in node.way() for value in one.logprobs]
        return Trajectory(
            id=f"{self.problem.id}/{node.number}",
            problem_id=self.problem.id,
            prompt=self.prompt,
            response=response,
            steps=steps,
            prompt_ids=self.prompt_ids,
            response_ids=node.response_ids(),
            step_ends=ends,
            finish_reason=node.ending or "length",
            gold=self.problem.gold,
            answer=found.answer,
            is_correct=found.is_correct,
            num_options=len(self.problem.options),
            logprobs=logprobs or None,
            passage_id=self.problem.passage_id,
        )

    def record(self, chosen: Node, method: str, scorer: str, is_cut: bool, seconds: float) -> SearchTree:
        """Return the whole tree as a row; `SearchTree` says what the arguments are."""
        nodes = self.nodes
        grades = [node.answered() if node.is_finished else None for node in nodes]
        return SearchTree(
            id=f"{self.problem.id}/0",
            problem_id=self.problem.id,
            prompt=self.prompt,
            prompt_ids=self.prompt_ids,
            gold=self.problem.gold,
            num_options=len(self.problem.options),
            method=method,
            scorer=scorer,
            aggregate=self.aggregate,
            chosen=chosen.number,
            is_cut=is_cut,
            num_tokens=self.num_tokens,
            num_scores=self.num_scores,
            num_scored_tokens=self.num_scored_tokens,
            seconds=round(seconds, 4),
            parents=[node.parent.number if node.parent else -1 for node in nodes],
            steps=[node.own_text() for node in nodes],
            step_ids=[node.token_ids for node in nodes],
            draws=[node.draws for node in nodes],
            endings=[node.ending for node in nodes],
            scores=[node.score for node in nodes],
            values=[node.value for node in nodes],
            visits=[node.visits for node in nodes],
            answers=[grade.answer if grade else None for grade in grades],
            is_correct=[grade.is_correct if grade else None for grade in grades],
            tokens_so_far=[node.tokens_so_far for node in nodes],
            logprobs=[node.logprobs for node in nodes] if any(node.logprobs for node in nodes) else [],
            completions=[[end.number for end in node.completions] for node in nodes]
            if any(node.completions for node in nodes)
            else [],
            passage_id=self.problem.passage_id,
        )
