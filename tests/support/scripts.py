"""The shell pipelines with a `python` that only writes down what it is asked: what a script would run, in a second."""

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

# It answers three questions, which the scripts go on by: labels.json, where there is none, says "values", a server has
# an address, and a model is trained by the first experiment that is named (espalier.checks.recipe KIND NAME,...).
FAKE_PYTHON = """#!/usr/bin/env bash
if [[ $1 == -m && $2 == espalier.sampling.server ]]; then
  printf '%s\\x1f' "$@" >>"$COMMANDS.servers"
  printf '\\n' >>"$COMMANDS.servers"
  echo http://127.0.0.1:1
  exec sleep 60
fi
if [[ $1 == -m && $2 == espalier.checks.recipe ]]; then
  echo "-cn exp/$3/${4%%,*}"
  exit
fi
printf '%s\\x1f' "$@" >>"$COMMANDS"
printf '\\n' >>"$COMMANDS"
for argument; do
  file=${argument#output=}
  if [[ $argument == output=*/labels.json && ! -e $file ]]; then
    mkdir -p "${file%/*}"
    echo '{"labels": "values"}' >"$file"
  fi
done
"""


@dataclass(frozen=True)
class Script:
    """A checkout in which a script's `python` writes down what it is asked."""

    checkout: Path

    def __call__(self, *settings: str, name: str = "iterate.sh", code: int = 0) -> list[list[str]]:
        """Run a script; what it asked python for, command by command."""
        return self._run("commands", settings, name, code)

    def servers(self, *settings: str, name: str) -> list[list[str]]:
        """Run a script; the servers that it started."""
        return self._run("commands.servers", settings, name, 0)

    def _run(self, wanted: str, settings: Sequence[str], name: str, code: int) -> list[list[str]]:
        logs = {kind: self.checkout.parent / kind for kind in ("commands", "commands.servers")}
        for log in logs.values():
            log.write_text("")
        done = subprocess.run(
            ["bash", str(self.checkout / "scripts" / name), *settings],
            env={"PATH": "/usr/bin:/bin", "COMMANDS": str(logs["commands"])},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == code, done.stderr
        return [line.split("\x1f")[:-1] for line in logs[wanted].read_text().splitlines()]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """`script(*settings)` runs iterate.sh, or another by `name`."""
    root = tmp_path / "checkout"
    shutil.copytree(ROOT / "scripts", root / "scripts")
    (root / "scripts" / "install.sh").write_text("exit 0\n")
    (root / ".venv" / "bin").mkdir(parents=True)
    (root / ".venv" / "bin" / "python").write_text(FAKE_PYTHON)
    (root / ".venv" / "bin" / "python").chmod(0o755)
    return Script(root)
