"""MATH-APS (OpenR's Monte-Carlo data, after Luo et al. 2024): JSON lines of `question`, `final_answer`,
`question_id` and `reasoning_steps`, in two forms under one name.

**Flat**: a list of `solution_prefix` and `mc_value`. A prefix is a whole text, question included; one prefix
follows another where it begins with it, the longest counts, and so the list is a tree. A step is what a prefix
adds: `question + "".join(steps)` is the prefix of the last one, exactly. A prefix that stands twice is a branch
of its own. **Tree**: nodes of `text`, `mc_value`, `children`; a text is one step, the root's is the question,
and the white space between them is not published.

Each leaf gives one record: the steps from the question to it, with the share of right completions after each
as label. The first error is the first step with the value 0, after which no completion was right; -1 where
every value is above 0. Whether a leaf is a finished solution is not published: `is_correct` is None.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from espalier.data.process_data.annotations import first_zero
from espalier.data.process_data.published import JsonRow, problem_key, take_known
from espalier.data.records import AnnotatedSolution, BadInput, parse_record


@dataclass(frozen=True)
class MathApsRow:
    """The columns that are read; `question_id` is only kept."""

    question: str
    final_answer: str
    reasoning_steps: list[dict[str, Any]] | dict[str, Any]


@dataclass(frozen=True)
class Prefix:
    """An entry of the flat form."""

    solution_prefix: str
    mc_value: float | None


@dataclass(frozen=True)
class Node:
    """A node of the tree form."""

    text: str
    mc_value: float | None
    children: list[dict[str, Any]]


# The steps from the root to a leaf: (text of the step, value, where its entry stands).
Path = list[tuple[str, float | None, Any]]


def _check_value(value: float | None, place: str) -> None:
    if value is not None and not 0 <= value <= 1:
        raise BadInput(f"{place}: mc_value must lie in [0, 1], got {value}")


def _flat_paths(question: str, entries: list[dict[str, Any]], place: str) -> tuple[list[Path], dict[str, Any]]:
    """Return (paths, what `info` keeps of the root). Places are indices into the published list."""
    prefixes = [parse_record(Prefix, entry, f"{place}: prefix {index}") for index, entry in enumerate(entries)]
    for index, prefix in enumerate(prefixes):
        _check_value(prefix.mc_value, f"{place}: prefix {index}")
        if not prefix.solution_prefix.startswith(question):
            raise BadInput(f"{place}: prefix {index} does not begin with the question: correct or remove this row")
    root = next((index for index, prefix in enumerate(prefixes) if prefix.solution_prefix == question), None)
    first: dict[str, int] = {}  # a text → its first entry: others of the same text have no successors
    parents: dict[int, int | None] = {}
    for index in sorted(range(len(prefixes)), key=lambda i: (len(prefixes[i].solution_prefix), i)):
        if index == root:
            continue
        text = prefixes[index].solution_prefix
        before = [t for t in first if len(t) < len(text) and text.startswith(t)]
        parents[index] = first[max(before, key=len)] if before else None
        first.setdefault(text, index)
    leaves = [index for index in parents if index not in set(parents.values())]
    paths: list[Path] = []
    for leaf in sorted(leaves):
        chain = [leaf]
        while (parent := parents[chain[-1]]) is not None:
            chain.append(parent)
        path: Path = []
        start = len(question)
        for index in reversed(chain):
            path.append((prefixes[index].solution_prefix[start:], prefixes[index].mc_value, index))
            start = len(prefixes[index].solution_prefix)
        paths.append(path)
    kept = {"form": "flat", "num_prefixes": len(prefixes)}
    return paths, kept if root is None else {**kept, "root": root, "root_value": prefixes[root].mc_value}


def _tree_paths(question: str, root: dict[str, Any], place: str) -> tuple[list[Path], dict[str, Any]]:
    """Return (paths, what `info` keeps of the root). The place of a node lists the child to take at every level."""
    top = parse_record(Node, root, f"{place}: root")
    if top.text != question:
        raise BadInput(f"{place}: the root's text is not the question: correct or remove this row")
    _check_value(top.mc_value, f"{place}: root")

    def walk() -> Iterator[Path]:
        stack: list[tuple[Node, Path, list[int]]] = [(top, [], [])]
        while stack:
            node, path, where = stack.pop()
            if not node.children and path:
                yield path
            for index in reversed(range(len(node.children))):
                place_of_child = f"{place}: node {[*where, index]}"
                child = parse_record(Node, node.children[index], place_of_child)
                _check_value(child.mc_value, place_of_child)
                stack.append((child, [*path, (child.text, child.mc_value, [*where, index])], [*where, index]))

    return list(walk()), {"form": "tree", "separator": "\n\n", "root_value": top.mc_value}


@dataclass(frozen=True)
class MathAps:
    """As many records a row as its tree has leaves; one without steps where it has only the root."""

    name = "math_aps"
    is_array = False

    def read(self, row: JsonRow, key: str, place: str) -> list[AnnotatedSolution]:
        """Raises BadInput where a prefix does not continue the question or an entry has other fields."""
        known, extra = take_known(MathApsRow, row, place)
        tree = known.reasoning_steps
        read_paths = _tree_paths if isinstance(tree, dict) else _flat_paths
        paths, kept = read_paths(known.question, tree, place)  # type: ignore[arg-type]
        shared = {"format": self.name, "row": key, "num_paths": len(paths) or 1, **kept, "extra": extra}
        records = []
        for number, path in enumerate(paths or [[]]):
            labels = [value for _, value, _ in path]
            record = AnnotatedSolution(
                id=f"math_aps-{key}/{number}",
                problem_id=problem_key(known.question),
                question=known.question,
                steps=[text for text, _, _ in path],
                labels=labels,
                first_error=first_zero(labels) if path else None,
                is_correct=None,
                gold=known.final_answer,
                info={**shared, "places": [where for _, _, where in path]},
            )
            records.append(record)
        return records

    def write(self, records: Sequence[AnnotatedSolution], place: str) -> JsonRow:
        """Make a row from all records that were read from it; labels may have changed.

        Raises BadInput where the records are of another format, some are missing, or two that share a step differ in
        its label.
        """
        first = records[0]
        if first.info.get("format") != self.name:
            raise BadInput(f"{place}: math_aps holds only trees it was read from: export it as trl")
        if len(records) != first.info["num_paths"]:
            raise BadInput(f"{place}: {len(records)} of the {first.info['num_paths']} records of its row are there: "
                           "export them together")  # fmt: skip
        build = _build_tree if first.info["form"] == "tree" else _build_flat
        known = MathApsRow(first.question, first.gold, build(records, place))
        return {**vars(known), **first.info["extra"]}


def _set(entries: dict[Any, JsonRow], where: Any, entry: JsonRow, place: str) -> None:
    if entries.setdefault(where, entry) != entry:
        raise BadInput(f"{place}: two records of its row have another text or label for the step at {where}: "
                       "give them one")  # fmt: skip


def _build_flat(records: Sequence[AnnotatedSolution], place: str) -> list[dict[str, Any]]:
    info = records[0].info
    entries: dict[Any, JsonRow] = {}
    if "root" in info:
        entries[info["root"]] = {"solution_prefix": records[0].question, "mc_value": info["root_value"]}
    for record in records:
        text = record.question
        for step, label, where in zip(record.steps, record.labels, record.info["places"], strict=True):
            text += step
            _set(entries, where, {"solution_prefix": text, "mc_value": label}, place)
    if entries.keys() != set(range(info["num_prefixes"])):
        raise BadInput(f"{place}: prefixes of its row are missing: export all its records, unchanged in number")
    return [entries[index] for index in range(info["num_prefixes"])]


def _build_tree(records: Sequence[AnnotatedSolution], place: str) -> dict[str, Any]:
    entries: dict[Any, JsonRow] = {}
    for record in records:
        for step, label, where in zip(record.steps, record.labels, record.info["places"], strict=True):
            _set(entries, tuple(where), {"text": step, "mc_value": label}, place)
    root = {"text": records[0].question, "mc_value": records[0].info["root_value"], "children": []}
    nodes: dict[tuple[int, ...], dict[str, Any]] = {(): root}
    for where in sorted(entries):
        nodes[where] = {**entries[where], "children": []}
        nodes[where[:-1]]["children"].append(nodes[where])
    return root
