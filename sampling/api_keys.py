"""Keys of chat APIs and servers: read from the environment alone, never in a config, which is written to disk."""

import os
import re
from collections.abc import Mapping
from typing import Any

from espalier.data.records import BadInput


def check_key_variable(name: str) -> None:
    """Raise BadInput unless it is the name of an environment variable; a key put there by mistake is not shown."""
    if not re.fullmatch(r"[A-Z_][A-Z0-9_]{0,63}", name):
        raise BadInput("client.key_variable must be the NAME of the environment variable that holds the key, such as "
                       "OPENAI_API_KEY: what is given there is none (it is not shown, lest it be the key)")  # fmt: skip


def check_keys(config: Any) -> None:
    """Raise BadInput where a config names no environment variable under `key_variable`, wherever that stands in it, or
    holds the key of one itself."""
    for variable in _key_variables(config):
        check_key_variable(variable)
        refuse_key_in(config, variable)


def require_keys(config: Any) -> None:
    """Raise BadInput where a chat API's client stands in a config and its key is not in the environment: said before
    engines start, not when the client is opened."""
    if isinstance(config, Mapping):
        variable = str(config.get("key_variable") or "")
        if str(config.get("_target_", "")).endswith(".OpenAIChatClient") and not os.environ.get(variable, "").strip():
            raise BadInput(f"the environment variable {variable} is not set: export it (never put it in a config)")
    if isinstance(config, Mapping | list | tuple):
        for value in config.values() if isinstance(config, Mapping) else config:
            require_keys(value)


def _key_variables(config: Any) -> list[str]:
    if isinstance(config, Mapping):
        own = [str(config["key_variable"])] if config.get("key_variable") else []
        return [*own, *(name for value in config.values() for name in _key_variables(value))]
    return [name for value in config for name in _key_variables(value)] if isinstance(config, list | tuple) else []


def refuse_key_in(config: Any, variable: str, place: str = "") -> None:
    """Raise BadInput where the key itself stands anywhere in a config; the message names its place, not the key."""
    key = os.environ.get(variable, "")
    if isinstance(config, Mapping):
        for name, value in config.items():
            refuse_key_in(value, variable, f"{place}.{name}".lstrip("."))
    elif isinstance(config, list | tuple):
        for value in config:
            refuse_key_in(value, variable, place)
    elif isinstance(config, str) and len(key) >= 8 and key in config:
        raise BadInput(f"{place} holds the API key: take it out, it is read from the environment ({variable}) alone")
