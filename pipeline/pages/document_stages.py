"""Configs of stages → docs/stages.md: a table for each folder, a row for each stage, with what it reads and writes and
its options.

    python run_stage.py -cn pages/document_stages output=stages.md        bash scripts/pages.sh writes the page of docs/

A stage's config says it all: its first comment reads "X -> Y: what it does", its keys under `stage` are its options
with their defaults. A config that stands on another one shows what differs.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import yaml

from espalier.data.records import BadInput
from espalier.pipeline.pages.document_formats import PAGE
from espalier.pipeline.pages.tabulate_benchmarks import markdown_table
from espalier.pipeline.stage import StageContext

_KINDS = {name for _, _, sources in PAGE for _, names in sources for name in names}
_INTRODUCTION = """# Stages

Written by `bash scripts/pages.sh` from conf/stage/. A stage reads files and writes one:

```bash
python run_stage.py -cn values/cut_states input=trajectories.jsonl output=states.jsonl stage.keep_ratio=0.5
```

`input` is what stands left of the arrow, `output` what stands right of it; kinds of lines are in
[file formats](formats.md). Options are given as `stage.NAME=VALUE`; those in bold have no default. What they mean
stands at the class in the file that the row names. An output that exists is complete and is not made again,
but for pages and figures of what stands in folders: where another file has come there, they are made anew.
"""


@dataclass(frozen=True)
class DocumentStages:
    """`configs`: the folder of the stages' configs."""

    configs: str

    finds_inputs: ClassVar[bool] = True

    def inputs(self) -> list[str]:
        """Return every config, by name. Raises BadInput where there is none."""
        paths = sorted(str(path) for path in Path(self.configs).rglob("*.yaml"))
        if not paths:
            raise BadInput(f"{self.configs}: no stages (*.yaml) there: set stage.configs")
        return paths

    def run(self, input_path: str, context: StageContext) -> str:
        """Return the page. Raises BadInput on a config whose first comment is not "X -> Y"."""
        root, paths = Path(self.configs), [Path(path) for path in self.inputs()]
        context.counts["stages"] = len(paths)
        parts = [_INTRODUCTION]
        for folder in sorted({path.parent for path in paths}):
            rows = [row(path, root) for path in paths if path.parent == folder]
            parts += [f"## {folder.name}\n"] if folder != root else []
            parts.append(markdown_table(("stage", "reads", "writes", "options", "code"), rows))
        return "\n".join(parts)


def row(path: Path, folder: Path) -> tuple[str, ...]:
    """Make the row of one stage. Raises BadInput where its config's first comment is not "X -> Y"."""
    text = path.read_text()
    config = yaml.safe_load(text)
    comment = next((line[2:] for line in text.splitlines() if line.startswith("# ") and "@package" not in line), "")
    reads, arrow, writes = comment.partition(" -> ")
    if not arrow:
        raise BadInput(f"{path}: its first comment must be '# WHAT IT READS -> WHAT IT WRITES: what it does'")
    name = str(path.relative_to(folder).with_suffix(""))
    options = dict(config.get("stage", {}))
    target = str(options.pop("_target_", "")).removeprefix("espalier.").rpartition(".")[0].replace(".", "/")
    shown = "; ".join([*_own_task(config), *(_option(key, value) for key, value in options.items())])
    code = f"{target}.py" if target else ""
    base = "".join(f"as `{_full_name(entry, path, folder)}`, but " for entry in config.get("defaults", [])
                   if isinstance(entry, str) and entry not in ("/stage", "_self_"))  # fmt: skip
    return (f"`{name}`", _linked(reads), _linked(writes.removesuffix(".")), base + shown, code)


def _full_name(entry: str, path: Path, folder: Path) -> str:
    """Return the name, with its folder, of a config that the one at `path` stands on."""
    return entry.removeprefix("/stage/") if entry.startswith("/") else str(path.relative_to(folder).with_name(entry))


def _linked(text: str) -> str:
    """Return the text with a link at every kind of line."""
    return re.sub(
        r"\w+", lambda word: f"[{word[0]}](formats.md#{word[0].lower()})" if word[0] in _KINDS else word[0], text
    )


def _own_task(config: Mapping[str, Any]) -> list[str]:
    """Return the task that a config takes where none is given."""
    entries = [entry for entry in config.get("defaults", []) if isinstance(entry, dict)]
    return [f"task={entry['override /task']}" for entry in entries if "override /task" in entry]


def _option(key: str, value: Any) -> str:
    if value == "???":
        return f"**{key}**"
    if isinstance(value, list):
        value = f"[{', '.join(map(str, value))}]"
    if isinstance(value, bool) or value is None:
        value = {True: "true", False: "false", None: "null"}[value]
    return f"{key}={value}" if value != "" else f"{key}=''"
