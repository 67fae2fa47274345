"""Every training recipe (conf/exp/sft, dpo, reward) takes an optimizer step on a tiny model and rows of its own kind.

A run is made of the program's parts, in this process. Changed for the tiny model are its length (one step of four
examples) and its ranks (no DeepSpeed); experiments for models of any size are given one. Limits on tokens stay: the
rows are far shorter.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from espalier.checks.recipe import NEUTRAL
from espalier.data.left_out import count_left_out
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.models.load import load_tokenizer
from espalier.runtime.entrypoint import CONF, compose_config
from espalier.runtime.run_dir import open_run_dir
from espalier.runtime.schemas import TrainConfig
from espalier.training.loop_from_config import load_data, make_loop, save_model
from tests.support.recipe_rows import write_recipe_rows
from tests.training.test_training import metric_rows

pytestmark = pytest.mark.slow
RECIPES = sorted(
    f"{kind}/{path.stem}"
    for kind in ("sft", "dpo", "reward")
    for path in CONF.glob(f"exp/{kind}/*.yaml")
    if not path.stem.startswith("base_")
)
# Experiments whose learning rate comes with the size of the model.
SIZED = {name: kind for kind, name in NEUTRAL.items() if kind != "ppo"}
SIZES = sorted(
    (recipe, f"{kind}/{path.stem}")
    for recipe, kind in SIZED.items()
    for path in CONF.glob(f"size/{kind}/*.yaml")
    if not path.stem.startswith("lora")
)
ADAPTERS = [
    ("sft/demonstrations", "[sft/7b,sft/lora]"),
    ("sft/demonstrations", "[sft/32b,sft/lora_large]"),
    ("dpo/preference_pairs", "[dpo/7b,dpo/lora]"),
    ("reward/step_values", "[reward/7b,reward/lora]"),
    ("reward/outcome_pairs", "[outcome/7b,outcome/lora]"),
]


@pytest.fixture(scope="module")
def rows(tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the files that recipes read."""
    folder = tmp_path_factory.mktemp("rows")
    task = WordArithmetic(num_train=300, num_dev=20, num_test=20, num_demonstrations=900)
    write_recipe_rows(folder, task, load_tokenizer(str(tiny_policy)))
    return folder


def run_recipe(recipe: str, rows: Path, policy: Path, run_dir: Path, *overrides: str) -> TrainConfig:
    """Train as trainer_base_ds_mul.py does; return the config."""
    keys = ("examples.verify.path", "examples.generate.path") if "verifier" in recipe else ("examples.path",)
    files = [f"{key}=named_below" for key in keys]
    given = [f"model.path={policy}", f"output_dir={run_dir}", *files, *overrides]
    config = compose_config(TrainConfig, f"exp/{recipe}", given)
    assert config.update.batch_size % config.update.micro_batch_size == 0
    config.max_steps, config.deepspeed = 1, None
    config.update.batch_size, config.update.micro_batch_size = 4, 2
    set_files(config.examples, rows)
    if config.eval_examples:
        set_files(config.eval_examples, rows)
    torch.manual_seed(config.seed)
    tokenizer = load_tokenizer(config.model["path"])
    loop, _ = make_loop(config, tokenizer, *load_data(config, tokenizer))
    open_run_dir(config.output_dir, config)
    loop.run()
    save_model(loop, tokenizer)
    return config


def set_files(examples: Any, rows: Path) -> None:
    """Name the file of rows in the format that the source of examples reads."""
    names = {"DemonstrationExamples": "demonstrations", "TrajectoryOutcomeExamples": "trajectories",
             "StepValueExamples": "step_values", "PreferenceExamples": "preferences",
             "JudgedResponseExamples": "judged_responses", "WeightedExamples": "weighted_responses",
             "AnnotatedSolutionExamples": examples.get("format") or "annotated_solutions"}  # fmt: skip
    source = examples["_target_"].rpartition(".")[2]
    if source == "VerifierExamples":
        examples["verify"]["path"] = str(rows / "verifications.jsonl")
        examples["generate"]["path"] = str(rows / "demonstrations.jsonl")
    else:
        examples["path"] = str(rows / f"{names[source]}.jsonl")


def check_run(config: TrainConfig, policy: Path, run_dir: Path) -> None:
    """Look at what a run has left: finite figures, an evaluation where it has examples for one, moved weights."""
    [row] = [row for row in metric_rows(run_dir) if "train/loss" in row]
    assert all(torch.tensor(value).isfinite() for value in row.values()), row
    assert row["train/learning_rate"] > 0
    assert row["train/grad_norm"] > 0
    evaluations = [row["eval/loss"] for row in metric_rows(run_dir) if "eval/loss" in row]
    assert len(evaluations) == bool(config.eval_examples)
    assert all(torch.tensor(value).isfinite() for value in evaluations)
    after, before = (load_file(folder / "model.safetensors") for folder in (run_dir / "model", policy))
    is_reward = "score.weight" in after
    if is_reward:  # its head begins at 0, so that the body moves from the second step on
        assert after["score.weight"].abs().max() > 0
    else:
        assert any(not torch.equal(value, before[name]) for name, value in after.items())


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_training_recipe_takes_a_step_and_leaves_a_model(
    recipe: str, rows: Path, tiny_policy: Path, tmp_path: Path
) -> None:
    size = [f"size={SIZED[recipe]}/7b"] if recipe in SIZED else []
    with count_left_out() as left_out:
        config = run_recipe(recipe, rows, tiny_policy, tmp_path / "run", *size)
    check_run(config, tiny_policy, tmp_path / "run")
    asked_for = ("repeat an earlier one", "belong to problems that are not in part")
    assert [one for one in left_out if not one.reason.startswith(asked_for)] == []


@pytest.mark.parametrize(("recipe", "size"), [*SIZES, *ADAPTERS])
def test_a_recipe_for_models_of_any_size_takes_a_step_with_each_size(
    recipe: str, size: str, rows: Path, tiny_policy: Path, tmp_path: Path
) -> None:
    config = run_recipe(recipe, rows, tiny_policy, tmp_path / "run", f"size={size}")
    check_run(config, tiny_policy, tmp_path / "run")
    assert (tmp_path / "run" / "adapter").is_dir() == ("lora" in size)
