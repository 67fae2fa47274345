"""What a training experiment amounts to, before it is run, with the numbers of its real data.

    python run_stage.py -cn training/explain stage.experiment=exp/sft/word_arithmetic \\
        'stage.overrides="model.path=M examples.path=F.jsonl"' stage.num_ranks=2 output=explain.json

Reads configurations, tokenizer and data, no weights. Says which examples are kept and why others are not, how a
step is cut into micro-batches and ranks, how many steps, epochs, warm-up steps, evaluations and checkpoints that
makes, and how many tokens, padding apart. Says what memory a rank needs, part by part (training.memory_plan), and
refuses a run that the GPU here, or one of stage.memory_gib, cannot hold. The guards of a run (training.guards) speak
here too.
"""

import logging
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from espalier.data.batches.loader import Loader
from espalier.data.batches.packing import Layout, PlacedRows, place_rows
from espalier.data.examples.example_facts import num_loss_tokens, token_rows
from espalier.data.examples.stored_examples import StoredExamples
from espalier.data.examples.token_examples import OutcomeExample
from espalier.data.left_out import count_left_out
from espalier.data.records import BadInput
from espalier.models.load import load_tokenizer
from espalier.models.tokenizer_checks import Limits, check_tokenizer, model_limits
from espalier.runtime.entrypoint import compose_config
from espalier.runtime.schemas import TrainConfig
from espalier.training.example_cache import EVALUATION, TRAINING, files_read, stored_examples
from espalier.training.guards import (
    check_amount,
    check_evaluations,
    check_held_out,
    check_limits,
    check_margins,
    check_targets,
)
from espalier.training.loop import is_due
from espalier.training.memory_of_run import (
    MicroBatch,
    check_memory_gib,
    explain_memory,
    micro_batch_of,
    train_setup,
    warn_of_memory,
)
from espalier.training.memory_plan import Setup, Work, work_of
from espalier.training.schedule import num_steps, num_warmup_steps, rate_at
from espalier.training.step_in_backward import check_step_in_backward

log = logging.getLogger("stage")
_WARNED_STEPS = 20
"""A run does not wait for more of them to be laid out before it begins."""


def experiment_config(experiment: str, overrides: str | list[str]) -> TrainConfig:
    """Return the config of a training run that `-cn experiment overrides` would get, the overrides in one text or in a
    list."""
    words = shlex.split(overrides) if isinstance(overrides, str) else overrides
    return compose_config(TrainConfig, experiment, words, unused=("output_dir",))


class Context(Protocol):
    """What the stage needs of its context."""

    counts: dict[str, Any]


@dataclass(frozen=True)
class Explain:
    """`experiment`: a config of a training run, as behind -cn; `overrides`: key=value, as on its command line,
    in one text with blanks between them or in a list.

    `num_ranks`: processes of the run. Batches of at most `max_counted_steps` steps, from the first on, are made and
    counted; the tokens of a longer run are scaled up. `memory_gib`: of the GPU of a rank (0: the one that
    is here, else none): a run that needs more is refused.
    """

    experiment: str
    overrides: str | list[str] = ""
    num_ranks: int = 1
    max_counted_steps: int = 1000
    memory_gib: float = 0.0

    def __post_init__(self) -> None:
        check_memory_gib(self.memory_gib)
        if self.num_ranks < 1 or self.max_counted_steps < 1:
            raise BadInput(f"stage.num_ranks and stage.max_counted_steps must be at least 1, got {self.num_ranks} and "
                           f"{self.max_counted_steps}")  # fmt: skip

    @cached_property
    def config(self) -> TrainConfig:
        """The experiment's own config."""
        return experiment_config(self.experiment, self.overrides)

    def inputs(self) -> list[str]:
        """Return the files of examples and of the tokenizer, and the model's config."""
        return files_read([self.config.examples, self.config.eval_examples], self.config.model["path"])

    def run(self, input_path: str, context: Context) -> dict[str, Any]:
        """Return one JSON document, and log a line for each part of it. Raises BadInput where an input is given."""
        if input_path:
            raise BadInput(f"input={input_path}: this stage reads an experiment: leave input empty")
        config = self.config
        check_step_in_backward(config, self.num_ranks)
        tokenizer = load_tokenizer(config.model["path"])
        limits = model_limits(config.model["path"], tokenizer)
        check_tokenizer(tokenizer, limits)
        examples, about = _load(config.examples, tokenizer, limits)
        summary: dict[str, Any] = {"experiment": self.experiment, "examples": about}
        eval_examples: Sequence[Any] = []
        if config.eval_examples:
            eval_examples, summary["eval_examples"] = _load(config.eval_examples, tokenizer, limits, EVALUATION)
            check_held_out(examples, eval_examples, str(config.eval_examples.get("path")))
        check_evaluations(config.evaluation.every, eval_examples)
        check_amount(examples, config.update.batch_size)
        check_targets(examples, config.objective.get("hard_above"), str(config.examples.get("path")))
        check_margins(examples, config.objective, config.examples, str(config.examples.get("path")))
        loaders, budget = loaders_of(config, examples, self.num_ranks), config.update.micro_batch_tokens
        steps = num_steps(config, len(examples))
        summary["batch"] = {
            "examples_per_step": config.update.batch_size,
            "ranks": self.num_ranks,
            "micro_batches_per_rank_and_step": len(loaders[0].micro_batches(0)),
            "examples_per_micro_batch": None if budget else config.update.micro_batch_size,
            "tokens_per_micro_batch": budget or None,
        }
        summary["steps"] = _steps(config, steps, len(examples))
        summary["evaluations"] = _evaluations(config, steps, len(eval_examples))
        summary["checkpoints"] = _checkpoints(config, steps)
        counted, layout = min(steps, self.max_counted_steps), config.update.layout
        summary["tokens"] = _tokens(loaders, steps, counted, layout)
        for line in describe(summary):
            log.info("%s", line)
        num_read = steps * config.update.batch_size / len(examples)
        work = largest_work(loaders, counted, layout)
        summary["memory"] = explain_memory(
            lambda is_gpu: train_setup(config, work, self.num_ranks, num_read, is_gpu),
            _largest_batch(config, examples),
            self.memory_gib,
        )
        context.counts.update(steps=steps, examples=len(examples), tokens=summary["tokens"]["tokens"])
        return summary


def loaders_of(config: TrainConfig, examples: StoredExamples, num_ranks: int) -> list[Loader]:
    """Return the loader of every rank."""
    sizes = (config.update.batch_size, config.update.micro_batch_size, config.seed)
    return [Loader(examples, *sizes, rank, num_ranks, config.update.micro_batch_tokens) for rank in range(num_ranks)]


def _largest_batch(config: TrainConfig, examples: StoredExamples) -> MicroBatch:
    return micro_batch_of(config.update, int(examples.facts["computed_tokens"].max()))


def warn_of_training_memory(config: TrainConfig, examples: StoredExamples, num_ranks: int) -> None:
    """Warn of a training that does not fit the GPU that is here (`warn_of_memory`), by its first `_WARNED_STEPS`."""

    def planned() -> tuple[Setup, MicroBatch]:
        steps = num_steps(config, len(examples))
        num_read = steps * config.update.batch_size / len(examples)
        work = largest_work(loaders_of(config, examples, num_ranks), min(steps, _WARNED_STEPS), config.update.layout)
        return train_setup(config, work, num_ranks, num_read, is_gpu=True), _largest_batch(config, examples)

    warn_of_memory(planned)


def _load(node: Any, tokenizer: Any, limits: Limits, role: str = TRAINING) -> tuple[StoredExamples, dict[str, Any]]:
    """Return examples as a run would train on them, and a summary of them."""
    path = str(node.get("path", "examples"))
    with count_left_out() as left_out:
        examples = stored_examples(node, tokenizer, role)
        check_limits(examples, path, limits, node.get("max_length"))
    facts = examples.facts
    lengths = np.sort(facts["length"])
    tokens = int(facts["row_tokens"].sum())
    if examples.kind is OutcomeExample:
        tokens += sum(sum(map(len, rows_of(example)[1:])) for example in examples)
    return examples, {
        "path": path,
        "kind": examples.kind.__name__,
        "kept": len(examples),
        "left_out": [asdict(row) for row in left_out],
        "tokens": tokens,
        "tokens_that_the_loss_reads": int(facts["loss_tokens"].sum()),
        "length": {"shortest": int(lengths[0]), "median": int(lengths[len(lengths) // 2]),
                   "mean": round(float(lengths.mean()), 1), "longest": int(lengths[-1]),
                   "max_length": node.get("max_length"), "positions": limits.positions},
    }  # fmt: skip


def rows_of(example: Any) -> list[list[int]]:
    """Return all token rows of an example, with the response to another prompt that KTO lends it."""
    rows = token_rows(example)
    if isinstance(example, OutcomeExample) and example.mismatched_ids:
        rows = [*rows, [*example.ids[: example.prompt_length], *example.mismatched_ids]]
    return rows


def _steps(config: TrainConfig, steps: int, num_examples: int) -> dict[str, Any]:
    why = f"max_steps={config.max_steps}"
    if config.max_steps <= 0:
        why = f"ceil({num_examples} examples x {config.num_epochs:g} epochs / {config.update.batch_size})"
    return {
        "steps": steps,
        "why": why,
        "examples_seen": steps * config.update.batch_size,
        "epochs": round(steps * config.update.batch_size / num_examples, 4),
        "warmup_steps": num_warmup_steps(config, steps),
        "schedule": config.update.schedule,
        "learning_rate": {"first": rate_at(0, steps, config),
                          "highest": max(rate_at(step, steps, config) for step in range(steps)),
                          "last": rate_at(steps - 1, steps, config)},
    }  # fmt: skip


def _evaluations(config: TrainConfig, steps: int, num_examples: int) -> dict[str, Any]:
    due = [step for step in range(1, steps + 1) if step == steps or is_due(step, config.evaluation.every)]
    due = due if num_examples else []
    return {"evaluations": len(due), "at_steps": _ends(due), "examples_each": num_examples}


def _checkpoints(config: TrainConfig, steps: int) -> dict[str, Any]:
    due = [step for step in range(1, steps) if is_due(step, config.checkpoints.save_every)]
    rule = config.checkpoints
    return {"checkpoints": len(due), "at_steps": _ends(due), "kept_newest": max(1, rule.keep),
            "kept_best": rule.keep_best, "best_metric": rule.best_metric if rule.keep_best else None}  # fmt: skip


def _ends(steps: Sequence[int]) -> list[int]:
    """Return the first three and the last one."""
    return [*steps[:3], *steps[3:][-1:]]


def _tokens(loaders: Sequence[Loader], steps: int, counted: int, layout: str) -> dict[str, Any]:
    """Return tokens of `counted` steps over all ranks, padded as rows of a micro-batch are to its longest, scaled to
    all. `computed_share`: of the tokens of all rows, what the run's own layout computes (auto: as shared, which the run
    chooses unless its network cannot)."""
    per_step, padded_rows, read, longest, computed = [], 0, 0, 0, 0
    for step in range(counted):
        groups = [group for loader in loaders for group in loader.micro_batches(step) if group]
        lengths = [[len(row) for example in group for row in rows_of(example)] for group in groups]
        per_step.append(sum(map(sum, lengths)))
        sizes = [max(rows) * len(rows) for rows in lengths]
        padded_rows, longest = padded_rows + sum(sizes), max(longest, *sizes)
        read += sum(num_loss_tokens(example) for group in groups for example in group)
        computed += sum(_placed(group, layout).ids.numel() for group in groups)
    total = sum(per_step)
    return {
        "tokens": round(total * steps / counted),
        "tokens_that_the_loss_reads": round(read * steps / counted),
        "tokens_per_step": {"mean": round(total / counted, 1), "least": min(per_step), "most": max(per_step)},
        "padding_share_of_padded_batches": round(1 - total / padded_rows, 4),
        "largest_padded_micro_batch": longest,
        "layout": layout,
        "computed_share": round(computed / total, 4),
        "counted_steps": counted,
    }


def _placed(group: Sequence[Any], layout: str) -> PlacedRows:
    """Return the rows of a micro-batch as the run would place them (auto: as shared)."""
    rows = [row for example in group for row in rows_of(example)]
    return place_rows(rows, Layout("shared" if layout == "auto" else layout))


def largest_work(loaders: Sequence[Loader], counted: int, layout: str) -> Work:
    """Return the micro-batch of the first `counted` steps that computes the most, over all ranks."""
    passes = len(loaders[0].micro_batches(0))
    works = (
        work_of(_placed(group, layout), sum(map(num_loss_tokens, group)), passes)
        for step in range(counted) for loader in loaders for group in loader.micro_batches(step) if group
    )  # fmt: skip
    return max(works, key=lambda work: work.tokens + work.copied_keys)


def describe(summary: dict[str, Any]) -> list[str]:
    """Return the document as lines to read."""
    batch, steps = summary["batch"], summary["steps"]
    lines = [line for name in ("examples", "eval_examples") for line in _describe_examples(name, summary.get(name))]
    each = f"{batch['examples_per_micro_batch']} examples"
    if batch["tokens_per_micro_batch"]:
        each = f"at most {batch['tokens_per_micro_batch']} tokens (in the first step)"
    lines.append(
        f"batch: {batch['examples_per_step']} examples a step = {batch['ranks']} ranks x "
        f"{batch['micro_batches_per_rank_and_step']} micro-batches x {each}"
    )
    lines.append(
        f"steps: {steps['steps']:,} ({steps['why']}), {steps['examples_seen']:,} examples, {steps['epochs']:g} epochs"
    )
    rate = steps["learning_rate"]
    is_cut = steps["warmup_steps"] > steps["steps"]
    lines.append(
        f"learning rate: {steps['warmup_steps']} warm-up steps from {rate['first']:.3g} to {rate['highest']:.3g}, "
        + ("which the run does not get through" if is_cut else f"then {steps['schedule']} to {rate['last']:.3g}")
    )
    for name in ("evaluations", "checkpoints"):
        part = summary[name]
        shown = list(map(str, part["at_steps"]))
        shown = [*shown[:3], *(["..."] if part[name] > 4 else []), *shown[3:]]
        lines.append(f"{name}: {part[name]}" + (f" (after steps {', '.join(shown)})" if shown else ""))
    return [*lines, _describe_tokens(summary["tokens"])]


def _describe_examples(name: str, part: dict[str, Any] | None) -> list[str]:
    if part is None:
        return []
    length = part["length"]
    first = (
        f"{name}: {part['kept']:,} kept ({part['kind']}), {part['tokens']:,} tokens, of which the loss reads "
        f"{part['tokens_that_the_loss_reads']:,}; {length['shortest']} to {length['longest']} tokens long, "
        f"{length['mean']} on average"
    )
    rest = [f"{name}: left out: {row['number']:,} of {row['total']:,} {row['reason']}" for row in part["left_out"]]
    return [first, *rest]


def _describe_tokens(tokens: dict[str, Any]) -> str:
    each = tokens["tokens_per_step"]
    return (
        f"tokens: {tokens['tokens']:,} in all, {each['mean']:,} a step ({each['least']:,} to {each['most']:,}); "
        f"padded batches are {100 * tokens['padding_share_of_padded_batches']:.1f} % padding, the largest "
        f"micro-batch takes {tokens['largest_padded_micro_batch']:,}; update.layout={tokens['layout']} computes "
        f"{100 * tokens['computed_share']:.1f} % of the tokens"
    )
