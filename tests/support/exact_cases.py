"""What the tests of exact values share: a task of one problem, and a network small enough for brute force."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from espalier.data.answers.grade import Gold, Grade
from espalier.data.records import Demonstration, Problem
from espalier.data.splitters import split_lines
from espalier.data.tasks.enumerable import Position
from espalier.models.load import load_policy, load_tokenizer
from espalier.models.tiny import build_tiny


class HoldsLetter:
    """A task of one problem: a response is right if it holds an a, an e or an i."""

    name = "holds_letter"

    @staticmethod
    def holds(text: str) -> bool:
        return any(letter in "aei" for letter in text)

    def problems(self, split: str) -> list[Problem]:
        return []

    def demonstrations(self, split: str) -> list[Demonstration]:
        return []

    def prompt(self, problem: Problem) -> str:
        return problem.question

    def split_steps(self, response: str) -> list[str]:
        return split_lines(response)

    def grade(self, gold: Gold, response: str, num_options: int = 0) -> Grade:
        return Grade(None, self.holds(response))

    def position(self, problem: Problem, steps: Sequence[str]) -> Position | None:
        is_right = self.holds("".join(steps))
        return Position((len(steps), is_right), is_right)


def sharp_network(folder: Path) -> tuple[Any, Any]:
    """A network of random weights, made sharper so that its tokens differ in probability; and its tokenizer."""
    build_tiny(
        folder, ["Mia has 5.\n"], hidden_size=16, num_layers=2, num_heads=2, vocab_size=262, max_length=64, seed=5
    )
    model, tokenizer = load_policy(str(folder)), load_tokenizer(str(folder))
    others = torch.ones(262, dtype=torch.bool)
    others[written_tokens(tokenizer)] = False
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(0.02)  # all states have this in common, which the last rows read
        head = model.get_output_embeddings().weight
        head.mul_(15.0)
        head[1], head[others] = 3 / 16, -40 / 16
    return model.eval(), tokenizer


def written_tokens(tokenizer: Any) -> list[int]:
    """The end token and 20 others; no others are probable."""
    return [1, *(tokenizer(letter).input_ids[0] for letter in "\n abcdefghijklm.:+-#")]
