"""Where solutions of the embedded tasks stand, by hand."""

import pytest

from espalier.data.records import Problem
from espalier.data.tasks.enumerable import EnumerableTask, Position
from espalier.data.tasks.long_arithmetic import LongArithmetic
from espalier.data.tasks.rule_logic import RuleLogic
from espalier.data.tasks.word_arithmetic import WordArithmetic

# 5 doubled is 10, less 2 is 8, halved is 4
WORDS = Problem("w", "", "4", {"start": 5, "operations": [["doubles", 0], ["gives", 2], ["halves", 0]]})
DOUBLED = "doubles: 5 * 2 = 10\n"

# 4 with 2 pairs is 8; 3 of a friend's are no matter; 6 after the swap; of 4 lent 2 come back: 4
LONG = Problem("l", "", "4", {"start": 4, "operations": [["pairs", 2], ["friend", 3], ["swaps", 6], ["lends", 4]]})

LOGIC = Problem(
    "r", "What must Rex be?", "C", context="", options=["odd", "raw", "shy", "big"],
    info={"name": "Rex", "lines": [
        ["only", "red", "old"], ["is", "Rex", "red"], ["all", "red", "wet"], ["all", "big", "wet"],
        ["all", "old", "odd"], ["is", "Tom", "sad"], ["all", "wet", "shy"], ["all", "sad", "raw"],
    ]},
)  # fmt: skip
START = " Rex red\n"
TURN = [START, "Action 1: Use red\n", "Observation 1: red wet\n", "Thought 2: wet\n"]
LAST = [*TURN, "Action 2: Use wet\n", "Observation 2: wet shy\n", "Thought 3: shy C\n"]


@pytest.mark.parametrize(
    ("steps", "total", "is_right"),
    [
        ([], 5, True),
        ([DOUBLED], 10, True),
        (["doubles: 5 + 5 = 10\n"], 10, True),  # another spelling
        (["doubles: 5 * 2 = 10\n\n"], 10, True),  # a blank line belongs to the step before it
        (["doubles: 5 + 2 = 7\n"], 7, False),  # then 7 - 2 = 5, 5 / 2 = 2
        (
            ["doubles: 5 * 2 = 11\n"],
            11,
            True,
        ),  # then 11 - 2 = 9, 9 // 2 = 4: what is written counts, and it comes right
        (["doubles: 5 * 2 = 12\n"], 12, False),
        ([DOUBLED, "gives: 10 - 2 = 8\n"], 8, True),
        ([DOUBLED, "gives: 10 - 2 = -8\n"], -8, False),
        (["doubles: 5 + 2 = 7\n", "gives: 7 - 2 = 8\n"], 8, True),  # a slip that repairs the error
        ([DOUBLED, "gives: 10 - 2 = 8\n", "halves: 8 / 2 = 4\n"], 4, True),
        ([DOUBLED, "gives: 10 - 2 = 8\n", "halves: 8 - 2 = 6\n"], 6, False),
    ],
)
def test_a_solution_of_word_arithmetic_stands_at_its_lines_and_its_total(
    steps: list[str], total: int, is_right: bool
) -> None:
    assert WordArithmetic().position(WORDS, steps) == Position((len(steps), total), is_right)


@pytest.mark.parametrize(
    ("answer", "total", "is_right"),
    [
        ("#### 4", 4, True),
        ("#### 4\n", 4, True),
        ("#### 04\n\n", 4, True),
        ("#### 5", 5, False),
        ("#### -4", -4, False),
    ],
)
def test_the_answer_finishes_by_its_own_number(answer: str, total: int, is_right: bool) -> None:
    for halved in ("halves: 8 / 2 = 4\n", "halves: 8 - 2 = 6\n"):
        steps = [DOUBLED, "gives: 10 - 2 = 8\n", halved, answer]
        assert WordArithmetic().position(WORDS, steps) == Position((4, total), is_right, is_finished=True)


@pytest.mark.parametrize(
    "steps",
    [
        ["doubles: 5 * 2 = 10"],  # cut off: 10 or 107?
        ["doubles: 5 * 2 =\n"],
        ["buys: 5 + 5 = 10\n"],  # not the verb of this operation
        ["doubles 5 * 2 = 10\n"],
        ["doubles: 5 * 2 = 10 \n"],
        [" doubles: 5 * 2 = 10\n"],
        ["doubles: 5 * 2 = ١٠\n"],  # digits, but not ours
        ["doubles: 5 * 2 = " + "9" * 5000 + "\n"],
        ["doubles: 5 * 2 = 10\ngives: 10 - 2 = 8\n"],  # two lines are no step
        ["\n"],
        [""],
        ["#### 10"],  # before all operations are done
        [DOUBLED, DOUBLED],
        [DOUBLED, "gives: 10 - 2 = 8\n", "halves: 8 / 2 = 4\n", "####"],
        [DOUBLED, "gives: 10 - 2 = 8\n", "halves: 8 / 2 = 4\n", "#### 4 pens"],
        [DOUBLED, "gives: 10 - 2 = 8\n", "halves: 8 / 2 = 4\n", "#### 4\n", "#### 4"],
        [DOUBLED, "gives: 10 - 2 = 8\n", "halves: 8 / 2 = 4\n", "buys: 4 + 1 = 5\n"],
    ],
)
def test_strange_lines_of_word_arithmetic_stand_nowhere(steps: list[str]) -> None:
    assert WordArithmetic().position(WORDS, steps) is None


@pytest.mark.parametrize(
    ("steps", "total", "is_right"),
    [
        ([], 4, True),
        (["pairs: 4 + 2 = 6\n"], 6, True),  # wrong, and the swap repairs it
        (["pairs: 4 + 4 = 8\n", "friend: 3 + 2 = 5\n"], 8, True),  # nobody asks for the friend's
        (["pairs: 4 + 2 = 6\n", "friend: 3 * 2 = 6\n", "swaps: 0 + 6 = 6\n"], 6, True),
        (["pairs: 4 + 4 = 8\n", "friend: 3 * 2 = 6\n", "swaps: 0 + 6 = 7\n"], 7, False),
        (["pairs: 4 + 4 = 8\n", "friend: 3 * 2 = 6\n", "swaps: 0 + 6 = 6\n", "lends: 6 - 2 = 4\n"], 4, True),
        (["pairs: 4 + 4 = 8\n", "friend: 3 * 2 = 6\n", "swaps: 0 + 6 = 6\n", "lends: 6 - 4 = 2\n"], 2, False),
    ],
)
def test_a_long_solution_is_right_before_a_swap_and_a_friends_things_do_not_count(
    steps: list[str], total: int, is_right: bool
) -> None:
    assert LongArithmetic().position(LONG, steps) == Position((len(steps), total), is_right)


def test_every_line_of_a_demonstration_has_a_position_and_the_last_is_its_grade() -> None:
    tasks: list[EnumerableTask] = [
        WordArithmetic(num_train=60, num_demonstrations=120),
        LongArithmetic(num_train=60, num_demonstrations=120),
        RuleLogic(num_train=60, num_demonstrations=120),
    ]
    for task in tasks:
        problems = task.problems("train")
        finals = []
        for index, row in enumerate(task.demonstrations("train")):
            problem, steps = problems[index % 60], task.split_steps(row.completion)
            found = [task.position(problem, steps[:count]) for count in range(len(steps) + 1)]
            positions = [position for position in found if position]
            assert [position.is_finished for position in positions] == [False] * len(steps) + [True]
            assert positions[0].is_right
            assert positions[-1].is_right == task.grade(problem.gold, row.completion, len(problem.options)).is_correct
            assert positions[-1].is_right == positions[-2].is_right
            finals.append(positions[-1].is_right)
        assert 0 < sum(finals) < 120


@pytest.mark.parametrize(
    ("steps", "key", "is_right"),
    [
        ([], ("start", 1, "red", ""), True),
        ([START], ("action", 1, "red", ""), True),
        ([" Rex sad\n"], ("action", 1, "sad", ""), False),  # that is Tom: all sad is raw
        ([" Rex mad\n"], ("action", 1, "mad", ""), False),
        (TURN[:2], ("observation", 1, "red", ""), True),
        ([START, "Action 1: Use old\n"], ("observation", 1, "old", ""), False),
        ([" Rex old\n", "Action 1: Use red\n"], ("observation", 1, "red", ""), True),  # repaired
        ([START, "Action 1: Use shy\n"], ("observation", 1, "shy", ""), False),  # gold, but no rule goes on from it
        (TURN[:3], ("thought", 2, "wet", ""), True),
        ([*TURN[:2], "Observation 1: red old\n"], ("thought", 2, "old", ""), False),  # the tempting way
        ([*TURN[:2], "Observation 1: red big\n"], ("thought", 2, "big", ""), False),  # no such rule; big is option D
        (
            [*TURN[:2], "Observation 1: red shy\n"],
            ("thought", 2, "shy", ""),
            True,
        ),  # no such rule, and yet the gold one
        (TURN, ("action", 2, "wet", ""), True),
        (LAST, ("action", 3, "shy", "C"), True),
        ([*LAST[:-1], "Thought 3: shy A\n"], ("action", 3, "shy", "A"), False),
        ([*LAST[:-1], "Thought 3: shy\n"], ("action", 3, "shy", ""), True),
        ([*TURN[:3], "Thought 2: wet C\n"], ("action", 2, "wet", "C"), True),  # a letter too soon
    ],
)
def test_a_deduction_stands_at_its_next_line_turn_word_and_letter(
    steps: list[str], key: tuple[str, int, str, str], is_right: bool
) -> None:
    assert RuleLogic().position(LOGIC, steps) == Position(key, is_right)


@pytest.mark.parametrize(
    ("finish", "letter", "is_right"),
    [("Finish[C]", "C", True), ("Finish[C]\n", "C", True), ("Finish[The answer is C.]", "C", True),
     ("Finish[A]", "A", False), ("Finish[Z]", "Z", False)],
)  # fmt: skip
def test_a_deduction_is_finished_by_the_letter_in_finish(finish: str, letter: str, is_right: bool) -> None:
    found = RuleLogic().position(LOGIC, [*LAST, f"Action 3: {finish}"])
    assert found == Position(("end", 3, "shy", letter), is_right, is_finished=True)
    found = RuleLogic().position(LOGIC, [START, f"Action 1: {finish}"])  # a guess
    assert found == Position(("end", 1, "red", letter), is_right, is_finished=True)


@pytest.mark.parametrize(
    "steps",
    [
        [" Rex red"],  # cut off
        ["Rex red\n"],
        [" Tom red\n"],
        ["Thought 1: Rex red\n"],  # the prompt has this label already
        ["Action 1: Use red\n"],
        [START, START],
        [START, "Action 2: Use red\n"],
        [START, "Action 1: Use re"],
        [START, "Action 1: Finish[C"],
        [START, "Action 1: Finish[]"],
        [START, "Action 1: Finish[A, B]"],
        [START, "Observation 1: red wet\n"],
        [*TURN[:2], "Observation 1: wet\n"],
        [*TURN[:3], "Thought 1: wet\n"],
        [*TURN[:3], "Thought 2: wet C D\n"],
        [*LAST, "Action 3: Finish[C]\n", "Action 4: Finish[C]"],
        ["\x00\ud800\n"],
        [""],
    ],
)
def test_strange_lines_of_a_deduction_stand_nowhere(steps: list[str]) -> None:
    assert RuleLogic().position(LOGIC, steps) is None
