"""A user's walk, as docs/walk.md has it: their chat model in shards, their problems and judged steps, to best of n."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.silence.real_tokenizers import build
from espalier.data.jsonl import read_records, write_records
from espalier.data.records import AnnotatedSolution, Problem, StepScores, Trajectory

ROOT = Path(__file__).resolve().parent.parent.parent
CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# What the embedded tasks are trained, sampled and evaluated with, and nothing of a user's own may take.
TOYS = {"attention: eager", "learning_rate: 0.001", "learning_rate: 0.0001", "sft_weight: 2.0", "max_tokens: 128",
        "max_model_len: 512", "max_length: 512", "WordArithmetic", "base_embedded"}  # fmt: skip


def chat_model(folder: Path) -> Path:
    """Qwen2's architecture with random weights and the first tokens of a published tokenizer, in shards of 2 MB."""
    tokenizer = build("tekken", folder / "tokenizer", num_ranks=16_000).tokenizer
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template, tokenizer.eos_token = CHATML, "<|im_end|>"
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=4096, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder / "model", max_shard_size="2MB")
    tokenizer.save_pretrained(folder / "model")
    assert len(list((folder / "model").glob("*.safetensors"))) > 2
    return folder / "model"


def own_files(folder: Path) -> None:
    """Forty problems, and a judged solution of each: every other one goes wrong in its second step."""
    problems, solutions = [], []
    for number in range(40):
        a, b, is_right = number % 7 + 2, number % 5 + 3, number % 2 == 0
        total = a + b if is_right else a - b
        question = f"Ada has {a} pens and buys {b} more. How many has she?"
        problems.append(Problem(f"own-{number}", question, str(a + b)))
        steps = [f"She starts with {a} pens.\n", f"{a} and {b} make {total}.\n", f"The answer is {total}."]
        labels: list[float | None] = [1.0, *([1.0, 1.0] if is_right else [0.0, 0.0])]
        solutions.append(AnnotatedSolution(
            f"s-{number}", f"own-{number}", question, steps, labels, -1 if is_right else 1, is_right, str(a + b)
        ))  # fmt: skip
    write_records(folder / "problems" / "test.jsonl", problems)
    write_records(folder / "judged.jsonl", solutions)


def run(*words: str) -> str:
    """Run a command from the repository root; its output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def settings_of(node: Any, place: str = "") -> list[str]:
    """Every setting of a resolved config as `key: value`, and every value alone."""
    if isinstance(node, dict):
        return [line for key, value in node.items() for line in settings_of(value, str(key))]
    if isinstance(node, list):
        return [line for value in node for line in settings_of(value, place)]
    return [f"{place}: {node}", str(node).rpartition(".")[2]]


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.timeout(1800)
def test_a_chat_model_of_ones_own_goes_from_judged_steps_to_best_of_n_by_no_setting_of_the_embedded_tasks(
    tmp_path: Path,
) -> None:
    model, work = chat_model(tmp_path), tmp_path / "run"
    own_files(tmp_path)
    recipe = [sys.executable, "-m", "espalier.checks.recipe", "reward", "problem_file", str(model), "1"]
    done = subprocess.run(recipe, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    words = done.stdout.split()
    assert words == ["-cn", "exp/reward/step_values", "size=reward/0.5b"]
    run(sys.executable, "trainer_base_ds_mul.py", *words, "examples=annotated_solutions", "eval_examples=null",
        "prompt@examples.template=chat_math", "evaluation.every=0",
        f"examples.path={tmp_path}/judged.jsonl", "examples.part=all", f"model.path={model}",
        f"output_dir={work}/prm", "update.batch_size=8", "update.micro_batch_size=8")  # fmt: skip
    run("bash", "scripts/evaluate.sh", "task=problem_file", f"task.path={tmp_path}/problems",
        "task.kind=response_math", "task.steps=math", "prompt=chat_math", f"policy={model}", "name=own", f"run={work}",
        "num_problems=8", "num_samples=4", "max_tokens=48", "server.kv_cache_gib=1")  # fmt: skip

    out = work / "evaluation" / "own"
    samples = read_records(Trajectory, out / "samples.jsonl")
    assert len(samples) == 8 * 4
    for row in samples:
        assert row.prompt.startswith(
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nAda"
        )
        assert row.prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")
        assert row.prompt.count("<|im_start|>system") == 1
        assert "How many has she?\n\nReason step by step, and put the final answer into \\boxed{}." in row.prompt
    scores = {row.id: row.scores for row in read_records(StepScores, out / "step_scores.jsonl")}
    assert all(len(scores[row.id]) == len(row.steps) for row in samples)
    figures = json.loads((out / "evaluation.json").read_text())["accuracy"]
    assert {"greedy", "mean", "majority_4", "best_of_4_minimum"} <= set(figures)

    run(sys.executable, "run_stage.py", "-cn", "training/publish_model", f"stage.model={work}/prm/model",
        f"stage.figures=[{out}/evaluation.json]", f"output={work}/prm/card.md")  # fmt: skip
    card = (work / "prm" / "card.md").read_text()
    assert "A process reward model" in card
    assert "| best_of_4_minimum |" in card
    assert str(tmp_path) not in card

    configs = [yaml.safe_load((work / "prm" / "config.yaml").read_text())]
    configs += [json.loads(path.read_text())["config"] for path in out.glob("*.meta.json")]
    assert len(configs) == 5
    for config in configs:
        found = TOYS & {*settings_of(config)}
        assert not found, found
    assert configs[0]["update"]["learning_rate"] == 1e-5
    assert configs[0]["model"]["gradient_checkpointing"]
