"""Steps of mathematical solutions: the published offsets, and no cut inside a formula."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.data.splitters import find_blocks, split_math

FORMULAS = [
    *("$x$", "$x.$", "$x = 1, y = 2 and z. Then$", "$$\na\n. B $$", "\\(a\n\nb. C\\)", "\\[a, b: c\\]", "\\[x.\\]"),
    "\\begin{align*}\na &= b. \\\\[2pt]\n\\text{Let $y>0$. Then } c &= d\n\\end{align*}",
    "$\\begin{cases} 1 & \\text{if $x>0$. Else} \\\\ 2 \\end{cases}$",
    "$\\begin{tabular}{c} $a$. B \\\\ \n $b$ \\end{tabular}$",
    "\\begin{a}\\begin{a}\nx. Y\\end{a}\n\\[z. Z\\]\n\\end{a}",
    "\\begin{align}\\(x\\)\n\\begin{b}. C\\end{b}\\end{align}",
    '[asy]\nlabel("$x. Y", (0,0)); // {\n draw((0,0)); [/asy]',
    "\\boxed{\\text{Mr. Smith}}",
    "$$x \\text{ if $y. Z$ or $z$} $$",
    "\\[ \\text{costs \\$5. Or $ 6} \\]",
]
WORDS = [
    *(
        "We add the numbers of the first row. ",
        "Then, as before, it is ",
        "so ",
        ".",
        ". ",
        ", ",
        ": ",
        " and ",
        " to ",
    ),
    *("\n", "\n\n", "\r\n", "It costs \\$5. ", "[a, b] ", "(c) ", "\\\\[3pt] ", "\\quad ", "Hence "),
]
SOLUTIONS = st.lists(st.sampled_from([*((text, True) for text in FORMULAS), *((text, False) for text in WORDS)]))


def ends_of(steps: list[str]) -> list[int]:
    ends = [0]
    for step in steps:
        ends.append(ends[-1] + len(step))
    return ends


@pytest.mark.parametrize(
    ("response", "ends"),
    [
        ("\nWe have $x^2+1=5$. Then $x^2=4$, so $x=\\pm 2$. The answer is $\\boxed{2}$.\n", [0, 47, 75]),
        ("\nFirst, add the numbers to get $2+2=4$.\n\nThen multiply.\nThe answer is $8$.\n", [0, 39, 75]),
        ("\nBy definition,\\[a=b.\\]Therefore \\[c=d\\]and so $\\boxed{1}$.\n", [0, 23, 60]),
        ("\nA.B. Smith went. He had 3. Then 4.", [0, 35]),
        ("", [0]),
        ("short", [0, 5]),
        ("\n", [0, 1]),
        ("\nThe answer is 42", [0, 17]),
        ("\n$42$.", [0, 6]),
        ("\n\\boxed{42}", [0, 11]),
    ],
)
def test_steps_end_at_the_published_characters(response: str, ends: list[int]) -> None:
    assert ends_of(split_math(response)) == ends


@settings(max_examples=300, deadline=None)
@given(SOLUTIONS)
def test_no_step_is_cut_inside_a_formula(parts: list[tuple[str, bool]]) -> None:
    response = " ".join(text for text, _ in parts)
    steps = split_math(response)
    assert "".join(steps) == response
    ends = set(ends_of(steps))
    place = 0
    for text, is_formula in parts:
        if is_formula:
            assert not ends & set(range(place + 1, place + len(text)))
        place += len(text) + 1


@pytest.mark.parametrize("formula", FORMULAS)
def test_a_formula_is_one_block_wherever_it_stands(formula: str) -> None:
    assert find_blocks(formula) == [(0, len(formula))]
    assert find_blocks(f"a \\$ {formula}$b$") == [(5, 5 + len(formula)), (5 + len(formula), 8 + len(formula))]


@pytest.mark.parametrize(
    "text",
    [
        *("$", "$$", "$$$ a", "\\(", "\\[ a", "\\] a \\[", "\\begin{a} x \\end{b}", "\\end{a} \\begin{a}", "[asy] $"),
        *("\\boxed{", "}", "\\$ a \\$", "\\\\( a \\)", "\\\\[2pt] a \\]", "\\", "[/asy] a [asy]", "{$}", "\\end{}"),
    ],
)
def test_a_delimiter_without_its_partner_is_text(text: str) -> None:
    assert find_blocks(text) == []


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("$a$$b$", ["$a$", "$b$"]),
        ("$$a$$$b$", ["$$a$$", "$b$"]),
        ("$$a $b$ c", ["$b$"]),
        ("$$a$ b", ["$a$"]),
        ("\\[ $ \\] and $x$", ["\\[ $ \\]", "$x$"]),
        ("\\begin{a} \\begin{a} x \\end{a} \\begin{a}", ["\\begin{a} \\begin{a} x \\end{a}"]),
        ("\\(a\\) b \\) c \\(", ["\\(a\\)"]),
        ("\\(a\\)\\(", ["\\(a\\)"]),
        ("$a{b$ and $c$", ["$a{b$", "$c$"]),
        ("\\\\$x$", ["$x$"]),
        ("\\( a \\[ b \\) c \\]", ["\\( a \\[ b \\) c \\]"]),
    ],
)
def test_these_blocks_are_found(text: str, blocks: list[str]) -> None:
    assert [text[start:end] for start, end in find_blocks(text)] == blocks


def test_a_text_with_a_delimiter_that_is_never_closed_is_cut_as_text() -> None:
    first, second = "The first sentence \\begin{align} goes along.", " The second sentence \\[ goes on."
    assert split_math(first + second) == [first, second]


def test_a_long_sentence_is_halved_at_the_most_central_comma_and_only_there() -> None:
    quarters = [f"{letter * 49}," for letter in "abcd"]
    assert split_math(" ".join(quarters)) == [quarters[0], *(f" {quarter}" for quarter in quarters[1:])]
    assert split_math("a" * 60 + " and " + "b" * 60) == ["a" * 60, " and " + "b" * 60]
    assert split_math("a" * 60 + " and, " + "b" * 60) == ["a" * 60 + " and,", " " + "b" * 60]
    assert split_math("a" * 30 + ", " + "b" * 90) == ["a" * 30 + ", " + "b" * 90]
    assert split_math("$" + "a, " * 60 + "$") == ["$" + "a, " * 60 + "$"]
    assert split_math("1,000" * 40) == ["1,000" * 40]


def test_two_letters_and_a_period_end_no_step() -> None:
    assert split_math("The long sentence was written by Dr. Smith and by no one else") == [
        "The long sentence was written by Dr. Smith and by no one else"
    ]
    assert len(split_math("The long sentence was written by him. Smith and Jones wrote the rest")) == 2


def test_published_solutions_are_split_outside_their_formulas(datasets_dir: Path) -> None:
    with gzip.open(datasets_dir / "math" / "train.jsonl.gz", "rt") as file:
        solutions = [json.loads(line)["solution"] for line in file][::4]
    num_steps = 0
    for solution in solutions:
        steps = split_math(solution)
        assert "".join(steps) == solution
        assert all(step.strip() for step in steps)
        ends = ends_of(steps)
        for start, end in find_blocks(solution):
            assert not any(start < cut < end for cut in ends)
        num_steps += len(steps)
    assert 3 < num_steps / len(solutions) < 12
