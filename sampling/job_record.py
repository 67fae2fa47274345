"""What stands beside the output of a sampling job: its provenance, what it counted, and what its parts have cost.

`counts` are of the whole output, however often the job was cut: `generated_tokens` are those of the answers since
the last start and of the rows before it (`tokens_before_this_part`). `seconds`, `sampling_seconds` and
`sampling_tokens` (what was generated in them) are measured and summed over the job's parts; a part that was killed
(`kill -9`) is missing.
"""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from espalier.data.jsonl import file_sha256, iter_rows
from espalier.data.records import BadInput, Problem
from espalier.data.shots import passage
from espalier.data.tasks.task import ReadsProblems, Task
from espalier.runtime.fingerprints import input_fingerprints
from espalier.runtime.run_dir import same_origin
from espalier.runtime.schemas import SampleConfig
from espalier.sampling.requests import AsksProblems, RequestSource
from espalier.sampling.runner import Tally

log = logging.getLogger("sample")

MEASURED = ("seconds", "sampling_seconds", "sampling_tokens")  # summed over the parts of a job that was cut

# What may differ between two runs of one file: where and how fast it is asked, not what (the last two: of before).
HOW = ("client", "server", "engine", "max_failed_share", "pilot", "tracking", "concurrency", "stall_seconds")

# How rows say that what was asked for could not be read: what the record kinds of data/ call it.
_READ = ("answer", "text", "answers", "probability", "is_equivalent", "claims", "is_supported", "rating")
_UNREAD = tuple(f'"{name}":null'.encode() for name in _READ)


def within_limit(num_failed: int, num_requests: int, max_failed_share: float) -> bool:
    """Say whether a job of `num_requests` of which `num_failed` failed is finished: that share of them may."""
    return num_failed <= max_failed_share * num_requests + 1e-9  # 0.29 * 100 is a hair below 29


def is_job_finished(meta: Mapping[str, Any], max_failed_share: float) -> bool:
    """Say whether the job of this `X.meta.json` has nothing left to ask, under this limit on what failed."""
    counts = meta.get("counts", {})
    failed, answered = counts.get("failed", 0), counts.get("requests", 0)
    return bool(meta.get("is_complete")) and within_limit(failed, answered + failed, max_failed_share)


def with_part(meta: dict[str, Any], part: Tally, seconds: float) -> dict[str, Any]:
    """Return the provenance with what a part of the job has cost."""
    costs = dict(zip(MEASURED, (seconds, part.seconds, part.tokens), strict=True))
    return {**meta, **{name: round(meta[name] + cost, 2) for name, cost in costs.items()}}


def tokens_before_this_part(output: Path, meta: Mapping[str, Any]) -> int:
    """Return the tokens generated for the rows that the output holds at a resume.

    They are what the parts before have measured, or, where one ended with nobody to write it down, at least the tokens
    in the rows (without what a stop string cut off). Rows of judgements hold no tokens.
    """
    if not output.is_file():
        return 0
    in_rows = sum(len(row.get("response_ids") or ()) for _, row in iter_rows(output))
    return max(int(meta["sampling_tokens"]), in_rows)


def asked_inputs(
    config: SampleConfig, source: RequestSource, task: Task, may_lack_problems: bool = False
) -> dict[str, str]:
    """Return the hashes of all that is asked by and about: files, what a search reads, and, where the task reads its
    problems, those that are asked. Raises BadInput where a file is missing. `may_lack_problems`: of what is finished,
    which needs no problem any more: a line says where they cannot be read."""
    template = getattr(task, "template", None)
    paths = [*source.inputs(), *(template.files() if template is not None else [])]
    missing = [path for path in paths if not Path(path).is_file()]
    if missing:
        raise BadInput(f"{missing[0]}: no such file: run the stage that writes it first")
    inputs = {path: file_sha256(path) for path in paths} | input_fingerprints(config.search or {})
    if isinstance(source, AsksProblems) and isinstance(task, ReadsProblems):
        try:
            inputs[f"{task.name}/{source.split}"] = problems_digest(source.asked_problems(task))
        except BadInput as error:
            if not may_lack_problems:
                raise
            log.warning("whether the problems are still those that were asked is not known: %s", error)
    return inputs


def problems_digest(problems: Sequence[Problem]) -> str:
    """Return a hash of what is asked and what is right, in whatever order: rows are found by id."""
    rows = sorted(json.dumps([row.id, passage(row), row.question, row.options, row.gold]) for row in problems)
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()


def read_stored(meta_path: Path) -> dict[str, Any]:
    """Return the provenance that stands there, {} where none does."""
    found: dict[str, Any] = json.loads(meta_path.read_text()) if meta_path.is_file() else {}
    return found


def stored_record(output: Path, meta_path: Path, config: SampleConfig, inputs: dict[str, str]) -> dict[str, Any]:
    """Return the provenance that stands beside the output, {} for a new file; raises BadInput if it is another's."""
    if not meta_path.is_file():
        if output.exists() and output.stat().st_size:
            raise BadInput(f"{output} exists without {meta_path.name}: it is not of this run: choose another output")
        return {}
    stored: dict[str, Any] = json.loads(meta_path.read_text())
    if not output.exists():
        return {}
    difference = same_origin(stored, config, inputs, ignore=HOW)
    if difference:
        raise BadInput(f"{output} was made otherwise ({difference}): choose another output, or remove it")
    return stored


def count_output(output: Path) -> dict[str, Any]:
    """Return what the rows of the whole output say: how many, how many of them right, the share without an answer."""
    rows = correct = unparseable = 0
    with output.open("ab+") as file:
        file.seek(0)
        for line in file:
            rows += 1
            correct += b'"is_correct":true' in line
            unparseable += any(name in line for name in _UNREAD)
    return {"rows": rows, "correct": correct, "unparseable": round(unparseable / max(rows, 1), 5)}
