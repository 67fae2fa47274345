"""What finished sampling runs cost, by the provenance beside their outputs (`X.meta.json`)."""

import json
from dataclasses import dataclass
from pathlib import Path

from espalier.data.records import BadInput

START_SECONDS = 30.0  # of a server, where nothing was measured


@dataclass(frozen=True)
class MeasuredRun:
    """A measured sampling run; `seconds` are those of sampling alone, `tokens` what was generated in them (not all of
    the output's where a part of the job was killed)."""

    is_completing: bool
    tokens: float
    seconds: float
    start_seconds: float


def read_run(path: str, start_seconds: float) -> MeasuredRun:
    """Read what a run's provenance says. Runs that do not tell sampling apart are taken to start in `start_seconds`."""
    counts, spent = read_cost(path)
    row = json.loads(Path(path).read_bytes())
    sampling = row.get("sampling_seconds") or max(spent - (start_seconds or START_SECONDS), 0.1 * spent)
    source = str((row.get("config") or {}).get("requests", {}).get("_target_", ""))
    tokens = float(row.get("sampling_tokens") or counts["generated_tokens"])
    return MeasuredRun("Completion" in source, tokens, float(sampling), max(0.0, spent - float(sampling)))


def read_cost(path: str) -> tuple[dict[str, float], float]:
    """Read counts and seconds of a sampling run. Raises BadInput on a file that is not its provenance."""
    try:
        row = json.loads(Path(path).read_bytes())
        counts, seconds = row["counts"], float(row["seconds"])
        return {name: float(counts[name]) for name in ("requests", "rows", "generated_tokens")}, seconds
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path}: is not the meta.json of a sampling run ({error!r})") from None
