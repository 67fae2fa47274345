"""What scorers of whole responses read of a pair is what training reads of it, token for token; and a trained model
says how its rows were laid out."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.silence.real_tokenizers import NAMES, build
from espalier.data.conversations import pair_tokens
from espalier.data.examples.token_examples import PairExample
from espalier.data.ranked_responses import SameResponses, read_ranked
from espalier.data.records import BadInput
from espalier.data.sources import BadRow, Row
from espalier.data.training_layout import PromptReader, TrainingLayout, read_training_layout
from espalier.pipeline.evaluation.score_responses import ScoreResponses, encode_row
from espalier.pipeline.stage import StageContext
from espalier.training.loop_from_config import save_model
from espalier.training.trained_on import trained_layout
from tests.training.test_training import STEPS, make_loop

CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>\n{{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
FRAGMENTS = ("The sky is blue", "ish", "st", " today", ".", "\n\n", " ", "  ", "3.75", "1,048", " + 2 = ", "数学", "敷",
             "🙂", "naïve", "e\u0301", "Human: ", "\nAssistant:", "\\boxed{7}", "\t", "a b  c", " 5")  # fmt: skip


@pytest.fixture(scope="module", params=NAMES)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The published tokenizers and the tiny one, each with a chat template."""
    pytest.importorskip("mistral_common", reason="the published tokenizers lie in the package mistral_common")
    pytest.importorskip("sentencepiece", reason="one of them is read with the package sentencepiece")
    made = build(request.param, tmp_path_factory.mktemp("tokenizers") / request.param, 8000).tokenizer
    if not made.chat_template:
        made.chat_template = CHAT
    return made


def text(rng: random.Random, most: int = 6) -> str:
    return "".join(rng.choice(FRAGMENTS) for _ in range(rng.randint(1, most)))


def turn(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


def split_anywhere(rng: random.Random) -> dict[str, Any]:
    """Two texts that begin alike up to any character, also one within a word or a token."""
    whole = text(rng, 12)
    shared = whole[: rng.randint(1, len(whole))]
    return {"chosen": shared + text(rng), "rejected": shared + text(rng)}


def with_prompt(rng: random.Random) -> dict[str, Any]:
    return {"prompt": text(rng), "chosen": text(rng), "rejected": text(rng)}


def turns(rng: random.Random) -> dict[str, Any]:
    asked = turn("user", text(rng))
    if rng.random() < 0.5:
        asked += [*turn("assistant", text(rng)), *turn("user", text(rng))]
    return {"prompt": asked, "chosen": turn("assistant", text(rng)), "rejected": turn("assistant", text(rng))}


def conversations(rng: random.Random) -> dict[str, Any]:
    row = turns(rng)
    asked = row.pop("prompt")
    found = {name: [*asked, *answer] for name, answer in row.items()}
    return {**found, **({"prompt": asked[-1]["content"]} if rng.random() < 0.5 else {})}


LAYOUTS: list[tuple[Callable[[random.Random], dict[str, Any]], bool]] = [
    (split_anywhere, False), (with_prompt, False), (turns, True), (conversations, True)]  # fmt: skip


@pytest.mark.parametrize(("make", "is_chat"), LAYOUTS)
def test_scored_ids_are_trained_ids(
    make: Callable[[random.Random], dict[str, Any]], is_chat: bool, tokenizer: Any
) -> None:
    rng = random.Random(make.__name__)
    num_compared = num_within = 0
    for number in range(150):
        row = Row("pairs.jsonl", number, make(rng))
        try:
            trained = pair_tokens(row, tokenizer)
            record = read_ranked(row, "pairs")
        except (BadRow, SameResponses, BadInput):
            continue  # no pair for one of the two
        chosen, rejected = encode_row(tokenizer, record, is_chat)
        assert (chosen.prompt_ids, rejected.prompt_ids) == (trained.prompt_ids, trained.prompt_ids), row.fields
        assert (chosen.response_ids, rejected.response_ids) == (trained.chosen_ids, trained.rejected_ids), row.fields
        num_compared += 1
        num_within += trained.prompt != record.prompt
    assert num_compared > 50
    if make is split_anywhere:
        assert num_within > 5, "some texts part within a token"


def test_texts_without_a_prompt_are_no_turns_unless_asked_for(
    chat_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row = {"id": "r", "subset": "", "prompt": "So it is blu", "chosen": ["eish."], "rejected": ["est."],
           "has_implicit_prompt": True}  # fmt: skip
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    for asked in (None, True):
        caplog.clear()
        context = StageContext(None, tmp_path / f"{asked}.jsonl", 10.0)
        stage = ScoreResponses(model=str(chat_model), is_reference_free=True, is_chat=asked)
        list(stage.run(str(tmp_path / "rows.jsonl"), context))
        assert context.counts.get("implicit_prompts", 0) == (asked is None)
        assert ("1 rows hold no prompt of their own" in caplog.text) == (asked is None)


def test_a_trained_model_says_how_its_rows_were_laid_out(tiny_policy: Path, tokenizer: Any, tmp_path: Path) -> None:
    as_text = tokenizer("Mia has 3 apples.").input_ids
    asked = tokenizer.apply_chat_template(turn("user", "Mia has 3 apples."), tokenize=False, add_generation_prompt=True)
    as_turn = tokenizer(asked, add_special_tokens=False).input_ids
    for prompts, layout in (([as_text], "text"), ([as_turn], "chat"), ([as_text, as_turn], "both")):
        assert PromptReader(tokenizer).layout(prompts) == layout
        examples = [PairExample("p", ids, [5], [6]) for ids in prompts]
        assert trained_layout(examples, tokenizer) == TrainingLayout("responses", layout)


def test_the_folder_of_a_trained_model_holds_its_layout(tiny_policy: Path, chat_model: Path, tmp_path: Path) -> None:
    from espalier.models.load import load_tokenizer

    chat = load_tokenizer(str(chat_model))
    for name, examples, scores in (("process reward", STEPS, "steps"), ("bradley-terry", None, "responses")):
        loop = make_loop(tiny_policy, tmp_path / scores, name, model={"path": str(tiny_policy)})
        loop.loader.examples = examples or [PairExample("p", chat("Mia has 3 apples.").input_ids, [5], [6])]
        save_model(loop, chat)
        found = read_training_layout(str(tmp_path / scores / "model"))
        assert found == TrainingLayout(scores, "text")
        save_model(replace(loop, run_dir=tmp_path / "again"), chat)
    (tmp_path / "again" / "model" / "training_layout.json").write_text('{"scores": "steps"}')
    with pytest.raises(BadInput, match=r"training_layout\.json cannot be read .*: train the model again, or remove"):
        read_training_layout(str(tmp_path / "again" / "model"))
