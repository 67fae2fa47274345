"""The question world: its frequencies, its splits, and what its teacher gets wrong."""

from collections import Counter, defaultdict

import pytest

from espalier.data.answers.stated_answers import stated_answers
from espalier.data.records import BadInput
from espalier.data.tasks.qa_world import RATIOS, QAWorld, frequencies, sharpened, write_response

WORLD = QAWorld(num_train=4000, num_dev=100, num_test=300, num_demonstrations=4000)


def test_frequencies_fall_by_the_ratio_and_sum_to_one() -> None:
    assert frequencies(0.5, 3) == pytest.approx([4 / 7, 2 / 7, 1 / 7])
    assert sharpened([0.8, 0.2], 2.0) == pytest.approx([16 / 17, 1 / 17])


def test_golds_are_drawn_by_the_frequencies_that_problems_say() -> None:
    places: dict[str, Counter[int]] = defaultdict(Counter)
    for problem in WORLD.problems("train"):
        places[problem.info["level"]][list(problem.info["probabilities"]).index(problem.gold)] += 1
    for word, ratio in RATIOS.items():
        number = places[word].total()
        for place, share in enumerate(frequencies(ratio, 6)):
            assert places[word][place] / number == pytest.approx(share, abs=4 * (share / number) ** 0.5 + 0.003)


def test_no_person_is_in_two_splits_and_the_same_person_has_one_word() -> None:
    words: dict[str, str] = {}
    people: dict[str, set[str]] = {}
    for split in ("train", "dev", "test"):
        rows = [(problem.question.split()[0] + problem.question.split()[6], problem.info["level"])
                for problem in WORLD.problems(split)]  # fmt: skip
        people[split] = {person for person, _ in rows}
        for person, word in rows:
            assert words.setdefault(person, word) == word
    assert not people["train"] & people["test"]
    assert not people["dev"] & (people["train"] | people["test"])


def test_the_same_seed_gives_the_same_world_and_more_problems_begin_alike() -> None:
    assert QAWorld(num_train=10).problems("train") == WORLD.problems("train")[:10]
    assert QAWorld(num_train=10, seed=1).problems("train") != WORLD.problems("train")[:10]


def test_the_teacher_is_too_sure_and_a_true_one_is_not() -> None:
    def overconfidence(split: str) -> float:
        truth = {problem.id: problem.info["probabilities"] for problem in WORLD.problems(split)}
        gaps = []
        for row in WORLD.demonstrations(split):
            ((answer, stated),) = stated_answers(row.completion)
            gaps.append(stated - truth[row.id.split("/")[0]][answer])
        return sum(gaps) / len(gaps)

    assert overconfidence("train") > 0.15
    assert overconfidence("test") < 0.1


def test_responses_of_both_forms_say_their_counts() -> None:
    counts = [("fish", 1), ("rice", 9)]
    assert write_response(counts, 10, "confidence") == "Answer: rice\nConfidence: 90%"
    assert write_response(counts, 10, "paragraph") == "It is rice (90%), or else fish (10%)."
    assert stated_answers(write_response(counts, 10, "paragraph")) == [("rice", 0.9), ("fish", 0.1)]


def test_the_most_confident_answer_is_graded() -> None:
    assert WORLD.grade("rice", "It is rice (60%), or else fish (40%).").verdict == "right"
    assert WORLD.grade("fish", "It is rice (60%), or else fish (40%).").verdict == "wrong"
    assert WORLD.grade("fish", "fish").verdict == "unparseable"


@pytest.mark.parametrize("wrong", [{"form": "essay"}, {"sharpening": 0.0}, {"num_samples": 0}])
def test_impossible_settings_are_refused(wrong: dict) -> None:
    with pytest.raises(BadInput):
        QAWorld(**wrong)


def test_more_people_than_there_are_is_refused() -> None:
    with pytest.raises(BadInput, match="lower num_test"):
        QAWorld(num_test=100_000).problems("test")
