"""Problems in epochs: each one once before any comes again, in another order each time, by the iteration alone."""

from collections import Counter

import pytest

from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.rl.combinations import check_numbers
from espalier.rl.problem_order import draw_problems, epoch_batch, epoch_order
from espalier.runtime.entrypoint import BadConfig
from espalier.runtime.schemas import RLConfig
from tests.support.root_config import root_config


@pytest.mark.parametrize(("num", "count"), [(10, 5), (10, 10), (10, 3), (10, 7), (10, 9), (7, 4), (1, 1), (29, 8)])
def test_every_problem_comes_once_per_epoch_and_no_iteration_has_one_twice(num: int, count: int) -> None:
    batches = [epoch_batch(num, count, 3, iteration) for iteration in range(4 * num)]
    assert all(len(set(batch)) == len(batch) == count for batch in batches)
    stream = [index for batch in batches for index in batch]
    epochs = [stream[start : start + num] for start in range(0, len(stream), num)]
    assert len(epochs) == 4 * count
    assert all(sorted(epoch) == list(range(num)) for epoch in epochs)


def test_an_iteration_is_a_function_of_seed_and_iteration_alone() -> None:
    forward = [epoch_batch(11, 4, 7, iteration) for iteration in range(60)]
    epoch_order.cache_clear()
    assert [epoch_batch(11, 4, 7, iteration) for iteration in reversed(range(60))] == forward[::-1]
    assert epoch_batch(11, 4, 8, 0) != forward[0]


def test_epochs_have_different_orders_and_the_first_place_is_no_problems_own() -> None:
    orders = [epoch_order(6, 3, 0, epoch) for epoch in range(600)]
    assert len(set(orders)) > 300  # of 720
    firsts = Counter(order[0] for order in orders)
    assert min(firsts.values()) > 60  # 100 expected


def test_the_published_run_passes_its_29946_problems_in_156_iterations_and_skips_none() -> None:
    seen = {index for iteration in range(156) for index in epoch_batch(29946, 192, 1, iteration)}
    assert len(seen) == 29946 == 155 * 192 + 186  # the 156th takes 6 of the next epoch


def test_a_round_of_replacements_has_no_problem_of_the_iteration_in_either_order(task: WordArithmetic) -> None:
    problems = list(task.problems("train"))[:20]
    for order in ("random", "epochs"):
        rounds = [draw_problems(problems, 6, 1, 5, number, order) for number in range(4)]
        ids = [problem.id for drawn in rounds for problem in drawn]
        assert len(ids) == len(set(ids)) == 20  # 6, 6, 6 and the 2 that are left
        assert rounds[0] == draw_problems(problems, 6, 1, 5, order=order)
    assert [p.id for p in draw_problems(problems, 6, 1, 5, order="epochs")] == [
        problems[index].id for index in epoch_batch(20, 6, 1, 5)
    ]


def test_an_order_that_does_not_exist_is_refused() -> None:
    with pytest.raises(BadConfig, match="order must be one of random, epochs, got 'shuffled'"):
        check_numbers(root_config(RLConfig, output_dir="", order="shuffled"))
