"""Readers that are models: asked with the texts of their training, in order, and no failure becomes a number."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from espalier.data.asked_texts import AskedText, WrittenText
from espalier.data.examples.outcome_examples import JudgedResponse, JudgedResponseExamples
from espalier.data.jsonl import write_records
from espalier.data.reader_prompts import NO_ANSWER, extraction_prompt, forecast_prompt, read_answers, write_answers
from espalier.data.reader_questions import Questions
from espalier.data.records import BadInput, Problem, Trajectory
from espalier.data.tasks.problem_file import ProblemFile
from espalier.models.load import load_tokenizer
from espalier.models.scalar_head import load_process_reward
from espalier.models.text_writer import TextWriter, _Draws
from espalier.models.tiny import build_tiny
from espalier.rewards.asked_writer import AskedWriter
from espalier.rewards.calibration import LinguisticCalibrationReward
from espalier.rewards.model_forecasts import FactualityReward, ModelForecasts, TextScorer
from espalier.rewards.score import HoldsEngines, HoldsModels
from espalier.sampling.asking import Asking
from espalier.sampling.client import SamplingParams
from espalier.sampling.data_parallel_engines import DataParallelEngines


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny policy, a scalar head on it with random weights, and two problems."""
    path = tmp_path_factory.mktemp("readers")
    texts = [forecast_prompt("Who sang?", "It was Ana, or else Ben."), extraction_prompt("Who?", "Ana; Ben")] * 4
    build_tiny(
        path / "policy", texts, hidden_size=32, num_layers=1, num_heads=2, vocab_size=320, max_length=1024, seed=0
    )
    model = load_process_reward(str(path / "policy"), num_labels=1)
    torch.manual_seed(0)
    torch.nn.init.normal_(model.score.weight, std=1.0)
    model.save_pretrained(path / "scorer")
    load_tokenizer(str(path / "policy")).save_pretrained(path / "scorer")
    rows = [
        Problem("p", "Write about singers.", ["Ana", "Anna"], {"question": "Who sang?"}),
        Problem("q", "Who hit?", "Ben"),
    ]
    write_records(path / "problems.jsonl", rows)
    return path


def sampled(problem: str, text: str, gold: str | list[str], finish: str = "stop") -> Trajectory:
    return Trajectory(f"{problem}/0", problem, "?", text, [text], [1], [2], [1], finish, gold, None, False)


def test_lists_of_answers_are_written_and_read_alike() -> None:
    assert write_answers(["Ana", "ben; the first", "ana"]) == "Ana; ben, the first"
    assert read_answers(" Ana; ben ;; the Ana") == ["Ana", "ben"]
    assert write_answers(["1.5", "15", "-15", "A", "a"]) == "1.5; 15; -15; A"
    assert read_answers("A; B; C; 3/4; 34; the A") == ["A", "B", "C", "3/4", "34", "the A"]
    assert write_answers([]) == NO_ANSWER
    assert read_answers(f" {NO_ANSWER}\n") == read_answers("") == []
    assert read_answers("__import__('os'); 1 + 1") == ["__import__('os')", "1 + 1"]


def test_a_text_is_scored_with_the_tokens_of_its_training(folder: Path) -> None:
    prompt = forecast_prompt("Who sang?", "It was Ana.")
    write_records(folder / "judged.jsonl", [JudgedResponse("a", "p", prompt, "Ana", 0.25)])
    (example,) = JudgedResponseExamples(str(folder / "judged.jsonl"), 512).load(load_tokenizer(str(folder / "scorer")))
    model = load_process_reward(str(folder / "scorer")).eval()
    with torch.inference_mode():
        logit = model(input_ids=torch.tensor([example.ids])).logits[0, -1, 0]
    scorer = TextScorer(str(folder / "scorer"), 4096, "sdpa")
    assert scorer([(prompt, "Ben"), (prompt, "Ana")])[1] == pytest.approx(float(torch.sigmoid(logit)), abs=0.02)
    assert scorer([]) == []


def test_a_batch_of_unequal_prompts_is_continued_as_each_alone(folder: Path) -> None:
    writer = TextWriter(str(folder / "policy"), 8, 2)
    writer.end_ids = sorted({*writer.end_ids, *writer.tokenizer("e")["input_ids"]})  # so that some continuation ends
    prompts = ["Who sang?", "Who sang? It was Ana, or else Ben.", "Ben"]
    assert writer(prompts) == [writer([prompt])[0] for prompt in prompts]
    assert writer([]) == []


def test_a_temperature_draws_the_same_for_the_same_prompts_and_leaves_torchs_random_numbers(folder: Path) -> None:
    def written(temperature: float) -> list[str | None]:
        writer = TextWriter(str(folder / "policy"), 12, 4, temperature)
        writer.end_ids = sorted({*writer.end_ids, *range(0, 320, 8)})  # so that continuations end
        return writer([f"Who sang {number}?" for number in range(8)])

    before = torch.get_rng_state()
    hot = written(3.0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(1)  # what torch draws next is another number, and the texts are the same
    assert hot == written(3.0)
    greedy = written(0.0)
    assert written(1e-4) == greedy
    assert hot != greedy
    assert len(set(hot)) > 3
    writer = TextWriter(str(folder / "policy"), 12, 2, 3.0)
    writer.end_ids = sorted({*writer.end_ids, *range(0, 320, 8)})
    prompts = ["Who sang?", "Who sang? It was Ana, or else Ben.", "Ben"]
    assert writer(prompts) == [writer([prompt])[0] for prompt in prompts], "whatever stands beside a prompt"
    with pytest.raises(BadInput, match=r"temperature must be 0 \(greedy\) or more, got -1"):
        TextWriter(str(folder / "policy"), 12, 2, -1.0)


def test_draws_have_the_probabilities_of_the_softmax() -> None:
    """Of 4,000 rows with their own random numbers, at temperature 2: within four standard errors."""
    logits = torch.tensor([1.0, -1.0, 0.5, 3.0])
    rows = [[number, 7] for number in range(4000)]
    drawn = _Draws(rows, 2.0)(torch.zeros(4000, 1), logits.expand(4000, 4)).argmax(-1)
    wanted = torch.softmax(logits / 2, -1)
    shares = torch.bincount(drawn, minlength=4) / 4000
    assert bool(((shares - wanted).abs() < 4 * (wanted * (1 - wanted) / 4000).sqrt()).all())


class Answering:
    """Writes what it is given to, in turn; keeps what it was asked."""

    def __init__(self, answers: list[list[WrittenText] | None], num_texts: int = 1, most_asked: int | None = None):
        self.answers, self.asked, self.opened, self.is_closed = answers, list[AskedText](), [], False
        self.num_texts, self.most_asked = num_texts, most_asked

    def open(self, model: str, text: str, ids: list[int]) -> None:
        self.opened.append((model, text, ids))

    def texts(self, asked: Sequence[AskedText]) -> list[list[WrittenText] | None]:
        self.asked += asked
        return [self.answers.pop(0) for _ in asked]

    def next_logprobs(self, rows: Sequence[list[int]]) -> list[dict[int, float] | None]:
        raise AssertionError("not asked for")

    def close(self) -> None:
        self.is_closed = True


def test_an_engine_that_extracts_is_asked_in_its_own_tokens_and_a_list_without_an_end_is_none(folder: Path) -> None:
    asking = Answering([[WrittenText("Ana; Ben", True)], [WrittenText("Ana", False)], [WrittenText("", True)]])
    writer = AskedWriter(str(folder / "policy"), asking)
    assert writer([]) == []
    assert asking.opened == []
    prompts = ["Who sang?", "Who sang?", "Ben"]
    assert writer(prompts) == ["Ana; Ben", None, ""]
    tokenizer = load_tokenizer(str(folder / "policy"))
    assert [one.ids for one in asking.asked] == [tokenizer(prompt)["input_ids"] for prompt in prompts]
    assert len({one.id for one in asking.asked}) == 3  # of two that are alike too
    plain = tokenizer("Who sang?", add_special_tokens=False)["input_ids"]
    assert asking.opened == [(str(folder / "policy"), "Who sang?", plain)]
    asking.answers = [None]
    with pytest.raises(BadInput, match=r"a prompt of \d+ tokens is refused where it is asked"):
        writer(["Ben"])
    reader = ModelForecasts(writer, TextScorer(str(folder / "scorer")), str(folder / "problems.jsonl"))
    reward = LinguisticCalibrationReward(reader)
    reward.to(torch.device("cpu"))
    assert isinstance(reward, HoldsEngines)
    reward.close()
    assert asking.is_closed
    writer.asking = Answering([], most_asked=4)
    with pytest.raises(BadInput, match=r"tokens is longer than the 4 its window leaves.*raise the extractor's"):
        writer(["Who sang it, and when?"])
    with pytest.raises(BadInput, match=r"asking\.params\.n=4: one list of answers is read"):
        AskedWriter(str(folder / "policy"), Answering([], num_texts=4))


def test_what_asks_says_how_many_tokens_its_engines_have_room_for(folder: Path) -> None:
    client = DataParallelEngines(model=str(folder / "policy"), max_model_len=304, num_engines=1)
    asking = Asking(client, SamplingParams(2, 1.0, 300), "engine.log")
    assert (asking.num_texts, asking.most_asked) == (2, 4)


def test_questions_are_those_of_a_file_or_of_all_splits_of_a_folder(tmp_path: Path) -> None:
    write_records(tmp_path / "train.jsonl", [Problem("p", "Write about singers.", "Ana", {"question": "Who sang?"})])
    write_records(tmp_path / "dev.jsonl", [Problem("q", "Who hit?", "Ben")])
    (tmp_path / "other.jsonl").write_text("no problem\n")
    assert Questions(str(tmp_path / "dev.jsonl")).by_id == {"q": "Who hit?"}
    assert Questions(str(tmp_path)).by_id == {"p": "Who sang?", "q": "Who hit?"}
    known = Questions(str(tmp_path))
    both = [Problem("p", "Write about singers.", "Ana", {"question": "Who sang?"}), Problem("q", "Who hit?", "Ben")]
    known.check_problems(both)
    blanks = [Problem("b", " Who ran?\n", "Cy"), Problem("c", "Write.", "D", {"question": "Q? "})]
    path = str(tmp_path / "blanks.jsonl")
    write_records(Path(path), blanks)
    Questions(path).check_problems(ProblemFile(path, kind="short_answer").problems("train"))
    with pytest.raises(BadInput, match="has no problem 'r'"):
        known.check_problems([*both, Problem("r", "", "")])
    with pytest.raises(BadInput, match="problem 'q' asks another question there"):
        known.check_problems([Problem("q", "Who ran?", "Ben")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match=r"has none of train\.jsonl, dev\.jsonl, test\.jsonl"):
        Questions(str(tmp_path / "empty"))


def test_forecasts_are_of_the_offered_answers_and_of_the_golds_first_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = TextWriter(str(folder / "policy"), 4, 16)
    reader = ModelForecasts(writer, TextScorer(str(folder / "scorer")), str(folder / "problems.jsonl"))
    LinguisticCalibrationReward(reader).to(torch.device("cpu"))
    monkeypatch.setattr(
        reader, "writer", lambda prompts: ["Ana; Ben" if "Who sang?" in row else None for row in prompts]
    )
    rows = [
        sampled("q", "x", "Ben", "length"),
        sampled("p", "It was Ana.", ["Ana", "Anna"]),
        sampled("q", "No idea.", "Ben"),
    ]
    cut, first, second = reader(rows)
    ask = reader.scorer
    one = forecast_prompt("Who sang?", "It was Ana.")
    assert (cut.answers, cut.gold) == ((), 0.0)
    assert first.answers == ("Ana", "Ben")
    assert [*first.probabilities, first.gold] == pytest.approx(
        ask([(one, "Ana"), (one, "Ben"), (one, "Ana")]), abs=0.02
    )
    assert second.answers == ()
    assert second.gold == pytest.approx(ask([(forecast_prompt("Who hit?", "No idea."), "Ben")])[0], abs=0.02)
    reward = LinguisticCalibrationReward(reader)
    assert isinstance(reward, HoldsModels)
    assert reward.networks() == {}
    with pytest.raises(BadInput, match="no problem 'z'"):
        reader([sampled("z", "x", "Ben")])


def test_factuality_is_a_verdict_and_a_cut_response_is_not_right(folder: Path) -> None:
    reward = FactualityReward(str(folder / "scorer"), str(folder / "problems.jsonl"))
    whole, cut = reward([sampled("p", "It was Ana.", "Ana"), sampled("p", "It was Ana.", "Ana", "length")])
    assert whole.total == float(whole.parts["factuality"] > 0.5)
    assert cut.total == 0.0
