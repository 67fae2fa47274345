"""Unused options: settings that no config, script or page uses, and configs that nobody names.

An option is a parameter of a component (what a `_target_` of conf/ names) or a field of a root dataclass
(runtime/schemas/). It is used where

- conf/ gives it two values or more, the default of the signature among them, or lets it follow another setting, or
- the user must give it (`???`), or
- a script sets `place.name`, or
- a page names `place.name` in code, or the bare name in a section that also names, in code, a config that holds it (of
  a nested dataclass its place): a reader who looks for that config finds the option beside it.

Run it: `python -m benchmarks.house.unused_options` lists what is unused.
"""

import dataclasses
import inspect
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import MISSING

from espalier.runtime import schemas
from espalier.runtime.entrypoint import find_component
from espalier.runtime.help import topics_of

ROOT = Path(__file__).resolve().parent.parent.parent
# Where the files of a group stand in a config, where that is not the group's own name.
PLACES = {"api/vllm_params": "params", "prompt": "task.template", "task_options": "task"}
# What programs give to the components at a place: no option of the user's.
GIVEN_BY_CODE = {("client", "seed")}
ROOTS: tuple[type, ...] = (schemas.TrainConfig, schemas.SampleConfig, schemas.StageConfig, schemas.RLConfig)
# Root dataclasses and the nested ones by their place.
SCHEMAS = dict.fromkeys(
    [("", root) for root in ROOTS] + [(topic, kind) for root in ROOTS for topic, kind in topics_of(root).items()]
)


@dataclass
class Option:
    """One setting: the component or dataclass that has it, its name, where it stands, and what conf/ gives it."""

    component: str
    name: str
    places: set[str] = field(default_factory=set)
    configs: set[str] = field(default_factory=set)  # stems of the YAMLs that declare the component
    values: set[str] = field(default_factory=set)  # as JSON; the signature's default among them

    def is_set_by_conf(self) -> bool:
        """Tell whether conf/ gives more than one value, leaves it to the user, or ties it to another setting."""
        return len(self.values) > 1 or any("???" in value or "${" in value for value in self.values)

    def dotted(self) -> set[str]:
        """Return the keys that a user may write for it."""
        return {f"{place}.{self.name}".lstrip(".") for place in self.places}


@dataclass(frozen=True)
class ConfigFile:
    """One YAML: its stem, the stage that it is a preset of ("" for all but presets of stages), and every mapping in it
    with its place."""

    stem: str
    parent: str
    mappings: list[tuple[str, dict[str, Any]]]


def place_of(path: Path, text: str, conf: Path) -> str:
    """Return where the keys of a YAML of conf/ stand in a composed config: "" for the root, else as `critic.model`."""
    folder = str(path.parent.relative_to(conf))
    return "" if folder == "." or "@package _global_" in text else PLACES.get(folder, folder.replace("/", "."))


def _walk(node: dict[str, Any], place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield place, node
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _walk(value, f"{place}.{key}".lstrip("."))


def read_files(conf: Path) -> list[ConfigFile]:
    """Return every YAML below conf/."""
    files = []
    for path in sorted(conf.rglob("*.yaml")):
        text = path.read_text()
        node = yaml.safe_load(text) or {}
        is_preset = path.relative_to(conf).parts[0] == "stage" and "_target_" not in node.get("stage", {})
        parent = str(node["defaults"][0]).rsplit("/", 1)[-1] if is_preset else ""
        files.append(ConfigFile(path.stem, parent, list(_walk(node, place_of(path, text, conf)))))
    return files


def component_options(files: list[ConfigFile]) -> list[Option]:
    """Return the options of every component that conf/ names, with the values that conf/ gives them.

    Of a component that is not ours (torch.optim) only those that conf/ sets.
    """
    options: dict[tuple[str, str], Option] = {}
    for file in files:
        for place, node in file.mappings:
            target = str(node.get("_target_", ""))
            for name, values in _values(target, node).items() if target else ():
                if (place, name) in GIVEN_BY_CODE:
                    continue
                option = options.setdefault((target, name), Option(target, name))
                option.places.add(place)
                option.configs.add(file.stem)
                option.values |= values
    _add_settings(list(options.values()), files)
    return list(options.values())


def _values(target: str, node: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return the values, as JSON, that a component has in a mapping and by the defaults of its signature."""
    component = find_component(target)
    parts = dataclasses.fields(component) if is_dataclass(component) else ()
    made = {part.name: part.default_factory for part in parts}
    found: dict[str, set[str]] = {}
    for name, parameter in inspect.signature(component).parameters.items():
        has_default = target.startswith("espalier.") and parameter.default is not parameter.empty
        factory = made.get(name, dataclasses.MISSING)
        default = parameter.default if factory is dataclasses.MISSING else factory()
        values = {as_json(node[name])} if name in node else set()
        values |= {as_json(default)} if has_default else set()
        if values:
            found[name] = values
    return found


def schema_options(files: list[ConfigFile]) -> list[Option]:
    """Return the fields of the root dataclasses that have a default, with the values that conf/ gives them."""
    options = []
    for place, schema in SCHEMAS:
        for part in dataclasses.fields(schema):
            if part.default in (None, MISSING, dataclasses.MISSING):
                continue  # a component, what the user must give, or a nested dataclass
            options.append(Option(schema.__name__, part.name, {place}, {place or "root"}, {as_json(part.default)}))
    _add_settings(options, files)
    return options


def as_json(value: Any) -> str:
    """Return a value of a config or a default in a form that can be compared: 1 and 1.0 are one value."""
    return json.dumps(float(value) if type(value) is int else value, default=str, sort_keys=True)


def _add_settings(options: list[Option], files: list[ConfigFile]) -> None:
    """Add to each option the values that mappings without its `_target_` give it."""
    by_key: defaultdict[tuple[str, str], list[Option]] = defaultdict(list)
    for option in options:
        for place in option.places:
            by_key[place, option.name].append(option)
    parents = {file.stem: file.parent for file in files if file.parent}
    for file in files:
        stage = file.stem
        while stage in parents:
            stage = parents[stage]
        for place, node in file.mappings:
            for name, value in node.items() if "_target_" not in node else ():
                for option in by_key[place, str(name)]:
                    if not file.parent or stage in option.configs:
                        option.values.add(as_json(value))
                        option.configs.add(file.stem)


def code_sections(markdown: str) -> list[set[str]]:
    """Return the words in code of each section of a page; a section begins at a heading, whose own code is part of it.

    Code stands in backquotes, in fences, or is indented by four spaces. `stage.label=hard` gives the words
    `stage.label`, `stage`, `label` and `hard`.
    """
    sections = re.split(r"(?m)^(?=#+ )", markdown)
    return [_code_words(section) for section in sections]


def _code_words(text: str) -> set[str]:
    code = re.findall(r"```.*?```|`[^`]+`|(?m:^    .*$)", text, re.DOTALL)
    return split_words(" ".join(code))


def split_words(text: str) -> set[str]:
    """Return the identifiers of a text, dotted ones whole and in parts, and sizes of models (0.5b)."""
    dotted = {word.strip(".") for word in re.findall(r"[A-Za-z_][\w.]*", text)}
    sizes = set(re.findall(r"\b(?:\d+\.)?\d+b\b", text))
    return dotted | sizes | {part for word in dotted for part in word.split(".")}


def is_named(option: Option, sections: list[set[str]]) -> bool:
    """Tell whether a section names the option by its key, or by its bare name beside a config that holds it."""
    if option.dotted() & set().union(*sections):
        return True
    return any(option.name in section and option.configs & section for section in sections)


def unused_options(root: Path = ROOT) -> list[str]:
    """Return the options that no config, script or page uses, as `component: place.name`, sorted.

    Raises BadConfig where a `_target_` does not exist.
    """
    files = read_files(root / "conf")
    sections = read_sections(root)
    scripts = read_scripts(root)
    options = [*component_options(files), *schema_options(files)]
    return sorted(
        f"{option.component}: {min(option.dotted())}"
        for option in options
        if not option.is_set_by_conf() and not option.dotted() & scripts and not is_named(option, sections)
    )


def unnamed_configs(root: Path = ROOT) -> list[str]:
    """Return the choices of groups (`objective/ipo`) and stages that no other config, script or page names."""
    conf = root / "conf"
    words = set().union(*read_sections(root), read_scripts(root))
    for path in conf.rglob("*.yaml"):
        entries = (yaml.safe_load(path.read_text()) or {}).get("defaults", [])
        words |= {word for entry in entries if entry != "_self_" for word in split_words(str(entry))}
    paths = [path for path in conf.rglob("*.yaml") if path.parent != conf and conf / "exp" not in path.parents]
    return sorted(str(path.relative_to(conf).with_suffix("")) for path in paths if path.stem not in words)


def read_sections(root: Path) -> list[set[str]]:
    """Return the words in code of every section of README.md and docs/."""
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    return [section for page in pages for section in code_sections(page.read_text())]


def read_scripts(root: Path) -> set[str]:
    """Return the identifiers of the scripts of scripts/."""
    return split_words(" ".join(path.read_text() for path in sorted((root / "scripts").glob("*.sh"))))


if __name__ == "__main__":
    print("\n".join([*unused_options(), *unnamed_configs()]))
