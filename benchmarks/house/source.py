"""The product's source files as syntax trees, and the public functions and classes in them.

Product code is every Python file of the packages that espalier/ links to, of espalier/ itself, and the programs at the
top; tests, benchmarks and documentation are not.
"""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Found:
    """A count or a share, and the places behind it, worst first, as `file:line: what`."""

    value: float
    places: list[str]


@dataclass(frozen=True)
class Source:
    """One file: `path` relative to the repository, `package` the folder at the top ("" for a program)."""

    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.text)

    @property
    def package(self) -> str:
        """The package that the file belongs to."""
        return self.path.parts[0] if len(self.path.parts) > 1 else ""

    def place(self, node: ast.AST | None = None) -> str:
        """Return `file:line` of a node, or the file alone."""
        return f"{self.path}:{node.lineno}" if isinstance(node, ast.stmt) else str(self.path)


@dataclass(frozen=True)
class Definition:
    """A function or class that stands in a module or, with `owner`, in a class."""

    source: Source
    node: Function | ast.ClassDef
    owner: str = ""

    @property
    def name(self) -> str:
        """`function`, `Class` or `Class.method`."""
        return f"{self.owner}.{self.node.name}" if self.owner else self.node.name

    @property
    def place(self) -> str:
        """`file:line: name`."""
        return f"{self.source.place(self.node)}: {self.name}"

    @property
    def docstring(self) -> str:
        """The docstring, "" where there is none."""
        return ast.get_docstring(self.node) or ""


def packages(root: Path) -> list[str]:
    """List the folders at the top that are sub-packages of `espalier`, by its links."""
    links = [path for path in (root / "espalier").iterdir() if path.is_symlink()]
    return sorted(path.name for path in links if any(path.glob("*.py")))


def product_sources(root: Path) -> list[Source]:
    """Read every file of the product, in the order of their paths."""
    files = [path for name in packages(root) for path in (root / name).rglob("*.py")]
    files += [*root.glob("*.py"), *(root / "espalier").glob("*.py")]
    return [Source(path.relative_to(root), path.read_text()) for path in sorted(files)]


def definitions(sources: Iterable[Source]) -> Iterator[Definition]:
    """Return every function and class of a module, and every method of its classes; nothing inside of functions."""
    for source in sources:
        for node in source.tree.body:
            if isinstance(node, Function | ast.ClassDef):
                yield Definition(source, node)
            if isinstance(node, ast.ClassDef):
                methods = (child for child in node.body if isinstance(child, Function))
                yield from (Definition(source, child, node.name) for child in methods)


def public(sources: Iterable[Source]) -> Iterator[Definition]:
    """Return those of them that are public: no part of their name begins with an underscore."""
    return (found for found in definitions(sources) if not any(p.startswith("_") for p in found.name.split(".")))
