"""Examples of a training experiment as its model will read them, before anything is paid.

    python run_stage.py -cn training/preview stage.experiment=exp/sft/word_arithmetic \\
        'stage.overrides="model.path=M examples.path=F.jsonl"' output=preview.txt

Of any kind: demonstrations and conversations, preference pairs, step values, judged responses. The file says how many
examples are kept and why others are not, how long they are, and shows some of them token by token, from the first to
the last of the file at even distances: what the loss reads in `[[...]]`, weights and targets behind their tokens
(`data.examples.example_view`). Reads configurations, tokenizer and data, no weights.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from espalier.data.examples.example_view import token_text, view
from espalier.data.left_out import LeftOut, count_left_out
from espalier.data.records import BadInput
from espalier.models.load import load_tokenizer
from espalier.models.tokenizer_checks import check_tokenizer, model_limits
from espalier.runtime.schemas import TrainConfig
from espalier.training.example_cache import files_read, stored_examples
from espalier.training.explain import Context, experiment_config
from espalier.training.guards import check_limits

_BARS = 12  # of the histogram
_WIDTH = 40  # characters of the longest bar
_BETWEEN = "│"  # stands between tokens


@dataclass(frozen=True)
class Preview:
    """`experiment`: a config of a training run, as behind -cn; `overrides`: key=value, as on its command line, in one
    text with blanks between them or in a list. `num_examples` are shown."""

    experiment: str
    overrides: str | list[str] = ""
    num_examples: int = 10

    def __post_init__(self) -> None:
        if self.num_examples < 1:
            raise BadInput(f"stage.num_examples must be at least 1, got {self.num_examples}")

    @cached_property
    def config(self) -> TrainConfig:
        """The experiment's own config."""
        return experiment_config(self.experiment, self.overrides)

    def inputs(self) -> list[str]:
        """Return the files of examples and of the tokenizer."""
        return files_read([self.config.examples], self.config.model["path"])

    def run(self, input_path: str, context: Context) -> str:
        """Return the text. Raises BadInput where an input is given, and what a run would refuse its examples for."""
        if input_path:
            raise BadInput(f"input={input_path}: this stage reads an experiment: leave input empty")
        node, model = self.config.examples, self.config.model["path"]
        path = str(node.get("path", "examples"))
        tokenizer = load_tokenizer(model)
        limits = model_limits(model, tokenizer)
        check_tokenizer(tokenizer, limits)
        with count_left_out() as left_out:
            examples = stored_examples(node, tokenizer)
        check_limits(examples, path, limits, node.get("max_length"))
        facts = examples.facts
        places = sorted({round(place) for place in np.linspace(0, len(examples) - 1, self.num_examples)})
        shown = [view(example, token_text(tokenizer), False, _BETWEEN) for example in examples.take(places)]
        context.counts.update(examples=len(examples), shown=len(shown), left_out=sum(row.number for row in left_out))
        tokens, read = facts["row_tokens"].sum(), facts["loss_tokens"].sum()
        head = f"{self.experiment}: {path}\n{len(examples):,} examples ({examples.kind.__name__}), {tokens:,} tokens, "
        head += f"of which the loss reads {read:,}"
        parts = [head, *_reasons(left_out), "", *length_histogram(facts["length"]), ""]
        return "\n".join(parts) + "\n\n" + "\n\n".join(shown) + "\n"


def _reasons(left_out: list[LeftOut]) -> list[str]:
    return [f"left out: {row.number:,} of {row.total:,} {row.reason}" for row in left_out] or ["nothing is left out"]


def length_histogram(lengths: npt.NDArray[np.int32]) -> list[str]:
    """Return lines: how many examples have from so many to so many tokens, in bins of equal width."""
    low, high = int(lengths.min()), int(lengths.max())
    width = max(1, -(-(high - low + 1) // _BARS))
    counts = np.bincount((lengths - low) // width)
    lines = [f"tokens of an example: {low} to {high}, {lengths.mean():.1f} on average"]
    for place, count in enumerate(counts.tolist()):
        start = low + place * width
        bar = "#" * -(-count * _WIDTH // int(counts.max()))
        lines.append(f"{start:>7} to {start + width - 1:>7} {count:>9,} {bar}".rstrip())
    return lines
