"""Training speed on one CUDA GPU: SFT, DPO and process rewards of a Llama of about 1.1B random parameters, in bf16, and
TRL's SFT and DPO of the same model and tokens beside them where `.venv-bench` is there. `benchmarks.gpu.large` has the
SFT of a vocabulary and of rows as real models have them.

Each objective is the real program (`trainer_base_ds_mul.py`) for some steps, in a process of its own. Tokens per second
are those that the trainer logs (its own padding-free count, a pair's prompt twice), the median over the steps after the
warm-up. Model FLOP utilisation counts, per token, 6 FLOPs for each weight but the input embedding's and 6 x layers x
hidden x length for causal attention (Chowdhery et al. 2022, with the half that a causal mask leaves): no recomputation,
no reference model.
"""

import json
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.gpu.rows import Row
from benchmarks.processes.forked import ROOT
from espalier.data.jsonl import write_records
from espalier.data.records import Demonstration, PreferencePair, StepValues
from espalier.models.tiny import build_tokenizer

# Dense bf16, in TFLOP/s, by a part of the device's name (the makers' data sheets); the first that fits.
PEAK_TERAFLOPS = {"B200": 2250.0, "H200": 989.0, "H100 PCIe": 756.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0,
                  "A6000": 154.8, "4090": 165.2}  # fmt: skip
PROMPT = 16


@dataclass(frozen=True)
class Shape:
    """A model and its examples: `length` tokens each, a batch in micro-batches of `micro`."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    vocab_size: int
    length: int
    batch: int
    micro: int
    num_steps: int
    num_warm: int


SHAPES = {
    "1b": Shape(2048, 5632, 22, 32, 4, 32000, length=2048, batch=32, micro=8, num_steps=8, num_warm=3),
    "100m": Shape(768, 2048, 14, 12, 12, 2048, length=256, batch=8, micro=2, num_steps=1, num_warm=0),
    "tiny": Shape(64, 128, 2, 2, 1, 320, length=64, batch=4, micro=2, num_steps=3, num_warm=1),
}


def digit_tokenizer() -> Any:
    """Return a tokenizer for which k digits are k tokens."""
    return build_tokenizer(["0123456789\n"], 300)


def write_model(folder: Path, shape: Shape) -> None:
    """Random weights and that tokenizer."""
    tokenizer = digit_tokenizer()
    config = LlamaConfig(
        vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers, num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_key_value_heads, max_position_embeddings=shape.length, bos_token_id=None,
        tie_word_embeddings=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def digits(rng: random.Random, count: int) -> str:
    """Return `count` tokens."""
    return "".join(rng.choice("0123456789") for _ in range(count))


@cache
def digit_ids() -> list[int]:
    """Return the tokens of 0 to 9."""
    tokenizer = digit_tokenizer()
    found: list[int] = [tokenizer(digit, add_special_tokens=False).input_ids[0] for digit in "0123456789"]
    assert tokenizer("0123456789", add_special_tokens=False).input_ids == found
    return found


def ids_of(text: str) -> list[int]:
    """Return the tokens of digits."""
    return [digit_ids()[int(digit)] for digit in text]


def demonstrations(shape: Shape) -> list[Demonstration]:
    """Return a short prompt and a response that fills the length with its end token."""
    rng = random.Random(0)
    return [Demonstration(f"d{i}", digits(rng, PROMPT), digits(rng, shape.length - PROMPT - 1))
            for i in range(shape.batch)]  # fmt: skip


def pairs(shape: Shape) -> list[PreferencePair]:
    """Return prompts three times as long as what differs; prompt and one response fill the length."""
    rng, rows = random.Random(1), []
    for i in range(shape.batch):
        prompt, sides = digits(rng, 3 * shape.length // 4), [digits(rng, shape.length // 4 - 1) for _ in range(2)]
        ids = [ids_of(text) for text in (prompt, *sides)]
        row = {"id": f"p{i}", "problem_id": f"p{i}", "kind": "outcome", "prompt": prompt, "chosen": sides[0],
               "rejected": sides[1], "prompt_ids": ids[0], "chosen_ids": ids[1], "rejected_ids": ids[2],
               "chosen_score": 1.0, "rejected_score": 0.0}  # fmt: skip
        rows.append(PreferencePair(**{name: row[name] for name in PreferencePair.__dataclass_fields__ if name in row}))
    return rows


def step_values(shape: Shape, seed: int = 2) -> list[StepValues]:
    """Return trajectories of eight steps."""
    rng, rows = random.Random(seed), []
    ends = [(shape.length - PROMPT) * (k + 1) // 8 for k in range(8)]
    for i in range(shape.batch):
        correct = [rng.randrange(5) for _ in range(7)] + [i % 2]
        prompt, response = digits(rng, PROMPT), digits(rng, ends[-1])
        rows.append(StepValues(
            id=f"t{i}", problem_id=f"t{i}", prompt=prompt,
            steps=[response[start:end] for start, end in pairwise([0, *ends])], prompt_ids=ids_of(prompt),
            response_ids=ids_of(response), step_ends=ends,
            values=[k / n for k, n in zip(correct, [4] * 7 + [1], strict=True)], num_correct=correct,
            num_completions=[4] * 7 + [1], is_correct=bool(i % 2)))  # fmt: skip
    return rows


OBJECTIVES: dict[str, tuple[str, Callable[[Shape], list[Any]]]] = {
    "sft": ("model=policy objective=sft examples=demonstrations", demonstrations),
    "dpo": ("model=policy objective=dpo examples=preferences", pairs),
    "prm": ("model=process_reward model.num_labels=1 objective=process_reward examples=step_values", step_values),
}


def micro_of(kind: str, shape: Shape) -> int:
    """Return examples of a micro-batch; a pair has two rows."""
    return max(1, shape.micro // 2) if kind == "dpo" else shape.micro


def flops_per_token(shape: Shape, has_output_head: bool) -> float:
    """Forward and backward; a process reward model has no output head to speak of."""
    head_size = shape.hidden_size // shape.num_heads
    attention = 2 * shape.hidden_size * (shape.hidden_size + shape.num_key_value_heads * head_size)
    weights = shape.num_layers * (attention + 3 * shape.hidden_size * shape.intermediate_size)
    weights += shape.hidden_size * shape.vocab_size if has_output_head else 0
    return 6.0 * weights + 6.0 * shape.num_layers * shape.hidden_size * shape.length


def train(settings: list[str], report: Path) -> None:
    """In a process of its own: the program, and what the GPU held at most."""
    import runpy

    program = ROOT / "trainer_base_ds_mul.py"
    sys.argv = [str(program), *settings]
    try:
        runpy.run_path(str(program), run_name="__main__")
    except SystemExit as stop:
        if stop.code:
            raise
    found: dict[str, Any] = {"device": "CPU", "peak_gib": 0.0}
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated() / 2**30
        found = {"device": torch.cuda.get_device_name(), "peak_gib": round(peak, 2)}
    report.write_text(json.dumps(found))


def run_objective(name: str, shape: Shape, folder: Path, more: Sequence[str] = ()) -> dict[str, Any]:
    """Run one objective with `more` settings; return its device, the tokens per second of each step after the warm-up,
    its peak memory."""
    groups, make = OBJECTIVES[name]
    write_records(folder / f"{name}.jsonl", make(shape))
    run, report = folder / name, folder / f"{name}.report.json"
    settings = f"""-cn train {groups} model.path={folder}/model examples.path={folder}/{name}.jsonl output_dir={run}
        examples.max_length={shape.length} update.batch_size={shape.batch}
        update.micro_batch_size={micro_of(name, shape)} log_every=1
        max_steps={shape.num_steps} update.learning_rate=1e-5 update.schedule=constant
        update.warmup_steps=0 precision=bf16 seed=0""".split()
    command = [sys.executable, "-m", "benchmarks.gpu.training", str(report), *settings, *more]
    code = subprocess.run(command, cwd=ROOT).returncode  # not a fork: this process may have asked CUDA
    if code:
        raise SystemExit(f"error: the {name} run ended with exit code {code}: its last words stand above")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    speeds = [row["train/tokens_per_second"] for row in rows if "train/tokens_per_second" in row]
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    return {**json.loads(report.read_text()), "speeds": speeds[shape.num_warm :], "losses": [losses[0], losses[-1]]}


def rows_of(name: str, run: dict[str, Any], shape: Shape) -> list[Row]:
    """Return tokens/s, utilisation and peak memory of an objective."""
    speeds, device = sorted(run["speeds"]), str(run["device"])
    speed = statistics.median(speeds)
    ends = f"{speeds[0]:,.0f} to {speeds[-1]:,.0f}, losses {run['losses'][0]:.4g} to {run['losses'][-1]:.4g}"
    peak = next((value for part, value in PEAK_TERAFLOPS.items() if part in device), None)
    used = speed * flops_per_token(shape, name != "prm")
    share = None if peak is None else round(used / (peak * 1e12), 4)
    why = f"of {peak:g} TFLOP/s" if peak else f"the peak of {device} is not known"
    return [
        Row(f"{name}: speed", round(speed, 1), "tokens/s", ends),
        Row(f"{name}: FLOP utilisation", share, "share", why),
        Row(f"{name}: peak memory", run["peak_gib"] or None, "GiB", "" if run["peak_gib"] else "no GPU"),
    ]


def beside_trl(kind: str, shape: Shape, folder: Path, speed: float) -> list[Row]:
    """Return TRL's speed of SFT or DPO on the same model and tokens, and how many times it ours is."""
    python = ROOT / ".venv-bench" / "bin" / "python"
    if not python.exists():
        return [Row(f"{kind}, TRL: speed", None, "tokens/s", "not installed: bash scripts/install_bench.sh")]
    same = json.dumps({**vars(shape), "micro": micro_of(kind, shape)})
    command = [str(python), "-m", "benchmarks.gpu.trl_side", str(folder), kind, same]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        return [Row(f"{kind}, TRL: speed", None, "tokens/s", done.stderr.strip().splitlines()[-1][:200])]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    other = statistics.median(found["speeds"])
    ends = f"losses {found['losses'][0]:.4g} to {found['losses'][-1]:.4g}"
    return [
        Row(f"{kind}, TRL: speed", round(other, 1), "tokens/s", ends),
        Row(f"{kind}, TRL: peak memory", found["peak_gib"] or None, "GiB", "" if found["peak_gib"] else "no GPU"),
        Row(f"{kind}: times TRL's speed", round(speed / other, 3), "ratio"),
    ]


def measure(is_rehearsal: bool, folder: Path) -> Iterator[Row]:
    """Run all objectives."""
    shape = SHAPES["tiny" if is_rehearsal else "1b"]
    write_model(folder / "model", shape)
    for name in OBJECTIVES:
        found = run_objective(name, shape, folder)
        yield from rows_of(name, found, shape)
        if name in ("sft", "dpo"):
            yield from beside_trl(name, shape, folder, statistics.median(found["speeds"]))


if __name__ == "__main__":
    train(sys.argv[2:], Path(sys.argv[1]))
