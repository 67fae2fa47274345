"""Cases of one test of which only some are run every time."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow_unless(is_ordinary: Callable[[Any], bool], cases: Iterable[Any]) -> list[Any]:
    """The cases for `parametrize`, a tuple for several arguments: those that are not ordinary are marked `slow`."""
    return [case if is_ordinary(case) else _slow(*case) if isinstance(case, tuple) else _slow(case) for case in cases]


def _slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)
