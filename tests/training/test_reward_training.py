"""What training a reward model adds: the head alone, prompts of equal weight, benchmark rows that are refused; and how
its reward is put to a scale."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid

from espalier.data.batches.packing import Layout
from espalier.data.examples.token_examples import (
    PairExample,
    StepExample,
    TokenExample,
    balanced_prompts,
    examples_fingerprint,
)
from espalier.data.jsonl import write_records
from espalier.data.ranked_responses import RankedResponses
from espalier.data.records import BadInput, Trajectory
from espalier.data.seen_responses import response_hash
from espalier.models.load import BadModel
from espalier.models.scalar_head import load_process_reward
from espalier.rewards.composed import ComposedReward
from espalier.rewards.outcome_model import OutcomeModelReward
from espalier.runtime.schemas import TrainConfig
from espalier.training.engine import TorchEngine
from espalier.training.loop_from_config import make_engine
from espalier.training.objectives.bradley_terry import BradleyTerry
from espalier.training.objectives.dpo import DirectPreference
from espalier.training.trained_on import check_benchmarks, trained_responses
from tests.support.objective_cases import Fixed
from tests.support.root_config import root_config

PADDED = Layout("padded")
PAIRS = [
    PairExample("a", [5, 6], [7, 8], [9]),
    PairExample("b", [5, 6], [3], [4]),
    PairExample("c", [4], [3, 2], [8, 8]),
]


def test_the_head_alone_is_trained_with_no_state_or_decay_for_the_body(tiny_policy: Path) -> None:
    model = load_process_reward(str(tiny_policy), 1, trains="head")
    with torch.no_grad():
        model.score.weight.fill_(0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = {"_target_": "torch.optim.AdamW", "weight_decay": 0.5}
    config = root_config(TrainConfig, output_dir="", optimizer=optimizer, update_learning_rate=0.1)
    engine = make_engine(config, model)
    assert isinstance(engine, TorchEngine)
    held = [parameter for group in engine.optimizer.param_groups for parameter in group["params"]]
    assert sum(parameter.numel() for parameter in held) == model.config.hidden_size + 1
    objective = BradleyTerry()
    for _ in range(2):
        engine.backward(objective.loss(model, objective.collate(PAIRS, PADDED)).total)
        engine.step(0.1)
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {"score.weight"}  # pairs leave the bias open
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(BadModel, match=r"model.trains must be all or head, got 'body'"):
        load_process_reward(str(tiny_policy), 1, trains="body")


def test_prompts_of_equal_weight_share_it_among_their_pairs() -> None:
    weighted = balanced_prompts(PAIRS)
    assert [pair.weight for pair in weighted] == [0.75, 0.75, 1.5]  # 3 pairs, 2 prompts
    logits = torch.randn(6, 5, 1, generator=torch.Generator().manual_seed(0))
    objective = BradleyTerry()
    batch = objective.collate(weighted, PADDED)
    ends = [3, 2, 2, 2, 2, 2]
    reads = [float(logits[row, end]) for row, end in enumerate(ends)]
    losses = [-float(logsigmoid(torch.tensor(good - bad))) for good, bad in zip(reads[0::2], reads[1::2], strict=True)]
    want = 0.75 * losses[0] + 0.75 * losses[1] + 1.5 * losses[2]
    assert objective.count(batch) == pytest.approx(3.0)
    assert float(objective.loss(Fixed(logits), batch).total) == pytest.approx(want, abs=1e-5)
    with pytest.raises(BadInput, match=r"examples.balances_prompts is for objective=bradley_terry"):
        DirectPreference(None).collate(weighted, PADDED)


def test_weights_change_the_fingerprint_and_no_weights_keep_it() -> None:
    assert "weight" not in repr(PAIRS[0])
    assert examples_fingerprint(PAIRS) == examples_fingerprint([replace(pair, weight=1.0) for pair in PAIRS])
    assert examples_fingerprint(PAIRS) != examples_fingerprint(balanced_prompts(PAIRS))


def test_benchmark_rows_among_the_pairs_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    ids = {text: [*tokenizer(text).input_ids, tokenizer.eos_token_id] for text in ("Three apples.", "Four apples.")}
    pairs = [PairExample("p", [5], ids["Three apples."], ids["Four apples."])]
    assert trained_responses(pairs, tokenizer) == {response_hash("three  apples."), response_hash("Four apples.")}
    file = tmp_path / "rows.jsonl"
    write_records(file, [RankedResponses("s/1", "s", "Q", ["Three apples."], ["Four apples.", "Five."])])
    with pytest.raises(
        BadInput, match=r"pairs.jsonl holds 1 of 1 rows of .* a model trained on them cannot be evaluated"
    ):
        check_benchmarks(pairs, [str(file)], tokenizer, "pairs.jsonl")
    write_records(file, [RankedResponses("s/1", "s", "Q", ["Three apples."], ["Five."])])
    check_benchmarks(pairs, [str(file)], tokenizer, "pairs.jsonl")
    check_benchmarks(pairs, [], tokenizer, "pairs.jsonl")


def test_benchmark_rows_that_are_imitated_are_refused_and_steps_cannot_be_compared(
    tokenizer: Any, tmp_path: Path
) -> None:
    long = "Three apples and four pens are seven things, " * 3
    answer = [*tokenizer(long).input_ids, tokenizer.eos_token_id]
    file = tmp_path / "rows.jsonl"
    write_records(file, [RankedResponses("s/1", "s", "Q", [long], ["Five."])])
    turns = TokenExample("t", [5, 6, *answer, 7, 7], 1, [0.0, *[1.0] * len(answer), 0.0, 0.0])
    weights = [1.0] * len(answer)
    weights[3] = 0.0
    holed = TokenExample("h", [5, 6, *answer, 7], 1, [0.0, *weights, 0.0])
    for example in (TokenExample("d", [5, *answer], 1), turns, holed):
        with pytest.raises(BadInput, match=r"chats\.jsonl holds 1 of 1 rows of"):
            check_benchmarks([example], [str(file)], tokenizer, "chats.jsonl")
    masked = TokenExample("m", [5, *answer, 8], 1, [*[0.0] * len(answer), 1.0])
    check_benchmarks([masked], [str(file)], tokenizer, "chats.jsonl")
    with pytest.raises(BadInput, match=r"compares whole responses, and steps\.jsonl holds steps: leave it out"):
        check_benchmarks([StepExample("s", [5, 6], [1], [1.0])], [str(file)], tokenizer, "steps.jsonl")


ROW = Trajectory("p/0", "p", "Q\n", "a", ["a"], [5, 6], [7, 8], [2], "stop", "7", "7", True)


def test_a_reward_is_normalised_then_clipped_and_a_cut_response_gets_the_penalty_alone(
    tiny_prm: Path, tmp_path: Path
) -> None:
    plain = OutcomeModelReward(str(tiny_prm))([ROW])[0].outcome
    path = tmp_path / "reward_model.json"
    path.write_text(json.dumps({"reward": {"mean": plain - 3.0, "std": 2.0}}))
    assert OutcomeModelReward(str(tiny_prm), normaliser=str(path))([ROW])[0].outcome == pytest.approx(1.5, abs=1e-6)
    clipped = OutcomeModelReward(str(tiny_prm), normaliser=str(path), limit=1.0)
    assert clipped([ROW])[0].outcome == 1.0
    composed = ComposedReward({"model": clipped}, non_stop_reward=-5.0)
    whole, cut = composed([ROW, replace(ROW, finish_reason="length")])
    assert (whole.outcome, cut.outcome) == (1.0, -5.0)


def test_a_scale_that_says_nothing_is_refused(tiny_prm: Path, tmp_path: Path) -> None:
    path = tmp_path / "reward_model.json"
    path.write_text(json.dumps({"reward": {"mean": 0.0, "std": 0.0}}))
    with pytest.raises(BadInput, match="rewards of mean 0 and std 0 cannot be normalised"):
        OutcomeModelReward(str(tiny_prm), normaliser=str(path))
    path.write_text(json.dumps({"kind": "responses"}))
    with pytest.raises(BadInput, match="says no mean and std of rewards"):
        OutcomeModelReward(str(tiny_prm), normaliser=str(path))
    with pytest.raises(BadInput, match="a normaliser is for rewards of form logit"):
        OutcomeModelReward(str(tiny_prm), form="probability", normaliser=str(path))
    assert math.isfinite(OutcomeModelReward(str(tiny_prm))([ROW])[0].outcome)
