"""What a person sees of a data set before a run: every kind of example, what is left out, how long they are."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from espalier.data.jsonl import write_records
from espalier.data.records import BadInput, Demonstration, PreferencePair, StepValues
from espalier.models.load import load_tokenizer
from espalier.pipeline.stage import StageContext
from espalier.training.explain import Explain
from espalier.training.preview import Preview, length_histogram


def preview(folder: Path, policy: Path, name: str, rows: list[Any], *overrides: str, **settings: Any) -> str:
    write_records(folder / "rows.jsonl", rows)
    files = [f"model.path={policy}", f"examples.path={folder}/rows.jsonl", "examples.max_length=60"]
    stage = Preview(name, [*files, *overrides], **settings)
    assert stage.inputs()[0] == f"{folder}/rows.jsonl"
    return stage.run("", StageContext(None, folder / "preview.txt", 10.0))


def test_demonstrations_are_shown_token_by_token_with_what_is_left_out(tiny_policy: Path, tmp_path: Path) -> None:
    rows = [Demonstration(f"d{i}", "12 + 7?", " 19" + " and" * i) for i in range(9)]
    text = preview(tmp_path, tiny_policy, "train", [*rows, Demonstration("long", "1", "2" * 200)], num_examples=3)
    assert "9 examples (TokenExample)" in text
    assert "left out: 1 of 10 are longer than 60 tokens" in text
    assert re.findall(r"token example '(\w+)'", text) == ["d0", "d4", "d8"]
    tokenizer = load_tokenizer(str(tiny_policy))
    first = next(line for line in text.splitlines() if "[[" in line)
    prompt, answer = first.rstrip("]").split("[[")
    whole = len(tokenizer("12 + 7?").input_ids) + len(tokenizer(" 19").input_ids) + 1
    assert prompt.replace("│", "") == "12 + 7?"
    assert answer.replace("│", "") == " 19<|end|>"
    assert len(prompt.split("│")) + len(answer.split("│")) <= whole


def test_pairs_and_step_values_are_shown_as_their_losses_read_them(tiny_policy: Path, tmp_path: Path) -> None:
    pair = PreferencePair("p0", "q", "outcome", "Q", "a", "b", [5, 6, 7], [8, 9], [10, 11, 12, 13], 1.0, 0.0)
    text = preview(tmp_path, tiny_policy, "exp/dpo/word_arithmetic", [pair])
    assert "1 examples (PairExample), 12 tokens, of which the loss reads 6" in text
    assert "nothing is left out" in text
    assert "chosen, the loss reads 2 tokens:" in text
    steps = StepValues("s0", "q", "Q", ["a", "b"], [5], [6, 7], [1, 2], [0.25, 1.0], [1, 1], [4, 1], True)
    overrides = ["model=process_reward", "objective=process_reward", "examples=step_values"]
    text = preview(tmp_path, tiny_policy, "train", [steps, StepValues(**{**vars(steps), "id": "s1"})], *overrides)
    assert "step example 's0': 3 tokens, the head is read at 2" in text
    assert "<step 1: 0.25>" in text
    assert "left out: 1 of 2 repeat an earlier one" in text


def test_the_histogram_counts_every_example_once_in_bins_of_equal_width() -> None:
    assert length_histogram(np.array([3, 3, 4], dtype=np.int32)) == [
        "tokens of an example: 3 to 4, 3.3 on average",
        "      3 to       3         2 ########################################",
        "      4 to       4         1 ####################",
    ]
    lengths = np.array([1, *range(10, 400, 7)], dtype=np.int32)
    counts = [int(line.split()[3].replace(",", "")) for line in length_histogram(lengths)[1:]]
    assert (sum(counts), len(counts) <= 12) == (len(lengths), True)


def test_settings_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="num_examples must be at least 1"):
        Preview("train", num_examples=0)
    with pytest.raises(BadInput, match="this stage reads an experiment: leave input empty"):
        Preview("train").run("x.jsonl", StageContext(None, tmp_path / "p", 10.0))


def test_a_preview_is_made_again_once_a_file_below_or_the_tokenizer_is_another(
    tiny_policy: Path, tmp_path: Path
) -> None:
    files = [f"examples.{part}.path={tmp_path}/{part}.jsonl" for part in ("verify", "generate")]
    stage = Preview("train", [f"model.path={tiny_policy}", "examples=verifier", *files])
    found = stage.inputs()
    assert [path for path in found if path.startswith(str(tmp_path))] == [
        f"{tmp_path}/{part}.jsonl" for part in ("verify", "generate")
    ]
    assert f"{tiny_policy}/tokenizer.json" in found
    eval_too = [*files, "eval_examples=${examples}"]
    assert Explain("train", [f"model.path={tiny_policy}", "examples=verifier", *eval_too]).inputs() == found
