"""The house of configs: no twins among the larger ones, and experiments that stand on neutral bases."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from benchmarks.house_counts.config_twins import CONF, config_twins, effective_lines, read_configs, shared_share

EXPERIMENTS = sorted(CONF.glob("exp/**/*.yaml"))


def parents(path: Path) -> list[str]:
    """The experiments that an experiment's defaults begin with, as `exp/kind/name`."""
    entries = [entry for entry in OmegaConf.load(path).defaults if isinstance(entry, str)]
    return [entry.lstrip("/") for entry in entries if entry.startswith("/exp/")]


def depth(name: str) -> int:
    """How many experiments lie on the way from this one down to a root config, itself included."""
    return 1 + max((depth(parent) for parent in parents(CONF / f"{name}.yaml")), default=0)


def test_blank_lines_comments_and_indentation_say_nothing() -> None:
    assert effective_lines("# why\n\na:\n  b: 1  # one\n\t\n") == ["a:", "b: 1  # one"]


def test_shared_lines_are_counted_as_often_as_both_have_them_and_per_line_of_the_longer_file() -> None:
    assert shared_share(["a", "a", "b", "c"], ["a", "b", "b"]) == 2 / 4
    assert shared_share(["a", "b"], ["b", "a"]) == 1.0
    assert shared_share([], []) == 0.0


def test_twins_have_fifteen_lines_each_and_agree_in_nine_tenths() -> None:
    lines = [f"key_{i}: 1" for i in range(20)]
    texts = {
        "a": "\n".join(lines),
        "two_differ": "\n".join([*lines[:18], "x: 1", "y: 1"]),
        "three_differ": "\n".join([*lines[:17], "p: 1", "q: 1", "r: 1"]),
        "short": "\n".join(lines[:14]),
        "same_but_short": "# a comment\n" + "\n".join(lines[:14]),
    }
    assert config_twins(texts) == [("a", "two_differ", 0.9)]


def test_no_two_configs_are_twins() -> None:
    assert config_twins(read_configs()) == []


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: str(path.relative_to(CONF)))
def test_an_experiment_stands_on_neutral_bases_and_is_at_most_three_deep(path: Path) -> None:
    name = str(path.relative_to(CONF).with_suffix(""))
    rehearsed = name.replace("exp/debug/", "exp/")  # a rehearsal stands on the very run that it shortens
    assert all(parent == rehearsed or parent.split("/")[-1].startswith("base_") for parent in parents(path))
    assert depth(name) <= 3
