"""Plain values as JSON and back: what may cross from an untrusted process. A value is rebuilt from its kind's name, so
that no class, no `__eq__` and no pickle of the sender comes along."""

import json
from typing import Any

_SIMPLE = (str, bool, int, type(None))
_LISTS = {"tuple": tuple, "set": set, "frozenset": frozenset}


class NoPlainValue(ValueError):
    """A value of another kind than numbers, texts, bytes, None, lists, tuples, sets and dicts."""


def to_plain(value: Any) -> Any:
    """Return a value as what JSON can hold; all but the simplest as [kind, content]. Raises NoPlainValue."""
    kind = type(value)
    if kind in _SIMPLE:
        return ["int", str(value)] if kind is int and abs(value) > 1 << 53 else value
    if kind in (float, complex):
        return [kind.__name__, repr(value)]
    if kind in (bytes, bytearray):
        return ["bytes", value.hex()]
    if kind is list:
        return ["list", [to_plain(item) for item in value]]
    if kind.__name__ in _LISTS and kind is _LISTS[kind.__name__]:
        return [kind.__name__, [to_plain(item) for item in value]]
    if isinstance(value, dict):  # a defaultdict or a Counter is compared as a dict
        return ["dict", [[to_plain(key), to_plain(item)] for key, item in dict.items(value)]]
    raise NoPlainValue(f"a {kind.__name__} is no plain value")


def from_plain(value: Any) -> Any:
    """Return the value again. Raises ValueError or TypeError on anything else."""
    if not isinstance(value, list):
        return value
    kind, content = value
    if kind in ("int", "float", "complex"):
        return {"int": int, "float": float, "complex": complex}[kind](content)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "dict":
        return {from_plain(key): from_plain(item) for key, item in content}
    items = [from_plain(item) for item in content]
    return items if kind == "list" else _LISTS[kind](items)


def write_line(value: Any) -> bytes:
    """Return one line that `read_line` reads."""
    return json.dumps(to_plain(value)).encode() + b"\n"


def read_line(line: bytes) -> Any:
    """Return the value of a line. Raises ValueError or TypeError on what is none, RecursionError on one too deep."""
    return from_plain(json.loads(line))
