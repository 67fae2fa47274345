"""How every program starts: argv, Hydra, a typed config, one clear line for what the user got wrong.

`python <entrypoint>.py -cp conf/exp/dpo -cn name key=value`, `-cn exp/dpo/name`, and the same behind
a launcher of ranks, from any directory. What Hydra 1.3 needs help with is absorbed here:

- `-cp` is looked for from here, then from the repository root, and `conf/` always stays on the search path;
- a launcher's `--local_rank=N` is dropped (LOCAL_RANK is trusted) and flags are moved before overrides;
- no rank makes a run directory of its own: Hydra writes nothing, `runtime.run_dir` does;
- what is wrong in a config or an input ends in one line and an exit code, never in a traceback.

Exit codes: 0 done; 1 some rows failed (listed); 2 bad input or config; 3 a server or another rank unreachable or
stalled; 4 storage; 5 a cap on tokens or money is reached, resumable; 130/143 stopped by a signal, resumable. An
exception class states its own in `exit_code`.
"""

import importlib
import inspect
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cache, wraps
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from espalier.runtime import schemas
from espalier.runtime.company import company
from espalier.runtime.config_errors import is_of_hydra, suggest, wrong_kind_of_value
from espalier.runtime.errors import exit_code_of, line_of
from espalier.runtime.help import help_of
from espalier.runtime.logs import quiet_libraries
from espalier.runtime.peers import RankFailed
from espalier.runtime.process_lifetime import REPEAT_SECONDS, die_with_owner, outlive_reader
from espalier.runtime.ranks import STARTED_BY, says_errors
from espalier.runtime.task_lengths import register_lengths

C = TypeVar("C")
ROOT = Path(__file__).resolve().parent.parent
CONF = ROOT / "conf"
PACKAGES = ("data", "models", "sampling", "rewards", "pipeline", "training", "rl", "analysis", "runtime", "checks",
            "search")  # fmt: skip
_VALUE_FLAGS = {"-cp", "--config-path", "-cn", "--config-name", "-cd", "--config-dir", "-p", "--package"}
_VALUE_FLAGS |= {"-c", "--cfg"}
_HELP = {"-h", "--help"}
_FLAGS = {"--hydra-help", "--version", "--resolve", "-i", "--info"}
_QUIET = ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none"]


class BadConfig(ValueError):
    """A config names something that does not exist or does not fit."""

    exit_code = 2


@cache
def register_schemas() -> None:
    """Put the root dataclasses where `defaults: [train_schema, ...]` finds them, and lengths by the task beside."""
    register_lengths()
    store = ConfigStore.instance()
    store.store(name="train_schema", node=schemas.TrainConfig)
    store.store(name="rl_schema", node=schemas.RLConfig)
    store.store(name="sample_schema", node=schemas.SampleConfig)
    store.store(name="stage_schema", node=schemas.StageConfig)


def _is_admitted(module: str) -> bool:
    return module.startswith("espalier.") or f"{module}.".startswith("torch.optim.")


def find_component(target: str) -> Callable[..., Any]:
    """Return the callable behind a `_target_`: defined in this package or in torch.optim.

    Raises BadConfig on anything else, also on what one of our modules merely imports: a config must not be
    able to run what it likes.
    """
    module, _, name = target.rpartition(".")
    if not _is_admitted(module):
        if target.split(".")[0] in PACKAGES:
            raise BadConfig(f"_target_ '{target}' is now 'espalier.{target}'")
        raise BadConfig(f"_target_ '{target}' is not admitted: only espalier and torch.optim are, so put a class of "
                        "your own into the checkout and name espalier.… (docs/contributing.md says where)")  # fmt: skip
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise BadConfig(f"_target_ '{target}' does not exist: {_moved_to(target) or error}") from error
    if not callable(found) or not _is_admitted(str(getattr(found, "__module__", ""))):
        raise BadConfig(f"_target_ '{target}' is not admitted: name what {module} itself defines")
    return found


def _moved_to(target: str) -> str:
    """Say where the module of a `_target_` is now, if another folder of its package has the only one of that name."""
    parts = target.split(".")
    found = [path.relative_to(ROOT).with_suffix("") for path in (ROOT / parts[1]).rglob(f"{parts[-2]}.py")]
    now = ".".join(["espalier", *found[0].parts, parts[-1]]) if len(found) == 1 else target
    return "" if now == target else f"it is now '{now}'"


def check_component(node: Mapping[str, Any], **arguments: Any) -> None:
    """Raise BadConfig unless the node's keys, with `arguments`, fit the signature of its `_target_`, and its values the
    kinds of number, or of true and false, that stand there."""
    target = node["_target_"]
    component = find_component(target)
    signature = inspect.signature(component)
    own = {name: value for name, value in node.items() if not name.startswith("_")}
    bind = signature.bind_partial if node.get("_partial_") else signature.bind
    try:
        bind(**{**own, **arguments})
    except TypeError as error:
        unknown = [name for name in own if name not in signature.parameters]
        if unknown:
            hint = suggest(unknown[0], signature.parameters)
            raise BadConfig(f"config: {target} has no setting '{unknown[0]}': {hint}") from None
        raise BadConfig(f"config: {target}: {error}") from None
    if wrong := wrong_kind_of_value(component, own):
        raise BadConfig(f"config: {target}: {wrong}")


def _components(node: Any) -> Iterator[Mapping[str, Any]]:
    """Return the node and all below it that have a `_target_`."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield node
        for value in node.values():
            yield from _components(value)
    elif isinstance(node, list):
        for value in node:
            yield from _components(value)


def build(node: Any, **arguments: Any) -> Any:
    """Instantiate a config node: the only call of Hydra's `instantiate`.

    Raises BadConfig where a `_target_` is not admitted, does not exist or does not take the keys; what the
    component itself raises rises as it is.
    """
    if OmegaConf.is_config(node):
        node = OmegaConf.to_container(node, resolve=True)
    if not isinstance(node, dict) or "_target_" not in node:
        raise BadConfig(f"config: a component needs a _target_, got {str(node)[:80]!r}")
    for component in _components(node):
        check_component(component, **(arguments if component is node else {}))
    try:
        return instantiate(node, _convert_="all", **arguments)
    except InstantiationException as error:
        cause: BaseException = error
        while isinstance(cause, InstantiationException) and cause.__cause__ is not None:
            cause = cause.__cause__
        raise cause from None


def compose_config(schema: type[C], name: str, overrides: Sequence[str], unused: Sequence[str] = ()) -> C:
    """Return the config that a program would get by `-cn name overrides`; values that are missing at keys of `unused`
    are empty.

    Raises BadConfig where it is not a `schema`, or where a value is missing, and what Hydra raises.
    """
    register_schemas()
    outer, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None  # that of the program that asks
    try:
        with hydra.initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
            config = hydra.compose(config_name=name, overrides=list(overrides))
    finally:
        GlobalHydra.instance().hydra = outer
    for key in unused:
        if OmegaConf.is_missing(config, key):
            config[key] = ""
    if OmegaConf.get_type(config) is not schema:
        raise BadConfig(f"{name} is no {schema.__name__}: name another config of conf/exp/")
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise BadConfig(f"{name} has no value for {', '.join(missing)}: give them as overrides ({missing[0]}=...)")
    typed = OmegaConf.to_object(config)
    assert isinstance(typed, schema)
    return typed


def _normalise_argv(arguments: list[str], default_path: Path) -> list[str]:
    """Return flags first, then overrides; `-cp` absolute; `conf/` searched too; no `--local_rank`."""
    flags: list[str] = []
    overrides: list[str] = []
    path = default_path
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name in ("--local_rank", "--local-rank"):
            if not equals:
                next(rest, None)
        elif name in _VALUE_FLAGS:
            value = value if equals else next(rest, "")
            if not value:
                raise BadConfig(f"{name} needs a value")
            if name in ("-cp", "--config-path"):
                path = _resolve_config_path(value)
            else:
                flags += [name, value]
        elif name in _FLAGS:
            flags.append(argument)
        elif argument.startswith("-"):
            raise BadConfig(f"there is no flag {name}: settings are written key=value, without dashes")
        else:
            overrides.append(argument)
    flags = ["--config-path", str(path), *flags]
    if path != CONF:
        flags += ["--config-dir", str(CONF)]
    return [*flags, *_QUIET, *overrides]


def _help(arguments: list[str], function: Callable[[Any], int | None], config_name: str, folder: Path) -> str:
    """Return the help of the program whose `function` it is, with the values of the config that the arguments make."""
    words = _normalise_argv(arguments, folder)
    path, names = Path(words[1]), [words[i + 1] for i, word in enumerate(words) if word in ("-cn", "--config-name")]
    overrides = [word for word in words if "=" in word and not word.startswith("hydra")]
    search = [f"hydra.searchpath=[file://{CONF}]"] if path != CONF else []
    with hydra.initialize_config_dir(config_dir=str(path), version_base="1.3"):
        config = hydra.compose(config_name=(names or [config_name])[-1], overrides=[*search, *overrides],
                               return_hydra_config=True)  # fmt: skip
    return help_of(config, function.__globals__["__doc__"] or "", CONF, names_stages=not names)


def _launch(launcher: Any) -> int:
    """Have the very command that this is run on the ranks that the launcher starts; its exit code."""
    if "RANK" in os.environ:
        raise BadConfig("config: launcher starts the ranks itself: run the program without launch.py or torchrun, or "
                        "set launcher=none")  # fmt: skip
    return int(build(launcher).run([sys.executable, *sys.orig_argv[1:]]))


def _resolve_config_path(value: str) -> Path:
    for base in (Path.cwd(), ROOT):
        path = (base / value).resolve()
        if path.is_dir():
            return path
    raise BadConfig(f"-cp {value}: no such folder in {ROOT} (nor below the current folder)")


def _report(error: BaseException) -> None:
    """One line, said by the first rank of this machine."""
    lost = error.failure.rank if isinstance(error, RankFailed) and error.failure.is_lost else None
    if says_errors(lost):
        print(f"error: {line_of(error)}", file=sys.stderr, flush=True)


class _Stop:
    """Raises SystemExit at a signal; not again at one that follows at once: a launcher and a scheduler may both send
    it, and what is being closed must not be cut short."""

    def __init__(self) -> None:
        self.last = -math.inf

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        is_new, self.last = now - self.last > REPEAT_SECONDS, now
        if is_new:
            raise SystemExit(128 + number)


def entrypoint(
    schema: type | tuple[type, ...],
    config_name: str,
    config_folder: str = "",
    is_on_ranks: bool = False,
    must_name: bool = False,
) -> Callable[[Callable[[Any], int | None]], Callable[[], None]]:
    """Make `main(config)` a program. `config` is an instance of `schema` (or of one of several); its return value the
    exit code.

    `config_name` is used where the command line names none; `config_folder` is the folder below conf/
    in which `-cn` is looked up where there is no `-cp`. Where one `must_name` a config, `config_name` is that of
    `--help` alone. Where it `is_on_ranks`, a launcher may start several
    processes of it, which end together and with one exit code.
    """

    def decorate(function: Callable[[Any], int | None]) -> Callable[[], None]:
        @wraps(function)
        def main() -> None:
            given = "" if must_name and not _HELP & {*sys.argv[1:]} else config_name
            sys.exit(_run(function, schema, given, CONF / config_folder, is_on_ranks))

        return main

    return decorate


def _run(
    function: Callable[[Any], int | None],
    schema: type | tuple[type, ...],
    config_name: str,
    folder: Path,
    is_on_ranks: bool,
) -> int:
    os.environ["HYDRA_FULL_ERROR"] = "1"
    quiet_libraries()
    if is_on_ranks and os.environ.get(STARTED_BY) == "ray":
        outlive_reader()  # an actor reads what a rank prints, and may be lost before it
    signal.signal(signal.SIGTERM, _Stop())
    die_with_owner()
    register_schemas()
    codes: list[int] = []
    errors: list[Exception] = []

    def job(config: DictConfig) -> None:
        try:
            typed = OmegaConf.to_object(config)
            if not isinstance(typed, schema):
                names = " or ".join(kind.__name__ for kind in (schema if isinstance(schema, tuple) else (schema,)))
                raise BadConfig(f"this program needs a {names}: choose another -cn")
            launcher = getattr(typed, "launcher", None) if is_on_ranks else None
            is_rank = os.environ.get(STARTED_BY)
            codes.append(_launch(launcher) if launcher and not is_rank else function(typed) or 0)
        except Exception as error:  # said below, outside Hydra, which would print lines of its own
            errors.append(error)

    try:
        if _HELP & {*sys.argv[1:]}:
            print(_help([word for word in sys.argv[1:] if word not in _HELP], function, config_name, folder), end="")
            return 0
        with company() if is_on_ranks else nullcontext():
            words = _normalise_argv(sys.argv[1:], folder)
            if not config_name and not {"-cn", "--config-name"} & {*words}:
                raise BadConfig(f"name a config: -cn FOLDER/NAME of {folder}; --help lists them")
            sys.argv = [sys.argv[0], *words]
            hydra.main(version_base="1.3", config_path=None, config_name=config_name)(job)()
            if errors:
                raise errors[0]
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if is_of_hydra(error):
            error = BadConfig(f"a setting does not fit this config ({line_of(error)}): a group is chosen by a name, as "
                              "critic=policy; only then it has settings, as critic.learning_rate=1e-5")  # fmt: skip
        code = exit_code_of(error)
        if code is None:
            raise
        _report(error)
        return code
    return max(codes, default=0)
