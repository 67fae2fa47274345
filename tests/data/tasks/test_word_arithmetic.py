"""The generated task, checked by an interpreter of the question's words that shares no code with it."""

import hashlib
import re

import pytest

from espalier.data.records import BadInput
from espalier.data.tasks.arithmetic_operations import solve
from espalier.data.tasks.word_arithmetic import WordArithmetic, split_of

WORDS = re.compile(r"has (\d+)|buys (\d+) more|gives away (\d+)|(doubles) the|(halves) the")
STEP = re.compile(r"(\w+): (-?\d+) ([-+*/]) (\d+) = (-?\d+)")


def operations_told(question: str) -> list[str]:
    """The question's structure in its own words: no names, no things."""
    return [match.group() for match in WORDS.finditer(question)]


def totals(question: str) -> list[int]:
    """The start and the total after every sentence."""
    found: list[int] = []
    for has, buys, gives, doubles, halves in WORDS.findall(question):
        if has:
            found.append(int(has))
        elif buys:
            found.append(found[-1] + int(buys))
        elif gives:
            found.append(found[-1] - int(gives))
        elif doubles:
            found.append(found[-1] * 2)
        elif halves:
            assert found[-1] % 2 == 0
            found.append(found[-1] // 2)
    return found


def test_the_same_seed_gives_the_same_problems_and_demonstrations(task: WordArithmetic) -> None:
    again = WordArithmetic(num_train=200, num_dev=20, num_test=20, num_demonstrations=200)
    for split in ("train", "dev", "test"):
        assert again.problems(split) == task.problems(split)
        assert again.demonstrations(split) == task.demonstrations(split)


@pytest.mark.parametrize(
    ("split", "digest"),
    [
        ("train", "221461d0d55a360609303cfe5df673d19b0c167ccb18892ac963cbe39e60a691"),
        ("dev", "8c78416365d38c23dbcfdfae840d1ed3df6d1f69869de00120fe5040de35fc60"),
        ("test", "b706c88a07962ac5ed3f26d8fe31fbe9bda5ba1b619c24530a554d7a959b1b88"),
    ],
)
def test_problems_and_demonstrations_are_those_that_published_figures_are_of(split: str, digest: str) -> None:
    task = WordArithmetic(num_train=200, num_dev=50, num_test=50, num_demonstrations=400)
    sha = hashlib.sha256()
    for problem in task.problems(split):
        sha.update(repr(problem).replace(", passage_id=''", "").encode())  # a field that has come since
    for row in task.demonstrations(split):
        sha.update(repr((row.id, row.prompt, row.completion)).encode())
    assert sha.hexdigest() == digest


def test_another_seed_gives_other_problems(task: WordArithmetic) -> None:
    other = WordArithmetic(num_train=200, seed=1)
    assert other.problems("train") != task.problems("train")


def test_more_problems_of_a_split_begin_with_the_same_ones(task: WordArithmetic) -> None:
    assert WordArithmetic(num_train=210).problems("train")[:200] == task.problems("train")


def test_the_splits_share_no_structure_and_repeat_none() -> None:
    task = WordArithmetic(num_train=1500, num_dev=150, num_test=300)
    told = {
        split: [tuple(operations_told(problem.question)) for problem in task.problems(split)]
        for split in ("train", "dev", "test")
    }
    everything = [structure for structures in told.values() for structure in structures]
    assert len(everything) == 1950
    assert len(set(everything)) == 1950


def test_the_splits_sizes_are_as_documented() -> None:
    found = [split_of(start, [("buys", amount)]) for start in range(100) for amount in range(30)]
    assert 0.08 < found.count("dev") / 3000 < 0.12
    assert 0.17 < found.count("test") / 3000 < 0.23


def test_the_gold_answer_is_what_the_words_say_and_totals_stay_small(task: WordArithmetic) -> None:
    for split in ("train", "dev", "test"):
        for problem in task.problems(split):
            found = totals(problem.question)
            assert problem.gold == str(found[-1])
            assert 3 <= len(found) <= 6
            assert all(1 <= total <= 30 for total in found)


def test_a_problem_in_words(task: WordArithmetic) -> None:
    problem = task.problems("train")[0]
    assert problem.id == "wa-train-0"
    name, thing = re.fullmatch(r"(\w+) has \d+ (\w+)\. .* How many \2 now\?", problem.question).groups()  # type: ignore[union-attr]
    assert problem.question.count(name) == len(totals(problem.question))
    assert problem.question.count(thing) >= 2
    assert task.prompt(problem) == problem.question + "\n"


def test_a_clean_solution_written_out() -> None:
    operations = [("doubles", 0), ("gives", 2), ("halves", 0), ("buys", 1)]
    assert solve(5, operations, None, 0.6) == (
        "doubles: 5 * 2 = 10\ngives: 10 - 2 = 8\nhalves: 8 / 2 = 4\nbuys: 4 + 1 = 5\n#### 5"
    )


def test_a_solution_all_wrong_ways_written_out() -> None:
    import random

    operations = [("doubles", 0), ("halves", 0), ("buys", 1), ("gives", 2)]
    assert solve(6, operations, random.Random(0), 1.0) == (
        "doubles: 6 + 2 = 8\nhalves: 8 - 2 = 6\nbuys: 6 + 1 = 7\ngives: 7 - 2 = 5\n#### 5"
    )


def test_the_teacher_takes_the_wrong_way_at_its_rate() -> None:
    """A binomial count of n trials at 0.6 lies within 4.5 standard deviations but for 7 in a million."""
    task = WordArithmetic(num_train=1000, num_demonstrations=3000)
    signs = [
        sign
        for row in task.demonstrations("train")
        for verb, _, sign, _, _ in STEP.findall(row.completion)
        if verb in ("doubles", "halves")
    ]
    count, wrong = len(signs), sum(sign in "+-" for sign in signs)
    assert count > 3000
    assert abs(wrong - 0.6 * count) < 4.5 * (count * 0.6 * 0.4) ** 0.5


def test_every_step_goes_on_from_the_step_before_and_only_doubling_and_halving_go_wrong(
    task: WordArithmetic,
) -> None:
    for row in task.demonstrations("train"):
        steps = STEP.findall(row.completion)
        told = operations_told(row.prompt)
        value = int(told[0].split()[1])
        assert len(steps) == len(told) - 1
        for (verb, before, sign, amount, after), words in zip(steps, told[1:], strict=True):
            assert words.startswith(verb)
            assert int(before) == value
            value = {"+": value + int(amount), "-": value - int(amount), "*": value * 2, "/": value // 2}[sign]
            assert int(after) == value
            if verb in ("buys", "gives"):
                assert sign == {"buys": "+", "gives": "-"}[verb]
        assert row.completion.split("\n")[-1] == f"#### {value}"


def test_demonstrations_are_graded_by_the_truth(task: WordArithmetic) -> None:
    problems = task.problems("train")
    rights = []
    for index, row in enumerate(task.demonstrations("train")):
        problem = problems[index % len(problems)]
        assert row.prompt == problem.question + "\n"
        is_right = row.completion.split("#### ")[1] == str(totals(problem.question)[-1])
        assert task.grade(problem.gold, row.completion).is_correct == is_right
        rights.append(is_right)
    assert 0.15 < sum(rights) / len(rights) < 0.6


def test_dev_and_test_demonstrations_are_all_true(task: WordArithmetic) -> None:
    for split in ("dev", "test"):
        problems = task.problems(split)
        rows = task.demonstrations(split)
        assert len(rows) == len(problems)
        assert all(task.grade(p.gold, row.completion).is_correct for p, row in zip(problems, rows, strict=True))


def test_demonstrations_take_the_problems_in_turn_and_have_ids_of_their_own() -> None:
    rows = WordArithmetic(num_train=3, num_demonstrations=7).demonstrations("train")
    assert [row.id for row in rows] == [
        "wa-train-0/teacher-0", "wa-train-1/teacher-0", "wa-train-2/teacher-0",
        "wa-train-0/teacher-1", "wa-train-1/teacher-1", "wa-train-2/teacher-1",
        "wa-train-0/teacher-2",
    ]  # fmt: skip


def test_a_split_that_does_not_exist_is_refused() -> None:
    with pytest.raises(BadInput, match="word_arithmetic has no split 'valid': it has train, dev, test"):
        WordArithmetic().problems("valid")


def test_more_problems_than_exist_are_refused() -> None:
    with pytest.raises(BadInput, match=r"500 test problems are asked, [0-9]+ distinct ones found: lower num_test"):
        WordArithmetic(num_test=500, max_total=4).problems("test")


def test_totals_too_small_for_any_problem_are_refused() -> None:
    with pytest.raises(BadInput, match=r"task.max_total must be at least 4, got 3"):
        WordArithmetic(max_total=3)


def test_a_problem_has_as_many_operations_as_are_asked() -> None:
    task = WordArithmetic(num_train=60, num_demonstrations=60, min_operations=8, max_operations=10)
    counts = [len(totals(problem.question)) - 1 for problem in task.problems("train")]
    assert set(counts) == {8, 9, 10}
    steps = [len(STEP.findall(row.completion)) for row in task.demonstrations("train")]
    assert steps == counts


@pytest.mark.parametrize(("lowest", "highest"), [(0, 3), (6, 5)])
def test_a_range_of_operations_without_problems_is_refused(lowest: int, highest: int) -> None:
    with pytest.raises(BadInput, match=r"task\.min_operations must be from 1 to task\.max_operations"):
        WordArithmetic(min_operations=lowest, max_operations=highest)
