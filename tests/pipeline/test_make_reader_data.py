"""Training data of the models that read for linguistic calibration: rows by hand, and the prompts of the reward."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from espalier.data.examples.outcome_examples import JudgedResponse
from espalier.data.jsonl import file_sha256, write_json, write_records
from espalier.data.reader_answers import AnswerProbability, ExtractedAnswers
from espalier.data.reader_prompts import NO_ANSWER
from espalier.data.records import BadInput, Demonstration, Problem, Trajectory
from espalier.data.tasks.qa_world import QAWorld
from espalier.pipeline.problems.make_reader_data import MakeReaderData
from espalier.pipeline.stage import StageContext
from espalier.rewards.calibration import StatedForecasts
from espalier.rewards.model_forecasts import ModelForecasts

PROBLEMS = [
    Problem("p", "Write about song.", ["Ana", "Anna"], {"question": "Who sang?"}),
    Problem("q", "Who hit?", "Ben"),
]
EXTRACTION = """\
Below are a question and a paragraph. List every answer to the question that the paragraph offers, also wrong and \
unlikely ones, separated by semicolons. If it offers none, write "No answer is offered."

### Paragraph
Anna (60%), or Eva.

### Question
Who sang?

### Answers
"""


def sampled(problem: str, k: int, text: str, finish: str = "stop") -> Trajectory:
    gold = {row.id: row.gold for row in PROBLEMS}[problem]
    return Trajectory(f"{problem}/{k}", problem, "?", text, [text], [1], [2], [1], finish, gold, None, False)


ROWS = [
    sampled("p", 0, " Anna (60%), or Eva.\n"),
    sampled("p", 1, "Nothing."),
    sampled("q", 0, "It was Dan."),
    sampled("q", 1, "It was Ben."),
    sampled("q", 2, "It was", "length"),
]
LISTS = [("p/0", ["Anna", "Eva"]), ("p/1", []), ("q/0", ["Dan"]), ("q/1", None), ("q/2", ["Dan"])]
PROBABILITIES = [
    ("p/0", "Anna", False, 0.6), ("p/0", "Eva", False, None), ("p/0", "Ana", True, 0.7),
    ("p/1", "Ana", True, 0.0), ("q/0", "Dan", False, 0.9), ("q/0", "Ben", True, None),
]  # fmt: skip


def write_files(folder: Path) -> dict[str, str]:
    """Write what a chat model said of the rows; the settings that name it."""
    write_records(folder / "paragraphs.jsonl", ROWS)
    write_records(folder / "problems.jsonl", PROBLEMS)
    write_records(folder / "lists.jsonl", [
        ExtractedAnswers(f"{name}/0", name, name[0], answers, "", "stop") for name, answers in LISTS
    ])  # fmt: skip
    write_records(folder / "probabilities.jsonl", [
        AnswerProbability(f"{name}~{place}/0", name, name[0], answer, is_gold, probability, "", "stop")
        for place, (name, answer, is_gold, probability) in enumerate(PROBABILITIES)
    ])  # fmt: skip
    return {name: str(folder / f"{name}.jsonl") for name in ("lists", "probabilities", "problems", "paragraphs")}


def made(stage: MakeReaderData, path: str, folder: Path) -> tuple[list[Any], dict[str, Any]]:
    context = StageContext(None, folder / "out.jsonl", 10.0)
    return list(stage.run(path, context)), context.counts


def test_lists_of_a_chat_model_become_demonstrations(tmp_path: Path) -> None:
    files = write_files(tmp_path)
    stage = MakeReaderData("extraction", files["problems"], extractions=files["lists"])
    assert stage.inputs() == [files["problems"], files["lists"]]
    rows, counts = made(stage, files["paragraphs"], tmp_path)
    assert rows[0] == Demonstration("p/0", EXTRACTION, "Anna; Eva")
    assert [(row.id, row.completion) for row in rows[1:]] == [("p/1", NO_ANSWER), ("q/0", "Dan")]
    assert counts == {"cut": 1, "not_read": 1, "without_probability": 0}


def test_probabilities_of_a_chat_model_become_labels_of_each_answer_and_of_the_gold(tmp_path: Path) -> None:
    files = write_files(tmp_path)
    stage = MakeReaderData("forecasting", files["problems"], "chat", files["lists"], files["probabilities"])
    assert stage.inputs() == [files["problems"], files["lists"], files["probabilities"]]
    rows, counts = made(stage, files["paragraphs"], tmp_path)
    assert [(row.id, row.problem_id, row.completion, row.label) for row in rows] == [
        ("p/0~0", "p", "Anna", 0.6), ("p/0~gold", "p", "Ana", 0.7), ("p/1~gold", "p", "Ana", 0.0),
        ("q/0~0", "q", "Dan", 0.9),
    ]  # fmt: skip
    assert all(isinstance(row, JudgedResponse) for row in rows)
    assert counts == {"cut": 1, "not_read": 1, "without_probability": 2}
    assert rows[0].prompt.index("Who sang?") < rows[0].prompt.index("Anna (60%), or Eva.")


def test_what_a_paragraph_states_is_read_without_a_chat_model(tmp_path: Path) -> None:
    write_records(tmp_path / "train.jsonl", PROBLEMS)
    rows = [sampled("p", 0, "It is Eva (60%), or else Anna (30%)."), sampled("q", 0, "It is Dan (100%)."),
            sampled("q", 1, "Who knows?"), sampled("q", 2, "It is Ben (10%), or", "length"),
            sampled("q", 3, "Answer: Ben; Dan\nConfidence: 20%")]  # fmt: skip
    write_records(tmp_path / "paragraphs.jsonl", rows)
    both = []
    for target in ("extraction", "forecasting"):
        stage = MakeReaderData(target, str(tmp_path), source="stated")
        assert stage.inputs() == [str(tmp_path / "train.jsonl")]
        found, counts = made(stage, str(tmp_path / "paragraphs.jsonl"), tmp_path)
        assert counts == {"cut": 1, "not_read": 1, "without_probability": 0}
        both.append(found)
    assert [row.completion for row in both[0]] == ["Eva; Anna", "Dan", "Ben, Dan"]
    assert [(row.completion, row.label) for row in both[1]] == [
        ("Eva", 0.6), ("Anna", 0.3), ("Ana", 0.3), ("Dan", 1.0), ("Ben", 0.0), ("Ben, Dan", 0.2), ("Ben", 0.0),
    ]  # fmt: skip


def paragraphs_of(task: QAWorld) -> list[Trajectory]:
    """The teacher's paragraphs as sampled ones."""
    golds = {row.id: row.gold for row in task.problems("train")}
    return [
        Trajectory(row.id, name := row.id.split("/")[0], row.prompt, row.completion, [row.completion], [1], [2], [1],
                   "stop", golds[name], None, False)
        for row in task.demonstrations("train")
    ]  # fmt: skip


def test_readers_that_know_their_data_by_heart_give_the_reward_what_the_text_states(tmp_path: Path) -> None:
    """The reward asks in the words of the training data, and in no others: what it is answered is the rule's forecast,
    of every paragraph of the teacher."""
    task = QAWorld(num_train=60, num_dev=1, num_test=1, num_demonstrations=120, form="paragraph")
    write_records(tmp_path / "train.jsonl", task.problems("train"))
    rows = paragraphs_of(task)
    write_records(tmp_path / "paragraphs.jsonl", rows)
    lists, forecasts = (
        made(MakeReaderData(target, str(tmp_path), source="stated"), str(tmp_path / "paragraphs.jsonl"), tmp_path)[0]
        for target in ("extraction", "forecasting")
    )
    written = {row.prompt: row.completion for row in lists}
    known = {(row.prompt, row.completion): float(row.label) for row in forecasts}
    asked = set[Any]()

    def write(prompts: Sequence[str]) -> list[str | None]:
        asked.update(prompts)
        return [written[prompt] for prompt in prompts]

    def score(pairs: Sequence[tuple[str, str]]) -> list[float]:
        asked.update(pairs)
        return [known[pair] for pair in pairs]

    reader = ModelForecasts(write, cast(Any, score), str(tmp_path))
    assert reader(rows) == StatedForecasts()(rows)
    assert asked == {*written, *known}
    assert len({row.gold for row in rows}) > 10


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"target": "list"}, "stage.target must be extraction or forecasting, got 'list'"),
        ({"source": "me"}, "stage.source must be chat or stated, got 'me'"),
        ({}, "stage.source=chat stage.target=extraction reads stage.extractions: name just that"),
        ({"extractions": "L", "probabilities": "P"}, "reads stage.extractions: name just that"),
        ({"target": "forecasting", "extractions": "L"}, "reads stage.extractions and stage.probabilities: name just"),
        ({"source": "stated", "extractions": "L"}, "reads neither extractions nor probabilities: name just that"),
    ],
)
def test_a_source_reads_its_own_files_and_no_others(settings: dict[str, str], said: str) -> None:
    with pytest.raises(BadInput) as error:
        MakeReaderData(**{"target": "extraction", "problems": "P", **settings})
    assert said in str(error.value)


def asked_about(path: str, paragraphs: str) -> None:
    """The provenance of what a chat model said of these paragraphs."""
    config, inputs = {"requests": {"trajectories": paragraphs}}, {"": "", paragraphs: file_sha256(paragraphs)}
    write_json(Path(path).with_suffix(".meta.json"), {"config": config, "inputs": inputs})


@pytest.mark.parametrize("other", ["lists", "probabilities"])
def test_what_was_read_in_another_sampling_with_the_same_ids_is_refused(other: str, tmp_path: Path) -> None:
    files = write_files(tmp_path)
    write_records(tmp_path / "again.jsonl", [replace(row, response="Eva.", steps=["Eva."]) for row in ROWS])
    for name in ("lists", "probabilities"):
        asked_about(files[name], str(tmp_path / "again.jsonl") if name == other else files["paragraphs"])
    stage = MakeReaderData("forecasting", files["problems"], "chat", files["lists"], files["probabilities"])
    said = rf"{other}\.jsonl: is what a chat model read in another file than .*paragraphs\.jsonl.*: name as input the"
    with pytest.raises(BadInput, match=said):
        made(stage, files["paragraphs"], tmp_path)


def test_only_readings_that_do_not_say_what_was_read_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = write_files(tmp_path)
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(Path(files["paragraphs"]).read_bytes())
    stage = MakeReaderData("forecasting", files["problems"], "chat", files["lists"], files["probabilities"])

    def warned() -> list[str]:
        caplog.clear()
        made(stage, files["paragraphs"], tmp_path)
        found = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        return [line for line in found if "joined by id" in line]

    (line,) = warned()
    assert line.startswith(f"{files['paragraphs']}: no provenance says that")
    assert f"{files['lists']}, {files['probabilities']} was read" in line
    asked_about(files["probabilities"], str(copy))  # the same paragraphs by another name
    strange: list[Any] = [{"inputs": 3}, {"inputs": {"a": "b"}}]
    for meta in [*strange, {"config": {"requests": {"trajectories": []}}, "inputs": {}}]:
        write_json(tmp_path / "lists.meta.json", meta)
        (line,) = warned()
        assert files["probabilities"] not in line
    asked_about(files["lists"], files["paragraphs"])
    assert warned() == []


def test_a_folder_in_which_an_id_has_two_questions_is_refused(tmp_path: Path) -> None:
    write_records(tmp_path / "train.jsonl", PROBLEMS)
    write_records(tmp_path / "dev.jsonl", [PROBLEMS[0], Problem("q", "Who ran?", "Cy")])
    write_records(tmp_path / "paragraphs.jsonl", [sampled("q", 0, "It is Dan (100%).")])
    stage = MakeReaderData("extraction", str(tmp_path), source="stated")
    with pytest.raises(BadInput, match=r"dev\.jsonl: problem 'q' asks another question there: ids have to differ"):
        made(stage, str(tmp_path / "paragraphs.jsonl"), tmp_path)
    write_records(tmp_path / "dev.jsonl", PROBLEMS[:1])  # the same question twice is no matter
    assert len(made(stage, str(tmp_path / "paragraphs.jsonl"), tmp_path)[0]) == 1


def test_paragraphs_that_nothing_is_known_of_are_refused(tmp_path: Path) -> None:
    files = write_files(tmp_path)
    write_records(tmp_path / "one.jsonl", PROBLEMS[:1])
    with pytest.raises(BadInput, match=r"one\.jsonl: has no problem 'q'"):
        made(MakeReaderData("extraction", str(tmp_path / "one.jsonl"), extractions=files["lists"]),
             files["paragraphs"], tmp_path)  # fmt: skip
    stated = MakeReaderData("extraction", files["problems"], source="stated")
    write_records(tmp_path / "free.jsonl", ROWS[1:])
    with pytest.raises(BadInput, match=r"none of 4 paragraphs gives 'extraction' examples .*stage\.source=chat takes"):
        made(stated, str(tmp_path / "free.jsonl"), tmp_path)
    write_records(tmp_path / "others.jsonl", [ExtractedAnswers("z/0", "z", "z", ["Ana"], "", "stop")])
    with pytest.raises(BadInput, match=r"others\.jsonl of these paragraphs\?"):
        made(MakeReaderData("extraction", files["problems"], extractions=str(tmp_path / "others.jsonl")),
             files["paragraphs"], tmp_path)  # fmt: skip
    nameless = Trajectory("p/0", "p", "?", "Eva (60%).", ["?"], [1], [2], [1], "stop", "", None, False)
    write_records(tmp_path / "nameless.jsonl", [nameless])
    with pytest.raises(BadInput, match=r"'p/0' has no gold answer"):
        made(MakeReaderData("forecasting", files["problems"], source="stated"), str(tmp_path / "nameless.jsonl"),
             tmp_path)  # fmt: skip
