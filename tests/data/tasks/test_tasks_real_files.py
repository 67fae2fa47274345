"""Every published file that is there loads whole, with the counts that are known of it."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from espalier.data.answers.numbers import is_equal_number
from espalier.data.examples.token_examples import is_held_out
from espalier.data.records import Problem
from espalier.data.splits import SplitPlan, split_key
from espalier.data.tasks.entailment import LogiQANLI
from espalier.data.tasks.folio import FOLIO
from espalier.data.tasks.gsm8k import GSM8K
from espalier.data.tasks.logic_llm import LogicLLM
from espalier.data.tasks.logical_reading import ARLSAT, LogiQA2, ReClor
from espalier.data.tasks.math import MATH
from espalier.data.tasks.published import PublishedTask
from espalier.data.tasks.short_answers import NQOpen, TriviaQA, TruthfulQA
from espalier.data.tasks.word_problems import SVAMP, ASDiv
from espalier.pipeline.problems.list_problems import describe_problems

FILES: list[tuple[type[PublishedTask], dict[str, Any], str, int]] = [
    (GSM8K, {}, "train", 7473),
    (MATH, {}, "train", 7500),
    (MATH, {"path": "math/MATH"}, "train", 35),
    (SVAMP, {}, "test", 1000),
    (ASDiv, {}, "test", 2215),
    (LogiQA2, {}, "dev", 1241),
    (LogiQANLI, {}, "dev", 300),
    (ReClor, {"path": "reclor/made_up_3_rows.json"}, "dev", 3),
    (ARLSAT, {}, "train", 1630),
    (ARLSAT, {}, "dev", 231),
    (ARLSAT, {"layout": "reclor"}, "dev", 231),
    (FOLIO, {}, "train", 1004),
    (LogicLLM, {"subset": "ProofWriter"}, "train", 1000),
    (LogicLLM, {"subset": "ProofWriter"}, "dev", 600),
    (LogicLLM, {"subset": "LogicalDeduction"}, "train", 1200),
    (NQOpen, {}, "dev", 3610),
    (NQOpen, {}, "test", 1800),
    (TriviaQA, {}, "dev", 1),
    (TruthfulQA, {}, "test", 817),
]


def load(folder: Path, kind: type[PublishedTask], split: str, **settings: Any) -> list[Problem]:
    path = folder / settings.pop("path", "")
    return kind(str(path), **settings).problems(split)


@pytest.mark.parametrize(("kind", "settings", "split", "count"), FILES)
def test_every_row_of_every_file_is_a_problem(
    datasets_dir: Path, kind: type[PublishedTask], settings: dict[str, Any], split: str, count: int
) -> None:
    problems = load(datasets_dir, kind, split, **settings)
    assert len(problems) == count
    assert len({problem.id for problem in problems}) == count
    assert all(problem.question for problem in problems)
    assert sum(not problem.gold for problem in problems) == (2 if kind is MATH and count == 7500 else 0)


def test_math_levels_subjects_and_boxes(datasets_dir: Path) -> None:
    problems = load(datasets_dir, MATH, "train")
    assert Counter(problem.info["level"] for problem in problems)[None] == 2
    assert len({problem.info["subject"] for problem in problems}) == 7
    golds = [re.sub(r"\\.", "", str(problem.gold)) for problem in problems]
    assert all(gold.count("{") == gold.count("}") for gold in golds)
    bare = [p.gold for p in problems if re.search(r"\\boxed [^{]", p.info["solution"])]
    assert sorted(bare) == ["2", "9"]
    table = {problem.question: problem.gold for problem in problems}
    archive = load(datasets_dir, MATH, "train", path="math/MATH")
    assert all(table[problem.question] == problem.gold for problem in archive)
    assert Counter(problem.info["subject"] for problem in archive) == dict.fromkeys(
        {problem.info["subject"] for problem in problems}, 5
    )


def test_svamp_and_asdiv_numbers(datasets_dir: Path) -> None:
    svamp = load(datasets_dir, SVAMP, "test")
    assert all(re.fullmatch(r"-?\d+", str(problem.gold)) for problem in svamp)
    assert Counter(problem.info["subject"] for problem in svamp)["Common-Division"] == 166
    asdiv = load(datasets_dir, ASDiv, "test")
    assert sum(not problem.info["unit"] for problem in asdiv) == 179  # -(1/3) has brackets and no unit
    assert sum(ASDiv("x").kind_of(problem.gold) != "response_number" for problem in asdiv) == 131


def test_logiqa_repeats_are_kept_and_counted(datasets_dir: Path) -> None:
    problems = load(datasets_dir, LogiQA2, "dev")
    counts = describe_problems(problems)
    assert (counts["repeated"], counts["repeated_options"], counts["repeated_ids"]) == (3, 2, 0)
    assert sum(any(option.startswith("B. t. toxins") for option in problem.options) for problem in problems) == 1


def test_ar_lsat_layouts_agree_but_for_two_questions(datasets_dir: Path) -> None:
    passages = {p.id: p for p in load(datasets_dir, ARLSAT, "dev")}
    table = {p.id: p for p in load(datasets_dir, ARLSAT, "dev", layout="reclor")}
    assert passages.keys() == table.keys()
    right = {
        layout: {key: p.options["ABCDE".index(str(p.gold))] for key, p in problems.items()}
        for layout, problems in (("passages", passages), ("table", table))
    }
    differing = [key for key in passages if right["passages"][key].split() != right["table"][key].split()]
    assert differing == ["ar_lsat-dev-201210_3-G_2_11"]
    sizes = Counter(len(problem.options) for problem in load(datasets_dir, ARLSAT, "train"))
    assert sizes == {4: 45, 5: 1585}


def test_folio_and_logic_llm_answers(datasets_dir: Path) -> None:
    assert Counter(p.gold for p in load(datasets_dir, FOLIO, "train")) == {"True": 388, "False": 286, "Unknown": 330}
    assert Counter(p.gold for p in load(datasets_dir, LogicLLM, "dev")) == {"A": 200, "B": 200, "C": 200}
    assert {tuple(p.options) for p in load(datasets_dir, LogicLLM, "dev")} == {("True", "False", "Unknown")}
    deduction = load(datasets_dir, LogicLLM, "train", subset="LogicalDeduction")
    assert Counter(len(problem.options) for problem in deduction) == {3: 240, 5: 400, 7: 560}
    assert not any(re.match(r"[A-G]\)", option) for problem in deduction for option in problem.options)


def test_short_answers_keep_their_aliases(datasets_dir: Path) -> None:
    golds = [p.gold for p in load(datasets_dir, NQOpen, "dev")]
    assert all(isinstance(gold, list) for gold in golds)
    assert sum(len(gold) > 1 for gold in golds) == 1534
    assert all(answer.strip() for p in load(datasets_dir, TruthfulQA, "test") for answer in p.gold)


def test_a_shuffled_order_of_options_keeps_the_right_text(datasets_dir: Path) -> None:
    plain = load(datasets_dir, ARLSAT, "train")
    shuffled = load(datasets_dir, ARLSAT, "train", option_order="seeded", option_seed=1)
    for before, after in zip(plain, shuffled, strict=True):
        assert before.options["ABCDE".index(str(before.gold))] == after.options["ABCDE".index(str(after.gold))]


def test_shards_of_a_real_file_are_a_partition(datasets_dir: Path) -> None:
    everything = {problem.id for problem in load(datasets_dir, NQOpen, "dev")}
    shards = [{p.id for p in load(datasets_dir, NQOpen, "dev", shard=i, num_shards=4)} for i in range(4)]
    assert set.union(*shards) == everything
    assert sum(len(shard) for shard in shards) == len(everything)


PASSAGES: list[tuple[type[PublishedTask], dict[str, Any], int]] = [
    (ARLSAT, {}, 275),
    (FOLIO, {}, 340),
    (LogicLLM, {"subset": "LogicalDeduction"}, 298),
    (LogicLLM, {"subset": "ProofWriter"}, 875),
]


@pytest.mark.parametrize(("kind", "settings", "num_passages"), PASSAGES)
def test_no_passage_of_a_real_file_stands_on_both_sides(
    datasets_dir: Path, kind: type[PublishedTask], settings: dict[str, Any], num_passages: int
) -> None:
    """Neither of a held-out part nor of a drawn split."""
    problems = load(datasets_dir, kind, "train", **settings)
    assert len({problem.passage_id for problem in problems}) == len({p.context for p in problems}) == num_passages
    held = [is_held_out(split_key(problem), 0.1) for problem in problems]
    assert 0.05 < sum(held) / len(held) < 0.15
    parts = [{p.context for p, is_held in zip(problems, held, strict=True) if is_held == side} for side in (0, 1)]
    assert not parts[0] & parts[1]
    plan = SplitPlan({"most": len(problems) - len(problems) // 5, "rest": len(problems) // 5})
    drawn = [load(datasets_dir, kind, "most", **settings, splits=plan)]
    drawn.append(load(datasets_dir, kind, "rest", **settings, splits=plan))
    assert sum(map(len, drawn)) == len(problems)
    assert abs(len(drawn[1]) - len(problems) // 5) < 30
    assert not {p.context for p in drawn[0]} & {p.context for p in drawn[1]}


def test_gsm8k_has_the_known_sizes_with_a_dev_split(datasets_dir: Path) -> None:
    plan = SplitPlan({"train": 7100, "dev": 373})
    assert [len(load(datasets_dir, GSM8K, split, splits=plan)) for split in ("train", "dev")] == [7100, 373]


def test_gsm8k_solutions_end_in_their_gold(datasets_dir: Path) -> None:
    task = GSM8K(str(datasets_dir))
    for problem in task.problems("train"):
        assert "<<" not in problem.info["solution"]
        assert is_equal_number(str(problem.gold), str(task.grade(problem.gold, problem.info["solution"]).answer))
