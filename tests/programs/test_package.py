"""The package as it is installed: its command, and a wheel used from another directory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from espalier import command

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_command_names_every_program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["espalier", "--help"])
    assert command.main() == 0
    shown = capsys.readouterr().out
    assert all(f"espalier {word}" in shown for word in command.PROGRAMS)
    assert {f"{program}.py" for program in command.PROGRAMS.values()} == {path.name for path in ROOT.glob("*.py")}


def test_a_program_that_is_none_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["espalier", "trian"])
    assert command.main() == 2
    assert capsys.readouterr().err == (
        "error: espalier has no program 'trian': choose train, rl, sample, infer, chat, stage, doctor, launch\n"
    )


@pytest.mark.slow
def test_a_wheel_serves_programs_and_functions_from_another_directory(tmp_path: Path) -> None:
    wheel = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), "."]
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    source = tmp_path / "source"
    for name in listed.stdout.splitlines():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            (source / name).symlink_to(os.readlink(ROOT / name))
        elif (ROOT / name).is_file():
            (source / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run(wheel, cwd=source, check=True, capture_output=True, text=True)
    (built,) = tmp_path.glob("*.whl")
    installed, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(built), str(installed)], check=True)
    environment = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, *words], cwd=elsewhere, env=environment, capture_output=True, text=True,
                              check=False, timeout=200)  # fmt: skip

    asked = run("-c", "import espalier; print(espalier.__file__, espalier.rloo_advantages([1.0, 0.0]))")
    assert asked.stdout.split() == [str(installed / "espalier/__init__.py"), "[1.0,", "-1.0]"], asked.stderr
    bare = run("-c", "import data")
    assert "No module named 'data'" in bare.stderr
    words = ("-cn", "problems/make_demonstrations", "task=word_arithmetic", "output=d.jsonl")
    done = run("-c", "from espalier.command import main; raise SystemExit(main())", "stage", *words)
    assert done.returncode == 0, done.stderr
    assert len((elsewhere / "d.jsonl").read_text().splitlines()) == 20_000
