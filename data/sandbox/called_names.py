"""Which functions of the program the tests of a row call: found from the tests alone, before any program is seen, so
that no program can put its own `abs` or `Counter` in the place of what judges it.

The program's are the names that no test defines and neither Python nor its standard library has. Where there are none
(`assert gcd(4, 6) == 2`, `assert sum(10, 15) == 6`) it is the one name of the standard library, else the one built-in
function, that all tests of the row read.
"""

import ast
import builtins
import importlib
import symtable
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

MODULES = (
    *("math", "cmath", "itertools", "functools", "collections", "re", "string", "random", "statistics", "fractions"),
    *("decimal", "datetime", "heapq", "bisect", "copy", "operator", "json", "typing"),
)
"""What a test may use without importing it, as `math.pi`."""


class NoTest(ValueError):
    """A text that cannot judge a program; the message says why."""


@dataclass(frozen=True)
class AssertTest:
    """A test and what its names mean: `functions` are the program's, `modules` those it does not import itself."""

    source: str
    functions: tuple[str, ...]
    modules: tuple[str, ...]


@dataclass(frozen=True)
class _Names:
    """The names that a test reads and does not define: `free` all of them, `alone` those that stand alone somewhere
    (not only as `math` in `math.pi`)."""

    source: str
    free: frozenset[str]
    alone: frozenset[str]


def read_assert_tests(sources: Sequence[str]) -> list[AssertTest]:
    """Return the tests of one program. Raises NoTest where one is no Python, runs nothing or calls no function of the
    program, or where it is not clear which name is the program's."""
    if not sources:
        return []
    found = [_names_of(source) for source in sources]
    own = [names.free - _library() - _builtins() for names in found]
    if not any(own):
        name = _the_one([names.alone & _library() for names in found])
        name = name or _the_one([names.alone & _functions() for names in found])
        own = [names.free & {name} for names in found]
    return [_described(names, functions) for names, functions in zip(found, own, strict=True)]


def _described(names: _Names, functions: frozenset[str]) -> AssertTest:
    if not functions:
        raise NoTest(f"a test calls no function of the program: {names.source[:40]!r}")
    for name in sorted((names.alone & _library()) - functions):
        raise NoTest(f"'{name}' is a name of the standard library that the test does not import: {names.source[:40]!r}")
    modules = (names.free & set(MODULES)) - functions
    return AssertTest(names.source, tuple(sorted(functions)), tuple(sorted(modules)))


def _the_one(candidates: Sequence[frozenset[str]]) -> str:
    """Return the one name that all tests have; "" where none of them has any. Raises NoTest where it is not one."""
    common = frozenset.intersection(*candidates)
    if len(common) == 1:
        return next(iter(common))
    read = sorted(frozenset().union(*candidates))
    if read and common:
        raise NoTest(f"the tests call {', '.join(read)}, all of Python's own: which of them is the program's?")
    return ""


def _names_of(source: str) -> _Names:
    try:
        tree = ast.parse(source)
        table = symtable.symtable(source, "test", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NoTest(f"a test is no Python ({error}): {source[:40]!r}") from None
    idle = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Pass)
    if all(isinstance(node, idle) or _is_constant(node) for node in tree.body):
        raise NoTest(f"a test runs nothing: {source[:40]!r}")
    free = frozenset(_read_globally(table)) - frozenset(_defined(table)) - frozenset(_star_imports(tree))
    bases = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    alone = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in bases}
    return _Names(source, free, free & alone)


def _is_constant(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _read_globally(table: symtable.SymbolTable) -> Iterator[str]:
    """Yield the names that a scope and those within it look up in the module."""
    is_module = table.get_type() == "module"
    yield from (one.get_name() for one in table.get_symbols() if one.is_referenced() and (is_module or one.is_global()))
    for child in table.get_children():
        yield from _read_globally(child)


def _defined(table: symtable.SymbolTable) -> Iterator[str]:
    """Yield the names that a module defines, from within functions too."""
    for one in table.get_symbols():
        if (one.is_assigned() or one.is_imported()) and (table.get_type() == "module" or one.is_declared_global()):
            yield one.get_name()
    for child in table.get_children():
        yield from _defined(child)


def _star_imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*" and node.module in MODULES:
            yield from _public_names(node.module)


def _public_names(module: str) -> list[str]:
    found = importlib.import_module(module)
    return [name for name in getattr(found, "__all__", dir(found)) if not name.startswith("_")]


@lru_cache(maxsize=1)
def _library() -> frozenset[str]:
    """The modules and their public names, without those that are built in too (`pow`)."""
    return frozenset(name for module in MODULES for name in (module, *_public_names(module))) - _builtins()


@lru_cache(maxsize=1)
def _builtins() -> frozenset[str]:
    return frozenset(dir(builtins))


@lru_cache(maxsize=1)
def _functions() -> frozenset[str]:
    """The built-in names that a program may have for its function: no exceptions."""
    kinds = ((name, getattr(builtins, name)) for name in _builtins() if not name.startswith("_"))
    return frozenset(name for name, kind in kinds if callable(kind) and not _is_exception(kind))


def _is_exception(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseException)
