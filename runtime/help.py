"""`--help` of every program: what it does, how it is called, and every setting with its value, type and explanation.

All of it is read: the program's docstring, the texts under the fields of its root config (runtime/schemas/), the values
of the config that is named, and for a stage the source of its class. No component is imported, so torch is not either.
"""

import ast
import importlib.util
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

import yaml
from omegaconf import DictConfig, OmegaConf

from espalier.runtime.field_texts import FieldText, field_texts, type_in_words

_WIDTH = 100
_TEXT_INDENT = " " * 8
_MISSING = "???"
_HOW = (
    "Settings are written key=value behind the program. They are shown with the values of the config that -cn names; "
    "??? must be given. A component has settings of its own: component.NAME=value, see docs/options.md."
)


def help_of(config: DictConfig, docstring: str, conf: Path, names_stages: bool = False) -> str:
    """Write the help of a program with this docstring, for a composed config with its `hydra` node; `conf` holds the
    groups. With `names_stages` the stages there are stand in place of the settings of one."""
    root: Any = OmegaConf.get_type(config)
    values: Any = OmegaConf.to_container(config, resolve=False)
    chosen = {key.partition("@"): str(choice) for key, choice in values["hydra"]["runtime"]["choices"].items()}
    choices = {place or group: (group, choice) for (group, _, place), choice in chosen.items()}
    topics = topics_of(root)
    plain = [field for field in texts_of(root) if field.name not in topics or field.meaning]
    sections = {"general": [_setting(field, values, choices, conf) for field in plain]}
    for topic, kind in topics.items():
        own = values[topic] or {field.name: field.default for field in fields(kind)}
        heading = textwrap.fill(f"{topic}: {first_sentence(kind)}", _WIDTH)
        sections[heading] = [_setting(field, own, choices, conf, topic) for field in texts_of(kind)]
    parts = [usage(docstring), textwrap.fill(_HOW, _WIDTH)]
    parts += ["\n".join([heading, *lines]) for heading, lines in sections.items()]
    if "stage" in values:
        parts.append(_stages(conf) if names_stages else component_help("stage", values["stage"]))
    return "\n\n".join(parts) + "\n"


def usage(docstring: str) -> str:
    """Return the first paragraph of a program's docstring and its examples, which are indented."""
    what, *rest = inspect.cleandoc(docstring).split("\n\n")
    return "\n\n".join([what, *(part for part in rest if part.startswith("    "))])


def topics_of(root: type) -> dict[str, type]:
    """Return the fields of a root config that are dataclasses themselves, and their types."""
    hints = get_type_hints(root)
    kinds: dict[str, Any] = {field.name: hints[field.name] for field in fields(root)}
    kinds = {name: get_args(kind)[0] if isinstance(kind, UnionType) else kind for name, kind in kinds.items()}
    return {name: kind for name, kind in kinds.items() if isinstance(kind, type) and is_dataclass(kind)}


def explanations(root: type) -> dict[str, str]:
    """Return the text of every setting of a root config by its dotted key; of a topic the sentence at its class."""
    found = {field.name: field.meaning for field in texts_of(root)}
    for topic, kind in topics_of(root).items():
        found[topic] = found[topic] or first_sentence(kind)
        found |= {f"{topic}.{field.name}": field.meaning for field in texts_of(kind)}
    return found


def component_help(place: str, node: Mapping[str, Any]) -> str:
    """Return the settings of a component at `place` of a config, as the source of its `_target_` says; "" where there
    is none."""
    target = str(node.get("_target_", ""))
    kinds = list(class_sources(target))
    if not kinds:
        return f"{place}: {target}"
    head = f"{place}: {inspect.cleandoc(next(filter(None, map(ast.get_docstring, kinds)), ''))}"
    known = {field.name: field for kind in reversed(kinds) for field in field_texts(kind)}
    values = {name: ast.unparse(field.default) if field.default else _MISSING for name, field in known.items()}
    values = {name: value for name, value in values.items() if not name.startswith("_")}
    values |= {name: as_yaml(value) for name, value in node.items() if not name.startswith("_")}
    lines = []
    for name, value in values.items():
        says = f"  ({type_in_words(known[name].annotation)})" if name in known else ""
        lines.append(_wrapped(f"{place}.{name}={value}{says}", known[name].meaning if name in known else ""))
    return "\n".join([head, "", *lines])


def class_sources(target: str) -> Iterator[ast.ClassDef]:
    """Return the source of a class of this package, then of the bases that are ours; its module is not imported."""
    module, _, name = target.rpartition(".")
    spec = importlib.util.find_spec(module) if module.startswith("espalier.") else None
    if spec is None or spec.origin is None:
        return
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    origins = {alias.asname or alias.name: f"{node.module}.{alias.name}"
               for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}  # fmt: skip
    for kind in tree.body:
        if isinstance(kind, ast.ClassDef) and kind.name == name:
            yield kind
            for base in kind.bases:
                yield from class_sources(origins.get(ast.unparse(base), f"{module}.{ast.unparse(base)}"))


def texts_of(kind: type) -> list[FieldText]:
    """Return the fields of a dataclass as its source has them, those of the dataclasses it is made from first."""
    found: dict[str, FieldText] = {}
    for base in filter(is_dataclass, reversed(kind.__mro__)):
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(node, ast.ClassDef)
        found |= {field.name: field for field in field_texts(node)}
    return list(found.values())


def first_sentence(kind: type) -> str:
    """Return what a class is, by its docstring's first paragraph."""
    return (kind.__doc__ or "").partition("\n\n")[0]


def _setting(
    field: FieldText, values: Mapping[str, Any], choices: Mapping[str, tuple[str, str]], conf: Path, topic: str = ""
) -> str:
    """`key=value  (type)`, and below it what it means; of a component its choices."""
    key = f"{topic}.{field.name}".lstrip(".")
    value, kind = values[field.name], type_in_words(field.annotation)
    if isinstance(value, dict):
        value, kind = str(value.get("_target_", _MISSING)).rpartition(".")[2], "component"
    group, value = choices.get(key, (key, value))
    names = sorted(path.stem for path in (conf / group).glob("*.yaml")) if key in choices or value is None else []
    kind = f"component: {', '.join(names)}" if names else kind
    return _wrapped(f"{key}={as_yaml(value)}  ({kind})", field.meaning)


def _wrapped(head: str, meaning: str) -> str:
    lines = textwrap.wrap(head, _WIDTH, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False)
    return "\n".join([*lines, *textwrap.wrap(meaning, _WIDTH, initial_indent=_TEXT_INDENT,
                                              subsequent_indent=_TEXT_INDENT, break_on_hyphens=False)])  # fmt: skip


def as_yaml(value: Any) -> str:
    """Write a value as the command line takes it."""
    if isinstance(value, str):
        return value or "''"
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("...\n").strip()


def _stages(conf: Path) -> str:
    names = sorted(str(path.relative_to(conf / "stage").with_suffix("")) for path in (conf / "stage").rglob("*.yaml"))
    return textwrap.fill(f"Stages, as -cn NAME; -cn NAME --help shows the settings of one: {', '.join(names)}", _WIDTH)
