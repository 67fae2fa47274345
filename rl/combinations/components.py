"""What a node of a config names: its class with all arguments, what its scores can be, the estimators of a run."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from espalier.rewards.score import ScoreRange, StatesRange
from espalier.runtime.entrypoint import BadConfig, check_component, find_component
from espalier.runtime.schemas import RLConfig


def demand(is_good: bool, message: str) -> None:
    """Raise BadConfig with the message unless it is good."""
    if not is_good:
        raise BadConfig(message)


def component_settings(node: Any) -> tuple[Any, dict[str, Any]] | None:
    """Return (the class or function behind a `_target_`, all its arguments, defaults too); None where the node names
    none. Raises BadConfig on a key that it does not take."""
    if not isinstance(node, Mapping) or "_target_" not in node:
        return None
    check_component(node)
    kind = find_component(str(node["_target_"]))
    bound = inspect.signature(kind).bind(**{name: value for name, value in node.items() if not name.startswith("_")})
    bound.apply_defaults()
    return kind, dict(bound.arguments)


def estimators_of(config: RLConfig) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Return (its key, its class, its settings) of the run's estimator and of the further ones."""
    nodes = {"advantage": config.advantage}
    nodes |= {f"samples.estimators.{name}": node for name, node in config.samples.estimators.items()}
    for key, node in nodes.items():
        found = component_settings(node)
        if found is not None:
            yield key, *found


def blames_first_error(kind: Any, settings: Mapping[str, Any]) -> bool:
    """Say whether an estimator keeps a process reward model's scores out of what is paid (its form "first_error")."""
    return getattr(kind, "has_process_scores", False) and settings.get("form") == "first_error"


def adds_implicit_rewards(config: RLConfig) -> bool:
    """Say whether implicit rewards are added to the rewards of tokens, as the run's estimator takes them."""
    found = component_settings(config.advantage) if config.implicit_reward is not None else None
    return found is not None and getattr(found[0], "takes_implicit_rewards", False)


def reward_range(node: Any) -> ScoreRange | None:
    """Return what the scores of a reward's config can be; None where its class does not say."""
    found = component_settings(node)
    if found is None or not isinstance(found[0], StatesRange):
        return None
    kind, settings = found
    return kind.score_range({name: _with_ranges(value) for name, value in settings.items()})


def _with_ranges(value: Any) -> Any:
    """Return the value with the range of every reward in place of the reward's config."""
    if not isinstance(value, Mapping):
        return value
    if "_target_" in value:
        return reward_range(value)
    return {name: _with_ranges(part) for name, part in value.items()}


def process_forms(key: str, node: Any) -> Iterator[tuple[str, str]]:
    """Return (its key, its form) of every term of a reward that gives process rewards in a form."""
    found = component_settings(node)
    settings = found[1] if found is not None else node if isinstance(node, Mapping) else {}
    if "form" in settings:
        bounds = reward_range(node)
        if bounds is not None and bounds.to_come is not None:
            yield key, str(settings["form"])
    for name, part in settings.items():
        yield from process_forms(f"{key}.{name}", part)


def class_name(node: Mapping[str, Any]) -> str:
    """Return the name of the class or function behind a `_target_`."""
    return str(node["_target_"]).rpartition(".")[2]
