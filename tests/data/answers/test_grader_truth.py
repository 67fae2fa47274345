"""The grader on pairs of answers that are equal or different by the way they are made (benchmarks/grading)."""

from collections import Counter

import pytest

from benchmarks.grading.grader_truth import wilson
from benchmarks.grading.hack_batteries import BATTERIES, batteries
from benchmarks.grading.perturbations import Case, perturbations
from benchmarks.grading.perturbed_formulas import FORMULAS
from benchmarks.grading.perturbed_scalars import SCALARS
from benchmarks.grading.perturbed_structures import STRUCTURES
from espalier.data.answers import grading
from espalier.data.answers.grading import grade_answer


def is_accepted(case: Case) -> bool:
    """Whether it is graded right; asked again where a busy machine made the symbolic workers late."""
    for _ in range(4):
        grade = grade_answer(prediction=case.prediction, gold=case.gold, kind=case.kind, num_options=case.num_options)
        if "no verdict within" not in grade.reason:
            break
        grading._cached.cache_clear()
    return grade.is_correct


@pytest.fixture(scope="module")
def pairs() -> list[Case]:
    """200 equal and 400 different pairs of a seed of their own."""
    return perturbations(seed=7, num_equal=200, num_different=400)


def test_the_pairs_are_the_same_for_the_same_seed_and_hold_every_form() -> None:
    one, other = perturbations(3, 60, 90), perturbations(3, 60, 90)
    assert one == other != perturbations(4, 60, 90)
    assert Counter(case.is_equal for case in one) == {True: 60, False: 90}
    assert {case.kind for case in one} == {"math", "response_math"}
    forms = {case.rule.split(":")[0] for case in one}
    assert len(forms) == len({*SCALARS, *FORMULAS, *STRUCTURES})
    assert len({(case.prediction, case.gold) for case in one}) == len(one)


def test_at_most_one_equal_answer_in_a_hundred_is_refused(pairs: list[Case]) -> None:
    equal = [case for case in pairs if case.is_equal]
    refused = [case for case in equal if not is_accepted(case)]
    assert len(refused) <= len(equal) // 100, refused[:5]


def test_no_different_answer_is_accepted(pairs: list[Case]) -> None:
    accepted = [case for case in pairs if not case.is_equal and is_accepted(case)]
    assert accepted == []


@pytest.mark.parametrize("kind", sorted(BATTERIES))
def test_no_hack_passes_and_every_plain_answer_does(kind: str) -> None:
    cases = [case for case in batteries(seed=1, num_answers=3) if case.kind == kind]
    assert len(cases) > 20
    assert [case for case in cases if is_accepted(case) != case.is_equal] == []


HACKS = [
    "12 \\text{ or } 13", "13=12", "12=13", "x=13=12", "\\boxed{12} \\boxed{13}",
    "\\boxed{13} \\text{ or } \\boxed{12}", "1,2", "1200", "0.12", "12%", "\\pm 12", "12, 13", "\\{12,13\\}",
    "The answer is 12. Wait, it is 13.", "12.0012", "12.012", "-12", "12x+1", "12\\text{ (or }13\\text{)}",
    "12 \\text{ and/or } 13", "12; 13", "12!", "12^2", "121", "", "12\n13", "$12$ or $13$", "[12,13]", "12\\cdot 13",
]  # fmt: skip


@pytest.mark.parametrize("hack", HACKS)
def test_a_known_hack_is_not_twelve(hack: str) -> None:
    assert not grade_answer(prediction=hack, gold="12", kind="math").is_correct
    if not hack.startswith("The answer"):
        assert not grade_answer(prediction=f"So it is \\boxed{{{hack}}}.", gold="12", kind="response_math").is_correct


def test_a_wilson_interval_by_hand() -> None:
    low, high = wilson(0, 3000)
    assert low == 0.0
    assert high == pytest.approx(1.959964**2 / (3000 + 1.959964**2))  # z^2 / (n + z^2) where there is no error
    assert wilson(5, 10)[0] == pytest.approx(1 - wilson(5, 10)[1])
