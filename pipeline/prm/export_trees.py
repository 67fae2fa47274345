"""SearchTree → MATH-APS: the tree of every problem in a published form of OmegaPRM's data.

`mc_value` is the share of right completions of a state, and the outcome where a response ended. A state without
completions has no value: its text becomes the beginning of the steps behind it, as the published steps between two
bisected states do; where nothing behind it has a value it is left out. `prm/import_steps stage.format=math_aps` reads
the file (data/process_data/math_aps.py).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from espalier.data.jsonl import read_records
from espalier.data.left_out import leave_out
from espalier.data.records import BadInput, Problem
from espalier.data.search_tree import SearchTree
from espalier.pipeline.stage import StageContext
from espalier.values.tree_values import completion_counts, read_trees

FORMS = ("tree", "flat")
Row = dict[str, Any]


def known_values(tree: SearchTree) -> list[float | None]:
    """Return of every node the share of right completions, or what it ended in; None where neither is known, and of the
    end token alone, which is no step."""
    values: list[float | None] = [None] * len(tree.parents)
    for node, (count, right) in enumerate(zip(completion_counts(tree), tree.is_correct, strict=True)):
        if right is not None:
            values[node] = float(right) if tree.steps[node].strip() else None
        elif count.num_completions:
            values[node] = count.value
    return values


def kept_above(tree: SearchTree, values: list[float | None]) -> tuple[list[int], list[str]]:
    """Return of every node the next valued node above it (0: the prompt), and its text behind that one's."""
    above, texts = [0] * len(values), [""] * len(values)
    for node in range(1, len(values)):
        parent = tree.parents[node]
        is_kept = parent == 0 or values[parent] is not None
        above[node] = parent if is_kept else above[parent]
        texts[node] = tree.steps[node] if is_kept else texts[parent] + tree.steps[node]
    return above, texts


def tree_form(tree: SearchTree, question: str) -> Row:
    """Return nested nodes of `text`, `mc_value` and `children`; white space around a step is not part of this form."""
    values = known_values(tree)
    above, texts = kept_above(tree, values)
    rows: dict[int, Row] = {0: {"text": question, "mc_value": values[0], "children": []}}
    for node in range(1, len(values)):
        if values[node] is not None:
            rows[node] = {"text": texts[node].strip(), "mc_value": values[node], "children": []}
            rows[above[node]]["children"].append(rows[node])
    return rows[0]


def flat_form(tree: SearchTree, question: str) -> list[Row] | None:
    """Return every valued node as its whole text, question included, with its value; None where the form cannot say
    what follows what: a text that begins with the text of a node which it does not come from."""
    values = known_values(tree)
    whole = [f"{question}\n\n", *[""] * (len(values) - 1)]
    for node in range(1, len(values)):
        whole[node] = whole[tree.parents[node]] + tree.steps[node]
    above, _ = kept_above(tree, values)
    before: list[int] = []  # valued nodes whose texts begin one another
    for node in sorted((one for one, value in enumerate(values) if one and value is not None), key=whole.__getitem__):
        while before and not whole[node].startswith(whole[before[-1]]):
            before.pop()
        if (before[-1] if before else 0) != above[node]:
            return None
        before.append(node)
    entries = [{"solution_prefix": whole[node], "mc_value": values[node]}
               for node in range(1, len(values)) if values[node] is not None]  # fmt: skip
    return [{"solution_prefix": question, "mc_value": values[0]}, *entries]


@dataclass(frozen=True)
class ExportTrees:
    """`problems`: the file of their questions. `form`: tree, or flat (a list of prefixes)."""

    problems: str
    form: str = "tree"

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise BadInput(f"stage.form must be one of {', '.join(FORMS)}, got '{self.form}'")

    def inputs(self) -> list[str]:
        """Return the problems."""
        return [self.problems]

    def run(self, input_path: str, context: StageContext) -> Iterable[Row]:
        """Return a row per tree. Raises BadInput for a tree of no such problem, or of another one of that id, one of
        several gold answers, and where no state of any tree has completions."""
        problems = {problem.id: problem for problem in read_records(Problem, self.problems)}
        trees = read_trees(input_path, needs_completions=True)
        rows, num_unclear = list[Row](), 0
        for tree in trees:
            if tree.problem_id not in problems:
                raise BadInput(f"{self.problems}: no problem '{tree.problem_id}', which {input_path} holds a tree of")
            if not isinstance(tree.gold, str):
                raise BadInput(f"{input_path}: '{tree.id}' has several gold answers, and math_aps publishes one")
            question = problems[tree.problem_id].question
            if question not in tree.prompt or problems[tree.problem_id].gold != tree.gold:
                raise BadInput(f"{input_path}: '{tree.id}' is the tree of another problem than '{tree.problem_id}' of "
                               f"{self.problems}: name the file that was searched")  # fmt: skip
            steps = tree_form(tree, question) if self.form == "tree" else flat_form(tree, question)
            num_unclear += steps is None
            if steps is not None:
                rows.append({"question": question, "final_answer": tree.gold, "question_id": tree.problem_id,
                             "reasoning_steps": steps})  # fmt: skip
        reason = "have steps that begin one another, which stage.form=flat cannot tell apart (stage.form=tree can)"
        leave_out(input_path, num_unclear, len(trees), "trees", reason)
        context.counts["states"] = sum(value is not None for tree in trees for value in known_values(tree))
        return rows
