"""How every program starts: argv, Hydra, a typed config, one clear line for what the user got wrong.

`python <entrypoint>.py -cp conf/exp/dpo -cn name key=value`, `-cn exp/dpo/name`, and the same behind
`deepspeed` or `torchrun`, from any directory. What Hydra 1.3 needs help with is absorbed here:

- `-cp` is resolved from the repository root and `conf/` always stays on the search path;
- a launcher's `--local_rank=N` is dropped (LOCAL_RANK is trusted) and flags are moved before overrides;
- no rank makes a run directory of its own: Hydra writes nothing, `runtime.run_dir` does;
- what is wrong in a config or an input ends in one line and an exit code, never in a traceback.

Exit codes: 0 done; 1 some rows failed (listed); 2 bad input or config; 3 server unreachable or stalled;
4 storage; 130/143 stopped by a signal, resumable. An exception class states its own in `exit_code`.
"""

import errno
import os
import signal
import sys
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from types import FrameType
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from runtime import schemas
from runtime.config_errors import CONFIG_ERRORS, describe_config_error
from runtime.life import die_with_owner
from runtime.logs import quiet_libraries

ROOT = Path(__file__).resolve().parent.parent
CONF = ROOT / "conf"
PACKAGES = ("data", "models", "sampling", "rewards", "pipeline", "training", "rl", "analysis", "runtime")
_VALUE_FLAGS = {"-cp", "--config-path", "-cn", "--config-name", "-cd", "--config-dir", "-p", "--package"}
_VALUE_FLAGS |= {"-c", "--cfg"}
_FLAGS = {"-h", "--help", "--hydra-help", "--version", "--resolve", "-i", "--info"}
_QUIET = ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none"]
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}


class BadConfig(ValueError):
    """A config names something that does not exist or does not fit."""

    exit_code = 2


def register_schemas() -> None:
    """Put the root dataclasses where `defaults: [train_schema, ...]` finds them."""
    store = ConfigStore.instance()
    store.store(name="train_schema", node=schemas.TrainConfig)
    store.store(name="rl_schema", node=schemas.RLConfig)
    store.store(name="sample_schema", node=schemas.SampleConfig)
    store.store(name="stage_schema", node=schemas.StageConfig)


def check_target(target: str) -> None:
    """Admit only our own packages and torch.optim: a config must not be able to run anything else."""
    if not (target.split(".")[0] in PACKAGES or target.startswith("torch.optim.")):
        raise BadConfig(
            f"_target_ '{target}' is not admitted: only {', '.join(PACKAGES)} and torch.optim are"
        )


def _targets(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["_target_"]] if isinstance(node.get("_target_"), str) else []
        return own + [target for value in node.values() for target in _targets(value)]
    if isinstance(node, list):
        return [target for value in node for target in _targets(value)]
    return []


def build(node: Any, **arguments: Any) -> Any:
    """Instantiate a config node: the only call of Hydra's `instantiate`.

    Raises BadConfig where a `_target_` is not admitted or does not exist; what the component itself
    refuses keeps its own exception.
    """
    if OmegaConf.is_config(node):
        node = OmegaConf.to_container(node, resolve=True)
    if not isinstance(node, dict) or "_target_" not in node:
        raise BadConfig(f"a component needs a _target_, got {str(node)[:80]!r}")
    for target in _targets(node):
        check_target(target)
    try:
        return instantiate(node, _convert_="all", **arguments)
    except HydraException as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        if hasattr(cause, "exit_code") or isinstance(cause, OSError):
            raise cause from None
        if isinstance(cause, TypeError | ImportError | AttributeError | HydraException):
            detail = " ".join(str(cause).split())
            raise BadConfig(f"cannot build {node['_target_']}: {detail}") from error
        raise


def _normalise_argv(arguments: list[str], default_path: Path) -> list[str]:
    """Flags first, then overrides; `-cp` absolute; `conf/` searched too; no `--local_rank`."""
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


def _resolve_config_path(value: str) -> Path:
    for base in (ROOT, Path.cwd()):
        path = (base / value).resolve()
        if path.is_dir():
            return path
    raise BadConfig(f"-cp {value}: no such folder in {ROOT} (nor below the current folder)")


def _exit_code(error: BaseException) -> int | None:
    """The exit code of an error that is explained in one line; None for one that needs a traceback."""
    if isinstance(error, OSError) and error.errno in _DISK_FULL:
        return 4
    if isinstance(error, CONFIG_ERRORS):
        return 2
    code = getattr(error, "exit_code", None)
    return code if isinstance(code, int) else None


def _report(error: BaseException) -> None:
    if int(os.environ.get("LOCAL_RANK", "0")) != 0:
        return  # the first rank of this machine says it
    if isinstance(error, CONFIG_ERRORS):
        line = describe_config_error(error)
    elif isinstance(error, OSError) and error.errno in _DISK_FULL:
        line = f"{error.filename or 'storage'}: {error.strerror}: free space, then run the same command again"
    else:
        line = str(error)
    print(f"error: {line}", file=sys.stderr, flush=True)


def _stop(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def entrypoint(
    schema: type, config_name: str, config_folder: str = ""
) -> Callable[[Callable[[Any], int | None]], Callable[[], None]]:
    """Make `main(config)` a program. `config` is an instance of `schema`; its return value the exit code.

    `config_name` is used where the command line names none; `config_folder` is the folder below conf/
    in which `-cn` is looked up where there is no `-cp`.
    """

    def decorate(function: Callable[[Any], int | None]) -> Callable[[], None]:
        @wraps(function)
        def main() -> None:
            sys.exit(_run(function, schema, config_name, CONF / config_folder))

        return main

    return decorate


def _run(function: Callable[[Any], int | None], schema: type, config_name: str, folder: Path) -> int:
    os.environ["HYDRA_FULL_ERROR"] = "1"
    quiet_libraries()
    signal.signal(signal.SIGTERM, _stop)
    die_with_owner()
    register_schemas()
    codes: list[int] = []
    errors: list[Exception] = []

    def job(config: DictConfig) -> None:
        try:
            typed = OmegaConf.to_object(config)
            if not isinstance(typed, schema):
                raise BadConfig(f"this program needs a {schema.__name__}: choose another -cn")
            codes.append(function(typed) or 0)
        except Exception as error:  # told below, outside Hydra, which would print lines of its own
            errors.append(error)

    try:
        sys.argv = [sys.argv[0], *_normalise_argv(sys.argv[1:], folder)]
        hydra.main(version_base="1.3", config_path=None, config_name=config_name)(job)()
        if errors:
            raise errors[0]
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        code = _exit_code(error)
        if code is None:
            raise
        _report(error)
        return code
    return max(codes, default=0)


def component_signature(target: str) -> Any:
    """The callable behind a `_target_`, for the test that binds every config."""
    check_target(target)
    module, _, name = target.rpartition(".")
    found = getattr(__import__(module, fromlist=[name]), name)
    return found.func if isinstance(found, partial) else found
