"""TRL beside this project, on the same rows: which tokens are read, which are learnt, what an exported model scores.

    bash scripts/bench.sh road trl

TRL's own trainers (`benchmarks.road.trl_side`, by the interpreter of .venv-bench) make batches of rows in every layout
of columns; this project's stages and examples make theirs. Both are compared token for token, without what no loss
reads: the first token, which nothing predicts, and tokens behind the last one that is learnt. Vocabularies are
published ones; chat templates those of published models as TRL carries them, that of the tests' chat model, and one
whose assistant is marked. A cell of the table says `equal`, or what TRL's side must be changed by to be equal:

- `end`: what the template writes behind the end token of a turn (a newline) is dropped or not learnt;
- `opening`: the newline that opens the answer, which the prompt of a sample writes, is not learnt;
- `apart`: the same text, in which the prompt ends within a token of TRL's: TRL learns that token, which no answer to
  this prompt begins with, and here prompt and answer are tokenised apart;

anything else is `differs`. Then a process and an outcome reward model of this project's shape with random weights are
read by TRL's trainers: `trl_scores_gap` is the largest difference of a score to this project's. Three minutes on a
core.
"""

import argparse
import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.result import count
from benchmarks.road.trl_rows import CASES, PAIRS, STEPS, UNREAD, Case, Tokens, paired_ends, write_rows
from benchmarks.silence.real_tokenizers import build
from espalier.models.load import load_tokenizer
from espalier.models.published.load import load_published, row_of
from espalier.models.published.scoring import PublishedScorer, Solution
from espalier.models.scalar_head import load_process_reward
from espalier.models.tiny import build_tiny
from espalier.pipeline.prm.export_classifier import ExportClassifier
from espalier.pipeline.stage import StageContext
from espalier.rewards.outcome_model import last_logits

ROOT = Path(__file__).resolve().parents[2]
HOW = "bash scripts/bench.sh road trl"
PYTHON = ROOT / ".venv-bench" / "bin" / "python"
WITH_PRM = ROOT / ".venv-bench" / "trl-with-prm"
VERDICTS = ("equal", "end", "opening, end", "apart", "differs")  # the worst last


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
        replies = ask_trl(questions, folder / f"trl-{has_prm}", has_prm)
        versions["trl_with_prm" if has_prm else "trl"] = replies["version"]
        for (layout, name), answer in zip(asked, replies["answers"], strict=True):
            theirs = [Tokens(one["ids"], one.get("labels", []), *one.get("value", [])) for one in answer]
            found[layout][name] = _worst(CASES[layout], tokenizers[name], theirs, folder / "rows.jsonl")
    return found, versions


def _worst(case: Case, tokenizer: Path, theirs: Sequence[Tokens], path: Path) -> str:
    ours, loaded = case.ours(write_rows(path, case.rows), tokenizer), load_tokenizer(str(tokenizer))
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


def process_gaps(policy: str, folder: Path) -> dict[str, float]:
    """Return the largest difference of a score between TRL's PRMTrainer, which loads the exported folder, and this
    project: by the same folder in TRL's layout, and by the model before its export on the same tokens."""
    model, plain = write_reward_model(policy, folder / "prm", 0), folder / "plain"
    ExportClassifier(str(model), layout="tokens").run("", StageContext(None, plain, 60.0))
    question = {"trainer": "prm", "tokenizer": str(plain), "model": str(plain), "rows": STEPS, "options": {}}
    (answer,) = ask_trl([question], folder / "trl-prm", has_prm=True)["answers"]
    row, tokenizer = row_of("trl", str(plain)), load_tokenizer(str(plain))
    scorer = PublishedScorer(load_published(str(plain), row), tokenizer, row, "fp32")
    exported = scorer.scores([Solution("row", one["prompt"], one["completions"]) for one in STEPS])
    own, trained = load_process_reward(str(model)).train(False), []
    for one in answer:
        with torch.no_grad():
            scores = torch.sigmoid(own(torch.tensor([one["ids"]])).logits[0, :, 0])
        trained.append(scores[torch.tensor(one["labels"]) != UNREAD].tolist())
    theirs = [one["scores"] for one in answer]
    return {"process": _gap(theirs, exported), "process, as trained": _gap(theirs, trained)}


def outcome_gap(policy: str, folder: Path) -> float:
    """Return the largest difference between TRL's RewardTrainer, which loads the folder of an outcome reward model, and
    this project, of what a pair's sides differ by: transformers' classifier of texts drops the head's bias."""
    model = write_reward_model(policy, folder / "orm", 1)
    question = {"trainer": "reward", "tokenizer": policy, "model": str(model), "rows": PAIRS, "options": {}}
    (answer,) = ask_trl([question], folder / "trl-orm")["answers"]
    ids = [one.ids for one in paired_ends(write_rows(folder / "rows.jsonl", PAIRS), Path(policy))]
    if ids != [one["ids"] for one in answer]:
        raise SystemExit("error: TRL scores other tokens than this project")
    rewards = [float(one) for one in last_logits(load_process_reward(str(model)), ids, 4096)]
    theirs = [one["scores"][0] for one in answer]
    margins = [[good - bad for good, bad in zip(each[0::2], each[1::2], strict=True)] for each in (theirs, rewards)]
    return _gap(margins[:1], margins[1:])


def score_gaps(folder: Path) -> dict[str, float]:
    """Return the largest difference of a score between TRL's trainers and this project, by kind of model."""
    texts = [row["prompt"] + "\n".join(row["completions"]) for row in STEPS]
    policy = str(build_tiny(folder / "policy", texts, hidden_size=64, num_layers=2, num_heads=2, vocab_size=320,
                            max_length=512, seed=0))  # fmt: skip
    return {**process_gaps(policy, folder), "outcome, of pairs": outcome_gap(policy, folder)}


def _gap(ones: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> float:
    return max(abs(a - b) for one, other in zip(ones, others, strict=True) for a, b in zip(one, other, strict=True))


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
