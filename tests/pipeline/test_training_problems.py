"""A reward model says what it was trained on, and each problem is scored by one that has not seen it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.data.examples.outcome_examples import (
    JudgedResponse,
    JudgedResponseExamples,
    TrajectoryOutcomeExamples,
)
from espalier.data.examples.step_examples import prefix_examples
from espalier.data.jsonl import write_records
from espalier.data.process_data.published import problem_key
from espalier.data.records import AnnotatedSolution, BadInput, StepScores, Trajectory
from espalier.data.seen_responses import read_training_responses
from espalier.data.training_problems import (
    FILE,
    NAME,
    QUESTION,
    SeenProblems,
    problem_hash,
    read_policy_problems,
    read_seen_problems,
    read_training_problems,
    write_training_problems,
)
from espalier.models.load import is_reward_model
from espalier.models.scalar_head import load_process_reward
from espalier.pipeline.prm.score_steps import ScoreSteps, choose_model
from espalier.pipeline.stage import StageContext
from espalier.training.loop_from_config import save_model
from tests.training.test_training import PAIRS, STEPS, make_loop

ROWS = [
    Trajectory(
        f"{p}/0", p, "Q\n", f"{3 + k}=G", [f"{3 + k}", "=G"], [9, 12], [20 + k, 30, 40], [1, 3], "stop", "7", "7", True
    )
    for k, p in enumerate(("p", "q", "r"))
]


def reward_model(policy: Path, folder: Path, seed: int, problems: list[str] | None) -> str:
    """A model of random weights that was trained on the problems, as far as its folder says."""
    from espalier.models.load import load_tokenizer

    model = load_process_reward(str(policy), 1)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    load_tokenizer(str(policy)).save_pretrained(folder)
    if problems is not None:
        write_training_problems(folder, problems, "")
    return str(folder)


def score(tmp_path: Path, *models: str) -> tuple[list[StepScores], dict[str, Any]]:
    write_records(tmp_path / "t.jsonl", ROWS)
    context = StageContext(None, tmp_path / "-".join(Path(model).name for model in models), 10.0)
    return list(ScoreSteps(*models).run(str(tmp_path / "t.jsonl"), context)), context.counts


def test_a_copy_of_a_problem_in_a_mixture_is_that_problem() -> None:
    assert problem_hash("a-7~2") == problem_hash("a-7") != problem_hash("a-7~b")


def test_each_problem_goes_to_the_first_model_that_has_not_seen_it() -> None:
    seen = [SeenProblems(frozenset(map(problem_hash, problems))) for problems in ("pr", "qr")]
    chosen = {name: choose_model(replace(ROWS[0], problem_id=name), seen) for name in "pqrs"}
    assert chosen == {"p": (1, False), "q": (0, False), "r": (0, True), "s": (0, False)}
    seen[0] = replace(seen[0], kinds=frozenset([QUESTION]))
    assert choose_model(replace(ROWS[0], problem_id="s"), seen) == (1, False), "rather one that has surely not seen it"


QUESTIONS = ["What is 2 + 3?", "How  many\nare left?", "How many are right?"]


def judged(number: int, name: str = "") -> AnnotatedSolution:
    """A published row of a question: its id comes from the question, or is a `name` of its set."""
    question = QUESTIONS[number]
    return AnnotatedSolution(f"j{number}", name or problem_key(question), question, ["a\n"], [1.0], -1, True)


def test_a_problem_is_known_by_its_question_under_another_name(tmp_path: Path) -> None:
    """A model of Math-Shepherd's rows has seen the problems that GSM8K's samples and PRMBench pose by names."""
    write_training_problems(tmp_path, [judged(0).problem_id, judged(1).problem_id], "")
    seen = read_seen_problems(str(tmp_path))
    assert seen is not None
    assert seen.kinds == {QUESTION}
    rows = [judged(0, "prmbench-4"), judged(1, "prmbench-5"), judged(2, "prmbench-6"), judged(2)]
    assert [choose_model(row, [seen])[1] for row in rows] == [True, True, False, False]
    sampled = [replace(ROWS[0], problem_id="gsm8k-train-0", prompt=prompt) for prompt in
               ("How many are left?\n", "How many are right?\n")]  # fmt: skip
    assert [choose_model(row, [seen])[1] for row in sampled] == [True, None]


def test_nobody_knows_a_question_where_a_model_knows_names(tmp_path: Path) -> None:
    write_training_problems(tmp_path, ["gsm8k-train-0", "gsm8k-train-1~2"], "")
    seen = read_seen_problems(str(tmp_path))
    assert seen is not None
    assert [seen.says(name) for name in ("gsm8k-train-1", "gsm8k-train-2")] == [True, False]
    assert choose_model(judged(0), [seen]) == (0, None)
    old = tmp_path / "old"
    old.mkdir()
    (old / FILE).write_text(json.dumps({"problems": [problem_hash("gsm8k-train-0")]}))
    known = read_seen_problems(str(old))
    assert known is not None
    assert (known.kinds, choose_model(judged(0), [known])) == (frozenset(), (0, False)), "a file from before"
    (tmp_path / "next").mkdir()
    write_training_problems(tmp_path / "next", [judged(0).problem_id], str(tmp_path))
    both = read_seen_problems(str(tmp_path / "next"))
    assert both is not None
    assert both.kinds == {NAME, QUESTION}
    write_training_problems(tmp_path / "next", [judged(0).problem_id], str(old))
    either = read_seen_problems(str(tmp_path / "next"))
    assert either is not None
    assert not either.kinds


def test_scores_say_that_a_problem_was_perhaps_seen(
    tiny_policy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = reward_model(tiny_policy, tmp_path / "one", 1, [judged(0).problem_id])
    found, counts = score(tmp_path, model)
    assert [row.is_seen for row in found] == [None] * 3
    assert (counts["problems_perhaps_seen"], counts["problems_seen"]) == (3, 0)
    assert "of 3 of 3 problems nobody knows whether the model that scores them was trained on them" in caplog.text


def test_two_folds_score_each_other(tiny_policy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = reward_model(tiny_policy, tmp_path / "one", 1, ["p", "r"])
    other = reward_model(tiny_policy, tmp_path / "other", 2, ["q", "r"])
    found, counts = score(tmp_path, one, other)
    by_one, by_other = score(tmp_path, one)[0], score(tmp_path, other)[0]
    assert [row.scores for row in found] == [by_other[0].scores, by_one[1].scores, by_one[2].scores]
    assert by_one[0].scores != by_other[0].scores
    assert [row.is_seen for row in found] == [False, False, True]
    assert [row.is_seen for row in by_one] == [True, False, True]
    assert (counts["problems"], counts["problems_seen"], counts["steps"]) == (3, 1, 6)
    assert "1 of 3 problems were in the training set of the model that scores them" in caplog.text


def test_a_model_that_does_not_say_what_it_was_trained_on(tiny_policy: Path, tmp_path: Path) -> None:
    one = reward_model(tiny_policy, tmp_path / "one", 1, ["p"])
    silent = reward_model(tiny_policy, tmp_path / "silent", 2, None)
    assert [row.is_seen for row in score(tmp_path, silent)[0]] == [None] * 3
    with pytest.raises(BadInput, match=r"silent: no training_problems\.json there"):
        score(tmp_path, one, silent)
    (tmp_path / "one" / FILE).write_text("{")
    with pytest.raises(BadInput, match=r"training_problems\.json cannot be read"):
        score(tmp_path, one)


def test_a_trained_model_names_its_problems_and_those_of_its_start(
    tiny_policy: Path, tokenizer: Any, tmp_path: Path
) -> None:
    start = reward_model(tiny_policy, tmp_path / "start", 1, ["earlier"])
    loop = make_loop(tiny_policy, tmp_path / "run", "process reward", model={"path": start})
    parts = [part for k, row in enumerate(STEPS) for part in prefix_examples(replace(row, problem_id=f"p{k % 3}"))]
    loop.loader.examples = parts
    save_model(loop, tokenizer)
    want = {problem_hash(name) for name in ("earlier", "p0", "p1", "p2")}
    assert read_training_problems(str(tmp_path / "run" / "model")) == want
    loop.loader.examples = STEPS  # of which nobody says what problems they are
    save_model(replace(loop, run_dir=tmp_path / "unknown"), tokenizer)
    assert read_training_problems(str(tmp_path / "unknown" / "model")) is None


def test_a_reward_model_names_its_responses_where_its_start_does(
    tiny_policy: Path, tokenizer: Any, tmp_path: Path
) -> None:
    silent = reward_model(tiny_policy, tmp_path / "silent", 1, None)
    for name, start in (("from_policy", str(tiny_policy)), ("from_silent", silent)):
        loop = make_loop(tiny_policy, tmp_path / name, "bradley-terry", model={"path": start})
        save_model(loop, tokenizer)
    assert read_training_responses(str(tmp_path / "from_policy" / "model"))
    assert read_training_responses(str(tmp_path / "from_silent" / "model")) is None


def test_a_policy_names_the_problems_of_its_pairs_and_no_reward_model_takes_them_for_its_own(
    tiny_policy: Path, tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = make_loop(tiny_policy, tmp_path / "dpo", "dpo", model={"path": str(tiny_policy)})
    loop.loader.examples = [replace(pair, problem_id="paired") for pair in PAIRS]
    save_model(loop, tokenizer)
    policy = str(tmp_path / "dpo" / "model")
    assert read_training_problems(policy) == {problem_hash("paired")}
    loop = make_loop(tiny_policy, tmp_path / "prm", "process reward", model={"path": policy, "num_labels": 1})
    loop.loader.examples = [p for row in STEPS for p in prefix_examples(replace(row, problem_id="mine"))]
    save_model(loop, tokenizer)
    prm = str(tmp_path / "prm" / "model")
    assert read_training_problems(prm) == {problem_hash("mine")}
    assert read_policy_problems(prm) == {problem_hash("paired")}
    assert read_policy_problems(policy) == frozenset()
    write_training_problems(tmp_path, ["more"], prm, must_say=True)
    assert (len(read_training_problems(str(tmp_path)) or ()), read_policy_problems(str(tmp_path))) == (
        2,
        {problem_hash("paired")},
    )
    trajectory = Trajectory("paired/0", "paired", "Q", "&", ["&"], [5, 6], [7], [1], "stop", "1", "1", True)
    write_records(tmp_path / "t.jsonl", [trajectory])
    context = StageContext(None, tmp_path / "s.jsonl", 10.0)
    assert [row.is_seen for row in ScoreSteps(prm).run(str(tmp_path / "t.jsonl"), context)] == [False]
    assert context.counts["problems_seen_by_its_policy"] == 1
    assert "1 of 1 problems were in the pairs of the policy" in caplog.text


def test_a_model_that_starts_from_one_that_does_not_say_its_problems_does_not_either(
    tiny_policy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    silent = reward_model(tiny_policy, tmp_path / "silent", 1, None)
    assert is_reward_model(silent)
    assert not is_reward_model(str(tiny_policy))
    write_training_problems(tmp_path, ["p"], silent, is_reward_model(silent))
    assert read_training_problems(str(tmp_path)) is None
    assert "does not say what it was trained on" in caplog.text
    write_training_problems(tmp_path, ["p"], str(tiny_policy), is_reward_model(str(tiny_policy)))
    assert read_training_problems(str(tmp_path)) == {problem_hash("p")}


@pytest.mark.parametrize("kind", ["trajectories", "judged"])
def test_a_model_of_outcomes_names_its_problems(kind: str, tiny_policy: Path, tokenizer: Any, tmp_path: Path) -> None:
    rows = [replace(row, is_correct=row.problem_id != "q") for row in ROWS]
    write_records(tmp_path / "trajectories.jsonl", rows)
    judged = [JudgedResponse(row.id, row.problem_id, row.prompt, row.response, row.is_correct) for row in rows]
    write_records(tmp_path / "judged.jsonl", judged)
    sources = {"trajectories": TrajectoryOutcomeExamples, "judged": JudgedResponseExamples}
    loop = make_loop(tiny_policy, tmp_path / "run", "implicit ce", model={"path": str(tiny_policy)})
    loop.loader.examples = sources[kind](str(tmp_path / f"{kind}.jsonl"), 64).load(tokenizer)
    save_model(loop, tokenizer)
    assert read_training_problems(str(tmp_path / "run" / "model")) == {problem_hash(name) for name in "pqr"}
