"""One rationale with a verdict per step, from the task's teacher to scores: files in, files out."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.data.jsonl import read_records, write_records
from espalier.data.judgements import Verification
from espalier.data.process_data.published import content_key
from espalier.data.records import BadInput, StepScores, StepValues, Trajectory
from espalier.data.step_verdicts import StepVerdictFormat
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.data.training_problems import FILE, write_training_problems
from espalier.models.load import load_policy, load_tokenizer
from espalier.models.tiny import build_tiny
from espalier.pipeline.prm.score_by_step_verdicts import ScoreByStepVerdicts
from espalier.pipeline.prm.write_rationales import WriteRationales
from espalier.pipeline.problems.verifier_demonstrations import MakeVerifierDemonstrations
from espalier.pipeline.stage import StageContext
from espalier.rewards.votes import best_of
from espalier.sampling.client import Sample
from espalier.sampling.verifications import TeacherRationaleRequests, VerificationRequests
from tests.pipeline.test_generative_verifiers import ranking_by

EACH = StepVerdictFormat("Check.")


def solution(name: str, *steps: str, is_correct: bool = False) -> Trajectory:
    lines = [f"{step}\n" for step in steps]
    ends = list(range(1, len(steps) + 1))
    return Trajectory(name, name.partition("/")[0], "Q\n", "".join(lines), lines, [1], ends, ends, "stop", "4", "4",
                      is_correct)  # fmt: skip


ROWS = [solution("a/0", "2+2=4", "#### 4", is_correct=True), solution("a/1", "2+2=5", "#### 5"), solution("b/0", "x")]


def wrote(row: Trajectory, vote: int, text: str, finish: str = "stop") -> Verification:
    asked = content_key([row.prompt, *row.steps])
    return Verification(f"{row.id}/{vote}", row.id, row.problem_id, asked, None, text, finish)


def scored(folder: Path, written: list[Verification], **settings: Any) -> tuple[list[StepScores], dict[str, Any]]:
    rows, path, context = folder / "t.jsonl", folder / "v.jsonl", StageContext(None, folder / "unused", 10.0)
    write_records(rows, ROWS)
    write_records(path, written)
    settings = {"votes": "hard", **settings}
    return list(ScoreByStepVerdicts(str(path), EACH, **settings).run(str(rows), context)), context.counts


WRITTEN = [
    wrote(ROWS[0], 0, EACH.answer(ROWS[0].steps, [True, True])),
    wrote(ROWS[0], 1, EACH.answer(ROWS[0].steps, [True, False])),
    wrote(ROWS[0], 2, EACH.answer(ROWS[0].steps, [True])),  # stops though nothing is wrong
    wrote(ROWS[0], 3, EACH.answer(ROWS[0].steps, [True, False]), "length"),
    wrote(ROWS[1], 0, EACH.answer(ROWS[1].steps, [False])),
    wrote(ROWS[1], 1, EACH.answer(ROWS[1].steps, [True, True])),
    wrote(ROWS[1], 2, EACH.answer(["2+2=5", "2+2=5"], [True, True])),  # of another step
    wrote(ROWS[2], 0, "Hm."),
]


def test_hard_votes_are_averaged_over_rationales_that_align_and_the_others_counted_by_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records, counts = scored(tmp_path, WRITTEN)
    assert [row.scores for row in records] == [[1.0, 0.5], [0.5, 0.5], []]
    assert (counts["rationales"], counts["misaligned"], counts["without_score"]) == (8, 4, 1)
    assert "1 of 3 solutions have no score" in caplog.text
    assert {name: count for name, count in counts.items() if name.startswith("misaligned (")} == {
        "misaligned (it stops though no step is wrong)": 1,
        "misaligned (cut)": 1,
        "misaligned (a step is not quoted as it is)": 1,
        "misaligned (no step is spoken of)": 1,
    }


def test_scores_say_which_problems_the_verifier_learned_to_judge_and_evaluations_warn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert {row.is_seen for row in scored(tmp_path, WRITTEN)[0]} == {None}
    folder = str(build_tiny(tmp_path / "m", ["2+2=4\n#### 4"], hidden_size=32, num_layers=1, num_heads=2,
                            vocab_size=320, max_length=256, seed=3))  # fmt: skip
    unknown, _ = scored(tmp_path, WRITTEN, model=folder)
    assert {row.is_seen for row in unknown} == {None}, "its folder does not say"
    write_training_problems(tmp_path / "m", ["a"], "")
    records, counts = scored(tmp_path, WRITTEN, model=folder)
    assert [row.scores for row in records] == [row.scores for row in unknown], "hard votes all the same"
    assert "verdict_mass" not in counts
    for rows in (records, scored(tmp_path, WRITTEN, model=folder, votes="mean")[0]):
        assert [(row.id, row.is_seen) for row in rows] == [("a/0", True), ("a/1", True), ("b/0", False)]
    write_records(tmp_path / "s.jsonl", records)
    ranking_by(str(tmp_path / "s.jsonl"), ROWS[:2], tmp_path)
    assert "1 of 1 problems were in the reward model's training set and look better" in caplog.text


def test_what_is_read_of_a_verifier_is_in_the_provenance(tmp_path: Path) -> None:
    weights = str(tmp_path / "model.safetensors")
    assert ScoreByStepVerdicts("v", EACH, str(tmp_path)).inputs() == [weights, "v"]
    assert ScoreByStepVerdicts("v", EACH, str(tmp_path), votes="hard").inputs() == ["v"]
    write_training_problems(tmp_path, ["a"], "")
    assert ScoreByStepVerdicts("v", EACH, str(tmp_path), votes="hard").inputs() == [str(tmp_path / FILE), "v"]
    assert ScoreByStepVerdicts("v", EACH, votes="hard").inputs() == ["v"]
    with pytest.raises(BadInput, match=r"stage\.model=nowhere is no folder"):
        ScoreByStepVerdicts("v", EACH, "nowhere", votes="hard")


def test_best_of_n_ranks_by_these_scores(tmp_path: Path) -> None:
    records, _ = scored(tmp_path, WRITTEN)
    path = tmp_path / "s.jsonl"
    write_records(path, records)
    ranking = ranking_by(str(path), ROWS[:2], tmp_path)
    assert best_of(ROWS[:2], ranking.scores_of(ROWS[:2])) == 1.0


def test_the_score_of_a_step_is_p_yes_at_its_own_verdict(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sizes = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 320, "max_length": 256, "seed": 3}
    folder = str(build_tiny(tmp_path / "m", ["2+2=4\n#### 4"], **sizes))
    records, counts = scored(tmp_path, WRITTEN, model=folder, votes="mean")
    network, tokenizer = load_policy(folder).float(), load_tokenizer(folder)

    def p_yes(text: str) -> float:
        start, logs = list(tokenizer(text).input_ids), []
        for word in ("correct", "incorrect"):
            ids = list(tokenizer(word).input_ids)
            with torch.no_grad():
                rows = network(input_ids=torch.tensor([[*start, *ids]])).logits[0].double().log_softmax(-1)
            logs.append(sum(float(rows[len(start) + k - 1, token]) for k, token in enumerate(ids)))
        return float(torch.tensor(logs).softmax(0)[0])

    asked = EACH.ask("Q\n", ROWS[0].steps)
    first = p_yes(asked + "Step 1: 2+2=4 \\boxed{")
    second = p_yes(asked + "Step 1: 2+2=4 \\boxed{correct}\nStep 2: #### 4 \\boxed{")
    assert records[0].scores == pytest.approx([first, min(first, second)], abs=0.01)  # bf16 there
    assert counts["verdict_mass"] < 0.1
    assert "gives both verdicts together a probability of" in caplog.text, "a random network answers with neither"


def test_solutions_that_nobody_asked_about_and_rationales_of_none_end_the_stage(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"nothing was written about 'b/0' \(1 of 3"):
        scored(tmp_path, WRITTEN[:-1])
    with pytest.raises(BadInput, match=r"none of 3 solutions gets scores: misaligned \(no step is spoken of\) 3"):
        scored(tmp_path, [wrote(row, 0, "Hm.") for row in ROWS])
    other = [replace(row, asked="0" * 16) for row in WRITTEN]
    with pytest.raises(BadInput, match="is about another solution"):
        scored(tmp_path, other)
    with pytest.raises(BadInput, match=r"votes=mean needs stage\.model"):
        ScoreByStepVerdicts("v", EACH)


def test_the_task_teaches_verdicts_per_step_that_align_and_only_true_ones_are_learnt(tmp_path: Path) -> None:
    task, path = WordArithmetic(num_train=4, num_demonstrations=4, wrong_way_rate=0.0), tmp_path / "t.jsonl"
    rows = []
    for problem, shown in zip(task.problems("train"), task.demonstrations("train"), strict=True):
        steps = task.split_steps(shown.completion)
        wrong = [*steps[:-1], "#### 7777"]
        for k, own in enumerate((steps, wrong)):
            text = "".join(own)
            rows.append(Trajectory(f"{problem.id}/{k}", problem.id, shown.prompt, text, own, [1],
                                   list(range(1, len(own) + 1)), list(range(1, len(own) + 1)), "stop",
                                   str(problem.gold), "1", k == 0))  # fmt: skip
    write_records(path, rows)
    context = StageContext(task, tmp_path / "unused", 10.0)
    written = list(WriteRationales(EACH, mistake_rate=0.0).run(str(path), context))
    assert [row.answer for row in written] == ["yes", "no"] * 4
    lying = [*written[:-1], replace(written[-1], response=EACH.answer(rows[-1].steps, [True] * len(rows[-1].steps)))]
    write_records(tmp_path / "v.jsonl", lying)
    make = MakeVerifierDemonstrations(verifier=EACH, verifications=str(tmp_path / "v.jsonl"))
    found = list(make.run(str(path), context))
    assert len(found) == 6  # three of each class
    assert context.counts["left out (verdict is not the truth)"] == 1
    assert all(row.prompt.endswith("Check.\n") and row.completion.startswith("Step 1: ") for row in found)
    assert all(("{incorrect}" in row.completion) == row.id.endswith("/1/0") for row in found)
    with pytest.raises(BadInput, match="are learnt from rationales"):
        MakeVerifierDemonstrations(verifier=EACH).run(str(path), context)


def test_a_verifier_is_asked_once_about_a_solution_and_its_answer_is_whether_no_step_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_records(path, ROWS)
    sizes = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 320, "max_length": 256, "seed": 3}
    tokenizer, task = load_tokenizer(str(build_tiny(tmp_path / "m", ["2+2=4"], **sizes))), WordArithmetic()
    source = VerificationRequests(str(path), EACH)
    requests = source.load(task, tokenizer)
    assert [request.id for request in requests] == ["a/0", "a/1", "b/0"]
    assert requests[0].prompt == "Q\nStep 1: 2+2=4\nStep 2: #### 4\nCheck.\n"
    texts = [EACH.answer(ROWS[0].steps, verdicts) for verdicts in ([True, True], [True, False], [True])]
    samples = [Sample(text, [], "stop") for text in texts]
    assert [row.answer for row in source.records(task, tokenizer, requests[0], samples)] == ["yes", "no", None]
    assert read_records(Trajectory, str(path))


def valued(name: str, last: str, label: float) -> StepValues:
    labels: list[float | None] = [1.0, label]
    return StepValues(name, name[0], "Q\n", ["2+2=4\n", last], [1], [2, 3], [1, 2], labels, [0, 0], [1, 1], label == 1,
                      labels)  # fmt: skip


def test_a_chat_teacher_writes_a_verdict_per_step_and_what_agrees_with_the_labels_is_learnt(tmp_path: Path) -> None:
    right, wrong = (valued("a/0", "#### 4", 1.0), valued("b/0", "#### 5", 0.0))
    path, task = str(tmp_path / "s.jsonl"), WordArithmetic()
    write_records(path, [right, wrong])
    with pytest.raises(BadInput, match=r"'a/0' has no right answer to show"):
        TeacherRationaleRequests(path, EACH, kind="step_values").load(task, None)
    teacher = TeacherRationaleRequests(path, EACH, kind="step_values", shows_gold=False)
    requests = teacher.load(task, None)
    assert requests[0].messages == [{"role": "user", "content": requests[0].prompt}]
    assert "<solution>\nStep 1: 2+2=4\nStep 2: #### 4\n</solution>" in requests[0].prompt
    assert 'written as in "Step 1:", and repeats the step word for word. Then' in requests[0].prompt
    assert "ends with \\boxed{correct} or \\boxed{incorrect};" in requests[0].prompt
    free = replace(EACH, quotes_steps=False, heading="Paragraph {number}:")
    asked = TeacherRationaleRequests(path, free, "step_values", shows_gold=False).load(task, None)[1].prompt
    assert 'as in "Paragraph 1:". Then' in asked
    said = [EACH.answer(right.steps, [True, True]), EACH.answer(right.steps, [False]),
            f"**Step 1:** 2+2=4\nSo. \\boxed{{correct}}\n\n**Step 2:** {wrong.steps[1]} no \\boxed{{incorrect}}",
            EACH.answer(wrong.steps, [True, True]), "I cannot say."]  # fmt: skip
    rows = [row for request, texts in zip(requests, (said[:2], said[2:]), strict=True)
            for row in teacher.records(task, None, request, [Sample(text, [], "stop") for text in texts])]  # fmt: skip
    assert [row.answer for row in rows] == ["yes", "no", "no", "yes", None]
    write_records(tmp_path / "v.jsonl", rows)
    context = StageContext(None, tmp_path / "unused", 10.0)
    make = MakeVerifierDemonstrations(verifier=EACH, verifications=str(tmp_path / "v.jsonl"), kind="step_values")
    found = list(make.run(path, context))
    assert {row.prompt: row.completion for row in found} == {
        "Q\nStep 1: 2+2=4\nStep 2: #### 4\nCheck.\n": said[0],
        "Q\nStep 1: 2+2=4\nStep 2: #### 5\nCheck.\n": said[2],
    }
    assert context.counts["left out (verdict is not the truth)"] == 2
    assert context.counts["left out (no step is spoken of)"] == 1


def test_a_prompt_of_ones_own_must_ask_for_both_verdicts_per_step(tmp_path: Path) -> None:
    write_records(tmp_path / "t.jsonl", ROWS)
    own = TeacherRationaleRequests(str(tmp_path / "t.jsonl"), EACH, teacher_prompt="{question}{solution}{right}{gold}")
    with pytest.raises(BadInput, match=r"requests\.teacher_prompt lacks \{wrong\}"):
        own.load(WordArithmetic(), None)
