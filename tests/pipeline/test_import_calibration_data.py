"""Published rows of linguistic calibration: invented rows in the published columns, with what is wrong in real ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from espalier.data.examples.outcome_examples import JudgedResponse
from espalier.data.jsonl import write_records
from espalier.data.prompts import PromptTemplate
from espalier.data.reader_prompts import MAX_PARAGRAPH, NO_ANSWER
from espalier.data.records import BadInput, Demonstration, Problem
from espalier.data.sources import BadRow
from espalier.data.tasks.problem_file import ProblemFile
from espalier.data.tasks.quiz_questions import BioASQ, Jeopardy, SciQ
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


def requests_of(
    path: Path, task: Any, rows: list[dict[str, Any]], *splits: str
) -> tuple[list[Problem], dict[str, Any]]:
    (path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    context = StageContext(task, path / "out.jsonl", 10.0)
    made = ImportCalibrationData("requests", splits).run(str(path / "rows.jsonl"), context)
    return [row for row in made if isinstance(row, Problem)], context.counts


def test_requests_ask_for_a_text_and_keep_question_and_answers(tmp_path: Path) -> None:
    (tmp_path / "web-train.json").write_text(json.dumps(QUESTIONS))
    dev = {"Data": [{"Question": "Who ran?", "QuestionId": "tc_9", "Answer": {"Value": "Cy", "Aliases": ["Cyrus"]}},
                    {"Question": "Who hid?", "QuestionId": "tc_8"}]}  # fmt: skip
    (tmp_path / "web-dev.json").write_text(json.dumps(dev))
    rows: list[dict[str, Any]]
    rows = [{"question_id": name, "paragraph_generation_prompt": f"Write of {name}."}
            for name in ("tc_2", "tc_9", "tc_9", "tc_8", "other")]  # fmt: skip
    rows.append({"question_id": "tc_1", "paragraph_generation_prompt": None})
    made, counts = requests_of(tmp_path, TriviaQA(str(tmp_path)), rows, "train", "dev")
    assert [(row.id, row.question, row.gold, row.info["question"]) for row in made] == [
        ("triviaqa-train-tc_2", "Write of tc_2.", ["Ana"], "Who sang 2?"),
        ("triviaqa-dev-tc_9", "Write of tc_9.", ["Cy", "Cyrus"], "Who ran?"),
    ]
    assert counts == {"with_null": 1, "malformed": 1, "of_no_known_question": 2, "without_probability": 0}
    write_records(tmp_path / "train.jsonl", made)
    read = ProblemFile(str(tmp_path), kind="short_answer").problems("train")
    summary = {"question_id": "1", "paragraph_generation_prompt": "Write of tc_2.", "claude_summary": "Ana."}
    (shown,), _ = imported(tmp_path, "summary", [summary])
    assert ProblemFile(template=PromptTemplate("{question}\n")).prompt(read[0]) == shown.prompt


def test_requests_of_bioasq_go_by_its_ids(tmp_path: Path) -> None:
    question = {"id": "5f", "type": "factoid", "body": "Which gene?", "exact_answer": [["ABC1", "A1"]]}
    (tmp_path / "training12b_new.json").write_text(json.dumps({"questions": [{"type": "yesno"}, question]}))
    rows = [{"question_id": "5f", "paragraph_generation_prompt": "Write of genes."}]
    ((made,), _) = requests_of(tmp_path, BioASQ(str(tmp_path)), rows, "train")
    assert (made.id, made.gold, made.info["question"]) == ("bioasq-train-5f", ["ABC1", "A1"], "Which gene?")


def test_requests_of_sciq_and_jeopardy_go_by_places(tmp_path: Path) -> None:
    def asked(word: str) -> dict[str, str]:
        return {"question": f"What is {word}?", "correct_answer": word} | {f"distractor{k}": "x" for k in (1, 2, 3)}

    for name, words in (("train", "ab"), ("valid", "c"), ("test", "de")):
        (tmp_path / f"{name}.json").write_text(json.dumps([asked(word) for word in words] + [{"question": "torn"}]))
    rows = [{"question_id": place, "paragraph_generation_prompt": "Write."} for place in (1, 2, 3, 6, 99)]
    task = SciQ(str(tmp_path), limit=1, skip_bad_rows=True)
    made, counts = requests_of(tmp_path, task, rows, "train", "dev", "test")  # ab- c- de-: places 2, 4, 7 are torn
    assert [(row.id, row.gold) for row in made] == [
        ("sciq-train-1", ["b"]),
        ("sciq-dev-0", ["c"]),
        ("sciq-test-1", ["e"]),
    ]
    assert counts["of_no_known_question"] == 2
    made, counts = requests_of(tmp_path, task, rows, "test")
    assert [row.id for row in made] == ["sciq-test-1"], "places are those of the whole set, whatever is named"
    assert counts["of_no_known_question"] == 4
    assert [row.id for row in requests_of(tmp_path, task, rows, "test", "train")[0]] == ["sciq-train-1", "sciq-test-1"]
    clue = {"category": "X", "question": "'It flows'", "answer": "the Nile"}
    (tmp_path / "JEOPARDY_QUESTIONS1.json").write_text(json.dumps([clue]))
    rows = [{"question_id": 0, "question": "What flows?", "paragraph_generation_prompt": "Write of rivers."}]
    ((made_of_clue,), _) = requests_of(tmp_path, Jeopardy(str(tmp_path)), rows, "test")
    assert (made_of_clue.info["question"], made_of_clue.gold) == ("What flows?", ["the Nile"])


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
