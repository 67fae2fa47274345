"""Every published set on invented rows in its own layout: what a row means, and which rows are refused."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from espalier.data.records import BadInput, Problem
from espalier.data.splits import SplitPlan
from espalier.data.tables import table_rows
from espalier.data.tasks.entailment import LogiQANLI
from espalier.data.tasks.folio import FOLIO
from espalier.data.tasks.layouts import TASKS, tasks_that_take
from espalier.data.tasks.logic_llm import LogicLLM, strip_own_letter
from espalier.data.tasks.logical_reading import ARLSAT, LogiQA1, LogiQA2, ReClor
from espalier.data.tasks.math import MATH, last_boxed
from espalier.data.tasks.published import PublishedTask
from espalier.data.tasks.short_answers import NQOpen, TriviaQA, TruthfulQA
from espalier.data.tasks.word_problems import SVAMP, ASDiv, join_scene

ROOT = Path(__file__).resolve().parent.parent.parent.parent


def read(kind: type[PublishedTask], path: Path, rows: Sequence[Any], split: str, **settings: Any) -> list[Problem]:
    """The problems of a file of JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return kind(str(path), **settings).problems(split)


@pytest.mark.parametrize(
    ("solution", "gold"),
    [
        (r"first \boxed{3}, then \boxed{4}.", "4"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"so $\boxed {17}.$", "17"),
        (r"so $\boxed 2$.", "2"),
        (r"so \boxed 9. Done", "9"),
        (r"\fbox{7}", "7"),
        (r"\boxed{\left\{ 1, 2 \right.}", r"\left\{ 1, 2 \right."),
        (r"\boxed{\{1,2\}} and more }", r"\{1,2\}"),
        (r"\boxed{a} \boxedness{b}", "a"),
        (r"\boxed{open", None),
        (r"\boxed{}", ""),
        (r"\boxed", ""),
        ("no box", None),
    ],
)
def test_the_last_box_is_the_gold(solution: str, gold: str | None) -> None:
    assert last_boxed(solution) == gold


def math_row(number: int, **more: Any) -> dict[str, Any]:
    return {
        "problem": f"What is {number} + 1?", "level": "Level 3", "type": "Number Theory",
        "solution": rf"It is $\boxed{{{number + 1}}}$.", **more,
    }  # fmt: skip


def test_math_reads_a_table(tmp_path: Path) -> None:
    rows = [math_row(1), math_row(2, level="Level ?")]
    problems = read(MATH, tmp_path / "train.jsonl", rows, "train")
    assert [problem.id for problem in problems] == ["math-train-0", "math-train-1"]
    assert problems[0].gold == "2"
    assert [problem.info["level"] for problem in problems] == [3, None]
    assert problems[0].info["subject"] == "Number Theory"
    demonstration = MATH(str(tmp_path)).demonstrations("train")[0]
    assert (demonstration.id, demonstration.completion) == ("math-train-0/gold", "It is $\\boxed{2}$.")


def test_an_empty_box_is_a_problem_without_gold_and_no_demonstration(tmp_path: Path) -> None:
    problems = read(MATH, tmp_path / "train.jsonl", [math_row(1), math_row(2, solution=r"So \boxed{}.")], "train")
    assert [problem.gold for problem in problems] == ["2", ""]
    assert [row.id for row in MATH(str(tmp_path)).demonstrations("train")] == ["math-train-0/gold"]


def test_math_reads_the_archive_and_the_list_of_500(tmp_path: Path) -> None:
    for number in (2, 10):
        place = tmp_path / "MATH" / "test" / "number_theory" / f"{number}.json"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(math_row(number), indent=4))
    archive = MATH(str(tmp_path)).problems("test")
    row = {**math_row(10), "level": 3, "answer": "11", "subject": "Number Theory",
           "unique_id": "test/number_theory/10.json"}  # fmt: skip
    del row["type"]
    (listed,) = read(MATH, tmp_path / "list.jsonl", [row], "test")
    assert [problem.id for problem in archive] == ["math-test-number_theory-2", "math-test-number_theory-10"]
    assert listed.id == archive[1].id
    assert (listed.question, listed.gold, listed.info["level"]) == (archive[1].question, "11", 3)


def test_the_held_out_list_is_the_test_split_and_in_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan = SplitPlan({"train": 14, "dev": 2, "test": 4}, pool=("train", "test"))
    read(MATH, tmp_path / "train.jsonl", [math_row(n) for n in range(10)], "train")
    read(MATH, tmp_path / "test.jsonl", [math_row(n) for n in range(10, 20)], "test")
    held_out = [math_row(n, problem=f"What is  {n} + 1?") for n in (3, 4, 11, 12)]
    read(MATH, tmp_path / "list.jsonl", held_out, "test")
    task = MATH(str(tmp_path), splits=plan, held_out=str(tmp_path / "list.jsonl"))
    parts = {split: {" ".join(p.question.split()) for p in task.problems(split)} for split in ("train", "dev", "test")}
    assert {split: len(questions) for split, questions in parts.items()} == {"train": 14, "dev": 2, "test": 4}
    assert len(parts["train"] | parts["dev"] | parts["test"]) == 20
    assert not caplog.records
    drawn = MATH(str(tmp_path), splits=plan)
    assert [len(drawn.problems(split)) for split in ("train", "dev", "test")] == [14, 2, 4]


def test_a_plan_over_a_split_that_is_not_there_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    read(MATH, tmp_path / "train.jsonl", [math_row(n) for n in range(10)], "train")
    task = MATH(str(tmp_path), splits=SplitPlan({"train": 16, "dev": 4}, pool=("train", "test")))
    assert [len(task.problems(split)) for split in ("train", "dev")] == [8, 2]
    assert "also divides the split 'test', which is not in" in caplog.text
    assert "made for 20 problems and there are 10" in caplog.text


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (math_row(1, solution="none"), r"no closed \\boxed"),
        (math_row(1, level="hard"), "level must be 'Level 1'"),
        (math_row(1, problem=7), "problem must be a string, got 7"),
    ],
)
def test_math_refuses_what_it_cannot_read(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadInput, match=rf"train\.jsonl:1: .*{reason}"):
        read(MATH, tmp_path / "train.jsonl", [row], "train")


def test_a_scene_gets_its_full_stop_where_it_lacks_one() -> None:
    assert join_scene("Ann has 3 pens", "How many has she?") == "Ann has 3 pens. How many has she?"
    assert join_scene("Ann has 3 pens.", "How many has she?") == "Ann has 3 pens. How many has she?"
    assert join_scene("If Ann has 3 pens,", "how many has she?") == "If Ann has 3 pens, how many has she?"


def test_svamp_golds_are_whole_numbers_and_its_misspelling_is_mended(tmp_path: Path) -> None:
    row = {"Body": "Ann has 3 pens", "Question": "How many?", "Equation": "( 3.0 )", "Answer": 3.0,
           "Type": "Common-Divison", "ID": "chal-9", "idx": 0}  # fmt: skip
    first, second, third = read(
        SVAMP, tmp_path / "s.jsonl", [row, {**row, "Answer": "2.50", "ID": "chal-1"}, {**row, "Answer": -4}], "test"
    )
    assert (first.id, first.gold, first.info["subject"]) == ("svamp-test-chal-9", "3", "Common-Division")
    assert (second.gold, third.gold, third.id) == ("2.5", "-4", "svamp-test-chal-9.2")
    with pytest.raises(BadInput, match="Answer must be a number, got 'many'"):
        read(SVAMP, tmp_path / "s.jsonl", [{**row, "Answer": "many"}], "test")


@pytest.mark.parametrize(
    ("answer", "gold", "unit", "kind"),
    [
        ("9 (apples)", "9", "apples", "response_number"),
        ("14  (square  feet)", "14", "square  feet", "response_number"),
        ("1,250", "1250", "", "response_number"),
        ("Yes", "Yes", "", "short_answer"),
        ("3:30 p.m.", "3:30 p.m.", "", "short_answer"),
        ("3:4", "3:4", "", "short_answer"),
        ("5/2", "5/2", "", "response_math"),
        ("-(1/3)", "-(1/3)", "", "response_math"),
    ],
)
def test_asdiv_parts_the_unit_and_knows_the_kind_of_an_answer(
    tmp_path: Path, answer: str, gold: str, unit: str, kind: str
) -> None:
    row = {"body": "A.", "question": "B?", "solution_type": "Sum", "answer": answer, "formula": "", "idx": 0}
    (problem,) = read(ASDiv, tmp_path / "a.jsonl", [row], "test")
    assert (problem.gold, problem.info["unit"], ASDiv("x").kind_of(problem.gold)) == (gold, unit, kind)


def logiqa_row(options: list[str], **more: Any) -> dict[str, Any]:
    return {"id": 1, "answer": 1, "text": "Passage.", "question": "Which?", "options": options, **more}


def test_logiqa_two_keeps_an_option_that_only_looks_lettered(tmp_path: Path) -> None:
    bare = logiqa_row(["A rule.", "B. t. toxins", "C", "none"], type={"Necessry Condtional Reasoning": True, "X": None})
    lettered = logiqa_row(["A.one", "B. two", "C.C.", "D.four"])
    persons = logiqa_row(["A is tall", "B is tall", "C is tall", "D is tall"])
    one, two, three = read(LogiQA2, tmp_path / "l.txt", [bare, lettered, persons], "dev")
    assert one.options == bare["options"]
    assert one.info == {"subject": ["Necessary Conditional Reasoning"]}
    assert two.options == ["one", "two", "C.", "four"]
    assert three.options == persons["options"]
    assert (one.gold, one.context, one.question) == ("B", "Passage.", "Which?")


LOGIQA_ONE = """
a
Ann is taller than Bo.
Who is taller?
A.Ann
B.Bo
C? Cy
D.D.

d
Rain\u2028 or sun?
Which follows?
A No rain
B No sun
C Both
D Neither
"""


def test_logiqa_one_reads_its_eight_lines(tmp_path: Path) -> None:
    (tmp_path / "Eval.txt").write_text(LOGIQA_ONE)
    one, two = LogiQA1(str(tmp_path)).problems("dev")
    assert (one.id, one.gold, one.context, one.question) == (
        "logiqa1-dev-0", "A", "Ann is taller than Bo.", "Who is taller?"
    )  # fmt: skip
    assert one.options == ["Ann", "Bo", "Cy", "D."]
    assert (two.gold, two.options) == ("D", ["No rain", "No sun", "Both", "Neither"])
    (tmp_path / "Eval.txt").write_bytes(LOGIQA_ONE.replace("\n", "\r\n").encode("utf-8-sig"))
    assert LogiQA1(str(tmp_path)).problems("dev") == [one, two]


def test_logiqa_one_rejects_blocks_of_other_lengths_and_letters(tmp_path: Path) -> None:
    text = LOGIQA_ONE + "\nb\nCut off.\nWhy?\nA.one\n" + LOGIQA_ONE.replace("\nd\n", "\ne\n")
    (tmp_path / "Eval.txt").write_text(text)
    problems, rejected = LogiQA1(str(tmp_path)).read_rows("dev")
    assert [problem.id for problem in problems] == ["logiqa1-dev-0", "logiqa1-dev-1", "logiqa1-dev-3"]
    assert [row.line for row in rejected] == [18, 31]
    assert rejected[0].reason == "4 lines between blank ones where 7 are expected"
    assert rejected[1].reason == "the answer line must be a, b, c or d, got 'e'"


def reclor_row(**more: Any) -> dict[str, Any]:
    row = {"context": "C.", "question": "Q?", "answers": ["w", "x", "y", "z"], "label": 3, "id_string": "val_0"}
    return {name: value for name, value in {**row, **more}.items() if value is not ...}


def test_reclor_with_and_without_labels(tmp_path: Path) -> None:
    (tmp_path / "val.json").write_text(json.dumps([reclor_row()]))
    (tmp_path / "test.json").write_text(json.dumps([reclor_row(label=..., id_string="test_0", question_type=16)]))
    (labelled,), (hidden,) = (ReClor(str(tmp_path)).problems(split) for split in ("dev", "test"))
    assert (labelled.id, labelled.gold, hidden.gold) == ("reclor-dev-val_0", "D", "")
    assert hidden.info == {"subject": "16"}
    assert ReClor(str(tmp_path), option_order="BCAD").problems("test")[0].gold == ""


def test_ar_lsat_reads_passages_and_reclors_layout(tmp_path: Path) -> None:
    question = {"id": "p_1", "question": "Q?", "options": ["v", "w", "x", "y", "z"], "answer": "E", "tags": ["", "t"]}
    four = {**question, "id": "p_2", "options": ["v", "w", "x", "y"], "answer": "D", "tags": []}
    passages = [{"id": "p", "passage": "Five people.", "questions": [question, four]}]
    (tmp_path / "AR_DevelopmentData.json").write_text(json.dumps(passages, indent=1))
    (tmp_path / "val_ar.json").write_text(json.dumps([reclor_row(answers=list("vwxyz"), label=4)]))
    one, two = ARLSAT(str(tmp_path)).problems("dev")
    assert (one.id, one.gold, one.context, len(one.options)) == ("ar_lsat-dev-p_1", "E", "Five people.", 5)
    assert (two.gold, len(two.options), one.info, two.info) == ("D", 4, {"subject": ["t"]}, {})
    assert ARLSAT(str(tmp_path), layout="reclor").problems("dev")[0].gold == "E"
    passages[0]["questions"] = [question, {**four, "answer": "E"}, "?"]
    (tmp_path / "AR_DevelopmentData.json").write_text(json.dumps([*passages, {"id": "q"}]))
    problems, rejected = ARLSAT(str(tmp_path)).read_rows("dev")
    assert len(problems) == 1
    assert [row.reason.split(",")[0] for row in rejected] == [
        "p_2: the gold answer must be one of the letters A",
        "question 3: a question must be an object",
        "a passage needs 'passage' and a list 'questions'",
    ]


def test_entailment_takes_premises_as_a_text_or_a_list(tmp_path: Path) -> None:
    row = {"label": "not entailed", "major_premise": ["All a are b.", "c is a."], "minor_premise": "d.",
           "conclusion": "c is d."}  # fmt: skip
    one, two = read(LogiQANLI, tmp_path / "n.txt", [row, {**row, "label": "entailed", "major_premise": "e."}], "dev")
    assert one.context == "All a are b.\nc is a.\nd."
    assert (one.options, one.gold, one.question) == (["entailed", "not entailed"], "B", "c is d.")
    assert (two.gold, two.info["premises"]) == ("A", ["e.", "d."])
    bare = [
        {**row, "major_premise": [], "minor_premise": " d."},
        {**row, "major_premise": ["", "e."], "minor_premise": ""},
    ]
    assert [p.context for p in read(LogiQANLI, tmp_path / "n.txt", bare, "dev")] == ["d.", "e."]
    with pytest.raises(BadInput, match="the row has no premise"):
        read(LogiQANLI, tmp_path / "n.txt", [{**row, "major_premise": [""], "minor_premise": ""}], "dev")
    with pytest.raises(BadInput, match=r"label must be 'entailed' or 'not entailed' .*, got 'neutral'"):
        read(LogiQANLI, tmp_path / "n.txt", [{**row, "label": "neutral"}], "dev")


def test_folio_spells_its_third_label_one_way(tmp_path: Path) -> None:
    row = {"story_id": 3, "example_id": 9, "premises": ["P.", "Q."], "premises-FOL": ["p"], "conclusion": "R.",
           "label": "Unknown", "source": "wiki"}  # fmt: skip
    bare = {"premises": "P.\nQ.\n", "conclusion": "R.", "label": "Uncertain", "conclusion-FOL": "r"}
    one, two = read(FOLIO, tmp_path / "f.jsonl", [{**row, "premises": ["P.", "Q.", ""]}, bare], "dev")
    assert (one.gold, two.gold) == ("Unknown", "Unknown")
    assert (one.context, two.context) == ("P.\nQ.", "P.\nQ.")
    assert (one.id, two.id, one.options) == ("folio-dev-9", "folio-dev-1", [])
    assert (one.info["formulas"], one.info["subject"]) == (["p"], "wiki")
    with pytest.raises(BadInput, match="label must be True, False, Unknown or Uncertain"):
        read(FOLIO, tmp_path / "f.jsonl", [{**row, "label": "true"}], "dev")


def logic_llm_row(number: int, words: Sequence[str], answer: str, question: str = "Who?") -> dict[str, Any]:
    """A row of Logic-LLM's layout."""
    options = [f"{letter}) {word}" for letter, word in zip("ABCDE", words, strict=False)]
    return {"id": f"set_dev_{number}", "context": "Ann is tall.", "question": question, "options": options,
            "answer": answer}  # fmt: skip


def test_folio_and_ar_lsat_are_read_in_logic_llms_layout(tmp_path: Path) -> None:
    asked = "Based on the above information, is the following statement true, false, or uncertain? Bo is tall."
    words = ("True", "False", "Uncertain")
    rows = [logic_llm_row(n, words, letter, asked) for n, letter in enumerate("ABC")]
    (tmp_path / "FOLIO").mkdir()
    (tmp_path / "FOLIO" / "dev.json").write_text(json.dumps(rows))
    problems = FOLIO(str(tmp_path)).problems("dev")
    assert [problem.gold for problem in problems] == ["True", "False", "Unknown"]
    assert (problems[0].id, problems[0].question, problems[0].context) == (
        "folio-dev-set_dev_0", "Bo is tall.", "Ann is tall.")  # fmt: skip
    assert problems[0].options == []
    rows = [logic_llm_row(n, ("Ann", "Bo", "Cy", "Di", "Ed"), "E") for n in range(2)]
    (tmp_path / "AR-LSAT").mkdir()
    (tmp_path / "AR-LSAT" / "mini_test.json").write_text(json.dumps(rows))
    (first, _) = ARLSAT(str(tmp_path)).problems("mini_test")
    assert (first.id, first.gold, first.options[4]) == ("ar_lsat-mini_test-set_dev_0", "E", "Ed")
    with pytest.raises(BadInput, match="choose task=folio, which reads this layout"):
        LogicLLM(str(tmp_path), subset="FOLIO")


FOLIO_TABLE = (
    "premises\tpremises-FOL\tconclusion\tconclusion-FOL\tlabel\n"
    "['Ann\u2019s tall. ', \"It's \\\"so\\\".\"]\t['T(a)', 'S']\tAnn is tall.\tT(a)\tTrue\r\n"
    "['[BG] If Ann is tall, Bo is.', 'Ann is tall.']\t['T(a)']\tBo is not tall.\t¬T(b)\tUncertain\n"
)


def test_folio_reads_its_tab_separated_release(tmp_path: Path) -> None:
    (tmp_path / "folio-validation.txt").write_text(FOLIO_TABLE)
    one, two = FOLIO(str(tmp_path)).problems("dev")
    assert one.info["premises"] == ["Ann\u2019s tall.", 'It\'s "so".']
    assert (one.gold, two.gold, two.question, one.id) == ("True", "Unknown", "Bo is not tall.", "folio-dev-0")
    assert one.info["formulas"] == ["T(a)", "S"]
    assert [p.id for p in FOLIO(str(tmp_path)).problems("validation")] == ["folio-dev-0", "folio-dev-1"]
    (tmp_path / "folio-validation.txt").write_text(FOLIO_TABLE + "['torn\tT\n")
    with pytest.raises(BadInput, match=r"folio-validation\.txt:4: 2 cells where the header has 5"):
        FOLIO(str(tmp_path)).problems("dev")


def test_entailment_reads_the_newer_layout_row_by_row(tmp_path: Path) -> None:
    new = {"id": 7, "premise": "Ann is tall.", "hypothesis": "Bo is tall.", "label": "not-entailment",
           "type": {"Necessry Condtional Reasoning": True}}  # fmt: skip
    old = {"label": "entailed", "major_premise": ["All are tall."], "minor_premise": "", "conclusion": "Bo is tall."}
    one, two, three = read(LogiQANLI, tmp_path / "n.txt", [new, {**new, "id": 8, "label": "entailment"}, old], "test")
    assert (one.id, one.gold, one.context, one.question) == (
        "logiqa2_nli-test-7", "B", "Ann is tall.", "Bo is tall.")  # fmt: skip
    assert one.info["subject"] == ["Necessary Conditional Reasoning"]
    assert [two.gold, three.gold] == ["A", "A"]
    with pytest.raises(BadInput, match=r"label must be 'entailed' .*, got 'maybe'"):
        read(LogiQANLI, tmp_path / "n.txt", [new, {**new, "label": "maybe"}], "test")


def test_a_split_may_have_any_name(tmp_path: Path) -> None:
    row = logiqa_row(["one", "two"])
    (problem,) = read(LogiQA2, tmp_path / "odd.jsonl", [row], "gsm_hard-2")
    assert problem.id == "logiqa2-gsm_hard-2-1"
    (tmp_path / "logiqa2").mkdir()
    read(LogiQA2, tmp_path / "logiqa2" / "shifted.txt", [row], "shifted")
    assert LogiQA2(str(tmp_path)).problems("shifted")[0].id == "logiqa2-shifted-1"
    with pytest.raises(
        BadInput, match=r"no published split 'tset': it has train, dev, test, ood .*none of .*tset\.txt"
    ):
        LogiQA2(str(tmp_path)).problems("tset")
    with pytest.raises(BadInput, match="a split is a name of letters"):
        LogiQA2(str(tmp_path)).problems("../train")


def test_a_file_of_another_set_names_the_task_that_takes_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    story = {"premises": ["P."], "conclusion": "Q.", "label": "True"}
    with pytest.raises(BadInput, match=r"no row of this file is logiqa2's: choose task=folio$"):
        read(LogiQA2, path, [story], "dev")
    with pytest.raises(BadInput, match=r"choose task=logiqa$"):
        read(FOLIO, path, [logiqa_row(["one", "two"])], "dev")
    with pytest.raises(BadInput, match="nor another task's: is it the published file"):
        read(FOLIO, path, [{"a": 1}], "dev")
    assert tasks_that_take(path) == []


def test_the_tasks_of_the_layouts_are_those_of_the_configs() -> None:
    for name, kind in TASKS.items():
        target = f"_target_: {kind.__module__}.{kind.__name__}\n"
        assert target in (ROOT / "conf" / "task" / f"{name}.yaml").read_text()


def test_logic_llm_strips_only_an_options_own_letter(tmp_path: Path) -> None:
    assert strip_own_letter("A) True", 0) == "True"
    assert [strip_own_letter(text, 0) for text in ("B) True", "A.) x", "a) y", "A)", "Ax) z")] == [
        "B) True", "A.) x", "a) y", "A)", "Ax) z"
    ]  # fmt: skip
    row = {"id": "logical_deduction_3", "context": "Seven.", "question": "Which?",
           "options": ["A) t", "B) u", "C) v", "D) w", "E) x", "F) y", "G) z"], "answer": "G"}  # fmt: skip
    (tmp_path / "LogicalDeduction_dev.json").write_text(json.dumps([row]))
    (problem,) = LogicLLM(str(tmp_path), subset="LogicalDeduction").problems("dev")
    assert (problem.options, problem.gold, problem.info["level"]) == (list("tuvwxyz"), "G", 7)
    assert problem.id == "logic_llm-dev-logical_deduction_3"
    row["id"] = "ProofWriter_AttNeg-OWA-D3-7_Q2"
    (tmp_path / "LogicalDeduction_dev.json").write_text(json.dumps([row]))
    assert LogicLLM(str(tmp_path), subset="LogicalDeduction").problems("dev")[0].info["level"] == 3


def test_nq_open_golds_are_lists(tmp_path: Path) -> None:
    rows = [{"question": "who", "answer": ["Ann", "Bo", "Ann"]}]
    (problem,) = read(NQOpen, tmp_path / "NQ-open.dev.jsonl", rows, "dev")
    assert problem.gold == ["Ann", "Bo"]
    with pytest.raises(BadInput, match="answer must be a list of strings, got 'Ann'"):
        read(NQOpen, tmp_path / "NQ-open.dev.jsonl", [{"question": "who", "answer": "Ann"}], "dev")


def test_triviaqa_reads_rows_under_data_with_aliases(tmp_path: Path) -> None:
    row = {"Question": "Which?", "QuestionId": "tc_1", "Answer": {"Value": "Ann", "Aliases": ["Anne", "Ann", ""]}}
    (tmp_path / "web-dev.json").write_text(json.dumps({"Data": [row], "Domain": "Web", "Version": 1.0}, indent=2))
    del row["Answer"]
    (tmp_path / "web-test-without-answers.json").write_text(json.dumps({"Data": [row]}))
    (problem,), (hidden,) = (TriviaQA(str(tmp_path)).problems(split) for split in ("dev", "test"))
    assert (problem.id, problem.gold, hidden.gold) == ("triviaqa-dev-tc_1", ["Ann", "Anne"], "")
    on_the_hub = {"question": "Which?", "question_id": "tc_1", "answer": {"value": "Ann", "aliases": ["Anne"]}}
    assert read(TriviaQA, tmp_path / "rows.jsonl", [on_the_hub], "dev") == [problem]


def test_truthfulqa_drops_empty_answers(tmp_path: Path) -> None:
    text = (
        "\ufeffType,Category,Question,Best Answer,Correct Answers,Incorrect Answers,Source\r\n"
        'Adversarial,Myths,"Why, then?",So it is,So it is; Because; ,No; Never;,http://x\r\n'
    )
    (tmp_path / "TruthfulQA.csv").write_bytes(text.encode())
    (problem,) = TruthfulQA(str(tmp_path)).problems("test")
    assert (problem.question, problem.gold) == ("Why, then?", ["So it is", "Because"])
    assert problem.info == {"subject": "Myths", "type": "Adversarial", "incorrect_answers": ["No", "Never"]}


def test_a_table_of_the_hub_has_lists_where_the_file_has_semicolons() -> None:
    fields = {"type": "Adversarial", "category": "Myths", "question": "Why?", "best_answer": "So it is",
              "correct_answers": ["So it is", "Because", ""], "incorrect_answers": ["No"], "source": "x"}  # fmt: skip
    (problem,), rejected = TruthfulQA().read_problems(table_rows([fields], "hub"), "test")
    assert (problem.gold, problem.info["incorrect_answers"], rejected) == (["So it is", "Because"], ["No"], [])
    row = {
        "Body": "Ann has 3 pens",
        "Question": "How many?",
        "Equation": "3",
        "Answer": "3.0",
        "Type": "Sum",
        "ID": "a",
    }
    assert SVAMP().read_problems(table_rows([row], "hub"), "test")[0][0].gold == "3"


def test_the_files_of_a_split_are_those_that_its_problems_are_read_from(tmp_path: Path) -> None:
    for name in ("math/MATH/train/algebra/1.json", "math/MATH/test/algebra/1.json", "math500.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"problem": name, "solution": "\\boxed{1}"}))
    held_out, train = str(tmp_path / "math500.jsonl"), str(tmp_path / "math/MATH/train")
    assert MATH(str(tmp_path)).files_of("train") == [train]
    assert MATH(str(tmp_path)).files_of("validation") == []
    plan = SplitPlan({"train": 1, "dev": 1, "test": 1}, pool=("train", "test"))
    divided = MATH(str(tmp_path), splits=plan, held_out=held_out)
    assert divided.files_of("dev") == [train, str(tmp_path / "math/MATH/test"), held_out]
    assert divided.files_of("test") == [held_out]
    assert MATH(hub="owner/math").files_of("train") == MATH().files_of("train") == []
