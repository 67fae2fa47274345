"""Published rows of linguistic calibration: invented rows in the published columns, with what is wrong in real ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from espalier.data.examples.outcome_examples import JudgedResponse
from espalier.data.reader_prompts import MAX_PARAGRAPH, NO_ANSWER
from espalier.data.records import BadInput, Demonstration
from espalier.data.sources import BadRow
from espalier.data.tasks.short_answers import TriviaQA
from espalier.pipeline.problems.import_calibration_data import ImportCalibrationData, number_list, text_list
from espalier.pipeline.stage import StageContext

ROWS = [
    {"question_id": "tc_1", "lc_sft_generated_paragraph": "Ana, or else Ben.",
     "lc_sft_ground_truth_and_extracted_answers": "['Ana', 'Ana', \"Ben O'Hara; jr\", 'ana']",
     "lc_sft_forecasted_probs": "[0.7, 0.7, 0.2, nan]",
     "factuality_sft_generated_paragraph": "Ana sang.", "factuality_sft_binary_correctness": 1},
    {"question_id": "tc_2", "lc_sft_generated_paragraph": "x" * 3000,
     "lc_sft_ground_truth_and_extracted_answers": "['Ben']",
     "lc_sft_forecasted_probs": "[1.5]",
     "factuality_sft_generated_paragraph": None, "factuality_sft_binary_correctness": None},
    {"question_id": "tc_2", "lc_sft_generated_paragraph": None, "lc_sft_ground_truth_and_extracted_answers": None,
     "lc_sft_forecasted_probs": None,
     "factuality_sft_generated_paragraph": "Cy sang.", "factuality_sft_binary_correctness": "0"},
    {"question_id": "other", "lc_sft_generated_paragraph": "A",
     "lc_sft_ground_truth_and_extracted_answers": "['A', 'B']",
     "lc_sft_forecasted_probs": "[0.1, 0.2]",
     "factuality_sft_generated_paragraph": "A", "factuality_sft_binary_correctness": 0},
    {"question_id": "tc_1", "lc_sft_generated_paragraph": "A",
     "lc_sft_ground_truth_and_extracted_answers": "[open('x').read()]", "lc_sft_forecasted_probs": "[0.5]",
     "factuality_sft_generated_paragraph": "A", "factuality_sft_binary_correctness": "maybe"},
]  # fmt: skip
QUESTIONS = {"Data": [{"Question": f"Who sang {n}?", "QuestionId": f"tc_{n}", "Answer": {"Value": "Ana", "Aliases": []}}
                      for n in (1, 2)]}  # fmt: skip


def imported(path: Path, target: str, rows: list[dict[str, Any]]) -> tuple[list[Any], dict[str, Any]]:
    (path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (path / "web-train.json").write_text(json.dumps(QUESTIONS))
    context = StageContext(TriviaQA(str(path)), path / "out.jsonl", 10.0)
    return list(ImportCalibrationData(target).run(str(path / "rows.jsonl"), context)), context.counts


def test_extraction_lists_answers_behind_the_gold_once(tmp_path: Path) -> None:
    rows, counts = imported(tmp_path, "extraction", ROWS)
    assert [row.completion for row in rows] == ["Ana; Ben O'Hara, jr", NO_ANSWER]
    assert "Who sang 1?" in rows[0].prompt
    assert "Ana, or else Ben." in rows[0].prompt
    assert isinstance(rows[0], Demonstration)
    assert counts == {"with_null": 1, "malformed": 1, "of_no_known_question": 1, "without_probability": 0}


def test_forecasting_has_a_row_per_probability_and_keeps_a_questions_rows_together(tmp_path: Path) -> None:
    rows, counts = imported(tmp_path, "forecasting", ROWS)
    assert [(row.completion, row.label) for row in rows] == [("Ana", 0.7), ("Ana", 0.7), ("Ben O'Hara; jr", 0.2)]
    assert {row.problem_id for row in rows} == {"tc_1"}
    assert len({row.id for row in rows}) == len(rows)
    assert isinstance(rows[0], JudgedResponse)
    assert counts == {"with_null": 1, "malformed": 1, "of_no_known_question": 1, "without_probability": 2}
    long = {**ROWS[1], "lc_sft_forecasted_probs": "[0.5]"}
    (row,), _ = imported(tmp_path, "forecasting", [long])
    assert row.prompt.count("x") < MAX_PARAGRAPH + 20


def test_factuality_has_a_label_per_paragraph(tmp_path: Path) -> None:
    rows, counts = imported(tmp_path, "factuality", ROWS)
    assert [(row.prompt, row.completion, row.label) for row in rows] == [
        ("Who sang 1?\n\n", "Ana sang.", True), ("Who sang 2?\n\n", "Cy sang.", False)
    ]  # fmt: skip
    assert counts["malformed"] == counts["with_null"] == counts["of_no_known_question"] == 1


def test_the_three_targets_of_sft_read_their_own_columns(tmp_path: Path) -> None:
    row = {"question_id": "tc_1", "paragraph_generation_prompt": "Write about Ana.", "claude_summary": "I am 60% sure.",
           "claude_generated_paragraph": "Ana sang.", "icl_generated_paragraphs": "['First.', 'Second.']"}  # fmt: skip
    for target, completion in (("summary", "I am 60% sure."), ("distilled", "Ana sang."), ("first_sample", "First.")):
        (made,), _ = imported(tmp_path, target, [row, {**row, "claude_summary": None, "claude_generated_paragraph": "",
                                                       "icl_generated_paragraphs": "nan"}])  # fmt: skip
        assert (made.prompt, made.completion) == ("Write about Ana.\n", completion)


@pytest.mark.parametrize("texts", ["[]", "['']"])
def test_a_list_without_a_text_to_imitate_is_malformed(texts: str, tmp_path: Path) -> None:
    row = {"question_id": "tc_1", "paragraph_generation_prompt": "Write.", "icl_generated_paragraphs": texts}
    made, counts = imported(tmp_path, "first_sample", [row, {**row, "icl_generated_paragraphs": "['First.']"}])
    assert ([one.completion for one in made], counts["malformed"]) == (["First."], 1)


def test_lists_are_literals_and_never_evaluated() -> None:
    assert text_list("['a', \"b's\"]") == text_list(["a", "b's"]) == ["a", "b's"]
    assert number_list("[0.5, nan, 2, -1, 1]") == [0.5, None, None, None, 1.0]
    for bad in ("['a', 1]", "[x for x in ()]", "__import__('os').getcwd()", "", "['a'"):
        with pytest.raises(BadRow):
            text_list(bad)
    with pytest.raises(BadRow):
        number_list("['a']")


def test_a_file_without_the_columns_says_so(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="none of 1 rows"):
        imported(tmp_path, "summary", [{"question_id": "1"}])
    with pytest.raises(BadInput, match=r"stage\.target"):
        ImportCalibrationData("essay")
