"""From graded solutions to a verifier's demonstrations, and from its rationales to scores: files in, files out."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.data.examples.token_examples import DemonstrationExamples
from espalier.data.examples.verifier_examples import VerifierExamples
from espalier.data.jsonl import read_records, write_records
from espalier.data.judgements import Verification
from espalier.data.process_data.published import content_key
from espalier.data.records import AnnotatedSolution, BadInput, Demonstration, Problem, StepScores, Trajectory
from espalier.data.row_index import ProblemRows
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.data.training_problems import problem_hash, read_training_problems
from espalier.data.verification import VerifierFormat
from espalier.models.load import load_policy, load_tokenizer
from espalier.models.tiny import build_tiny
from espalier.pipeline.evaluation.evaluation_inputs import OutcomeScore, SampleRows
from espalier.pipeline.evaluation.rankings import Ranking, ScoreFile
from espalier.pipeline.pairs.build_preferences import ProcessPreferences
from espalier.pipeline.prm.evaluate_prm_benchmarks import EvaluatePRMBenchmarks
from espalier.pipeline.prm.score_by_verifier import ScoreByVerifier
from espalier.pipeline.prm.write_rationales import WriteRationales
from espalier.pipeline.problems.verifier_demonstrations import MakeVerifierDemonstrations
from espalier.pipeline.stage import StageContext
from espalier.rewards.generative_verifier import GenerativeVerifierReward
from espalier.rewards.votes import best_of, weighted_vote
from espalier.sampling.client import Sample
from espalier.sampling.verifications import TeacherRationaleRequests, VerificationRequests
from espalier.training.trained_on import write_trained_on

SOLUTION = VerifierFormat("solution", "Is it right (Yes/No)?", "Check.")
STEP = VerifierFormat("step", "Right so far (Yes/No)?", "Check.")
Q = SOLUTION.question


def solution(identity: str, text: str, is_correct: bool, finish: str = "stop", answer: str = "4") -> Trajectory:
    steps = text.splitlines(keepends=True)
    problem = identity.partition("/")[0]
    return Trajectory(identity, problem, "Q\n", text, steps, [1], [2], [1], finish, "4", answer, is_correct)


ROWS = [
    solution("a/0", "2+2=4\n#### 4", True),
    solution("a/1", "3+1=4\n#### 4", True),
    solution("a/2", "2+2=5\n#### 5", False, answer="5"),
    solution("a/3", "2+2=", False, finish="length"),
    solution("b/0", "1+3=4\n#### 4", True),
    solution("b/1", "2+2=4\n#### 4", True),
    solution("b/2", "2+2=6\n#### 6", False, answer="6"),
]


def digest(question: str) -> str:
    """Of the problem and the steps that a question is about."""
    name, _, number = question.partition("#")
    row = next((row for row in ROWS if row.id == name), ROWS[0])
    return content_key([row.prompt, *row.steps[: int(number) if number else None]])


def wrote(question: str, text: str, vote: int = 0, finish: str = "stop") -> Verification:
    verdict = SOLUTION.read(text)
    answer = None if verdict is None else "yes" if verdict.is_yes else "no"
    return Verification(
        f"{question}/{vote}", question, question.partition("/")[0], digest(question), answer, text, finish
    )


def demonstrations(folder: Path, verifications: list[Verification] | None = None, **options: Any) -> Any:
    """(demonstrations, counts)"""
    path, context = folder / "t.jsonl", StageContext(None, folder / "unused", 10.0)
    write_records(path, ROWS)
    if verifications is not None:
        options["verifications"] = str(folder / "v.jsonl")
        write_records(options["verifications"], verifications)
    return MakeVerifierDemonstrations(verifier=SOLUTION, **options).run(str(path), context), context.counts


def test_direct_demonstrations_are_balanced_and_what_is_left_out_is_counted(tmp_path: Path) -> None:
    rows, counts = demonstrations(tmp_path)
    assert sorted(row.completion for row in rows) == [" No", " No", " Yes", " Yes"]
    assert counts == {
        "right": 2,
        "wrong": 2,
        "problems": 2,
        "left out (cut by its length)": 1,
        "left out (more than of the other class)": 2,
    }
    wrong = next(row for row in rows if row.id == "a/2")
    assert wrong == Demonstration("a/2", f"Q\n2+2=5\n#### 5\n{Q}", " No", "a", "2+2=5\n#### 5")


def test_a_repeated_solution_of_a_problem_counts_once_and_the_first_stays(tmp_path: Path) -> None:
    path, context = tmp_path / "t.jsonl", StageContext(None, tmp_path / "unused", 10.0)
    write_records(path, [*ROWS[:3], solution("a/4", ROWS[0].response, True)])
    rows = list(MakeVerifierDemonstrations(verifier=SOLUTION, max_per_problem=1).run(str(path), context))
    assert [row.id for row in rows] == ["a/0", "a/2"]
    assert context.counts["left out (repeated)"] == 1


def test_a_problem_gives_at_most_n_of_each_class(tmp_path: Path) -> None:
    rows, counts = demonstrations(tmp_path, max_per_problem=1)
    assert [row.id for row in rows] == ["a/0", "a/2", "b/0", "b/2"]
    assert counts["left out (more than max_per_problem)"] == 2


def test_rationales_stay_where_their_verdict_is_the_truth_and_reasons_are_counted_apart(tmp_path: Path) -> None:
    written = [
        wrote("a/0", f"Fine.\n**{Q} Yes**"),  # kept, without the marks around its verdict
        wrote("a/1", f"Hm.\n{Q} No"),  # not the truth
        wrote("a/2", f"2+2 is 4.\n{Q} No"),  # kept
        wrote("a/2", "2+2 is 4. No", 1),  # no verdict
        wrote("a/2", f"2+2 is 4.\n{Q} No", 2, finish="length"),  # cut: no verdict
        wrote("a/2", f"{Q} No", 3),  # no rationale
        wrote("b/2", f"Right.\n{Q} Yes\nNo, 4.\n{Q} No"),  # two verdicts
        wrote("a/3", f"Cut.\n{Q} No"),  # of a solution that was cut
    ]
    rows, counts = demonstrations(tmp_path, written)
    assert rows == [
        Demonstration("a/0/0", "Q\n2+2=4\n#### 4\nCheck.\n", f"Fine.\n{Q} Yes", "a", "2+2=4\n#### 4"),
        Demonstration("a/2/0", "Q\n2+2=5\n#### 5\nCheck.\n", f"2+2 is 4.\n{Q} No", "a", "2+2=5\n#### 5"),
    ]
    assert {name[10:-1]: count for name, count in counts.items() if name.startswith("left out")} == {
        "cut by its length": 1,
        "verdict is not the truth": 1,
        "no verdict to read": 2,
        "no rationale before the verdict": 1,
        "several verdicts": 1,
        "about a solution that takes no part": 1,
    }


def test_one_class_alone_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="1 are of right and 0 of wrong"):
        demonstrations(tmp_path, [wrote("a/0", f"Fine.\n{Q} Yes")])
    with pytest.raises(BadInput, match="no rationale of it is about"):
        demonstrations(tmp_path, [wrote("z/0", f"Fine.\n{Q} Yes")])


def task_with_one_problem() -> Any:
    task = WordArithmetic()
    problem = Problem("p", "Mia doubles 4 pens. Mia buys 1 more.", "9",
                      {"start": 4, "operations": [["doubles", 0], ["buys", 1]]})  # fmt: skip

    class OneProblem:
        position = staticmethod(task.position)
        split_steps = staticmethod(task.split_steps)

        def problems(self, split: str) -> list[Problem]:
            return [problem]

    return OneProblem(), problem


def test_the_task_teaches_rationales_that_stop_at_the_first_error(tmp_path: Path) -> None:
    task, problem = task_with_one_problem()
    texts = {"p/0": ("doubles: 4 * 2 = 8\nbuys: 8 + 1 = 9\n#### 9", True),
             "p/1": ("doubles: 4 + 2 = 6\nbuys: 6 + 1 = 7\n#### 7", False)}  # fmt: skip
    rows = [Trajectory(name, "p", problem.question + "\n", text, text.splitlines(keepends=True), [1], [2], [1], "stop",
                       "9", text[-1], is_right) for name, (text, is_right) in texts.items()]  # fmt: skip
    path = str(tmp_path / "t.jsonl")
    write_records(path, rows)

    def written(rate: float, verifier: VerifierFormat = SOLUTION) -> list[Verification]:
        return list(WriteRationales(verifier, mistake_rate=rate).run(path, StageContext(task, tmp_path / "o", 10.0)))

    right, wrong = written(0.0)
    assert right.response == f"doubles: 4 * 2 = 8: right\nbuys: 8 + 1 = 9: right\n#### 9: right\n{Q} Yes"
    assert (wrong.answer, wrong.response) == ("no", f"doubles: 4 + 2 = 6: wrong\n{Q} No")
    assert [row.answer for row in written(1.0)] == ["no", "yes"]  # it is always mistaken
    assert [(row.question_id, row.answer) for row in written(0.0, STEP)] == [
        ("p/0#1", "yes"), ("p/0#2", "yes"), ("p/0#3", "yes"), ("p/1#1", "no"), ("p/1#2", "no"), ("p/1#3", "no"),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    texts = [f"Q\n2+2=4\n#### 4\nCheck.\nFine.\n{Q} Yes", f"{Q} No", f"{STEP.question} Yes"] * 3
    size: dict[str, Any] = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 330, "max_length": 256}
    return str(build_tiny(tmp_path_factory.mktemp("m") / "model", texts, **size, seed=0))


def scored(folder: Path, model: str, verifications: list[Verification] | None = None, **options: Any) -> Any:
    path, context = folder / "t.jsonl", StageContext(None, folder / "unused", 10.0)
    write_records(path, ROWS)
    if verifications is not None:
        options["verifications"] = str(folder / "v.jsonl")
        write_records(options["verifications"], verifications)
    rows = ScoreByVerifier(model, **{"verifier": SOLUTION, **options}).run(str(path), context)
    return list(rows), context.counts


def p_yes(model: str, text: str) -> float:
    """By hand, where both spellings of each verdict are one token."""
    tokenizer, network = load_tokenizer(model), load_policy(model)
    ids = list(tokenizer(text).input_ids)
    with torch.inference_mode():
        probs = torch.softmax(network(input_ids=torch.tensor([ids])).logits[0, -1].double(), -1)
    words = [tokenizer(word, add_special_tokens=False).input_ids for word in (" Yes", " No")]
    assert {len(word) for word in words} == {1}
    return float(probs[words[0][0]] / (probs[words[0][0]] + probs[words[1][0]]))


ONE_SPELLING = VerifierFormat("solution", Q, "Check.", yes=[" Yes"], no=[" No"])


def test_a_direct_score_is_p_yes_behind_the_question(folder: str, tmp_path: Path) -> None:
    rows, counts = scored(tmp_path, folder, verifier=ONE_SPELLING)
    assert [row.id for row in rows] == [row.id for row in ROWS]
    assert rows[2].score == pytest.approx(p_yes(folder, f"Q\n2+2=5\n#### 5\n{Q}"), abs=1e-5)
    assert counts["without_score"] == 0
    assert 0 <= counts["auc"] <= 1


def test_a_verifier_says_which_problems_it_was_trained_on_and_its_scores_say_who_was_seen(
    folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tmp_path / "verifier"
    shutil.copytree(folder, model)
    tokenizer, files = load_tokenizer(folder), {"verify": "a", "generate": ""}
    for name, problem in files.items():
        write_records(tmp_path / f"{name}.jsonl", [Demonstration("v", "Q", " Yes", problem)])
    parts = [DemonstrationExamples(str(tmp_path / f"{name}.jsonl"), 64) for name in files]
    unknown, _ = scored(tmp_path, str(model))
    assert {row.is_seen for row in unknown} == {None}, "its folder does not say"
    write_trained_on(model, VerifierExamples(parts[0], parts[1], 0.25, "token").load(tokenizer), tokenizer,
                     {"path": folder})  # fmt: skip
    assert read_training_problems(str(model)) == {problem_hash("a")}
    rows, _ = scored(tmp_path, str(model))
    assert {(row.problem_id, row.is_seen) for row in rows} == {(row.problem_id, row.problem_id == "a") for row in ROWS}
    steps, _ = scored(tmp_path, str(model), verifier=STEP)
    assert {(row.problem_id, row.is_seen) for row in steps} == {(row.problem_id, row.problem_id == "a") for row in ROWS}
    written = [wrote(row.id, f"Fine.\n{Q} Yes") for row in ROWS]
    for folder_of_hard, seen in ((str(model), {True, False}), ("", {None})):
        hard, _ = scored(tmp_path, folder_of_hard, written, votes="hard")
        assert {row.is_seen for row in hard} == seen
        assert {row.score for row in hard} == {1.0}
    write_records(tmp_path / "s.jsonl", [replace(row, score=0.5) for row in rows if row.problem_id == "a"])
    ranking_by(str(tmp_path / "s.jsonl"), [row for row in ROWS if row.problem_id == "a"], tmp_path)
    assert "1 of 1 problems were in the reward model's training set and look better" in caplog.text


def test_a_verifier_does_not_say_which_problems_it_saw_where_only_some_are_named(
    folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "verify.jsonl")
    write_records(path, [Demonstration("v", "Q", " Yes", "a"), Demonstration("w", "Q", " No")])
    examples = DemonstrationExamples(path, 64).load(load_tokenizer(folder))
    assert [example.problem_id for example in examples] == ["", ""]
    assert "1 of 2 demonstrations name no problem" in caplog.text


def test_rationales_are_averaged_and_one_without_a_verdict_is_missing_not_a_no(folder: str, tmp_path: Path) -> None:
    written = [wrote(row.id, "I do not know.") for row in ROWS[1:]]
    votes = [f"Fine.\n**{Q} Yes**", f"Bad.\n{Q} No", "nothing", f"Good.\n{Q} Yes"]
    written += [wrote("a/0", text, vote) for vote, text in enumerate(votes)]
    rows, counts = scored(tmp_path, folder, written, verifier=ONE_SPELLING)
    asked = "Q\n2+2=4\n#### 4\nCheck.\n"
    probs = [p_yes(folder, asked + text) for text in (f"Fine.\n**{Q}", f"Bad.\n{Q}", f"Good.\n{Q}")]
    assert rows[0].score == pytest.approx(sum(probs) / 3, abs=1e-5)
    assert [row.score for row in rows[1:]] == [None] * 6
    assert (counts["rationales"], counts["without_verdict"], counts["without_score"]) == (10, 7, 6)
    hard, _ = scored(tmp_path, "", written, votes="hard")
    assert hard[0].score == pytest.approx(2 / 3, abs=1e-6)
    first, _ = scored(tmp_path, "", written, votes="hard", max_votes=1)
    assert first[0].score == 1.0


def test_a_question_that_nobody_was_asked_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="nothing was written about 'a/1'"):
        scored(tmp_path, "", [wrote("a/0", f"{Q} Yes")], votes="hard")
    with pytest.raises(BadInput, match="none of 7 solutions gets a score"):
        scored(tmp_path, "", [wrote(row.id, "Hm.") for row in ROWS], votes="hard")
    for options, said in (({"votes": "hard"}, "name them"), ({"votes": "most"}, "stage.votes")):
        with pytest.raises(BadInput, match=said):
            ScoreByVerifier("", SOLUTION, **options)  # type: ignore[arg-type]


def test_a_step_verifier_scores_every_step_or_none_of_a_solution(folder: str, tmp_path: Path) -> None:
    rows, counts = scored(tmp_path, folder, verifier=STEP)
    assert [len(row.scores) for row in rows] == [2, 2, 2, 1, 2, 2, 2]
    assert isinstance(rows[0], StepScores)
    written = [
        Verification(
            f"{row.id}#{n}/0",
            f"{row.id}#{n}",
            row.problem_id,
            digest(f"{row.id}#{n}"),
            "yes",
            f"So.\n{STEP.question} Yes",
            "stop",
        )
        for row in ROWS
        for n in range(1, len(row.steps) + 1)
    ]
    written[3] = Verification("a/1#2/0", "a/1#2", "a", digest("a/1#2"), None, "Hm.", "stop")
    voted, counts = scored(tmp_path, "", written, verifier=STEP, votes="hard")
    assert [row.scores for row in voted[:3]] == [[1.0, 1.0], [], [1.0, 1.0]]
    assert counts["without_score"] == 1


def test_a_verdict_per_step_is_the_mean_share_of_yes_over_critiques(folder: str, tmp_path: Path) -> None:
    """As generative process reward models are read: p(yes) / (p(yes) + p(no)) where each critique of a step gives its
    verdict, whichever it gives, averaged over the critiques."""
    one_spelling = replace(STEP, yes=[" Yes"], no=[" No"])
    critiques = [("Fine.", "Yes"), ("It is 2 + 2.", "No"), ("So.", "Yes")]
    written = [
        Verification(f"{row.id}#{n}/{vote}", f"{row.id}#{n}", row.problem_id, digest(f"{row.id}#{n}"), word.lower(),
                     f"{text} {n}\n{STEP.question} {word}", "stop")
        for row in ROWS
        for n in range(1, len(row.steps) + 1)
        for vote, (text, word) in enumerate(critiques)
    ]  # fmt: skip
    rows, _ = scored(tmp_path, folder, written, verifier=one_spelling)
    for row, solution_of in zip(rows[:2], ROWS[:2], strict=True):
        for n, found in enumerate(row.scores, 1):
            asked = "Q\n" + "".join(solution_of.steps[:n]).rstrip() + "\nCheck.\n"
            probs = [p_yes(folder, f"{asked}{text} {n}\n{STEP.question}") for text, _ in critiques]
            assert found == pytest.approx(sum(probs) / 3, abs=1e-5)
        assert row.scores[0] != row.scores[1]


def test_verifications_of_another_sampling_run_are_refused(tmp_path: Path) -> None:
    """Its trajectories have the same ids and other steps."""
    written = [replace(wrote(row.id, f"So.\n{SOLUTION.question} Yes"), asked="another") for row in ROWS]
    with pytest.raises(BadInput, match=r"'a/0/0' is about another solution than the input's 'a/0'"):
        scored(tmp_path, "", written, votes="hard")
    with pytest.raises(BadInput, match="is about another solution"):
        demonstrations(tmp_path, written)


def ranking_by(path: str, rows: list[Trajectory], folder: Path) -> Ranking:
    """Rank the samples of one problem by the last score."""
    write_records(folder / "ranked.jsonl", rows)
    with ProblemRows(folder / "index") as index:
        (one,) = SampleRows(index, str(folder / "ranked.jsonl"))
        file = ScoreFile(index, path, "verifier", ["last"])
        file.look(one)
        file.settle(StageContext(None, folder / "e.json", 60))
        return file.rankings(one)[0]


def test_what_has_no_score_ranks_last_and_does_not_vote(tmp_path: Path) -> None:
    path = str(tmp_path / "s.jsonl")
    rows = ROWS[:3]
    scores: list[float | None] = [None, 0.1, 0.4]
    write_records(path, [OutcomeScore(row.id, "a", score) for row, score in zip(rows, scores, strict=True)])
    ranking = ranking_by(path, rows, tmp_path)
    assert best_of(rows, ranking.scores_of(rows)) == 0.0  # a/2, which is wrong: no score is not the highest
    assert best_of(rows[:2], ranking.scores_of(rows[:2])) == 1.0  # a/1
    assert ranking.weights_of(rows) == [0.0, 0.1, 0.4]
    assert weighted_vote(rows, ranking.weights_of(rows)) == 0.0  # 4: 0.1, 5: 0.4
    write_records(path, [StepScores(row.id, "a", numbers) for row, numbers in zip(rows, [[], [0.5, 0.2], [0.5, 0.3]],
                                                                                  strict=True)])  # fmt: skip
    steps = ranking_by(path, rows, tmp_path)
    assert steps.weights_of(rows) == [0.0, 0.2, 0.3]


def test_the_mix_is_the_mean_over_verdicts_plus_lambda_times_that_over_solutions(folder: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder)
    sets = {"verify": [Demonstration("v", "Q", " Yes"), Demonstration("w", "Q", " No")],
            "generate": [Demonstration("v", "Q\n", "2+2=4\n#### 4")]}  # fmt: skip
    for name, demonstrated in sets.items():
        write_records(tmp_path / f"{name}.jsonl", demonstrated)
    parts = [DemonstrationExamples(str(tmp_path / f"{name}.jsonl"), 64) for name in sets]
    for unit in ("token", "sequence"):
        examples = VerifierExamples(parts[0], parts[1], 0.25, unit).load(tokenizer)
        assert [one.id for one in examples] == ["verify/v", "verify/w", "generate/v"]
        units = [len(one.ids) - one.prompt_length if unit == "token" else 1 for one in examples]
        assert [len(one.weights) for one in examples] == [len(one.ids) - one.prompt_length for one in examples]
        rows = zip(examples, (2.0, 4.0, 3.0), units, strict=True)  # a loss for every unit of each example
        total = sum(one.weights[0] * loss * n for one, loss, n in rows) / sum(units)
        verify = (2.0 * units[0] + 4.0 * units[1]) / (units[0] + units[1])
        assert total == pytest.approx(verify + 0.25 * 3.0)
    with pytest.raises(BadInput, match="must be above 0"):
        VerifierExamples(parts[0], parts[1], 0.0, "token").load(tokenizer)


def test_the_reward_is_the_score_of_the_stage(folder: str, tmp_path: Path) -> None:
    rows, _ = scored(tmp_path, folder)
    reward = GenerativeVerifierReward(folder, SOLUTION)
    assert [score.outcome for score in reward(ROWS)] == pytest.approx([row.score for row in rows], abs=1e-6)
    assert reward.score_range({}).outcome == (0.0, 1.0)
    with pytest.raises(BadInput, match="whole solutions"):
        GenerativeVerifierReward(folder, STEP)


def test_a_verifier_continues_the_solution_and_a_teacher_is_sent_the_right_answer(folder: str, tmp_path: Path) -> None:
    path = str(tmp_path / "t.jsonl")
    write_records(path, ROWS)
    tokenizer, task = load_tokenizer(folder), WordArithmetic()
    source = VerificationRequests(path, SOLUTION)
    requests = source.load(task, tokenizer)
    assert requests[0].prompt == "Q\n2+2=4\n#### 4\nCheck.\n"
    assert requests[0].prompt_ids == list(tokenizer(requests[0].prompt).input_ids)
    samples = [Sample(text, [], finish) for text, finish in
               ((f"Fine.\n{Q} Yes", "stop"), (f"Fine.\n{Q} Yes", "length"), ("Fine.", "stop"))]  # fmt: skip
    records = source.records(task, tokenizer, requests[0], samples)
    assert [(row.id, row.question_id, row.answer) for row in records] == [
        ("a/0/0", "a/0", "yes"), ("a/0/1", "a/0", None), ("a/0/2", "a/0", None),
    ]  # fmt: skip
    teacher = TeacherRationaleRequests(path, SOLUTION)
    asked = teacher.load(task, None)[0]
    assert "The right final answer is 4." in asked.prompt
    assert asked.prompt.endswith(f'answers it with "Yes" or "No" alone: {Q}')
    assert asked.messages == [{"role": "user", "content": asked.prompt}]
    blind = TeacherRationaleRequests(path, SOLUTION, shows_gold=False).load(task, None)[0]
    assert "right final answer is" not in blind.prompt
    assert read_records(Trajectory, source.inputs()[0]) == ROWS


def test_a_model_that_does_not_answer_the_question_is_warned_of(
    folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, counts = scored(tmp_path, folder)  # random weights: every token is as likely
    assert counts["verdict_mass"] < 0.1
    assert "gives both verdicts together a probability of" in caplog.text


def test_a_solution_without_step_scores_makes_no_pair_and_is_in_no_benchmark(tmp_path: Path) -> None:
    rows = [ROWS[0], ROWS[1], ROWS[2]]
    paths = {name: str(tmp_path / f"{name}.jsonl") for name in ("t", "s", "a")}
    numbers: list[list[float]] = [[], [0.9, 0.8], [0.9, 0.1]]
    write_records(paths["s"], [StepScores(row.id, "a", scores) for row, scores in zip(rows, numbers, strict=True)])
    context = StageContext(None, tmp_path / "o", 10.0)
    distinct = [replace(row, response_ids=[2, 3 + k], step_ends=[1, 2]) for k, row in enumerate(rows)]
    write_records(paths["t"], distinct)
    pairs = list(ProcessPreferences(scores=paths["s"]).run(paths["t"], context))
    assert {name for pair in pairs for name in pair.id.split(">")} <= {"a/1", "a/2"}
    assert context.counts["without_score"] == 1
    judged = [AnnotatedSolution(row.id, row.id, "Q", row.steps, [1.0, label], first, None)
              for row, label, first in zip(rows, (1.0, 1.0, 0.0), (-1, -1, 1), strict=True)]  # fmt: skip
    write_records(paths["a"], judged)
    stage = EvaluatePRMBenchmarks(paths["s"], threshold=0.5)
    found = stage.run(paths["a"], StageContext(None, tmp_path / "o", 10.0))
    assert found["left_out"]["no score was given"] == 1
    assert found["first_error"]["num_rows"] == 2
