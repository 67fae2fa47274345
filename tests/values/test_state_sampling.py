"""Which states are cut: the published samplers by hand, shards without a remainder, the order of the prefix tree."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from espalier.data.jsonl import write_records
from espalier.data.prefix_tree import least_prompt_tokens, num_distinct_tokens, shared_length, tree_order
from espalier.data.records import BadInput, State, Trajectory
from espalier.data.splits import shard_of
from espalier.data.token_tree import TokenTree
from espalier.models.load import load_policy
from espalier.pipeline.stage import StageContext
from espalier.pipeline.values.cut_states import CutStates, with_logprobs
from espalier.values.state_sampling import StateSampler

CONF = Path(__file__).resolve().parent.parent.parent / "conf"


def trajectory(steps: Sequence[str], name: str = "p/0") -> Trajectory:
    """A step a token."""
    ids = list(range(1, len(steps) + 1))
    return Trajectory(
        name, name.partition("/")[0], "Q\n", "".join(steps), list(steps), [90], ids, ids, "stop", "7", "7", True
    )


TEN = trajectory([f"s{number}\n" for number in range(10)])
REACT = trajectory(
    [
        "First thought here\n",
        "Action 1: look up the rule\n",
        "Observation 1: the rule says so\n",
        "Thought 2: so it follows\n",
        "Action 2: Finish[The answer is B.]",
    ]
)


def steps_of(sampler: StateSampler, one: Trajectory = TEN) -> list[int]:
    return [state.step for state in sampler.states(one)]


def test_by_default_every_state_between_prompt_and_end_is_cut() -> None:
    assert steps_of(StateSampler()) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert steps_of(StateSampler(first_step=0)) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_ratios_count_the_steps_without_the_last() -> None:
    """Nine candidates: int(9 * 0.2) = 1 is left out at the start, those from int(9 * 0.8) = 7 on at the end."""
    assert steps_of(StateSampler(start_ratio=0.2)) == [2, 3, 4, 5, 6, 7, 8, 9]
    assert steps_of(StateSampler(end_ratio=0.8)) == [1, 2, 3, 4, 5, 6, 7]
    assert steps_of(StateSampler(start_ratio=1.0)) == []


def test_states_whose_next_step_is_sure_are_left_out() -> None:
    """Steps of two tokens, of probabilities 1, 0.9 x 0.9, 0.5 x 1 and 0.05 x 1: others have 0, 0.19, 0.5 and 0.95."""
    steps = ["a\n", "b\n", "c\n", "d\n"]
    two = replace(trajectory(steps), response_ids=list(range(8)), step_ends=[2, 4, 6, 8],
                  logprobs=[0.0, 0.0, *map(math.log, (0.9, 0.9, 0.5, 1.0, 0.05, 1.0))])  # fmt: skip
    assert steps_of(StateSampler(first_step=0, smallest_alternative=0.2), two) == [2, 3]
    assert steps_of(StateSampler(first_step=0, smallest_alternative=0.18), two) == [1, 2, 3]
    with pytest.raises(BadInput, match="trajectory 'p/0' has no log-probs of its tokens: set stage"):
        steps_of(StateSampler(smallest_alternative=0.2))


def test_log_probs_that_were_not_kept_are_those_of_the_policy(tiny_policy: Path) -> None:
    """Row by row by the network alone; what was kept stays."""
    kept = replace(TEN, id="p/1", logprobs=[0.0] * 10)
    short = replace(trajectory(["a", "b"], "p/2"), prompt_ids=[7, 8, 9])
    problems = [[(0, TEN), (2, kept)], [(1, short)]]
    found = [row for placed in with_logprobs(problems, load_policy(str(tiny_policy))) for _, row in placed]
    assert found[1] == kept
    model = load_policy(str(tiny_policy)).eval()
    for before, after in ((TEN, found[0]), (short, found[2])):
        ids, first = torch.tensor(before.prompt_ids + before.response_ids), len(before.prompt_ids)
        with torch.no_grad():
            logs = model(ids.unsqueeze(0)).logits[0].double().log_softmax(-1)
        wanted = [float(logs[place - 1, ids[place]]) for place in range(first, len(ids))]
        assert after == replace(before, logprobs=after.logprobs)
        assert after.logprobs == pytest.approx(wanted, abs=1e-4)


def test_a_ratio_in_decimals_means_the_whole_number_it_says() -> None:
    """In floating point 0.29 * 100 is 28.999999999999996."""
    long = trajectory(["x"] * 101)
    assert steps_of(StateSampler(start_ratio=0.29), long)[0] == 30


def test_short_trajectories_are_left_out() -> None:
    assert steps_of(StateSampler(min_steps=10)) == list(range(1, 10))
    assert steps_of(StateSampler(min_steps=11)) == []


def test_each_state_is_kept_with_its_probability_whatever_stands_around_it() -> None:
    many = [replace(TEN, id=f"p/{number}") for number in range(300)]
    sampler = StateSampler(keep_ratio=0.4, seed=3)
    kept = [[state.id for state in sampler.states(one)] for one in many]
    assert 0.36 < sum(map(len, kept)) / (9 * 300) < 0.44
    assert kept[7] == [state.id for state in StateSampler(keep_ratio=0.4, seed=3).states(many[7])]
    assert kept != [[state.id for state in StateSampler(keep_ratio=0.4, seed=4).states(one)] for one in many]
    assert steps_of(StateSampler(keep_ratio=0.0, first_step=0)) == [0]


def test_states_are_filtered_by_the_type_of_their_last_step() -> None:
    assert steps_of(StateSampler(), REACT) == [1, 2, 3, 4]
    assert steps_of(StateSampler(step_types=["Thought", "Observation"]), REACT) == [1, 3, 4]
    assert steps_of(StateSampler(step_types=["Action"]), REACT) == [2]


def test_types_filter_after_positions_are_counted_and_removed_actions_before() -> None:
    """Candidates 1 2 3 4, two left out: 3 4. Without the action: 1 3 4, int(3 * 0.5) = 1 left out: 3 4."""
    assert steps_of(StateSampler(start_ratio=0.5, step_types=["Observation"]), REACT) == [3]
    assert steps_of(StateSampler(start_ratio=0.5, removes_actions=True), REACT) == [3, 4]
    assert steps_of(StateSampler(start_ratio=0.25, removes_actions=True), REACT) == [1, 3, 4]
    assert "Action 1" in StateSampler(removes_actions=True).states(REACT)[1].prefix


def test_an_unlabelled_first_step_may_be_left_out_of_the_count() -> None:
    """REACT's first step bears no label. Labelled candidates: 2 3 4; int(3 * 0.4) = 1 is left out."""
    assert steps_of(StateSampler(labelled_only=True), REACT) == [2, 3, 4]
    assert steps_of(StateSampler(labelled_only=True, start_ratio=0.4), REACT) == [3, 4]
    labelled = trajectory(["Thought 1: so it is\n", *REACT.steps[1:]])
    assert steps_of(StateSampler(labelled_only=True), labelled) == [1, 2, 3, 4]


def test_malformed_responses_may_give_no_states() -> None:
    twice = trajectory([*REACT.steps, "\nAction 3: Finish[The answer is A.]"])
    never = trajectory(REACT.steps[:-1])
    sampler = StateSampler(rejects_malformed=True, first_step=0)
    assert [steps_of(sampler, one) for one in (REACT, twice, never)] == [[0, 1, 2, 3, 4], [], []]


def test_more_than_the_last_step_may_be_left_out() -> None:
    assert steps_of(StateSampler(drop_last=2)) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert steps_of(StateSampler(drop_last=10)) == []
    assert steps_of(StateSampler(drop_last=12, first_step=0)) == [0]


def test_the_middle_state_alone() -> None:
    """Nine candidates: the one at int(9 / 2) = 4, step 5; of the three from int(9 * 0.7) = 6 on, step 8."""
    assert steps_of(StateSampler(which="middle")) == [5]
    assert steps_of(StateSampler(which="middle", start_ratio=0.7)) == [8]
    assert steps_of(StateSampler(which="middle"), trajectory(["a"])) == []


@pytest.mark.parametrize("name", ["cut_states_sampled", "cut_states_without_actions"])
def test_the_published_samplers_are_configs(name: str) -> None:
    """A ReAct trajectory of 12 steps, its first unlabelled: candidates 2 .. 11, int(10 * 0.2) = 2 left out: 4 .. 11."""
    text = yaml.safe_load((CONF / "stage" / "values" / "cut_states_sampled.yaml").read_text())["stage"]
    if name == "cut_states_without_actions":
        text |= yaml.safe_load((CONF / "stage" / "values" / f"{name}.yaml").read_text())["stage"]
    kinds = ["Thought", "Action", "Observation"]
    steps = ["so much is clear\n", *(f"{kinds[k % 3]} {k}: it follows that {k}\n" for k in range(1, 11))]
    one = trajectory([*steps, "Action 9: Finish[The answer is A.]"])
    kept = StateSampler(**(text | {"keep_ratio": 1.0}))
    if name == "cut_states_sampled":
        assert steps_of(kept, one) == [4, 5, 6, 7, 8, 9, 10, 11]
    else:
        # without the actions 2, 5, 8, 11 six are left: int(6 * 0.2) = 1 is left out
        assert steps_of(kept, one) == [4, 6, 7, 9, 10]
        assert steps_of(kept, REACT) == [], "fewer than 8 steps"


def test_step_types_need_react_steps() -> None:
    with pytest.raises(BadInput, match="trajectory 'p/0': its steps are not ReAct steps"):
        StateSampler(removes_actions=True).states(TEN)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep_ratio": 1.5}, "keep_ratio must be from 0 to 1, got 1.5"),
        ({"start_ratio": 0.9, "end_ratio": 0.2}, "start_ratio 0.9 is above end_ratio 0.2"),
        ({"drop_last": 0}, "drop_last must be at least 1"),
        ({"which": "first"}, "which must be all or middle, got 'first'"),
        ({"min_steps": -1}, "min_steps must be at least 0"),
        ({"step_types": ["thought"]}, "there is no step type 'thought': choose from Thought, Action"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        StateSampler(**settings)  # type: ignore[arg-type]


def test_the_stage_cuts_shards_that_join_to_the_whole(tmp_path: Path) -> None:
    path = str(tmp_path / "t.jsonl")
    rows = [replace(TEN, id=f"q{problem}/{k}", problem_id=f"q{problem}") for problem in range(9) for k in range(2)]
    write_records(path, rows)

    def cut(**settings: object) -> list[State]:
        context = StageContext(None, Path("unused"), 10.0)
        return list(CutStates(keep_ratio=0.5, **settings).run(path, context))  # type: ignore[arg-type]

    shards = [cut(shard=shard, num_shards=3) for shard in range(3)]
    assert sorted(state.id for shard in shards for state in shard) == sorted(state.id for state in cut())
    for number, shard in enumerate(shards):  # whole problems, and the shards of the task
        assert {shard_of(f"states/{state.problem_id}", 3) for state in shard} == {number}
    with pytest.raises(BadInput, match=r"stage\.shard must be 0 to 2 \(num_shards - 1\), got 3"):
        cut(shard=3, num_shards=3)
    with pytest.raises(BadInput, match=r"stage\.num_shards must be at least 1, got 0"):
        cut(num_shards=0)


# --- the prefix tree ----------------------------------------------------------------------------------------


def random_sequences(seed: int, count: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2) for _ in range(rng.randrange(1, 12))] for _ in range(count)]


def test_the_tree_order_is_depth_first_with_prefixes_first() -> None:
    rows = [[1, 2, 3], [1], [1, 2], [0, 5], [1, 2, 2]]
    assert [rows[index] for index in tree_order(rows)] == [[0, 5], [1], [1, 2], [1, 2, 2], [1, 2, 3]]
    assert shared_length([1, 2, 3], [1, 2, 2, 9]) == 2


@pytest.mark.parametrize("seed", range(5))
def test_distinct_tokens_are_the_distinct_prefixes(seed: int) -> None:
    rows = random_sequences(seed)
    assert num_distinct_tokens(rows) == len({tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)})
    assert num_distinct_tokens([]) == 0


def test_distinct_tokens_are_the_same_where_they_are_sorted_on_disk(tmp_path: Path) -> None:
    """In parts, among which are an empty one and one that holds what stood before; ids of several bytes."""
    parts = [[[token * 70_000 for token in row] for row in random_sequences(seed)] for seed in range(4)]
    parts += [[], [[]], parts[0][:5]]
    with TokenTree(tmp_path / "out.jsonl") as tree:
        for part in parts:
            tree.add(part)
        assert tree.num_tokens() == num_distinct_tokens([row for part in parts for row in part])


def test_states_of_a_problem_come_where_its_first_state_does(tmp_path: Path) -> None:
    """The first problem's first trajectory has no state: in whichever order, the second problem's states come first."""
    rows = [replace(trajectory(["a"], "p/0"), problem_id="p"), replace(trajectory(["a", "b"], "q/0"), problem_id="q"),
            replace(trajectory(["a", "b"], "p/1"), problem_id="p")]  # fmt: skip
    write_records(tmp_path / "t.jsonl", rows)
    for order in ("tree", "trajectory"):
        states = CutStates(order=order).run(str(tmp_path / "t.jsonl"), StageContext(None, tmp_path / "s.jsonl", 60.0))
        assert [state.id for state in states] == ["q/0#1", "p/1#1"]


def test_least_prompt_tokens_by_hand() -> None:
    """Blocks of 4, two siblings. Of 10 tokens 2 blocks are cached and 2 tokens computed twice: 8 + 4. The next
    shares them and has 1 token of its own twice. 8 tokens: one block cached, the other computed twice."""
    ten = list(range(10))
    assert least_prompt_tokens([ten], 2, 4) == 12
    assert least_prompt_tokens([ten, [*range(8), 99]], 2, 4) == 14
    assert least_prompt_tokens([list(range(8))], 2, 4) == 12
    assert least_prompt_tokens([list(range(8)), ten], 2, 4) == 12 + 4, "the siblings of the shorter fill its block"


@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_least_prompt_tokens_against_sets_of_blocks(seed: int, block_size: int) -> None:
    rows = {tuple(row) for row in random_sequences(seed)}
    cached = {row[: block_size * number] for row in rows for number in range(1, (len(row) - 1) // block_size + 1)}
    rests = sum(len(row) - block_size * ((len(row) - 1) // block_size) for row in rows)
    want = 3 * rests + block_size * len(cached - {row for row in rows if len(row) % block_size == 0})
    assert least_prompt_tokens([*rows, *rows], 3, block_size) == want


def test_an_empty_sequence_cannot_be_completed() -> None:
    with pytest.raises(BadInput, match="without tokens"):
        least_prompt_tokens([[]], 1, 16)
