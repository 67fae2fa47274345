"""How fast answers are graded: ours against math-verify in the same run, and GSM8K's plain numbers.

    bash scripts/bench.sh grading [--data ../shared/datasets]

The texts are the 800 recorded solutions of Qwen2.5-Math to 100 problems of MATH, each against its problem's
answer. A: `grade_answer` of kind `response_math`, one call after another; its cache is cleared and its worker
processes are new in every round, their start (once a program) is not counted. B: math-verify in this process,
with its own defaults, SymPy's cache cleared. A B A B, five rounds. GSM8K: the published training answers as
responses, kinds `marked_number` and `response_number`, each text once a round, on one core. `agreement` is the
share of the 800 on which a grader gives the verdict recorded with them (by another rule-based grader).
"""

import argparse
import gzip
import json
import logging
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.result import figure, write_result
from espalier.data.answers import grading
from espalier.data.answers.numbers import extract_marked_number
from espalier.data.answers.pool import POOL
from espalier.data.jsonl import iter_rows
from espalier.data.records import BadInput

HOW = "bash scripts/bench.sh grading"
Pair = tuple[str, str]  # response, gold


def recorded_outputs(data: Path) -> tuple[list[Pair], list[bool]]:
    """Return (response, gold) and the recorded verdict of every recorded solution."""
    path = data / "recorded_outputs" / "qwen25math_math_cot_100x8.jsonl.gz"
    if not path.is_file():
        raise BadInput(f"{path}: no such file: set ESPALIER_DATA, or --data FOLDER, to the folder of published data")
    pairs, verdicts = [], []
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for row in map(json.loads, file):
            pairs += [(text, row["answer"]) for text in row["code"]]
            verdicts += row["score"]
    return pairs, verdicts


def gsm8k_answers(data: Path) -> list[Pair]:
    """Return (answer text, its marked number) of every training row."""
    rows = [row["answer"] for _, row in iter_rows(data / "gsm8k" / "train.jsonl")]
    return [(answer, extract_marked_number(answer) or "") for answer in rows]


def grade_ours(pairs: list[Pair], kind: str) -> tuple[float, list[bool]]:
    """Return (grades a second, verdicts) of one round with an empty cache."""
    grading._cached.cache_clear()
    started = time.perf_counter()
    verdicts = [grading.grade_answer(prediction=text, gold=gold, kind=kind).is_correct for text, gold in pairs]
    return len(pairs) / (time.perf_counter() - started), verdicts


def grade_math_verify(pairs: list[Pair]) -> tuple[float, list[bool]]:
    """Return the same by math-verify in this process."""
    from math_verify import parse, verify
    from sympy.core.cache import clear_cache

    clear_cache()
    started = time.perf_counter()
    verdicts = [bool(verify(parse(f"${gold}$"), parse(text))) for text, gold in pairs]
    return len(pairs) / (time.perf_counter() - started), verdicts


def agreement(verdicts: list[bool], recorded: list[bool]) -> float:
    """Return the share of equal verdicts."""
    return round(sum(one == other for one, other in zip(verdicts, recorded, strict=True)) / len(recorded), 4)


def main() -> None:
    """Measure, write results/grading.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default=os.environ.get("ESPALIER_DATA", "../shared/datasets"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--number", type=int, default=0, help="only so many of each set; 0 is all")
    arguments = parser.parse_args()
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    load = os.getloadavg()[0]
    try:
        pairs, recorded = recorded_outputs(Path(arguments.data))
        marked = gsm8k_answers(Path(arguments.data))[: arguments.number or None]
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if arguments.number:
        pairs, recorded = pairs[: arguments.number], recorded[: arguments.number]
    grade_math_verify(pairs[:20])  # its imports and its grammar's tables
    rates: list[tuple[float, float]] = []
    numbers: dict[str, list[float]] = {"marked_number": [], "response_number": []}
    for turn in range(arguments.rounds):
        POOL.stop()
        POOL.start()
        ours, our_verdicts = grade_ours(pairs, "response_math")
        theirs, their_verdicts = grade_math_verify(pairs)
        rates.append((ours, theirs))
        for kind, found in numbers.items():
            rate, verdicts = grade_ours(marked, kind)
            found.append(rate)
            assert all(verdicts), f"a published GSM8K answer is graded wrong as {kind}"
        print(f"round {turn}: ours {ours:.0f}, math-verify {theirs:.0f} grades/s", file=sys.stderr)
    POOL.stop()
    agreed = {"ours": agreement(our_verdicts, recorded), "math_verify": agreement(their_verdicts, recorded)}
    figures: dict[str, Any] = {
        "grading_vs_math_verify": figure([one / other for one, other in rates], goal=5.0, how=HOW),
        **{
            f"gsm8k_{kind}_rate": {**figure(found, goal=10_000, how=HOW), "unit": "grades/s"}
            for kind, found in numbers.items()
        },
    }
    detail = {
        "texts": f"{len(pairs)} recorded solutions, {len(marked)} GSM8K answers",
        "grades_per_second": [[round(one), round(other)] for one, other in rates],
        "median_grades_per_second": [round(statistics.median(side)) for side in zip(*rates, strict=True)],
        "agreement_with_recorded": agreed,
        "agreement_with_each_other": agreement(our_verdicts, their_verdicts),
        "load_before": round(load, 2),
        "load_after": round(os.getloadavg()[0], 2),
    }
    print(write_result("grading", figures, detail))
    print({name: (found["value"], found["low"], found["high"]) for name, found in figures.items()}, detail)


if __name__ == "__main__":
    main()
