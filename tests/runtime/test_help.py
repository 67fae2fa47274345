"""`--help` of the programs, and the explanation of every setting that it is made of."""

import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from espalier.runtime.help import component_help, explanations, topics_of, usage
from espalier.runtime.schemas import RLConfig, SampleConfig, StageConfig, TrainConfig
from tests.support.slow import slow_unless

ROOT = Path(__file__).resolve().parent.parent.parent
STAGES = ROOT / "conf" / "stage"
SCHEMAS = {"main": RLConfig, "trainer_base_ds_mul": TrainConfig, "service_api_caller_v1": SampleConfig,
           "vllm_inference": SampleConfig, "openai_api_caller_v1": SampleConfig, "run_stage": StageConfig,
           "doctor": RLConfig}  # fmt: skip
# The program as __main__, and then whether torch was loaded.
RUN = """
import runpy, sys
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    sys.exit(70 if "torch" in sys.modules else end.code)
"""


def help_of(*words: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, "-c", RUN, *words], cwd=cwd, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), "70: torch was loaded"
    assert list(cwd.iterdir()) == [], "nothing is written"
    return done.stdout


@pytest.mark.parametrize("root", sorted({*SCHEMAS.values()}, key=lambda kind: kind.__name__))
def test_every_setting_is_explained(root: type) -> None:
    found = explanations(root)
    topics = topics_of(root)
    keys = {field.name for field in fields(root)}
    keys |= {f"{topic}.{field.name}" for topic, kind in topics.items() for field in fields(kind)}
    assert found.keys() == keys
    assert not [key for key, text in found.items() if not text]


@pytest.mark.parametrize("program", slow_unless(lambda name: name in ("main", "service_api_caller_v1"), SCHEMAS))
def test_help_names_every_setting_with_its_explanation_and_starts_nothing(program: str, tmp_path: Path) -> None:
    text = help_of(str(ROOT / f"{program}.py"), "--help", cwd=tmp_path)
    one_line = " ".join(text.split())
    for key, meaning in explanations(SCHEMAS[program]).items():
        assert key in topics_of(SCHEMAS[program]) or f"\n  {key}=" in text
        assert meaning in one_line
    assert text.startswith((ROOT / f"{program}.py").read_text()[3:40])
    assert f"python {program}.py " in text


def test_help_shows_the_values_of_the_config_that_is_named(tmp_path: Path) -> None:
    program = str(ROOT / "main.py")
    text = help_of(program, "-cn", "exp/ppo/ppo_rho_math", "rollout.group_size=3", "-h", cwd=tmp_path)
    assert "\n  update.num_epochs=2  (integer)\n        passes over an iteration's rollouts\n" in text
    assert "\n  rollout.group_size=3  (integer)\n" in text
    assert "\n  critic=policy  (component: none, policy, " in text
    assert "\n  output_dir=???  (text)\n" in text


def test_help_of_a_stage_shows_its_own_settings(tmp_path: Path) -> None:
    text = help_of(str(ROOT / "run_stage.py"), "-cn", "training/export_model", "--help", cwd=tmp_path)
    assert "\nstage: " in text
    assert "`run_dir`: of a training run." in text
    assert "\n  stage.run_dir=???  (text)\n  stage.checkpoint=latest  (text)\n  stage.dtype=float32  (text)\n" in text


def test_help_of_run_stage_alone_lists_the_stages(tmp_path: Path) -> None:
    text = help_of(str(ROOT / "run_stage.py"), "--help", cwd=tmp_path)
    names = text.partition("Stages, as -cn NAME")[2].partition(": ")[2].replace(",", "").split()
    assert names == sorted(str(path.relative_to(STAGES).with_suffix("")) for path in STAGES.rglob("*.yaml"))
    assert "stage.first_step=" not in text


def test_the_command_has_the_programs_help() -> None:
    done = subprocess.run([sys.executable, "-c", "import sys; from espalier.command import main; sys.exit(main())",
                           "train", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "\n  update.batch_size=64  (integer)\n" in done.stdout


def test_help_for_a_config_that_does_not_exist_ends_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(ROOT / "main.py"), "-cn", "nosuch", "--help"], cwd=tmp_path,
                          capture_output=True, text=True, timeout=60)  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: config: there is no config 'nosuch'")
    assert done.stderr.count("\n") == 1


def test_usage_is_the_first_paragraph_and_the_examples() -> None:
    text = """Do it.

    Much more is to be said.

        python a.py x=1
    """
    assert usage(text) == "Do it.\n\n    python a.py x=1"


def test_a_topic_without_a_text_is_explained_by_its_class() -> None:
    assert explanations(RLConfig)["samples"] == "Rollouts that are written down to be read (samples/)."
    assert explanations(RLConfig)["critic"] == "the value network; null where the estimator needs none"


@dataclass
class Own:
    """No component of the package."""


def test_settings_of_a_class_come_with_those_of_its_bases() -> None:
    target = "espalier.training.objectives.dpo_positive.PositivePreference"
    text = component_help("objective", {"_target_": target, "penalty": 2.0})
    assert "\n  objective.penalty=2.0" in text
    assert "\n  objective.beta=" in text, "a field of the base class"
    assert component_help("stage", {"_target_": f"{__name__}.Own"}) == f"stage: {__name__}.Own"
