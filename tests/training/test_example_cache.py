"""Examples are made once, and read as they were made: or made again where anything they depend on has changed."""

import json
import logging
import os
import random
import resource
import signal
import time
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.silence.real_tokenizers import NAMES, build
from espalier.data.batches.collate import collate_outcomes, collate_pairs, collate_steps, collate_tokens
from espalier.data.batches.loader import Loader
from espalier.data.batches.packing import Layout
from espalier.data.examples import stored_examples as stored_module
from espalier.data.examples.stored_examples import (
    StoredExamples,
    column_of,
    facts_of,
    fingerprint_of,
    open_examples,
    read_about,
    write_examples,
)
from espalier.data.examples.token_examples import (
    DemonstrationExamples,
    OutcomeExample,
    PairExample,
    StepExample,
    TokenExample,
    examples_fingerprint,
)
from espalier.data.left_out import count_left_out
from espalier.data.records import BadInput, Demonstration
from espalier.models.load import load_tokenizer
from espalier.runtime.errors import exit_code_of, line_of
from espalier.training import example_cache
from espalier.training.example_cache import cache_folder, examples_key, stored_examples
from tests.support.slow import slow_unless

TOKENS = [TokenExample(f"t{i}", list(range(3, 6 + 7 * i % 11)), 2, [0.5, -1.0] * (i % 2) if i == 1 else [])
          for i in range(9)]  # fmt: skip
TOKENS[1] = replace(TOKENS[1], ids=[5, 6, 7, 8], weights=[0.5, -1.0])
STEPS = [
    StepExample(f"s{i}", list(range(9, 14 + i)), [1, 3], [0.1 * i, 1.0], [], i % 2 == 0, f"p{i}") for i in range(7)
]
OUTCOMES = [OutcomeExample(f"o{i}", list(range(4, 9 + i)), 2, 1 / 3, 0.7, [8, 9][: i % 3]) for i in range(7)]
PAIRS = [PairExample(f"p{i}", [5, 6, 7], [8] * (1 + i), [9, 10], 0.25 * i, "q", 1.5) for i in range(7)]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache" / "espalier"


def store(folder: Path, examples: list[Any]) -> StoredExamples:
    folder.mkdir()
    write_examples(folder, examples)
    about = read_about(folder)
    assert about is not None
    return open_examples(folder, about)


def demonstrations(path: Path, number: int = 12, word: str = "apples") -> dict[str, Any]:
    """A file of demonstrations, and the config node that reads it."""
    rows = [Demonstration(f"d{i}", f"Ana has {i} {word}.\n", "She eats one.\n" * (1 + i % 3)) for i in range(number)]
    path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    target = "espalier.data.examples.token_examples.DemonstrationExamples"
    return {"_target_": target, "path": str(path), "max_length": 60, "min_completion_tokens": 0}


@pytest.mark.parametrize("examples", [TOKENS, STEPS, OUTCOMES, PAIRS], ids=["tokens", "steps", "outcomes", "pairs"])
def test_stored_examples_are_those_that_were_written(examples: list[Any], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(stored_module, "_ROWS", 3)  # several pieces
    stored = store(tmp_path / "stored", examples)
    assert list(stored) == examples == stored[:]
    assert [stored[-1], stored[2:4], stored.take([3, 0, 3])] == [
        examples[-1],
        examples[2:4],
        [examples[k] for k in (3, 0, 3)],
    ]
    assert list(column_of(stored, "has_outcome")) == [getattr(row, "has_outcome", None) for row in examples]
    assert list(column_of(stored, "id")) == [one.id for one in examples]
    assert list(column_of(stored, "problem_id", "none")) == [getattr(one, "problem_id", "none") for one in examples]
    assert (facts_of(stored) == facts_of(examples)).all()
    assert fingerprint_of(stored) == examples_fingerprint(examples) == examples_fingerprint(stored[:])
    with pytest.raises(IndexError):
        stored[len(examples)]


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
@pytest.mark.parametrize("budget", [0, 40])
@pytest.mark.parametrize(
    ("examples", "collate"),
    [(TOKENS, collate_tokens), (STEPS, collate_steps), (OUTCOMES, collate_outcomes), (PAIRS, collate_pairs)],
    ids=["tokens", "steps", "outcomes", "pairs"],
)
def test_batches_of_stored_examples_are_those_of_listed_ones_bit_for_bit(
    examples: list[Any], collate: Any, budget: int, layout: str, tmp_path: Path
) -> None:
    loaders = [Loader(rows, 4, 2, 3, 1, 2, budget) for rows in (examples, store(tmp_path / "stored", examples))]
    for step in range(5):  # over two epochs
        listed, stored = (loader.micro_batches(step) for loader in loaders)
        assert [len(group) for group in listed] == [len(group) for group in stored]
        for one, other in zip(listed, stored, strict=True):
            if not one:
                continue
            first, second = (vars(collate(group, Layout(layout))) for group in (one, other))
            for name, value in first.items():
                same = torch.equal(value, second[name]) if torch.is_tensor(value) else True
                assert same, name
            assert first["example_ids"] == second["example_ids"]
            assert first["row_keys"] == second["row_keys"]
    assert list(loaders[0].evaluation_batches()) == list(loaders[1].evaluation_batches())
    assert loaders[0].stand_in(1) == loaders[1].stand_in(1)


def test_the_examples_of_a_step_are_those_of_shuffled_epochs_laid_end_to_end(tmp_path: Path) -> None:
    order: list[int] = []
    for epoch in range(3):
        places = list(range(len(TOKENS)))
        random.Random(f"7/{epoch}").shuffle(places)
        order += places
    loader = Loader(store(tmp_path / "stored", TOKENS), 4, 2, 7)
    for step in range(6):
        wanted = sorted((TOKENS[place] for place in order[4 * step : 4 * step + 4]), key=lambda one: len(one.ids))
        assert loader.micro_batches(step) == [wanted[:2], wanted[2:]]


def test_a_second_start_tokenises_nothing(
    cache: Path, tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, tokenizer = demonstrations(tmp_path / "d.jsonl"), load_tokenizer(str(tiny_policy))
    listed = example_cache.build(node).load(tokenizer)
    assert list(stored_examples(node, tokenizer)) == listed
    monkeypatch.setattr(DemonstrationExamples, "load", lambda *_: pytest.fail("it was tokenised again"))
    assert list(stored_examples(node, load_tokenizer(str(tiny_policy)))) == listed
    moved = tmp_path / "moved.jsonl"
    (tmp_path / "d.jsonl").rename(moved)
    assert list(stored_examples({**node, "path": str(moved)}, tokenizer)) == listed, "bytes count, not names"
    assert [path.name for path in cache.iterdir() if not path.name.startswith(".")] == [
        examples_key({**node, "path": str(moved)}, tokenizer)
    ]


def test_what_was_said_and_left_out_is_said_again(
    cache: Path, tiny_policy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node, tokenizer = {**demonstrations(tmp_path / "d.jsonl"), "max_length": 40}, load_tokenizer(str(tiny_policy))
    lines, counts = [], []
    for name in ("d.jsonl", "d.jsonl", "e.jsonl"):
        if name == "e.jsonl":
            (tmp_path / "d.jsonl").rename(tmp_path / name)
        caplog.clear()
        with count_left_out() as counted:
            stored_examples({**node, "path": str(tmp_path / name)}, tokenizer)
        lines.append([row.getMessage() for row in caplog.records if row.levelname == "WARNING"])
        counts.append([(Path(row.path).name, row.reason, row.number, row.total) for row in counted])
    assert lines[0] == lines[1] == [line.replace("e.jsonl", "d.jsonl") for line in lines[2]]
    assert "d.jsonl: 4 of 12 examples are longer than 40 tokens and are left out" in lines[0][0]
    assert counts == [[(name, "are longer than 40 tokens", 4, 12)] for name in ("d.jsonl", "d.jsonl", "e.jsonl")]


def test_a_remembered_line_names_the_model_that_is_asked_now(
    cache: Path, tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And changes no other word that has the old name in it."""

    def load(self: DemonstrationExamples, tokenizer: Any) -> list[TokenExample]:
        name = tokenizer.name_or_path
        logging.getLogger("espalier.data").warning("the template of %s, not of %s-chat or x%s", name, name, name)
        return TOKENS

    monkeypatch.setattr(DemonstrationExamples, "load", load)
    node = demonstrations(tmp_path / "d.jsonl")
    for name in ("M", "other/N", "M"):
        tokenizer = load_tokenizer(str(tiny_policy))
        tokenizer.name_or_path = name
        caplog.clear()
        stored_examples(node, tokenizer)
        (line,) = [row.getMessage() for row in caplog.records if row.levelname == "WARNING"]
        assert line == f"the template of {name}, not of M-chat or xM"
    assert len([path for path in cache.iterdir() if not path.name.startswith(".")]) == 1


def test_what_is_wrong_with_examples_to_evaluate_on_is_said_under_their_name(
    cache: Path, tiny_policy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = load_tokenizer(str(tiny_policy))
    node = {**demonstrations(tmp_path / "d.jsonl"), "max_length": 40}
    for _ in range(2):
        caplog.clear()
        stored_examples(node, tokenizer, "eval_examples")
        assert f"eval_examples: {tmp_path}/d.jsonl: 4 of 12 examples are longer" in caplog.text
    remedy = r"name others that are no training data, or set eval_examples=null evaluation\.every=0$"
    with pytest.raises(BadInput, match=r"^eval_examples: .*d\.jsonl: no example is left \(of 12 read\): " + remedy):
        stored_examples({**node, "max_length": 2}, tokenizer, "eval_examples")
    assert "eval_examples: " in caplog.text
    (tmp_path / "e.jsonl").write_text('{"id": "a"}\n')
    with pytest.raises(BadInput, match=r"^eval_examples: .*e\.jsonl:1: Demonstration lacks the field 'prompt'"):
        stored_examples({**node, "path": str(tmp_path / "e.jsonl")}, tokenizer, "eval_examples")
    with pytest.raises(BadInput, match=r"^[^:]*d\.jsonl: no example is left \(of 12 read\)$"):
        stored_examples({**node, "max_length": 2}, tokenizer)


def test_anything_that_changes_tokens_changes_the_name(tiny_policy: Path, tmp_path: Path) -> None:
    def key(tokenizer: Any = None, **settings: Any) -> str:
        return examples_key({**node, **settings}, tokenizer or load_tokenizer(str(tiny_policy)))

    def changed(change: Any) -> Any:
        tokenizer = load_tokenizer(str(tiny_policy))
        change(tokenizer)
        return tokenizer

    node = demonstrations(tmp_path / "d.jsonl")
    start = key()
    assert key() == start
    assert key(changed(lambda t: t(["a", "b c"], padding=True, truncation=True, max_length=2))) == start
    names = {
        "a setting": key(max_length=59),
        "the template": key(changed(lambda t: setattr(t, "chat_template", "{{ messages }}"))),
        "a token more": key(changed(lambda t: t.add_tokens(["<one>"]))),
        "another end": key(changed(lambda t: setattr(t, "eos_token", "<|pad|>"))),
        "nested settings": key(template={"before": "Q: "}),
    }
    demonstrations(tmp_path / "d.jsonl", word="pears")
    names["the file"] = key()
    assert len({start, *names.values()}) == 1 + len(names), names


@pytest.mark.parametrize("name", slow_unless(lambda name: name in ("tiny", "sentencepiece"), NAMES))
def test_published_tokenizers_tell_themselves_apart_and_their_examples_come_back(
    name: str, cache: Path, tiny_policy: Path, tmp_path: Path
) -> None:
    pytest.importorskip("mistral_common", reason="the published tokenizers lie in the package mistral_common")
    pytest.importorskip("sentencepiece", reason="one of them is read with the package sentencepiece")
    tokenizer = build(name, tmp_path / name, 16000).tokenizer
    node = demonstrations(tmp_path / "d.jsonl", word="Äpfel 🍏")
    assert examples_key(node, tokenizer) != examples_key(node, load_tokenizer(str(tiny_policy))) or name == "tiny"
    assert list(stored_examples(node, tokenizer)) == example_cache.build(node).load(tokenizer)


def _write_and_hang(node: dict[str, Any], policy: str, cache: str) -> None:
    """In a child: everything is written but the last file."""
    import datasets

    datasets.config.HF_DATASETS_CACHE = Path(cache)  # type: ignore[assignment]
    example_cache.fsync = lambda _: time.sleep(60)  # type: ignore[attr-defined]
    stored_examples(node, load_tokenizer(policy))


def test_a_kill_while_writing_leaves_nothing_that_is_read(cache: Path, tiny_policy: Path, tmp_path: Path) -> None:
    node, tokenizer = demonstrations(tmp_path / "d.jsonl"), load_tokenizer(str(tiny_policy))
    folder = cache / examples_key(node, tokenizer)
    child = get_context("fork").Process(target=_write_and_hang, args=(node, str(tiny_policy), str(cache.parent)))
    child.start()
    deadline = time.monotonic() + 30
    while not (folder.with_name(folder.name + ".partial") / stored_module.ABOUT).exists():
        assert time.monotonic() < deadline
        assert child.is_alive()
        time.sleep(0.02)
    os.kill(child.pid or 0, signal.SIGKILL)
    child.join()
    assert not folder.exists()
    assert list(stored_examples(node, tokenizer)) == example_cache.build(node).load(tokenizer)
    assert not folder.with_name(folder.name + ".partial").exists()


@pytest.mark.parametrize("spoil", ["cut", "missing", "torn"])
def test_a_damaged_folder_is_made_again(spoil: str, cache: Path, tiny_policy: Path, tmp_path: Path) -> None:
    node, tokenizer = demonstrations(tmp_path / "d.jsonl"), load_tokenizer(str(tiny_policy))
    folder = stored_examples(node, tokenizer).folder
    if spoil == "cut":
        os.truncate(folder / "examples.arrow", 100)
    elif spoil == "missing":
        (folder / "facts.bin").unlink()
    else:
        os.truncate(folder / stored_module.ABOUT, 20)
    assert read_about(folder) is None
    assert list(stored_examples(node, tokenizer)) == example_cache.build(node).load(tokenizer)


def test_a_full_disk_is_one_line_and_leaves_nothing(cache: Path, tiny_policy: Path, tmp_path: Path) -> None:
    node, tokenizer = demonstrations(tmp_path / "d.jsonl", 400), load_tokenizer(str(tiny_policy))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    cache.mkdir(parents=True)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        with pytest.raises(OSError, match="too large") as error:
            stored_examples(node, tokenizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert exit_code_of(error.value) == 4
    line = line_of(error.value)
    assert line.startswith(str(cache))
    assert line.endswith("free space, then run the same command again")
    assert [path for path in cache.iterdir() if path.is_dir()] == []
    assert len(stored_examples(node, tokenizer)) == 400


def test_bad_files_are_refused_as_before(cache: Path, tiny_policy: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_policy))
    with pytest.raises(BadInput, match=r"none.jsonl: no such file"):
        stored_examples({**demonstrations(tmp_path / "d.jsonl"), "path": str(tmp_path / "none.jsonl")}, tokenizer)
    (tmp_path / "d.jsonl").write_text('{"id": 1}\n')
    with pytest.raises(BadInput, match=r"d.jsonl:1: "):
        stored_examples({**demonstrations(tmp_path / "e.jsonl"), "path": str(tmp_path / "d.jsonl")}, tokenizer)


def test_a_cache_that_cannot_be_written_is_named(
    tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, tokenizer = demonstrations(tmp_path / "d.jsonl"), load_tokenizer(str(tiny_policy))
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "file")
    with pytest.raises(BadInput, match="cannot be written there: set HF_DATASETS_CACHE to a folder of yours"):
        stored_examples(node, tokenizer)
    assert cache_folder() == tmp_path / "file" / "espalier"


def test_a_tokenizer_in_python_is_known_by_all_its_files(tmp_path: Path) -> None:
    from transformers import CTRLTokenizer

    vocabulary = {word: place for place, word in enumerate(["<unk>", "a@@", "b@@", "c", "ab@@", "bc"])}
    tokenizers, rows = [], demonstrations(tmp_path / "rows.jsonl")
    for number, merges in enumerate(("a b\nb c</w>", "b c</w>\na b")):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "vocab.json").write_text(json.dumps(vocabulary))
        (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
        tokenizers.append(CTRLTokenizer.from_pretrained(folder))
    assert tokenizers[0].tokenize("abc") != tokenizers[1].tokenize("abc")
    assert examples_key(rows, tokenizers[0]) != examples_key(rows, tokenizers[1])
