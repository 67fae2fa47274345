"""Step rewards by a verdict for each step: those of the offline stage, and what is missing says nothing."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from espalier.data.asked_texts import WrittenText
from espalier.data.jsonl import write_records
from espalier.data.judgements import Verification
from espalier.data.process_data.published import content_key
from espalier.data.records import BadInput, Problem, Trajectory
from espalier.data.step_verdicts import StepVerdictFormat
from espalier.data.verification import VerifierFormat
from espalier.models.tiny import build_tiny
from espalier.pipeline.prm.score_by_step_verdicts import ScoreByStepVerdicts
from espalier.pipeline.stage import StageContext
from espalier.rewards.composed import ComposedReward
from espalier.rewards.score import Score
from espalier.rewards.step_verdicts import StepVerdictReward, filled_in_steps
from espalier.rewards.verifier_rationales import VerifierRationales
from espalier.rewards.written_verdicts import WrittenVerdictReward
from espalier.rl.advantages.process_grpo import credit_by_group
from espalier.rl.combinations import reward_range
from espalier.rl.trainer_from_config import check_parts
from espalier.rl.types import Rollout, RolloutGroup
from espalier.runtime.entrypoint import BadConfig, build, compose_config
from espalier.runtime.schemas import RLConfig
from tests.rewards.test_written_verdicts import Model, Texts, whole

# words of one token, so that a random network finds none too unlikely
EACH = StepVerdictFormat("Check.", yes=["1"], no=["0"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("v") / "verifier"
    return str(build_tiny(path, ["2+2=4\n#### 4"], hidden_size=32, num_layers=1, num_heads=2, vocab_size=320,
                          max_length=256, seed=3))  # fmt: skip


def solution(name: str, *steps: str) -> Trajectory:
    """Lines of one token each, and an end token that belongs to the last."""
    lines, ends = [f"{step}\n" for step in steps], list(range(1, len(steps) + 1))
    ids = [*ends, 9]
    return Trajectory(name, name.partition("/")[0], "Q\n", "".join(lines), lines, [1], ids,
                      [*ends[:-1], len(ids)] if ends else [], "stop", "4", "4", True)  # fmt: skip


A, B, C = solution("p/0", "2+2=4", "#### 4"), solution("p/1", "2+2=5", "so", "#### 5"), solution("p/2", "x", "y")
END_ALONE = solution("p/3")


def whole_text(text: str) -> WrittenText:
    return WrittenText(text, is_whole=True)


WRITTEN: dict[str, Texts] = {
    A.id: [*map(whole_text, (EACH.answer(A.steps, [True, True]), EACH.answer(A.steps, [True, False]),
                             EACH.answer(A.steps, [True]))),  # stops though nothing is wrong
           WrittenText(EACH.answer(A.steps, [True, True]), is_whole=False)],
    B.id: whole(EACH.answer(B.steps, [False]), EACH.answer(B.steps, [True, True, False]), "Hm."),
    C.id: whole("Hm.", EACH.answer(A.steps, [True, False]), EACH.answer(C.steps, [True, True]) + " \\boxed{0}"),
}  # fmt: skip


def writes(text: str) -> Texts:
    return next(WRITTEN[row.id] for row in (A, B, C) if EACH.ask(row.prompt, row.steps) == text)


def reward_of(
    folder: str, votes: str = "hard", form: str = "score", offset: float = 0.0, says: Callable[[str], Texts] = writes
) -> tuple[StepVerdictReward, Model]:
    model = Model(folder, says)
    return StepVerdictReward(VerifierRationales(folder, EACH, votes), model, form, offset), model


@pytest.mark.parametrize("votes", ["hard", "mean"])
def test_scores_are_those_that_the_offline_stage_has_of_the_same_rationales(
    votes: str, folder: str, tmp_path: Path
) -> None:
    rows = [A, B, C]
    written = [
        Verification(f"{row.id}/{k}", row.id, row.problem_id, content_key([row.prompt, *row.steps]), None, one.text,
                     "stop" if one.is_whole else "length")
        for row in rows for k, one in enumerate(WRITTEN[row.id] or [])
    ]  # fmt: skip
    write_records(tmp_path / "t.jsonl", rows)
    write_records(tmp_path / "v.jsonl", written)
    stage = ScoreByStepVerdicts(str(tmp_path / "v.jsonl"), EACH, folder if votes == "mean" else "", votes)
    offline = list(stage.run(str(tmp_path / "t.jsonl"), StageContext(None, tmp_path / "unused", 10.0)))
    reward, model = reward_of(folder, votes)
    scores = reward([A, B, replace(C, problem_id="q")])
    for row, score in zip(offline[:2], scores[:2], strict=True):
        assert score.steps == pytest.approx(row.scores, abs=0.01)  # bf16 there
        assert score.outcome == 0.0
    assert offline[2].scores == []
    assert scores[2].steps == [0.5, 0.5]
    if votes == "hard":
        assert [score.steps for score in scores[:2]] == [[1.0, 0.5], [0.5, 0.5, 0.0]]
        assert model.num_rows == 0
    else:
        assert model.num_rows == 5  # one token behind each verdict that is read, equal ones once
        assert 0 < scores[0].parts["verdict_mass"] < 0.1


def test_a_solution_without_a_rationale_that_can_be_read_gets_what_the_others_get_at_its_place(folder: str) -> None:
    reward, model = reward_of(folder)
    scores = reward([A, B, C, END_ALONE])
    # behind half of the way A has 1 and B, two of three steps on, 0.5; at the end 0.5 and 0
    assert [score.steps for score in scores] == [[1.0, 0.5], [0.5, 0.5, 0.0], [0.75, 0.25], []]
    assert [score.parts["without_score"] for score in scores] == [0.0, 0.0, 1.0, 0.0]
    # of the last nothing was asked
    assert [score.parts.get("without_verdict") for score in scores] == [0.5, pytest.approx(1 / 3), 1.0, None]
    assert [score.parts.get("verifier") for score in scores] == [0.5, 0.0, None, 0.0]
    assert len(model.asked) == 3  # an end token alone has no step to judge
    progress, _ = reward_of(folder, form="progress", offset=0.5)
    assert [sum(score.steps) for score in progress([A, B, C])] == pytest.approx([0.0, -0.5, -0.25])


def test_scores_are_filled_in_along_the_way_and_alone_they_are_a_half() -> None:
    rows = [[0.8, 0.6, 0.4], [], [0.2], []]
    filled = filled_in_steps(rows, [3, 1, 1, 6], ["p", "p", "p", "p"])
    assert filled[1] == pytest.approx([0.3])
    assert filled[3] == pytest.approx([0.5, 0.5, 0.4, 0.4, 0.3, 0.3])
    assert filled_in_steps([[], [0.9]], [2, 1], ["p", "q"]) == [[0.5, 0.5], [0.9]]
    # a group that agrees agrees still: dynamic sampling compares rewards exactly
    assert filled_in_steps([[0.1]] * 3 + [[]], [1] * 4, ["p"] * 4)[3] == [0.1]


def test_estimators_of_step_rewards_take_them_and_what_is_missing_is_neither_good_nor_bad(folder: str) -> None:
    reward, _ = reward_of(folder)
    other = replace(A, id="p/4", steps=["2+2=4\n", "#### 4\n"])
    rows = [A, C, other]
    group = RolloutGroup(Problem("p", "?", "4"), [Rollout(row, [], 0) for row in rows], reward(rows))
    assert [len(own) for own in credit_by_group(group)] == [2, 2, 2]
    assert credit_by_group(group)[1][0] == pytest.approx(0.0, abs=1e-6)


def test_a_rationale_of_which_one_verdict_has_no_probability_is_left_out_whole(folder: str) -> None:
    said = [EACH.answer(A.steps, [True, True]), EACH.answer(A.steps, [False])]

    class Refusing(Model):
        """Refuses what is longer than the question with the first section."""

        def next_logprobs(self, rows: Sequence[list[int]]) -> list[dict[int, float] | None]:
            shortest = min(map(len, rows))
            return [self._likeliest(ids) if len(ids) == shortest else None for ids in rows]

    reward = StepVerdictReward(VerifierRationales(folder, EACH), Refusing(folder, lambda text: whole(*said)), "score")
    (score,) = reward([A])
    assert score.parts["without_verdict"] == 0.5
    assert score.steps[0] == score.steps[1], "of the rationale that stops behind the first step"


def test_the_outcome_is_the_lowest_verdict_of_each_rationale(folder: str) -> None:
    reward = WrittenVerdictReward(VerifierRationales(folder, EACH, "hard"), Model(folder, writes))
    scores = reward([A, B, C, END_ALONE])
    assert [score.outcome for score in scores] == pytest.approx([0.5, 0.0, (0.5 + 0.0 + 0.0) / 3, 0.0])
    assert all(score.steps == [] for score in scores)


def test_responses_that_are_not_asked_about_do_not_hide_a_verifier_that_stays_silent(folder: str) -> None:
    reward, _ = reward_of(folder, says=lambda text: whole("Hm."))
    reward([solution(f"p/{k}", "x") for k in range(63)])
    reward([END_ALONE])
    with pytest.raises(BadInput, match="none of the last 64 solutions got a verdict"):
        reward([A])


def test_a_verdict_in_the_solution_is_counted_and_read_by_nobody(folder: str) -> None:
    tricky = solution("p/0", "2+2=5 \\boxed{1}")
    said = EACH.answer(tricky.steps, [False])
    reward, _ = reward_of(folder, says=lambda text: whole(said))
    (score,) = reward([tricky])
    assert (score.steps, score.parts["verdict_in_answer"]) == ([0.0], 1.0)
    assert reward([A])[0].parts["verdict_in_answer"] == 0.0


def test_it_ends_what_it_started(folder: str) -> None:
    reward, model = reward_of(folder)
    both = ComposedReward({"process": reward}, non_stop_reward=-0.25)
    assert both([replace(A, finish_reason="length")]) == [
        Score(-0.25, [0.0, 0.0], {**reward([A])[0].parts, "stopped": 0.0})
    ]
    both.close()
    assert model.is_closed


def test_settings_that_cannot_be_are_refused(folder: str) -> None:
    with pytest.raises(BadInput, match=r"score, progress, minimum, got 'sum'"):
        reward_of(folder, form="sum")
    one = VerifierFormat("solution", "Is it right (Yes/No)?", "Check.")
    with pytest.raises(BadInput, match="choose verifier=each_step"):
        StepVerdictReward(VerifierRationales(folder, one), Model(folder, writes))


@pytest.mark.parametrize("client", ["data_parallel_engines", "ray_engines", "vllm"])
def test_a_recipe_names_who_is_asked(client: str, folder: str) -> None:
    at = "reward.terms.process"
    settings = [f"client@{at}.asking.client={client}", f"{at}.verdicts.path={folder}", "model.path=M", "output_dir=D"]
    if client == "vllm":
        settings += [f"{at}.asking.client.base_url=http://127.0.0.1:8000", f"~{at}.asking.client.num_engines"]
    config = compose_config(RLConfig, "exp/ppo/process_grpo_verdicts_word_arithmetic", settings)
    check_parts(config)
    bounds = reward_range(config.reward)
    assert bounds is not None
    assert bounds.to_come == (-0.5, 0.5)
    term = build(config.reward).terms["process"]
    assert isinstance(term, StepVerdictReward)
    assert isinstance(term.form, VerifierRationales)
    assert isinstance(term.form.verifier, StepVerdictFormat)
    term.close()  # nothing was started


def test_an_estimator_of_the_min_form_refuses_another_one() -> None:
    settings = ["reward=step_verdicts", "reward.terms.process.verdicts.path=V", "model.path=M", "output_dir=D"]
    config = compose_config(RLConfig, "exp/ppo/pure_word_arithmetic", [*settings, "reward.terms.process.form=progress"])
    with pytest.raises(BadConfig, match=r"set reward\.terms\.process\.form=minimum"):
        check_parts(config)
    check_parts(compose_config(RLConfig, "exp/ppo/pure_word_arithmetic", settings))


@pytest.mark.parametrize(("name", "key"), [("process", "path"), ("step_verdicts", "verdicts.path")])
def test_an_end_token_alone_pays_no_more_than_a_wrong_answer_that_is_judged_wrong(name: str, key: str) -> None:
    """Its process term is 0, as it has no step; a wrong answer's is half of the offset below 0."""
    given = ["model.path=M", "output_dir=D", f"reward={name}", f"reward.terms.process.{key}=P"]
    node = compose_config(RLConfig, "exp/ppo/grpo_word_arithmetic", given).reward
    terms = {"process": lambda rows: [Score(0.0, [-0.5] if row.steps else []) for row in rows]}
    settings = {key: node[key] for key in ("limit", "non_stop_reward", "min_tokens")}
    reward = ComposedReward(terms, {"process": node["weights"]["process"]}, **settings)
    lone = replace(A, steps=[], step_ends=[], response_ids=[9], response="")
    wrong, alone = reward([A, lone])
    assert alone.total <= wrong.total == -0.25
