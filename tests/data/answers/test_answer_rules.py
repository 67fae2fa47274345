"""The grader's rules, each with answers that it accepts and near misses that it must not: what is invented here is
right or wrong by plain reading, not by what any grader says."""

import pytest

from espalier.data.answers.grading import grade_answer
from espalier.data.answers.notation import single_backslashes
from espalier.data.answers.solutions import read_solutions


def is_right(kind: str, prediction: str, gold: str, num_options: int = 4) -> bool:
    return grade_answer(prediction=prediction, gold=gold, kind=kind, num_options=num_options).is_correct


# --- what is called the final answer behind a box takes the box's place -----------------------------------------

FINAL_BEHIND_A_BOX = [
    ("We first get \\boxed{4} as a partial sum. Doubling it, the final answer is $8$.", "8"),
    ("The area of one face is $\\boxed{12}$.\n\nFinal Answer: The final answer is $72$. I hope it is correct.", "72"),
    ("\\boxed{7} is the number of rows. **Final Answer:** 21", "21"),
    ("There are \\boxed{7} rows of three. Hence the final answer is: 21.", "21"),
    ("\\boxed{x+1} is one factor, so the final answer is $(x+1)(x+2)$.", "x^2+3x+2"),
    ("Step 1 gives \\boxed{\\frac{1}{2}}.\nThe final answer is \\(\\frac{1}{4}\\).", "0.25"),
    ("$\\boxed{3}$ cases, 5 each.\n\n**Final Answer**: $x = 15$", "15"),
    ("\\boxed{2} as a start. Then my final answer is -6.", "-6"),
    ("\\boxed{12} in all. The final answer is 15. Actually the check gives 15 rather than 4.", "15"),
    ("\\boxed{4} per row. Final Answer: 8 apples", "8"),
    ("\\boxed{4} per row. The final answer is 8 square units. It should be noted that 2 rows exist.", "8"),
    ("\\boxed{1}, \\boxed{2} for the parts. The final answer is $(1,2)$.", "(1,2)"),
    ("中间结果是 \\boxed{4}。最终答案是 8。", "8"),
    ("On a \\boxed{4}, puis on double. La réponse finale est 8.", "8"),
]
BOX_STANDS = [
    ("The final answer is 21. Let me put it properly: \\boxed{22}", "22", "21"),
    ("So $\\boxed{5}$ is the final answer.", "5", "4"),
    ("\\boxed{5}. I am confident that the final answer is correct.", "5", "4"),
    ("\\boxed{5}\n\nThe final answer is the number of cats.", "5", "4"),
    ("\\boxed{5}\n\nThe final answer is given above, not 6.", "5", "6"),
    ('\\boxed{5}. (The hint says "the final answer is 7", which is wrong.)', "5", "7"),
    ("\\boxed{5}. In the original problem the answer is 7.", "5", "7"),
    ("Final answer: see the box. \\boxed{6}", "6", "7"),
    ("The final answer is 4? No: \\boxed{6}", "6", "4"),
    ("\\boxed{6}. Note that 7 is an answer to another question.", "6", "7"),
    ("\\boxed{12}\nThe final answer is 12. Note: we used x=3 instead of x=4.", "12", "4"),
    ("\\boxed{12}\nThe final answer is 12. It should be 12 whichever of the 3 we try.", "12", "3"),
    ("\\boxed{12}\nThe final answer is 12. Actually, 4 would be too small.", "12", "4"),
    ("\\boxed{12}\nThe final answer is 12. One could divide by 4 rather than by 3", "12", "3"),
    ("\\boxed{5}. The final answer is 5 of the 10 marbles.", "5", "10"),
    ("\\boxed{18}\n\nFinal Answer: 18 (9 eggs at $2 each)", "18", "2"),
    ("\\boxed{18}\n\n**Final Answer:** 9 eggs at $2 each, so 18", "18", "9"),
    ("\\boxed{\\frac{1}{3}}. The final answer is 0.33.", "1/3", "0.5"),
    ("\\boxed{12}. The final answer is 13. Wait, no, that counts one twice.", "12", "13"),
    ("\\boxed{50}\n\nFinal Answer: Y = 600 / 12 = <<600/12=50>>50", "50", "12"),
]


@pytest.mark.parametrize(("response", "gold"), FINAL_BEHIND_A_BOX)
def test_a_final_answer_in_words_takes_the_place_of_a_box_before_it(response: str, gold: str) -> None:
    assert is_right("response_math", response, gold)
    assert is_right("math", response, gold)
    for boxed in ("4", "7", "12", "3", "2"):
        assert boxed == gold or not is_right("response_math", response, boxed)


@pytest.mark.parametrize(("response", "gold", "other"), BOX_STANDS)
def test_a_box_stands_where_no_other_value_is_called_final_behind_it(response: str, gold: str, other: str) -> None:
    assert is_right("response_math", response, gold)
    assert not is_right("response_math", response, other)


def test_a_hedge_behind_a_box_is_no_answer() -> None:
    for gold in ("3", "4"):
        assert not is_right("response_math", "$\\boxed{3}$ at first. The final answer is 3 or 4.", gold)
    assert not is_right("response_math", "\\boxed{3}. The final answer is 4. Wait, it is 5.", "4")


NOT_CORRECTED = [
    "The answer is 12. Note: we used x=3 instead of x=4.", "The answer is 12. It should be noted that x = 4.",
    "Answer: 12. We counted pairs rather than 4 triples.", "The answer is 12. We should be careful: 4 is no option.",
]  # fmt: skip
CORRECTED = [
    "The answer is 4. It should be 12.", "The answer is 4. Actually, it is 12.", "The answer is 4. Sorry, 12.",
    "The answer is 4. Wait, it is 12 instead.",
]  # fmt: skip


@pytest.mark.parametrize("response", [*NOT_CORRECTED, *CORRECTED])
def test_an_answer_in_words_is_corrected_by_another_value_alone(response: str) -> None:
    assert is_right("response_math", response, "12")
    assert not is_right("response_math", response, "4")


# --- an answer in words that begins with a negation -------------------------------------------------------------

NEGATIVE_WORDS = [
    "no solution", "no real solutions", "not enough information", "not a prime number", "not possible", "none",
    "not a function",
]  # fmt: skip
DENIED_VALUES = [
    ("not 5", "5"), ("not $x$", "x"), ("not x.", "x"), ("not -5", "-5"), ("not $\\frac12$", "0.5"),
    ("not (1,2)", "(1,2)"), ("not equal to 5", "5"), ("not **5**", "5"), ("not \\$5", "5"), ("not $5 + x$", "5+x"),
    ("not .5", "0.5"),
]  # fmt: skip


@pytest.mark.parametrize("words", NEGATIVE_WORDS)
def test_a_negation_without_a_value_is_an_answer(words: str) -> None:
    for response in (f"Answer: {words}", f"The answer is {words}.", f"**Answer:** {words}", f"Final answer: {words}"):
        assert is_right("response_math", response, words)
        assert is_right("math", response, f"\\text{{{words}}}")
        assert not is_right("response_math", response, "5")


@pytest.mark.parametrize(("words", "gold"), DENIED_VALUES)
def test_a_value_that_is_denied_is_no_answer(words: str, gold: str) -> None:
    for response in (f"The answer is {words}", f"Answer: {words}"):
        assert not is_right("response_math", response, gold)
        assert not is_right("math", response, gold)


# --- times of day -----------------------------------------------------------------------------------------------

SAME_TIMES = [
    ("3:00 AM", "3:00"), ("3:00", "3:00 \\text{ p.m.}"), ("3:00 a.m.", "3:00 \\text{ AM}"), ("3 PM", "3"),
    ("3:00\\text{ PM}", "3:00 PM"), ("The answer is 3:00 PM.", "3:00 PM"), ("3pm", "3 p.m."),
    ("$3:00$ PM", "3:00 \\text{ PM}"), ("\\text{3:00 PM}", "3:00 PM"), ("$3:00$ a.m.", "3:00"),
    ("5 \\text{ PM}, 3 \\text{ AM}", "3 \\text{ AM}, 5 \\text{ PM}"),
]  # fmt: skip
OTHER_TIMES = [
    ("3:00 AM", "3:00 PM"), ("3:00 PM", "3:00 AM"), ("3:00\\text{ a.m.}", "3:00\\text{ PM}"), ("3 AM", "3 PM"),
    ("The train leaves at 3:00 AM.", "3:00 PM"), ("3am", "3 p.m."), ("4:00 PM", "3:00 PM"), ("3:30", "3:00 PM"),
]  # fmt: skip


@pytest.mark.parametrize(("prediction", "gold"), SAME_TIMES)
def test_a_time_of_day_without_its_half_fits_either(prediction: str, gold: str) -> None:
    assert is_right("math", prediction, gold)


@pytest.mark.parametrize(("prediction", "gold"), OTHER_TIMES)
def test_morning_is_not_afternoon(prediction: str, gold: str) -> None:
    assert not is_right("math", prediction, gold)


# --- a number times letters is no number ------------------------------------------------------------------------

EQUAL_TERMS = [
    ("5x", "5*x"), ("5x", "5 \\cdot x"), ("5x", "5 x"), ("5ab", "5ba"), ("5 \\times x", "5x"), ("2x^2y", "2yx^2"),
    ("\\frac{1}{2}x", "\\frac{x}{2}"), ("0.5t", "\\frac{1}{2}t"), ("3x + 2t", "2t + 3x"), ("x=5y", "5y"),
    ("-x", "-1x"), ("5x_1", "5x_{1}"), ("2n+3n", "5n"),
]  # fmt: skip
NUMBERS_WITH_UNITS = [
    "5 m", "5 cm", "5cm", "5\\text{ m}", "5\\,\\mathrm{kg}", "5 apples", "5 km/h", "5\\text{ m}^2", "5 hours",
    "5^\\circ", "5°", "5 degrees", "\\$5", "5\\text{ dollars}", "5 \\times", "5\\text{ square units}", "x = 5",
    "5 mètres", "5 N",
]  # fmt: skip
OTHER_THAN_FIVE = [
    "5x", "5 x", "5*x", "5 \\cdot x", "5y", "5n", "5t", "5a", "5k", "5i", "5xy", "5ab", "5x^2", "5X", "5u",
    "\\boxed{5x}", "The answer is $5t$.", "5*m", "5 \\cdot h", "5hs", "5m_1",
    "5\\pi", "5x\\text{ cm}", "5 abc", "5\\theta", "5 \\sqrt{2}",
]  # fmt: skip
OTHER_TERMS = [
    ("5x", "5y"), ("5x", "6x"), ("5m", "5n"), ("5x", "5x^2"), ("5xy", "5x"), ("x", "1"), ("x", "y"), ("3x+2t", "3x+2"),
    ("2n", "n"), ("\\frac{1}{2}ab", "\\frac{1}{2}"), ("-x", "x"),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), EQUAL_TERMS)
def test_one_term_is_equal_however_it_is_typed(one: str, other: str) -> None:
    assert is_right("math", one, other)
    assert is_right("math", other, one)


@pytest.mark.parametrize("text", NUMBERS_WITH_UNITS)
def test_a_unit_may_be_left_off_and_put_in(text: str) -> None:
    assert is_right("math", text, "5")
    assert is_right("math", "5", text)


@pytest.mark.parametrize("text", OTHER_THAN_FIVE)
def test_a_number_is_not_that_number_times_a_letter(text: str) -> None:
    assert not is_right("math", text, "5")
    assert not is_right("math", "5", text)


GLUED_UNITS = [("5m", "5"), ("$5h$", "5"), ("\\boxed{5m}", "5"), ("5A", "5"), ("12V", "12"),
               ("The answer is 12V.", "12"),
               ("9J", "9"), ("300K", "300"), ("2.5L", "2.5"), ("5m^2", "5"),
               ("-3C", "-3"), ("d = 5m", "5")]  # fmt: skip


@pytest.mark.parametrize(("text", "gold"), GLUED_UNITS)
def test_the_letter_of_a_unit_right_behind_a_number_is_its_unit_beside_a_plain_number(text: str, gold: str) -> None:
    for kind in ("math", "response_math", "number", "response_number"):
        assert is_right(kind, text, gold)
        assert not is_right(kind, text, gold + "1")
    assert is_right("response_number", f"#### {text.strip('$')}", gold) or "answer" in text
    assert not is_right("math", gold, text) or "answer" in text  # a gold answer `5m` is five times m


@pytest.mark.parametrize(("one", "other"), OTHER_TERMS)
def test_other_letters_and_powers_are_other_terms(one: str, other: str) -> None:
    assert not is_right("math", one, other)
    assert not is_right("math", other, one)


@pytest.mark.parametrize("kind", ["number", "response_number"])
def test_a_term_is_no_number_for_the_number_kinds_either(kind: str) -> None:
    for text in ("5x", "5xy", "5n", "$5y$", "\\boxed{5x}", "The answer is $5x^2$.", "The answer is not 5."):
        assert not is_right(kind, text, "5")
    for text in ("5 m", "5m", "5 apples", "5", "x = 5", "$5"):
        assert is_right(kind, text, "5")


# --- sets, tuples, intervals ------------------------------------------------------------------------------------

SAME_SETS = [
    ("\\{1,2\\}", "\\{2,1\\}"), ("$\\{1,2\\}$", "{2, 1}"), ("{1,2}", "\\{1,2\\}"), ("x\\in\\{1,2\\}", "\\{2,1\\}"),
    ("2, 1", "\\{1,2\\}"), ("\\{(1,2)\\}", "(1,2)"), ("\\{(3,4),(1,2)\\}", "(1,2),(3,4)"), ("\\{5\\}", "5"),
    ("\\left\\{1,2\\right\\}", "\\lbrace 2,1 \\rbrace"), ("\\{1;2\\}", "\\{1,2\\}"),
    ("\\{x \\mid 1 < x < 2\\}", "(1,2)"), ("(1,2)", "\\{x : 1 < x < 2\\}"), ("1, 2", "(1,2)"),
    ("\\langle 1,2\\rangle", "(1,2)"),
]  # fmt: skip
OTHER_BRACKETS = [
    ("$\\{1,2\\}$", "(1,2)"), ("{1,2}", "(1,2)"), ("${1,2}$", "(1,2)"), ("\\boxed{\\{1,2\\}}", "(1,2)"),
    ("The solution is $\\{1,2\\}$.", "(1,2)"), ("S = \\{1,2\\}", "(1,2)"), ("\\{1,2\\}", "[1,2]"), ("(2,1)", "(1,2)"),
    ("[1,2]", "(1,2)"), ("[1,2)", "[1,2]"), ("\\{2,1\\}", "(2,1)"), ("2, 1", "(1,2)"), ("\\{1,2\\}", "\\{1,3\\}"),
    ("\\{1,2,3\\}", "\\{1,2\\}"), ("\\lbrace 1,2\\rbrace", "(1,2)"), ("\\{x \\mid 1 < x < 3\\}", "(1,2)"),
]  # fmt: skip


@pytest.mark.parametrize(("prediction", "gold"), SAME_SETS)
def test_a_set_has_no_order(prediction: str, gold: str) -> None:
    assert is_right("math", prediction, gold)


@pytest.mark.parametrize(("prediction", "gold"), OTHER_BRACKETS)
def test_a_set_is_no_point_and_no_interval(prediction: str, gold: str) -> None:
    assert not is_right("math", prediction, gold)


# --- values of several unknowns ---------------------------------------------------------------------------------

SAME_SOLUTIONS = [
    ("a=1,b=2;a=3,b=4", "(1,2),(3,4)"), ("a = 1 and b = 2, or a = 3 and b = 4", "(3,4),(1,2)"),
    ("a=3,b=4; a=1,b=2", "a = 1 and b = 2, or a = 3 and b = 4"), ("b=2, a=1", "(1,2)"), ("(b,a)=(2,1)", "(a,b)=(1,2)"),
    ("(x,y) = (1,2) \\text{ or } (3,4)", "x=1,y=2 \\text{ or } x=3,y=4"), ("(x,y)\\in\\{(1,2),(3,4)\\}", "(3,4),(1,2)"),
    ("\\begin{cases}x=1\\\\y=2\\end{cases}", "(1,2)"), ("$x=1$, $y=2$", "(1,2)"), ("z=3,x=1,y=2", "(x,y,z)=(1,2,3)"),
    ("x = \\frac{1}{2}, y = \\sqrt{4}", "(0.5, 2)"), ("\\{x=1, y=2\\}", "(1,2)"), ("n=5, k=2", "(5,2)"),
    ("AB=4, CD=5", "CD=5, AB=4"), ("x=1 or x=2", "x=2, x=1"), ("x_2=7, x_1=6", "(x_1,x_2)=(6,7)"),
    ("a=1,b=2; a=3,b=4; a=5,b=6", "(5,6),(1,2),(3,4)"), ("x_1=5", "x_{1}=5"), ("x_1=1, x_2=2", "x_{1}=1, x_{2}=2"),
    ("x_{2}=2, x_1=1", "(x_{1},x_{2})=(1,2)"), ("X=5", "x=5"), ("X=1, Y=2", "y=2, x=1"), ("X_{1}=5", "x_1=5"),
    ("n=4,m=3", "(4,3)"), ("n=4,m=3", "(3,4)"), ("t=1, s=2", "(1,2)"), ("A=1, a=2", "a=2, A=1"),
]  # fmt: skip
OTHER_SOLUTIONS = [
    ("a=1,b=2;a=3,b=4", "(1,2),(4,3)"), ("a=1,b=2;a=3,b=4", "(1,2)"), ("(1,2)", "a=1,b=2;a=3,b=4"),
    ("b=1, a=2", "(1,2)"), ("x=1,y=2", "x=2,y=1"), ("x=1,y=2", "a=1,b=2"), ("x=1, y=2", "1"), ("x=1 or x=2", "1"),
    ("(a,b)=(1,2)", "(b,a)=(1,2)"), ("a=1 or b=2", "a=1,b=2"), ("a=1 and b=4, or a=3 and b=2", "(1,2),(3,4)"),
    ("x=1,y=2,z=3", "(1,2)"), ("x=1", "x=1,y=2"), ("a=1,b=2;a=3,b=4;a=5,b=6", "a=1,b=2;a=3,b=4"), ("n=5", "m=5"),
    ("x=1, x=2", "x=1"), ("x_1=5", "x_2=5"), ("x_{1}=5", "x_{2}=5"), ("x_1=1,x_2=2", "x_{1}=2,x_{2}=1"), ("X=5", "y=5"),
    ("X=1,Y=2", "x=2,y=1"), ("n=4,m=3", "m=4,n=3"), ("n=4,m=3", "(4,4)"), ("A=1, a=2", "a=1, A=2"),
    ("x_{12}=5", "x_1=5"),
]  # fmt: skip


@pytest.mark.parametrize(("prediction", "gold"), SAME_SOLUTIONS)
def test_values_of_unknowns_are_equal_in_every_layout(prediction: str, gold: str) -> None:
    assert is_right("math", prediction, gold)
    assert is_right("math", gold, prediction)


@pytest.mark.parametrize(("prediction", "gold"), OTHER_SOLUTIONS)
def test_other_values_fewer_and_more_of_them_are_wrong(prediction: str, gold: str) -> None:
    assert not is_right("math", prediction, gold)


def test_the_names_and_values_that_are_read() -> None:
    found = read_solutions("y = 2 and x = 1, or y = 4 and x = 3")
    assert found is not None
    assert (found.names, found.values) == (("y", "x"), (("2", "1"), ("4", "3")))
    assert found.in_order(("x", "y")) == "(1,2), (3,4)"
    for text in ("x < 3, y = 2", "x + y = 2, y = 1", "x = 1", "1, 2", "x = y = 2, z = 1", "a = 1 or b = 2"):
        read = read_solutions(text)
        assert read is None or len(read.names) == 1


# --- doubled backslashes ----------------------------------------------------------------------------------------

DOUBLED = [
    ("\\\\frac{1}{2}", "0.5"), ("\\\\boxed{5}", "5"), ("\\frac12", "\\\\frac{1}{2}"), ("$\\\\sqrt{8}$", "2\\sqrt{2}"),
    ("\\\\left(1,2\\\\right)", "(1,2)"), ("\\\\{1,2\\\\}", "\\{2,1\\}"), ("\\\\(5\\\\)", "5"), ("50\\\\%", "0.5"),
    ("\\\\begin{pmatrix}1\\\\\\\\2\\\\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"), ("2\\\\pi", "2\\pi"),
    ("So \\\\boxed{\\\\frac{1}{2}}.", "1/2"), ("(-\\\\infty, 3]", "(-\\infty,3]"), ("\\\\text{yes}", "yes"),
    ("Answer:\\n\\n\\\\boxed{840}", "840"),
]  # fmt: skip
NOT_DOUBLED = [
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}12\\end{pmatrix}"), ("\\\\frac{1}{3}", "0.5"),
    ("\\\\boxed{5} or \\\\boxed{6}", "5"), ("\\\\boxed{4}. Then \\\\boxed{5}", "4"), ("2\\\\pi", "\\pi"),
    ("\\\\sqrt{3}", "3"), ("\\\\{1,2\\\\}", "(1,2)"), ("x=1 \\\\ y=2", "1"), ("\\\\text{no}", "yes"),
    ("5\\\\%", "5000"),
]  # fmt: skip


@pytest.mark.parametrize(("prediction", "gold"), DOUBLED)
def test_a_backslash_escaped_once_too_often_is_one(prediction: str, gold: str) -> None:
    assert is_right("math", prediction, gold)


@pytest.mark.parametrize(("prediction", "gold"), NOT_DOUBLED)
def test_doubled_backslashes_make_no_wrong_answer_right(prediction: str, gold: str) -> None:
    assert not is_right("math", prediction, gold)


@pytest.mark.parametrize(
    "text",
    [
        "\\begin{pmatrix}1\\\\2\\end{pmatrix}",
        "\\begin{cases}x=1\\\\\\pi\\end{cases}",
        "1\\\\2",
        "\\frac{1}{2}",
        "x\\\\[2pt]y",
    ],
)
def test_a_broken_line_stays(text: str) -> None:
    assert single_backslashes(text) == text


# --- letters ----------------------------------------------------------------------------------------------------

CHOOSES_B = [
    "It is not A or C, so B is right.", "(A) is wrong, (B) is correct.", "A and C are wrong. B is right.",
    "Neither A nor C fits, so it is B.", "B is right, not A or C.", "A, C and D are incorrect, B is correct.",
    "We can rule out A, C, and D, leaving B.", "(a) is wrong, (b) is correct",
    "Option A is wrong; option B is correct.", "The answer is B, not A or C.", "It's B rather than A or D.",
    "Unlike A, B is correct.", "A不对，B正确", "排除A和C，选B", "A is out, and so is C. B is the only valid choice.",
    "Comparing A and C with B: B is correct.", "**A** is incorrect. **B** is correct.", "\\\\boxed{B}",
    "La bonne réponse est (B).", "Ответ: B", "正解はBです", "Answer: B\n\nNote: A would need more evidence.",
    "The answer is B. Never mind A.", "Answer: B\nExcluded: A, C, D", "B. Note that the rest fail.",
    "The answer is B. Note that this follows from the text.", "The answer is B not A.", "B) Nothing else fits.",
    "Answer: B.\n\nNot A, since it is too broad.", "**B**\n\nIncorrect options: A, C, D", "The answer is B.\nWrong: A",
    "The correct answer is (B). False options are A and C.", "The answer is B. Notably A fails.",
    "Answer: B Rejected: A.", "B Wrong ones: A, C", "(B) Out of the four, it fits best.",
    "I choose B.\nOut of the others, C came closest.", "The answer is B\n\nNever A.",
]  # fmt: skip
CHOOSES_NOT_B_ALONE = [
    "A is right and B is right.", "A or B is correct.", "Both A and B are correct.",
    "A is correct, B is also correct.", "It is not C, so A or B.", "Either A is right or B is right.",
    "B is right; A might be too.", "A, B and C are wrong.", "B is not correct.", "Neither A nor B is right.",
    "If B is correct then A is wrong.", "It is not B or A.", "Is B correct?", "B is wrong, A is wrong.",
    "Not B, so A is right.", "La réponse est A ou B.", "B isn't supported; A is.", "(B) fails. A holds.",
    "B is not it.", "**B** is false; the answer is A.", "B cannot be right.",
]  # fmt: skip


@pytest.mark.parametrize("response", CHOOSES_B)
def test_the_option_that_is_affirmed_is_chosen(response: str) -> None:
    assert [letter for letter in "ABCD" if is_right("choice", response, letter)] == ["B"]


@pytest.mark.parametrize("response", CHOOSES_NOT_B_ALONE)
def test_several_options_and_denied_ones_are_not_chosen(response: str) -> None:
    assert not is_right("choice", response, "B")


# --- languages --------------------------------------------------------------------------------------------------

SENTENCES = [
    "最终答案是{}。", "因此，正确答案为 {}。", "答案：{}", "La réponse est {}.",
    "Donc la réponse finale est donc {}.", "Réponse : {}", "Die Antwort ist {}.", "Die endgültige Antwort lautet {}.",
    "**Antwort:** {}", "La respuesta es {}.", "Respuesta: {}", "La risposta finale è {}.", "Risposta: {}",
    "A resposta é {}.", "Resposta final: {}", "Ответ: {}.", "Правильный ответ — {}.", "答えは{}です。",
    "最終的な答えは{}です。", "정답은 {}입니다.", "최종 답은 {}이다.", "الإجابة هي {}.", "उत्तर {} है।",
    "Het antwoord is {}.", "Cevap: {}", "Đáp án là {}.", "Jawabannya adalah {}.", "คำตอบคือ {}",
]  # fmt: skip


@pytest.mark.parametrize("sentence", SENTENCES)
def test_an_answer_is_read_in_the_sentences_of_other_languages(sentence: str) -> None:
    before = "3 + 9 = 12, 99. "
    for kind in ("math", "response_math"):
        assert is_right(kind, before + sentence.format("15"), "15")
        assert is_right(kind, before + sentence.format("$\\frac{3}{4}$"), "0.75")
        assert not is_right(kind, before + sentence.format("15"), "99")
    assert is_right("response_number", before + sentence.format("15"), "15")
    assert not is_right("response_math", sentence.format("$12$ / $13$"), "12")


DENIED_OR_SEVERAL = [
    "La réponse n'est pas 12.", "Die Antwort ist nicht 12.", "答案不是12。", "Ответ не 12.", "La respuesta no es 12.",
    "The answer is not 12.", "La réponse est 12 ou 13.", "Die Antwort ist 12 oder 13.", "答案是12或13。",
    "Ответ: 12 или 13", "La risposta è 12 o 13.", "答えは12または13です。", "정답은 12 또는 13입니다.",
    "It may be 12 or 13.",
]  # fmt: skip


@pytest.mark.parametrize("sentence", DENIED_OR_SEVERAL)
def test_a_denied_answer_and_a_choice_of_answers_are_wrong_in_every_language(sentence: str) -> None:
    for kind in ("math", "response_math"):
        assert not is_right(kind, sentence, "12")


def test_a_comma_parts_decimals_where_the_language_has_it_so() -> None:
    for sentence in ("La réponse est 3,5.", "Die Antwort ist 3,5 Meter.", "Ответ: 3,5"):
        assert is_right("response_math", sentence, "3.5")
        assert not is_right("response_math", sentence, "35")
    assert is_right("response_math", "La réponse est $(1,2)$.", "(1,2)")


# --- one spelling -----------------------------------------------------------------------------------------------

SAME_TEXT = [
    ("½", "0.5"), ("3½", "3.5"), ("2√3", "2\\sqrt{3}"), ("√(2)", "\\sqrt2"), ("2π", "2\\pi"), ("x²+1", "x^2+1"),
    ("10³", "1000"), ("–5", "-5"), ("2·3", "6"), ("x≤5", "x\\le 5"), ("(−∞, 3]", "(-\\infty,3]"),
    ("(1,2)∪(3,4)", "(1,2)\\cup(3,4)"), ("ℝ", "\\R"), ("£5", "5"), ("5 €", "5"), ("Rs. 500", "500"), ("５", "5"),
    ("**5**", "5"), ("]1,2[", "(1,2)"), ("[1;2]", "[1,2]"), ("\\bigl(1,2\\bigr)", "(1,2)"),
    ("\\varnothing", "\\emptyset"), ("{5 \\choose 2}", "10"), ("204_{\\text{five}}", "204_5"),
    ("\\sin 30^\\circ", "\\frac12"), ("= 5", "5"), ("5,", "5"), ("$5,$.", "5"), ("So $x = 5$.", "5"),
    ("5:30 PM", "5:30 \\text{ p.m.}"), ("\\frac{1\\pm\\sqrt5}{2}", "\\frac{1+\\sqrt5}{2}, \\frac{1-\\sqrt5}{2}"),
    ("P(A)=0.3", "0.3"), ("\\text{Area}=5", "5"), ("(B) 12", "12"), ("B", "\\text{(B) }12"),
    ("The roots are 1 and 2.", "1,2"),
]  # fmt: skip
OTHER_TEXT = [
    ("12\\\\13", "12"), ("12 \\\\ 13", "13"), ("½", "12"), ("3½", "1.5"), ("x²", "x2"), ("10³", "103"), ("2·3", "23"),
    ("]1,2[", "[1,2]"), ("[1,2[", "[1,2]"), ("204_{\\text{five}}", "204_6"), ("\\sin 30^\\circ", "\\sin 30"),
    ("5:30", "5"), ("\\pm 3", "3"), ("(B) 12 or 13", "12"), ("(A), (B)", "A"), ("f(2)=12=13", "13"),
    ("12x = 13", "13"), ("odd = even", "even"), ("x^2 = 4", "4"), ("1 \\pm 2", "3"),
    ("\\text{(A)} \\text{ or } \\text{(C)}", "\\text{(A)}"), ("The roots are 1 and 2.", "1"),
]  # fmt: skip


@pytest.mark.parametrize(("prediction", "gold"), SAME_TEXT)
def test_ways_to_type_one_answer_are_equal(prediction: str, gold: str) -> None:
    assert is_right("math", prediction, gold)


@pytest.mark.parametrize(("prediction", "gold"), OTHER_TEXT)
def test_one_spelling_makes_no_wrong_answer_right(prediction: str, gold: str) -> None:
    assert not is_right("math", prediction, gold)
