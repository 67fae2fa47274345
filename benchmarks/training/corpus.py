"""What all sides train on: a tiny Llama, invented demonstrations, pairs and judged trajectories, once as the
product's own files and once as token ids for sides that are not the product.

Words are drawn by a random table of successors, so that there is something to learn. Every word is one token.

- SFT: 8 to 512 tokens, mean about 200 (beta(1.2, 1.95) over that range), a third of them prompt.
- Pairs: the shared prompt, which ends mid-solution, is three times as long as each of the two sides (16 to 64 tokens).
- Trajectories: 3 to 12 steps of 8 to 24 tokens after a prompt of 30 to 90, each step judged right or wrong.

These are the `Lengths` of `benchmarks.training`; other networks (`benchmarks.sizes.peers`) have their own.
"""

import json
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForTokenClassification

from benchmarks.training.settings import SETTINGS, Settings, write_settings
from espalier.data.jsonl import write_records
from espalier.data.records import Demonstration, PreferencePair, StepValues
from espalier.models.load import load_tokenizer
from espalier.models.tiny import build_tiny

SHAPE = {"hidden_size": 256, "num_layers": 3, "num_heads": 4, "vocab_size": 1024, "max_length": 1024, "seed": 0}
NUM_WORDS = 300
KINDS = ("sft", "dpo", "prm")


@dataclass(frozen=True)
class Sizes:
    """Examples of each kind."""

    sft: int
    dpo: int
    prm: int


@dataclass(frozen=True)
class Lengths:
    """Tokens, from and to: of a demonstration, one side of a pair, a trajectory's prompt and each of its steps; the
    number of `steps`."""

    demonstration: tuple[int, int] = (8, 512)
    side: tuple[int, int] = (16, 64)
    prompt: tuple[int, int] = (30, 90)
    steps: tuple[int, int] = (3, 12)
    step: tuple[int, int] = (8, 24)


class Language:
    """Words of four or six letters and, for each, four words that may follow."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
        words: set[str] = set()
        while len(words) < NUM_WORDS:
            words.add("".join(self.rng.choices(syllables, k=self.rng.choice([2, 3]))))
        self.words = sorted(words)
        self.next = {word: self.rng.choices(self.words, k=4) for word in self.words}

    def text(self, num_words: int) -> str:
        """So many words, each with a space before it."""
        word, found = self.rng.choice(self.words), []
        for _ in range(num_words):
            word = self.rng.choice(self.next[word])
            found.append(f" {word}")
        return "".join(found)


def write_small(folder: Path, texts: Sequence[str]) -> None:
    """The network of `SHAPE` and its tokenizer of words."""
    build_tiny(folder, texts, **SHAPE)


def build(
    folder: Path,
    sizes: Sizes,
    seed: int = 0,
    lengths: Lengths = Lengths(),
    settings: Mapping[str, Settings] = SETTINGS,
    write_policy: Callable[[Path, Sequence[str]], None] = write_small,
) -> None:
    """Write `policy/`, `prm/`, the files of every kind and the `settings` of the comparison. `write_policy` writes a
    network and a tokenizer made for the texts it is given, every word of which is one token."""
    language = Language(seed)
    every_word = "".join(f" {word}" for word in language.words)
    write_policy(folder / "policy", [every_word] * 4)
    write_settings(folder, settings)
    tokenizer = load_tokenizer(str(folder / "policy"))
    _write_process_reward_model(folder)
    demonstrations = [_demonstration(language, index, lengths) for index in range(sizes.sft)]
    pairs = [_pair(language, tokenizer, index, lengths) for index in range(sizes.dpo)]
    trajectories = [_trajectory(language, tokenizer, index, lengths) for index in range(sizes.prm)]
    write_records(folder / "sft.jsonl", demonstrations)
    write_records(folder / "dpo.jsonl", pairs)
    write_records(folder / "prm.jsonl", trajectories)
    _write_ids(folder / "sft.ids.jsonl", [_demonstration_ids(tokenizer, row) for row in demonstrations])
    _write_ids(folder / "dpo.ids.jsonl", [_pair_ids(row) for row in pairs])
    _write_ids(folder / "prm.ids.jsonl", [_trajectory_ids(row) for row in trajectories])


def _write_process_reward_model(folder: Path) -> None:
    """The policy's body with a random head of two classes, so that all sides start from the same one."""
    torch.manual_seed(1)
    model = AutoModelForTokenClassification.from_pretrained(folder / "policy", num_labels=2, dtype=torch.float32)
    model.save_pretrained(folder / "prm")
    for path in (folder / "policy").glob("*token*"):
        shutil.copy(path, folder / "prm")


def _demonstration(language: Language, index: int, lengths: Lengths) -> Demonstration:
    shortest, longest = lengths.demonstration
    length = shortest + round((longest - shortest) * language.rng.betavariate(1.2, 1.95))
    prompt = max(2, length // 3)
    return Demonstration(f"sft-{index}", language.text(prompt), language.text(length - prompt - 1))


def _pair(language: Language, tokenizer: Any, index: int, lengths: Lengths) -> PreferencePair:
    length = language.rng.randint(*lengths.side)
    texts = [language.text(3 * length), *(language.text(length - 1) for _ in range(2))]
    prompt, chosen, rejected = (tokenizer(text, add_special_tokens=False).input_ids for text in texts)
    end = [tokenizer.eos_token_id]
    ids = (prompt, chosen + end, rejected + end)
    return PreferencePair(f"dpo-{index}", f"dpo-{index}", "step", *texts, *ids, 1.0, 0.0)


def _trajectory(language: Language, tokenizer: Any, index: int, lengths: Lengths) -> StepValues:
    rng = language.rng
    prompt = language.text(rng.randint(*lengths.prompt))
    steps = [language.text(rng.randint(*lengths.step)) for _ in range(rng.randint(*lengths.steps))]
    parts = [tokenizer(step, add_special_tokens=False).input_ids for step in steps]
    ends = [sum(len(part) for part in parts[: count + 1]) for count in range(len(parts))]
    # A step is right where its first word stands in the first half of the vocabulary: something to learn.
    right = [int(step.split()[0] < language.words[NUM_WORDS // 2]) for step in steps]
    ids = (tokenizer(prompt, add_special_tokens=False).input_ids, [token for part in parts for token in part])
    values = [float(label) for label in right]
    counts = (right, [1] * len(right), bool(right[-1]))
    return StepValues(f"prm-{index}", f"prm-{index}", prompt, steps, *ids, ends, values, *counts)


def _demonstration_ids(tokenizer: Any, row: Demonstration) -> dict[str, Any]:
    prompt = tokenizer(row.prompt, add_special_tokens=False).input_ids
    completion = [*tokenizer(row.completion, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    return {"id": row.id, "input_ids": prompt + completion, "labels": [-100] * len(prompt) + completion}


def _pair_ids(row: PreferencePair) -> dict[str, Any]:
    texts = {"prompt": row.prompt, "chosen": row.chosen, "rejected": row.rejected}
    sides = {"chosen_ids": row.chosen_ids, "rejected_ids": row.rejected_ids}
    return {"id": row.id, **texts, "prompt_ids": row.prompt_ids, **sides}


def _trajectory_ids(row: StepValues) -> dict[str, Any]:
    ids = row.prompt_ids + row.response_ids
    labels = [-100] * len(ids)
    for end, label in zip(row.step_ends, row.num_correct, strict=True):
        labels[len(row.prompt_ids) + end - 1] = label
    return {"id": row.id, "input_ids": ids, "labels": labels}


def _write_ids(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_ids(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return the examples of a kind as token ids."""
    return [json.loads(line) for line in (folder / f"{kind}.ids.jsonl").read_text().splitlines()]


def tokens_of(row: dict[str, Any]) -> int:
    """Return tokens of an example without padding; those of a pair are its two rows."""
    if "input_ids" in row:
        return len(row["input_ids"])
    return 2 * len(row["prompt_ids"]) + len(row["chosen_ids"]) + len(row["rejected_ids"])
