"""What goes wrong without a word: does anything say so?

    bash scripts/bench.sh silence [packing] [tokens] [doctor] [clean] [defects]     all parts without names; an hour

    packing   rows of tiny networks of many families, computed together and alone
    tokens    10,000 random texts and cuts through every way from tokens to text, on published tokenizers
    doctor    ten faults, planted one at a time: does doctor.py name each?
    clean     400 sound iterations of reinforcement learning over lengths, models and learning rates: any alarm is false
    defects   the tests that failed on defects of this project, together

A part that is done is kept in experiments/silence/PART.json until it is measured again; the result file and the table
in docs/reliability.md are written from all that are there.
"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.processes.forked import ROOT
from benchmarks.reliability_page import write_page
from benchmarks.result import count, write_result
from benchmarks.silence import clean_runs, defects, doctor_faults, packing_families, token_paths
from espalier.data.jsonl import write_json
from espalier.runtime.run_dir import code_commit

FOLDER = ROOT / "experiments" / "silence"
HOW = "bash scripts/bench.sh silence"
# Of the families that are measured those that were asked for; Falcon-H1 and LFM2 as one.
WANTED = ("llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "gemma3", "mistral", "gpt_oss")
Part = dict[str, Any]  # figures, detail, tables


def packing() -> Part:
    """Try every family, by both kernels; right where both are."""
    found = {kernel: packing_families.measure(kernel) for kernel in ("sdpa", "eager")}
    rows = []
    for name, one in found["sdpa"].items():
        other = found["eager"][name]
        rows.append([name, one.choice, f"{max(one.largest, other.largest):.1e}", one.is_right and other.is_right])
    right = {row[0]: row[3] for row in rows}
    wanted = [right[name] for name in WANTED]
    everyone = [*wanted, right["falcon_h1"] and right["lfm2"]]
    title = "Rows computed together against each row alone: choice, largest difference as a share of the largest number"
    return {
        "figures": {
            "packing_right_on_families": count(sum(wanted), len(WANTED), "families", how=f"{HOW} packing"),
            "packing_right_on_all_families": count(sum(right.values()), len(right), "families", how=f"{HOW} packing"),
        },
        "detail": {"families": rows, "wanted_with_hybrids": sum(everyone)},
        "tables": [{"title": title, "columns": ["family", "choice", "difference", "right"], "rows": rows}],
    }


def tokens() -> Part:
    """Return every tokenizer and path."""
    found = token_paths.measure(10000, seed=0)
    differences = sum(row.differences for row in found)
    rows = [[row.tokenizer, row.path, row.texts, row.cuts, row.differences] for row in found]
    figure = count(differences, 0, f"of {sum(row.cuts for row in found)} cuts", how=f"{HOW} tokens", better="lower")
    columns = ["tokenizer", "path", "texts", "cuts", "differences"]
    return {"figures": {"token_path_differences": figure}, "detail": {"tokens": [asdict(row) for row in found]},
            "tables": [{"title": "From tokens to text", "columns": columns, "rows": rows}]}  # fmt: skip


def doctor() -> Part:
    """Return ten faults and a sound run."""
    folder = Path(tempfile.mkdtemp(prefix="doctor-faults-"))
    found = doctor_faults.measure(folder)
    shutil.rmtree(folder)
    sound, *planted = found
    named = sum(row.named for row in planted)
    rows = [[row.fault, row.check, "yes" if row.named else "no"] for row in planted]
    return {
        "figures": {
            "doctor_faults_named": count(named, len(planted), "faults", how=f"{HOW} doctor"),
            "doctor_false_alarms": count(len(sound.failed), 0, "checks of a sound run", how=f"{HOW} doctor",
                                         better="lower"),
        },
        "detail": {"doctor": [asdict(row) for row in found]},
        "tables": [{"title": "Faults planted for the doctor", "columns": ["fault", "check", "named"], "rows": rows}],
    }  # fmt: skip


def clean() -> Part:
    """Sound runs."""
    figures, detail, tables = clean_runs.measure(FOLDER / "clean_runs")
    return {"figures": figures, "detail": {"clean": detail}, "tables": tables}


def defect_tests() -> Part:
    """Return the tests of every defect."""
    listed = defects.read_defects()
    passed = defects.measure(listed)
    figure = count(sum(passed), len(listed), "defects", how=f"{HOW} defects")
    rows = [{**asdict(defect), "passes": is_good} for defect, is_good in zip(listed, passed, strict=True)]
    return {"figures": {"defects_with_a_failing_test": figure}, "detail": {"defects": rows}, "tables": []}


PARTS: dict[str, Callable[[], Part]] = {
    "packing": packing, "tokens": tokens, "doctor": doctor, "clean": clean, "defects": defect_tests,
}  # fmt: skip


def main() -> None:
    """Measure the parts that are named, and write the result of all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    arguments = parser.parse_args()
    unknown = set(arguments.parts) - set(PARTS)
    if unknown:
        parser.error(f"there is no part {', '.join(sorted(unknown))}: choose of {', '.join(PARTS)}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in arguments.parts or PARTS:
        write_json(FOLDER / f"{name}.json", {**PARTS[name](), "commit": code_commit()})
    there = [name for name in PARTS if (FOLDER / f"{name}.json").is_file()]
    stored: list[Part] = [json.loads((FOLDER / f"{name}.json").read_text()) for name in there]
    figures = {name: value for part in stored for name, value in part["figures"].items()}
    detail = {name: value for part in stored for name, value in part["detail"].items()}
    detail["commits"] = {name: part["commit"] for name, part in zip(there, stored, strict=True)}
    tables = [table for part in stored for table in part["tables"]]
    print(write_result("silence", figures, detail, tables=tables))
    if "defects" in detail:
        write_page("silence.json")


if __name__ == "__main__":
    main()
