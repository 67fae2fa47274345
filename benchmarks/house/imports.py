"""What an import costs: the seconds of `import espalier`, and how many of our modules a task loads.

The modules are followed through the source: every import statement outside of functions, from the modules that the
task begins with; in a program those inside of its functions too, which it runs. Packages' own `__init__` files are not
counted.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.house.source import Found, Function

# What a task imports, `data.jsonl` for espalier.data.jsonl; of several names in one string, the first that is there.
SCORING = ("prm rewards.process", "data.jsonl", "models.load", "models.scalar_head", "runtime.distributed")
GRPO = ("main", "rl.advantages.grpo rl.advantages.grpo")

_TIMED = "import time; began = time.perf_counter(); import espalier; print(time.perf_counter() - began)"
_LOADED = "import sys, espalier; print('torch' in sys.modules)"


def file_of(root: Path, module: str) -> Path | None:
    """Return the file of a module below `espalier`, or of a program; None where there is none."""
    paths = [folder / module.replace(".", "/") for folder in (root, root / "espalier")]
    files = [file for path in paths for file in (path.with_suffix(".py"), path / "__init__.py")]
    return next((file for file in files if file.is_file()), None)


def _statements(node: ast.AST, is_program: bool = False) -> Iterator[ast.AST]:
    """Return what runs when a module is loaded, or a program: nothing inside of functions but those of a program,
    nothing for type checkers alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            is_negated = isinstance(child.test, ast.UnaryOp)
            child = ast.Module(child.body if is_negated else child.orelse, [])
        if is_program or not isinstance(child, Function):
            yield child
            yield from _statements(child, is_program)


def imported(path: Path, is_program: bool = False) -> Iterator[str]:
    """Name the modules of ours, without `espalier.`, that a file imports, and what it takes from them."""
    for node in _statements(ast.parse(path.read_text()), is_program):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (name.removeprefix("espalier.") for name in names if name.startswith("espalier."))


def closure(root: Path, task: Sequence[str]) -> Found:
    """Count the modules that a task loads; programs that it begins with are not counted.

    Raises LookupError where a module that it begins with is not there.
    """
    waiting: list[str] = []
    for names in task:
        there = [name for name in names.split() if file_of(root, name)]
        if not there:
            raise LookupError(f"there is no module {names}: name what a task imports in {__name__}")
        waiting.append(there[0])
    loaded: dict[str, Path] = {}
    while waiting:
        name = waiting.pop()
        file = file_of(root, name)
        if file is None or name in loaded:
            continue
        loaded[name] = file
        waiting += [*imported(file, file.parent == root), *(name.rpartition(".")[0] for _ in range("." in name))]
    modules = sorted(name for name, file in loaded.items() if file.name != "__init__.py" and file.parent != root)
    return Found(len(modules), modules)


def import_seconds(root: Path, rounds: int = 5) -> list[float]:
    """Measure `import espalier` in fresh processes, in seconds, after one that fills caches."""
    runs = [_answer(root, _TIMED) for _ in range(rounds + 1)]
    return [float(seconds) for seconds in runs[1:]]


def loads_torch(root: Path) -> bool:
    """Say whether `import espalier` loads torch."""
    return _answer(root, _LOADED) == "True"


def _answer(root: Path, code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()
