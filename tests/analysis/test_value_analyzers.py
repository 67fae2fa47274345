"""Value error and action ranking on four states whose figures are computed by hand."""

import logging
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from espalier.analysis.analyzers.action_ranking import MeasureActionRanking, best_points, pair_points
from espalier.analysis.analyzers.estimated_states import estimated_states
from espalier.analysis.analyzers.value_error import MeasureValueError, slope
from espalier.data.jsonl import write_json, write_records
from espalier.data.records import BadInput, StepScores, StepValues
from espalier.data.steps import Decoder
from espalier.models.load import load_tokenizer
from espalier.models.scalar_head import load_critic
from espalier.pipeline.stage import StageContext


def valued(name: str, ids: list[int], rights: list[int], is_correct: bool, num: int = 4) -> StepValues:
    """One token per step; `rights` of `num` completions of every inner state."""
    size = len(ids)
    return StepValues(
        name, name.partition("/")[0], "Q", ["s\n"] * size, [9], ids, list(range(1, size + 1)),
        [*(one / num for one in rights), float(is_correct)], [*rights, int(is_correct)], [*(num for _ in rights), 1],
        is_correct,
    )  # fmt: skip


def score(name: str, scores: list[float], is_seen: bool | None = None) -> StepScores:
    return StepScores(name, name.partition("/")[0], scores, is_seen)


# The states (1), (1, 2), (1, 5) of p and (7) of q, with the values 1/2, 3/4, 1/4 and 1; (1) is reached twice.
TRUTH = [
    valued("p/0", [1, 2, 3], [2, 3], True),
    valued("p/1", [1, 5, 6], [2, 1], False),
    valued("q/0", [7, 8], [4], True),
]
SCORES = [score("p/0", [0.5, 0.5, 0.9]), score("p/1", [0.5, 0.3, 0.1]), score("q/0", [0.5, 0.2])]


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    write_records(tmp_path / "truth.jsonl", TRUTH)
    write_records(tmp_path / "scores.jsonl", SCORES)
    return str(tmp_path / "truth.jsonl"), str(tmp_path / "scores.jsonl")


def context(folder: str) -> StageContext:
    return StageContext(None, Path(folder).parent / "figures.json", 10.0)


def test_value_errors_by_step_and_along_the_way_are_those_by_hand(files: tuple[str, str]) -> None:
    """Errors are 0, 0.25, 0.05 and 0.5, after 1 of 3, 2 of 3, 2 of 3 and 1 of 2 steps."""
    truth, scores = files
    found = MeasureValueError({"prm": scores}).run(truth, context(truth))
    assert (found["states"], found["problems"], found["completions_per_state"]) == (4, 2, 4.0)
    prm = found["estimators"]["prm"]
    assert (prm["error"]["mean"], prm["bias"]["mean"], prm["within_0.05"]) == (0.2, -0.175, 0.5)
    assert prm["squared_error"] == pytest.approx((0.0625 + 0.0025 + 0.25) / 4)
    noise = (0.25 + 0.1875 + 0.1875 + 0) / 3 / 4  # p (1 - p) / (K - 1)
    assert found["reference_variance"] == pytest.approx(noise, abs=1e-6)
    assert prm["squared_error_without_noise"] == pytest.approx(0.07875 - noise, abs=1e-6)
    assert prm["explained_variance"] == pytest.approx(1 - 0.048125 / 0.078125)
    assert prm["growth_per_step"] == pytest.approx(-0.1)
    assert prm["growth"] == pytest.approx(0.0166667 / 0.0763889, abs=1e-5)
    assert prm["by_step"] == {
        "1": {"count": 2, "error": 0.25, "bias": -0.25},
        "2": {"count": 2, "error": 0.15, "bias": -0.1},
    }
    assert {place: row["count"] for place, row in prm["by_tenth"].items()} == {"3": 1, "5": 1, "6": 2}
    figure = ElementTree.parse(Path(truth).parent / "figures.svg")
    assert len(figure.findall(".//{*}polyline")) == 2


def test_a_slope_is_not_defined_where_the_places_are_alike() -> None:
    assert slope([1.0, 1.0], [0.0, 5.0]) is None


def test_of_a_reference_of_single_completions_no_noise_is_known(tmp_path: Path, files: tuple[str, str]) -> None:
    single = tmp_path / "single.jsonl"
    write_records(single, [valued("q/0", [7, 8], [1], True, num=1)])
    found = MeasureValueError(files[1]).run(str(single), context(files[0]))
    assert found["reference_variance"] is None
    assert found["estimators"]["estimate"]["squared_error_without_noise"] is None


def test_all_estimators_are_measured_on_the_states_that_every_one_values(
    tmp_path: Path, files: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    write_records(tmp_path / "other.jsonl", [valued("p/1", [1, 5, 6], [0, 4], False)])
    states = estimated_states(files[0], {"prm": files[1], "mc": str(tmp_path / "other.jsonl")}, context(files[0]))
    assert {key[1]: dict(state.estimates) for key, state in states.items()} == {
        (1,): {"prm": 0.5, "mc": 0.0},
        (1, 5): {"prm": 0.3, "mc": 1.0},
    }
    assert "3 of 5 states" in caplog.text


def test_problems_that_a_scorer_was_trained_on_are_left_out(
    tmp_path: Path, files: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    write_records(tmp_path / "seen.jsonl", [*SCORES[:2], score("q/0", [0.5, 0.2], is_seen=True)])
    states = estimated_states(files[0], {"prm": str(tmp_path / "seen.jsonl")}, context(files[0]))
    assert {state.problem_id for state in states.values()} == {"p"}
    assert "1 of 3 trajectories are of problems the scorer was trained on" in caplog.text


def test_problems_of_which_scores_do_not_say_whether_the_scorer_saw_them_are_warned_of(
    tmp_path: Path, files: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    known = [score("p/0", [0.5, 0.5, 0.9], False), score("p/1", [0.5, 0.3, 0.1], False), score("q/0", [0.5, 0.2])]
    write_records(tmp_path / "known.jsonl", known)
    asked = context(files[0])
    MeasureValueError({"prm": str(tmp_path / "known.jsonl"), "other": files[1]}).run(files[0], asked)
    found = {key: count for key, count in asked.counts.items() if key.startswith("problems_perhaps_seen")}
    assert found == {"problems_perhaps_seen_prm": 1, "problems_perhaps_seen_other": 2}
    assert "known.jsonl: of 1 of 2 problems nobody knows whether the reward model was trained on them" in caplog.text


def test_the_better_of_two_next_steps_is_ranked_by_hand(files: tuple[str, str]) -> None:
    """Of the prompt one step is sampled, of the state (1) two: 3/4 and 1/4, scored 0.5 and 0.3."""
    truth, scores = files
    found = MeasureActionRanking(scores, min_gap=0.1, min_actions=2).run(truth, context(truth))
    assert (found["states"], found["pairs"]) == (1, 1)
    row = found["estimators"]["estimate"]
    assert (row["better_first"]["mean"], row["best_first"]["mean"], row["chance"]) == (1.0, 1.0, 0.5)
    assert row["by_step"] == {"2": {"pairs": 1, "better_first": 1.0}}


def test_ties_of_the_estimate_count_one_half_and_ties_of_the_truth_not_at_all() -> None:
    truth = {0: 0.9, 1: 0.9, 2: 0.1}
    assert pair_points({0: 0.5, 1: 0.2, 2: 0.5}, truth, [0, 1, 2], 0.0) == [0.5, 0.0]  # pairs (0, 2) and (1, 2)
    assert best_points({0: 0.5, 1: 0.2, 2: 0.5}, truth, [0, 1, 2]) == (0.5, 2 / 3)
    assert pair_points({0: 0.5, 1: 0.2}, {0: 0.7, 1: 0.6}, [0, 1], 0.1) == [1.0]  # 0.7 - 0.6 < 0.1 in floats


def test_files_that_do_not_belong_together_end_in_one_line(tmp_path: Path, files: tuple[str, str]) -> None:
    truth, scores = files
    bad, empty = tmp_path / "bad.jsonl", tmp_path / "empty.jsonl"
    empty.touch()

    def message(estimates: object, rows: list[StepScores] | None = None) -> str:
        write_records(bad, rows or [])
        with pytest.raises(BadInput) as raised:
            MeasureValueError(estimates).run(truth, context(truth))
        assert "\n" not in str(raised.value)
        return str(raised.value)

    assert "'p/0' has 1 values and 3 steps" in message(str(bad), [score("p/0", [0.5])])
    assert "none of its 5 inner states is valued" in message(str(bad), [score("x/0", [0.5])])
    assert "is the input itself" in message(truth)
    assert "names no file" in message("")
    assert "empty: run the stage" in message(str(empty))
    bad.write_text('{"id":"p/0","problem_id":"p","scores":[NaN,0,0]}\n')
    with pytest.raises(BadInput, match="NaN is not a number"):
        MeasureValueError(str(bad)).run(truth, context(truth))
    with pytest.raises(BadInput, match="no state with 3 next steps"):
        MeasureActionRanking(scores, min_gap=0.1, min_actions=3).run(truth, context(truth))


def test_estimates_of_the_references_own_completions_are_refused(tmp_path: Path, files: tuple[str, str]) -> None:
    """Provenance says what both were made of: the same file of completions, then another one."""
    smoothed = tmp_path / "smoothed.jsonl"
    write_records(smoothed, TRUTH)
    for name, digest in (("truth", "aa"), ("smoothed", "aa")):
        meta = {"config": {"input": "many.jsonl"}, "inputs": {"many.jsonl": digest}}
        write_json(tmp_path / f"{name}.meta.json", meta)
    with pytest.raises(BadInput, match=r"smoothed\.jsonl was made of the same completions as .*truth\.jsonl"):
        MeasureValueError({"smoothed": str(smoothed)}).run(files[0], context(files[0]))
    write_json(tmp_path / "smoothed.meta.json", {"config": {"input": "few.jsonl"}, "inputs": {"few.jsonl": "bb"}})
    found = MeasureValueError({"smoothed": str(smoothed)}).run(files[0], context(files[0]))
    assert found["estimators"]["smoothed"]["error"]["mean"] == 0.0
    with pytest.raises(BadInput, match="is the input itself"):
        MeasureValueError(str(tmp_path / "x" / ".." / "truth.jsonl")).run(files[0], context(files[0]))


def test_a_critics_folder_is_read_at_the_step_ends(tiny_policy: Path, tmp_path: Path, files: tuple[str, str]) -> None:
    torch.manual_seed(0)
    decode = Decoder(load_tokenizer(str(tiny_policy)))
    read = [replace(row, steps=[decode(row.response_ids), *[""] * (len(row.steps) - 1)]) for row in TRUTH]
    write_records(Path(files[0]), read)
    for form, shape in (("linear", lambda value: value), ("probability", torch.sigmoid)):
        critic = load_critic(str(tiny_policy), "policy", "eager").eval()
        critic.config.critic_form = form
        critic.save_pretrained(tmp_path / form)
        load_tokenizer(str(tiny_policy)).save_pretrained(tmp_path / form)
        states = estimated_states(files[0], {"critic": str(tmp_path / form)}, context(files[0]))
        with torch.no_grad():  # prompt 9, response 1 2 3: the states 1 and 1 2 end at the places 1 and 2
            direct = shape(critic(input_ids=torch.tensor([[9, 1, 2, 3]])).logits[0, :, 0])
        found = [states["p", prefix].estimates["critic"] for prefix in ((1,), (1, 2))]
        assert found == pytest.approx([float(direct[1]), float(direct[2])], abs=1e-5)
        assert MeasureValueError(str(tmp_path / form)).inputs() == [str(tmp_path / form / "model.safetensors")]
    write_records(Path(files[0]), TRUTH)  # other texts than their tokens read as
    with pytest.raises(BadInput, match="reads the sampled ids of 'p/0': its tokens do not read as its text"):
        estimated_states(files[0], {"critic": str(tmp_path / "linear")}, context(files[0]))


def test_a_critic_of_scaled_rewards_has_no_error(tiny_policy: Path, tmp_path: Path, files: tuple[str, str]) -> None:
    critic = load_critic(str(tiny_policy), "policy")
    critic.config.critic_form, critic.config.values_scaled_rewards = "linear", True
    critic.save_pretrained(tmp_path / "critic")
    with pytest.raises(
        BadInput, match="values rewards that its run has scaled, or added implicit ones or the cost of a KL"
    ):
        estimated_states(files[0], {"critic": str(tmp_path / "critic")}, context(files[0]))


def test_a_reward_model_is_not_read_as_a_critic(tiny_prm: Path, files: tuple[str, str]) -> None:
    with pytest.raises(BadInput, match="is no critic that a run has saved: score the steps with prm/score_steps"):
        estimated_states(files[0], {"prm": str(tiny_prm)}, context(files[0]))
