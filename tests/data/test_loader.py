"""Examples, batches and their order, written out."""

import json
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.data.batches.batch import Batch
from espalier.data.batches.collate import collate_pairs, collate_steps, collate_tokens
from espalier.data.batches.loader import Loader
from espalier.data.batches.packing import Layout
from espalier.data.examples.step_examples import StepValueExamples
from espalier.data.examples.token_examples import (
    DemonstrationExamples,
    PairExample,
    PreferenceExamples,
    StepExample,
    TokenExample,
    encode_demonstration,
    examples_fingerprint,
    is_held_out,
)
from espalier.data.records import BadInput, Demonstration, PreferencePair, StepValues

EXAMPLES = [TokenExample(f"e{i}", list(range(1, 2 + (7 * i) % 10)), 1) for i in range(10)]

PADDED = Layout("padded")


def ids(groups: list[list[Any]]) -> list[list[str]]:
    return [[example.id for example in group] for group in groups]


def rows(mask: torch.Tensor) -> list[list[int]]:
    return [[int(value) for value in row] for row in mask.tolist()]


def write(path: Path, records: list[Any]) -> str:
    path.write_text("".join(json.dumps(asdict(record)) + "\n" for record in records))
    return str(path)


def test_demonstrations_are_padded_on_the_right_with_the_prompt_masked() -> None:
    batch = collate_tokens([TokenExample("a", [5, 6, 7, 8], 2), TokenExample("b", [9, 4], 1)], PADDED)
    assert batch.example_ids == ["a", "b"]
    assert batch.ids.tolist() == [[5, 6, 7, 8], [9, 4, 0, 0]]
    assert rows(batch.attention_mask) == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch.targets.tolist() == [7, 8, 4]
    assert batch.target_rows.tolist() == [0, 0, 1]
    assert batch.target_places.tolist() == [1, 2, 4]  # the token before each, in rows of four
    assert batch.target_weights.tolist() == [1, 1, 1]
    assert batch.read_places.tolist() == batch.values.tolist() == []
    assert (batch.num_rows, batch.num_tokens) == (2, 6)


def test_step_values_are_read_at_step_ends() -> None:
    examples = [StepExample("a", [5, 6, 7], [1, 2], [0.5, 1.0]), StepExample("b", [9, 4, 3, 2], [3], [0.0])]
    batch = collate_steps(examples, PADDED)
    assert batch.ids.tolist() == [[5, 6, 7, 0], [9, 4, 3, 2]]
    assert batch.read_places.tolist() == [1, 2, 7]
    assert batch.values.tolist() == [0.5, 1.0, 0.0]


def test_pairs_take_two_rows_chosen_then_rejected() -> None:
    batch = collate_pairs([PairExample("p", [5, 6], [7, 8], [9]), PairExample("q", [4], [3], [2, 1])], PADDED)
    assert batch.ids.tolist() == [[5, 6, 7, 8], [5, 6, 9, 0], [4, 3, 0, 0], [4, 2, 1, 0]]
    assert rows(batch.attention_mask) == [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 0]]
    assert batch.targets.tolist() == [7, 8, 9, 3, 2, 1]
    assert batch.target_rows.tolist() == [0, 0, 1, 2, 3, 3]
    assert batch.target_places.tolist() == [1, 2, 5, 8, 12, 13]
    assert batch.read_places.tolist() == [3, 6, 9, 14]
    assert batch.example_ids == ["p", "q"]


def test_a_batch_moves_with_all_its_tensors() -> None:
    batch = collate_steps([StepExample("a", [5, 6], [1], [0.5])], PADDED)
    moved = batch.to(torch.device("meta"))
    assert isinstance(moved, Batch)
    assert moved.example_ids == ["a"]
    assert {value.device.type for value in vars(moved).values() if torch.is_tensor(value)} == {"meta"}


def test_every_example_comes_once_an_epoch() -> None:
    loader = Loader(EXAMPLES, batch_size=4, micro_batch_size=2, seed=0)
    seen = [example.id for step in range(5) for example in loader.step_examples(step)]
    assert Counter(seen) == {f"e{i}": 2 for i in range(10)}  # 5 steps of 4 are two epochs of 10
    # Epochs are laid end to end: the third step takes the last two of the first epoch and two of the second.
    first = {example.id for step in range(3) for example in loader.step_examples(step)}
    assert first == {f"e{i}" for i in range(10)}


def test_epochs_have_different_orders() -> None:
    loader = Loader(EXAMPLES, batch_size=10, micro_batch_size=10, seed=0)
    assert loader._order(0) != loader._order(1)


def test_a_step_is_a_pure_function_of_seed_and_step() -> None:
    loader = Loader(EXAMPLES, batch_size=4, micro_batch_size=2, seed=3)
    forward = [ids(loader.micro_batches(step)) for step in range(12)]
    resumed = Loader(EXAMPLES, batch_size=4, micro_batch_size=2, seed=3)
    assert [ids(resumed.micro_batches(step)) for step in range(7, 12)] == forward[7:]
    assert ids(loader.micro_batches(0)) == forward[0]  # also when asked again, later
    other = Loader(EXAMPLES, batch_size=4, micro_batch_size=2, seed=4)
    assert [ids(other.micro_batches(step)) for step in range(12)] != forward


def test_the_cut_into_micro_batches_does_not_change_a_step() -> None:
    for step in range(5):
        steps = [Loader(EXAMPLES, 4, size, seed=0).micro_batches(step) for size in (1, 2, 4)]
        flat = [[example.id for group in groups for example in group] for groups in steps]
        assert flat[0] == flat[1] == flat[2]


def test_micro_batches_are_of_similar_length() -> None:
    groups = Loader(EXAMPLES, batch_size=8, micro_batch_size=2, seed=0).micro_batches(0)
    lengths = [len(example.ids) for group in groups for example in group]
    assert lengths == sorted(lengths)


def test_ranks_partition_a_step() -> None:
    for step in range(5):
        whole = Loader(EXAMPLES, 8, 2, seed=0).micro_batches(step)
        parts = [Loader(EXAMPLES, 8, 2, 0, rank, 2).micro_batches(step) for rank in (0, 1)]
        assert [len(part) for part in parts] == [2, 2]
        assert ids(parts[0]) + ids(parts[1]) == ids([whole[0], whole[2], whole[1], whole[3]])


def test_more_examples_in_a_step_than_there_are_come_again() -> None:
    loader = Loader(EXAMPLES[:3], batch_size=7, micro_batch_size=7, seed=0)
    seen = Counter(example.id for step in range(3) for example in loader.step_examples(step))
    assert seen == {"e0": 7, "e1": 7, "e2": 7}


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ((10, 4, 1), "size 10 is not a multiple of update.micro_batch_size 4 x 1 ranks: choose update.batch_size=8"),
        ((12, 4, 2), "size 12 is not a multiple of update.micro_batch_size 4 x 2 ranks: choose update.batch_size=8"),
        ((2, 4, 2), "choose update.batch_size=8"),
    ],
)
def test_a_batch_that_cannot_be_dealt_is_refused_with_the_numbers(sizes: tuple[int, int, int], text: str) -> None:
    batch_size, micro_batch_size, world_size = sizes
    with pytest.raises(BadInput, match=text):
        Loader(EXAMPLES, batch_size, micro_batch_size, 0, 0, world_size)


def test_a_batch_of_nothing_is_refused() -> None:
    with pytest.raises(BadInput, match="must be at least 1, got 4 and 0"):
        Loader(EXAMPLES, batch_size=4, micro_batch_size=0, seed=0)
    with pytest.raises(BadInput, match="must be at least 1, got 0 and 2"):
        Loader(EXAMPLES, batch_size=0, micro_batch_size=2, seed=0)


def test_a_demonstration_is_its_prompt_its_completion_and_the_end(tokenizer: Any) -> None:
    example = encode_demonstration(tokenizer, Demonstration("d", "2 + 3?\n", "5\n#### 5"))
    prompt, completion = tokenizer("2 + 3?\n").input_ids, tokenizer("5\n#### 5").input_ids
    assert example.ids == [*prompt, *completion, tokenizer.eos_token_id]
    assert example.prompt_length == len(prompt)


def test_what_is_too_long_is_left_out_and_counted(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "d.jsonl", [Demonstration("a", "1\n", "2"), Demonstration("b", "1\n", "2 " * 50)])
    examples = DemonstrationExamples(path, max_length=20).load(tokenizer)
    assert [example.id for example in examples] == ["a"]
    assert "1 of 2 examples are longer than 20 tokens and are left out" in caplog.text
    with pytest.raises(BadInput, match=r"no example is left \(of 2 read\)"):
        DemonstrationExamples(path, max_length=2).load(tokenizer)


VALUES = StepValues(
    id="p1/0",
    problem_id="p1",
    prompt="Q\n",
    steps=["a\n", "b"],
    prompt_ids=[1, 2, 3],
    response_ids=[4, 5, 6, 7],
    step_ends=[2, 4],
    values=[0.5, 1.0],
    num_correct=[2, 1],
    num_completions=[4, 1],
    is_correct=True,
)


def test_step_values_are_read_at_the_last_token_of_each_step(tmp_path: Path) -> None:
    again = replace(VALUES, id="p1/1")
    path = write(tmp_path / "v.jsonl", [VALUES, again])
    want = StepExample("p1/0", [1, 2, 3, 4, 5, 6, 7], [4, 6], [0.5, 1.0])
    assert StepValueExamples(path, max_length=9).load(None) == [want]  # a repeated response comes once
    assert len(StepValueExamples(path, max_length=9, is_distinct=False).load(None)) == 2


def test_copies_of_a_problem_in_a_mixture_are_on_one_side() -> None:
    for share in (0.1, 0.5):
        sides = [{is_held_out(f"a-{n}{copy}", share) for copy in ("", "~2", "~13")} for n in range(200)]
        assert all(len(side) == 1 for side in sides)
        assert len(set.union(*sides)) == 2
    assert [is_held_out(f"a~b-{n}", 0.5) for n in range(20)] != [is_held_out("a", 0.5)] * 20  # another ~ is of the id


def test_the_held_out_part_is_of_whole_problems_and_the_rest_is_the_other(tmp_path: Path) -> None:
    records = [
        replace(VALUES, id=f"p{i}/{k}", problem_id=f"p{i}", response_ids=[k, 5, 6, 7])
        for i in range(40)
        for k in (1, 2)
    ]
    path = write(tmp_path / "v.jsonl", records)

    def part(name: str) -> set[str]:
        return {e.id for e in StepValueExamples(path, 9, part=name, held_out_share=0.25).load(None)}

    assert part("train") | part("held_out") == part("all") == {record.id for record in records}
    assert part("train") & part("held_out") == set()
    assert part("held_out") == {record.id for record in records if is_held_out(record.problem_id, 0.25)}
    assert 4 <= len(part("held_out")) / 2 <= 16
    with pytest.raises(BadInput, match="part must be all, train or held_out, got 'test'"):
        part("test")


def test_problems_of_one_passage_are_held_out_together(tmp_path: Path) -> None:
    records = [
        replace(VALUES, id=f"p{i}/0", problem_id=f"p{i}", passage_id=f"passage-{i // 4}", response_ids=[i, 5, 6, 7])
        for i in range(160)
    ]
    path = write(tmp_path / "v.jsonl", records)
    held = {e.problem_id for e in StepValueExamples(path, 9, part="held_out", held_out_share=0.25).load(None)}
    sides = [{f"p{4 * number + k}" in held for k in range(4)} for number in range(40)]
    assert all(len(side) == 1 for side in sides)
    assert len(set.union(*sides)) == 2


def test_a_pair_is_as_long_as_its_longer_side(tmp_path: Path) -> None:
    pair = PreferencePair(
        id="a>b", problem_id="p", kind="step", prompt="", chosen="", rejected="", prompt_ids=[1, 2],
        chosen_ids=[3], rejected_ids=[4, 5, 6], chosen_score=1.0, rejected_score=0.0,
    )  # fmt: skip
    path = write(tmp_path / "p.jsonl", [pair])
    assert PreferenceExamples(path, max_length=5).load(None) == [PairExample("a>b", [1, 2], [3], [4, 5, 6])]
    with pytest.raises(BadInput, match="no example is left"):
        PreferenceExamples(path, max_length=4).load(None)


def test_the_fingerprint_changes_with_order_ids_tokens_and_values() -> None:
    first, second = StepExample("a", [1, 2], [1], [0.5]), StepExample("b", [1, 2], [1], [0.5])
    start = examples_fingerprint([first, second])
    assert examples_fingerprint([replace(first), replace(second)]) == start
    others = [
        [second, first],
        [first],
        [first, replace(second, id="c")],
        [first, replace(second, ids=[1, 3])],
        [first, replace(second, values=[0.75])],
    ]
    assert start not in {examples_fingerprint(examples) for examples in others}


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_budget_of_tokens_holds_for_every_micro_batch_and_loses_no_example(world_size: int) -> None:
    examples = [TokenExample(f"t{k}", list(range(3 + 7 * k % 50)), 1) for k in range(40)]
    parts = [Loader(examples, 20, 1, 0, rank, world_size, 120) for rank in range(world_size)]
    for step in range(4):
        cuts = [part.micro_batches(step) for part in parts]
        assert len({len(cut) for cut in cuts}) == 1  # equally many on every rank
        loads = [sum(len(example.ids) for example in group) for cut in cuts for group in cut]
        assert max(loads) <= 120
        assert max(loads) - min(loads) < 53  # of equal weight, up to one example
        seen = Counter(example.id for cut in cuts for group in cut for example in group)
        assert seen == Counter(example.id for example in parts[0].step_examples(step))
    held = [example.id for group in parts[0].evaluation_batches() for example in group]
    assert Counter(held) == Counter(example.id for example in examples)


def test_ranks_with_fewer_examples_than_micro_batches_have_empty_ones_and_a_stand_in() -> None:
    """5 examples of 10 tokens on 4 ranks, one to a micro-batch: 8 micro-batches, 3 of them empty."""
    examples = [TokenExample(f"e{i}", list(range(2, 12)), 1) for i in range(5)]
    loaders = [Loader(examples, 5, 1, 0, rank, 4, micro_batch_tokens=10) for rank in range(4)]
    groups = [loader.micro_batches(0) for loader in loaders]
    assert [len(rank) for rank in groups] == [2] * 4
    assert sorted(len(group) for rank in groups for group in rank) == [0, 0, 0, 1, 1, 1, 1, 1]
    assert {example.id for rank in groups for group in rank for example in group} == {e.id for e in examples}
    assert all(loader.stand_in(0) in examples for loader in loaders)


def test_an_example_above_the_budget_is_named() -> None:
    examples = [TokenExample("short", [1, 2], 1), TokenExample("long", [1] * 9, 1)]
    with pytest.raises(
        BadInput, match=r"example 'long' has 9 tokens, more than update\.micro_batch_tokens 8: raise it"
    ):
        Loader(examples, 2, 1, 0, micro_batch_tokens=8)
    pair = PairExample("pair", [1] * 5, [2, 3], [4, 5])
    assert Loader([pair], 1, 1, 0, micro_batch_tokens=9).micro_batches(0) == [[pair]]
