"""What an offline stage is, and how one runs: atomic, with provenance, skipped when it is done.

A stage reads `input` and the files it names itself, and yields the lines of `output` (or returns one JSON
document or one page of text). The output appears under its name only when it is complete; `X.meta.json`
beside it holds the resolved config, the hashes of all inputs, counts and seconds.
"""

import hashlib
import json
import logging
import shutil
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, Protocol

from espalier.data.jsonl import file_sha256, open_atomic, write_json, write_records
from espalier.data.prompts import PromptTemplate
from espalier.data.records import BadInput
from espalier.data.tasks.task import ReadsProblems
from espalier.runtime.fingerprints import input_fingerprints
from espalier.runtime.process_lifetime import exclusive
from espalier.runtime.ranks import is_main_rank, world_size
from espalier.runtime.run_dir import provenance, same_origin
from espalier.runtime.schemas import StageConfig
from espalier.runtime.tracking import Progress

log = logging.getLogger("stage")


@dataclass
class StageContext:
    """What a stage gets beside its own arguments: the task if one is set, the output, progress and counts; `engines`
    that score (`rewards.engine_scores.TokenScorer`) if a client is set. `kept` folders hold what is done of an output
    and are removed when it is complete."""

    task: Any
    output: Path
    line_every_seconds: float
    counts: dict[str, Any] = field(default_factory=dict)
    engines: Any = None
    kept: list[Path] = field(default_factory=list)

    def progress(self, name: str, total: int, unit: str, done: int = 0) -> Progress:
        """Return a progress bar; `done` of the total were so before."""
        return Progress(name, total, unit, done, self.line_every_seconds)


class Stage(Protocol):
    """One offline stage. One whose `inputs` looks for files in folders says so by `finds_inputs = True`."""

    def inputs(self) -> list[str]:
        """Return files read beside `input`."""

    def run(self, input_path: str, context: StageContext) -> Any:
        """Return an iterable of records, a dict (one JSON document), or a str (a page)."""


def run_stage(stage: Stage, task: Any, config: StageConfig, engines: Any = None) -> int:
    """Run unless the output is there already, made of the same inputs by the same config. An output of inputs that a
    stage finds is made anew where there is another one, and those of then are as they were.

    On several ranks every one calls it, for a stage that `runs_on_ranks`; rank 0 writes. Raises BadInput where the
    output exists and was made otherwise, an input is missing, or the stage asks no `engines` or knows no ranks.
    """
    if engines is not None and not getattr(stage, "asks_engines", False):
        raise BadInput(f"{type(stage).__name__} asks no engines: leave client out")
    if world_size() > 1 and not getattr(stage, "runs_on_ranks", False):
        raise BadInput(f"{type(stage).__name__} is the work of one process: run it without launch.py or torchrun")
    with exclusive(Path(config.output)) if is_main_rank() else nullcontext():
        return _run_stage(stage, task, config, engines)


def _run_stage(stage: Stage, task: Any, config: StageConfig, engines: Any) -> int:
    output = Path(config.output)
    paths = [path for path in [config.input, *stage.inputs()] if path]
    for path in paths:
        if Path(path).is_dir():
            raise BadInput(f"{path}: is a folder: name one file in it")
        if not Path(path).is_file():
            raise BadInput(f"{path}: no such file: check the path, or run the stage that writes it")
        if _is_empty(Path(path)):
            log.warning("%s is empty", path)
        _warn_of_part(Path(path))
    if any(output.resolve() == Path(path).resolve() for path in paths):
        raise BadInput(f"{output}: is an input of this stage and would not be written: name another file as output")
    meta_path = output.with_name(output.stem + ".meta.json")
    models = {path: digest for path, digest in input_fingerprints(config).items() if Path(path).is_dir()}
    inputs = models | _of_run(stage) | _of_task(stage, task) | {path: file_sha256(path) for path in paths}
    if _is_there(output):
        _check_same(output, meta_path, config, inputs)
        another = _not_there_before(meta_path, paths) if getattr(stage, "finds_inputs", False) else ""
        if not another:
            return _complete(output, meta_path)
        log.info("%s is made anew: %s was not there before", output, another)
    for path in paths:
        meta = Path(path).with_suffix(".meta.json")
        if meta.is_file() and meta.resolve() == meta_path.resolve():
            raise BadInput(f"{output}: its {meta_path.name} is that of {path} already: choose another name as output")
    started = time.monotonic()
    context = StageContext(task, output, config.tracking.line_every_seconds, engines=engines)
    result = stage.run(config.input, context)
    if not is_main_rank():
        return 0
    if isinstance(result, dict):
        write_json(output, result)
    elif isinstance(result, str):
        with open_atomic(output, "utf-8") as file:
            file.write(result)
    elif result is not None:
        context.counts["rows"] = write_records(output, result)
        if not context.counts["rows"]:
            log.warning("%s has no rows", output)
    for folder in context.kept:
        shutil.rmtree(folder)
    seconds = time.monotonic() - started
    write_json(meta_path, provenance(config, inputs, context.counts, seconds))
    shown = ", ".join(f"{name} {value}" for name, value in context.counts.items())
    log.info("%s: %s (%.1f s)", output, shown or "written", seconds)
    return 1 if context.counts.get("rejected") else 0


def _complete(output: Path, meta_path: Path) -> int:
    """Say that the output is there, and again what was rejected; the exit code: 1 where nothing was left of it."""
    counts = json.loads(meta_path.read_text()).get("counts", {}) if meta_path.is_file() else {}
    rejected = counts.get("rejected")
    if rejected:
        log.warning("%s is complete without %s rows that were rejected", output, rejected)
    elif counts.get("rows") == 0:
        log.warning("%s is complete and has no rows", output)
    else:
        log.info("%s is complete", output)
    return 1 if rejected and not counts.get("rows", 1) else 0


def _is_empty(path: Path, few: int = 4096) -> bool:
    return path.stat().st_size < few and not path.read_bytes().strip()


def _warn_of_part(path: Path) -> None:
    """Warn of an input whose sampling was cut, or ended behind its pilot: the stage would read a part for the whole."""
    meta = path.with_suffix(".meta.json")
    try:
        stored = json.loads(meta.read_bytes()) if meta.is_file() else {}
    except ValueError:
        return  # a file of somebody else's by that name
    if isinstance(stored, dict) and stored.get("is_complete") is False:
        log.warning("%s is not complete: the command that writes it goes on; this stage reads what is there", path)


def _of_run(stage: Stage) -> dict[str, str]:
    """Return hashes of what a stage about a run reads: the run's whole `config`, and the files and models it names; {}
    for other stages."""
    config = getattr(stage, "config", None)
    if not is_dataclass(config) or isinstance(config, type):
        return {}
    text = json.dumps(asdict(config), sort_keys=True, default=str)
    return {"the run's config": hashlib.sha256(text.encode()).hexdigest(), **input_fingerprints(config)}


def _of_task(stage: Stage, task: Any) -> dict[str, str]:
    """Return hashes of the files that the task's prompts and, where the stage names a split or splits, the problems of
    these are read from."""
    template, named = getattr(task, "template", None), getattr(stage, "splits", getattr(stage, "split", ()))
    splits = [named] if isinstance(named, str) else named
    found = [path for split in splits for path in task.files_of(split)] if isinstance(task, ReadsProblems) else []
    found += template.files() if isinstance(template, PromptTemplate) else []
    return {path: _digest(Path(path)) for path in found if Path(path).exists()}


def _digest(path: Path) -> str:
    """Return a hash of a file, or of all files in a folder."""
    if not path.is_dir():
        return file_sha256(path)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    rows = [f"{file.relative_to(path)} {file_sha256(file)}" for file in files]
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()


def _is_there(output: Path) -> bool:
    """Say whether rank 0 finds the output."""
    if world_size() == 1:
        return output.exists()
    from espalier.runtime.distributed import from_main_rank

    return from_main_rank(output.exists)


def _not_there_before(meta_path: Path, paths: list[str]) -> str:
    """Return the first input that the output's provenance does not name, "" where it names all of them."""
    known = json.loads(meta_path.read_text())["inputs"] if meta_path.is_file() else paths
    return next((path for path in paths if path not in known), "")


def _check_same(output: Path, meta_path: Path, config: StageConfig, inputs: dict[str, str]) -> None:
    if not meta_path.is_file():
        if output.is_dir() and not any(output.iterdir()):
            raise BadInput(f"{output}: is an empty folder: name a file that does not exist yet as output, or remove it")
        return  # killed between the output's rename and its provenance: the output is complete
    difference = same_origin(json.loads(meta_path.read_text()), config, inputs, ignore=("client",))
    if difference:
        raise BadInput(f"{output} was made otherwise ({difference}): choose another output, or remove it")
