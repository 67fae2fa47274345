"""The commands in README, CONTRIBUTING and docs/: found in code blocks and code spans, taken apart, checked.

The changelog is left out: it names what was.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from espalier.command import PROGRAMS as WORDS
from tests.runtime.test_configs import CONF, bind_components, compose_config, missing_keys

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted([ROOT / "README.md", *(path for path in (ROOT / "docs").glob("*.md") if path.name != "changelog.md")])
PROGRAMS = {path.name for path in ROOT.glob("*.py")}
LAUNCHERS = {"launch.py", "torchrun", "deepspeed"}
_BLOCK = re.compile(r"^```(?:bash|sh)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_ANY_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^(?: {4}|\t)\S.*\n(?:^(?: {4,}|\t).*\n)*)", re.MULTILINE)
_SPAN = re.compile(r"`([^`]+)`")
_ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")
_LEFT_OUT = {"…", "...", "\\"}


@dataclass(frozen=True)
class Command:
    """One command of a page: `words` without variables before it, brackets of optional parts and what `…` leaves
    out; with such a `…` it `is_open`."""

    page: str
    words: tuple[str, ...]
    is_open: bool = False

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)[:90]}"


def lines(text: str) -> Iterator[str]:
    """The shell lines of a page: of its blocks, with continued lines joined, and its spans."""
    blocks = _BLOCK.findall(text)
    rest = _ANY_BLOCK.sub("", text)
    blocks += _INDENTED.findall(rest)
    for block in blocks:
        yield from (line.strip() for line in block.replace("\\\n", " ").splitlines())
    yield from spans(rest)


def spans(text: str) -> list[str]:
    """The code spans of a text without blocks; one that goes over a line's end is one."""
    paragraphs = re.split(r"\n\s*\n|\n(?=[|#>-])", text.replace("\\|", "|"))
    return [" ".join(span.split()) for paragraph in paragraphs for span in _SPAN.findall(paragraph)]


def commands(page: Path) -> Iterator[Command]:
    """Every command of a page that names a program, a module or a script."""
    for line in lines(page.read_text()):
        for part in re.split(r" && | \| ", line):
            words = split(part)
            if words and is_command(words):
                yield Command(page.name, tuple(words), is_open="…" in part or "..." in part)


def split(line: str) -> list[str]:
    """The words of a shell line, [] where it is none. Comments, variables and placeholders of words are left out."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return []
    while words and _ASSIGNMENT.fullmatch(words[0]):
        words = words[1:]
    kept = [without_brackets(word) for word in words if word not in _LEFT_OUT]
    return [word.removesuffix("…").removesuffix("...") for word in kept]


def without_brackets(word: str) -> str:
    """Without the bracket of an optional part, which may stand open: `[task=NAME]`, `[server=none`, `x=1]`."""
    if word.startswith("["):
        word = word[1:]
    return word[:-1] if word.endswith("]") and word.count("]") > word.count("[") else word


def is_command(words: list[str]) -> bool:
    """Whether the words run something of this project's."""
    first = words[0].removeprefix(".venv/bin/")
    if first in PROGRAMS:
        return len(words) > 1
    return first in {"python", "bash", "sbatch", "espalier", *LAUNCHERS} and len(words) > 1


def program_of(words: list[str]) -> tuple[str, list[str]]:
    """(program or script, its arguments), behind `python` and any launcher of ranks."""
    words = [words[0].removeprefix(".venv/bin/"), *words[1:]]
    if words[0] in ("python", "bash"):
        words = words[1:]
    if words[:1] and words[0] in LAUNCHERS:
        rest = words[1:]
        inner = next((i for i, word in enumerate(rest) if word in PROGRAMS), None)
        return (words[0], rest) if inner is None else program_of(rest[inner:])
    return (words[0], words[1:]) if words else ("", [])


def fault(command: Command) -> str:
    """What is wrong with a command, "" where nothing is."""
    name, arguments = program_of(list(command.words))
    if name == "espalier":
        return "" if arguments[0] in WORDS or arguments[0].startswith("train|") else f"no program {arguments[0]}"
    if name == "sbatch" and "scripts/ray_slurm.sh" in arguments:  # its first argument is the program
        name, *arguments = arguments[arguments.index("scripts/ray_slurm.sh") + 1 :]
    elif name == "sbatch":
        name, arguments = "trainer_base_ds_mul.py", arguments[arguments.index("scripts/slurm.sh") + 1 :]
    if name.endswith(".sh"):
        return script_fault(name, arguments) or ("" if command.is_open else task_fault(arguments))
    if name in PROGRAMS - {"launch.py"}:
        return program_fault(name, tuple(arguments), command.is_open)
    is_ours = name.endswith(".py") and name != "PROGRAM.py"
    return f"there is no program {name}" if is_ours and name not in PROGRAMS else ""


def is_placeholder(word: str) -> bool:
    """`M`, `NAME`, `X.json`: what the reader fills in."""
    return bool(re.fullmatch(r"[A-Z_]+", word))


_OTHER_WORDS = {"--help", "--cfg", "job", "-cn", "-cp", "--quick", "ARGUMENTS", "arguments", "key=value", "FOLDER"}


@cache
def program_fault(name: str, arguments: tuple[str, ...], is_open: bool = False) -> str:
    """What is wrong with a program's arguments: the config composes with them, its components take them, and where they
    say where to write, and are not open, nothing lacks a value."""
    found = re.search(r'config_name="([^"]+)"(?:, config_folder="([^"]+)")?', (ROOT / name).read_text())
    assert found, name
    config, folder = found[1], CONF / (found[2] or "")
    rest, overrides = list(arguments), []
    while rest:
        word = rest.pop(0)
        if word in ("-cn", "--config-name") and rest and "=" not in rest[0]:
            config = rest.pop(0)
        elif "=" in word and not word.startswith("-"):
            overrides.append(word)
        elif word not in _OTHER_WORDS:
            return f"'{word}' is no setting"
    if is_placeholder(config):
        return ""
    overrides = [word for word in overrides if not is_open_choice(*word.partition("=")[::2]) and word != "key=value"]
    is_whole = not is_open and any(word.startswith(("output=", "output_dir=")) for word in overrides)
    try:
        composed = compose_config(folder, config, *(quoted(word) for word in overrides))
        lacking = missing_keys(OmegaConf.to_container(composed)) if is_whole else []
        bind_components(composed)
    except Exception as error:
        return f"{error} {error.__cause__ or ''}"
    return f"{', '.join(lacking)}: no value" if lacking else ""


def task_fault(arguments: list[str]) -> str:
    """Which setting of the task that a script's arguments choose has no value; "" where each has one."""
    given = dict(word.split("=", 1) for word in arguments if "=" in word)
    task = given.get("task", "")
    if not (CONF / "task" / f"{task}.yaml").is_file():
        return ""
    lacking = set(missing_keys(OmegaConf.to_container(task_config(task)), "task")) - given.keys()
    return f"{', '.join(sorted(lacking))}: no value" if lacking else ""


@cache
def task_config(task: str) -> DictConfig:
    """What a task is without further settings."""
    return compose_config(CONF, "sample", f"task={task}").task


def quoted(override: str) -> str:
    """A setting as Hydra's own grammar reads it: what holds a blank or an asterisk is quoted."""
    key, _, value = override.partition("=")
    is_plain = re.fullmatch(r"[\w./:,@\[\]{}~+-]*", value) or value[:1] in "\"'"
    return override if is_plain else f"{key}='{value}'"


def is_open_choice(key: str, value: str) -> bool:
    """`task=NAME`: a choice of a group that the reader fills in."""
    return is_placeholder(value) and (CONF / key).is_dir()


def script_fault(name: str, arguments: list[str]) -> str:
    """What is wrong with a script's arguments, by what the script itself says it takes."""
    if not (ROOT / name).is_file():
        return f"there is no script {name}"
    text = (ROOT / name).read_text()
    if name in ("scripts/bench.sh", "scripts/faults.sh"):
        known = {path.stem.removesuffix("_faults") for path in ROOT.glob("benchmarks/*/*.py")}
        known |= {path.stem for path in ROOT.glob("benchmarks/*/*.py")} | {"seeds"}
        is_known = not arguments or is_placeholder(arguments[0]) or arguments[0] in known
        return "" if is_known else f"there is no benchmark {arguments[0]}"
    if settings := re.search(r'^settings="([^"]*)"', text, re.MULTILINE):
        keys = {*settings[1].replace("\\", " ").split(), "task.", "objective.", "prompt"}
        prefixes = re.search(r'^prefixes="([^"]*)"', text, re.MULTILINE)
        keys |= {f"{prefix}." for prefix in prefixes[1].split()} if prefixes else set()
        for word in arguments:
            key, equals, value = word.partition("=")
            if not equals or not (key in keys or (f"{key.partition('.')[0]}." in keys and "." in key)):
                return f"{name} has no setting '{key}'"
            is_choice = (CONF / key).is_dir() and value and not is_placeholder(value) and "|" not in value
            if is_choice and not (CONF / key / f"{value}.yaml").is_file():
                return f"there is no {key} '{value}'"
    elif choices := re.findall(r"^ +([\w |]+)\) ", text, re.MULTILINE):
        known_words = {word.strip() for choice in choices for word in choice.split("|")}
        return next((f"{name} takes no '{word}'" for word in arguments if word not in known_words), "")
    return ""
