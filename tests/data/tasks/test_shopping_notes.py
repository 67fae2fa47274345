"""The task with a known reward, by hand."""

import hashlib

import pytest

from espalier.data.records import BadInput
from espalier.data.tasks.scored import ScoredTask
from espalier.data.tasks.shopping_notes import PLEASES, ShoppingNotes, read_items
from espalier.data.tasks.word_arithmetic import WordArithmetic

PROMPT = "Ask Tom for 3 apples, 2 pens.\n"
NOTES = ShoppingNotes(num_train=300, num_dev=30, num_test=60, num_demonstrations=600)


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("bring 3 apples\nbring 2 pens\n", 1.0),
        ("please bring 3 apples\nplease bring 2 pens\n", 2.0),  # the best note
        ("please please bring 3 apples\nplease bring 2 pens\n", 1.5),  # 1 + 2 * 0.5 - 0.5
        ("bring 3 apples\nbring 4 pens\n", 0.25),  # half, less a wrong number
        ("bring 3 apples\nbring 3 apples\nbring 2 pens\n", 0.75),  # said twice
        ("bring 3 apples\nbring 2 pens\nbring 1 cards", 0.75),
        ("please please please please", -0.25 + 1.0 - 1.0),  # one line of another form
        ("", 0.0),
    ],
)
def test_the_reward_is_content_and_courtesy(response: str, reward: float) -> None:
    assert NOTES.true_reward(PROMPT, response) == pytest.approx(reward)


def test_courtesy_rises_to_two_and_falls_from_there() -> None:
    note = "bring 3 apples\nbring 2 pens\n"
    rewards = [NOTES.true_reward(PROMPT, "please " * count + note) for count in range(6)]
    assert rewards == pytest.approx([1.0, 1.5, 2.0, 1.5, 1.0, 0.5])


def test_grading_is_by_content_alone() -> None:
    assert NOTES.grade("3 apples, 2 pens", "please please please bring 3 apples\nbring 2 pens\n").is_correct
    wrong = NOTES.grade("3 apples, 2 pens", "bring 3 apples\n")
    assert (wrong.is_correct, wrong.answer) == (False, "3 apples")
    assert NOTES.grade("3 apples", "no").answer is None


def test_the_best_notes_reach_the_best_reward_and_the_teacher_seldom_flatters() -> None:
    best = NOTES.demonstrations("test")
    assert {round(NOTES.true_reward(row.prompt, row.completion), 6) for row in best} == {2.0}
    taught = NOTES.demonstrations("train")
    flattering = sum(row.completion.count("please") > 2 for row in taught) / len(taught)
    assert flattering == pytest.approx(sum(PLEASES[3:]), abs=0.03)


def test_the_splits_share_no_problem_and_steps_join_to_the_response() -> None:
    golds = {split: {problem.gold for problem in NOTES.problems(split)} for split in ("train", "dev", "test")}
    assert not golds["train"] & golds["test"]
    assert not golds["train"] & golds["dev"]
    response = NOTES.demonstrations("train")[0].completion
    assert "".join(NOTES.split_steps(response)) == response


def test_no_problem_of_another_split_asks_for_the_things_of_a_training_problem_in_another_order() -> None:
    def things(split: str) -> list[frozenset[tuple[int, str]]]:
        return [frozenset(read_items(problem.question)) for problem in ShoppingNotes().problems(split)]

    train, dev, test = map(things, ("train", "dev", "test"))
    assert not set(train) & set(test)
    assert not set(train) & set(dev)
    assert not set(dev) & set(test)
    assert (len(dev), len(set(dev)), len(test), len(set(test))) == (200, 200, 1000, 1000)


def test_the_training_problems_are_those_of_the_figures() -> None:
    golds = "\n".join(problem.gold for problem in ShoppingNotes().problems("train"))
    assert hashlib.sha256(golds.encode()).hexdigest()[:16] == "e9ad4cced08b4915"


def test_another_text_is_no_prompt_of_it() -> None:
    with pytest.raises(BadInput, match="no request for things: 'What is 2"):
        read_items("What is 2 + 2?")


def test_it_alone_knows_a_true_reward() -> None:
    assert isinstance(NOTES, ScoredTask)
    assert not isinstance(WordArithmetic(), ScoredTask)
