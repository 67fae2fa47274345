"""TRL's side of `benchmarks.road.trl`: what its own trainers make of rows, and what they read from our folders.

    .venv-bench/bin/python -m benchmarks.road.trl_side FOLDER

FOLDER/asked.json holds questions, FOLDER/answered.json gets their answers in order. A question names a `trainer` (sft,
dpo, kto, reward, grpo, prm), a `tokenizer` or `model` folder, `rows` in TRL's columns and `options` of the trainer's
config. The answer is what the trainer's collator makes of each row alone: `{"ids", "labels"}` per sequence (labels -100
where the loss reads nothing), or `{"ids"}` where every sequence is read at its end; with `model` the trainer's own
predictions. PRMTrainer is in older releases alone: run it with such a one first on PYTHONPATH.
"""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from transformers import (
    AutoModelForTokenClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
)

Question = Mapping[str, Any]
Sequences = list[dict[str, list[int]]]
UNREAD = -100
_COMMON = {"report_to": "none", "use_cpu": True, "bf16": False, "disable_tqdm": True, "max_length": None}


def small(kind: type, tokenizer: Any) -> Any:
    """Return a network of a class that has the tokenizer's vocabulary: a trainer wants one."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    return kind(LlamaConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, num_labels=1, **sizes))


def masked(ids: Any, mask: Any) -> dict[str, list[int]]:
    """Return ids [T] and labels [T]: the ids where the mask is 1."""
    labels = torch.where(mask.bool(), ids, torch.full_like(ids, UNREAD))
    return {"ids": ids.tolist(), "labels": labels.tolist()}


def collated(trainer: Any) -> list[dict[str, Any]]:
    """Return the batch of each row alone, which nothing is padded in."""
    return [trainer.data_collator([row]) for row in trainer.train_dataset]


def made(
    trainer: Callable[..., Any],
    config: Callable[..., Any],
    question: Question,
    tokenizer: Any,
    folder: str,
    **more: Any,
) -> Any:
    """Return a trainer of TRL on the question's rows; `more` are its models, and rows to evaluate on."""
    args = config(output_dir=folder, **_COMMON, **question["options"])
    rows = Dataset.from_list(question["rows"])
    return trainer(args=args, train_dataset=rows, processing_class=tokenizer, **more)


def sft(question: Question, tokenizer: Any, folder: str) -> Sequences:
    """Return a sequence per row."""
    from trl import SFTConfig, SFTTrainer

    trainer = made(
        SFTTrainer,
        SFTConfig,
        question,
        tokenizer,
        folder,
        model=small(LlamaForCausalLM, tokenizer),
    )
    return [{"ids": one["input_ids"][0].tolist(), "labels": one["labels"][0].tolist()} for one in collated(trainer)]


def dpo(question: Question, tokenizer: Any, folder: str) -> Sequences:
    """Return two sequences per row, the chosen one first."""
    from trl import DPOConfig, DPOTrainer

    trainer = made(
        DPOTrainer,
        DPOConfig,
        question,
        tokenizer,
        folder,
        model=small(LlamaForCausalLM, tokenizer),
        ref_model=small(LlamaForCausalLM, tokenizer),
    )
    found = []
    for one in collated(trainer):
        for ids, there, mask in zip(one["input_ids"], one["attention_mask"], one["completion_mask"], strict=True):
            length = int(there.sum())
            found.append(masked(ids[:length], mask[:length]))
    return found


def kto(question: Question, tokenizer: Any, folder: str) -> Sequences:
    """Return a sequence per row, and its label as `value`."""
    from trl import KTOConfig, KTOTrainer

    trainer = made(
        KTOTrainer,
        KTOConfig,
        question,
        tokenizer,
        folder,
        model=small(LlamaForCausalLM, tokenizer),
        ref_model=small(LlamaForCausalLM, tokenizer),
    )
    return [
        {**masked(one["input_ids"][0], one["completion_mask"][0]), "value": one["label"].int().tolist()}
        for one in collated(trainer)
    ]


def reward(question: Question, tokenizer: Any, folder: str) -> Sequences:
    """Return two sequences per row, the chosen one first; of a `model` folder its `scores` beside them."""
    from trl import RewardConfig, RewardTrainer

    given = question.get("model")
    trainer = made(
        RewardTrainer,
        RewardConfig,
        question,
        tokenizer,
        folder,
        model=given or small(LlamaForSequenceClassification, tokenizer),
    )
    found = []
    for one in collated(trainer):
        with torch.no_grad():
            scores = trainer.model.eval()(one["input_ids"], attention_mask=one["attention_mask"]).logits
        for ids, there, score in zip(one["input_ids"], one["attention_mask"], scores, strict=True):
            own = {"ids": ids[: int(there.sum())].tolist()}
            found.append({**own, "scores": score.float().tolist()} if given else own)
    return found


def grpo(question: Question, tokenizer: Any, folder: str) -> Sequences:
    """Return the ids that each prompt is sampled from."""
    from trl import GRPOConfig, GRPOTrainer

    options = {name: value for name, value in _COMMON.items() if name != "max_length"}
    trainer = GRPOTrainer(
        model=small(LlamaForCausalLM, tokenizer),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(output_dir=folder, **options, **question["options"]),
        train_dataset=Dataset.from_list(question["rows"]),
        processing_class=tokenizer,
    )
    return [{"ids": list(trainer._tokenize_prompts([row["prompt"]])[0][0])} for row in question["rows"]]


def prm(question: Question, tokenizer: Any, folder: str) -> Sequences:
    """Return a sequence per row; of a `model` folder the share of class 1 at each label as `scores` beside it."""
    from trl.experimental.prm import PRMConfig, PRMTrainer

    given = question.get("model")
    model = (
        AutoModelForTokenClassification.from_pretrained(given, num_labels=2, dtype=torch.float32)
        if given
        else small(LlamaForTokenClassification, tokenizer)
    )
    rows = Dataset.from_list(question["rows"])
    trainer = made(PRMTrainer, PRMConfig, question, tokenizer, folder, model=model, eval_dataset=rows)
    found = [{"ids": row["input_ids"], "labels": row["labels"]} for row in trainer.train_dataset]
    if given:
        output = trainer.predict(trainer.eval_dataset)
        for own, logits, labels in zip(found, output.predictions, output.label_ids, strict=True):
            shares = torch.softmax(torch.from_numpy(logits), -1)[:, 1]
            own["scores"] = shares[torch.from_numpy(labels) != UNREAD].tolist()
    return found


TRAINERS: dict[str, Callable[[Question, Any, str], Sequences]] = {
    "sft": sft, "dpo": dpo, "kto": kto, "reward": reward, "grpo": grpo, "prm": prm,
}  # fmt: skip


def main() -> None:
    """Answer the questions of a folder."""
    import trl

    disable_progress_bars()
    folder = Path(sys.argv[1])
    answers = []
    for question in json.loads((folder / "asked.json").read_text()):
        tokenizer = AutoTokenizer.from_pretrained(question["tokenizer"])
        with TemporaryDirectory() as scratch:
            answers.append(TRAINERS[question["trainer"]](question, tokenizer, scratch))
    answered = {"version": str(trl.__version__), "answers": answers}
    (folder / "answered.json").write_text(json.dumps(answered))


if __name__ == "__main__":
    main()
