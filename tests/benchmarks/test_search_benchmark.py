"""What the benchmark of search makes of its records, and that every arm of it can be built."""

import pytest

from benchmarks.search.arms import METHODS, SIZES, settings_of
from benchmarks.search.runs import SearchRecord
from benchmarks.search.search import Speed, accuracy_parts, speed_parts
from espalier.runtime.entrypoint import build, compose_config
from espalier.runtime.schemas import SampleConfig


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("method", METHODS)
def test_every_arm_is_built(method: str, size: int) -> None:
    settings = ["policy=p", "output=o", *settings_of(method, size, 33.3), "scorer@search.scorer=random"]
    search = build(compose_config(SampleConfig, "api/vllm/search", settings).search)
    assert search.budget.tokens in (0, round(33.3 * size))


def record(scorer: str, seed: int, accuracy: float) -> SearchRecord:
    return SearchRecord("word_arithmetic", "dvts", scorer, 16, seed, accuracy, 400.0, 2.0, 10, 90, 100, 100)


def test_scorers_are_compared_seed_by_seed() -> None:
    rows = [record("random", seed, 0.3 + seed / 10) for seed in range(3)]
    rows += [record("process", seed, 0.5 + seed / 10) for seed in range(3)]
    figures, table = accuracy_parts([*rows, record("exact", 0, 0.9)])
    assert set(figures) == {"word_arithmetic_dvts_process_minus_random", "word_arithmetic_dvts_exact_minus_process"}
    assert figures["word_arithmetic_dvts_process_minus_random"]["value"] == pytest.approx(0.2)
    assert figures["word_arithmetic_dvts_process_minus_random"]["met"]
    assert figures["word_arithmetic_dvts_exact_minus_process"]["value"] == pytest.approx(0.4)
    assert [row[2] for row in table["rows"]] == ["exact", "process", "random"]
    assert [row[-1] for row in table["rows"]] == ["0.90"] * 3


def test_both_ways_are_compared_on_the_same_problems() -> None:
    rows = [Speed("word_arithmetic", "product", 0, 6.0, 0.7, 105.0, 100.0, 100.0),
            Speed("word_arithmetic", "public", 0, 1.0, 0.7, 2000.0, 900.0, 0.0)]  # fmt: skip
    figures, _ = speed_parts(rows)
    assert (figures["word_arithmetic_speed"]["value"], figures["word_arithmetic_speed"]["met"]) == (6.0, True)
    assert figures["word_arithmetic_prompt_tokens_by_distinct"]["value"] == 1.05
    assert figures["word_arithmetic_prompt_tokens_by_distinct"]["met"]
    assert figures["word_arithmetic_scored_tokens_by_distinct"]["better"] == "lower"
