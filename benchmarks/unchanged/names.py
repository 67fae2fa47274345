"""Names that changed between two commits: of settings, modules, record fields and metrics (renamed.json beside this).

A row of `names` says an old and a new name, and `where` the new one is found: a file of the tree, or `file: text`. A
tree that holds the new name is asked by it, any other by the old one, whichever of the two a run is written with; so
one list of runs serves a commit before a renaming and one after it. `metrics` maps a name before to the name after.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Rename:
    """`old` is called `new` in a tree with the file `where`; in `file: text`, the file must hold the text as well.

    A name is a setting (`advantage=grpo`), the key of settings (`whitening`), a module, or a record's field
    (`Trajectory.step_ends`).
    """

    old: str
    new: str
    where: str

    def holds_in(self, tree: Path) -> bool:
        """Say whether the tree has the new name."""
        name, _, text = self.where.partition(": ")
        file = tree / name
        return file.is_file() and (not text or text in file.read_text())


_TABLE = json.loads((Path(__file__).parent / "renamed.json").read_text())
NAMES: tuple[Rename, ...] = tuple(Rename(**row) for row in _TABLE["names"])
METRICS: dict[str, str] = _TABLE["metrics"]


def name_in(tree: Path, name: str, names: Iterable[Rename] = NAMES) -> str:
    """Return what the tree calls `name`, whichever of its names that is; a name may have changed several times."""
    rows = list(names)
    for row in rows:
        if name == row.old and row.holds_in(tree):
            name = row.new
    for row in reversed(rows):
        if name == row.new and not row.holds_in(tree):
            name = row.old
    return name


def setting_in(tree: Path, setting: str, names: Sequence[Rename] = NAMES) -> str:
    """Return a setting `key=value` as the tree takes it: renamed as a whole, or by its key alone.

    A key's rename covers the keys below it too: `params` also renames `params.max_tokens`.
    """
    whole = name_in(tree, setting, names)
    if whole != setting or "=" not in setting:
        return whole
    key, _, value = setting.partition("=")
    sign = key[: len(key) - len(key.lstrip("+"))]
    parts = key.removeprefix(sign).split(".")
    for length in range(len(parts), 0, -1):
        stem = ".".join(parts[:length])
        renamed = name_in(tree, stem, names)
        if renamed != stem:
            return f"{sign}{'.'.join([renamed, *parts[length:]])}={value}"
    return setting


def metrics_after(row: Mapping[str, float], metrics: Mapping[str, str] | None = None) -> dict[str, float]:
    """Return a row of the older commit's metrics under the names of the newer one."""
    table = METRICS if metrics is None else metrics
    return {table.get(name, name): value for name, value in row.items()}
