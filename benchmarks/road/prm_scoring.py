"""Published reward models on random weights: whether they are read exactly, whether vLLM's engines say what
transformers say, and how fast both score beside a plain loop that scores a prefix at a time.

    bash scripts/bench.sh road prm_scoring [--solutions N] [--rounds N]

- `published_prms_exact`: of the models of the table, those whose scores are a computation by hand in float32
  (tests/models/test_published_prms.py; generative ones in tests/pipeline/test_generative_verifiers.py);
- `prm_engine_gap`: the largest difference of a score between engines and transformers, over all layouts that engines
  serve as published, and those that they serve as plain classifiers (`prm/export_classifier`);
- `prm_scoring_vs_prefixes`, `prm_engines_vs_prefixes`: solutions per second of the stage, without its start, over
  those of a loop that computes every prefix alone, in the same dtype, on the same solutions.
"""

import argparse
import random
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForTokenClassification

from benchmarks.result import count, figure
from benchmarks.road.published_models import MODELS, build_tokenizers, write_model
from espalier.data.jsonl import read_records, write_records
from espalier.data.records import AnnotatedSolution, StepScores
from espalier.models.load import load_tokenizer

ROOT = Path(__file__).resolve().parents[2]
HOW = "bash scripts/bench.sh road prm_scoring"
ENGINES = ("client=data_parallel_engines", "client.num_engines=1", "client.num_threads=1", "client.max_model_len=512")
AS_PUBLISHED = (
    "math_shepherd",
    "rlhflow",
    "qwen",
    "versa",
    "pure",
    "trl",
    "math_psa",
    "er_prm",
    "math_minos",
    "reasonflux",
)
AS_CLASSIFIERS = ("skywork", "reasoneval", "easy_to_hard", "pqm", "reasonflux_small")
# model of the fact sheet → tests whose passing says that it is exact
EXACT = {
    "Math-Shepherd": "test_math_shepherd",
    "RLHFlow": "test_rlhflow_in_one_pass_is_a_pass_for_every_turn",
    "Qwen2.5-Math-PRM": "test_qwens_head_of_two_layers[qwen",
    "Skywork": "test_skywork_reads_a_value_at_the_newline_behind_every_line",
    "ReasonEval": "test_reasoneval_of_three_classes",
    "Llemma PRM": "test_easy_to_hard_reads_empty_lines_and_the_end",
    "VersaPRM": "test_token_pairs_at_a_tag[versa",
    "PURE": "test_token_classification_of_pieces[pure",
    "TRL": "test_token_classification_of_pieces[trl",
    "Math-psa": "test_token_pairs_at_a_tag[math_psa",
    "ER-PRM": "test_token_pairs_at_a_tag[er_prm",
    "PQM": "test_pqm_reads_a_value_at_its_own_token",
    "MATH-Minos": "test_math_minos_reads_one_logit_behind_a_letter",
    "EurusPRM": "test_eurus_sums_log_ratios_of_two_policies",
    "ReasonFlux-PRM": "test_reasonflux_small_says_one_thing_of_the_whole_from_a_head_in_a_file",
    "generative": "test_a_verdict_per_step_is_the_mean_share_of_yes_over_critiques",
}


def solutions(number: int, seed: int = 0) -> list[AnnotatedSolution]:
    """Return made-up sums, four to eight steps each, four solutions of a problem."""
    draw, found = random.Random(seed), list[AnnotatedSolution]()
    for k in range(number):
        names = draw.sample(["Mia", "Tom", "Ada", "Ben"], 2)
        value = draw.randrange(3, 20)
        steps = [f"{names[0]} begins with {value} apples."]
        for _ in range(draw.randrange(3, 8)):
            more = draw.randrange(2, 9)
            steps.append(f"Then {names[1]} gives {more} more, and {value} + {more} = {value + more}.")
            value += more
        question = f"How many apples does {names[0]} have in the end, after all that happens in story {k // 4}?"
        found.append(AnnotatedSolution(f"s{k}", f"p{k // 4}", question, steps, [None] * len(steps), None, None))
    return found


def stage(name: str, *words: str) -> str:
    """Run a stage; what it says. Raises RuntimeError, with its last lines, where it fails."""
    command = [sys.executable, "run_stage.py", "-cn", name, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-1500:]}")
    return done.stderr


def score(model: Path, layout: str, rows: Path, output: Path, *words: str) -> tuple[list[list[float]], float]:
    """Return the scores of the stage and the seconds that it scored for, its start left out."""
    how = (f"stage.model={model}", f"stage.layout={layout}", *words)
    said = stage("prm/score_steps", f"input={rows}", f"output={output}", *how)
    seconds = re.search(r"scored \d+ solutions in ([\d.]+) s", said)
    assert seconds is not None, said[-500:]
    return [row.scores for row in read_records(StepScores, output)], max(0.05, float(seconds[1]))


def exact() -> tuple[int, list[str]]:
    """Return how many models of the table are exact, and those that are not."""
    with TemporaryDirectory() as folder:
        files = ("tests/models/test_published_prms.py", "tests/pipeline/test_generative_verifiers.py")
        command = [sys.executable, "-m", "pytest", "-n", "0", "-q", f"--junitxml={folder}/tests.xml", *files]
        subprocess.run(command, cwd=ROOT, capture_output=True, timeout=1800, check=False)
        cases = list(ElementTree.parse(f"{folder}/tests.xml").iter("testcase"))
    passed: dict[str, bool] = {}
    for case in cases:
        for model, test in EXACT.items():
            name = str(case.get("name"))
            if name == test or name.startswith((f"{test}-", f"{test}]", f"{test}[")):
                passed[model] = passed.get(model, True) and len(case) == 0
    wrong = [model for model in EXACT if not passed.get(model)]
    return len(EXACT) - len(wrong), wrong


def gaps(folder: Path, layouts: Sequence[str] = (*AS_PUBLISHED, *AS_CLASSIFIERS)) -> dict[str, float]:
    """Return the largest difference of a score between engines and transformers for each layout."""
    tokenizers = build_tokenizers(folder / "tokenizers")
    write_records(folder / "rows.jsonl", solutions(12))
    found = {}
    for layout in layouts:
        model = write_model(layout, folder / layout, tokenizers, hidden_size=128)  # engines take heads of 32 or more
        served = model
        if layout in AS_CLASSIFIERS:
            served = folder / f"{layout}-plain"
            stage("prm/export_classifier", f"stage.model={model}", f"stage.layout={layout}",
                  "stage.has_two_labels=false", f"output={served}")  # fmt: skip
        own, _ = score(model, layout, folder / "rows.jsonl", folder / f"{layout}.jsonl")
        theirs, _ = score(served, layout, folder / "rows.jsonl", folder / f"{layout}-engine.jsonl", *ENGINES)
        pairs = [pair for one, other in zip(own, theirs, strict=True) for pair in zip(one, other, strict=True)]
        found[layout] = max(abs(one - other) for one, other in pairs)
        print(f"{layout}: {found[layout]:.4f} of scores from {min(map(min, own)):.3f} to {max(map(max, own)):.3f}")
    return found


@torch.inference_mode()
def prefixes(model: Path, rows: Sequence[AnnotatedSolution]) -> float:
    """Return the seconds of a loop that computes every prefix of every solution alone, read at its last token."""
    network = AutoModelForTokenClassification.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = load_tokenizer(str(model))
    newline = tokenizer("\n", add_special_tokens=False).input_ids

    def one(row: AnnotatedSolution) -> None:
        ids = [tokenizer.bos_token_id, *tokenizer(row.question, add_special_tokens=False).input_ids]
        for step in row.steps:
            ids += [*tokenizer(step, add_special_tokens=False).input_ids, *newline]
            with torch.autocast("cpu", torch.bfloat16):
                float(torch.softmax(network(torch.tensor([ids])).logits[0, -1].float(), -1)[1])

    one(rows[0])
    began = time.monotonic()
    for row in rows:
        one(row)
    return time.monotonic() - began


def throughput(folder: Path, number: int, rounds: int) -> dict[str, list[float]]:
    """Return solutions per second over those of the loop, in each round, of both ways to score."""
    tokenizers = build_tokenizers(folder / "tokenizers")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
    model = write_model("trl", folder / "speed", tokenizers, **sizes)
    rows = solutions(number, seed=1)
    write_records(folder / "speed.jsonl", rows)
    found: dict[str, list[float]] = {"transformers": [], "engines": []}
    for k in range(rounds):
        plain = prefixes(model, rows)
        for name, words in (("transformers", ()), ("engines", ENGINES)):
            _, seconds = score(model, "trl", folder / "speed.jsonl", folder / f"{name}-{k}.jsonl", *words)
            found[name].append(plain / seconds)
            print(f"round {k}: {name} {seconds:.2f} s, a prefix at a time {plain:.2f} s")
    return found


def measure(words: Sequence[str]) -> dict[str, Any]:
    """Return `{"figures", "detail", "tables"}` of this section of the road benchmark."""
    parser = argparse.ArgumentParser(prog="bash scripts/bench.sh road prm_scoring")
    parser.add_argument("--solutions", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layouts", nargs="*", default=[*AS_PUBLISHED, *AS_CLASSIFIERS], choices=sorted(MODELS))
    args = parser.parse_args(words)
    num_exact, wrong = exact()
    with TemporaryDirectory() as name:
        folder = Path(name)
        differences = gaps(folder, args.layouts)
        ratios = throughput(folder, args.solutions, args.rounds)
    largest = max(differences.values())
    gap = {"value": round(largest, 4), "low": round(min(differences.values()), 4), "high": round(largest, 4),
           "unit": "score", "goal": 0.05, "better": "lower", "met": largest <= 0.05, "how": HOW}  # fmt: skip
    figures = {
        "published_prms_exact": count(num_exact, 16, "models", how=HOW),
        "prm_engine_gap": gap,
        "prm_scoring_vs_prefixes": figure(ratios["transformers"], goal=2.0, how=HOW),
        "prm_engines_vs_prefixes": figure(ratios["engines"], goal=2.0, how=HOW),
    }
    table = {"title": "Engines and transformers on random weights, largest difference of a score",
             "columns": ["layout", "served as", "difference"],
             "rows": [[layout, "published" if layout in AS_PUBLISHED else "a plain classifier", round(value, 5)]
                      for layout, value in differences.items()]}  # fmt: skip
    detail = {"solutions": args.solutions, "rounds": args.rounds, "not_exact": wrong}
    return {"figures": figures, "detail": detail, "tables": [table]}
