"""Where training examples come from: judged steps, judged responses, weighted responses, pairs with margins."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from espalier.data.batches.collate import (
    collate_outcomes,
    collate_pairs,
    collate_steps,
    collate_tokens,
    collate_unpaired,
)
from espalier.data.batches.packing import Layout
from espalier.data.examples.outcome_examples import JudgedResponse, JudgedResponseExamples, TrajectoryOutcomeExamples
from espalier.data.examples.step_examples import (
    AnnotatedSolutionExamples,
    StepValueExamples,
    class_weights,
    encode_labelled,
    prefix_examples,
)
from espalier.data.examples.token_examples import (
    DemonstrationExamples,
    OutcomeExample,
    PairExample,
    PreferenceExamples,
    StepExample,
    TokenExample,
    WeightedExamples,
    WeightedResponse,
    example_length,
)
from espalier.data.jsonl import read_records, to_line
from espalier.data.left_out import LeftOut, count_left_out
from espalier.data.process_data.formats import read_labelled, step_format
from espalier.data.prompts import PromptTemplate
from espalier.data.records import AnnotatedSolution, BadInput, Demonstration, PreferencePair, StepValues, Trajectory

PADDED = Layout("padded")
JUDGED = AnnotatedSolution("j", "p", "1 + 2?", ["3 \n", "no\n", "#### 3"], [1.0, None, 0.875], -1, True)
VALUES = StepValues("p/0", "p", "Q", ["a", "b"], [1, 2, 3], [4, 5, 6, 7], [2, 4], [0.5, 1.0], [2, 1], [4, 1], True)
TRAJECTORY = Trajectory("p/0", "p", "Q", "ab", ["ab"], [1, 2], [3, 4, 5], [3], "stop", "b", "b", True)
PAIR = PreferencePair("a>b", "p", "step", "", "", "", [1, 2], [3], [4, 5, 6], 0.75, 0.25)


def write(path: Path, records: list[Any]) -> str:
    path.write_text("".join(map(to_line, records)))
    return str(path)


def test_judged_steps_are_read_at_their_ends_and_unjudged_ones_not_at_all(tokenizer: Any) -> None:
    example = encode_labelled(tokenizer, JUDGED, PromptTemplate(), "f")
    assert example is not None
    prompt = tokenizer("1 + 2?\n").input_ids
    response = tokenizer("3 \nno\n#### 3").input_ids
    assert example.ids == [*prompt, *response, tokenizer.eos_token_id]
    assert example.values == [1.0, 0.875]
    first, last = example.positions
    assert tokenizer.decode(example.ids[len(prompt) : first + 1]) == "3 \n"
    assert last == len(example.ids) - 1  # the last step takes the end token in
    unfinished = encode_labelled(tokenizer, replace(JUDGED, is_correct=None), PromptTemplate(), "f")
    assert unfinished is not None
    assert unfinished.ids == example.ids[:-1]
    assert unfinished.positions == [first, last - 1]


def test_of_judged_steps_that_end_in_one_token_the_last_is_read(tokenizer: Any) -> None:
    """A blank step ends where the one before it does: one token has one target."""
    record = replace(JUDGED, steps=["3 \n", "", "#### 3"], labels=[1.0, 0.0, 0.5])
    example = encode_labelled(tokenizer, record, PromptTemplate(), "f")
    assert example is not None
    assert example.values == [0.0, 0.5]
    assert len(set(example.positions)) == 2
    unjudged = encode_labelled(tokenizer, replace(record, labels=[1.0, None, 0.5]), PromptTemplate(), "f")
    assert unjudged is not None
    assert (unjudged.positions, unjudged.values) == (example.positions, [1.0, 0.5])


def test_a_template_asks_the_question_and_opens_the_response(tokenizer: Any) -> None:
    template = PromptTemplate(template="Q: {question}\nA:", before_response=" ")
    example = encode_labelled(tokenizer, JUDGED, template, "f")
    assert example is not None
    assert tokenizer.decode(example.ids[: example.positions[0] + 1]) == "Q: 1 + 2?\nA: 3 \n"


def test_a_published_row_trains_as_it_is(tokenizer: Any, tmp_path: Path) -> None:
    text = "1 + 2? Step 1: 1 + 2 = 3 {}\nStep 2: The answer is: 4 {}"
    mark = "\u043a\u0438"
    row = {"input": text.format(mark, mark), "label": text.format("+", "-"), "task": "GSM8K"}
    path = tmp_path / "shepherd.jsonl"
    path.write_text(json.dumps(row) + "\n")
    [example] = AnnotatedSolutionExamples(str(path), 200, format="math_shepherd").load(tokenizer)
    assert example.values == [1.0, 0.0]
    start = len(tokenizer("1 + 2?\n").input_ids)
    assert tokenizer.decode(example.ids[start : example.positions[0] + 1]) == "Step 1: 1 + 2 = 3\n"
    with pytest.raises(BadInput, match="there is no step format 'shepherd'"):
        AnnotatedSolutionExamples(str(path), 200, format="shepherd").load(tokenizer)


@pytest.mark.parametrize(
    ("name", "file"),
    [("math_shepherd", "math_shepherd/samples_math-shepherd.jsonl"), ("prm800k", "prm800k/samples_prm800k.jsonl"),
     ("prm800k", "prm800k/prm800k_example_rows.jsonl"), ("math_aps", "math_shepherd/samples_math-aps.jsonl")],
)  # fmt: skip
def test_every_judged_step_of_the_published_files_is_read_once(
    name: str, file: str, tokenizer: Any, datasets_dir: Path
) -> None:
    path = str(datasets_dir / file)
    records = list(read_labelled(path, step_format(name)))
    examples = AnnotatedSolutionExamples(path, 100_000, format=name, is_distinct=False).load(tokenizer)
    labels = [[label for label in record.labels if label is not None] for record in records]
    assert [example.values for example in examples] == [row for row in labels if row]
    distinct = AnnotatedSolutionExamples(path, 100_000, format=name).load(tokenizer)
    reads = {
        (tuple(e.ids[: place + 1]), value) for e in examples for place, value in zip(e.positions, e.values, strict=True)
    }
    assert sum(len(example.values) for example in distinct) == len(reads)


def test_a_shared_prefix_with_one_label_is_read_once(tokenizer: Any, tmp_path: Path) -> None:
    first = AnnotatedSolution("a", "p", "Q?", ["one\n", "two\n"], [1.0, 0.0], 1, None)
    second = AnnotatedSolution("b", "p", "Q?", ["one\n", "three\n"], [1.0, 1.0], -1, None)
    disputed = AnnotatedSolution("c", "p", "Q?", ["one\n"], [0.5], -1, None)
    again = replace(first, id="d")
    path = write(tmp_path / "l.jsonl", [first, second, disputed, again])
    assert [e.values for e in AnnotatedSolutionExamples(path, 99).load(tokenizer)] == [[1.0, 0.0], [1.0], [0.5]]
    assert len(AnnotatedSolutionExamples(path, 99, is_distinct=False).load(tokenizer)) == 4


def test_steps_without_white_space_between_them_are_warned_of(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    together = AnnotatedSolution("t", "p", "Q?", ["2 pens.", "6 and 7"], [1.0, 0.0], 1, None)
    parted = [replace(JUDGED, id=f"j{k}") for k in range(2)]
    path = write(tmp_path / "l.jsonl", [together, replace(together, id="i", info={"separator": "\n"}), *parted])
    AnnotatedSolutionExamples(path, 99).load(tokenizer)
    assert "white space" not in caplog.text
    AnnotatedSolutionExamples(write(tmp_path / "t.jsonl", [together]), 99).load(tokenizer)
    assert "1 of 1 solutions have no white space between steps, and are read as '2 pens.6 and 7'" in caplog.text


def test_what_nobody_judged_is_left_out_and_counted(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nothing = replace(JUDGED, id="n", labels=[None, None, None])
    path = write(tmp_path / "l.jsonl", [JUDGED, nothing])
    assert [e.id for e in AnnotatedSolutionExamples(path, 99).load(tokenizer)] == ["j"]
    assert "1 of 2 solutions have no judged step and are left out" in caplog.text


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"labels": [1.0, 0.5]}, "'j' has 3 steps and 2 labels: give one per step"),
        ({"labels": [1.0, None, 1.5]}, r"'j': label 2 \(nulls are not counted\) must be in \[0, 1\], got 1.5"),
    ],
)
def test_labels_that_do_not_fit_are_refused(change: dict[str, Any], text: str, tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "l.jsonl", [replace(JUDGED, **change)])
    with pytest.raises(BadInput, match=text):
        AnnotatedSolutionExamples(path, 99).load(tokenizer)


def test_step_values_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    for change, text in (
        ({"values": [0.5]}, "v.jsonl:1: 'p/0' has 2 steps and 1 values: give one per step"),
        ({"labels": [0.5]}, "v.jsonl:1: 'p/0' has 2 steps and 1 labels: give one per step"),
        ({"labels": [0.5, 2.0]}, r"label 2 \(nulls are not counted\) must be in \[0, 1\], got 2.0"),
        ({"step_ends": [2, 9]}, "read 2 is at token 11 of 7"),
        ({"step_ends": [2]}, "'p/0' has 2 steps and 1 step ends: give one per step"),
        ({"labels": [None, None]}, r"no labelled step to train on \(of 1 trajectories\)"),
    ):
        path = write(tmp_path / "v.jsonl", [{**vars(VALUES), **change}])
        with pytest.raises(BadInput, match=text):
            StepValueExamples(path, 99).load(None)


def test_steps_without_a_label_are_not_read_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "v.jsonl", [replace(VALUES, labels=[None, 1.0], weights=[])])
    with count_left_out() as counted:
        (example,) = StepValueExamples(path, 99).load(None)
    assert (example.positions, example.values, example.weights) == ([6], [1.0], [])
    assert counted == [LeftOut(path, "have no label", 1, 2)]


def test_a_file_without_labels_reads_as_one_whose_labels_are_its_values(tmp_path: Path) -> None:
    """As files of hand and of before have them."""
    new = ("labels", "weights", "low", "high", "prompt_value")
    bare = {name: value for name, value in vars(VALUES).items() if name not in new}
    paths = [write(tmp_path / f"{len(row)}.jsonl", [row]) for row in (bare, vars(VALUES))]
    assert paths[0] != paths[1]
    first, second = (read_records(StepValues, path) for path in paths)
    assert first == second == [VALUES]
    assert (VALUES.labels, VALUES.weights) == ([0.5, 1.0], [1.0, 1.0])
    assert StepValueExamples(paths[0], 99).load(None) == StepValueExamples(paths[1], 99).load(None)


def test_a_prefix_is_an_example_read_at_its_last_token(tmp_path: Path) -> None:
    path = write(tmp_path / "v.jsonl", [VALUES])
    found = StepValueExamples(path, 99, one_example_per="prefix").load(None)
    assert found == [
        StepExample("p/0#1", [1, 2, 3, 4, 5], [4], [0.5], [1.0]),
        StepExample("p/0#2", [1, 2, 3, 4, 5, 6, 7], [6], [1.0], [1.0]),
    ]
    assert found == prefix_examples(StepValueExamples(path, 99).load(None)[0])
    with pytest.raises(BadInput, match="one_example_per must be trajectory or prefix, got 'step'"):
        StepValueExamples(path, 99, one_example_per="step").load(None)


def test_balanced_classes_have_equal_sums_and_a_mean_of_1() -> None:
    # Two classes: three good (1/2 counts as good) and one bad: 4 / (2 * 3) and 4 / (2 * 1).
    assert class_weights([1.0, 0.5, 0.9, 0.2], 2) == pytest.approx([2 / 3, 2 / 3, 2 / 3, 2.0])
    # K = 4: classes 4, 4, 1 and 2; class 0 and 3 do not occur.
    weights = class_weights([1.0, 1.0, 0.25, 0.5], 5)
    assert weights == pytest.approx([2 / 3, 2 / 3, 4 / 3, 4 / 3])
    assert class_weights([1.0, 1.0], 2) == [1.0, 1.0]


def test_balancing_weighs_the_steps_of_all_trajectories_together(tmp_path: Path) -> None:
    bad = replace(VALUES, id="p/1", response_ids=[4, 5, 6, 8], labels=[0.0, 1.0])
    path = write(tmp_path / "v.jsonl", [VALUES, bad])
    examples = StepValueExamples(path, 99, balanced_classes=2).load(None)
    assert [e.weights for e in examples] == [pytest.approx([2 / 3, 2 / 3]), pytest.approx([2.0, 2 / 3])]
    batch = collate_steps(examples, PADDED)
    assert batch.weights.tolist() == pytest.approx([2 / 3, 2 / 3, 2.0, 2 / 3])
    with pytest.raises(BadInput, match=r"balanced_classes must be 0 \(off\) or at least 2, got 1"):
        StepValueExamples(path, 99, balanced_classes=1).load(None)


def test_trajectories_are_judged_by_their_outcome(tmp_path: Path) -> None:
    wrong = replace(TRAJECTORY, id="q/0", problem_id="q", is_correct=False)
    repeated = replace(TRAJECTORY, id="p/1")
    path = write(tmp_path / "t.jsonl", [TRAJECTORY, wrong, repeated])
    found = TrajectoryOutcomeExamples(path, 99).load(None)
    assert found == [OutcomeExample("p/0", [1, 2, 3, 4, 5], 2, 1.0), OutcomeExample("q/0", [1, 2, 3, 4, 5], 2, 0.0)]
    batch = collate_outcomes(found, PADDED)
    assert (batch.read_places.tolist(), batch.values.tolist()) == ([4, 9], [1.0, 0.0])
    with pytest.raises(BadInput, match="'p/0' has no prompt or no response tokens"):
        TrajectoryOutcomeExamples(write(tmp_path / "e.jsonl", [replace(TRAJECTORY, response_ids=[])]), 99).load(None)


def test_every_response_is_lent_once_to_another_problem(tmp_path: Path) -> None:
    records = [
        replace(TRAJECTORY, id=f"{problem}/{k}", problem_id=problem, response_ids=[10 * index + k] * (k + 1))
        for index, (problem, number) in enumerate((("p", 3), ("q", 1), ("r", 2)))
        for k in range(number)
    ]
    path = write(tmp_path / "t.jsonl", records)
    found = TrajectoryOutcomeExamples(path, 4, has_mismatched=True).load(None)
    assert len(found) == 5  # p/2 is too long
    own = {example.id[0]: {r.response_ids[0] for r in records if r.id[0] == example.id[0]} for example in found}
    assert all(example.mismatched_ids[0] not in own[example.id[0]] for example in found)
    assert Counter(e.mismatched_ids[0] for e in found) == Counter(e.ids[e.prompt_length] for e in found)
    assert all(example_length(example) <= 4 for example in found)
    text = "3 of 4 responses are to problem 'p': at most half may be"
    with pytest.raises(BadInput, match=text):
        TrajectoryOutcomeExamples(write(tmp_path / "u.jsonl", records[:4]), 9, has_mismatched=True).load(None)


def test_unpaired_responses_come_with_the_mismatched_ones() -> None:
    examples = [OutcomeExample("a", [5, 6, 7], 2, 1.0, 1.0, [9, 8]), OutcomeExample("b", [4, 3], 1, 0.0, 2.0, [7])]
    batch = collate_unpaired(examples, PADDED)
    assert batch.ids.tolist() == [[5, 6, 7], [4, 3, 0]]
    assert (batch.targets.tolist(), batch.target_places.tolist()) == ([7, 3], [1, 3])
    assert batch.read_places.tolist() == [2, 4]
    assert batch.mismatched is not None
    assert batch.mismatched.ids.tolist() == [[5, 6, 9, 8], [4, 7, 0, 0]]
    assert (batch.mismatched.targets.tolist(), batch.mismatched.target_places.tolist()) == ([9, 8, 7], [1, 2, 4])
    assert (batch.values.tolist(), batch.weights.tolist()) == ([1.0, 0.0], [1.0, 2.0])


def test_judged_texts_are_tokenised_as_demonstrations_are(tokenizer: Any, tmp_path: Path) -> None:
    rows = [JudgedResponse("a", "p", "1?\n", "1", True), JudgedResponse("b", "q", "2?\n", "3", 0.25)]
    found = JudgedResponseExamples(write(tmp_path / "j.jsonl", rows), 99).load(tokenizer)
    prompt = tokenizer("1?\n").input_ids
    assert found[0].ids == [*prompt, *tokenizer("1").input_ids, tokenizer.eos_token_id]
    assert (found[0].prompt_length, found[0].value, found[1].value) == (len(prompt), 1.0, 0.25)
    path = write(tmp_path / "k.jsonl", [replace(rows[0], label=2.0)])
    with pytest.raises(BadInput, match=r"the label of 'a' must be in \[0, 1\], got 2.0"):
        JudgedResponseExamples(path, 99).load(tokenizer)
    with pytest.raises(BadInput, match=r"j.jsonl:1: label must be bool \| float, got 'yes'"):
        JudgedResponseExamples(write(tmp_path / "j.jsonl", [replace(rows[0], label="yes")]), 99).load(tokenizer)


def test_weighted_responses_keep_their_weights(tmp_path: Path) -> None:
    row = WeightedResponse("w", "p", [1, 2], [3, 4, 5], [0.5, 0.0, -1.5])
    path = write(tmp_path / "w.jsonl", [row])
    [example] = WeightedExamples(path, 9).load(None)
    assert example == TokenExample("w", [1, 2, 3, 4, 5], 2, [0.5, 0.0, -1.5])
    batch = collate_tokens([example, TokenExample("x", [6, 7], 1)], PADDED)
    assert batch.targets.tolist() == [3, 5, 7]
    assert batch.target_places.tolist() == [1, 3, 5]
    assert batch.target_weights.tolist() == [0.5, -1.5, 1.0]
    [scaled] = WeightedExamples(path, 9, has_mean_one_weights=True).load(None)
    assert scaled.weights == [-1.0, 0.0, 3.0]  # the mean of those that are not 0 was -1/2


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (WeightedResponse("w", "p", [1], [3, 4], [1.0]), "2 response tokens and 1 weights"),
        (WeightedResponse("w", "p", [], [3], [1.0]), "'w' has 0 prompt tokens"),
        (WeightedResponse("w", "p", [1], [3, 4], [1.0, -1.0]), "the weights of 'w' sum to 0"),
    ],
)
def test_weights_that_do_not_fit_are_refused(row: WeightedResponse, text: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=text):
        WeightedExamples(write(tmp_path / "w.jsonl", [row]), 9, has_mean_one_weights=True).load(None)


def test_pairs_carry_the_margin_of_their_scores_where_asked(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", [PAIR])
    [pair] = PreferenceExamples(path, 9, has_score_margin=True).load(None)
    assert pair == PairExample("a>b", [1, 2], [3], [4, 5, 6], 0.5)
    batch = collate_pairs([pair], PADDED)
    assert batch.margins.tolist() == [0.5]
    assert batch.read_places.tolist() == [2, 9]  # the last token of each side, in rows of five
    assert PreferenceExamples(path, 9).load(None)[0].margin == 0.0


@pytest.mark.parametrize("name", ["prompt_ids", "chosen_ids", "rejected_ids"])
def test_a_pair_with_an_empty_part_is_refused(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", [replace(PAIR, **{name: []})])
    with pytest.raises(BadInput, match=rf"{name} of pair 'a>b' is empty: build the pairs with token ids"):
        PreferenceExamples(path, 9).load(None)


def test_demonstrations_are_filtered_by_length_and_may_train_on_the_prompt(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [Demonstration("a", "1?\n", "1 2 3"), Demonstration("b", "2?\n", ""), Demonstration("c", "9 " * 40, "1 2 3")]
    path = write(tmp_path / "d.jsonl", rows)
    found = DemonstrationExamples(path, 30, min_completion_tokens=2).load(tokenizer)
    assert [example.id for example in found] == ["a"]
    assert "1 of 3 completions are shorter than 2 tokens and are left out" in caplog.text
    assert "1 of 2 examples are longer than 30 tokens and are left out (1 by their prompt alone)" in caplog.text
    [example] = DemonstrationExamples(path, 30, 2, is_completion_only=False).load(tokenizer)
    assert example == replace(found[0], prompt_length=1)
