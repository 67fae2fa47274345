"""Errors of Hydra, OmegaConf and YAML in one line: the place, what is wrong there, what would be right."""

import difflib
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from espalier.runtime.renamed import MOVED, RENAMED, new_name

CONFIG_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError)
# Options of before, and what is chosen in their place; kept for this version only.
_GONE = {
    f"client/in_process{old}": f"client=in_process{old} is no longer there: choose client=data_parallel_engines{new}, "
                               "which has engines in processes of their own"
    for old, new in (("", ""), ("_shared_blocks", "_partial_block_cache"))
} | {
    "server/several": "server=several is no longer there: choose client=data_parallel_engines server=none, which has "
                      "client.num_engines engines in processes of their own, or start servers and name them in "
                      "client.base_url=[...]"
}  # fmt: skip
_CONF = Path(__file__).resolve().parent.parent / "conf"
_TAKES_SIZE = "  - /size: none\n"  # in the defaults of an experiment
_NO_TEXTS = {bool: "true or false", int: "a whole number", float: "a number", type(None): "null"}
_TAIL = re.compile(r"\n\s*(full_key:|object_type=|reference_type=|See https://|Config search path:).*", re.S)


def describe_config_error(error: BaseException) -> str:
    """Return one line, which begins with `config: `."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"config: {mark.name}:{mark.line + 1}: {_one_line(error.problem or 'not YAML')}"
    if _is_size_without_place(error):
        return f"config: {_no_size()}"
    if isinstance(error, MissingConfigException):
        return f"config: {_missing_config(error)}"
    if isinstance(error, OverrideParseException):
        words = _one_line(str(error)).removeprefix(f"Error parsing override '{error.override}' ")
        return f"config: cannot read '{error.override}' ({words}): write key=value"
    cause = _omegaconf_cause(error)
    if cause is None:
        return f"config: {_one_line(str(error))}"
    place = re.match(r"In '[^']*': ", str(error))
    return f"config: {place.group() if place else ''}{_wrong_value(cause)}"


def _is_size_without_place(error: BaseException) -> bool:
    """Say whether `size=` or `+size=` was given to an experiment that takes none."""
    if isinstance(error, MissingConfigException):
        return "/size/" in str(error.missing_cfg_file)  # looked for beside the experiment; size/… is a group of ours
    return isinstance(error, HydraException) and "Could not override 'size'" in str(error)


def _no_size() -> str:
    paths = sorted(path for path in _CONF.glob("exp/**/*.yaml") if _TAKES_SIZE in path.read_text())
    names = ", ".join(str(path.relative_to(_CONF).with_suffix("")) for path in paths)
    return (f"size= is for the experiments on data of your own, and this is another one: name one of them by -cn "
            f"({names}), and beside it what differs, as advantage=vineppo")  # fmt: skip


def is_of_hydra(error: BaseException) -> bool:
    """Say whether Hydra has no words for it: an override that it cannot apply ends in an error of Python's own."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    module = str(last.tb_frame.f_globals.get("__name__", "")) if last is not None else ""
    return type(error) in (AssertionError, ValueError) and module.partition(".")[0] in ("hydra", "omegaconf")


def wrong_kind_of_value(component: Callable[..., Any], values: Mapping[str, Any]) -> str:
    """Say which value is of another kind than the component's parameter, "" where none is: a text where a number, true
    or false belongs (`no` is a text to Hydra, and every text is true to Python), true or false for a number (1 and 0 to
    Python), a number with a point for a whole one, a number for true or false. Of other types nothing is said."""
    for name, value in values.items():
        hint = _type_hint(component, name) if type(value) in (str, bool, int, float) else None
        kinds = set(get_args(hint)) if isinstance(hint, UnionType) or get_origin(hint) is Union else {hint}
        if value == MISSING or not kinds <= _NO_TEXTS.keys() or type(value) in kinds or _is_float(value, kinds):
            continue
        wanted = dict.fromkeys(text for kind, text in _NO_TEXTS.items() if kind in kinds)
        got = f"'{value}'" if isinstance(value, str) else str(value).lower()
        return f"{name} must be {' or '.join(wanted)}, got {got}"
    return ""


def _type_hint(component: Callable[..., Any], name: str) -> Any:
    """Return the type of a parameter, None where it has none, or one that only a type checker reads."""
    function: Any = inspect.unwrap(component.__init__ if isinstance(component, type) else component)  # type: ignore[misc]
    hint = getattr(function, "__annotations__", {}).get(name)
    try:
        own = SimpleNamespace(__annotations__={name: hint})
        return hint if not isinstance(hint, str) else get_type_hints(own, function.__globals__)[name]
    except (NameError, TypeError):
        return None


def _is_float(value: Any, kinds: Collection[Any]) -> bool:
    """Say whether it is a whole number where any number may be."""
    return type(value) is int and float in kinds


def suggest(name: str, names: Iterable[str], prefix: str = "") -> str:
    """Return `it is now 'x'` for a name of before, `did you mean 'x'?` where a name is near, else the choices there
    are; `prefix` stands before x."""
    names = sorted(names)
    if now := new_name(name, names):
        return f"it is now '{prefix}{now}'"
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f"did you mean '{prefix}{near[0]}'?"
    return f"the choices are {', '.join(names)}" if names else "there is nothing to choose from"


def _one_line(text: str) -> str:
    return " ".join(_TAIL.sub("", text).split())


def _omegaconf_cause(error: BaseException) -> OmegaConfBaseException | None:
    """Return the OmegaConf error behind `error`, which Hydra often repeats as text alone."""
    chain: BaseException | None = error
    while chain is not None and not isinstance(chain, OmegaConfBaseException):
        chain = chain.__cause__ or chain.__context__
    return chain


def _wrong_value(cause: OmegaConfBaseException) -> str:
    key = str(cause.full_key or cause.key)
    if isinstance(cause, MissingMandatoryValue):
        return f"{key} has no value: add {key}=... to the command"
    if isinstance(cause.parent_node, DictConfig) and " not in " in str(cause):
        hint = MOVED.get(key) or _suggest_key(key, cause.parent_node)
        return f"there is no key '{key}': {hint}"
    if "is not in struct" in str(cause):
        return f"there is no key '{key}'"
    return f"{key}: {_one_line(str(cause))}"


def _suggest_key(full_key: str, node: DictConfig) -> str:
    """Return what to write in place of a key that `node` does not have: one of its own, or of a topic of the root."""
    place, _, name = full_key.rpartition(".")
    own, root = [str(key) for key in node if key != "hydra"], node._get_root()
    assert isinstance(root, DictConfig)
    if not own and place:
        return f"{place} is null in this config: choose {place}=NAME first"
    blocks = {str(key): part for key, part in root.items_ex(resolve=False) if isinstance(part, DictConfig)}
    topics = {f"{topic}.{key!s}": str(key) for topic, part in blocks.items()
              if is_dataclass(OmegaConf.get_type(part)) for key in part}  # fmt: skip
    prefix = f"{place}." if place else ""
    if place.rpartition(".")[2] == "options":
        return f"an option of vLLM's that no config names is added by +{full_key}=…"
    if now := new_name(name, [*own, *topics]):
        return f"it is now '{now if now in topics else prefix + now}'"
    if node is root and not difflib.get_close_matches(name, own):
        near = difflib.get_close_matches(name, topics.values(), n=1, cutoff=0.75)
        if near:
            return f"did you mean {' or '.join(repr(key) for key, last in topics.items() if last == near[0])}?"
    return suggest(name, own, prefix)


def _missing_config(error: MissingConfigException) -> str:
    """Return an option of a group that does not exist, or a config file that does not."""
    missing = str(error.missing_cfg_file)
    if missing in _GONE:
        return _GONE[missing]
    folders = [Path(found) for found in re.findall(r"path=file://(\S+)", str(error))]
    if str(error).startswith("In '"):
        hint = suggest(missing.rpartition("/")[2], error.options) if error.options else "no such group"
        return f"there is no {missing}: {_moved_default(missing, folders) or hint}"
    inside = {path.stem for folder in folders for path in (folder / missing).glob("*.yaml")}
    if inside:
        return f"{missing} is a folder of configs: the choices are {', '.join(sorted(inside))}"
    names = sorted({name for folder in folders for name in _runnable(folder)})
    folder, _, last = missing.rpartition("/")
    now = [name for name in names if f"/{name}".endswith(f"/{RENAMED.get(last, '?')}")]
    if now:
        beside = [name for name in now if folder in name] or now
        return f"there is no config '{missing}': it is now {min(beside, key=len)}"
    near = [name for name in names if name.endswith(f"/{missing}")]
    near = [name for name in near if not any(name.endswith(f"/{other}") for other in near)]
    if len(near) == 1:
        return f"there is no config '{missing}': it is now {near[0]}"
    near = near or difflib.get_close_matches(missing, names, n=1)
    hint = f"did you mean {' or '.join(near[:4])}?" if near else "name a file there, without .yaml"
    return f"there is no config '{missing}' in {' or '.join(map(str, folders))}: {hint}"


def _moved_default(missing: str, folders: Iterable[Path]) -> str:
    """Say where the one config of that name is now, for the defaults of a config; "" where there is none, or
    several."""
    top, _, last = missing.rpartition("/")
    names = {name for folder in folders for name in _runnable(folder)}
    found = {name for name in names if name.startswith(f"{top}/") and name.endswith(f"/{last}")}
    return f"it is now /{found.pop()}" if top and len(found) == 1 else ""


def _runnable(folder: Path) -> list[str]:
    """Return names of the configs below a folder that can stand behind -cn."""
    paths = (path for path in folder.rglob("*.yaml") if path.read_text().startswith("# @package _global_"))
    return [str(path.relative_to(folder).with_suffix("")) for path in paths]
