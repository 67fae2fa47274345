"""TRL beside this project, on the same rows: which tokens are read, which are learnt, and what an exported model scores.

    bash scripts/bench.sh road trl

TRL's own trainers (`benchmarks.road.trl_side`, by the interpreter of .venv-bench) make batches of rows in every layout
of columns; this project's stages and examples make theirs. Both are compared token for token, without what neither loss
reads: the first token, which nothing predicts, and tokens behind the last one that is learnt. The vocabulary is a
published byte-level one, the chat templates those of published models as TRL carries them, of the tests' chat model, and
one whose assistant is marked. A cell of the table says `equal`, or what TRL's side must be changed by to be equal:

- `end`: what the template writes behind the end token of a turn (a newline) is dropped or not learnt;
- `opening`: the newline that opens the answer, which the prompt of a sample writes, is not learnt;
- `apart`: the same text, in which the prompt ends within a token of TRL's: TRL learns that token, which no answer to
  this prompt begins with, and here prompt and answer are tokenised apart;

anything else is `differs`. Then a process and an outcome reward model of this project's shape with random weights are
read by TRL's trainers: `trl_scores_gap` is the largest difference of a score to this project's. Three minutes on a core.
"""

import argparse
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.result import count
from benchmarks.silence.real_tokenizers import build
from espalier.data.examples.outcome_examples import JudgedResponseExamples
from espalier.data.examples.token_examples import PreferenceExamples, WeightedExamples
from espalier.data.jsonl import write_records
from espalier.data.prompts import PromptTemplate
from espalier.data.tasks.problem_file import ProblemFile
from espalier.models.load import load_tokenizer
from espalier.models.published.load import load_published, row_of
from espalier.models.published.scoring import PublishedScorer, Solution, read_as
from espalier.models.published.table import PUBLISHED
from espalier.models.scalar_head import load_process_reward
from espalier.models.tiny import build_tiny
from espalier.pipeline.pairs.import_preferences import ImportPreferences
from espalier.pipeline.prm.export_classifier import ExportClassifier
from espalier.pipeline.problems.import_conversations import ImportConversations
from espalier.pipeline.stage import StageContext
from espalier.rewards.outcome_model import last_logits

ROOT = Path(__file__).resolve().parents[2]
HOW = "bash scripts/bench.sh road trl"
PYTHON = ROOT / ".venv-bench" / "bin" / "python"
WITH_PRM = ROOT / ".venv-bench" / "trl-with-prm"
UNREAD = -100
VERDICTS = ("equal", "end", "opening, end", "apart", "differs")  # the worst last
MAX_LENGTH = 4096
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
_PAIRS = [{"prompt": prompt, "chosen": good, "rejected": bad} for prompt, good, bad in TEXTS]
_WHOLE_PAIRS = [{"chosen": good, "rejected": bad} for good, bad in WHOLE]
_WHOLE_CHAT_PAIRS = [{"chosen": [*row["prompt"], *row["chosen"]], "rejected": [*row["prompt"], *row["rejected"]]}
                     for row in _CHAT_PAIRS]  # fmt: skip


def _completions(pairs: Sequence[Row], is_judged: bool) -> list[Row]:
    return [{"prompt": row["prompt"], "completion": row[side], **({"label": side == "chosen"} if is_judged else {})}
            for row in pairs for side in ("chosen", "rejected")]  # fmt: skip


def _imported(stage: Any, rows: Path) -> Path:
    output = rows.with_name("imported.jsonl")
    write_records(output, stage.run(str(rows), StageContext(None, output, 60.0)))
    return output


def _learnt(ids: Sequence[int], start: int, weights: Sequence[float] = ()) -> list[int]:
    own = list(weights) or [1.0] * (len(ids) - start)
    return [UNREAD] * start + [token if weight else UNREAD for token, weight in zip(ids[start:], own, strict=True)]


def _conversations(rows: Path, tokenizer: Path) -> list[Tokens]:
    path = _imported(ImportConversations(str(tokenizer)), rows)
    examples = WeightedExamples(str(path), MAX_LENGTH).load(None)
    return [Tokens(one.ids, _learnt(one.ids, one.prompt_length, one.weights)) for one in examples]


def _pairs(rows: Path, tokenizer: Path) -> list[Tokens]:
    path = _imported(ImportPreferences(str(tokenizer)), rows)
    pairs = PreferenceExamples(str(path), MAX_LENGTH).load(None)
    sides = [(pair.prompt_ids, side) for pair in pairs for side in (pair.chosen_ids, pair.rejected_ids)]
    return [Tokens([*prompt, *side], _learnt([*prompt, *side], len(prompt))) for prompt, side in sides]


def _ends(rows: Path, tokenizer: Path) -> list[Tokens]:
    return [Tokens(one.ids) for one in _pairs(rows, tokenizer)]


def _judged(rows: Path, tokenizer: Path) -> list[Tokens]:
    path = _imported(ImportPreferences(str(tokenizer)), rows)
    examples = JudgedResponseExamples(str(path), MAX_LENGTH).load(load_tokenizer(str(tokenizer)))
    return [Tokens(one.ids, _learnt(one.ids, one.prompt_length), int(one.value)) for one in examples]


def _prompts(rows: Path, tokenizer: Path) -> list[Tokens]:
    given = [json.loads(line) for line in rows.read_text().splitlines()]
    is_chat = isinstance(given[0]["prompt"], list)
    found = []
    for number, row in enumerate(given):  # each in a file of its own: the turn of the system is a setting
        path = rows.with_name(f"prompt-{number}.jsonl")
        path.write_text(json.dumps(row) + "\n")
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
    "SFT: prompt, completion": Case("sft", _completions(_PAIRS, False), _conversations),
    "SFT: prompt, completion as turns": Case("sft", _completions(_CHAT_PAIRS, False), _conversations, is_chat=True),
    "SFT: prompt, completion as turns, assistant_only_loss": Case(
        "sft", _completions(_CHAT_PAIRS, False), _conversations, _BOTH, is_chat=True, needs_marks=True),
    "DPO: prompt, chosen, rejected": Case("dpo", _PAIRS, _pairs),
    "DPO: prompt, chosen, rejected as turns": Case("dpo", _CHAT_PAIRS, _pairs, is_chat=True),
    "DPO: chosen, rejected": Case("dpo", _WHOLE_PAIRS, _pairs),
    "DPO: chosen, rejected as turns": Case("dpo", _WHOLE_CHAT_PAIRS, _pairs, is_chat=True),
    "KTO: prompt, completion, label": Case("kto", _completions(_PAIRS, True), _judged),
    "KTO: prompt, completion, label as turns": Case("kto", _completions(_CHAT_PAIRS, True), _judged, is_chat=True),
    "Reward: prompt, chosen, rejected": Case("reward", _PAIRS, _ends),
    "Reward: prompt, chosen, rejected as turns": Case("reward", _CHAT_PAIRS, _ends, is_chat=True),
    "Reward: chosen, rejected": Case("reward", _WHOLE_PAIRS, _ends),
    "Reward: chosen, rejected as turns": Case("reward", _WHOLE_CHAT_PAIRS, _ends, is_chat=True),
    "GRPO: prompt": Case("grpo", [{"prompt": prompt} for prompt, _, _ in TEXTS], _prompts),
    "GRPO: prompt as turns": Case("grpo", [{"prompt": asked} for asked in ASKED[1:]], _prompts, is_chat=True),
    "PRM: prompt, completions, labels": Case("prm", STEPS, _steps),
}  # fmt: skip

_CHATML = (
    "{%- for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}<|im_end|>{% endgeneration %}{{ '\n' }}{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}"
    "{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_PLAIN = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_IM, _EOT = ("<|im_end|>", "<|im_start|>"), ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")
# name → (vocabulary, chat template: its text, the file of TRL's that holds it, or the vocabulary's own (""); the end
# token and further special ones; whether TRL knows what of it is the assistant's)
TEMPLATES: dict[str, tuple[str, str, tuple[str, ...], bool]] = {
    "Qwen2.5": ("tekken", "qwen2_5.jinja", _IM, True),
    "Qwen3 2507": ("tekken", "qwen3_instruct_2507.jinja", _IM, True),
    "Llama 3": ("tekken", "llama3.jinja", _EOT, True),
    "marked": ("tekken", _CHATML, _IM, True),
    "plain": ("tekken", _PLAIN, ("</s>",), False),
    "pieces": ("sentencepiece", "", ("</s>",), False),
}


def write_tokenizers(folder: Path) -> dict[str, Path]:
    """Write a tokenizer per template; their folders. Raises ImportError where mistral_common is not installed."""
    (trl,) = ROOT.glob(".venv-bench/lib/python*/site-packages/trl")
    found = {}
    for vocabulary in {each for each, *_ in TEMPLATES.values()}:
        build(vocabulary, folder / vocabulary, 16000)
    for name, (vocabulary, template, special, _) in TEMPLATES.items():
        made = load_tokenizer(str(folder / vocabulary))
        made.add_special_tokens({"eos_token": special[0], "additional_special_tokens": list(special[1:])})
        if template:
            is_file = template.endswith(".jinja")
            made.chat_template = (trl / "chat_templates" / template).read_text() if is_file else template
        found[name] = Path(shutil.copytree(folder / vocabulary, folder / name))
        made.save_pretrained(found[name])
    return found


def ask_trl(questions: Sequence[Mapping[str, Any]], folder: Path, has_prm: bool = False) -> dict[str, Any]:
    """Return TRL's `version` and its `answers`, in order. Raises SystemExit where it does not answer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "asked.json").write_text(json.dumps(questions))
    path = [*([str(WITH_PRM)] if has_prm else []), str(ROOT)]
    command = [str(PYTHON), "-m", "benchmarks.road.trl_side", str(folder)]
    surroundings = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "HF_DATASETS_CACHE": str(folder / "cache")}
    done = subprocess.run(command, env=surroundings, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"error: TRL does not answer:\n{done.stderr[-2000:]}")
    answered: dict[str, Any] = json.loads((folder / "answered.json").read_text())
    return answered


def seen(tokens: Tokens) -> Tokens:
    """Return the tokens without what no loss reads: the first label, and what stands behind the last one."""
    if not tokens.labels:
        return tokens
    labels = [UNREAD, *tokens.labels[1:]]
    end = max((place for place, label in enumerate(labels) if label != UNREAD), default=-1) + 1
    return Tokens(tokens.ids[:end], labels[:end], tokens.value)


def without_ends(tokens: Tokens, end: int) -> Tokens:
    """Return the tokens without what is learnt, or read, behind an end token before a prompt goes on."""
    if not tokens.labels:
        last = len(tokens.ids) - tokens.ids[::-1].index(end) if end in tokens.ids else len(tokens.ids)
        return Tokens(tokens.ids[:last])
    labels, is_over = list(tokens.labels), False
    for place, label in enumerate(tokens.labels):
        if label == UNREAD:
            is_over = False
        elif is_over:
            labels[place] = UNREAD
        is_over |= label == end
    return Tokens(tokens.ids, labels, tokens.value)


def without_openings(tokens: Tokens, opening: int) -> Tokens:
    """Return the tokens without the label of a run's first token where that opens an answer."""
    labels = [UNREAD if label == opening and tokens.labels[place - 1] == UNREAD else label
              for place, label in enumerate(tokens.labels)]  # fmt: skip
    return Tokens(tokens.ids, labels, tokens.value)


def verdict(ours: Tokens, theirs: Tokens, tokenizer: Any) -> str:
    """Return "equal", what TRL's must be changed by to be equal, or "differs"."""
    opening = tokenizer("a\n", add_special_tokens=False).input_ids[-1]
    ends = without_ends(theirs, tokenizer.eos_token_id)
    ways = {"equal": theirs, "end": ends, "opening, end": without_openings(ends, opening)}
    if found := next((name for name, changed in ways.items() if seen(changed) == seen(ours)), ""):
        return found
    texts = [tokenizer.decode(seen(side).ids) for side in (ours, ends)]
    return "apart" if texts[0] == texts[1] and ours.value == theirs.value else "differs"


def compare(folder: Path) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Return layout → template → verdict over its rows (the worst one), and the versions of TRL that were asked."""
    tokenizers = write_tokenizers(folder / "tokenizers")
    pairs = [(layout, name) for layout, case in CASES.items() for name, (*_, has_marks) in TEMPLATES.items()
             if has_marks or not case.needs_marks]  # fmt: skip
    found: dict[str, dict[str, str]] = {layout: {} for layout in CASES}
    versions = {}
    for has_prm in (False, True):
        asked = [pair for pair in pairs if (CASES[pair[0]].trainer == "prm") == has_prm]
        questions = [{"trainer": CASES[layout].trainer, "tokenizer": str(tokenizers[name]), "rows": CASES[layout].rows,
                      "options": CASES[layout].options} for layout, name in asked]  # fmt: skip
        told = ask_trl(questions, folder / f"trl-{has_prm}", has_prm)
        versions["trl_with_prm" if has_prm else "trl"] = told["version"]
        for (layout, name), answer in zip(asked, told["answers"], strict=True):
            theirs = [Tokens(one["ids"], one.get("labels", []), *one.get("value", [])) for one in answer]
            found[layout][name] = _worst(CASES[layout], tokenizers[name], theirs, folder / "rows.jsonl")
    return found, versions


def _worst(case: Case, tokenizer: Path, theirs: Sequence[Tokens], path: Path) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in case.rows))
    ours, loaded = case.ours(path, tokenizer), load_tokenizer(str(tokenizer))
    if len(ours) != len(theirs):
        return "differs"
    verdicts = [verdict(*sides, loaded) for sides in zip(ours, theirs, strict=True)]
    return max(verdicts, key=VERDICTS.index)


def write_reward_model(policy: str, folder: Path, seed: int) -> Path:
    """Write a policy's body with a random head of one number, as training leaves a reward model; its folder."""
    model = load_process_reward(policy, 1)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.get_submodule("score").parameters():
            weight.normal_(std=0.3, generator=draw)
    model.save_pretrained(folder)
    load_tokenizer(policy).save_pretrained(folder)
    return folder


def score_gaps(folder: Path) -> dict[str, float]:
    """Return the largest difference of a score between TRL's trainers and this project: of a process reward model that
    was exported as a plain classifier, and of the differences between the two sides of pairs by an outcome reward model
    (transformers' classifier of texts has no bias in its head)."""
    texts = [row["prompt"] + "\n".join(row["completions"]) for row in STEPS]
    policy = str(build_tiny(folder / "policy", texts, hidden_size=64, num_layers=2, num_heads=2, vocab_size=320,
                            max_length=512, seed=0))  # fmt: skip
    process, outcome = (write_reward_model(policy, folder / name, seed) for seed, name in enumerate(("prm", "orm")))
    plain = folder / "plain"
    ExportClassifier(str(process), layout="tokens").run("", StageContext(None, plain, 60.0))
    (answer,) = ask_trl([{"trainer": "prm", "tokenizer": str(plain), "model": str(plain), "rows": STEPS, "options": {}}],
                        folder / "trl-prm", has_prm=True)["answers"]  # fmt: skip
    theirs = [score for row in answer for score in row["scores"]]
    row, tokenizer = row_of("trl", str(plain)), load_tokenizer(str(plain))
    scorer = PublishedScorer(load_published(str(plain), row), tokenizer, row, "fp32")
    solutions = [Solution("row", one["prompt"], one["completions"]) for one in STEPS]
    ours = [score for row in scorer.scores(solutions) for score in row]
    own = load_process_reward(str(process)).train(False)
    ends = [[place for place, label in enumerate(one["labels"]) if label != UNREAD] for one in answer]
    with torch.no_grad():
        logits = [own(torch.tensor([one["ids"]])).logits[0, places, 0] for one, places in zip(answer, ends, strict=True)]
    trained = torch.sigmoid(torch.cat(logits)).tolist()
    (answer,) = ask_trl([{"trainer": "reward", "tokenizer": policy, "model": str(outcome), "rows": _PAIRS,
                          "options": {}}], folder / "trl-orm")["answers"]  # fmt: skip
    (folder / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in _PAIRS))
    ids = [one.ids for one in _ends(folder / "rows.jsonl", Path(policy))]
    assert ids == [one["ids"] for one in answer]
    rewards = [float(one) for one in last_logits(load_process_reward(str(outcome)), ids, 4096)]
    return {"process": _gap(theirs, ours), "process, as trained": _gap(theirs, trained),
            "outcome, of pairs": _gap(_margins([one["scores"][0] for one in answer]), _margins(rewards))}  # fmt: skip


def _gap(one: Sequence[float], other: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def _margins(rewards: Sequence[float]) -> list[float]:
    return [good - bad for good, bad in zip(rewards[0::2], rewards[1::2], strict=True)]


def measure(words: Sequence[str]) -> dict[str, Any]:
    """Return the figures and the table of this section."""
    argparse.ArgumentParser(prog=HOW, description=__doc__).parse_args(list(words))
    subprocess.run(["bash", "scripts/install_bench.sh"], cwd=ROOT, check=True)
    with TemporaryDirectory() as scratch:
        found, versions = compare(Path(scratch))
        gaps = score_gaps(Path(scratch))
    cells = [cell for row in found.values() for cell in row.values()]
    unit = f"layouts x chat templates, {cells.count('equal')} of them equal as they are"
    largest = round(max(gaps.values()), 7)
    return {
        "figures": {
            "trl_tokens_alike": count(len(cells) - cells.count("differs"), len(cells), unit, how=HOW),
            "trl_scores_gap": {"value": largest, "low": largest, "high": largest, "unit": "score, fp32", "goal": 1e-5,
                               "better": "lower", "met": largest <= 1e-5, "how": HOW},
        },
        "tables": [{"title": "Tokens and masks of TRL's trainers and of this project, by chat template",
                    "columns": ["layout", *TEMPLATES],
                    "rows": [[layout, *(row.get(name, "") for name in TEMPLATES)] for layout, row in found.items()]}],
        "gaps": gaps,
        **versions,
    }  # fmt: skip
