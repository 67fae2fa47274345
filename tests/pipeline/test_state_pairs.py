"""Partial solutions over partial solutions, by hand and against the definition."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from espalier.data.jsonl import read_records, write_records
from espalier.data.left_out import LeftOut, count_left_out
from espalier.data.records import BadInput, PreferencePair, StepScores, StepValues, Trajectory
from espalier.pipeline.pairs.build_preferences import PartialPreferences, StepPreferences
from espalier.pipeline.pairs.state_pairs import PartialRule, partial_pairs, prefixes, step_pairs
from espalier.pipeline.stage import StageContext
from espalier.rewards.aggregate import BadAggregate


def trajectory(number: int, is_correct: bool, *tokens: int) -> Trajectory:
    """A trajectory of one-token steps."""
    steps = [f"{token}\n" for token in tokens]
    ends = list(range(1, len(tokens) + 1))
    name = f"p/{number}"
    return Trajectory(name, "p", "Q\n", "".join(steps), steps, [90], list(tokens), ends, "stop", "7", None, is_correct)


GOOD = trajectory(0, True, 1, 2, 3)
BAD = trajectory(1, False, 1, 4)
VALUES = {"p/0": [0.5, 0.75, 1.0], "p/1": [0.5, 0.0]}


def paired(
    group: Sequence[Trajectory], values: dict[str, list[float]], seed: int = 0, **rule: Any
) -> list[PreferencePair]:
    return partial_pairs(group, values, PartialRule(**rule), random.Random(seed))


def ids_of(pairs: Sequence[PreferencePair]) -> list[str]:
    return [pair.id for pair in pairs]


def told(*rows: Any, **rule: Any) -> list[tuple[int, float]]:
    """(steps, value) of the prefixes that a rule reads."""
    group = [row for row in rows if isinstance(row, Trajectory)]
    return [(prefix.num_steps, prefix.value) for prefix in prefixes(group, VALUES, PartialRule(**rule))]


def test_partial_pairs_are_better_prefixes_over_worse_ones_of_other_solutions() -> None:
    assert ids_of(paired([GOOD, BAD], VALUES, margin=0.4)) == ["p/0#3>p/1#2", "p/0#2>p/1#2"]


def test_a_partial_pair_written_out() -> None:
    pair = paired([GOOD, BAD], VALUES, margin=0.4)[1]
    assert pair == PreferencePair(
        "p/0#2>p/1#2", "p", "partial", "Q\n", "1\n2\n", "1\n4\n", [90], [1, 2], [1, 4], 0.75, 0.0
    )


def test_a_prefix_and_its_own_continuation_meet_only_if_asked() -> None:
    assert ids_of(paired([GOOD], VALUES, margin=0.4)) == []
    assert ids_of(paired([GOOD], VALUES, margin=0.4, pairs_nested=True)) == ["p/0#3>p/0#1"]


def test_a_shared_prefix_is_one_prefix_of_the_trajectory_sampled_first() -> None:
    assert told(BAD, GOOD) == [(1, 0.5), (2, 0.0), (2, 0.75), (3, 1.0)]


def test_values_accumulate_over_the_steps_so_far() -> None:
    assert told(GOOD, how="product") == [(1, 0.5), (2, 0.375), (3, 0.375)]
    assert told(GOOD, how="sum") == [(1, 0.5), (2, 1.25), (3, 2.25)]
    assert told(GOOD, how="product", threshold=0.5) == [(1, 0.0), (2, 0.0), (3, 0.0)]
    assert told(GOOD, how="product", threshold=0.4) == [(1, 1.0), (2, 1.0), (3, 1.0)]


def test_a_low_value_holds_for_all_that_follows() -> None:
    assert told(GOOD, absorbs_at=0.5) == [(1, 0.5), (2, 0.5), (3, 0.5)]
    assert told(GOOD, absorbs_at=0.5, absorbed="dropped") == [(1, 0.5)]
    assert told(GOOD, absorbs_at=0.4) == [(1, 0.5), (2, 0.75), (3, 1.0)]


def test_steps_outside_the_range_are_not_read_but_count_for_what_follows() -> None:
    assert told(GOOD, first_step=2, last_step=2, how="product") == [(2, 0.375)]


def test_full_solutions_with_the_partial_ones_without_them_or_apart() -> None:
    assert told(GOOD, full="without") == [(1, 0.5), (2, 0.75)]
    assert ids_of(paired([GOOD, BAD], VALUES, margin=0.4, full="apart")) == ["p/0#3>p/1#2"]
    assert ids_of(paired([GOOD, BAD], VALUES, margin=0.2, full="without", pairs_nested=True)) == ["p/0#2>p/0#1"]


def test_the_earlier_or_the_later_side_is_discounted_for_every_step_between() -> None:
    """Chosen has 3 steps and value 1, rejected 2 steps and value 0.4: one step apart."""
    values = {"p/0": [0.0, 0.0, 1.0], "p/1": [0.4, 0.4]}

    def compared(margin: float, discounts: str) -> list[tuple[float, float]]:
        pairs = paired([GOOD, BAD], values, margin=margin, decay=0.5, discounts=discounts)
        return [(pair.chosen_score, pair.rejected_score) for pair in pairs if pair.id == "p/0#3>p/1#2"]

    assert compared(0.3, "later") == []
    assert compared(0.05, "later") == [(0.5, 0.4)]
    assert compared(0.3, "earlier") == [(1.0, 0.2)]


def test_sides_that_end_far_apart_in_their_solutions_do_not_meet() -> None:
    """Two of three steps against two of two: a third apart."""
    assert ids_of(paired([GOOD, BAD], VALUES, margin=0.4, max_position_gap=0.33)) == ["p/0#3>p/1#2"]
    assert len(paired([GOOD, BAD], VALUES, margin=0.4, max_position_gap=0.34)) == 2


def test_a_gap_of_just_the_margin_makes_no_pair() -> None:
    assert ids_of(paired([GOOD, BAD], VALUES, margin=0.75)) == ["p/0#3>p/1#2"]


def test_caps_keep_the_best_chosen_and_draw_the_rest_by_the_seed() -> None:
    group = [trajectory(k, False, 10 + k, 20 + k) for k in range(8)]
    values = {t.id: [k / 10, k / 10] for k, t in enumerate(group)}
    assert {i.split("#")[0] for i in ids_of(paired(group, values, margin=0.0, max_chosen=2))} == {"p/7"}
    drawn = {tuple(ids_of(paired(group, values, seed, margin=0.0, max_rejected=1, max_pairs=3))) for seed in range(9)}
    assert len(drawn) > 3
    assert all(len(set(ids)) == 3 for ids in drawn)
    once = paired(group, values, margin=0.0, max_rejected=1)
    assert len({pair.id.split(">")[0] for pair in once}) == len(once)


@pytest.mark.parametrize("seed", range(25))
def test_the_rule_equals_its_definition(seed: int) -> None:
    rng = random.Random(seed)
    group = [trajectory(k, False, *(rng.randrange(3) for _ in range(rng.randrange(1, 5)))) for k in range(5)]
    table: dict[tuple[int, ...], float] = {}  # a state has one value, whoever reaches it
    values = {
        t.id: [table.setdefault(tuple(t.response_ids[:end]), rng.randrange(5) / 4) for end in t.step_ends]
        for t in group
    }
    margin, gap = rng.choice([0.1, 0.3]), rng.choice([0.3, 1.0])
    expected = set()
    for a in table:
        for b in table:
            shares = [{len(x) / len(t.response_ids) for t in group if tuple(t.response_ids[: len(x)]) == x}
                      for x in (a, b)]  # fmt: skip
            if table[a] - table[b] > margin + 1e-9 and a[: len(b)] != b and b[: len(a)] != a:
                first = [next(len(x) / len(t.response_ids) for t in group if tuple(t.response_ids[: len(x)]) == x)
                         for x in (a, b)]  # fmt: skip
                assert first[0] in shares[0]
                if abs(first[0] - first[1]) <= gap + 1e-9:
                    expected.add((a, b))
    pairs = paired(group, values, margin=margin, max_position_gap=gap)
    assert {(tuple(p.chosen_ids), tuple(p.rejected_ids)) for p in pairs} == expected
    assert len({p.id for p in pairs}) == len(pairs) == len(expected)


def test_all_next_steps_of_a_state_that_differ_and_the_widest_gaps_under_a_cap() -> None:
    group = [trajectory(k, False, 1, 2 + k) for k in range(3)]
    values = {"p/0": [0.5, 0.9], "p/1": [0.5, 0.5], "p/2": [0.5, 0.2]}
    assert ids_of(step_pairs(group, values, 0.1)) == ["p/0#1>p/2#1"]
    assert ids_of(step_pairs(group, values, 0.1, "all")) == ["p/0#1>p/1#1", "p/0#1>p/2#1", "p/1#1>p/2#1"]
    assert ids_of(step_pairs(group, values, 0.1, "all", 2)) == ["p/0#1>p/1#1", "p/0#1>p/2#1"]
    assert step_pairs(group, values, 0.1, "all", 0) == step_pairs(group, values, 0.1, "all")


# --- the stages ---------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Trajectories, their values, and the same numbers as a reward model's scores; one trajectory has none."""
    names = {name: str(tmp_path / f"{name}.jsonl") for name in ("trajectories", "values", "scores")}
    write_records(names["trajectories"], [GOOD, BAD, trajectory(2, False, 9)])
    write_records(names["values"], [
        StepValues(t.id, "p", t.prompt, t.steps, t.prompt_ids, t.response_ids, t.step_ends, VALUES[t.id],
                   [0] * len(t.steps), [4] * len(t.steps), t.is_correct)
        for t in (GOOD, BAD)
    ])  # fmt: skip
    write_records(names["scores"], [StepScores(t.id, "p", VALUES[t.id]) for t in (GOOD, BAD)])
    return names


@pytest.mark.parametrize("stage", [PartialPreferences, StepPreferences])
def test_values_and_scores_make_the_same_pairs_and_what_has_none_is_counted(stage: Any, files: dict[str, str]) -> None:
    context = StageContext(None, Path("unused"), 10.0)
    pairs = list(stage(values=files["values"], margin=0.4).run(files["trajectories"], context))
    assert pairs
    assert context.counts["unknown"] == 1
    assert list(stage(scores=files["scores"], margin=0.4).run(files["trajectories"], context)) == pairs


def test_a_step_pair_needs_the_values_of_its_two_steps_alone(files: dict[str, str]) -> None:
    first, *others = read_records(StepValues, files["values"])
    stage = StepPreferences(values=files["values"], margin=0.4)
    made = list(stage.run(files["trajectories"], StageContext(None, Path("unused"), 10.0)))
    assert len(made) == 1
    for values, pairs in (([None, 0.75, 1.0], made), ([0.5, None, 1.0], [])):
        write_records(files["values"], [replace(first, values=values), *others])
        context = StageContext(None, Path("unused"), 10.0)
        with count_left_out() as counted:
            assert list(stage.run(files["trajectories"], context)) == pairs
        assert counted == [LeftOut(files["values"], "lead to a state whose value is not known", 1, 5)]
        assert context.counts["unknown"] == 1


def test_a_trajectory_with_an_unknown_value_makes_no_partial_pair(files: dict[str, str]) -> None:
    stage = PartialPreferences
    first, *others = read_records(StepValues, files["values"])
    context = StageContext(None, Path("unused"), 10.0)
    write_records(files["values"], [replace(first, values=[None, *first.values[1:]]), *others])
    with count_left_out() as counted:
        unknown = list(stage(values=files["values"], margin=0.4).run(files["trajectories"], context))
    reason = "pass through a state whose value is not known"
    assert counted == [LeftOut(files["values"], reason, 1, 2)]
    assert context.counts["unknown"] == 2
    write_records(files["values"], others)
    assert list(stage(values=files["values"], margin=0.4).run(files["trajectories"], context)) == unknown


@pytest.mark.parametrize("stage", [PartialPreferences, StepPreferences])
@pytest.mark.parametrize("given", [{}, {"values": "a", "scores": "b"}])
def test_values_or_scores_must_be_named_and_not_both(stage: Any, given: dict[str, str]) -> None:
    with pytest.raises(BadInput, match=r"name one of stage\.values"):
        list(stage(**given).run("unused", StageContext(None, Path("unused"), 10.0)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"absorbed": "kept"}, "stage.absorbed must be one of capped, dropped"),
        ({"discounts": "both"}, "stage.discounts must be one of"),
        ({"full": "half"}, "stage.full must be one of"),
        ({"decay": 0.0}, "stage.decay must be above 0"),
        ({"first_step": 0}, "stage.first_step must be 1 or more"),
        ({"first_step": 3, "last_step": 2}, "at most stage.last_step"),
        ({"max_rejected": -2}, "stage.max_rejected must be 0"),
        ({"part": "dev"}, "stage.part must be one of all, train, held_out"),
        ({"held_out_share": 2.0}, "share from 0 to 1"),
    ],
)
def test_settings_that_say_nothing_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        PartialPreferences(values="v", **changes)


def test_an_unknown_aggregate_is_refused() -> None:
    with pytest.raises(BadAggregate, match="no aggregate 'median'"):
        PartialPreferences(values="v", how="median")
