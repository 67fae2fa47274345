"""SFT of the 1B shape where real models are larger than others: a vocabulary of 151,936, and rows of 16,384 tokens.

Each is the real program in bf16, as in `benchmarks.gpu.training`, with weights of its own. A step of long rows is
four of them, one at a time; gradient checkpointing is measured beside, which such rows need on smaller GPUs.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu.rows import Row
from benchmarks.gpu.training import SHAPES, Shape, rows_of, run_objective, write_model

CHECKPOINTED = ("model.gradient_checkpointing=true",)


def shapes(is_rehearsal: bool) -> dict[str, tuple[Shape, tuple[str, ...]]]:
    """Return what is trained, and its settings, by its name."""
    base = SHAPES["tiny" if is_rehearsal else "1b"]
    vocabulary, length = (1519, 512) if is_rehearsal else (151_936, 16_384)
    wide, long = replace(base, vocab_size=vocabulary), replace(base, length=length, batch=4, micro=1)
    return {f"vocabulary of {vocabulary:,}": (wide, ()), f"rows of {length:,} tokens": (long, ()),
            f"rows of {length:,} tokens, gradient checkpointing": (long, CHECKPOINTED)}  # fmt: skip


def measure(is_rehearsal: bool, folder: Path) -> Iterator[Row]:
    """Train all of them, one after the other."""
    written: dict[Shape, Path] = {}
    for number, (name, (shape, settings)) in enumerate(shapes(is_rehearsal).items()):
        own = folder / str(number)
        own.mkdir()
        if shape in written:
            (own / "model").symlink_to(written[shape])
        else:
            write_model(own / "model", shape)
        written.setdefault(shape, own / "model")
        yield from rows_of(name, run_objective("sft", shape, own, settings), shape)
