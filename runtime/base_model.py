"""Which model a run's adapters, or its head alone, were trained on: by fingerprint, as another may stand at its path.

A run's provenance holds the fingerprint of its start. An adapter's folder keeps it in `base.json`, which peft's own
files do not say.
"""

import json
from pathlib import Path

import yaml

from espalier.runtime.entrypoint import BadConfig
from espalier.runtime.fingerprints import model_fingerprint, same_weights
from espalier.runtime.run_dir import stored_config

FILE = "base.json"


def base_of_run(run_dir: Path) -> str:
    """Return the fingerprint of the model that a run began with; "" where it does not say, or that was a hub name."""
    origin = run_dir / "provenance.yaml"
    inputs = ((yaml.safe_load(origin.read_text()) or {}) if origin.is_file() else {}).get("inputs") or {}
    return str(inputs.get((stored_config(run_dir).get("model") or {}).get("path"), ""))


def write_base(adapter: Path, fingerprint: str) -> None:
    """Leave the fingerprint of its base beside an adapter, where it is known."""
    if fingerprint:
        (adapter / FILE).write_text(json.dumps({"fingerprint": fingerprint}) + "\n")


def base_of_adapter_folder(adapter: Path) -> str:
    """Return the fingerprint that stands beside an adapter, "" where none does. Raises BadConfig on a file that cannot
    be read."""
    path = adapter / FILE
    try:
        return str(json.loads(path.read_text())["fingerprint"]) if path.is_file() else ""
    except (ValueError, KeyError, TypeError) as error:
        raise BadConfig(f"{path} cannot be read ({error}): remove it to take any base") from None


def check_base(trained_on: str, path: str, what: Path) -> None:
    """Raise BadConfig where another model stands at `path` than `what` was trained on; where either has no fingerprint
    nothing can be said."""
    now = model_fingerprint(path)
    if trained_on and now and not same_weights(trained_on, now):
        raise BadConfig(f"{what} was trained on another model than stands at {path} now: put that one back")
