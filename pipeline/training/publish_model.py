"""A model → its card; and, only where a repository is named, the model, the card and its data on the Hugging Face hub.

python run_stage.py -cn training/publish_model stage.model=RUN/model stage.figures=[RUN/prm.json] output=card.md
"""

import json
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from espalier.data.jsonl import file_sha256
from espalier.data.records import BadInput
from espalier.pipeline.stage import StageContext
from espalier.pipeline.training.model_card import (
    counts_of,
    deviations_of,
    figures_of,
    read_facts,
    without_folders,
    write_card,
    write_data_card,
)
from espalier.runtime.manifest import MANIFEST, find_damage, weight_files

log = logging.getLogger("stage")
PUBLISHED = "published.jsonl"
"""Beside a run's config: where its model went, so that the run leads to the hub as the card leads to the run."""


@dataclass(frozen=True)
class PublishModel:
    """`model`: a folder. `figures`: JSON files whose figures have intervals. `name`: in the card, "" for the
    repository's or the folder's. `license`: its identifier on the hub.

    `repository`: OWNER/NAME on the hub, "" publishes nothing; `data`: files for `data_repository`. `is_private`: the
    repositories that are made. The token is HF_TOKEN of the environment, or that of `hf auth login`.
    """

    model: str
    figures: list[str] = field(default_factory=list)
    name: str = ""
    license: str = ""
    repository: str = ""
    data: list[str] = field(default_factory=list)
    data_repository: str = ""
    is_private: bool = True

    def __post_init__(self) -> None:
        if bool(self.data) != bool(self.data_repository):
            raise BadInput("stage.data and stage.data_repository go together: give both, or neither")
        if self.data and not self.repository:
            raise BadInput("stage.data_repository names the data of a published model: set stage.repository too")
        for name, number in Counter(Path(path).name for path in self.data).items():
            if number > 1:
                raise BadInput(f"{number} files of stage.data would all be '{name}' in the repository: rename them")
        for name in filter(None, (self.repository, self.data_repository)):
            if name.count("/") != 1 or name.startswith(("/", ".")) or name.endswith("/"):
                raise BadInput(f"'{name}' is no repository: write OWNER/NAME")

    def inputs(self) -> list[str]:
        """Return the weights, the files of figures and the data."""
        return [*weight_files(Path(self.model)), *self.figures, *self.data]

    def run(self, input_path: str, context: StageContext) -> str:
        """Return the card, after everything that is asked for is on the hub. Raises BadInput where there is an input, a
        file has no figure, the folder is damaged, or the hub refuses."""
        if input_path:
            raise BadInput(f"input={input_path}: this stage reads a model: set stage.model, leave input empty")
        folder = Path(self.model)
        facts = read_facts(folder)
        files = _short_names(self.figures)
        figures = {name: list(figures_of(_read(path))) for name, path in files.items()}
        for name, path in files.items():
            if not figures[name]:
                raise BadInput(f"{path} has no figure with an interval: name what an evaluation wrote")
        for title, path in files.items():
            if deviations := deviations_of(Path(path)):
                figures[f"{title} (scores not as published: {deviations})"] = figures.pop(title)
        name = self.name or self.repository or folder.resolve().parent.name
        card = write_card(name, facts, figures, license_id=self.license, repository=self.repository,
                          data_repository=self.data_repository)  # fmt: skip
        context.counts.update(kind=facts.kind, figures=sum(map(len, figures.values())), data_files=len(facts.data))
        if self.repository:
            if (folder / MANIFEST).is_file() and (damage := find_damage(folder, is_whole=False)):
                raise BadInput(f"{folder} is not as its run wrote it ({damage}) and is not published: export it "
                               f"again, or remove its {MANIFEST} where the change is meant")  # fmt: skip
            known = {digest for _, digest, _ in facts.data}
            for path in (path for path in self.data if file_sha256(path) not in known):
                log.warning("%s is not what the model's run was trained on, as far as its provenance.yaml says", path)
            context.counts["commit"] = commit = self._publish(folder, card, facts.config)
            if facts.config:
                said = {"repository": self.repository, "commit": commit, "data_repository": self.data_repository}
                try:
                    with (folder.parent / PUBLISHED).open("a", encoding="utf-8") as file:
                        file.write(json.dumps(said) + "\n")
                except OSError as error:  # a run that is kept read-only: what is published stays so
                    log.warning("%s cannot be written (%s): the run does not say where its model is published",
                                folder.parent / PUBLISHED, error.strerror)  # fmt: skip
        return card

    def _publish(self, folder: Path, card: str, config: Mapping[str, Any]) -> str:
        """Upload data first, so that the card's link leads somewhere; return the model's commit."""
        from espalier.pipeline.training.hub import upload

        if self.data_repository:
            counts = {Path(path).name: counts_of(Path(path)) for path in self.data}
            text = write_data_card(self.data_repository, counts, self.repository, self.license)
            upload(self.data_repository, "dataset", {Path(path).name: Path(path) for path in self.data}
                   | {"README.md": text.encode()}, self.is_private)  # fmt: skip
        files: dict[str, Path | bytes] = {
            str(path.relative_to(folder)): _of_adapter(path) if path.name == "adapter_config.json" else path
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.name not in (MANIFEST, "README.md") and not _stays(path.relative_to(folder))
        }
        files["README.md"] = card.encode()
        if config:
            files["run/config.yaml"] = yaml.safe_dump(without_folders(config)).encode()
        return upload(self.repository, "model", files, self.is_private)


def _stays(path: Path) -> bool:
    """Say whether it is hidden (.git, .cache, .env: they can hold secrets), or of checkpoints that other trainers keep
    in the model's folder."""
    return any(part.startswith((".", "checkpoint-")) for part in path.parts)


def _of_adapter(path: Path) -> bytes:
    """Return an adapter's settings without the folder of its base."""
    return json.dumps(without_folders(_read(path)), indent=2).encode()


def _short_names(paths: list[str]) -> dict[str, str]:
    """Return path by name: of files with one name as much of the end of their paths as tells them apart."""
    parts = {path: Path(path).absolute().parts for path in paths}
    number = 1
    while len({row[-number:] for row in parts.values()}) < len({*parts.values()}):
        number += 1
    return {"/".join(row[-number:]): path for path, row in parts.items()}


def _read(path: str | Path) -> Any:
    try:
        return json.loads(Path(path).read_bytes())
    except ValueError as error:
        raise BadInput(f"{path} is no JSON document: {error}") from None
