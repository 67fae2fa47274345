"""The generated deduction task, checked by an interpreter of the context's words that shares no code with it."""

import random
import re
from collections import defaultdict

import pytest

from espalier.data.records import BadInput, Problem
from espalier.data.tasks.rule_logic import RuleLogic, draw_structure, solve, split_of

FACT = re.compile(r"(\w+) is (\w+)")
RULE = re.compile(r"(All|Only) (\w+) is (\w+)")
ROUND = re.compile(r"Action (\d+): Use (\w+)\nObservation (\d+): (\w+) (\w+)")

LINES = [
    ("only", "red", "old"),
    ("is", "Rex", "red"),
    ("all", "red", "wet"),
    ("all", "big", "wet"),
    ("all", "old", "odd"),
    ("is", "Tom", "sad"),
    ("all", "wet", "shy"),
    ("all", "sad", "raw"),
]
OPTIONS = ["odd", "raw", "shy", "big"]


@pytest.fixture(scope="module")
def logic() -> RuleLogic:
    return RuleLogic(num_train=300, num_dev=40, num_test=40, num_demonstrations=900)


def must_be(problem: Problem) -> set[str]:
    """All that follows of the name asked for: "Only X is Y" says that Y is X."""
    name = re.fullmatch(r"What must (\w+) be\?", problem.question).group(1)  # type: ignore[union-attr]
    leads: dict[str, set[str]] = defaultdict(set)
    found = set()
    for line in problem.context.split("\n"):
        if rule := RULE.fullmatch(line):
            kind, one, other = rule.groups()
            leads[one if kind == "All" else other].add(other if kind == "All" else one)
        else:
            who, word = FACT.fullmatch(line).groups()  # type: ignore[union-attr]
            found |= {word} if who == name else set()
    while more := {after for word in found for after in leads[word]} - found:
        found |= more
    return found


def structure_told(problem: Problem) -> str:
    """Context, question and options with every word and name replaced by its number of first appearance."""
    text = "\n".join([problem.question, problem.context, *problem.options])
    numbers: dict[str, int] = {}
    fixed = {"All", "Only", "is", "What", "must", "be"}

    def number(match: re.Match[str]) -> str:
        word = match.group()
        return word if word in fixed else str(numbers.setdefault(word, len(numbers)))

    return re.sub(r"\w+", number, text)


def test_the_same_seed_gives_the_same_problems_and_another_seed_others(logic: RuleLogic) -> None:
    again = RuleLogic(num_train=300, num_dev=40, num_test=40, num_demonstrations=900)
    for split in ("train", "dev", "test"):
        assert again.problems(split) == logic.problems(split)
        assert again.demonstrations(split) == logic.demonstrations(split)
    assert RuleLogic(num_train=300, seed=1).problems("train") != logic.problems("train")


def test_more_problems_of_a_split_begin_with_the_same_ones(logic: RuleLogic) -> None:
    assert RuleLogic(num_train=310).problems("train")[:300] == logic.problems("train")


def test_exactly_one_option_follows_and_it_is_the_gold_one(logic: RuleLogic) -> None:
    for split in ("train", "dev", "test"):
        for problem in logic.problems(split):
            assert len(set(problem.options)) == 4
            following = [
                letter for letter, word in zip("ABCD", problem.options, strict=True) if word in must_be(problem)
            ]
            assert following == [problem.gold]


def test_the_gold_letters_are_spread_evenly() -> None:
    """A binomial count of 2,000 trials at 1/4 lies within 4.5 standard deviations but for 7 in a million."""
    golds = [problem.gold for problem in RuleLogic(num_train=2000).problems("train")]
    assert all(abs(golds.count(letter) - 500) < 4.5 * (2000 * 0.25 * 0.75) ** 0.5 for letter in "ABCD")


def test_the_splits_share_no_structure_and_repeat_none() -> None:
    task = RuleLogic(num_train=1500, num_dev=150, num_test=300)
    told = [structure_told(problem) for split in ("train", "dev", "test") for problem in task.problems(split)]
    assert len(told) == 1950
    assert len(set(told)) == 1950


def test_the_splits_sizes_are_as_documented() -> None:
    rng = random.Random(0)
    found = [split_of(draw_structure(rng)) for _ in range(3000)]
    assert 0.08 < found.count("dev") / 3000 < 0.12
    assert 0.17 < found.count("test") / 3000 < 0.23


def test_a_prompt_written_out(logic: RuleLogic) -> None:
    context = "All red is wet\nRex is red"
    problem = Problem("p", "What must Rex be?", "B", context=context, options=["odd", "wet", "shy", "big"])
    assert logic.prompt(problem) == (
        "All red is wet\nRex is red\nWhat must Rex be?\nodd is A\nwet is B\nshy is C\nbig is D\nThought 1:"
    )


def test_a_true_solution_written_out() -> None:
    assert solve("Rex", LINES, OPTIONS, None, 0.5) == (
        " Rex red\n"
        "Action 1: Use red\n"
        "Observation 1: red wet\n"
        "Thought 2: wet\n"
        "Action 2: Use wet\n"
        "Observation 2: wet shy\n"
        "Thought 3: shy C\n"
        "Action 3: Finish[C]"
    )


def test_a_rule_with_only_is_the_wrong_way_and_the_teacher_goes_on_from_it() -> None:
    assert solve("Rex", LINES, OPTIONS, random.Random(0), 1.0) == (
        " Rex red\n"
        "Action 1: Use red\n"
        "Observation 1: red old\n"
        "Thought 2: old\n"
        "Action 2: Use old\n"
        "Observation 2: old odd\n"
        "Thought 3: odd A\n"
        "Action 3: Finish[A]"
    )


def test_the_teacher_takes_the_wrong_way_at_its_rate_wherever_one_is_open() -> None:
    """A binomial count of n trials at 0.5 lies within 4.5 standard deviations but for 7 in a million."""
    task = RuleLogic(num_train=1000, num_demonstrations=3000)
    problems = task.problems("train")
    open_ways, wrong = 0, 0
    for index, row in enumerate(task.demonstrations("train")):
        problem = problems[index % 1000]
        for _, word, _, _, after in ROUND.findall(row.completion):
            is_open = f"Only {word} is" in problem.context
            is_true = f"All {word} is {after}\n" in problem.context + "\n"
            assert is_true or f"Only {word} is {after}\n" in problem.context + "\n"
            open_ways += is_open
            wrong += not is_true
    assert open_ways > 3000
    assert abs(wrong - 0.5 * open_ways) < 4.5 * (open_ways * 0.25) ** 0.5


def test_every_round_goes_on_from_the_round_before_to_an_option(logic: RuleLogic) -> None:
    problems = logic.problems("train")
    for index, row in enumerate(logic.demonstrations("train")):
        problem = problems[index % 300]
        name = problem.question.split()[2]
        lines = row.completion.split("\n")
        word = lines[0].removeprefix(f" {name} ")
        assert f"{name} is {word}" in problem.context.split("\n")
        rounds = ROUND.findall(row.completion)
        assert len(lines) == 3 * len(rounds) + 2
        for number, (turn, used, again, before, after) in enumerate(rounds, 1):
            assert (turn, again, used, before) == (str(number), str(number), word, word)
            word = after
            is_option = word in problem.options
            letter = "ABCD"[problem.options.index(word)] if is_option else ""
            assert lines[3 * number] == f"Thought {number + 1}: {word} {letter}".rstrip()
            assert is_option == (number == len(rounds))
        assert lines[-1] == f"Action {len(rounds) + 1}: Finish[{letter}]"


def test_demonstrations_are_graded_by_the_truth(logic: RuleLogic) -> None:
    problems = logic.problems("train")
    rights = []
    for index, row in enumerate(logic.demonstrations("train")):
        problem = problems[index % 300]
        assert row.prompt == logic.prompt(problem)
        letter = row.completion[-2]
        grade = logic.grade(problem.gold, row.completion, 4)
        assert grade.answer == letter
        assert grade.is_correct == (problem.options["ABCD".index(letter)] in must_be(problem))
        rights.append(grade.is_correct)
    assert 0.25 < sum(rights) / len(rights) < 0.6


def test_dev_and_test_demonstrations_are_all_true(logic: RuleLogic) -> None:
    for split in ("dev", "test"):
        problems, rows = logic.problems(split), logic.demonstrations(split)
        assert len(rows) == len(problems) == 40
        assert all(logic.grade(p.gold, row.completion, 4).is_correct for p, row in zip(problems, rows, strict=True))


def test_demonstrations_take_the_problems_in_turn_and_have_ids_of_their_own() -> None:
    rows = RuleLogic(num_train=2, num_demonstrations=3).demonstrations("train")
    assert [row.id for row in rows] == ["rl-train-0/teacher-0", "rl-train-1/teacher-0", "rl-train-0/teacher-1"]


def test_a_labelled_line_is_a_step_and_the_steps_join_to_the_response(logic: RuleLogic) -> None:
    for row in logic.demonstrations("dev"):
        steps = logic.split_steps(row.completion)
        assert "".join(steps) == row.completion
        assert [step.strip() for step in steps] == [line.strip() for line in row.completion.split("\n")]


@pytest.mark.parametrize(
    ("response", "answer", "verdict"),
    [
        (" Rex is red\nAction 1: Finish[B]", "B", "right"),
        ("Action 1: Finish[ B ]\n", "B", "right"),
        ("Action 1: Finish[B]\nAction 2: Finish[B]", "B", "right"),
        ("Action 1: Finish[The answer is B.]", "B", "right"),
        ("Action 1: Finish[A]", "A", "wrong"),
        ("Action 1: Finish[The answer is A.]", "A", "wrong"),
        ("Action 1: Finish[A]\nAction 2: Finish[B]", "A,B", "wrong"),
        ("Action 1: Finish[A, B]", "A,B", "wrong"),
        ("Action 1: Finish[E]", "E", "wrong"),
        ("Action 1: Finish[]", None, "unparseable"),
        ("Action 1: Finish[wet]", None, "unparseable"),
        ("Action 1: Finish[B", None, "unparseable"),
        ("Thought 2: shy is B", None, "unparseable"),
        ("", None, "unparseable"),
    ],
)
def test_an_answer_is_one_letter_in_finish(logic: RuleLogic, response: str, answer: str | None, verdict: str) -> None:
    grade = logic.grade("B", response, 4)
    assert (grade.answer, grade.verdict) == (answer, verdict)


def test_a_letter_beyond_the_options_is_wrong_and_says_so(logic: RuleLogic) -> None:
    assert logic.grade("D", "Action 1: Finish[D]").is_correct
    grade = logic.grade("D", "Action 1: Finish[D]", 3)
    assert (grade.is_correct, grade.reason) == (False, "there is no option D: the last is C")


def test_a_split_that_does_not_exist_is_refused() -> None:
    with pytest.raises(BadInput, match="rule_logic has no split 'valid': it has train, dev, test"):
        RuleLogic().problems("valid")


def test_a_rate_above_one_and_no_problems_at_all_are_refused() -> None:
    with pytest.raises(BadInput, match=r"task.wrong_way_rate must be from 0 to 1, got 1.5"):
        RuleLogic(wrong_way_rate=1.5)
    with pytest.raises(BadInput, match=r"task.num_dev must be at least 1, got 0"):
        RuleLogic(num_dev=0)


def test_prompt_and_response_fit_two_hundred_tokens_of_the_tiny_tokenizer(logic: RuleLogic) -> None:
    from espalier.models.tiny import build_tokenizer

    rows = logic.demonstrations("train")[:200]
    tokenizer = build_tokenizer((row.prompt + row.completion for row in rows), vocab_size=400)
    lengths = [len(tokenizer(row.prompt + row.completion).input_ids) for row in rows]
    assert max(lengths) < 200
