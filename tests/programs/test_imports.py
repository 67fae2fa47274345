"""The direction of the imports, read from the source: docs/architecture.md."""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
MAY_IMPORT = {
    "data": set(),
    "models": {"data"},
    "runtime": set(),
    "values": {"data", "models"},
    "sampling": {"data", "models", "runtime", "values"},
    "rewards": {"data", "models"},
    "pipeline": {"data", "models", "rewards", "runtime", "values"},
    "search": {"data", "models", "rewards", "runtime", "sampling", "values"},
    "training": {"data", "models", "runtime"},
    "rl": {"data", "models", "sampling", "rewards", "training", "runtime", "values"},
    "analysis": {"data", "models", "rewards", "pipeline", "runtime", "values"},
    "checks": {"data", "models", "sampling", "rewards", "training", "rl", "runtime", "values"},
}
ENTRYPOINTS = {path.stem for path in ROOT.glob("*.py")}
HEAVY = ("vllm", "deepspeed", "flash_attn", "ray", "wandb")
INSIDE_THE_ENGINE = (
    "sampling/partial_block_cache.py"  # loaded by vLLM itself, beside the one module of ours that loads vLLM
)


def sources(*packages: str) -> list[Path]:
    """The Python files of packages, or of all packages and entrypoints."""
    folders = [ROOT / name for name in packages or MAY_IMPORT]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    return sorted(files if packages else [*files, *ROOT.glob("*.py")])


@cache
def imports(path: Path) -> list[tuple[str, bool]]:
    """(imported module, whether at the top level) of every import statement."""
    found: list[tuple[str, bool]] = []

    def visit(node: ast.AST, is_top: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend((alias.name, is_top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports are not used here"
            found.append((str(node.module), is_top))
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):  # no expression holds an import
                visit(child, is_top and not is_function)

    visit(ast.parse(path.read_text()), True)
    return found


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_what_stands_below_it(package: str) -> None:
    ours = set(MAY_IMPORT) | ENTRYPOINTS
    for path in sources(package):
        for module, _ in imports(path):
            top, _, rest = module.partition(".")
            name = rest.split(".")[0] if top == "espalier" else top
            allowed = name in ("", package) or name in MAY_IMPORT[package] or name not in ours
            assert allowed, f"{path.relative_to(ROOT)} imports {module}"


def test_nobody_imports_an_entrypoint() -> None:
    for path in everything():
        for module, _ in imports(path):
            is_program = module in ENTRYPOINTS or module.startswith("espalier.programs")
            assert not is_program, f"{path.relative_to(ROOT)} imports {module}"


def everything() -> list[Path]:
    """All Python files of the repository."""
    return [*sources(), *ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("espalier/*.py")]


def test_the_front_room_is_for_others_and_loads_nothing_before_it_is_asked() -> None:
    """`import espalier` is for code that is not ours; espalier/__init__.py imports nothing of ours when it runs."""
    modules = {f"espalier.{path.stem}" for path in ROOT.glob("espalier/*.py")}
    for path in sources():
        used = [module for module, _ in imports(path) if module in modules]
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        used += [alias.name for node in nodes if node.module == "espalier" for alias in node.names]
        assert not used, f"{path.relative_to(ROOT)} imports {used}"
    tree = ast.parse((ROOT / "espalier" / "__init__.py").read_text())
    at_once = [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert at_once == ["importlib", "typing"]


def test_packages_are_imported_by_their_full_name() -> None:
    """`import data` works in a checkout too, and would make every class of it twice."""
    for path in everything():
        for module, _ in imports(path):
            assert module.split(".")[0] not in MAY_IMPORT, f"{path.relative_to(ROOT)} imports {module}"


def test_the_package_has_every_folder_and_program_of_the_top() -> None:
    links = {path.name: path.resolve() for path in (ROOT / "espalier").iterdir() if path.is_symlink()}
    assert links == {name: ROOT / name for name in [*MAY_IMPORT, "conf"]}
    programs = {
        path.name: path.resolve() for path in (ROOT / "espalier" / "programs").glob("*.py") if path.is_symlink()
    }
    assert programs == {path.name: path for path in ROOT.glob("*.py")}


@pytest.mark.parametrize("library", HEAVY)
def test_a_heavy_library_is_imported_in_one_module_and_inside_functions(library: str) -> None:
    rows = [
        (str(path.relative_to(ROOT)), is_top)
        for path in sources()
        for module, is_top in imports(path)
        if module.split(".")[0] == library
    ]
    users = {name for name, _ in rows} - {INSIDE_THE_ENGINE}
    assert len(users) <= 1, f"{library} is imported in {rows}"
    assert not any(is_top for _, is_top in rows), f"{library} is imported at the top level of {rows[0][0]}"


def test_only_the_entrypoint_module_calls_hydras_instantiate() -> None:
    users = {
        str(path.relative_to(ROOT))
        for path in sources()
        if any(module.split(".")[0] == "hydra" for module, _ in imports(path))
    }
    assert users == {"runtime/entrypoint.py", "runtime/config_errors.py"}
    assert "instantiate" not in (ROOT / "runtime" / "config_errors.py").read_text()
    assert (ROOT / "runtime" / "entrypoint.py").read_text().count("instantiate(") == 1


def test_no_folder_shadows_a_library() -> None:
    assert not (ROOT / "datasets").exists()
    assert not (ROOT / "openai").exists()
