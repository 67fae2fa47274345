"""Many policies, one after the other: which they are, where their files go, each in a process of its own.

`policies` is a model folder, a pattern (`runs/*/model`), a list of both, or a mapping of names to folders. The
files of a policy are in `<output>/<name>/`: greedy.jsonl, samples.jsonl, problems.jsonl. Its name depends on
its path alone, so that a list can grow. A process each gives all memory of an engine back before the next one
loads, and an engine that crashes takes one policy with it.
"""

import asyncio
import glob
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, ClassVar

import yaml

from espalier.data.jsonl import file_sha256, write_records
from espalier.data.records import BadInput
from espalier.runtime.entrypoint import build
from espalier.runtime.fingerprints import model_fingerprint
from espalier.runtime.process_lifetime import OWNER_VARIABLE
from espalier.runtime.run_dir import name_of, same_origin
from espalier.runtime.schemas import SampleConfig
from espalier.sampling.child_process import group_members
from espalier.sampling.client import Client, Sample, SampleRequest, SamplingParams
from espalier.sampling.job import run_job
from espalier.sampling.job_record import HOW, is_job_finished

log = logging.getLogger("sample")

_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*", re.ASCII)


@dataclass(frozen=True)
class PolicyCheckpoint:
    """A policy to evaluate: its model folder, and the folder of its files."""

    name: str
    path: str
    folder: Path

    def file(self, name: str) -> Path:
        """Return a file of its evaluation."""
        return self.folder / name


def _natural(path: str) -> list[Any]:
    """Sorts step-2 before step-10."""
    return [int(part) if part.isascii() and part.isdigit() else part for part in re.split(r"([0-9]+)", path)]


def _folders(item: str) -> list[str]:
    """Return the model folders of one path or pattern; a run's folder stands for the model/ in it."""
    if Path(item).exists() or not glob.has_magic(item):
        folders = [item]
    else:
        folders = sorted((path for path in glob.glob(item, recursive=True) if Path(path).is_dir()), key=_natural)
        if not folders:
            raise BadInput(f"policies: no folder matches {item}: check the pattern, or train first")
    return [path if not (Path(path) / "model" / "config.json").is_file() else f"{path.rstrip('/')}/model"
            for path in folders]  # fmt: skip


def find_policy_checkpoints(policies: Any, output: str) -> list[PolicyCheckpoint]:
    """Return the policies in their order, each once. Raises BadInput where there is none or two have one name."""
    if isinstance(policies, Mapping):
        named = [(str(name), path) for name, path in policies.items()]
    else:
        items = [policies] if isinstance(policies, str) else policies
        if not isinstance(items, list | tuple) or not all(isinstance(item, str) and item for item in items):
            raise BadInput(
                f"policies must be model folders, patterns or a mapping of names, got {str(policies)[:80]!r}"
            )
        paths = dict.fromkeys(path for item in items for path in _folders(item))
        named = [(name_of(path), path) for path in paths]
    if not named:
        raise BadInput("policies: no policy to evaluate: give policies='[a/model,b/model]'")
    places: dict[str, str] = {}
    for name, path in named:
        if not _NAME.fullmatch(name) or not isinstance(path, str) or not path:
            raise BadInput(f"policies: '{name}' must be letters, digits and -._, and name a folder, got {path!r}")
        if name in places:
            raise BadInput(f"policies: {places[name]} and {path} would both be '{name}': give names, "
                           "policies={one: FOLDER, other: FOLDER}")  # fmt: skip
        places[name] = path
    return [PolicyCheckpoint(name, path, Path(output) / name) for name, path in places.items()]


def sampling_jobs(config: SampleConfig, checkpoint: PolicyCheckpoint) -> list[SampleConfig]:
    """Return the two jobs of an evaluation: one greedy solution of every problem, and `params` as configured."""
    jobs = []
    for name, params in (("greedy", {"n": 1, "temperature": 0.0, "top_p": 1.0}), ("samples", {})):
        output = str(checkpoint.file(f"{name}.jsonl"))
        asked: dict[str, Any] = {"policy": checkpoint.path, "policies": None, "output": output}
        asked["params"] = {**config.params, **params}
        for part, writer in (("client", "engine"), ("server", "server")):
            node = dict(getattr(config, part) or {})
            node.update({key: value for key, value in (("model", checkpoint.path), ("log", f"{output}.{writer}.log"))
                         if node.get(key) is not None})  # fmt: skip
            asked[part] = node or None
        jobs.append(replace(config, **asked))
    return jobs


def is_evaluated(
    config: SampleConfig, checkpoint: PolicyCheckpoint, asked: Mapping[str, str], with_refused: bool = False
) -> bool:
    """Say whether the evaluation stands there: sampled to the end by this config from these weights, asked what `asked`
    says (`asked_inputs`), and evaluated from those files. `with_refused`: also where the engine refused some
    requests."""
    try:
        for job in sampling_jobs(config, checkpoint):
            meta = json.loads(Path(job.output).with_suffix(".meta.json").read_text())
            inputs = {**asked, checkpoint.path: model_fingerprint(checkpoint.path)}
            is_complete = is_job_finished(meta, config.max_failed_share) or (with_refused and meta["counts"]["failed"])
            if not is_complete or same_origin(meta, job, inputs, ignore=HOW):
                return False
        meta = json.loads(checkpoint.file("evaluation.meta.json").read_text())
        is_same = all(file_sha256(path) == digest for path, digest in meta["inputs"].items())
        return is_same and checkpoint.file("evaluation.json").is_file()
    except (OSError, ValueError, KeyError, TypeError):
        return False  # not there, or not ours: its process says what is wrong


OFFLINE = "espalier.sampling.offline_client.OfflineClient"


class MissingSamples(RuntimeError):
    """An engine that returns fewer samples than asked for: no figure may be made of them."""

    exit_code = 3


class KeptClient:
    """An engine of vLLM's own processes that stays loaded from one job to the next; `close_kept` ends it."""

    kept: ClassVar[dict[str, Client]] = {}

    def __init__(self, client: Any, seed: int = 0):
        self.client = client
        self.seed = seed

    async def open(self) -> None:
        """Load, unless the same model is loaded."""
        if self.client.model not in self.kept:
            await self.client.open()
            self.kept[self.client.model] = self.client

    async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
        """As the engine does. Raises MissingSamples where it returned another number."""
        samples = await self.kept[self.client.model].sample(request, params)
        if len(samples) != params.n:
            raise MissingSamples(f"the engine returned {len(samples)} of {params.n} samples of '{request.id}': what "
                                 "was written is not complete")  # fmt: skip
        return samples

    async def close(self) -> None:
        """Nothing yet."""


def close_kept() -> None:
    """Close every engine that was kept."""
    while KeptClient.kept:
        asyncio.run(KeptClient.kept.popitem()[1].close())


def sample_checkpoint(
    config: SampleConfig,
    checkpoint: PolicyCheckpoint,
    load_tokenizer: Callable[[str], Any],
    check_model: Callable[[str], None],
) -> int:
    """Sample what is not there yet, and write problems.jsonl; return the exit code (1 if some requests were refused).

    Raises BadInput where the requests are not for full solutions.
    """
    node = config.requests
    if node.get("_target_") != "espalier.sampling.requests.TrajectoryRequests":
        raise BadInput("an evaluation asks for full solutions: choose requests=trajectories")
    check_model(checkpoint.path)
    codes = []
    try:
        for job in sampling_jobs(config, checkpoint):
            if job.client.get("_target_") == OFFLINE:
                kept = {"_target_": f"{__name__}.KeptClient", "client": {**job.client, "seed": job.seed}}
                job = replace(job, client=kept)
            codes.append(run_job(job, load_tokenizer, check_model))
    finally:
        close_kept()
    problems = build(config.task).problems(node["split"])[node.get("first", 0) :]
    write_records(checkpoint.file("problems.jsonl"), problems[: node.get("limit") or None])
    return max(codes)


def _escaped(value: Any) -> Any:
    """Return the value with nothing in it that a config would resolve once more."""
    if isinstance(value, Mapping):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(item) for item in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def run_alone(program: str, config: SampleConfig, checkpoint: PolicyCheckpoint) -> str:
    """Run `program` on this one policy in a process of its own; "" or what went wrong.

    The process gets `policy` beside `policies`. What it prints is written to evaluate.log and passed on; it and
    what it started end with this one.
    """
    checkpoint.folder.mkdir(parents=True, exist_ok=True)
    log_path = checkpoint.file("evaluate.log")
    mine = replace(config, policy=checkpoint.path, policies={checkpoint.name: checkpoint.path})
    with tempfile.TemporaryDirectory() as folder, log_path.open("wb") as written, log_path.open("rb") as echo:
        settings = {"defaults": ["sample_schema", "_self_"], **_escaped(asdict(mine))}
        (Path(folder) / "policy.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
        process = subprocess.Popen(
            [sys.executable, program, "-cp", folder, "-cn", "policy"],
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
            env={**os.environ, OWNER_VARIABLE: str(os.getpid())},
            start_new_session=True,
        )
        try:
            while process.poll() is None:
                time.sleep(0.1)
                _pass_on(echo)
        finally:
            _end_group(process)
            _pass_on(echo)
    if process.returncode == 0:
        return ""
    lines = log_path.read_text(errors="replace").split("\n")
    errors = [line.partition("error: ")[2] for line in lines if line.startswith("error: ")]
    if process.returncode == 1 and not errors:
        return f"some requests were refused: see {checkpoint.folder}/*.failed.jsonl"
    return errors[-1] if errors else f"exit code {process.returncode}: see {log_path}"


def run_each(
    checkpoints: Sequence[PolicyCheckpoint],
    is_done: Callable[[PolicyCheckpoint], bool],
    run: Callable[[PolicyCheckpoint], str],
) -> dict[str, str]:
    """Run what is not done, one after the other, failures or not; name → what went wrong."""
    failed = {}
    for number, checkpoint in enumerate(checkpoints, 1):
        place = f"{number} of {len(checkpoints)}"
        if is_done(checkpoint):
            log.info("%s is evaluated (%s)", checkpoint.name, place)
            continue
        log.info("evaluating %s: %s (%s)", checkpoint.name, checkpoint.path, place)
        reason = run(checkpoint)
        if reason:
            failed[checkpoint.name] = reason
            log.error("%s failed: %s", checkpoint.name, reason)
    return failed


def _pass_on(echo: IO[bytes]) -> None:
    text = echo.read()
    if text:
        sys.stderr.write(text.decode(errors="replace"))
        sys.stderr.flush()


def _end_group(process: subprocess.Popen[bytes], grace_seconds: float = 15.0) -> None:
    """SIGTERM, then SIGKILL, to what still runs of the process and its children."""
    for number, seconds in ((signal.SIGTERM, grace_seconds), (signal.SIGKILL, 5.0)):
        deadline = time.monotonic() + seconds
        while process.poll() is None or group_members(process.pid):
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                break
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
