"""Mixtures: how much of each source, which rows, under which ids; nothing that parts a question from its answer."""

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from espalier.analysis.length_figure import bin_counts, count_tokens, figure
from espalier.data.jsonl import write_records
from espalier.data.mixture import draw_rows, read_source
from espalier.data.records import BadInput, Demonstration, PreferencePair
from espalier.data.verifiers.verify import Check, write_checks
from espalier.pipeline.problems.mix_datasets import MixDatasets
from espalier.pipeline.stage import StageContext


def source(amount: Any, name: str = "a", path: str = "x.jsonl", **more: Any) -> dict[str, Any]:
    """A source of a config."""
    return {"name": name, "path": path, "amount": amount, **more}


def mixed(tmp_path: Path, *sources: Any, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    """(rows, statistics)"""
    context = StageContext(None, tmp_path / "out.jsonl", 10.0)
    rows = list(MixDatasets(sources, **options).run("", context))
    return rows, json.loads((tmp_path / "out.statistics.json").read_text())


def sums(tmp_path: Path, number: int, name: str = "sums.jsonl") -> str:
    """A file of rows whose answer follows from their question."""
    path = tmp_path / name
    path.write_text("".join(json.dumps({"question": f"{k} + 1?", "answer": str(k + 1)}) + "\n" for k in range(number)))
    return str(path)


@pytest.mark.parametrize(("amount", "rows", "wanted"), [
    (1.0, 5, 5), (0.5, 10, 5), (0.25, 10, 2), (3.0, 4, 12), (1, 5, 1), (7, 5, 7), (2.5, 4, 10),
])  # fmt: skip
def test_a_share_has_a_dot_and_a_number_of_rows_has_none(amount: Any, rows: int, wanted: int) -> None:
    drawn = draw_rows(read_source(source(amount)), rows, 0)
    counts = Counter(drawn)
    assert len(drawn) == wanted
    assert (
        max(counts.values()) - min(counts[index] for index in range(rows)) <= 1
    )  # full repeats, then each at most once


def test_the_draw_follows_from_seed_and_name_alone() -> None:
    one, other = read_source(source(0.5)), read_source(source(0.5, name="b"))
    assert draw_rows(one, 40, 3) == draw_rows(one, 40, 3)
    assert draw_rows(one, 40, 3) != draw_rows(one, 40, 4)
    assert draw_rows(one, 40, 3) != draw_rows(other, 40, 3)


def test_every_row_keeps_its_own_answer_through_draw_repeats_and_shuffle(tmp_path: Path) -> None:
    path = sums(tmp_path, 20)
    rows, statistics = mixed(tmp_path, source(2.5, path=path, verifier="gsm8k"),
                             source(7, name="b", path=path, verifier="math"))  # fmt: skip
    assert len(rows) == len({row.id for row in rows}) == 57
    for row in rows:
        number = int(row.question.split()[0])
        name = {"a": "gsm8k", "b": "math"}[row.info["subject"]]
        assert row.gold == write_checks([Check(name, str(number + 1))])
        assert row.info["index"] == number
    assert [row.info["index"] for row in rows] != sorted(row.info["index"] for row in rows)
    assert statistics["sources"]["a"]["taken"] == 50
    assert statistics["sources"]["b"]["distinct"] == 7
    assert (statistics["rows"], statistics["distinct_questions"]) == (57, 20)


def test_parquet_and_lines_mix_alike(tmp_path: Path) -> None:
    path = sums(tmp_path, 6)
    table = pyarrow.Table.from_pylist([json.loads(line) for line in Path(path).read_text().splitlines()])
    parquet.write_table(table, tmp_path / "sums.parquet")
    of_lines, _ = mixed(tmp_path, source(1.0, path=path, verifier="gsm8k"))
    of_table, _ = mixed(tmp_path, source(1.0, path=str(tmp_path / "sums.parquet"), verifier="gsm8k"))
    assert of_lines == of_table


def test_a_folder_of_the_datasets_library_is_a_source(tmp_path: Path) -> None:
    import datasets

    rows = [{"question": "1 + 1?", "answer": "2"}, {"question": "2 + 1?", "answer": "3"}]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    hub = {"name": "h", "hub": str(tmp_path / "saved"), "amount": 1.0, "verifier": "gsm8k", "revision": "abc"}
    found, _ = mixed(tmp_path, hub)
    assert {row.question for row in found} == {"1 + 1?", "2 + 1?"}


def test_demonstrations_hold_the_answer_to_imitate(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": turns}) + "\n" + json.dumps({"prompt": "Bye", "completion": "Good night."}))
    rows, _ = mixed(tmp_path, source(1.0, path=str(path)), kind="demonstration")
    assert sorted(rows, key=lambda row: row.id) == [Demonstration("a-verifiable-train-0", "Hi\n", "Hello."),
                    Demonstration("a-verifiable-train-1", "Bye\n", "Good night.")]  # fmt: skip


def pairs(tmp_path: Path, name: str, number: int) -> str:
    """A file of pairs whose texts, tokens and scores say which they are."""
    path = tmp_path / f"{name}.jsonl"
    write_records(path, [
        PreferencePair(f"p{k}/0>p{k}/1", f"p{k}", "outcome", f"{name} {k}?", f"{k} yes", f"{k} no", [k], [k, 1], [k, 0],
                       1.0, -float(k))
        for k in range(number)
    ])  # fmt: skip
    return str(path)


def test_pairs_keep_both_sides_their_problem_and_their_scores(tmp_path: Path) -> None:
    rows, statistics = mixed(tmp_path, source(1.5, path=pairs(tmp_path, "x", 4)),
                             source(2, name="b", path=pairs(tmp_path, "y", 9)), kind="pair")  # fmt: skip
    assert len(rows) == len({row.id for row in rows}) == 8
    for row in rows:
        k = row.prompt_ids[0]
        assert row.prompt == f"{'x' if row.id.startswith('a-') else 'y'} {k}?"
        assert (row.problem_id, row.chosen, row.rejected) == (f"p{k}", f"{k} yes", f"{k} no")
        assert (row.chosen_ids, row.rejected_ids, row.rejected_score) == ([k, 1], [k, 0], -float(k))
        assert row.id in {f"a-p{k}/0>p{k}/1", f"a-p{k}/0>p{k}/1~2", f"b-p{k}/0>p{k}/1"}
    assert statistics["sources"]["a"] == {
        "from": str(tmp_path / "x.jsonl"), "split": "train", "revision": "", "rows": 4, "taken": 6, "distinct": 4,
        "distinct_questions": 4, "question_characters": {"lowest": 4, "median": 4, "highest": 4},
    }  # fmt: skip


@pytest.mark.parametrize(
    "more", [{"verifier": "gsm8k"}, {"rename": {"a": "b"}}, {"path": "", "hub": "h"}, {"split": "test"}]
)
def test_pairs_come_from_files_of_pairs_alone(more: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="'a': pairs come from a file of PreferencePair alone"):
        MixDatasets([source(1.0, **more)], kind="pair")


def test_a_file_of_other_rows_is_no_source_of_pairs(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"sums\.jsonl:1: "):
        mixed(tmp_path, source(1.0, path=sums(tmp_path, 3)), kind="pair")


def test_one_row_that_was_meant_as_all_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        mixed(tmp_path, source(1, path=sums(tmp_path, 150), verifier="gsm8k"))
    assert "amount 1 takes 1 of 150 rows; 1.0 would be 1 times all" in caplog.text


@pytest.mark.parametrize(("nodes", "message"), [
    ([], "stage.sources: there is none"),
    ([source(1.0), source(1.0)], "the name 'a' stands twice"),
    ([{"name": "a", "amount": 1.0}], "give either path .* or hub"),
    ([source(1.0, hub="b")], "give either path"),
    ([source(0)], "amount must be a share"),
    ([source("0.5")], "amount must be a share"),
    ([source(True)], "amount must be a share"),
    ([source(1.0, name="a/b")], "it begins the ids"),
    ([source(1.0, name="a-b"), source(1.0)], "ids of 'a' could be those of 'a-b', which begins with 'a-': rename one"),
    ([source(1.0, frac=2)], "there is no key 'frac'"),
    (["a 1.0"], "a source has name, amount"),
])  # fmt: skip
def test_a_source_that_is_none_is_refused_by_name(nodes: list[Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        MixDatasets(nodes)


def test_a_share_that_is_no_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"'a': 0\.01 of 5 rows is none"):
        mixed(tmp_path, source(0.01, path=sums(tmp_path, 5), verifier="gsm8k"))


def test_an_unknown_verifier_names_file_and_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"sums\.jsonl:1: there is no verifier 'nothing'"):
        mixed(tmp_path, source(1.0, path=sums(tmp_path, 5), verifier="nothing"))


def test_bins_by_hand() -> None:
    assert bin_counts([1, 2, 3, 4, 5, 5], 1, 2.0, 2) == [2, 4]
    assert "prompt" in str(figure({"prompt": {"a": [3, 3, 9], "b": [5]}}))
    assert str(figure({"prompt": {"a": [4]}})).startswith("<svg")  # one length alone


def test_lengths_are_those_of_the_tokenizer() -> None:
    class Words:
        def __call__(self, texts: list[str], add_special_tokens: bool) -> Any:
            return type("Encoded", (), {"input_ids": [text.split() for text in texts]})

    assert count_tokens({"a": ["one two", "three"]}, Words()) == {"a": [2, 1]}
