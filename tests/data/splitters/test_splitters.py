"""Step splitters: the laws all of them keep, and lines, GSM8K, sentences and sub-questions written out."""

import json
import random
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.data.records import BadInput
from espalier.data.splitters import SPLITTERS, split_gsm8k, split_sentences, split_sub_questions, splitter

NAMES = sorted(SPLITTERS)
FRAGMENTS = st.lists(
    st.sampled_from(
        [
            *("a", "Then", "It is 3.5", "1,000", "and", "to", "。", "」", "…", "?", '."', "x ** y"),
            *(" ", "  ", "\n", "\n\n", "\r\n", "\r", "\t", "\0", "\u2028", "\ud800", "\udc00", "🙂", "é"),
            *("$", "$$", "\\$", "\\", "\\\\", "\\(", "\\)", "\\[", "\\]", "{", "}", "\\text{", "\\boxed{"),
            *("\\begin{align}", "\\end{align}", "\\begin{}", "\\end{}", "[asy]", "[/asy]", ".$ ", ". A", ", ", ": "),
            *("####", "\n#### 3", "Thought 2:", "\nThought 2: x", "\nAction 3: Finish[The answer is B.]", "Context:"),
            *("\nSub-question 1: a?", "\nQuestion 1.2: b", "? ** A", "Dr.", "J.", "e.g.", "a long word "),
        ]
    ),
    max_size=40,
).map("".join)


def check_laws(name: str, response: str) -> list[str]:
    steps = splitter(name)(response)
    assert "".join(steps) == response
    assert all(steps)
    return steps


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None)
@given(response=FRAGMENTS | st.text(max_size=60))
def test_pieces_join_to_any_text_and_none_is_empty(name: str, response: str) -> None:
    check_laws(name, response)


@pytest.mark.parametrize("name", NAMES)
def test_no_text_has_no_steps_and_white_space_one(name: str) -> None:
    assert splitter(name)("") == []
    assert len(splitter(name)(" \n \n ")) == 1


def _seconds(name: str, text: str) -> float:
    start = time.process_time()
    check_laws(name, text)
    return time.process_time() - start


@pytest.mark.parametrize(
    "unit",
    [
        *("\n", " ", "\r", ". A", "$", "$$ ", "\\", "\\(", "{", "}{", "\\text{$", "\\text{$$}$", "\\begin{a}"),
        *("\\begin{a}$\\end{a}", "[asy]", "a, ", "? ** b ", ".", "...\n", "“", "\nThought 1: a", "####\n", "-*# ", "a"),
    ],
)
def test_a_long_text_takes_no_more_than_linear_time(unit: str) -> None:
    short, long = (unit * (size // len(unit)) for size in (10_000, 100_000))
    for name in NAMES:
        seconds = [min(_seconds(name, text) for _ in range(3)) for text in (short, long)]
        assert seconds[1] < 0.1 + 30 * seconds[0], f"{name}: {seconds} for 10 times the text"


@pytest.mark.parametrize("name", ["line", "", "Math", None, ["math"]])
def test_an_unknown_splitter_names_those_there_are(name: str) -> None:
    with pytest.raises(BadInput, match="choose one of lines, paragraphs, gsm8k, math, react, sentences, sub_questions"):
        splitter(name)


def test_paragraphs_are_parted_by_blank_lines_whatever_their_spaces() -> None:
    text = "\n\nA\nB\n\nC\n \t\n\nD\n"
    assert splitter("paragraphs")(text) == ["\n\nA\nB\n\n", "C\n \t\n\n", "D\n"]
    assert splitter("paragraphs")("A\nB") == ["A\nB"]


@pytest.mark.parametrize(
    ("response", "ends"),
    [
        ("\nA=1\nB=2\n#### 3\n", [4, 16]),
        ("\nA=1\nB=2\n", [4, 8, 9]),
        ("A\n\nB", [1, 2, 4]),
        ("\n#### 3\n", [8]),
        ("\n\n \nA", [5]),
        ("A\n\n#### 3", [9]),
        ("A\r\nB\r\n#### 3", [1, 12]),
        ("A\n#### 3\nB\n#### 4", [8, 17]),
        ("#### 3\n\n#### 4\n\nB", [15, 17]),
        ("A\n##### B", [1, 9]),
        ("A costs 2\nso #### 3", [9, 19]),
    ],
)
def test_gsm8k_steps_end_at_these_characters(response: str, ends: list[int]) -> None:
    steps = split_gsm8k(response)
    assert [len("".join(steps[: number + 1])) for number in range(len(steps))] == ends


@pytest.mark.parametrize(
    "sentences",
    [
        ["One.", " Two.", " Three"],
        ["Dr. Who met Mr. J. R. Smith of the U.S. Army.", " He left."],
        ["Pi is 3.14 or so.", " It is not 3."],
        ["He paid 3.", " Then 4."],
        ["We try, e.g. Newton's method (see Fig. 3 and Eq. 2).", " It works."],
        ["No.", " He has no. 5 of it."],
        ["They bought pens, ink, etc.", " Then they left."],
        ["It opens at 9 a.m. and shuts at 5 p.m.", " Nobody came."],
        ["Wait... what?", " Yes!", " Go…", " Now."],
        ['He said "Stop."', " She did not."],
        ["He said “Stop!” and ran.", " (She walked.)", " They met."],
        ["**Done.**", " Next one."],
        ["1. First, add.", "\n2. Then halve.", "\n b. Then rest."],
        ["甲有3个。", "乙有5个！", "共有8个吗？", "「是的。」", "好"],
        ["Heading", "\n\nText one.", " Text two.\n"],
        ["\n\nText one.", "\r\nText two.\r\n"],
        ["Is x > 2?", ' "Yes."'],
        ["Thus $x = 3.$", " Since \\(y = 4.\\)", " Now \\[z.\\]"],
        ["x is 2.", " Thus y is x.", " So y is 2."],
    ],
)
def test_these_sentences_are_found(sentences: list[str]) -> None:
    assert split_sentences("".join(sentences)) == sentences


@pytest.mark.parametrize(
    "steps",
    [
        ["How many are red? ** 3+4 = 7 are red.\n", "How many are left? ** 9-7 = 2 are left.\n#### 2"],
        ["Define a variable ** Let x be the price.\n", "What is x? ** x = 4\nso 4.\n", "Is it? ** It is."],
        ["Sub-question 1: How many?\nAnswer 1: 7.\n\n", "Sub-question 2: And now?\nAnswer 2: 2.\n#### 2"],
        ["Let us break it up.\n", "Question 1.1: How many?\nAnswer 1.1: 7.\n", "Question 1.2: b?\nAnswer 1.2: 2."],
        ["\n\n- **SubQuestion 1:** How many?\n7.\n", "- **Subquestion 2**: b?\n2.\n"],
        ["We compute 2 ** 3.\n", "That is 8.\n", "#### 8"],
        ["Question the premise.\n", "Then go on."],
    ],
)
def test_these_sub_questions_are_found(steps: list[str]) -> None:
    assert split_sub_questions("".join(steps)) == steps


def test_random_bytes_read_as_text_keep_the_laws() -> None:
    rng = random.Random(0)
    for _ in range(40):
        text = rng.randbytes(300).decode("utf-8", "surrogateescape")
        for name in NAMES:
            check_laws(name, text)


def test_published_gsm8k_solutions_have_a_step_a_line_and_the_answer_in_the_last(datasets_dir: Path) -> None:
    lines = (datasets_dir / "gsm8k" / "train.jsonl").read_text().splitlines()[:2000]
    for response in (json.loads(line)["answer"] for line in lines):
        for name in NAMES:
            check_laws(name, response)
        steps = split_gsm8k(response)
        assert sum(bool(step.strip()) for step in steps) == len(splitter("lines")(response)) - 1
        assert "\n#### " in steps[-1]
