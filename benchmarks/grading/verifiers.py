"""Verifiers on the cases of their published rules, and hostile programs in the sandbox.

    bash scripts/bench.sh verifiers

A case is one response to one verifier: accepted where the rule accepts it, refused where it refuses. A hostile program
is contained where it is not graded right and leaves no file, process, connection or folder, and ends in time.
"""

import sys
import time
from collections import Counter
from typing import Any

from benchmarks.grading.hostile_programs import PROGRAMS as HOSTILE
from benchmarks.grading.program_escapes import Surroundings
from benchmarks.grading.verifier_cases import ANSWERS, FOLLOWED, PROGRAMS, SCORES
from benchmarks.result import count, write_result
from espalier.data.sandbox.confine import landlock_version
from espalier.data.verifiers.verify import Check, verify, write_checks

HOW = "bash scripts/bench.sh verifiers"


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


def main() -> None:
    """Run all and write the result."""
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
