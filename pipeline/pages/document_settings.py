"""Root configs → docs/settings.md: every setting of every program with its type, default and meaning.

    python run_stage.py -cn pages/document_settings output=settings.md   # scripts/pages.sh writes the page of docs/

The texts are those under the fields of runtime/schemas/, which `--help` prints too.
"""

import inspect
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import ClassVar

from espalier.data.records import BadInput
from espalier.pipeline.pages.tabulate_benchmarks import markdown_table
from espalier.pipeline.stage import StageContext
from espalier.runtime import schemas
from espalier.runtime.field_texts import type_in_words
from espalier.runtime.help import as_yaml, explanations, first_sentence, texts_of, topics_of

# (heading, the root config) in the order of the page
PAGE: tuple[tuple[str, type], ...] = (
    ("Training", schemas.TrainConfig),
    ("Reinforcement learning", schemas.RLConfig),
    ("Sampling", schemas.SampleConfig),
    ("Stages", schemas.StageConfig),
)
_COLUMNS = ("setting", "type", "default", "meaning")
_INTRODUCTION = """# Settings

Written by `bash scripts/pages.sh` from runtime/schemas/. Settings are written `key=value` behind a program, or in a
config of your own. Those of components (`model`, `objective`, `client`, …) are in [options](options.md) and in the
YAMLs of conf/. A config may set other values than these defaults: `python PROGRAM.py -cn NAME --help` shows its own.
"""


class DocumentSettings:
    """The page of this package's settings."""

    finds_inputs: ClassVar[bool] = True

    def inputs(self) -> list[str]:
        """Return the sources of the schemas."""
        return sorted(str(path) for path in Path(inspect.getfile(schemas)).parent.glob("*.py"))

    def run(self, input_path: str, context: StageContext) -> str:
        """Return the page. Raises BadInput where a setting has no text."""
        parts, shown = [_INTRODUCTION], set[type]()
        for heading, root in PAGE:
            if bare := [key for key, text in explanations(root).items() if not text]:
                raise BadInput(f"{root.__name__}: {bare[0]} has no text under it: say what it means")
            parts += [f"## {heading}\n\n{first_sentence(root)}\n", markdown_table(_COLUMNS, list(rows(root)))]
            for topic, kind in topics_of(root).items():
                if kind not in shown:
                    parts.append(f"### {heading}: {topic}\n\n{first_sentence(kind)}\n")
                    parts.append(markdown_table(_COLUMNS, list(rows(kind, topic))))
                shown.add(kind)
            context.counts["settings"] = context.counts.get("settings", 0) + len(explanations(root))
        return "\n".join(parts)


def rows(kind: type, topic: str = "") -> Iterator[tuple[str, ...]]:
    """Return the rows of a class's settings; a topic without a text of its own has a section below."""
    defaults = {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in fields(kind)
    }
    for field in texts_of(kind):
        if field.meaning:
            value = defaults[field.name]
            default = "must be given" if value in ("???", MISSING) else f"`{as_yaml(value)}`"
            yield f"`{topic}.{field.name}`".replace("`.", "`"), type_in_words(field.annotation), default, field.meaning
