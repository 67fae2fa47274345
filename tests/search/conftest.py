"""The sampler of the tests of search."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.search_cases import SOLUTIONS, TableSampler


@pytest.fixture
def sampler(tokenizer: Any) -> Callable[..., TableSampler]:
    """Make a sampler of the table (or of other solutions)."""

    def make(solutions: dict[str, float] | None = None, **settings: Any) -> TableSampler:
        return TableSampler(tokenizer, solutions or SOLUTIONS, **settings)

    return make
