"""Every config composes, in both forms, and every `_target_` in it binds to its signature."""

import inspect
import itertools
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from espalier.rl.combinations import check_combinations
from espalier.runtime.entrypoint import BadConfig, check_component, find_component, register_schemas
from espalier.runtime.schemas import RLConfig
from tests.support.slow import slow_unless

CONF = Path(__file__).resolve().parent.parent.parent / "conf"
EXPERIMENTS = sorted([*CONF.glob("exp/**/*.yaml"), *CONF.glob("api/vllm/*.yaml"), *CONF.glob("api/openai/*.yaml")])
STAGES = sorted(CONF.glob("stage/**/*.yaml"))
BASES = [CONF / f"{name}.yaml" for name in ("train", "sample", "rl", "stage")]
ALL = sorted(CONF.rglob("*.yaml"))
# What the programs add to the config's own keys when they build a component.
GIVEN_BY_CODE = {"client": {"seed": 0}}
GIVEN_BY_CODE |= {
    name: {"params": [], "lr": 1e-3} for name in ("optimizer", "critic.optimizer", "implicit_reward.optimizer")
}


def name_of(path: Path) -> str:
    return str(path.relative_to(CONF).with_suffix(""))


def compose_config(folder: Path, name: str, *overrides: str) -> DictConfig:
    """What `-cp folder -cn name overrides` gives; conf/ is always searched too."""
    register_schemas()
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=str(folder), version_base="1.3"):
        search = [] if folder == CONF else [f"hydra.searchpath=[file://{CONF}]"]
        return compose(config_name=name, overrides=[*overrides, *search])


def missing_keys(node: Any, name: str = "") -> list[str]:
    """The keys whose value is ???."""
    if isinstance(node, dict):
        return [key for k, value in node.items() for key in missing_keys(value, f"{name}.{k}".lstrip("."))]
    return [name] if node == "???" else []


def resolve(config: DictConfig) -> dict[str, Any]:
    """The config as a dict, with a value for every one that the user must give."""
    for key in missing_keys(OmegaConf.to_container(config)):
        OmegaConf.update(config, key, 1 if key == "stage.round" else "given")
    found = OmegaConf.to_container(config, resolve=True)
    assert isinstance(found, dict)
    return found


def components(node: Any, name: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(key, node) of everything with a `_target_`."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield name, node
        for key, value in node.items():
            yield from components(value, f"{name}.{key}".lstrip("."))
    elif isinstance(node, list):
        for value in node:
            yield from components(value, name)


def bind_components(config: DictConfig) -> list[str]:
    """Bind every component to its signature; the keys of those bound. Raises BadConfig on a wrong key."""
    bound = []
    for key, node in components(resolve(config)):
        kinds = {part.kind for part in inspect.signature(find_component(node["_target_"])).parameters.values()}
        assert inspect.Parameter.VAR_KEYWORD not in kinds, f"{node['_target_']} takes **kwargs: keys go unchecked"
        check_component(node, **GIVEN_BY_CODE.get(key, {}))
        bound.append(key)
    return bound


@cache
def _composed(path: Path) -> DictConfig:
    return compose_config(CONF, name_of(path))


def composed(path: Path) -> DictConfig:
    """A copy of what a config composes to, which is composed once."""
    return deepcopy(_composed(path))


def is_part_of_another(path: Path) -> bool:
    """Whether the defaults list of another experiment names this one: it is composed with that."""
    return any(f"  - /{name_of(path)}\n" in text for text in _TEXTS)


_TEXTS = {path.read_text() for path in EXPERIMENTS}


@pytest.mark.parametrize(
    "path", slow_unless(lambda path: not is_part_of_another(path), [*EXPERIMENTS, *STAGES, *BASES]), ids=name_of
)
def test_every_config_composes_and_binds(path: Path) -> None:
    full = composed(path)
    bound = bind_components(full)
    assert bound or path.stem == "stage"
    config = OmegaConf.to_object(full)
    if isinstance(config, RLConfig):
        check_combinations(config)
        assert (config.critic is not None) == find_component(config.advantage["_target_"]).needs_critic
        assert config.critic is None or config.critic.model["path"] == "given"


# One config of every folder: they are found in the same way as the others beside them.
FIRST = {min(path for path in ALL if path.parent == folder) for folder in {path.parent for path in ALL}}


@pytest.mark.parametrize("path", slow_unless(FIRST.__contains__, [*EXPERIMENTS, *STAGES, *BASES]), ids=name_of)
def test_a_config_is_the_same_by_its_short_name_in_its_folder(path: Path) -> None:
    assert compose_config(path.parent, path.stem) == composed(path)


@pytest.mark.parametrize("path", slow_unless(FIRST.__contains__, STAGES), ids=name_of)
def test_every_stage_is_found_by_its_folder_and_name(path: Path) -> None:
    name = str(path.relative_to(CONF / "stage").with_suffix(""))
    found = compose_config(CONF / "stage", name)
    assert found == composed(path)
    assert "stage" in bind_components(found)


@pytest.mark.parametrize(
    ("base", "groups"),
    [("train", ("model", "optimizer")), ("train", ("objective", "deepspeed")), ("train", ("examples", "lora")),
     ("sample", ("task", "client", "server", "requests")),
     ("rl", ("advantage", "reward", "critic", "kl", "implicit_reward", "estimators"))],
)  # fmt: skip
def test_every_option_of_a_group_composes_and_binds(base: str, groups: tuple[str, ...]) -> None:
    """The first options of the groups together, then the second ones: groups whose options read none of each other."""
    options = [[f"{group}={path.stem}" for path in sorted((CONF / group).glob("*.yaml"))] for group in groups]
    assert all(options)
    for chosen in itertools.zip_longest(*options):
        bind_components(compose_config(CONF, base, *filter(None, chosen)))


def test_what_a_config_leaves_open_is_open_however_it_is_composed() -> None:
    """A value of ??? does not replace one of the defaults list: the key then has that value, and nobody is asked."""
    for path in ALL:
        own = OmegaConf.to_container(OmegaConf.load(path))
        assert isinstance(own, dict)
        own.pop("defaults", None)
        if not missing_keys(own) or "@package" in path.read_text():
            continue
        found: Any = OmegaConf.to_container(_composed(path))
        for folder in path.relative_to(CONF).parts[:-1]:
            found = found.get(folder, found)
        assert set(missing_keys(own)) <= set(missing_keys(found)), path


def test_a_package_line_is_the_first_line() -> None:
    for path in ALL:
        text = path.read_text()
        assert "@package" not in text or text.startswith("# @package _global_\n"), path


def test_the_first_comment_says_what_a_config_is_for() -> None:
    for path in ALL:
        lines = [line for line in path.read_text().splitlines() if line != "# @package _global_"]
        assert re.match(r"# \S.{10,}", lines[0]), f"{path}: no comment that says what it is for"


def test_an_experiment_says_only_what_differs() -> None:
    for path in EXPERIMENTS:
        text = path.read_text()
        assert len(text.splitlines()) <= 25, path
        assert text.startswith("# @package _global_\n"), path


def test_no_version_date_or_hyper_parameter_in_a_name() -> None:
    for path in ALL:
        known = re.sub(r"gsm8k|zero[0-3]|round2|(\d\.)?\d+b", "x", path.stem)
        assert re.fullmatch(r"[a-z][a-z_]*", known), path
        assert not re.search(r"(^|_)(v|new|final|old|test|tmp|copy)(_|$)", path.stem), path


def write(folder: Path, text: str) -> Path:
    (folder / "mine.yaml").write_text("# @package _global_\n# A test.\ndefaults:\n  - /train\n  - _self_\n" + text)
    return folder


def test_a_config_of_ones_own_folder_stands_on_ours(tmp_path: Path) -> None:
    config = compose_config(write(tmp_path, "update:\n  learning_rate: 0.5\n"), "mine")
    assert config["update"].learning_rate == 0.5
    assert {"model", "objective", "examples", "optimizer"} <= set(bind_components(config))


def test_a_misspelt_key_of_a_root_fails_in_a_yaml(tmp_path: Path) -> None:
    with pytest.raises(HydraException, match="learningrate"):
        compose_config(write(tmp_path, "learningrate: 0.5\n"), "mine")


def test_a_misspelt_key_of_a_component_fails_in_a_yaml(tmp_path: Path) -> None:
    config = compose_config(write(tmp_path, "optimizer:\n  beta: [0.9, 0.95]\n"), "mine")
    with pytest.raises(BadConfig, match="has no setting 'beta': did you mean 'betas'"):
        bind_components(config)


@pytest.mark.parametrize(("name", "value", "wanted"), [
    ("is_reference_free", "no", "true or false"), ("batch_tokens", "many", "whole number"), ("is_chat", "yes", "null"),
])  # fmt: skip
def test_a_text_is_no_number_and_no_yes_or_no(name: str, value: str, wanted: str) -> None:
    """To Hydra `no` is a text, and every text is true to Python."""
    node = {"_target_": "espalier.pipeline.evaluation.score_responses.ScoreResponses", "model": "M"}
    with pytest.raises(BadConfig, match=rf"{name} must be .*{wanted}.*, got '{value}'"):
        check_component({**node, name: value})
    check_component({**node, "is_reference_free": False, "batch_tokens": 8, "is_chat": None})


def test_a_component_without_a_needed_key_fails(tmp_path: Path) -> None:
    text = "eval_examples:\n  _target_: espalier.data.examples.token_examples.DemonstrationExamples\n  path: x\n"
    with pytest.raises(BadConfig, match="missing a required argument: 'max_length'"):
        bind_components(compose_config(write(tmp_path, text), "mine"))


@pytest.mark.parametrize("name", ["sample", "rl"])
def test_engines_without_a_server_count_as_hung_after_the_runs_own_limit(name: str) -> None:
    words = ("client=data_parallel_engines", "server=none", "engine.stall_seconds=3600", "model.path=M")
    config = compose_config(CONF, name, *(words if name == "rl" else words[:-1]))
    assert OmegaConf.select(config, "client.silence_seconds") == 3600
