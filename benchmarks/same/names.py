"""Names that changed between two commits: a setting, a module or a field is called here as it was before.

A `Rename` says where its new name is found. A tree that holds the new name is asked by it, any other by the old one, so
that one list of runs serves a commit before a renaming and one after it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Rename:
    """`old` is called `new` in a tree with the file `where`; in `file: text`, the file must hold the text as well."""

    old: str
    new: str
    where: str

    def holds_in(self, tree: Path) -> bool:
        """Say whether the tree has the new name."""
        name, _, text = self.where.partition(": ")
        file = tree / name
        return file.is_file() and (not text or text in file.read_text())


# Settings (`advantage=grpo`), keys of settings (`dynamic_sampling_rounds`), modules and record fields
# (`Trajectory.step_ends`).
NAMES: tuple[Rename, ...] = ()

# Metrics by their name before → their name after.
METRICS: dict[str, str] = {}


def name_in(tree: Path, name: str, names: Iterable[Rename] = NAMES) -> str:
    """Return what the tree calls `name`; renamed twice, the last new name that it holds."""
    for rename in names:
        if rename.old == name and rename.holds_in(tree):
            name = rename.new
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
