"""What a thread of rank 0 has the main threads do, with one rank; with two: tests/rl/test_sharded_weights.py."""

import threading
from typing import Any

import pytest

from espalier.runtime.rank_calls import RankCalls


class Target:
    """Says who called it."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bool]] = []

    def double(self, number: int) -> int:
        self.seen.append(("double", threading.current_thread() is threading.main_thread()))
        if number < 0:
            raise ValueError("a negative number")
        return 2 * number

    def rest(self) -> None:
        self.seen.append(("rest", threading.current_thread() is threading.main_thread()))


def test_what_a_thread_asks_is_done_by_the_main_thread_in_that_order() -> None:
    target = Target()
    calls = RankCalls(target)
    assert calls.serve(lambda: [calls.ask("double", number) for number in (1, 2)]) == [2, 4]
    assert target.seen == [("double", True), ("double", True), ("rest", True)]
    assert calls.ask("double", 3) == 6  # nobody serves: the rank does it itself
    assert calls.serve(lambda: calls.ask("double", 4)) == 8  # and again


def test_an_error_of_what_rank_0_does_rises_after_everything_was_put_back() -> None:
    target = Target()

    def fail() -> None:
        raise ValueError("the engine has died")

    with pytest.raises(ValueError, match="the engine has died"):
        RankCalls(target).serve(fail)
    assert target.seen == [("rest", True)]


def test_an_error_of_the_main_thread_leaves_nobody_waiting() -> None:
    calls, errors = RankCalls(Target()), []

    def ask() -> None:
        for number in (1, -1, 2):
            try:
                calls.ask("double", number)
            except RuntimeError as error:
                errors.append(str(error))
        done.set()

    done = threading.Event()
    with pytest.raises(ValueError, match="a negative number"):
        calls.serve(ask)
    assert done.wait(5)
    assert errors[0] == "the ranks do not serve any more"
    assert "for which they do not serve" in errors[1]


def test_the_main_thread_cannot_ask_itself() -> None:
    calls = RankCalls(Target())
    found: list[Any] = []

    class Asking(Target):
        def double(self, number: int) -> int:
            with pytest.raises(RuntimeError, match="for which they do not serve"):
                calls.ask("double", number)
            found.append(number)
            return number

    calls.target = Asking()
    assert calls.serve(lambda: calls.ask("double", 5)) == 5
    assert found == [5]
