"""Rows in every layout of columns that TRL's trainers read, and what this project makes of a file of them, for
`benchmarks.road.trl`: ids and the labels of a loss."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from espalier.data.examples.outcome_examples import JudgedResponseExamples
from espalier.data.examples.token_examples import PreferenceExamples, WeightedExamples
from espalier.data.jsonl import write_records
from espalier.data.prompts import PromptTemplate
from espalier.data.tasks.problem_file import ProblemFile
from espalier.models.load import load_tokenizer
from espalier.models.published.scoring import Solution, read_as
from espalier.models.published.table import PUBLISHED
from espalier.pipeline.pairs.import_preferences import ImportPreferences
from espalier.pipeline.problems.import_conversations import ImportConversations
from espalier.pipeline.stage import StageContext

UNREAD = -100
_MAX_LENGTH = 4096
Row = dict[str, Any]


@dataclass(frozen=True)
class Tokens:
    """`ids` [T]; `labels` [T], UNREAD where the loss reads nothing; of a sequence that is read at its end, or sampled
    from, no labels. `value`: what the row says of it."""

    ids: list[int]
    labels: list[int] = field(default_factory=list)
    value: int | None = None


@dataclass(frozen=True)
class Case:
    """A layout of columns: TRL's trainer and its options, rows, and what this project makes of a file of them."""

    trainer: str
    rows: Sequence[Row]
    ours: Callable[[Path, Path], list[Tokens]]
    options: Mapping[str, Any] = field(default_factory=dict)
    is_chat: bool = False
    needs_marks: bool = False


def _turn(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


def _user(text: str) -> list[dict[str, str]]:
    return _turn("user", text)


def _assistant(text: str) -> list[dict[str, str]]:
    return _turn("assistant", text)


TALK = [*_turn("system", "Be brief."), *_user("What is 2 + 3?"), *_assistant("5"), *_user("And 数学 twice? 🙂")]
ANSWER, OTHER = "10.\n\n  Twice 5 is 10, naïvely: `2 * (2 + 3)`.", "Привет, 11."
ASKED = [TALK, _user("1,048 - 48?"), [*_turn("system", "Count."), *_user("one two")]]
ANSWERS = [(ANSWER, OTHER), ("1000", "1,096"), ("three", "four\nfive")]
TEXTS = [("2 + 3 =", " 5", " 6"), ("Mia has 12 apples.\nHow many?\n", "Twelve.\n#### 12", "\\boxed{13}"),
         ("数学:", " 5 + 5 🙂", " naïve")]  # fmt: skip
WHOLE = [("The sky is blue.", "The sky is green."), ("The sky is blueish today.", "The sky is bluest."),
         ("2 + 3 = 5\nSo it is 数.", "2 + 3 = 5\nSo it is 敷.")]  # fmt: skip
STEPS = [{"prompt": "2 + 3 + 1?", "completions": ["2 + 3 = 5", "5 + 1 = 7"], "labels": [True, False]},
         {"prompt": "数学?", "completions": ["Step 1: naïve 🙂", "Step 2:\nso \\boxed{4}", "x"],
          "labels": [True, True, False]}]  # fmt: skip
_CHATS = [[*asked, *_assistant(good)] for asked, (good, _) in zip(ASKED, ANSWERS, strict=True)]
_CHAT_PAIRS = [{"prompt": asked, "chosen": _assistant(good), "rejected": _assistant(bad)}
               for asked, (good, bad) in zip(ASKED, ANSWERS, strict=True)]  # fmt: skip
PAIRS = [{"prompt": prompt, "chosen": good, "rejected": bad} for prompt, good, bad in TEXTS]
_WHOLE_PAIRS = [{"chosen": good, "rejected": bad} for good, bad in WHOLE]
_WHOLE_CHAT_PAIRS = [{"chosen": [*row["prompt"], *row["chosen"]], "rejected": [*row["prompt"], *row["rejected"]]}
                     for row in _CHAT_PAIRS]  # fmt: skip


def _completions(pairs: Sequence[Row], is_judged: bool) -> list[Row]:
    return [{"prompt": row["prompt"], "completion": row[side], **({"label": side == "chosen"} if is_judged else {})}
            for row in pairs for side in ("chosen", "rejected")]  # fmt: skip


def write_rows(path: Path, rows: Sequence[Row]) -> Path:
    """Write rows as JSON lines; the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _imported(stage: Any, rows: Path) -> Path:
    output = rows.with_name("imported.jsonl")
    write_records(output, stage.run(str(rows), StageContext(None, output, 60.0)))
    return output


def _labels(ids: Sequence[int], start: int, weights: Sequence[float] = ()) -> list[int]:
    own = list(weights) or [1.0] * (len(ids) - start)
    return [UNREAD] * start + [token if weight else UNREAD for token, weight in zip(ids[start:], own, strict=True)]


def _conversations(rows: Path, tokenizer: Path) -> list[Tokens]:
    path = _imported(ImportConversations(str(tokenizer)), rows)
    examples = WeightedExamples(str(path), _MAX_LENGTH).load(None)
    return [Tokens(one.ids, _labels(one.ids, one.prompt_length, one.weights)) for one in examples]


def _pairs(rows: Path, tokenizer: Path) -> list[Tokens]:
    path = _imported(ImportPreferences(str(tokenizer)), rows)
    pairs = PreferenceExamples(str(path), _MAX_LENGTH).load(None)
    sides = [(pair.prompt_ids, side) for pair in pairs for side in (pair.chosen_ids, pair.rejected_ids)]
    return [Tokens([*prompt, *side], _labels([*prompt, *side], len(prompt))) for prompt, side in sides]


def paired_ends(rows: Path, tokenizer: Path) -> list[Tokens]:
    """Return both sides of every pair, each read at its end."""
    return [Tokens(one.ids) for one in _pairs(rows, tokenizer)]


def _judged(rows: Path, tokenizer: Path) -> list[Tokens]:
    path = _imported(ImportPreferences(str(tokenizer)), rows)
    examples = JudgedResponseExamples(str(path), _MAX_LENGTH).load(load_tokenizer(str(tokenizer)))
    return [Tokens(one.ids, _labels(one.ids, one.prompt_length), int(one.value)) for one in examples]


def _prompts(rows: Path, tokenizer: Path) -> list[Tokens]:
    given = [json.loads(line) for line in rows.read_text().splitlines()]
    is_chat = isinstance(given[0]["prompt"], list)
    found = []
    for number, row in enumerate(given):  # each in a file of its own: the turn of the system is a setting
        path = write_rows(rows.with_name(f"prompt-{number}.jsonl"), [row])
        first = row["prompt"][0] if is_chat else {}
        system = first["content"] if first.get("role") == "system" else ""
        template = PromptTemplate("{question}", system=system, is_chat=is_chat)
        (problem,) = ProblemFile(str(path), template, kind="number").problems("train")
        found.append(Tokens(template.encode(load_tokenizer(str(tokenizer)), problem).ids))
    return found


def _steps(rows: Path, tokenizer: Path) -> list[Tokens]:
    found = []
    for row in map(json.loads, rows.read_text().splitlines()):
        solution = Solution("row", row["prompt"], row["completions"])
        read = read_as(PUBLISHED["trl"], load_tokenizer(str(tokenizer)), solution)
        ids = [*read.prompt_ids, *read.response_ids]
        labels = [UNREAD] * len(ids)
        for end, label in zip(read.step_ends, row["labels"], strict=True):
            labels[len(read.prompt_ids) + end - 1] = int(label)
        found.append(Tokens(ids, labels))
    return found


_BOTH = {"assistant_only_loss": True}
CASES: dict[str, Case] = {
    "SFT: text": Case("sft", [{"text": prompt + good} for prompt, good, _ in TEXTS], _conversations),
    "SFT: messages, assistant_only_loss": Case("sft", [{"messages": chat} for chat in _CHATS], _conversations,
                                               _BOTH, is_chat=True, needs_marks=True),
    "SFT: prompt, completion": Case("sft", _completions(PAIRS, False), _conversations),
    "SFT: prompt, completion as turns": Case("sft", _completions(_CHAT_PAIRS, False), _conversations, is_chat=True),
    "SFT: prompt, completion as turns, assistant_only_loss": Case(
        "sft", _completions(_CHAT_PAIRS, False), _conversations, _BOTH, is_chat=True, needs_marks=True),
    "DPO: prompt, chosen, rejected": Case("dpo", PAIRS, _pairs),
    "DPO: prompt, chosen, rejected as turns": Case("dpo", _CHAT_PAIRS, _pairs, is_chat=True),
    "DPO: chosen, rejected": Case("dpo", _WHOLE_PAIRS, _pairs),
    "DPO: chosen, rejected as turns": Case("dpo", _WHOLE_CHAT_PAIRS, _pairs, is_chat=True),
    "KTO: prompt, completion, label": Case("kto", _completions(PAIRS, True), _judged),
    "KTO: prompt, completion, label as turns": Case("kto", _completions(_CHAT_PAIRS, True), _judged, is_chat=True),
    "Reward: prompt, chosen, rejected": Case("reward", PAIRS, paired_ends),
    "Reward: prompt, chosen, rejected as turns": Case("reward", _CHAT_PAIRS, paired_ends, is_chat=True),
    "Reward: chosen, rejected": Case("reward", _WHOLE_PAIRS, paired_ends),
    "Reward: chosen, rejected as turns": Case("reward", _WHOLE_CHAT_PAIRS, paired_ends, is_chat=True),
    "GRPO: prompt": Case("grpo", [{"prompt": prompt} for prompt, _, _ in TEXTS], _prompts),
    "GRPO: prompt as turns": Case("grpo", [{"prompt": asked} for asked in ASKED[1:]], _prompts, is_chat=True),
    "PRM: prompt, completions, labels": Case("prm", STEPS, _steps),
}  # fmt: skip
