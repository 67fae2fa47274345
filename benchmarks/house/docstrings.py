"""Whether docstrings say what a caller needs: that there is one, shapes of tensors, and errors of our own."""

import ast
import re
from collections.abc import Iterable, Sequence

from benchmarks.house.source import Definition, Found, Function, Source, definitions, public

# `[B, T]`, `[N]`, `[T - 1, 2]`, `[]`: capitals, numbers and words; not behind a name, which would be an index.
SHAPE = re.compile(r"(?<![\w\])])\[(?:(?:[A-Z]\w*|\d+|\.\.\.|[a-z_]+)(?: ?[-+*/] ?(?:\w+))?(?:, ?|(?=\])))*\]")
ERRORS = {"Exception", "BaseException", "ValueError", "RuntimeError", "OSError", "TypeError", "ConnectionError"}


def share(good: int, missing: Sequence[str]) -> Found:
    """Return the share of good ones; 1 where there are none at all."""
    total = good + len(missing)
    return Found(good / total if total else 1.0, list(missing))


def public_docstrings(sources: Iterable[Source]) -> Found:
    """Measure the share of modules and of public classes, functions and methods that have a docstring."""
    sources = list(sources)
    missing = [source.place() for source in sources if not ast.get_docstring(source.tree) and source.tree.body]
    good = sum(bool(ast.get_docstring(source.tree)) for source in sources)
    found = list(public(sources))
    return share(
        good + sum(bool(one.docstring) for one in found), missing + [o.place for o in found if not o.docstring]
    )


def _is_tensor(annotation: ast.expr | None) -> bool:
    """Say whether a value is a tensor, or a list or tuple of them; a mapping of names to weights has no one shape."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return _is_tensor(ast.parse(annotation.value, mode="eval").body)
    if isinstance(annotation, ast.BinOp):
        return _is_tensor(annotation.left) or _is_tensor(annotation.right)
    if isinstance(annotation, ast.Subscript):
        outer = ast.unparse(annotation.value)
        inner = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        has_names = any(isinstance(part, ast.Name) and part.id == "str" for part in inner)
        return outer in ("list", "tuple", "Sequence", "Iterable", "Iterator") and not has_names and any(
            _is_tensor(part) for part in inner)  # fmt: skip
    return annotation is not None and ast.unparse(annotation) in ("Tensor", "torch.Tensor")


def handles_tensors(node: Function) -> bool:
    """Say whether a function takes or gives a tensor, by its annotations."""
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return _is_tensor(node.returns) or any(_is_tensor(argument.annotation) for argument in arguments)


def _judged(found: Iterable[Definition], is_good: dict[bool, list[str]]) -> Found:
    return share(len(is_good[True]), is_good[False])


def tensor_docstrings_with_shapes(sources: Iterable[Source]) -> Found:
    """Measure the share of public functions with tensors whose docstring names a shape in brackets."""
    found = [one for one in public(sources) if isinstance(one.node, Function) and handles_tensors(one.node)]
    missing = [one.place for one in found if not SHAPE.search(one.docstring)]
    return share(len(found) - len(missing), missing)


def own_errors(sources: Iterable[Source]) -> set[str]:
    """Name the error types that the product defines, those derived from one another too."""
    bases = {
        one.node.name: {ast.unparse(base).split(".")[-1] for base in one.node.bases}
        for one in definitions(sources)
        if isinstance(one.node, ast.ClassDef) and not one.owner
    }
    known: set[str] = set()
    while True:
        more = {name for name, above in bases.items() if above & (known | ERRORS)} - known
        if not more:
            return known
        known |= more


def _own_nodes(node: ast.AST) -> Iterable[ast.AST]:
    """Return what stands in a function itself, not in functions inside of it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Function | ast.Lambda | ast.ClassDef):
            yield child
            yield from _own_nodes(child)


def raised(node: Function) -> set[str]:
    """Name what the `raise` statements of a function itself name."""
    errors = [child.exc for child in _own_nodes(node) if isinstance(child, ast.Raise) and child.exc is not None]
    called = [error.func if isinstance(error, ast.Call) else error for error in errors]
    return {ast.unparse(error).split(".")[-1] for error in called}


def raising_docstrings_with_errors(sources: Iterable[Source]) -> Found:
    """Measure the share of public functions that raise an error of ours and whose docstring says so."""
    sources = list(sources)
    ours = own_errors(sources)
    found = [one for one in public(sources) if isinstance(one.node, Function) and raised(one.node) & ours]
    missing = [one.place for one in found if not re.search(r"\b[Rr]aises?\b", one.docstring)]
    return share(len(found) - len(missing), missing)
