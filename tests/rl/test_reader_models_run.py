"""Linguistic calibration with readers that are models, from the embedded questions to an iteration of reinforcement
learning: paragraphs, what they state, two trained readers, the reward that asks them. Nothing is downloaded."""

from pathlib import Path

import pytest
import torch

from espalier.data.jsonl import write_records
from espalier.data.records import Problem
from espalier.data.tasks.qa_world import QAWorld, write_response
from espalier.models.load import load_tokenizer
from espalier.models.tiny import build_tiny
from espalier.pipeline.stage import run_stage
from espalier.runtime.entrypoint import build, compose_config
from espalier.runtime.run_dir import open_run_dir
from espalier.runtime.schemas import RLConfig, StageConfig, TrainConfig
from espalier.training.loop_from_config import load_data, make_loop, save_model
from tests.rl.test_rl_recipes_run import check_run, run, shortened
from tests.support.answering_server import AnsweringServer
from tests.support.recipe_rows import trajectories

pytestmark = pytest.mark.slow
TASK = ["task=qa_world", "task.form=paragraph", "task.num_train=60", "task.num_dev=2"]
READERS = "reward.forecasts"


@pytest.fixture(scope="module")
def world() -> QAWorld:
    return QAWorld(num_train=60, num_dev=2, num_test=1, num_demonstrations=240, form="paragraph")


@pytest.fixture(scope="module")
def folder(world: QAWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Problems, a policy, paragraphs as sampled from it, and what both readers learn from them."""
    path = tmp_path_factory.mktemp("road")
    for split in ("train", "dev"):
        staged("list_problems", path / "questions" / f"{split}.jsonl", *TASK, f"stage.split={split}")
    texts = [row.prompt + row.completion for row in world.demonstrations("train")]
    build_tiny(path / "policy", texts, hidden_size=32, num_layers=1, num_heads=2, vocab_size=320, max_length=1024,
               seed=0)  # fmt: skip
    paragraphs = trajectories(world, load_tokenizer(str(path / "policy")))
    write_records(path / "paragraphs.jsonl", paragraphs)
    for target in ("extraction", "forecasting"):
        staged("make_reader_data", path / f"{target}.jsonl", f"input={path}/paragraphs.jsonl", "stage.source=stated",
               f"stage.target={target}", f"stage.problems={path}/questions")  # fmt: skip
    return path


def staged(name: str, output: Path, *overrides: str) -> None:
    """Do what run_stage.py does."""
    output.parent.mkdir(exist_ok=True)
    config = compose_config(StageConfig, f"stage/problems/{name}", [f"output={output}", *overrides])
    assert run_stage(build(config.stage), build(config.task) if config.task else None, config) == 0


def trained(recipe: str, policy: Path, rows: Path, run_dir: Path, *overrides: str) -> Path:
    """Do what trainer_base_ds_mul.py does; the folder of the model."""
    given = [f"model.path={policy}", f"examples.path={rows}", f"output_dir={run_dir}", "model.attention=eager"]
    config = compose_config(TrainConfig, f"exp/{recipe}", [*given, *overrides])
    torch.manual_seed(config.seed)
    tokenizer = load_tokenizer(str(policy))
    loop, _ = make_loop(config, tokenizer, *load_data(config, tokenizer))
    open_run_dir(config.output_dir, config)
    loop.run()
    save_model(loop, tokenizer)
    return run_dir / "model"


@pytest.fixture(scope="module")
def readers(folder: Path) -> list[str]:
    """The settings that name both readers, each trained on its data from a network with a vocabulary for them."""
    body = folder / "reader"
    config = compose_config(
        StageConfig, "stage/training/make_policy",
        [f"input={folder}/extraction.jsonl", f"output={body}", "stage.num_layers=2", "stage.hidden_size=64"],
    )  # fmt: skip
    assert run_stage(build(config.stage), None, config) == 0
    extractor = trained("sft/qa_world", body, folder / "extraction.jsonl", folder / "X",
                        "max_steps=120", "update.batch_size=32", "update.micro_batch_size=32")  # fmt: skip
    forecaster = trained("reward/probability_forecasting", body, folder / "forecasting.jsonl", folder / "F",
                         "max_steps=60", "update.batch_size=32", "update.micro_batch_size=32",
                         "update.learning_rate=1e-3")  # fmt: skip
    return [f"{READERS}.extractor.path={extractor}", f"{READERS}.forecaster.path={forecaster}",
            f"{READERS}.extractor.max_tokens=32", f"{READERS}.problems={folder}/questions"]  # fmt: skip


def test_readers_trained_on_stated_probabilities_are_the_reward_of_a_run(
    world: QAWorld, folder: Path, readers: list[str], tmp_path: Path
) -> None:
    given = [f"model.path={folder}/policy", f"output_dir={tmp_path}/run", "rollout.group_size=4",
             "reward=linguistic_calibration_models", *TASK, *readers]  # fmt: skip
    with AnsweringServer(str(folder / "policy"), 1024) as server:
        assert isinstance(server, AnsweringServer)
        config = shortened(compose_config(RLConfig, "exp/ppo/linguistic_calibration_qa_world", given), server.url)
        problems = [*world.problems("train"), *world.problems("dev")]
        server.learn(world, problems, paragraph)
        run(config)
    row = check_run(tmp_path / "run")
    assert row["update/grad_norm"] > 0
    assert row["reward/num_answers"] > 1, "lists that ended, of what paragraphs offer: two answers each"
    assert 0 < row["reward/gold_probability"] < 1


def paragraph(problem: Problem, gold: str) -> str:
    """A paragraph whose most probable answer is this one."""
    other = next(one for one in problem.info["probabilities"] if one != gold)
    return write_response([(gold, 7), (other, 3)], 10, "paragraph")
