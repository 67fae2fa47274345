"""Right solutions to imitate: RestEM, rejection sampling, best of n, by hand; and all builders on recorded samples."""

import gzip
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from espalier.data.jsonl import write_records
from espalier.data.records import BadInput, StepScores, Trajectory
from espalier.pipeline.pairs.build_preferences import OutcomePreferences, PartialPreferences, ProcessPreferences
from espalier.pipeline.problems.select_demonstrations import SelectDemonstrations, equations
from espalier.pipeline.stage import StageContext


def solution(identity: str, text: str, is_correct: bool = True) -> Trajectory:
    steps = text.splitlines(keepends=True)
    problem = identity.partition("/")[0]
    return Trajectory(identity, problem, "Q\n", text, steps, [1], [2], [1], "stop", "7", "7", is_correct)


ROWS = [
    solution("a/0", "2+2=4\n#### 4"),
    solution("a/1", "Four is 2 + 2 = $4.\n#### 4"),
    solution("a/2", "3+1=4\n#### 4"),
    solution("a/3", "wrong\n", False),
    solution("a/10", "2+2=4\n#### 4"),
    solution("b/0", "no\n", False),
    solution("c/0", "one line"),
]


def selected(tmp_path: Path, rows: list[Trajectory], scores: dict[str, float] | None = None, **options: Any) -> Any:
    """(ids, counts)"""
    path, context = tmp_path / "t.jsonl", StageContext(None, Path("unused"), 10.0)
    write_records(path, rows)
    if scores:
        options["scores"] = str(tmp_path / "s.jsonl")
        found = {row.id: row for row in rows}
        write_records(options["scores"], [StepScores(i, found[i].problem_id, [1.0] * (len(found[i].steps) - 1) + [s])
                                          for i, s in scores.items()])  # fmt: skip
    return [row.id for row in SelectDemonstrations(**options).run(str(path), context)], context.counts


def test_each_text_of_a_problem_once_and_the_first_stays(tmp_path: Path) -> None:
    ids, counts = selected(tmp_path, ROWS)
    assert ids == ["a/0", "a/1", "a/2", "c/0"]
    assert {name: counts[name] for name in ("trajectories", "right", "repeated", "problems", "problems_covered")} == {
        "trajectories": 7, "right": 5, "repeated": 1, "problems": 3, "problems_covered": 2}  # fmt: skip


def test_restem_takes_the_first_right_ones_in_sampled_order_repeats_too(tmp_path: Path) -> None:
    assert selected(tmp_path, ROWS, max_per_problem=10, distinct_by="none")[0] == ["a/0", "a/1", "a/2", "a/10", "c/0"]
    assert selected(tmp_path, ROWS, max_per_problem=2, distinct_by="none")[0] == ["a/0", "a/1", "c/0"]


def test_rejection_sampling_takes_one_of_each_list_of_equations(tmp_path: Path) -> None:
    assert selected(tmp_path, ROWS, distinct_by="equations")[0] == ["a/0", "a/2", "c/0"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("48/2 = 24 and <<48+24=72>>72", ("48/2=24", "48+24=72")),
        ("He pays $1,200 - 200 = $1,000.", ("1200-200=1000",)),
        ("x = 5", ()),
        ("(2 + 3) * 4 = 20\n20 / 5 = 4", ("(2+3)*4=20", "20/5=4")),
        ("50% * 10 = 5", ("50*10=5",)),
        ("no numbers", ()),
        ("=" * 20_000, ()),
        ("1 " * 20_000, ()),
    ],
)
def test_equations_by_hand(text: str, found: tuple[str, ...]) -> None:
    assert equations(text) == found


SCORES = {"a/0": 0.2, "a/1": 0.9, "a/2": 0.5, "a/10": 0.7, "c/0": 0.1}


def test_the_best_by_a_reward_model(tmp_path: Path) -> None:
    assert selected(tmp_path, ROWS, SCORES, order="best", max_per_problem=2)[0] == ["a/1", "a/10", "c/0"]
    assert selected(tmp_path, ROWS, SCORES, order="best", max_per_problem=3)[0] == ["a/1", "a/2", "a/10", "c/0"]


def test_drawn_by_the_seed_whatever_the_order_of_the_rows(tmp_path: Path) -> None:
    rows = [solution(f"a/{k}", f"{k}\n") for k in range(20)]
    first = selected(tmp_path, rows, order="drawn", max_per_problem=5)[0]
    assert selected(tmp_path, random.Random(1).sample(rows, 20), order="drawn", max_per_problem=5)[0] == first
    assert selected(tmp_path, rows, order="drawn", max_per_problem=5, seed=1)[0] != first


def test_short_ones_and_other_parts_take_no_part(tmp_path: Path) -> None:
    assert selected(tmp_path, ROWS, min_steps=2)[0] == ["a/0", "a/1", "a/2"]
    rows = [solution(f"q{k}/0", "x") for k in range(30)]
    train, held_out = (selected(tmp_path, rows, part=part, held_out_share=0.3)[0] for part in ("train", "held_out"))
    assert held_out
    assert sorted(train + held_out) == sorted(row.id for row in rows)


def test_nothing_right_is_no_demonstration(tmp_path: Path) -> None:
    assert selected(tmp_path, [ROWS[3]])[0] == []
    assert selected(tmp_path, [])[0] == []


@pytest.mark.parametrize("options", [{"order": "best"}, {"scores": "s"}, {"order": "first"}, {"distinct_by": "id"},
                                     {"max_per_problem": -1}])  # fmt: skip
def test_settings_that_say_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=r"stage\."):
        SelectDemonstrations(**options)


# --- recorded samples with a reward model's scores ----------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(datasets_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """100 problems of MATH with 8 solutions each and one score a solution; their bytes stand for tokens."""
    folder = tmp_path_factory.mktemp("recorded")
    rows, scores = [], []
    with gzip.open(datasets_dir / "recorded_outputs" / "qwen25math_math_cot_100x8.jsonl.gz", "rt") as file:
        for line in file:
            row = json.loads(line)
            for k, text in enumerate(row["code"]):
                steps = [step + "\n\n" for step in text.split("\n\n")]
                ends, total = [], 0
                for step in steps:
                    total += len(step.encode())
                    ends.append(total)
                made = solution(f"{row['idx']}/{k}", "".join(steps), row["score"][k])
                ids = list("".join(steps).encode())
                rows.append(replace(made, steps=steps, step_ends=ends, response_ids=ids))
                share = 1 / (1 + 2.718281828 ** -row["pred_score"][k][0])
                scores.append(StepScores(made.id, made.problem_id, [1.0] * (len(steps) - 1) + [share]))
    write_records(folder / "t.jsonl", rows)
    write_records(folder / "s.jsonl", scores)
    return folder / "t.jsonl", folder / "s.jsonl"


def test_recorded_samples_make_every_pair_by_outcome(recorded: tuple[Path, Path]) -> None:
    context = StageContext(None, Path("unused"), 10.0)
    pairs = list(OutcomePreferences().run(str(recorded[0]), context))
    sides: dict[str, dict[bool, set[str]]] = {}
    for line in recorded[0].read_text().splitlines():
        row = json.loads(line)
        problem = sides.setdefault(row["problem_id"], {True: set(), False: set()})
        problem[row["is_correct"]].add(row["response"])
    assert context.counts["read"] == 800
    assert context.counts["problems"] == 100
    assert len(pairs) == sum(len(group[True]) * len(group[False]) for group in sides.values()) > 0
    assert all(pair.chosen in sides[pair.problem_id][True] for pair in pairs)
    assert all(pair.rejected in sides[pair.problem_id][False] for pair in pairs)
    assert len({pair.id for pair in pairs}) == len(pairs)


def test_recorded_samples_ranked_by_their_reward_model(recorded: tuple[Path, Path]) -> None:
    context = StageContext(None, Path("unused"), 10.0)
    path, scores = map(str, recorded)
    everything = list(ProcessPreferences(scores=scores, margin=0.3, wrong_margin=0.3).run(path, context))
    assert all(p.chosen_score - p.rejected_score > 0.3 for p in everything if p.kind != "process")
    best = ProcessPreferences(scores=scores, margin=0.3, max_chosen=1, max_rejected=1, over_correct="none")
    for pair in best.run(path, context):
        rivals = [p for p in everything if p.problem_id == pair.problem_id and p.kind == "process"]
        assert pair.chosen_score == max(p.chosen_score for p in rivals)
        assert pair.rejected_score == max(p.rejected_score for p in rivals)
    partial = list(PartialPreferences(scores=scores, margin=0.3, max_rejected=1).run(path, context))
    assert all(p.chosen.encode() == bytes(p.chosen_ids) for p in partial)
