"""Verifiers on the cases of their published rules, on published solutions, and hostile programs in the sandbox.

    bash scripts/bench.sh verifiers [--data FOLDER]

A case is one response to one verifier: accepted where the rule accepts it, refused where it refuses. They are written
here from the rules. Published solutions of GSM8K and MATH are to be accepted with their own gold, and refused with that
of the next problem that has another one; 800 recorded outputs are held against their published verdicts. No published
set of right and wrong responses is known here for the others. A hostile program
is contained where it is not graded right and leaves no file, process, connection or folder, and ends in time.
"""

import argparse
import gzip
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.grading.grading import Pair, agreement, gsm8k_answers, recorded_outputs
from benchmarks.grading.hostile_programs import PROGRAMS as HOSTILE
from benchmarks.grading.program_escapes import Surroundings
from benchmarks.grading.verifier_cases import ANSWERS, FOLLOWED, PROGRAMS, SCORES
from benchmarks.result import count, write_result
from espalier.data.answers.final_answer import find_boxes
from espalier.data.answers.grading import grade_answer
from espalier.data.records import BadInput
from espalier.data.sandbox.confine import landlock_version
from espalier.data.verifiers.verify import Check, verify, write_checks

HOW = "bash scripts/bench.sh verifiers"
NUM_MATH = 1_000
"""Solutions of MATH, the first of its train split."""


def score(name: str, truth: Any, text: str, num_tokens: int | None = None) -> float:
    """Return one verifier's score of a response."""
    (verdict,) = verify(text, write_checks([Check(name, truth)]), num_tokens)
    return verdict.result.score


def graded_cases() -> dict[str, list[bool]]:
    """Return by the verifier's name whether each of its cases comes out as published."""
    found: dict[str, list[bool]] = {}
    for name, truth, good, bad in ANSWERS:
        found.setdefault(name, []).extend(score(name, truth, text) == 1 for text in good)
        found[name].extend(score(name, truth, text) == 0 for text in bad)
    for identity, arguments, follows, breaks in FOLLOWED:
        label = {"instruction_id_list": [identity], "kwargs": [arguments]}
        found.setdefault("ifeval", []).extend(
            [score("ifeval", label, follows) == 1, score("ifeval", label, breaks) == 0]
        )
    for name, truth, text, num_tokens, share in SCORES:
        found.setdefault(name, []).append(abs(score(name, truth, text, num_tokens) - share) < 1e-9)
    found["code"] = [abs(score("code", truth, text) - share) < 1e-9 for text, truth, share in PROGRAMS]
    return found


def math_solutions(data: Path, number: int) -> list[Pair]:
    """Return (solution, content of its last box) of the first rows of MATH."""
    path = data / "math" / "train.jsonl.gz"
    if not path.is_file():
        raise BadInput(f"{path}: no such file: set ESPALIER_DATA, or --data FOLDER, to the folder of published data")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        solutions = [json.loads(line)["solution"] for _, line in zip(range(number), file, strict=False)]
    return [(text, find_boxes(text)[-1][2]) for text in solutions]


def crossed(pairs: list[Pair], kind: str) -> list[Pair]:
    """Return every response with the gold of the next row, without those golds that are equal to its own."""
    after = [*pairs[1:], *pairs[:1]]
    return [(text, other) for (text, gold), (_, other) in zip(pairs, after, strict=True)
            if not grade_answer(prediction=other, gold=gold, kind=kind).is_correct]  # fmt: skip


def published_cases(data: Path, number: int | None = None) -> dict[str, Any]:
    """Return by verifier (accepted, of how many; refused, of how many), and the agreement with recorded verdicts.

    `number`: only so many of each set. Raises BadInput where the data is not there.
    """
    sets = {
        "gsm8k": (gsm8k_answers(data)[:number], "number"),
        "math": (math_solutions(data, number or NUM_MATH), "response_math"),
    }
    found: dict[str, Any] = {}
    for name, (pairs, kind) in sets.items():
        own = [score(name, gold, text) == 1 for text, gold in pairs]
        other = [score(name, gold, text) == 0 for text, gold in crossed(pairs, kind)]
        found[name] = {"accepted": [sum(own), len(own)], "refused": [sum(other), len(other)]}
    outputs, verdicts = (rows[:number] for rows in recorded_outputs(data))
    found["recorded"] = agreement([score("math", gold, text) == 1 for text, gold in outputs], verdicts)
    return found


def published_figures(found: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of `published_cases`."""
    figures = {
        f"published_{name}_{what}": count(*found[name][what], "solutions", how=HOW)
        for name in ("gsm8k", "math")
        for what in ("accepted", "refused")
    }
    agreed = found["recorded"]
    return figures | {
        "published_recorded_agreement": {
            "value": agreed, "low": agreed, "high": agreed, "unit": "of another grader's verdicts", "goal": 0.98,
            "better": "higher", "met": agreed >= 0.98, "how": HOW,
        }
    }  # fmt: skip


def main() -> None:
    """Run all and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default=os.environ.get("ESPALIER_DATA", "../shared/datasets"))
    try:
        published = published_cases(Path(parser.parse_args().data))
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    cases = graded_cases()
    num_cases, num_right = (sum(f(one) for one in cases.values()) for f in (len, sum))
    surroundings = Surroundings()
    try:
        escapes = {case.name: surroundings.run(case) for case in HOSTILE}
        started = time.monotonic()
        for number in range(20):
            score("code", ["assert f(2) == 4"], f"```\ndef f(x): return 2 * x  # {number}\n```")
        seconds = (time.monotonic() - started) / 20
    finally:
        surroundings.close()
    contained = sum(not escape.found for escape in escapes.values())
    for name, escape in escapes.items():
        if escape.found:
            print(f"{name}: {', '.join(escape.found)}", file=sys.stderr)
    figures = {
        "contained": count(contained, len(HOSTILE), "programs", how=HOW),
        "graded_right": count(sum(one.score > 0 for one in escapes.values()), 0, "programs", how=HOW, better="lower"),
        "verifier_cases": count(num_right, num_cases, "cases", how=HOW),
        **published_figures(published),
    }
    detail = {
        "landlock_version": landlock_version(),
        "not_contained": {name: one.found for name, one in escapes.items() if one.found},
        "slowest_seconds": round(max(one.seconds for one in escapes.values()), 2),
        "seconds_per_program_with_one_assert": round(seconds, 3),
        "cases": {name: f"{sum(one)} of {len(one)}" for name, one in sorted(cases.items())},
        "signs": dict(Counter(sign for one in escapes.values() for sign in one.found)),
    }
    print(write_result("verifiers", figures, detail))


if __name__ == "__main__":
    main()
