"""Linguistic calibration by a chat model: what it is asked, how it is read, and the whole way against a server."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from espalier.data.forecasts import AnswerForecast
from espalier.data.jsonl import read_records, write_records
from espalier.data.reader_answers import AnswerProbability, ExtractedAnswers, WrittenText
from espalier.data.records import BadInput, Demonstration, Problem, Trajectory
from espalier.data.tasks.problem_file import ProblemFile
from espalier.models.load import check_model_folder
from espalier.pipeline.evaluation.join_forecasts import JoinForecasts
from espalier.pipeline.problems.make_reader_data import MakeReaderData
from espalier.pipeline.problems.use_written_texts import UseRequests, UseSummaries
from espalier.pipeline.stage import StageContext
from espalier.sampling.client import Sample
from espalier.sampling.job import run_job
from espalier.sampling.reader_requests import parse_answers, parse_probability, parse_same
from espalier.sampling.teacher_requests import SummaryRequests, parse_paragraph, parse_request
from tests.runtime.test_configs import compose_config
from tests.support.chat_server import ChatServer, chat_answer

ROOT = Path(__file__).resolve().parent.parent.parent
PROBLEMS = [Problem("p", "Who sang?", ["Ana", "Anna"]), Problem("q", "Who hit?", "Ben"), Problem("r", "Who ran?", "Cy")]


@pytest.mark.parametrize(
    ("response", "answers"),
    [
        ("It says so.\nAnswers: Ana; Ben ; ana", ["Ana", "Ben"]),
        ("**Answers: none**", []),
        ("Answers: Ana\nthat is all", None),
        ("Answers: Ana\nAnswers: Ben", None),
        ("", None),
    ],
)
def test_extracted_answers_are_the_last_line(response: str, answers: list[str] | None) -> None:
    assert parse_answers(response) == answers


@pytest.mark.parametrize(
    ("response", "probability"),
    [("Probability: 0.35", 0.35), ("x\nProbability: 1", 1.0), ("Probability: .5", 0.5), ("Probability: 1.5", None),
     ("Probability: 30%", None), ("Probability: 0.3 or so", None), ("Probability: 0.3\nProbability: 0.4", None)],
)  # fmt: skip
def test_a_probability_is_a_number_from_0_to_1(response: str, probability: float | None) -> None:
    assert parse_probability(response) == probability


def test_requests_paragraphs_and_verdicts_are_read_strictly() -> None:
    assert parse_request("Let me see.\nRequest: Write a paragraph about song.") == "Write a paragraph about song."
    assert parse_request("Request: one.\nRequest: two.") is None
    assert parse_request("no") is None
    assert parse_paragraph("3 of 8 say so.\nParagraph:\nI am 60% sure.\nReally.") == "I am 60% sure.\nReally."
    assert parse_paragraph("Paragraph:\n") is None
    assert parse_paragraph("I am sure.") is None
    assert [parse_same("Same: yes"), parse_same("Same: no"), parse_same("Same: maybe")] == [True, False, None]


def test_a_request_reveals_an_answer_that_stands_in_it_as_a_word(tmp_path: Path) -> None:
    golds = {"year": ["12", "twelve"], "men": "12", "grade": "A", "capital": "東京", "date": "1912", "mixed": "NHK"}
    requests = {
        "year": "Write a paragraph about 1912.",
        "men": "Write about the 12 men.",
        "grade": "Write a paragraph.",
        "capital": "東京都の歴史について書いてください。",  # scripts without blanks
        "date": "1912年について書いてください。",
        "mixed": "日本のNHKについて書いてください。",
    }
    write_records(tmp_path / "train.jsonl", [Problem(name, "How many?", gold) for name, gold in golds.items()])
    written = [WrittenText(f"{name}/0", name, "?", text, text, "stop") for name, text in requests.items()]
    write_records(tmp_path / "queries.jsonl", written)
    context = StageContext(ProblemFile(str(tmp_path / "train.jsonl"), kind="short_answer"), tmp_path / "x", 10.0)
    assert [row.id for row in UseRequests("train").run(str(tmp_path / "queries.jsonl"), context)] == ["year", "grade"]
    assert context.counts == {"with_the_answer": 4}


def sampled(problem: str, k: int, text: str, finish: str = "stop") -> Trajectory:
    gold = next(row.gold for row in PROBLEMS if row.id == problem)
    return Trajectory(f"{problem}/{k}", problem, f"Write of {problem}.\n", text, [text], [1], [2], [1], finish, gold,
                      None, False)  # fmt: skip


def test_a_summary_needs_whole_samples_and_shows_each(tmp_path: Path) -> None:
    rows = [sampled("p", 0, "It was {request} Ana."), sampled("p", 1, "Ben."), sampled("q", 0, "Cy"),
            sampled("q", 1, "cut", "length")]  # fmt: skip
    write_records(tmp_path / "t.jsonl", rows)
    (request,) = SummaryRequests(trajectories=str(tmp_path / "t.jsonl"), num_paragraphs=2).load(None, None)  # type: ignore[arg-type]
    assert request.id == "p"
    assert "<text_1>\nIt was {request} Ana.\n</text_1>\n<text_2>\nBen.\n</text_2>" in request.prompt
    assert "Write of p." in request.prompt
    assert "2 times" in request.prompt
    with pytest.raises(BadInput, match="num_paragraphs"):
        SummaryRequests(trajectories=str(tmp_path / "t.jsonl")).load(None, None)  # type: ignore[arg-type]


def test_samples_behind_worked_examples_are_summed_up_by_the_request_alone(tmp_path: Path) -> None:
    rows = [replace(sampled("p", k, "It was Ana."), prompt="Write of song.\nLa.\n\nWrite of p.\n") for k in (0, 1)]
    write_records(tmp_path / "t.jsonl", rows)
    write_records(tmp_path / "requests.jsonl", [Problem("p", "Write of p.", "Ana", {"question": "Who sang?"})])
    files = {"trajectories": str(tmp_path / "t.jsonl"), "problems": str(tmp_path / "requests.jsonl")}
    requests = SummaryRequests(**files, num_paragraphs=2)
    (request,) = requests.load(None, None)  # type: ignore[arg-type]
    assert "Write of p." in request.prompt
    assert "song" not in request.prompt
    sample = Sample("Paragraph:\nAna.", [1], "stop")
    assert [row.prompt for row in requests.records(None, None, request, [sample])] == ["Write of p.\n"]  # type: ignore[arg-type]
    assert requests.inputs() == list(files.values())
    write_records(tmp_path / "requests.jsonl", [Problem("p", "Write of p.", "Ana", context="Ana sang.")])
    with pytest.raises(BadInput, match=r"requests\.jsonl: problem 'p' has a context, which the plain prompt"):
        SummaryRequests(**files, num_paragraphs=2).load(None, None)  # type: ignore[arg-type]
    unasked = Problem("other", "Write.", "Ana", context="Ana sang.")
    write_records(tmp_path / "requests.jsonl", [Problem("p", "Write of p.", "Ana"), unasked])
    assert len(SummaryRequests(**files, num_paragraphs=2).load(None, None)) == 1  # type: ignore[arg-type]
    write_records(tmp_path / "requests.jsonl", PROBLEMS[1:])
    with pytest.raises(BadInput, match=r"requests\.jsonl: has no problem 'p'"):
        SummaryRequests(**files, num_paragraphs=2).load(None, None)  # type: ignore[arg-type]


def reader(number: int, body: dict[str, Any]) -> Any:
    """Answers as a reader of these texts would: what a paragraph states in brackets."""
    text = body["messages"][0]["content"]
    paragraph = re.search(r"<paragraph>\n(.*?)\n</paragraph>", text, re.DOTALL)
    stated = dict(re.findall(r"(\w+) \((0\.\d)\)", paragraph.group(1))) if paragraph else {}
    candidate = re.search(r"<candidate_answer>\n(.*?)\n</candidate_answer>", text)
    if candidate:
        return chat_answer(f"Hm.\nProbability: {stated.get(candidate.group(1), '0')}")
    if paragraph:
        return chat_answer(f"Answers: {'; '.join(stated) or 'none'}" if "broken" not in text else "I cannot.")
    if "<right_answer>" in text:
        return chat_answer("Same: yes" if "Anna" in text else "Same: no")
    if "Here" in text or "same request" in text:
        return chat_answer("Counted.\nParagraph:\nI am 60% sure that it was Ana.")
    return chat_answer("Request: Write about music." if "Who sang?" in text else "Request: Write about Ben, who hit.")


def ask(server: ChatServer, output: Path, name: str, *overrides: str) -> int:
    config = compose_config(
        ROOT / "conf", f"api/openai/{name}", f"output={output}", "client.model=m", f"client.base_url={server.base_url}",
        "engine.concurrency=3", *overrides,
    )  # fmt: skip
    return run_job(OmegaConf.to_object(config), lambda path: None, check_model_folder)  # type: ignore[arg-type]


def test_the_whole_way_from_questions_to_forecasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-a-test-0123")
    problems, sampled_path = tmp_path / "problems.jsonl", tmp_path / "t.jsonl"
    write_records(problems, PROBLEMS[:2])
    task = ["task=problem_file", f"task.path={problems}", "task.kind=short_answer"]
    files = [f"requests.trajectories={sampled_path}", f"requests.problems={problems}"]
    out = {name: tmp_path / f"{name}.jsonl" for name in ("queries", "summaries", "lists", "probabilities", "same")}
    rows = [sampled("p", 0, "Anna (0.6) or Eva (0.3)"), sampled("p", 1, "Nothing."), sampled("q", 0, "Dan (0.8)"),
            sampled("q", 1, "broken Ben (0.5)"), sampled("q", 2, "cut", "length")]  # fmt: skip
    write_records(sampled_path, rows)
    with ChatServer(reader) as server:
        assert ask(server, out["queries"], "write_queries", *task) == 0
        assert ask(server, out["summaries"], "summarise_samples", files[0], "requests.num_paragraphs=2") == 0
        assert ask(server, out["lists"], "extract_answers", *files) == 0
        files.append(f"requests.extractions={out['lists']}")
        assert ask(server, out["probabilities"], "forecast_probabilities", *files) == 0
        files.append(f"requests.probabilities={out['probabilities']}")
        assert ask(server, out["same"], "judge_equivalence", *files) == 0
        assert ask(server, out["same"], "judge_equivalence", *files) == 0
    written = {row.problem_id: row.text for row in read_records(WrittenText, out["queries"])}
    assert written == {"p": "Write about music.", "q": "Write about Ben, who hit."}
    context = StageContext(ProblemFile(str(problems), kind="short_answer"), tmp_path / "x", 10.0)
    (asked,) = UseRequests("train").run(str(out["queries"]), context)
    assert (asked.id, asked.question, asked.info["question"]) == ("p", "Write about music.", "Who sang?")
    assert context.counts == {"with_the_answer": 1}
    shown = list(UseSummaries().run(str(out["summaries"]), context))
    assert Demonstration("p", "Write of p.\n", "I am 60% sure that it was Ana.") in shown
    lists = {row.trajectory_id: row.answers for row in read_records(ExtractedAnswers, out["lists"])}
    assert lists == {"p/0": ["Anna", "Eva"], "p/1": [], "q/0": ["Dan"], "q/1": None}
    golds = {row.trajectory_id: row.probability for row in read_records(AnswerProbability, out["probabilities"])
             if row.is_gold}  # fmt: skip
    assert golds == {"p/0": 0.0, "p/1": 0.0, "q/0": 0.0}
    join = JoinForecasts(str(out["lists"]), str(out["probabilities"]), str(out["same"]))
    found = {row.id: row for row in join.run(str(sampled_path), context)}
    assert found["p/0"] == AnswerForecast("p/0", "p", ["Anna", "Eva"], [0.6, 0.3], 0.0, True)
    assert found["q/0"] == AnswerForecast("q/0", "q", ["Dan"], [0.8], 0.0, False)
    assert [found[name].answers for name in ("p/1", "q/2")] == [[], []]
    assert "q/1" not in found
    assert context.counts["not_read"] == 1
    made = MakeReaderData("forecasting", str(problems), "chat", str(out["lists"]), str(out["probabilities"]))
    assert len(list(made.run(str(sampled_path), context))) == 6
    assert "joined by id" not in caplog.text
    write_records(sampled_path, [replace(row, response="It was Cy (0.9)") for row in rows])
    for stage in (join, made):
        with pytest.raises(BadInput, match=r"lists\.jsonl: is what a chat model read in another file than .*t\.jsonl"):
            list(stage.run(str(sampled_path), context))
    out["lists"].with_suffix(".meta.json").unlink()
    out["probabilities"].with_suffix(".meta.json").unlink()
    with pytest.raises(BadInput, match=r"same\.jsonl: is what a chat model read in another file"):
        list(join.run(str(sampled_path), context))
