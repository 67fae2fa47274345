"""Problems of one passage stay on one side of every split, from the samples to what is trained on and measured."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from espalier.data.examples.outcome_examples import TrajectoryOutcomeExamples
from espalier.data.examples.token_examples import PreferenceExamples, is_held_out
from espalier.data.jsonl import write_records
from espalier.data.records import Completion, StepScores, StepValues, Trajectory
from espalier.data.solutions_to_verify import read_solutions
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.pipeline.pairs.build_preferences import OutcomePreferences, PartialPreferences, StepPreferences
from espalier.pipeline.pairs.trajectory_groups import ProblemPart
from espalier.pipeline.prm.prm_calibration import EvaluateProcessReward
from espalier.pipeline.problems.select_demonstrations import SelectDemonstrations
from espalier.pipeline.stage import StageContext
from espalier.sampling.client import Sample, SampleRequest
from espalier.sampling.requests import make_trajectory
from espalier.search.methods.tree_inference import TreeInference
from espalier.search.scorers.random_scorer import RandomScorer
from espalier.values.monte_carlo import Count, finished, states_of
from espalier.values.step_values import counted, step_values
from espalier.values.tree_values import response_nodes, tree_response, tree_step_values
from tests.support.search_cases import SOLUTIONS as TABLE
from tests.support.search_cases import TableSampler, searched

SHARE = 0.5
PASSAGES = [f"passage-{number}" for number in range(12)]
HELD = {passage for passage in PASSAGES if is_held_out(passage, SHARE)}


def solution(problem: int, number: int) -> Trajectory:
    """The right one (number 0) or the wrong one of a problem; three problems have one passage."""
    name, ids = f"p{problem}", [3, 4 + number]
    steps = ["a\n", str(number)]
    return Trajectory(f"{name}/{number}", name, "Q\n", "".join(steps), steps, [1, 2], ids, [1, 2], "stop", "0",
                      str(number), number == 0, passage_id=PASSAGES[problem // 3])  # fmt: skip


SOLUTIONS = [solution(problem, number) for problem in range(36) for number in range(2)]
VALUES = [step_values(row, [counted(Count(1 + row.is_correct, 2))]) for row in SOLUTIONS]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    scores = [StepScores(row.id, row.problem_id, [0.5, 0.5 + row.is_correct / 4]) for row in VALUES]
    made = {"solutions": SOLUTIONS, "values": VALUES, "scores": scores}
    for name, rows in made.items():
        write_records(tmp_path / f"{name}.jsonl", rows)
    return {name: str(tmp_path / f"{name}.jsonl") for name in made}


def context(tmp_path: Path) -> StageContext:
    return StageContext(None, tmp_path / "out.jsonl", 60)


def problems_of(passages: set[str]) -> set[str]:
    return {f"p{problem}" for problem in range(36) if PASSAGES[problem // 3] in passages}


def test_a_state_and_what_is_sampled_from_it_are_of_the_problems_passage() -> None:
    row = replace(solution(4, 0), passage_id="story-1")
    states = states_of(row)
    assert {state.passage_id for state in states} == {"story-1"}
    completion = Completion(f"{states[0].id}/0", states[0].id, row.problem_id, "x", [7], "stop", None, False)
    assert finished(states[0], completion).passage_id == "story-1"


@pytest.mark.parametrize("kind", ["outcome", "step", "partial"])
def test_pairs_are_of_whole_passages_and_say_which(kind: str, files: dict[str, str], tmp_path: Path) -> None:
    part: dict[str, Any] = {"part": "held_out", "held_out_share": SHARE}
    stage = {
        "outcome": lambda: OutcomePreferences(**part),
        "step": lambda: StepPreferences(**part, values=files["values"]),
        "partial": lambda: PartialPreferences(**part, values=files["values"]),
    }[kind]()
    pairs = list(stage.run(files["solutions"], context(tmp_path)))
    assert {pair.passage_id for pair in pairs} == HELD
    assert {pair.problem_id for pair in pairs} == problems_of(HELD)
    write_records(tmp_path / "pairs.jsonl", pairs)
    kept = PreferenceExamples(str(tmp_path / "pairs.jsonl"), 99, part="held_out", held_out_share=SHARE).load(None)
    assert len(kept) == len(pairs), "training draws the same line"


def test_demonstrations_and_outcomes_are_of_the_same_passages(files: dict[str, str], tmp_path: Path) -> None:
    stage = SelectDemonstrations(part="train", held_out_share=SHARE)
    shown = {row.id.split("/")[0] for row in stage.run(files["solutions"], context(tmp_path))}
    assert shown == problems_of(set(PASSAGES) - HELD)
    judged = TrajectoryOutcomeExamples(files["solutions"], 99, part="train", held_out_share=SHARE).load(None)
    assert {example.problem_id for example in judged} == shown
    for kind in ("trajectories", "step_values"):
        rows = read_solutions(files["solutions" if kind == "trajectories" else "values"], kind)
        part = ProblemPart(part="train", held_out_share=SHARE)
        assert {row.problem_id for row in rows if part.holds(row)} == shown


def test_calibration_measures_the_passages_that_were_held_out(files: dict[str, str], tmp_path: Path) -> None:
    stage = EvaluateProcessReward(files["scores"], held_out_share=SHARE)
    steps = stage.scored_steps(files["values"], context(tmp_path))
    assert len(set(steps.problems.tolist())) == 3 * len(HELD)


def test_samples_and_searches_carry_the_passage(tokenizer: Any, task: WordArithmetic) -> None:
    problem = replace(task.problems("train")[0], passage_id="story-7")
    ids = [*tokenizer("#### 7").input_ids, tokenizer.eos_token_id]
    request = SampleRequest("p", "Q\n", list(tokenizer("Q\n").input_ids))
    assert make_trajectory(task, tokenizer, problem, request, 0, Sample("#### 7", ids, "stop")).passage_id == "story-7"
    tree, found, _ = searched(TableSampler(tokenizer, TABLE), TreeInference(((0, 3),)), RandomScorer())
    tree.problem = replace(tree.problem, passage_id="story-7")
    record = tree.record(found.chosen, "m", "s", False, 0.0)
    rows: Sequence[Trajectory | StepValues] = [tree.trajectory(tree.finished()[0]), *tree_step_values(record),
                                               tree_response(record, response_nodes(record)[0])]  # fmt: skip
    assert {row.passage_id for row in rows} == {"story-7"}
