"""Each YAML text is parsed once per worker: that is most of what composing a config costs, and some forty files make
one."""

from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf._utils import get_yaml_loader

_load = OmegaConf.load


@cache
def _parsed(name: str, text: str) -> Any:
    source = StringIO(text)
    source.name = name  # type: ignore[attr-defined]  # what an error calls it
    return yaml.load(source, Loader=get_yaml_loader())


def _loaded(file: Any) -> Any:
    """As `OmegaConf.load`."""
    if isinstance(file, str | Path):
        with open(file, encoding="utf-8") as opened:
            return _loaded(opened)
    value = _parsed(file.name, file.read())
    if value is not None and not isinstance(value, list | dict | str):
        raise OSError(f"Invalid loaded object type: {type(value).__name__}")
    return OmegaConf.create({} if value is None else value)


def parse_yaml_once() -> None:
    """Have OmegaConf do so from now on."""
    OmegaConf.load = staticmethod(_loaded)  # type: ignore[method-assign,assignment]
