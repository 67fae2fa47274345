"""Labels that a judge saw as well, and what their weights do to a loss and to training."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.data.batches.loader import Loader
from espalier.data.batches.packing import Layout
from espalier.data.examples.step_examples import StepValueExamples, class_weights
from espalier.data.jsonl import read_records, write_records
from espalier.data.judgements import StepJudgement
from espalier.data.records import BadInput, StepValues
from espalier.models.scalar_head import load_process_reward
from espalier.pipeline.stage import StageContext
from espalier.pipeline.values.consensus_labels import ConsensusLabels
from espalier.runtime.schemas import TrainConfig
from espalier.training.engine import TorchEngine
from espalier.training.loop import Loop
from espalier.training.objectives.process_reward import ProcessRewardObjective
from espalier.values.consensus import ConsensusRule, judged_shares
from tests.support.root_config import root_config


def labels(name: str, values: list[float | None], weights: list[float] | None = None, start: int = 5) -> StepValues:
    """A trajectory of one token a step behind a prompt of two."""
    num = len(values)
    ids = [start + 3 * k for k in range(num)]
    return StepValues(name, f"problem of {name}", "Q", ["s"] * num, [3, 4], ids, list(range(1, num + 1)), values,
                      [0] * num, [4] * num, False, weights=weights or [])  # fmt: skip


def judged(name: str, votes: list[list[float | None]], num_steps: int) -> list[StepJudgement]:
    return [StepJudgement(f"{name}/{k}", name, "p", num_steps, "x" if vote else None, vote, "…", "stop")
            for k, vote in enumerate(votes)]  # fmt: skip


def test_shares_of_votes_by_hand() -> None:
    """Three votes: first error at 1, none, unreadable, first error at 0."""
    votes = judged("t", [[1.0, 0.0, None], [1.0, 1.0, 1.0], [], [0.0, None, None]], 3)
    assert judged_shares(votes, 3) == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    assert judged_shares(judged("t", [[]], 3), 3) == judged_shares([], 3) == [None] * 3
    with pytest.raises(BadInput, match="judgement 't/0' is of 3 steps, the trajectory has 2"):
        judged_shares(votes, 2)


def test_a_label_stays_where_both_agree() -> None:
    values, ones = [0.75, 0.5, 0.0, None, 0.25], [1.0, 0.5, 1.0, 0.0, 1.0]
    shares = [1.0, 0.0, 0.0, 1.0, 0.5]
    rule = ConsensusRule("drop")
    assert rule.apply(values, ones, shares) == ([0.75, None, 0.0, None, None], [1.0, 0.0, 1.0, 0.0, 0.0])
    assert rule.agreements(values, shares) == [True, False, True, None, None]
    assert ConsensusRule("drop", threshold=0.6).apply(values, ones, shares)[0] == [0.75, 0.5, 0.0, None, None]
    assert ConsensusRule("drop", has_unjudged=True).apply(values, ones, shares)[0][-1] == 0.25
    assert rule.apply(values, ones, [None] * 5) == ([None] * 5, [0.0] * 5)
    assert ConsensusRule("drop", has_unjudged=True).apply(values, ones, [None] * 5) == (values, ones)


def test_a_label_weighs_what_the_votes_say() -> None:
    found = ConsensusRule("weight").apply([1.0, 0.5, 0.0, 1.0], [1.0, 0.5, 1.0, 1.0], [0.75, 0.25, 0.25, 0.0])
    assert found == ([1.0, 0.5, 0.0, None], [0.75, 0.125, 0.75, 0.0])


@pytest.mark.parametrize(
    ("values", "shares", "is_kept"),
    [
        ([1.0, 0.5, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], True),
        ([1.0, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], False),
        ([1.0, 0.5, 0.5, 1.0], [1.0, 1.0, 1.0, 1.0], True),
        ([1.0, 0.5, 0.5, 1.0], [1.0, 1.0, 1.0, 0.0], False),
        ([1.0, None, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], True),
    ],
)
def test_a_solution_stays_where_both_see_the_same_first_error(
    values: list[float | None], shares: list[float | None], is_kept: bool
) -> None:
    weights = [float(value is not None) for value in values]
    found = ConsensusRule("solution").apply(values, weights, shares)
    assert found == ((values, weights) if is_kept else ([None] * 4, [0.0] * 4))


def test_impossible_rules_are_refused() -> None:
    with pytest.raises(BadInput, match="there is no consensus policy 'vote': choose from drop, weight, solution"):
        ConsensusRule("vote")
    with pytest.raises(BadInput, match="threshold must be from 0 to below 1"):
        ConsensusRule(threshold=1.0)


def run(folder: Path, rows: list[StepValues], votes: list[StepJudgement], **settings: Any) -> Any:
    """(labels, counts) of the stage."""
    paths = [str(folder / name) for name in ("labels.jsonl", "judged.jsonl")]
    write_records(paths[0], rows)
    write_records(paths[1], votes)
    context = StageContext(None, folder / "out.jsonl", 10.0)
    return list(ConsensusLabels(paths[1], **settings).run(paths[0], context)), context.counts


def test_the_stage_keeps_what_labels_rest_on_and_counts(tmp_path: Path) -> None:
    rows = [labels("t/0", [0.5, 0.0, 0.0]), labels("t/1", [0.5, 0.5, 1.0])]
    found, counts = run(tmp_path, rows, judged("t/0", [[1.0, 1.0, 0.0]], 3))
    assert [row.labels for row in found] == [[0.5, None, 0.0], [None] * 3]
    assert replace(found[0], labels=rows[0].labels, weights=rows[0].weights) == rows[0]
    assert counts == {"trajectories": 2, "judged": 1, "labels_before": 6, "labels_after": 2, "compared": 3,
                      "agreement": 0.66667}  # fmt: skip
    with pytest.raises(BadInput, match="none of the 2 trajectories"):
        run(tmp_path, rows, judged("u/0", [[1.0]], 1))


def test_a_threshold_that_calls_every_state_good_is_refused(tmp_path: Path) -> None:
    """Posterior means are never 0: with the threshold 0 the judge would be asked to agree with 1 everywhere."""
    rows = [labels(f"t/{k}", [0.3, 0.1, float(k % 2)]) for k in range(20)]
    votes = judged("t/0", [[1.0, 0.0, 0.0]], 3)
    with pytest.raises(BadInput, match=r"threshold=0: 40 of 40 labels of inner steps are 1, at a mean .* of 0\.20"):
        run(tmp_path, rows, votes)
    found, _ = run(tmp_path, rows, votes, threshold=0.2)
    assert found[0].labels == [0.3, 0.1, 0.0]


# --- weights in training --------------------------------------------------------------------------------------


def load(path: Path, rows: list[StepValues], **settings: Any) -> list[Any]:
    write_records(path, rows)
    return StepValueExamples(str(path), 100, **settings).load(None)


def test_reads_carry_the_weights_of_their_labels(tmp_path: Path) -> None:
    row = labels("t/0", [1.0, 0.5, None, 0.0], [1.0, 0.25, 0.0, 0.0])
    (example,) = load(tmp_path / "l.jsonl", [row])
    assert (example.positions, example.values, example.weights) == ([2, 3], [1.0, 0.5], [1.0, 0.25])
    assert load(tmp_path / "l.jsonl", [row], min_weight=0.5)[0].values == [1.0]
    assert load(tmp_path / "l.jsonl", [row], is_weighted=False)[0].weights == []
    parts = load(tmp_path / "l.jsonl", [row], one_example_per="prefix")
    assert [(len(part.ids), part.weights) for part in parts] == [(3, [1.0]), (4, [0.25])]
    with pytest.raises(BadInput, match="no labelled step to train on"):
        load(tmp_path / "l.jsonl", [labels("t/0", [1.0], [0.0])])


def test_class_weights_multiply_the_labels_own(tmp_path: Path) -> None:
    row = labels("t/0", [1.0, 1.0, 0.0], [1.0, 0.5, 0.5])
    (example,) = load(tmp_path / "l.jsonl", [row], balanced_classes=2)
    by_class = class_weights([1.0, 1.0, 0.0], 2)
    assert example.weights == pytest.approx([by_class[0], 0.5 * by_class[1], 0.5 * by_class[2]])


def test_a_second_trajectory_of_the_same_text_is_read_where_the_first_has_no_label(tmp_path: Path) -> None:
    first, second = labels("t/0", [None, None]), replace(labels("t/0", [1.0, 0.0]), id="t/1")
    assert [example.id for example in load(tmp_path / "l.jsonl", [first, second, replace(second, id="t/2")])] == ["t/1"]


def reward_model(policy: Path) -> Any:
    """With a head that does not say 1/2 of everything, as a fresh one does."""
    model = load_process_reward(str(policy), 1).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def test_the_loss_is_the_weighted_mean_of_the_reads(tmp_path: Path, tiny_policy: Path) -> None:
    """Against binary cross-entropy written out in float64 from the model's own logits."""
    weights = [1.0, 0.25, 0.5]
    targets = [1.0, 0.5, 0.0]
    examples = load(tmp_path / "l.jsonl", [labels("t/0", [*targets], weights)])
    model, objective = reward_model(tiny_policy), ProcessRewardObjective()
    batch = objective.collate(examples, Layout())
    loss = float(objective.loss(model, batch).total.detach()) / objective.count(batch)
    logits = model(input_ids=batch.ids, attention_mask=batch.attention_mask).logits[0, 2:, 0].double().tolist()
    terms = [-t * math.log(1 / (1 + math.exp(-x))) - (1 - t) * math.log(1 - 1 / (1 + math.exp(-x)))
             for x, t in zip(logits, targets, strict=True)]  # fmt: skip
    assert max(logits) - min(logits) > 0.01
    by_hand = sum(w * term for w, term in zip(weights, terms, strict=True)) / sum(weights)
    assert loss == pytest.approx(by_hand, rel=1e-5)


def trained(examples: list[Any], policy: Path, run_dir: Path) -> dict[str, torch.Tensor]:
    """The weights after three steps."""
    torch.manual_seed(0)
    config = root_config(TrainConfig, output_dir="", model={}, objective={}, examples={}, optimizer={},
                         precision="fp32",
                         batch_size=4, micro_batch_size=2, max_steps=3, learning_rate=1e-2)  # fmt: skip
    model = load_process_reward(str(policy), 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = TorchEngine(model, optimizer, torch.device("cpu"), 1.0)
    run_dir.mkdir()
    Loop(config, engine, ProcessRewardObjective(), Loader(examples, 4, 2, 0), None, Layout(), run_dir).run()
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_a_weight_of_zero_takes_a_read_out_of_training(tmp_path: Path, tiny_policy: Path) -> None:
    """From the file of labels to the trained weights: a label of weight 0 may say anything, one of weight 0.2 not."""

    def rows(doubted: float, weight: float) -> list[StepValues]:
        return [labels(f"t/{k}", [1.0, doubted, (k % 3) / 2], [1.0, weight, 1.0], start=5 + 7 * k) for k in range(8)]

    def weights_after(name: str, doubted: float, weight: float) -> dict[str, torch.Tensor]:
        return trained(load(tmp_path / f"{name}.jsonl", rows(doubted, weight)), tiny_policy, tmp_path / name)

    right, wrong = weights_after("right", 1.0, 0.0), weights_after("wrong", 0.0, 0.0)
    without = [replace(row, labels=[row.labels[0], None, row.labels[2]]) for row in rows(0.0, 0.0)]
    none = trained(load(tmp_path / "none.jsonl", without), tiny_policy, tmp_path / "none")
    for name, value in right.items():
        assert torch.equal(value, wrong[name])
        assert torch.equal(value, none[name])
    some, other = weights_after("some", 1.0, 0.2), weights_after("other", 0.0, 0.2)
    assert any(not torch.equal(some[name], other[name]) for name in some)
    assert any(not torch.equal(some[name], right[name]) for name in some)


def test_a_read_of_weight_zero_in_a_batch_is_out_of_loss_and_gradient(tmp_path: Path, tiny_policy: Path) -> None:
    """The same where the read itself reaches the objective."""
    (example,) = load(tmp_path / "l.jsonl", [labels("t/0", [1.0, 0.5, 0.0])])
    model, objective = reward_model(tiny_policy), ProcessRewardObjective()

    def gradient(weights: list[float], target: float) -> tuple[float, torch.Tensor]:
        batch = objective.collate([replace(example, values=[1.0, target, 0.0], weights=weights)], Layout())
        loss = objective.loss(model, batch).total / objective.count(batch)
        model.zero_grad()
        loss.backward()
        return float(loss.detach()), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    first, second = gradient([1.0, 0.0, 1.0], 1.0), gradient([1.0, 0.0, 1.0], 0.0)
    assert first[0] == second[0]
    assert torch.equal(first[1], second[1])
    assert gradient([1.0, 0.5, 1.0], 1.0)[0] != gradient([1.0, 0.5, 1.0], 0.0)[0]


def test_the_whole_way_from_votes_to_examples(tmp_path: Path) -> None:
    rows = [labels("t/0", [0.5, 0.25, 0.0])]
    found, _ = run(tmp_path, rows, judged("t/0", [[1.0, 1.0, 0.0], [1.0, 0.0, None]], 3), policy="weight")
    assert [row.weights for row in found] == [[1.0, 0.5, 1.0]]
    write_records(tmp_path / "agreed.jsonl", found)
    assert read_records(StepValues, tmp_path / "agreed.jsonl") == found
    (example,) = StepValueExamples(str(tmp_path / "agreed.jsonl"), 100).load(None)
    assert example.weights == [1.0, 0.5, 1.0]
