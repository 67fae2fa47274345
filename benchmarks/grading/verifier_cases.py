"""Cases of every verifier: responses that the published rule accepts, and such as it refuses."""

from typing import Any

FINAL = "Final Answer: The final answer is {}. I hope it is correct."
DOUBLE = "```python\ndef f(x):\n    return 2 * x\n```"
ECHO = "Text.\n```py\nprint('no')\n```\nBetter:\n```\nprint(int(input()) * 2)\n```\n"

# verifier, ground truth, responses that score 1, responses that score 0
ANSWERS: list[tuple[str, Any, list[str], list[str]]] = [
    ("gsm8k", "18", ["so 18", "18.0", "9 + 9 = 18.", "it costs $18", "I saw 3, then 18", "<think>7</think>18"],
     ["18 then 7", "1.8", "-18", "", "eighteen", "<think>it is 18"]),
    ("gsm8k", "-3", ["it is -3", "5 - 8 = -3"], ["it is 3"]),
    ("gsm8k", "1,234,567", ["1234567", "1,234,567 people"], ["234567"]),
    ("gsm8k", 18, ["18"], ["19"]),
    ("gsm8k", "25", ["So it is 25%.", "25\\%", "25 percent"], ["2.5%"]),
    ("gsm8k", "He eats 3 of 21.\n21 - 3 = <<21-3=18>>18\n#### 18", ["so 18", "#### 18"], ["so 3", "21"]),
    ("gsm8k", ["€5", "$1,200."], ["it costs €5", "1200"], ["50"]),
    ("gsm8k", "none at all", ["None at all."], ["none", "0"]),
    ("math", "\\frac{1}{2}", ["\\boxed{0.5}", "so $x = 2$ and $\\frac12$", FINAL.format("$1/2$"), "1/2",
                             "\\boxed{3} ... " + FINAL.format("0.5")],
     ["\\boxed{\\frac{1}{3}}", "half of \\boxed{0.5} is \\boxed{0.25}", ""]),
    ("math", "5", ["**Final Answer**\nThe value is $5$.", "We now find the final answer.\nIt is $5$.",
                   "**Final Answer:** 5", "the final answer is 5", "Final answer: $5$. I hope it is correct."],
     ["Final answer: 4, as $x = 5$", "**Final Answer**\n$4$"]),
    ("math", "x^2+1", ["\\boxed{1+x^2}"], ["\\boxed{x^2-1}"]),
    ("math", "\\sqrt{8}", ["\\boxed{2\\sqrt{2}}"], ["\\boxed{2\\sqrt{3}}"]),
    ("math", "10\\%", ["\\boxed{10\\%}"], ["\\boxed{11\\%}"]),
    ("strict_math", "7", [FINAL.format("7"), "7"], ["\\boxed{7}", FINAL.format("8") + " 7"]),
    ("flan", "the United States", ["The answer is: United States!", "united states"], ["The answer is: France", ""]),
    ("flan", "A", ["The answer is: A.", "a"], ["The answer is: .", "The answer is: the", "-", "B"]),
    ("flan", "-5", ["-5", "The answer is: −5."], ["5", "The answer is: 5"]),
    ("flan", "1.5", ["1.50"], ["15", "1,5"]),
    ("string_matcher", "3/4", ["<answer>3/4</answer>", "<answer>0.75</answer>"], ["<answer>34</answer>"]),
    ("string_matcher", "x", ["<think><answer>y</answer></think><answer>x</answer>"],
     ["<think><answer>x</answer>", "<think><answer>x</answer></think> y", "<answer>x</think></answer>"]),
    ("string_f1", "-5", ["-5"], ["5", "it is 5"]),
    ("string_f1", "A", ["a"], ["the", "."]),
    ("string_matcher", ["Paris", "the Paris"], ["<answer>A</answer><answer> paris. </answer>"],
     ["Paris", "<answer>Paris", "<answer>London</answer>"]),
    ("puzzle", "red blue", ["<think>hm</think> <answer>Red, blue</answer>", "red blue"],
     ["<think>red blue</think> no", "<think>red blue", "<think>\n<answer>red blue</answer>"]),
    ("puzzle", "A", ["A"], ["the", "-"]),
    ("format", "", ["a</think> <answer>b</answer>"], ["<answer>b</answer>", "a</think> b"]),
    ("format", r".*#### \d+$", ["x\n#### 3"], ["3"]),
    ("think_format", None, ["<think>a</think>b"], ["b"]),
    ("ifeval", '{"func_name": "validate_no_commas"}', ["a b", "<think>a, b</think>c"], ["a, b", ""]),
    ("marked_number", "4", ["2 + 2 = 4\n#### 4"], ["4"]),
    ("choice", "B", ["The answer is (B)."], ["The answer is (C)."]),
]  # fmt: skip

# verifier, ground truth, response, its number of tokens, score
SCORES: list[tuple[str, Any, str, int, float]] = [
    ("string_f1", ["The red, big car", "bus"], "a red car", 3, 0.8),  # precision 2/2, recall 2/3
    ("string_f1", ["x"], "<think>open", 3, 0.0),
    *[("max_length", 8, "x", tokens, score) for tokens, score in ((0, 0.0), (4, 0.5), (8, 1.0), (9, 0.0))],
    *[("up_to_max_length", "8", "x", tokens, score) for tokens, score in ((8, 1.0), (10, 0.75), (16, 0.0), (99, 0.0))],
]  # fmt: skip

# id, arguments, a text that follows it, a text that does not
FOLLOWED: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["river", "boat"]}, "A Boat on the river.", "A boat on the lake."),
    ("keywords:frequency", {"keyword": "sun", "frequency": 2, "relation": "at least"}, "Sun, sun.", "Sun, Sunday."),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "Concatenate.", "The Cat."),
    ("keywords:letter_frequency", {"letter": "q", "let_frequency": 2, "let_relation": "less than"}, "Quit.", "q Q"),
    ("language:response_language", {"language": "de"}, "Das ist ein ganz einfacher deutscher Satz über das Wetter.",
     "This is a plain English sentence about the weather."),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "less than"},
     "Mr. Lee ran!", "A. B. Go! Stop!"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one\n***\ntwo", "one\n***\n\n***\ntwo"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "don't stop", "one man"),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
     "First.\n\n**Then** more.", "Then.\n\nFirst."),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name], [place]", "[name], []"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\np. s. More.", "Bye. PS more"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* one\n- two", "* one\n- two\n* three"),
    ("detectable_format:constrained_response", {}, "Well. My answer is no.", "My answer is nothing."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*one* and **two**", "*one* and ** **"),
    ("detectable_format:multiple_sections", {"section_spliter": "Section", "num_sections": 2},
     "Section 1 a\nSection 2 b", "Section 1 a\nSubsection 2 b"),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', 'Here: {"a": 1}'),
    ("detectable_format:title", {}, "<<Joy>> text", "<< >> text"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, "say it. Yes.", "Yes. Say it."),
    ("combination:two_responses", {}, "one\n******\ntwo", "one\n******\none"),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"},
     "GO NOW ok", "GO now"),
    ("change_case:english_capital", {}, "THIS IS A PLAIN ENGLISH SENTENCE.", "THIS IS A PLAIN ENGLISH SENTENCe."),
    ("change_case:english_lowercase", {}, "this is a plain english sentence.", "This is a plain english sentence."),
    ("startend:end_checker", {"end_phrase": "That is all."}, 'So. "that is all."\n', "That is all. Bye."),
    ("startend:quotation", {}, ' "all of it" ', '"half" of it'),
    ("punctuation:no_comma", {}, "one; two", "one, two"),
]  # fmt: skip

# response, ground truth, share of tests that pass
PROGRAMS: list[tuple[str, Any, float]] = [
    (DOUBLE, ["assert f(2) == 4", "assert f('a') == 'aa'"], 1.0),
    (DOUBLE, ["assert f(2) == 4", "assert f(2) == 5"], 0.5),
    (DOUBLE, ["def check(candidate):\n    assert candidate(3) == 6\ncheck(f)"], 1.0),
    (DOUBLE, ["import math\nassert math.isclose(f(0.1), 0.2)"], 1.0),
    (DOUBLE, {"fn_name": "f", "inputs": [[1], [[1]]], "outputs": [2, [1, 1]]}, 1.0),
    (DOUBLE, {"fn_name": "g", "inputs": [[1]], "outputs": [2]}, 0.0),
    ("```\nclass Solution:\n    def f(self, x):\n        return (x, None)\n```",
     {"fn_name": "f", "inputs": [[True]], "outputs": [[True, None]]}, 1.0),
    (ECHO, {"inputs": ["2\n", "5"], "outputs": ["4", "10 \n\n"]}, 1.0),
    (ECHO, [{"input": "2", "output": "5"}], 0.0),
    ("def f(x): return 2 * x", ["assert f(2) == 4"], 0.0),
    ("```\nnot python\n```", ["assert f(2) == 4"], 0.0),
    ("<think>" + DOUBLE, ["assert f(2) == 4"], 0.0),
    (ECHO, {"inputs": [["2"], "5"], "outputs": [["4"], ["10"]]}, 1.0),
    ("```\nfor k in range(int(input())):\n    print(input() + '!')\n```",
     {"inputs": [["2", "a", "b"]], "outputs": [["a!", "b!"]]}, 1.0),
    (DOUBLE, {"fn_name": "f", "inputs": [[1], [[1]]], "outputs": [[2], [[1, 1]]]}, 1.0),
    (DOUBLE, {"fn_name": "f", "inputs": [[1], [[1]]], "outputs": [[2], [1, 1]]}, 0.5),
    ("```\ndef f(x):\n    yield x\n```", ["assert list(f(1)) == [1]"], 0.0),
    ("```\ndef f(x):\n    x.sort()\n```", ["x = [2, 1]\nf(x)\nassert x == [1, 2]"], 0.0),
    ("<think>" + DOUBLE + "</think> I cannot.", ["assert f(2) == 4"], 0.0),
    (DOUBLE, {"tests": ["assert f(2) == 4", "assert f(2) == 5"], "threshold": 0.6}, 0.0),
    ("```\nimport os\ndef f(x):\n    return x if x else os._exit(0)\n```",
     ["assert f(1) == 1", "assert f(0) == 0", "assert f(2) == 2"], 2 / 3),
    ("```\ndef f(x):\n    while x: pass\n    return x\n```",
     {"tests": ["assert f(1) == 1", "assert f(0) == 0"], "seconds": 0.2}, 0.5),
    ("```\nexit()\n```", [{"input": "", "output": ""}], 1.0),
]  # fmt: skip
