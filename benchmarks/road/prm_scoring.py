"""Published reward models on random weights: whether they are read exactly, whether vLLM's engines say what
transformers say, and how fast both score beside a plain loop that scores a prefix at a time.

    bash scripts/bench.sh road prm_scoring [exact] [gaps] [speed] [--layouts L ...] [--solutions N] [--rounds N]

- **exact**: `published_prms_exact`: of the models of the table, those whose scores are a computation by hand in float32
  (tests/models/test_published_prms.py; generative ones in tests/pipeline/test_generative_verifiers.py);
- **gaps**: `scores_transformers_vs_vllm`: the largest difference of a score between engines and transformers, over all
  layouts that engines serve as published, and those that they serve as plain classifiers (`prm/export_classifier`);
- **speed**: `prm_scoring_vs_prefixes`, `prm_engines_vs_prefixes`: solutions per second of the stage, without its start,
  over those of a loop that computes every prefix alone, on the same solutions, one thread each, the median of rounds in
  which all three take turns. The loop's scores must be the stage's.

All sides compute in the precision that the stage chooses on this machine: bfloat16 where that is fast, else float32,
and `detail` says which. Cells that are not named stay as they are in benchmarks/results/road.json.

About 35 minutes on one quiet core: one for exact, one and a half for each of 15 layouts, two for each of five rounds.
What is done is kept in --work: the same command at the same commit, of a tree without changes, on the same machine goes
on from there. A cell is of the day on which the oldest of its results was made.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForTokenClassification

from benchmarks.processes.sides import load_before
from benchmarks.result import RESULTS, count, figure, kept, stamp_of_now
from benchmarks.road.published_models import build_tokenizers, write_model
from espalier.data.jsonl import read_records, write_records
from espalier.data.records import AnnotatedSolution, StepScores
from espalier.models.load import load_tokenizer
from espalier.models.precision import AUTO, BF16, FP32, autocast, is_bf16
from espalier.rewards.engine_scores import LARGEST_GAP
from espalier.runtime.distributed import device

ROOT = Path(__file__).resolve().parents[2]
HOW = "bash scripts/bench.sh road prm_scoring"
CELLS = ("exact", "gaps", "speed")
GOALS = {FP32: 0.001, BF16: LARGEST_GAP}  # of a difference of scores: rounding of the precision, no more
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
LAYOUTS = (*AS_PUBLISHED, *AS_CLASSIFIERS)
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


def precision() -> str:
    """Return the precision of the stage on this machine, bf16 or fp32, in which all sides compute."""
    return BF16 if is_bf16(AUTO, device().type) else FP32


def engine_words() -> tuple[str, ...]:
    """Return the settings of engines that compute in the stage's precision. The stage's own check of engines is left
    out: every score is compared here, and one that differs is a figure, no end."""
    dtype = "bfloat16" if precision() == BF16 else "float32"
    return ("client=data_parallel_engines", "client.num_engines=1", "client.num_threads=1", "client.max_model_len=512",
            f"client.dtype={dtype}", "stage.num_checked=0")  # fmt: skip


def stage(name: str, *words: str) -> str:
    """Run a stage on one thread; what it says. Raises RuntimeError, with its last lines, where it fails."""
    command = [sys.executable, "run_stage.py", "-cn", name, *words]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, timeout=900, check=False)
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


def largest_gap(some: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> float:
    """Return the largest difference of a score. Raises ValueError where they are of other solutions or steps."""
    pairs = [pair for one, other in zip(some, others, strict=True) for pair in zip(one, other, strict=True)]
    return max(abs(one - other) for one, other in pairs)


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


def gap(layout: str) -> dict[str, float]:
    """Return the largest difference of a score between engines and transformers for a layout, and the lowest and the
    highest score."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        rows = folder / "rows.jsonl"
        write_records(rows, solutions(12))
        model = write_model(layout, folder / layout, build_tokenizers(folder / "tokenizers"), hidden_size=128)
        served = model  # engines take heads of 32 dimensions or more
        if layout in AS_CLASSIFIERS:
            served = folder / f"{layout}-plain"
            stage("prm/export_classifier", f"stage.model={model}", f"stage.layout={layout}",
                  "stage.has_two_labels=false", f"output={served}")  # fmt: skip
        own, _ = score(model, layout, rows, folder / "own.jsonl")
        theirs, _ = score(served, layout, rows, folder / "theirs.jsonl", *engine_words())
    found = {"gap": largest_gap(own, theirs), "lowest": min(map(min, own)), "highest": max(map(max, own))}
    print(f"{layout}: {found['gap']:.6f} of scores from {found['lowest']:.3f} to {found['highest']:.3f}", flush=True)
    return found


@torch.inference_mode()
def prefixes(model: Path, rows: Sequence[AnnotatedSolution]) -> tuple[list[list[float]], float]:
    """Return the scores, and the seconds, of a loop that computes every prefix of every solution alone, in the stage's
    precision, and reads it at its last token."""
    place = device()
    torch.set_num_threads(1)
    network = AutoModelForTokenClassification.from_pretrained(model, dtype=torch.float32).eval().to(place)
    tokenizer = load_tokenizer(str(model))
    newline = tokenizer("\n", add_special_tokens=False).input_ids

    def one(row: AnnotatedSolution) -> list[float]:
        ids, found = [tokenizer.bos_token_id, *tokenizer(row.question, add_special_tokens=False).input_ids], []
        for step in row.steps:
            ids += [*tokenizer(step, add_special_tokens=False).input_ids, *newline]
            with autocast(place, AUTO):
                logits = network(torch.tensor([ids], device=place)).logits[0, -1]
            found.append(float(torch.softmax(logits.float(), -1)[1]))
        return found

    one(rows[0])
    began = time.monotonic()
    scores = [one(row) for row in rows]
    return scores, time.monotonic() - began


def speed_round(number: int) -> dict[str, float]:
    """Return the seconds of the loop, of the stage and of the stage with engines on so many solutions, side by side.
    Raises RuntimeError where the loop and the stage do not score alike: their seconds would not compare."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
    with TemporaryDirectory() as name:
        folder = Path(name)
        model = write_model("trl", folder / "model", build_tokenizers(folder / "tokenizers"), **sizes)
        rows = solutions(number, seed=1)
        write_records(folder / "rows.jsonl", rows)
        plain, loop = prefixes(model, rows)
        own, transformers = score(model, "trl", folder / "rows.jsonl", folder / "own.jsonl")
        theirs, engines = score(model, "trl", folder / "rows.jsonl", folder / "theirs.jsonl", *engine_words())
    for who, found in (("transformers", own), ("engines", theirs)):
        if (apart := largest_gap(plain, found)) > GOALS[precision()]:
            raise RuntimeError(f"{who} and the loop of prefixes differ by {apart:.4f} in a score")
    print(f"a prefix at a time {loop:.2f} s, transformers {transformers:.2f} s, engines {engines:.2f} s", flush=True)
    return {"loop": loop, "transformers": transformers, "engines": engines}


def exact_part(num_exact: int, wrong: Sequence[str]) -> dict[str, Any]:
    """Return the figure of exact models, and which are not."""
    figures = {"published_prms_exact": count(num_exact, len(EXACT), "models", how=f"{HOW} exact")}
    return {"figures": figures, "tables": [], "not_exact": list(wrong)}


def gaps_part(found: Mapping[str, Mapping[str, float]], computed_in: str) -> dict[str, Any]:
    """Return the figure and the table of differences between engines and transformers: layout → what `gap` gives. Some
    layouts alone do not reach the goal, however small their differences."""
    gaps, goal = [row["gap"] for row in found.values()], GOALS[computed_in]
    shown = {"value": round(max(gaps), 6), "low": round(min(gaps), 6), "high": round(max(gaps), 6),
             "unit": f"score, {computed_in}, {len(gaps)} of {len(LAYOUTS)} layouts", "goal": goal, "better": "lower",
             "met": max(gaps) <= goal and set(found) == set(LAYOUTS), "how": f"{HOW} gaps"}  # fmt: skip
    rows = [[layout, "published" if layout in AS_PUBLISHED else "a plain classifier", f"{row['gap']:.6f}",
             f"{row['lowest']:.3f} to {row['highest']:.3f}"] for layout, row in found.items()]  # fmt: skip
    table = {"title": f"Engines and transformers on random weights in {computed_in}: largest difference of a score",
             "columns": ["layout", "served as", "difference", "scores"], "rows": rows}  # fmt: skip
    return {"figures": {"scores_transformers_vs_vllm": shown}, "tables": [table]}


def speed_part(rounds: Sequence[Mapping[str, float]], number: int, computed_in: str) -> dict[str, Any]:
    """Return the figures and the table of seconds per round of the three ways to score so many solutions."""
    names = {"transformers": "prm_scoring_vs_prefixes", "engines": "prm_engines_vs_prefixes"}
    figures = {name: figure([row["loop"] / row[way] for row in rounds], goal=2.0, how=f"{HOW} speed")
               for way, name in names.items()}  # fmt: skip
    rows = []
    for way, shown in (("loop", "a prefix at a time"), ("transformers", "transformers"), ("engines", "an engine")):
        each = sorted(number / row[way] for row in rounds)
        rows.append([shown, f"{median(each):.1f}", f"{each[0]:.1f} to {each[-1]:.1f}"])
    table = {"title": f"Solutions scored per second in {computed_in}, median of {len(rounds)} rounds side by side",
             "columns": ["by", "median", "low to high"], "rows": rows}  # fmt: skip
    return {"figures": figures, "tables": [table], "solutions": number, "seconds": list(rounds)}


def merged(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the section's `{"figures", "tables", "cells"}` of the parts of its cells."""
    figures = {name: value for part in parts.values() for name, value in part["figures"].items()}
    return {"figures": figures, "tables": [table for part in parts.values() for table in part["tables"]],
            "cells": dict(parts)}  # fmt: skip


def measure(words: Sequence[str]) -> dict[str, Any]:
    """Return the figures, tables and cells of this section; cells that are not run as they were."""
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=HOW, description=__doc__, formatter_class=about)
    parser.add_argument("cells", nargs="*", choices=[*CELLS, []], help="all where none is named")
    known = list(LAYOUTS)
    parser.add_argument("--layouts", nargs="+", default=known, choices=known)
    parser.add_argument("--solutions", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, default=Path("experiments/prm_scoring"))
    args = parser.parse_args(list(words))
    before: dict[str, Any] = {}
    if (path := RESULTS / "road.json").is_file():
        before = json.loads(path.read_text())["detail"].get("prm_scoring", {}).get("cells", {})
    parts, work, computed_in = dict(before), args.work.resolve(), precision()
    computing = {"precision": computed_in}
    for cell in args.cells or CELLS:
        stamp = {**stamp_of_now(), "precision": computed_in, "load_before": load_before()}
        if cell == "exact":
            found = [kept(work / "exact.json", computing, stamp, exact)]
            part = exact_part(*found[0][0])
        elif cell == "gaps":
            layouts = args.layouts
            found = [kept(work / f"gap-{layout}.json", computing, stamp, partial(gap, layout)) for layout in layouts]
            part = gaps_part({layout: made for layout, (made, _) in zip(layouts, found, strict=True)}, computed_in)
        else:
            settings, make = {**computing, "solutions": args.solutions}, partial(speed_round, args.solutions)
            found = [kept(work / f"speed-{k}.json", settings, stamp, make) for k in range(args.rounds)]
            part = speed_part([made for made, _ in found], args.solutions, computed_in)
        stamps = [own for _, own in found]
        load = max(own["load_before"] for own in stamps)
        parts[cell] = {**part, "made": {**min(stamps, key=itemgetter("date")), "load_before": load}}
    return merged({cell: parts[cell] for cell in CELLS if cell in parts})
