"""`espalier train -cn exp/sft/word_arithmetic ...`: the programs of the repository by one word, where the package is
installed. What follows the word are the program's own arguments.
"""

import importlib
import importlib.util
import sys

PROGRAMS = {
    "train": "trainer_base_ds_mul",
    "rl": "main",
    "sample": "service_api_caller_v1",
    "infer": "vllm_inference",
    "chat": "openai_api_caller_v1",
    "stage": "run_stage",
    "doctor": "doctor",
    "launch": "launch",
}


def summary(program: str) -> str:
    """Return the first line of a program's docstring, read without importing the program."""
    spec = importlib.util.find_spec(f"espalier.programs.{program}")
    with open(str(spec and spec.origin), encoding="utf-8") as file:
        return file.readline().strip().strip('"')


def programs_usage() -> str:
    """Return a line for every program."""
    lines = [f"  espalier {word:7} {summary(program)}" for word, program in PROGRAMS.items()]
    return "\n".join(["usage: espalier PROGRAM arguments of the program", *lines])


def main() -> int:
    """Run the program that the first argument names; exits as it does, with 2 where there is none of that name."""
    word = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if word in ("-h", "--help"):
        print(programs_usage())
        return 0
    if word not in PROGRAMS:
        print(f"error: espalier has no program '{word}': choose {', '.join(PROGRAMS)}", file=sys.stderr)
        return 2
    program = importlib.import_module(f"espalier.programs.{PROGRAMS[word]}")
    sys.argv = [f"espalier {word}", *sys.argv[2:]]
    found = program.main(sys.argv[1:]) if word == "launch" else program.main()
    return int(found or 0)
