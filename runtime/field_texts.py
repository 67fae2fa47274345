"""What the fields of a class say of themselves, read from its source as text: nothing is imported.

A field is explained by the string under it; `docs/formats.md` and every program's `--help` are made of these.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

_NAMES = {"str": "text", "int": "integer", "float": "number", "bool": "true or false", "Any": "any", "None": "null"}
_NAMES |= {"Gold": "text or list of texts"}
_PLURALS = {"text": "texts", "integer": "integers", "number": "numbers", "any": "anything"}


@dataclass(frozen=True)
class FieldText:
    """A field of a class: its annotation and its default (None: it has none), and the string under it ("": none)."""

    name: str
    annotation: ast.expr
    default: ast.expr | None
    meaning: str


def field_texts(kind: ast.ClassDef) -> Iterator[FieldText]:
    """Yield the annotated fields of a class in order; a meaning is one line."""
    for statement, below in zip(kind.body, [*kind.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign):
            text = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else ""
            meaning = " ".join(str(text).split())
            yield FieldText(ast.unparse(statement.target), statement.annotation, statement.value, meaning)


def type_in_words(node: ast.expr) -> str:
    """Say in words what a value of an annotated type is."""
    if isinstance(node, ast.BinOp):
        return f"{type_in_words(node.left)} or {type_in_words(node.right)}"
    if isinstance(node, ast.Subscript):
        inner = node.slice.elts[-1] if isinstance(node.slice, ast.Tuple) else node.slice
        what = type_in_words(inner)
        return f"{'list' if ast.unparse(node.value) == 'list' else 'object'} of {_PLURALS.get(what, f'({what})')}"
    name = ast.unparse(node)
    return _NAMES.get(name, name)
