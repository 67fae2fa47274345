"""Token lengths by source as a picture: problems, demonstrations and pairs, under the whole names of their sources."""

from pathlib import Path
from typing import Any

import pytest

from espalier.analysis.charts import line_chart
from espalier.analysis.length_figure import DrawLengths
from espalier.data.jsonl import write_records
from espalier.data.records import BadInput, Demonstration, PreferencePair, Problem
from espalier.models.load import load_tokenizer
from espalier.pipeline.problems.mix_datasets import MixDatasets
from espalier.pipeline.stage import StageContext


def drawn(path: Path, tokenizer: Path) -> tuple[str, dict[str, Any]]:
    """(figure, counts)"""
    context = StageContext(None, path.with_suffix(".svg"), 10.0)
    return DrawLengths(str(tokenizer)).run(str(path), context), context.counts


def pair(name: str, prompt: str, chosen: str, rejected: str) -> PreferencePair:
    """A pair whose ids nobody reads."""
    return PreferencePair(name, name, "outcome", prompt, chosen, rejected, [1], [2], [3], 1.0, 0.0)


def mixed_pairs(folder: Path, *names: str) -> Path:
    """A mixture of one pair per source, the prompt of each one digit longer than the one before."""
    for number, name in enumerate(names):
        write_records(folder / f"{name}.jsonl", [pair("x-1", "1" * (number + 1), "5 5", "7 7 7 7")])
    sources = [{"name": name, "path": str(folder / f"{name}.jsonl"), "amount": 1.0} for name in names]
    rows = MixDatasets(sources, kind="pair").run("", StageContext(None, folder / "mixed.jsonl", 10.0))
    write_records(folder / "mixed.jsonl", rows)
    return folder / "mixed.jsonl"


def test_pairs_are_counted_on_both_sides_under_the_whole_name_of_their_source(
    tiny_policy: Path, tmp_path: Path
) -> None:
    figure, counts = drawn(mixed_pairs(tmp_path, "a-b", "a-c"), tiny_policy)
    tokenizer = load_tokenizer(str(tiny_policy))
    lengths = {text: len(tokenizer(text, add_special_tokens=False).input_ids) for text in ("1", "11", "5 5", "7 7 7 7")}
    assert lengths["11"] > lengths["1"]

    def one(text: str) -> str:
        return f"{lengths[text]} to {lengths[text]}, mean {lengths[text]:.1f}, n 1"

    assert counts == {
        "prompt/a-b": one("1"), "prompt/a-c": one("11"), "chosen/a-b": one("5 5"), "chosen/a-c": one("5 5"),
        "rejected/a-b": one("7 7 7 7"), "rejected/a-c": one("7 7 7 7"),
    }  # fmt: skip
    assert all(text in figure for text in ("tokens of the rejected", "a-b (1)", "a-c (1)"))


def test_demonstrations_of_no_mixture_are_of_one_source(tiny_policy: Path, tmp_path: Path) -> None:
    rows = [Demonstration("a-b-1", "1", "2"), Demonstration("c-1", "1 1 1", "2")]
    write_records(tmp_path / "rows.jsonl", rows)
    _, counts = drawn(tmp_path / "rows.jsonl", tiny_policy)
    assert list(counts) == ["prompt/all", "completion/all"]
    assert all(text.endswith("n 2") for text in counts.values())


def test_problems_are_named_by_their_subject(tiny_policy: Path, tmp_path: Path) -> None:
    # one that speaks of a completion is still a problem
    rows = [Problem("1", "1", "1", {"subject": "a-b", "completion": "x"}), Problem("2", "1", "1")]
    write_records(tmp_path / "rows.jsonl", rows)
    _, counts = drawn(tmp_path / "rows.jsonl", tiny_policy)
    assert list(counts) == ["prompt/a-b", "prompt/all"]


def test_a_row_of_no_source_and_a_file_without_rows_are_refused(tiny_policy: Path, tmp_path: Path) -> None:
    path = mixed_pairs(tmp_path, "a-b")
    write_records(path, [pair("a-x-1", "1", "1", "1")])
    with pytest.raises(BadInput, match=r"mixed\.jsonl: 'a-x-1' begins with no source of its statistics \(a-b\)"):
        drawn(path, tiny_policy)
    path.write_text("")
    with pytest.raises(BadInput, match=r"mixed\.jsonl: holds no row"):
        drawn(path, tiny_policy)
    path.write_text("{not json\n")
    with pytest.raises(BadInput, match=r"mixed\.jsonl:1: "):
        drawn(path, tiny_policy)


def test_sources_behind_the_fifth_have_the_colours_again_with_dashes(tiny_policy: Path, tmp_path: Path) -> None:
    few, _ = drawn(mixed_pairs(tmp_path, *"abcde"), tiny_policy)
    assert "stroke-dasharray=" not in few
    (tmp_path / "many").mkdir()
    many, _ = drawn(mixed_pairs(tmp_path / "many", *"abcdefg"), tiny_policy)
    dashed = [part for part in many.split("<") if "stroke-dasharray=" in part]
    assert {part.split('class="')[1].split('"')[0] for part in dashed} == {"line c0", "line c1"}
    chart = line_chart([(series, str(series), [(0.0, 1.0), (1.0, 2.0)]) for series in range(7)], "x", "y")
    assert chart.count("stroke-dasharray=") == 2
    assert chart.count("fill-opacity=") == 4, "two marks of two lines"
