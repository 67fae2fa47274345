"""Every recipe of reinforcement learning (conf/exp/ppo) makes one iteration on tiny networks, with rows of its task.

A run is made of the program's parts, in this process; the engine is a small server of this process, asked and given
weights over HTTP as vLLM is. It answers with solutions, right ones and wrong ones, in the form that the recipe's task
grades. Changed for that are: the length (one iteration of two problems, and what a group holds where that is more than
4), the ranks (no DeepSpeed, no Ray), who is asked (engines of the run's own become that server; none sleeps) and how
many completions a state gets. Prompts, rewards, estimators, learners and token limits are the recipe's.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from espalier.data.jsonl import write_records
from espalier.data.records import Problem
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.models.load import load_tokenizer
from espalier.models.scalar_head import load_process_reward
from espalier.models.tiny import build_tiny
from espalier.rewards.asked_writer import AskedWriter
from espalier.rl.engines_from_config import make_client, serving
from espalier.rl.trainer_from_config import make_trainer
from espalier.runtime.entrypoint import CONF, build, compose_config
from espalier.runtime.run_dir import open_run_dir
from espalier.runtime.schemas import RLConfig
from tests.rl.test_rl_recipes import composed
from tests.runtime.test_configs import missing_keys
from tests.support.answering_server import AnsweringServer
from tests.support.rl_cases import read_metrics

RECIPES = sorted(path.stem for path in CONF.glob("exp/ppo/*.yaml") if not path.stem.startswith("base_"))
WINDOW = 4096
CHAT = ("{% for m in messages %}<{{ m.role }}>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}")  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a few rows of every file that a recipe's task reads, but for those of public data sets."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "own").mkdir()
    task = WordArithmetic(num_train=40, num_dev=2, num_test=2, num_demonstrations=200)
    for kind in ("train", "dev"):
        write_records(folder / "own" / f"{kind}.jsonl", task.problems(kind))
    return folder


@pytest.fixture(scope="module")
def public(data: Path) -> Path:
    """Rows in the published layouts of GSM8K, MATH and LogiQA 2 in one folder, written here."""
    for folder in ("gsm8k", "MATH/train/algebra", "logiqa2"):
        (data / folder).mkdir(parents=True)
    sums = [(3 + number, 40 + 2 * number) for number in range(60)]
    rows = [{"question": f"Ann has {a} pens and Tom has {b}. How many pens do they have?",
             "answer": f"They have <<{a}+{b}={a + b}>>{a + b} pens.\n#### {a + b}"} for a, b in sums]  # fmt: skip
    (data / "gsm8k" / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for number, (a, b) in enumerate(sums):
        row = {"problem": f"Compute ${a} \\cdot {b}$.", "level": f"Level {1 + number % 5}", "type": "Algebra",
               "solution": f"We multiply, and ${a} \\cdot {b} = \\boxed{{{a * b}}}$."}  # fmt: skip
        (data / "MATH" / "train" / "algebra" / f"{number}.json").write_text(json.dumps(row))
    for name, numbers in (("train", range(40)), ("dev", range(40, 44))):
        asked = [{"id": number, "answer": number % 4, "text": f"There are {number} cats, and all sleep.",
                  "question": "Which is true?", "type": {"Sufficient Conditional Reasoning": True},
                  "options": [f"Case {place} holds." for place in range(4)]} for number in numbers]  # fmt: skip
        (data / "logiqa2" / f"{name}.txt").write_text("".join(f"{json.dumps(row)}\n" for row in asked))
    return data


@pytest.fixture(scope="module")
def models(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `policy` and `prm` (a process reward model of one label with a random head), with a chat template."""
    folder = tmp_path_factory.mktemp("wide")
    task = WordArithmetic(num_train=200, num_dev=20, num_test=20, num_demonstrations=200)
    texts = [row.prompt + row.completion for row in task.demonstrations("train")]
    texts += [path.read_text() for path in sorted((CONF.parent / "docs").glob("*.md"))]  # English, as published tasks
    policy = build_tiny(folder / "policy", texts, hidden_size=64, num_layers=1, num_heads=2, vocab_size=1500,
                        max_length=4096, seed=0)  # fmt: skip
    tokenizer = load_tokenizer(str(policy))
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(policy)
    prm = load_process_reward(str(policy), 1)
    torch.nn.init.normal_(prm.get_parameter("score.weight"), std=0.1, generator=torch.Generator().manual_seed(0))
    prm.save_pretrained(folder / "prm")
    tokenizer.save_pretrained(folder / "prm")
    return folder


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[AnsweringServer]:
    with AnsweringServer(str(models / "policy"), WINDOW) as found:
        assert isinstance(found, AnsweringServer)
        yield found


def solution(task: Any, problem: Problem, gold: str) -> str:
    """Write a solution of two steps with this answer, as the task's prompt asks for it."""
    if hasattr(task, "response_with"):
        if getattr(task, "form", "") == "paragraph":
            return f"It is {gold} (60%) or else something (20%).\n"
        return str(task.response_with(gold))
    kind = getattr(task, "kind", "marked_number")
    return {
        "marked_number": f"First we add.\n#### {gold}",
        "response_math": f"First we add. Then we are done. The answer is $\\boxed{{{gold}}}$.",
        "choice": f" It follows.\nAction 1: Look.\nThought 2: Done.\nAction 2: Finish[The answer is {gold}.]",
        "short_answer": f"It is likely so. The answer is {gold}.",
    }[kind]


def overrides_of(recipe: str, models: Path, data: Path) -> list[str]:
    """Give the recipe what it leaves open, by the names of the settings, and cut its size."""
    config = composed(f"exp/ppo/{recipe}")
    given = []
    for key in missing_keys(OmegaConf.to_container(config)):
        value: Any = {"output_dir": "named_below", "model.path": models / "policy", "task.path": data / "own",
                      "task.kind": "marked_number", "reward.forecasts.extractor.path": models / "policy",
                      "reward.terms.verifier.path": models / "policy",
                      "reward.terms.verifier.form.path": models / "policy",
                      "reward.terms.process.verdicts.path": models / "policy"}.get(key, models / "prm")  # fmt: skip
        given.append(f"{key}={value}")
    group = config.rollout.group_size
    if config.filter is None and group > 4:
        given.append("rollout.group_size=4")
    if "completions_per_state" in config.advantage:
        given.append("advantage.completions_per_state=2")
    return given


def shortened(config: RLConfig, url: str) -> RLConfig:
    """Return the config for one iteration of two problems, by the server at `url`."""
    config.launcher, config.deepspeed, config.server = None, None, None
    config.num_iterations = 1 + (config.critic.num_warmup_iterations if config.critic else 0)
    client = OmegaConf.to_container(composed("rl").client, resolve=False)
    assert isinstance(client, dict)
    config.client = {**client, "base_url": url, "in_flight_each": 8}
    config.probes.on_fault = "warn"  # the answers are not drawn by their probabilities
    config.engine.sleeps, config.engine.concurrency = False, 8
    config.rollout.num_problems = 4 if config.rollout.group_size == 1 else 2
    config.evaluation.num_problems, config.evaluation.every = 2, 1
    config.update = replace(config.update, minibatch_size=4, micro_batch_size=2)
    return config


def run(config: RLConfig) -> None:
    """Do what main.py does."""
    torch.manual_seed(config.seed)
    server, client = make_client(config)
    trainer = make_trainer(config, load_tokenizer(config.model["path"]), server, client)
    open_run_dir(config.output_dir, config)
    with serving(server, client):
        trainer.run()
    trainer.save_model()


# The verifiers of these recipes write in a vLLM engine of their own, which starts for real.
WRITTEN = ("grpo_rationales_word_arithmetic", "process_grpo_verdicts_word_arithmetic")
QUICK = ("vineppo_deepseek_math",)
"""In the ordinary suite; the others are slow."""
# An untrained verifier writes no verdict, an untrained model takes every response for right or none: all rewards are
# alike, and a critic that begins with values of 0 leaves no difference either.
ALIKE = ("grpo_rationales_word_arithmetic", "linguistic_calibration_factuality")
CASES = [
    pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK) + [pytest.mark.server] * (name in WRITTEN))
    for name in RECIPES
]


@pytest.mark.parametrize("recipe", CASES)
def test_a_recipe_of_reinforcement_learning_makes_an_iteration(
    recipe: str, models: Path, data: Path, server: AnsweringServer, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if any(name in recipe for name in ("gsm8k", "math", "logiqa")):
        request.getfixturevalue("public")
    size = ["size=ppo/7b"] if recipe == "grpo_problem_file" else []
    given = [*overrides_of(recipe, models, data), *size, f"output_dir={tmp_path}/run"]
    given = [one for one in given if one != "output_dir=named_below"]
    config = shortened(compose_config(RLConfig, f"exp/ppo/{recipe}", given), server.url)
    if "path" in config.task and not config.task["_target_"].endswith(".ProblemFile"):
        config.task["path"] = str(data)
    if "num_train" in config.task:
        config.task.update(num_train=40, num_dev=2, num_test=2)
    task = build(config.task)
    problems = [*task.problems("train"), *task.problems("dev")]
    server.learn(task, problems, lambda problem, gold: solution(task, problem, gold))
    run(config)
    row = check_run(tmp_path / "run")
    assert row["update/grad_norm"] > 0 or recipe in ALIKE


@pytest.mark.slow
@pytest.mark.server
def test_answers_are_extracted_by_an_engine(
    models: Path, data: Path, server: AnsweringServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine of the reward's own, for real; what an untrained model writes is no list, and rarely ends."""
    recipe = "linguistic_calibration"
    given = [one for one in overrides_of(recipe, models, data) if one != "output_dir=named_below"]
    own = ["reward=linguistic_calibration_engines", "reward.forecasts.extractor.asking.client.num_engines=1",
           "reward.forecasts.extractor.asking.params.max_tokens=16"]  # fmt: skip
    composed_config = compose_config(RLConfig, f"exp/ppo/{recipe}", [*own, *given, f"output_dir={tmp_path}/run"])
    config = shortened(composed_config, server.url)
    asked: list[list[str | None]] = []
    write = AskedWriter.__call__
    monkeypatch.setattr(
        AskedWriter, "__call__", lambda self, prompts: asked.append(found := write(self, prompts)) or found
    )
    task = build(config.task)
    problems = [*task.problems("train"), *task.problems("dev")]
    server.learn(task, problems, lambda problem, gold: solution(task, problem, gold))
    run(config)
    assert list((tmp_path / "run").glob("extractor*.log"))
    assert sum(map(len, asked)) > 0
    assert check_run(tmp_path / "run")["update/grad_norm"] > 0


def check_run(run_dir: Path) -> dict[str, float]:
    """Return the metrics of the last iteration: finite figures, right and wrong answers; and there is a model."""
    row = [row for row in read_metrics(run_dir) if "rollout/reward" in row][-1]
    assert all(torch.tensor(value).isfinite() for value in row.values()), row
    assert 0 < row["rollout/accuracy"] < 1
    assert (run_dir / "model" / "model.safetensors").is_file()
    return row
