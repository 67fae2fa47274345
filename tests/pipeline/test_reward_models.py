"""From samples to a judged reward model: noisy comparisons, scores of responses by every scorer, refused benchmarks."""

import json
import math
import shutil
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForTokenClassification

from espalier.data.jsonl import read_records, write_records
from espalier.data.judgements import PairJudgement, ResponseRating
from espalier.data.predictions import PairRewards, RewardPrediction
from espalier.data.ranked_responses import RankedResponses, ResponseScores
from espalier.data.records import BadInput, PreferencePair, Trajectory
from espalier.data.seen_responses import response_hash, write_training_responses
from espalier.data.sources import Row
from espalier.data.tasks.shopping_notes import ShoppingNotes
from espalier.data.training_layout import TrainingLayout, write_training_layout
from espalier.models.load import BadModel, load_config, load_policy, load_tokenizer
from espalier.models.log_ratio_reward import Scale, write_log_ratio_reward
from espalier.models.logprobs import response_logprobs
from espalier.models.sampled_logprobs import sampled_logprobs
from espalier.models.scalar_head import load_process_reward
from espalier.pipeline.evaluation.evaluate_reward_model import EvaluateRewardModel
from espalier.pipeline.evaluation.import_comparisons import ImportComparisons
from espalier.pipeline.evaluation.judged_responses import judged_scores
from espalier.pipeline.evaluation.measure_reward_model import (
    MeasureRewardModel,
    ScoredPair,
    pair_figures,
    response_figures,
)
from espalier.pipeline.evaluation.score_responses import ScoreResponses, encode_row
from espalier.pipeline.pairs.draw_comparisons import DrawComparisons, preference
from espalier.pipeline.stage import StageContext
from espalier.rewards.engine_scores import ScoresDiffer
from espalier.rewards.outcome_model import last_logits
from espalier.rewards.true_reward import TrueReward
from espalier.sampling.client import Sample
from espalier.sampling.judge_ratings import RatingRequests
from espalier.sampling.llm_judge import RankedResponseRequests
from tests.support.token_scorer import Engines

NUMBERS = count()
NOTES = ShoppingNotes()
RESPONSES = ("bring 3 apples\n", "bring 2 apples\n", "please bring 3 apples\n", "bring 3 pens\n")


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs have relative names."""
    monkeypatch.chdir(tmp_path)


def context(task: Any = None) -> StageContext:
    """Return a context with an output of its own, beside which nothing is kept yet."""
    return StageContext(task, Path(f"output-{next(NUMBERS)}"), 10.0)


def sampled(problem: str, number: int, response: str) -> Trajectory:
    ids = [ord(character) for character in response]
    return Trajectory(f"{problem}/{number}", problem, "Ask Tom for 3 apples.\n", response, [response], [1, 2], ids,
                      [len(ids)], "stop", "3 apples", None, False)  # fmt: skip


def draw(tmp_path: Path, num_problems: int, **settings: Any) -> list[PreferencePair]:
    rows = [sampled(f"p{n}", k, text) for n in range(num_problems) for k, text in enumerate(RESPONSES)]
    path = tmp_path / "trajectories.jsonl"
    write_records(path, rows)
    return DrawComparisons(**settings).run(str(path), context(NOTES))


def test_comparisons_without_noise_are_in_the_true_order(tmp_path: Path) -> None:
    pairs = draw(tmp_path, 1, beta=None, pairs_per_problem=0)
    assert [
        (pair.chosen_score, pair.rejected_score) for pair in pairs if pair.chosen_score <= pair.rejected_score
    ] == []
    # rewards 1, -0.25, 1.5, -0.25: of six pairs the two of equal reward make none
    assert len(pairs) == 5


def test_labels_are_drawn_with_the_bradley_terry_probability(tmp_path: Path) -> None:
    pairs = draw(tmp_path, 1500, beta=2.0, pairs_per_problem=0)
    close = [pair for pair in pairs if abs(abs(pair.chosen_score - pair.rejected_score) - 0.5) < 1e-9]
    share = sum(pair.chosen_score > pair.rejected_score for pair in close) / len(close)
    assert len(close) == 1500
    assert share == pytest.approx(1 / (1 + math.exp(-1.0)), abs=0.035)
    assert [preference(gap, 4.0) for gap in (-1000.0, 0.0)] == [0.0, 0.5]


def test_fewer_comparisons_are_the_first_of_more(tmp_path: Path) -> None:
    many, few = (
        draw(tmp_path, 40, num_pairs=60, pairs_per_problem=2),
        draw(tmp_path, 40, num_pairs=20, pairs_per_problem=2),
    )
    assert many[:20] == few
    assert len({pair.problem_id for pair in few}) == 20  # problems take turns
    with pytest.raises(
        BadInput, match="80 comparisons can be drawn, 200 are asked for: sample more problems, or raise"
    ):
        draw(tmp_path, 40, num_pairs=200, pairs_per_problem=2)


def test_comparisons_and_the_true_reward_want_a_task_that_knows_it(tmp_path: Path) -> None:
    write_records(tmp_path / "t.jsonl", [sampled("p", 0, "x")])
    with pytest.raises(BadInput, match="set task=shopping_notes"):
        DrawComparisons().run(str(tmp_path / "t.jsonl"), context())
    with pytest.raises(BadInput, match="knows no true reward"):
        TrueReward(None)
    assert [score.outcome for score in TrueReward(NOTES)([sampled("p", 0, RESPONSES[2])])] == pytest.approx([1.5])


ROWS = [RankedResponses("s/1", "s", "Mia has 3 apples.", ["3 apples", "three"], ["4 apples"]),
        RankedResponses("s/2", "s", "Mia has 4 pens.", ["4"], ["5", "6"])]  # fmt: skip


def scored(tmp_path: Path, **settings: Any) -> list[ResponseScores]:
    write_records(tmp_path / "rows.jsonl", ROWS)
    return list(ScoreResponses(**settings).run(str(tmp_path / "rows.jsonl"), context()))


def test_implicit_scores_are_sums_or_means_of_log_ratios(tiny_policy: Path, tmp_path: Path) -> None:
    other = load_policy(str(tiny_policy))
    with torch.no_grad():
        other.lm_head.weight.mul_(1.5)
    other.save_pretrained(tmp_path / "other")
    tokenizer, networks = load_tokenizer(str(tiny_policy)), (other, load_policy(str(tiny_policy)))
    tokenizer.save_pretrained(tmp_path / "other")
    want, norms = [], []
    for row in ROWS:
        for one in encode_row(tokenizer, row, is_chat=False):
            assert one.response_ids[-1] == tokenizer.eos_token_id
            ids = torch.tensor([[*one.prompt_ids, *one.response_ids]])
            with torch.inference_mode():
                lines = [response_logprobs(network, ids, torch.ones_like(ids))[0][0] for network in networks]
            start = len(one.prompt_ids) - 1
            want.append(([float(line[start:].sum()) for line in lines], len(one.response_ids)))
            norms.append(-math.sqrt(sum(value**2 for value in lines[0][start:].tolist())))
    values = {"model": str(tmp_path / "other"), "reference": str(tiny_policy)}
    for settings, expected in (
        (values, [own - base for (own, base), _ in want]),
        ({**values, "aggregate": "average"}, [(own - base) / length for (own, base), length in want]),
        ({"model": values["model"], "is_reference_free": True}, [own for (own, _), _ in want]),
        ({"model": values["model"], "is_reference_free": True, "aggregate": "norm"}, norms),
    ):
        found = [value for row in scored(tmp_path, **settings) for value in (*row.chosen, *row.rejected)]
        assert found == pytest.approx(expected, abs=2e-3)
    with pytest.raises(BadInput, match=r"is a policy: name stage.reference"):
        scored(tmp_path, model=values["model"])
    with pytest.raises(BadInput, match=r"stage.aggregate=norm is of one policy's log-probs"):
        scored(tmp_path, **values, aggregate="norm")


def test_a_folder_of_two_policies_is_read_as_both(tiny_policy: Path, tmp_path: Path) -> None:
    other, both, alone = (str(tmp_path / name) for name in ("other", "both", "alone"))
    network = load_policy(str(tiny_policy))
    with torch.no_grad():
        network.lm_head.weight.mul_(1.5)
    network.save_pretrained(other)
    load_tokenizer(str(tiny_policy)).save_pretrained(other)
    write_log_ratio_reward(Path(both), other, str(tiny_policy), Scale())
    write_log_ratio_reward(Path(alone), other, None, Scale(has_reference=False))
    assert scored(tmp_path, model=both) == scored(tmp_path, model=other, reference=str(tiny_policy))
    assert scored(tmp_path, model=alone) == scored(tmp_path, model=other, is_reference_free=True)
    for settings, names in (
        ({"is_reference_free": True}, r"stage\.is_reference_free"),
        ({"is_reference_free": True, "aggregate": "norm"}, r"stage\.is_reference_free, stage\.aggregate=norm"),
        ({"reference": other}, r"stage\.reference"),
    ):
        with pytest.raises(BadInput, match=rf"log_ratio_reward\.json says .*: leave out {names}$"):
            scored(tmp_path, model=both, **settings)


def test_a_scalar_model_is_read_at_the_end_token(tiny_prm: Path, tmp_path: Path) -> None:
    found = scored(tmp_path, model=str(tiny_prm))
    model, tokenizer = load_process_reward(str(tiny_prm)), load_tokenizer(str(tiny_prm))
    one = encode_row(tokenizer, ROWS[0], is_chat=False)[2]
    with torch.no_grad():
        logit = model(input_ids=torch.tensor([[*one.prompt_ids, *one.response_ids]])).logits[0, -1, 0]
    assert found[0].rejected == pytest.approx([float(logit)], abs=0.03)  # scored in bfloat16
    with pytest.raises(BadInput, match=r"is a reward model with a head: leave out stage.reference"):
        scored(tmp_path, model=str(tiny_prm), is_reference_free=True)


def test_engines_give_the_logits_that_transformers_give(tiny_prm: Path, tiny_policy: Path, tmp_path: Path) -> None:
    expected = scored(tmp_path, model=str(tiny_prm))
    engines = Engines()
    own = StageContext(None, tmp_path / "out.jsonl", 10.0, engines=engines)
    found = list(ScoreResponses(model=str(tiny_prm), batch_tokens=16).run(str(tmp_path / "rows.jsonl"), own))
    assert [(row.id, row.subset) for row in found] == [("s/1", "s"), ("s/2", "s")]
    for one, other in zip(found, expected, strict=True):
        assert [*one.chosen, *one.rejected] == pytest.approx([*other.chosen, *other.rejected], abs=0.03)
    assert len(engines.asked) > 6, "six, and some that were held against transformers first"
    assert not engines.is_open
    wrong = Engines(wrong=lambda logits: [[[-one for one in place] for place in row] for row in logits])
    own = StageContext(None, tmp_path / "wrong.jsonl", 10.0, engines=wrong)
    with pytest.raises(ScoresDiffer):
        list(ScoreResponses(model=str(tiny_prm)).run(str(tmp_path / "rows.jsonl"), own))
    assert not wrong.is_open
    own = StageContext(None, tmp_path / "out.jsonl", 10.0, engines=Engines())
    with pytest.raises(BadModel, match="is no reward model"):
        list(ScoreResponses(model=str(tiny_policy)).run(str(tmp_path / "rows.jsonl"), own))
    with pytest.raises(BadInput, match=r"engines read one head: leave client out"):
        list(ScoreResponses(model=str(tiny_prm), reference="x").run(str(tmp_path / "rows.jsonl"), own))


def test_scores_are_those_of_all_rows_at_once_whatever_the_batches(tiny_prm: Path, tmp_path: Path) -> None:
    """By hand: the same rows in one pass of the network's own batches, in their order."""
    rows = [RankedResponses(f"r{n}", "", "Mia has 3 apples. " * (n % 3 + 1), ["3 " * (n % 5 + 1)], ["4", "3 apples"])
            for n in range(20)]  # fmt: skip
    write_records(tmp_path / "many.jsonl", rows)
    model, tokenizer = load_process_reward(str(tiny_prm)), load_tokenizer(str(tiny_prm))
    encoded = [each for row in rows for each in encode_row(tokenizer, row, is_chat=False)]
    expected = last_logits(model, [[*each.prompt_ids, *each.response_ids] for each in encoded], 150)
    stage = ScoreResponses(model=str(tiny_prm), batch_tokens=150)
    found = list(stage.run(str(tmp_path / "many.jsonl"), context()))
    assert [value for row in found for value in (*row.chosen, *row.rejected)] == [
        round(float(logit), 6) for logit in expected
    ]


def test_responses_are_turns_where_the_tokenizer_has_a_chat_template(chat_model: Path, tmp_path: Path) -> None:
    for given, is_chat in ((None, True), (True, True), (False, False)):
        stage = ScoreResponses(model=str(chat_model), is_reference_free=True, is_chat=given)
        own = context()
        write_records(tmp_path / "rows.jsonl", ROWS[1:])
        found = list(stage.run(str(tmp_path / "rows.jsonl"), own))
        tokenizer, network = load_tokenizer(str(chat_model)), load_policy(str(chat_model))
        rows = encode_row(tokenizer, ROWS[1], is_chat)
        expected = [sum(line) for line in sampled_logprobs(network, rows)]
        assert [*found[0].chosen, *found[0].rejected] == pytest.approx(expected, abs=1e-4)
        assert ("chat" in own.counts["layout"]) == is_chat
    with pytest.raises(BadInput, match=r"stage\.is_chat must be true, false or null, got 'no'"):
        ScoreResponses(model=str(chat_model), is_chat="no")  # type: ignore[arg-type]


@pytest.fixture
def of_others(tiny_policy: Path, tmp_path: Path) -> Path:
    """A process reward model as TRL's PRMTrainer leaves it."""
    config, folder = load_config(str(tiny_policy)), tmp_path / "of_others"
    config.num_labels = 2
    AutoModelForTokenClassification.from_config(config).save_pretrained(folder)
    load_tokenizer(str(tiny_policy)).save_pretrained(folder)
    return folder


def test_a_process_reward_model_is_no_outcome_model_unless_asked_for(
    of_others: Path, tiny_prm: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(BadInput, match=r"trained on steps and not on responses \(two labels at every token, as TRL's "
                                       r"PRMTrainer leaves it\): .* stage\.takes_last_step=true takes"):  # fmt: skip
        scored(tmp_path, model=str(of_others))
    assert len(scored(tmp_path, model=str(of_others), takes_last_step=True)) == 2
    assert "was trained on steps (two labels at every token" in caplog.text
    own = tmp_path / "own"
    shutil.copytree(tiny_prm, own)
    for scores, is_refused in (("steps", True), ("responses", False)):
        write_training_layout(own, TrainingLayout(scores, "text"))
        if is_refused:
            with pytest.raises(BadInput, match=r"trained on steps .*\(its training_layout\.json says so\)"):
                scored(tmp_path, model=str(own))
        else:
            assert len(scored(tmp_path, model=str(own))) == 2
    named = shutil.copytree(tiny_prm, tmp_path / "Skywork-o1-Open-PRM-Tiny")
    with pytest.raises(BadInput, match=r"trained on steps .*\(skywork by its name\)"):
        scored(tmp_path, model=str(named))


def test_the_last_step_of_a_scorer_without_a_head_is_refused(tiny_policy: Path, tmp_path: Path) -> None:
    message = r"stage\.takes_last_step=true is for process reward models, and .* has no head: leave it out"
    with pytest.raises(BadInput, match=message):
        scored(tmp_path, model=str(tiny_policy), is_reference_free=True, takes_last_step=True)
    with pytest.raises(BadInput, match=r"stage\.takes_last_step=true .* judge: leave it out"):
        ScoreResponses(judgements="j.jsonl", takes_last_step=True)


def test_what_a_head_was_trained_on_is_assumed_aloud_where_nothing_says_it(
    tiny_prm: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_records(tmp_path / "rows.jsonl", ROWS)
    own = context()
    list(ScoreResponses(model=str(tiny_prm)).run(str(tmp_path / "rows.jsonl"), own))
    assert own.counts["ends"] == "responses, assumed: nothing in its folder says it"
    assert "is read at the ends of responses, which is an assumption" in caplog.text


def test_responses_are_laid_out_as_the_model_was_trained(
    chat_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(chat_model, tmp_path / "model")
    write_records(tmp_path / "rows.jsonl", ROWS[1:])
    for prompts, asked, is_chat, by, warned in (
        ("text", None, False, "by its training_layout.json", ""),
        ("chat", None, True, "by its training_layout.json", ""),
        (
            "text",
            True,
            True,
            "as asked for",
            "on plain text and reads responses whole, in its chat template",
        ),
        (
            "chat",
            False,
            False,
            "as asked for",
            "on turns of its chat template and reads responses whole, as",
        ),
        (
            "both",
            None,
            True,
            "by its tokenizer",
            "on turns and plain text and reads responses whole, in its",
        ),
    ):
        write_training_layout(folder, TrainingLayout("responses", prompts))
        caplog.clear()
        own = context()
        stage = ScoreResponses(model=str(folder), is_reference_free=True, is_chat=asked)
        found = list(stage.run(str(tmp_path / "rows.jsonl"), own))
        rows = encode_row(load_tokenizer(str(folder)), ROWS[1], is_chat)
        expected = [sum(line) for line in sampled_logprobs(load_policy(str(folder)), rows)]
        assert [*found[0].chosen, *found[0].rejected] == pytest.approx(expected, abs=1e-4)
        assert ("chat" in own.counts["layout"], own.counts["layout_by"]) == (is_chat, by)
        assert (warned in caplog.text) if warned else ("stage.is_chat says which" not in caplog.text)


def test_a_model_of_the_hub_says_as_much_as_its_folder(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache of a hub, as its client writes it, without a network."""
    cached = tmp_path / "hub" / "models--org--policy"
    folder = Path(shutil.copytree(chat_model, cached / "snapshots" / ("a" * 40)))
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    write_training_layout(folder, TrainingLayout("responses", "text"))
    write_records(tmp_path / "rows.jsonl", ROWS[1:])
    own = context()
    list(ScoreResponses(model="org/policy", is_reference_free=True).run(str(tmp_path / "rows.jsonl"), own))
    assert own.counts["layout"] == "whole, as plain text"
    write_training_responses(folder, map(response_hash, ROWS[1].chosen + ROWS[1].rejected), "")
    with pytest.raises(BadInput, match="org/policy was trained on 1 of"):
        list(ScoreResponses(model="org/policy", is_reference_free=True).run(str(tmp_path / "rows.jsonl"), context()))


def test_a_model_that_was_trained_on_the_rows_is_refused(tiny_prm: Path, tmp_path: Path) -> None:
    model = load_process_reward(str(tiny_prm))
    model.save_pretrained(tmp_path / "model")
    load_tokenizer(str(tiny_prm)).save_pretrained(tmp_path / "model")
    write_training_responses(tmp_path / "model", map(response_hash, ("4", "6")), "")
    with pytest.raises(BadInput, match=r"was trained on 1 of 2 rows of .* .'s/2' is the first"):
        scored(tmp_path, model=str(tmp_path / "model"))


def judgement(name: str, order: str, answer: str | None) -> PairJudgement:
    return PairJudgement(f"{name}/{order}/0", name, name, order, answer, "", "stop")


def test_a_judge_scores_by_both_orders_and_a_place_is_a_tie(tmp_path: Path) -> None:
    rows = [RankedResponses(name, "s", "Q", ["good"], ["bad"]) for name in "abcd"]
    answers = {"a": ("first", "first"), "b": ("first", "second"), "c": ("tie", "first"), "d": ("first", None)}
    judgements = [judgement(n, o, v) for n, both in answers.items() for o, v in zip(("ab", "ba"), both, strict=True)]
    write_records(tmp_path / "rows.jsonl", rows)
    write_records(tmp_path / "judgements.jsonl", judgements[::-1])
    stage = ScoreResponses(judgements=str(tmp_path / "judgements.jsonl"))
    found = list(stage.run(str(tmp_path / "rows.jsonl"), context()))
    assert [(row.chosen, row.rejected) for row in found] == [([1.0], [0.0]), ([0.5], [0.5]), ([0.75], [0.25]), ([], [])]
    with pytest.raises(BadInput, match="'a' has no judgements in both orders"):
        judged_scores(rows[0], [judgement("a", "ab", "first")])


def test_a_judge_is_asked_about_each_row_in_both_orders(tmp_path: Path) -> None:
    write_records(tmp_path / "rows.jsonl", [RankedResponses("a", "s", "Q", ["good"], ["bad"])])
    requests = RankedResponseRequests(rows=str(tmp_path / "rows.jsonl"))
    first, second = requests.load(NOTES, None)
    assert (first.id, second.id) == ("a/ab", "a/ba")
    assert first.prompt.index("good") < first.prompt.index("bad")
    assert second.prompt.index("bad") < second.prompt.index("good")
    said = [requests.records(NOTES, None, one, [Sample("Verdict: A", [], "stop")])[0] for one in (first, second)]
    assert [row.answer for row in said] == ["first", "second"]  # it goes by the place
    assert judged_scores(RankedResponses("a", "s", "Q", ["good"], ["bad"]), said).chosen == [0.5]
    write_records(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(BadInput, match="'s/1' has more than two responses: a judge of pairs cannot be asked about it"):
        requests.pairs()


def test_a_judge_rates_rows_of_several_responses_and_a_row_with_an_unread_rating_has_no_scores(tmp_path: Path) -> None:
    rows = [RankedResponses("a", "Math", "Q", ["good"], ["bad", "worse", "worst"]),
            RankedResponses("Ties/tied:1", "Ties", "Q", ["one", "two"], ["none"])]  # fmt: skip
    write_records(tmp_path / "rows.jsonl", rows)
    requests = RatingRequests(rows=str(tmp_path / "rows.jsonl"))
    asked = requests.load(NOTES, None)
    assert [one.id for one in asked][:2] == ["a/chosen-0", "a/rejected-0"]
    assert len(asked) == 7
    assert len({one.prompt.partition("BEGIN ")[2][:16] for one in asked}) == 7  # a mark of its own
    texts = {"a/chosen-0": ("Score: 9", "Score: 7"), "a/rejected-1": ("Score: 3", "no idea")}
    said = [
        rating
        for one in asked
        for rating in requests.records(
            NOTES, None, one, [Sample(text, [], "stop") for text in texts.get(one.id, ("Score: 2", "Score: 2"))]
        )
    ]
    write_records(tmp_path / "ratings.jsonl", said)
    stage = ScoreResponses(judgements=str(tmp_path / "ratings.jsonl"))
    first, second = stage.run(str(tmp_path / "rows.jsonl"), context())
    assert (first.chosen, first.rejected) == ([pytest.approx(0.8)], [0.2, pytest.approx(0.3), 0.2])
    assert (second.chosen, second.rejected) == ([0.2, 0.2], [0.2])
    unread = [ResponseRating(row.id, row.row_id, row.side, row.place, None, "", "stop")
              if row.id.startswith("a/rejected-1/") else row for row in said]  # fmt: skip
    write_records(tmp_path / "ratings.jsonl", unread)
    found = context()
    first, second = ScoreResponses(judgements=str(tmp_path / "ratings.jsonl")).run(str(tmp_path / "rows.jsonl"), found)
    assert (first.chosen, first.rejected, found.counts["without_verdict"]) == ([], [], 1)
    write_records(tmp_path / "ratings.jsonl", [row for row in said if "rejected-2" not in row.id])
    with pytest.raises(BadInput, match="'a' has ratings of 3 responses and 4 responses: rate these rows"):
        list(ScoreResponses(judgements=str(tmp_path / "ratings.jsonl")).run(str(tmp_path / "rows.jsonl"), context()))
    (tmp_path / "ratings.jsonl").write_text("")
    with pytest.raises(BadInput, match="no judgements: have the rows judged first"):
        list(ScoreResponses(judgements=str(tmp_path / "ratings.jsonl")).run(str(tmp_path / "rows.jsonl"), context()))


def test_the_evaluation_joins_by_id_and_counts_missing_scores(tmp_path: Path) -> None:
    write_records(tmp_path / "rows.jsonl", ROWS)
    write_records(
        tmp_path / "scores.jsonl", [ResponseScores("s/2", "s", [1.0], [0.0, 0.5]), ResponseScores("s/1", "s", [], [])]
    )
    found = EvaluateRewardModel(str(tmp_path / "scores.jsonl")).run(str(tmp_path / "rows.jsonl"), context())
    assert (found["score"], found["num_without_scores"]) == (0.5, 1)
    assert (found["accuracy"]["mean"], found["accuracy"]["n"]) == (0.5, 2)
    write_records(tmp_path / "scores.jsonl", [ResponseScores("s/1", "s", [1.0], [0.0])] * 1)
    with pytest.raises(BadInput, match="no scores of the 3 responses of row 's/1'"):
        EvaluateRewardModel(str(tmp_path / "scores.jsonl")).run(str(tmp_path / "rows.jsonl"), context())


def test_a_part_of_reward_bench_has_no_overall_score(tmp_path: Path) -> None:
    write_records(tmp_path / "rows.jsonl", [RankedResponses("hep-go/1", "hep-go", "Q", ["a"], ["b"])])
    write_records(tmp_path / "scores.jsonl", [ResponseScores("hep-go/1", "hep-go", [1.0], [0.0])])
    stage = EvaluateRewardModel(str(tmp_path / "scores.jsonl"), "reward_bench")
    found = stage.run(str(tmp_path / "rows.jsonl"), context())
    assert [found["score"], found["sections"]["Reasoning"]] == [None, None]
    assert found["subsets"]["hep-go"]["mean"] == 1.0


def test_a_file_or_the_hub_is_imported(tmp_path: Path) -> None:
    rows = [{"prompt": "Q", "chosen": "a", "rejected": "b"}]
    (tmp_path / "f.json").write_text(json.dumps(rows))
    found = list(ImportComparisons("pairs", subset="mine").run(str(tmp_path / "f.json"), context()))
    assert found == [RankedResponses("mine/line-1", "mine", "Q", ["a"], ["b"])]
    import datasets

    datasets.Dataset.from_list([{**rows[0], "subset": "shp", "id": 4}]).to_parquet(tmp_path / "set" / "data.parquet")
    found = list(ImportComparisons("reward_bench", hub=str(tmp_path / "set"), split="train").run("", context()))
    assert found == [RankedResponses("shp/4", "shp", "Q", ["a"], ["b"])]
    with pytest.raises(BadInput, match="name one source"):
        list(ImportComparisons("pairs").run("", context()))
    assert Row("f", 1).fields == {}


def test_a_prior_set_is_named_as_the_benchmark_names_it(tmp_path: Path) -> None:
    """As allenai/pref-test-sets has it: messages, texts that answer them, and a subset column of some sets' own."""
    row = {"prompt": [{"role": "user", "content": "Q"}], "chosen": "a", "rejected": "b", "subset": "honest", "id": 7}
    (tmp_path / "f.jsonl").write_text(json.dumps(row))
    found = list(ImportComparisons("reward_bench", subset="anthropic_hhh").run(str(tmp_path / "f.jsonl"), context()))
    assert found == [RankedResponses("anthropic_hhh/7", "anthropic_hhh", "Q", ["a"], ["b"])]
    with pytest.raises(BadInput, match=r"has a subset of its own: leave out stage\.subset"):
        list(ImportComparisons("reward_bench", subset="mine").run(str(tmp_path / "f.jsonl"), context()))


@pytest.mark.parametrize("own", ["math-prm", "hep-go", "alpacaeval-easy", "shp"])
def test_rows_of_another_subset_of_the_benchmark_are_no_prior_set(own: str, tmp_path: Path) -> None:
    (tmp_path / "f.jsonl").write_text(json.dumps({"prompt": "Q", "chosen": "a", "rejected": "b", "subset": own}))
    with pytest.raises(BadInput, match=rf"f\.jsonl:1: the row is of the subset '{own}' of RewardBench: leave out"):
        list(ImportComparisons("reward_bench", subset="summarize").run(str(tmp_path / "f.jsonl"), context()))
    if own == "shp":
        assert len(list(ImportComparisons("reward_bench", subset=own).run(str(tmp_path / "f.jsonl"), context()))) == 1


def test_rows_with_a_response_on_both_sides_are_counted_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [("4", "5"), ("4", "4"), ("6", "6 "), ("7", "8")]
    path, own = tmp_path / "f.jsonl", context()
    path.write_text("".join(json.dumps({"prompt": "Q", "chosen": a, "rejected": b}) + "\n" for a, b in rows))
    found = list(ImportComparisons("pairs").run(str(path), own))
    assert [row.id for row in found] == ["line-1", "line-4"]
    assert own.counts == {"subsets": 1, "responses": 4, "same_responses": 2}
    assert "2 of 4 rows have a response that is both chosen and rejected and are left out" in caplog.text
    assert f"({path}:2 is the first)" in caplog.text
    path.write_text(json.dumps({"chosen": "Q: 4", "rejected": "Q: 4"}) + "\n")
    with pytest.raises(BadInput, match=r"all 1 rows have a response that is both .*: there is nothing to compare"):
        list(ImportComparisons("pairs").run(str(path), context()))


def test_two_rows_of_one_id_are_refused(tmp_path: Path) -> None:
    row = {"prompt": "Q", "chosen": "a", "rejected": "b", "subset": "s", "id": 1}
    (tmp_path / "f.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    with pytest.raises(BadInput, match=r"f\.jsonl:2: the id 's/1' is that of .*f\.jsonl:1 too"):
        list(ImportComparisons("reward_bench").run(str(tmp_path / "f.jsonl"), context()))


def test_figures_of_pairs_by_hand() -> None:
    pairs = [ScoredPair("p", 2.0, 0.0, 1.0), ScoredPair("p", 1.0, 1.0, 0.5), ScoredPair("q", 0.0, 2.0, -1.0),
             ScoredPair("q", 1.0, -3.0, 0.0)]  # fmt: skip
    found = pair_figures(pairs)
    assert found["accuracy"]["mean"] == 0.5  # the tie is wrong
    assert found["score_accuracy"]["mean"] == pytest.approx(2 / 3, abs=1e-5)  # the third is in the true order
    assert found["reward"] == {"mean": 0.5, "std": pytest.approx(math.sqrt(20 / 8 - 0.25), abs=1e-6)}
    assert found["margin"]["mean"] == 1.0


def test_figures_of_responses_by_hand(tmp_path: Path) -> None:
    found = response_figures(["a", "b", "c", "d"], [0.9, 0.4, 0.4, 0.1], [1.0, 1.0, 0.0, 0.0])
    assert found["auc"]["mean"] == pytest.approx(3.5 / 4)
    assert found["brier"]["mean"] == pytest.approx((0.01 + 0.36 + 0.16 + 0.01) / 4)
    assert found["base_brier"] == 0.25
    assert found["ece"]["mean"] == pytest.approx((0.1 + abs(-0.6 + 0.4) + 0.1) / 4, abs=1e-5)
    assert found["accuracy"]["mean"] == 0.75
    write_records(tmp_path / "r.jsonl", [RewardPrediction("p/0", 0.9, 1.0)])
    write_records(tmp_path / "t.jsonl", [sampled("p", 0, "x")])
    document = MeasureRewardModel(str(tmp_path / "t.jsonl")).run(str(tmp_path / "r.jsonl"), context())
    assert (document["kind"], document["num_problems"], document["auc"]) == ("responses", 1, None)
    write_records(tmp_path / "r.jsonl", [PairRewards("x", 1.0, 0.0, 1.0)])
    with pytest.raises(BadInput, match="no example 'x'"):
        MeasureRewardModel(str(tmp_path / "t.jsonl")).run(str(tmp_path / "r.jsonl"), context())
    assert read_records(PairRewards, str(tmp_path / "r.jsonl"))[0].margin == 1.0
