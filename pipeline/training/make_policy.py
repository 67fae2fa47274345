"""Demonstrations → a tiny base policy: a tokenizer trained on their text, and random weights."""

from dataclasses import dataclass

from espalier.data.jsonl import read_records
from espalier.data.records import Demonstration
from espalier.pipeline.stage import StageContext


@dataclass(frozen=True)
class MakeTinyPolicy:
    """The shape of a tiny policy and its `family` (`models.tiny.FAMILIES`); the output is a folder. The tokenizer reads
    the first `num_texts` texts."""

    hidden_size: int
    num_layers: int
    num_heads: int
    vocab_size: int
    max_length: int
    num_texts: int
    seed: int
    family: str = "llama"

    def inputs(self) -> list[str]:
        """None beside the demonstrations."""
        return []

    def run(self, input_path: str, context: StageContext) -> None:
        """Writes the folder itself, complete or not at all."""
        from espalier.models.tiny import build_tiny

        texts = [row.prompt + row.completion for row in read_records(Demonstration, input_path)[: self.num_texts]]
        build_tiny(
            context.output,
            texts,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            vocab_size=self.vocab_size,
            max_length=self.max_length,
            seed=self.seed,
            family=self.family,
        )
