"""The counts of benchmarks/house, each on a source of a few lines."""

from pathlib import Path

import pytest

from benchmarks.house import copies, docstrings, imports, lengths, meanings, words
from benchmarks.house.source import Source, packages, product_sources


def source(text: str, path: str = "data/records.py") -> Source:
    """A file of the product."""
    return Source(Path(path), text)


def make_tree(root: Path, files: dict[str, str]) -> Path:
    """A repository with these files, the packages linked."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "espalier").mkdir(exist_ok=True)
    for name in {Path(name).parts[0] for name in files if "/" in name} - {"espalier", "tests"}:
        (root / "espalier" / name).symlink_to(f"../{name}")
    return root


SUM = """
def total(rows: list[int]) -> int:
    '''Add up.'''
    found = 0
    for row in rows:
        if row > 0:
            found += row
    print(found)
    return found
"""
SUM_AGAIN = SUM.replace("total", "add").replace("rows", "values").replace("found", "s").replace("Add up.", "Sum.")


def test_a_copy_with_other_local_names_is_a_copy() -> None:
    found = copies.duplicate_bodies([source(SUM), source(SUM_AGAIN, "rl/steps.py")])
    assert (found.value, found.places) == (1, ["data/records.py:2: total = rl/steps.py:2: add"])


@pytest.mark.parametrize(
    "changed", [("row > 0", "row > 1"), ("print", "log"), ("+=", "-="), ("    print(found)\n", "")]
)
def test_a_body_that_does_something_else_is_no_copy(changed: tuple[str, str]) -> None:
    assert copies.duplicate_bodies([source(SUM), source(SUM.replace(*changed), "rl/steps.py")]).value == 0


def test_functions_of_fewer_than_five_statements_are_not_compared() -> None:
    short = "def one(x):\n    a = x\n    b = a\n    c = b\n    return c\n"
    assert copies.duplicate_bodies([source(short), source(short, "rl/steps.py")]).value == 0


def test_a_name_in_two_packages_has_two_meanings() -> None:
    files = [source("class A: ...\ndef f(): ...\ndef _g(): ...\ndef main(): ...\n"),
             source("def A(): ...\ndef f(): ...\ndef _g(): ...\ndef main(): ...\n", "rl/records.py"),
             source("class A: ...\n", "data/others.py")]  # fmt: skip
    found = meanings.names_with_two_meanings(files)
    assert found.places == ["module records: data/records.py, rl/records.py",
                            "function f: data/records.py:2, rl/records.py:2"]  # fmt: skip
    assert meanings.names_with_two_meanings(files, {"records": "", "f": "", "main": ""}).value == 0


def test_docstrings_are_wanted_of_modules_and_of_what_is_public() -> None:
    text = (
        "'''Hold.'''\nclass A:\n    '''Be.'''\n    def f(self): ...\n    def _g(self): ...\ndef h():\n    '''Do.'''\n"
    )
    found = docstrings.public_docstrings([source(text)])
    assert (found.value, found.places) == (3 / 4, ["data/records.py:4: A.f"])


@pytest.mark.parametrize(("docstring", "share"), [
    ("Return the mean of `values` [B, T].", 1.0), ("`x`: [N]; gives [T - 1, 2].", 1.0), ("Of a scalar [].", 1.0),
    ("Log-probs (`[num_rows, V]`).", 1.0), ("Return `values[i]`.", 0.0), ("The mean.", 0.0),
])  # fmt: skip
def test_a_shape_stands_in_brackets(docstring: str, share: float) -> None:
    text = f"def f(x: torch.Tensor) -> float:\n    '''{docstring}'''\n"
    assert docstrings.tensor_docstrings_with_shapes([source(text)]).value == share


@pytest.mark.parametrize(("annotation", "is_counted"), [
    ("torch.Tensor", True), ("Tensor | None", True), ("list[torch.Tensor]", True), ("'torch.Tensor'", True),
    ("tuple[torch.Tensor, int]", True), ("dict[str, torch.Tensor]", False), ("Iterator[tuple[str, Tensor]]", False),
    ("int", False),
])  # fmt: skip
def test_only_functions_with_tensors_need_shapes(annotation: str, is_counted: bool) -> None:
    text = f"def f(x: {annotation}):\n    '''Do.'''\nclass A:\n    def _g(self, x: Tensor): ...\n"
    assert len(docstrings.tensor_docstrings_with_shapes([source(text)]).places) == is_counted


def test_errors_of_our_own_are_said_where_they_are_raised() -> None:
    text = """
class Bad(ValueError): ...
class Worse(Bad): ...
def silent(): raise Worse("x")
def says():
    '''Do. Raises Bad where it is.'''
    raise Bad("x")
def others(): raise KeyError("x")
def outer():
    def inner(): raise Bad("x")
def again():
    try: ...
    except Bad: raise
"""
    found = docstrings.raising_docstrings_with_errors([source(text)])
    assert (found.value, found.places) == (1 / 2, ["data/records.py:4: silent"])


def test_lengths_are_lines() -> None:
    files = [
        source(SUM),
        source("x = 1\n" * 30, "rl/iteration.py"),
        source("def iterate():\n    x = 1\n    return x\n", "a.py"),
    ]
    assert lengths.longest_function(files).places[0] == "data/records.py:2: total (8 lines)"
    assert lengths.longest_file(files).value == 30


def test_the_iteration_is_a_function_of_the_trainer() -> None:
    text = "class Trainer:\n    def iterate(self):\n        x = 1\n        return x\n"
    assert lengths.rl_iteration_lines([source(text, "rl/iteration.py")]).value == 3
    with pytest.raises(LookupError, match=r"rl/iteration\.py has no function 'iterate'"):
        lengths.rl_iteration_lines([source(text)])


def test_words_of_the_dialect_are_found_in_code_configs_and_pages(tmp_path: Path) -> None:
    marked = {"data/__init__.py": "told = 1\n# it stands\n# in the file\n", "conf/a.yaml": "# mended\n",
              "README.md": "Kin, and what there is.\n"}  # fmt: skip
    clean = {"tests/a.py": "told = 1\n", "data/b.py": "untold = retold = kind = amend = tolder = 1\n"}
    found = words.dialect_words(make_tree(tmp_path, marked | clean))
    assert found.value == 5
    assert found.places == [
        "README.md: 2 (lines 1 kin, 1 what there is)",
        "data/__init__.py: 2 (lines 1 told, 2 stands in)",
        "conf/a.yaml: 1 (lines 1 mended)",
    ]


def test_the_product_is_its_packages_and_programs(tmp_path: Path) -> None:
    files = dict.fromkeys(["data/a.py", "conf/a.yaml", "tests/test_a.py", "main.py", "espalier/__init__.py"], "")
    root = make_tree(tmp_path, files)
    assert packages(root) == ["data"]
    assert [str(file.path) for file in product_sources(root)] == ["data/a.py", "espalier/__init__.py", "main.py"]


def test_a_task_loads_what_its_modules_import_outside_of_functions_and_its_program_anywhere(tmp_path: Path) -> None:
    root = make_tree(tmp_path, {
        "main.py": "def main():\n    from espalier.rl.trainer import train\n",
        "espalier/prm.py": "from espalier import names\nimport espalier.data.records\n",
        "espalier/names.py": "",
        "rl/__init__.py": "from espalier.rl import names\n",
        "rl/names.py": "import torch\n",
        "rl/trainer.py": "from espalier.data import records\ndef f():\n    import espalier.rl.late\n",
        "rl/late.py": "",
        "data/records.py": "if TYPE_CHECKING:\n    import espalier.data.typed\nelse:\n    import espalier.data.late",
        "data/typed.py": "",
        "data/late.py": "",
    })  # fmt: skip
    assert imports.closure(root, ["main"]).places == ["data.late", "data.records", "rl.names", "rl.trainer"]
    assert imports.closure(root, ["prm"]).places == ["data.late", "data.records", "names", "prm"]
    assert imports.closure(root, ["rl.gone rl.late"]).places == ["rl.late", "rl.names"]
    with pytest.raises(LookupError, match=r"there is no module rl\.gone"):
        imports.closure(root, ["rl.gone"])


def test_the_front_room_is_imported_fast_and_without_torch() -> None:
    root = Path(__file__).resolve().parent.parent.parent
    assert len(imports.import_seconds(root, rounds=1)) == 1
    assert not imports.loads_torch(root)
