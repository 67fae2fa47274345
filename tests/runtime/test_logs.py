"""What a program says is heard: every logger of the project is one that programs let speak."""

import logging
import re

import pytest

from espalier.runtime import logs
from espalier.runtime.entrypoint import ROOT


def test_no_logger_of_ours_is_muted() -> None:
    """A name that `set_up_logging` does not know would drop every line below a warning."""
    unknown = []
    for path in sorted(ROOT.glob("[a-z]*/**/*.py")):
        folder = path.relative_to(ROOT).parts[0]
        if folder in ("tests", "benchmarks", "espalier", "site", "build"):
            continue
        names = re.findall(r'^log = logging\.getLogger\("([^"]+)"\)', path.read_text(), re.MULTILINE)
        unknown += [f"{path}: {name}" for name in names if name.partition(".")[0] not in logs._OURS]
    assert unknown == []


def test_modules_named_by_themselves_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", root.handlers[:])
    monkeypatch.setattr(root, "level", root.level)
    logs.set_up_logging()
    assert logging.getLogger("espalier.models.precision").isEnabledFor(logging.INFO)
