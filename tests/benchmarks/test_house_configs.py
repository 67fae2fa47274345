"""The house of configs: no twins among the larger ones, experiments on neutral bases, no option without a use."""

from pathlib import Path

from omegaconf import OmegaConf

from benchmarks.house.config_twins import CONF, config_twins, effective_lines, read_configs, shared_share
from benchmarks.house.unused_options import Option, code_sections, is_named, unnamed_configs, unused_options

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


def test_an_experiment_stands_on_neutral_bases_and_is_at_most_three_deep() -> None:
    for path in EXPERIMENTS:
        name = str(path.relative_to(CONF).with_suffix(""))
        rehearsed = name.replace("exp/debug/", "exp/")  # a rehearsal stands on the very run that it shortens
        assert all(parent == rehearsed or parent.split("/")[-1].startswith("base_") for parent in parents(path)), path
        assert depth(name) <= 3, path


def test_words_in_code_are_those_in_backquotes_fences_and_indented_lines_of_one_section() -> None:
    page = "Say `stage.label=hard` here.\n\n    run requests.first=A\n\n## On `kto`\n```bash\nbeta=1\n```\nplain word\n"
    first, second = code_sections(page)
    assert first == {"stage.label", "stage", "label", "hard", "run", "requests.first", "requests", "first", "A"}
    assert second == {"kto", "bash", "beta"}


def test_an_option_is_set_by_conf_where_it_has_two_values_follows_another_or_is_left_to_the_user() -> None:
    assert not Option("C", "x", values={"1"}).is_set_by_conf()
    for values in ({"1", "2"}, {'"${model.path}"'}, {'"???"'}):
        assert Option("C", "x", values=values).is_set_by_conf()


def test_a_bare_name_counts_only_beside_a_config_that_holds_the_option() -> None:
    option = Option("KTO", "weight", {"objective"}, {"kto"}, {"1.0"})
    assert not is_named(option, [{"weight"}, {"kto"}])
    assert is_named(option, [{"weight", "kto"}])
    assert is_named(option, [{"objective.weight"}])


def tree(root: Path, **texts: str) -> Path:
    """A project of conf/, docs/ and scripts/ with one objective; `texts` by the part they stand in."""
    target = "espalier.training.objectives.sft.SupervisedFineTuning"
    write(root / "conf/objective/sft.yaml", f"_target_: {target}\nreduction: token\ntemperature: 1.0\n")
    write(root / "conf/exp/mine.yaml", "# @package _global_\n" + texts.get("exp", ""))
    write(root / "docs/page.md", texts.get("page", ""))
    write(root / "scripts/run.sh", texts.get("script", ""))
    write(root / "README.md", "")
    return root


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def unused_of_sft(root: Path) -> list[str]:
    """The options of the tree's one objective that are unused."""
    return [line.split(": ")[1] for line in unused_options(root) if "SupervisedFineTuning" in line]


def test_an_option_is_used_by_another_value_in_conf_by_a_script_or_by_a_page(tmp_path: Path) -> None:
    both = ["objective.loss_aggregation", "objective.temperature"]
    assert unused_of_sft(tree(tmp_path / "none", exp="objective:\n  loss_aggregation: token\n")) == both
    assert unused_of_sft(tree(tmp_path / "conf", exp="objective:\n  loss_aggregation: sequence\n")) == both[1:]
    assert unused_of_sft(tree(tmp_path / "script", script="run objective.temperature=2\n")) == both[:1]
    page = "With `objective=sft`, `loss_aggregation` says so; the temperature is a word."
    assert unused_of_sft(tree(tmp_path / "page", page=page)) == both[1:]


def test_a_config_that_no_config_script_or_page_names_is_listed(tmp_path: Path) -> None:
    assert unnamed_configs(tree(tmp_path / "none")) == ["objective/sft"]
    assert unnamed_configs(tree(tmp_path / "page", page="Take `objective=sft`.")) == []
    assert unnamed_configs(tree(tmp_path / "conf", exp="defaults:\n  - override /objective: sft\n")) == []


def test_every_option_is_used_and_every_config_is_named() -> None:
    assert unused_options() == []
    assert unnamed_configs() == []
