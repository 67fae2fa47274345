"""Functions whose bodies are copies: their syntax trees agree but for local names, annotations and docstrings.

Names of parameters and of local variables are replaced by their number in the order of appearance; names of other
functions, attributes and constants stay, because they say what the body does.
"""

import ast
import copy
from collections import defaultdict
from collections.abc import Iterable

from benchmarks.house.source import Definition, Found, Function, Source, definitions

MIN_STATEMENTS = 5


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0]
    is_text = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    return body[1:] if is_text else body


def num_statements(node: Function) -> int:
    """Count the statements of a body at any depth, without the docstring."""
    return sum(isinstance(child, ast.stmt) for top in _without_docstring(node.body) for child in ast.walk(top))


class _Numbered(ast.NodeTransformer):
    """Replaces the function's own names by numbers and drops annotations."""

    def __init__(self, own: set[str]):
        self.own = own
        self.numbers: dict[str, str] = {}

    def _number(self, name: str) -> str:
        return self.numbers.setdefault(name, f"#{len(self.numbers)}") if name in self.own else name

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(self._number(node.arg), None)

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self._number(node.id), node.ctx)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        return ast.Assign([node.target], node.value) if node.value else ast.Pass()


def normal_form(node: Function) -> str:
    """Return the text of a body that two copies have in common."""
    own = {child.arg for child in ast.walk(node) if isinstance(child, ast.arg)}
    own |= {child.id for child in ast.walk(node) if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store)}
    numbered = _Numbered(own)
    arguments = numbered.visit(copy.deepcopy(node.args))
    body = [numbered.visit(copy.deepcopy(child)) for child in _without_docstring(node.body)]
    return ast.dump(ast.Module([ast.Expr(ast.Lambda(arguments, ast.Constant(None))), *body], []))


def duplicate_bodies(sources: Iterable[Source]) -> Found:
    """Count the functions of five statements or more that are a second copy of another."""
    groups: dict[str, list[Definition]] = defaultdict(list)
    for found in definitions(sources):
        if isinstance(found.node, Function) and num_statements(found.node) >= MIN_STATEMENTS:
            groups[normal_form(found.node)].append(found)
    copies = [group for group in groups.values() if len(group) > 1]
    return Found(sum(len(group) - 1 for group in copies), [" = ".join(one.place for one in group) for group in copies])
