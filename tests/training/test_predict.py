"""Scores of a data set: equal to a forward pass of each row alone; resumed by id; every row once on any ranks."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from benchmarks.processes.forked import run_ranks
from espalier.data.examples.token_examples import OutcomeExample, PairExample, StepExample, TokenExample, example_length
from espalier.data.jsonl import read_records, write_records
from espalier.data.predictions import PairLogprobs, PairRewards, ResponseLogprobs, RewardPrediction, StepPredictions
from espalier.data.records import BadInput, Demonstration, PreferencePair
from espalier.models.load import BadModel, load_policy, load_tokenizer
from espalier.models.lora import Lora
from espalier.models.scalar_head import load_process_reward
from espalier.runtime.base_model import write_base
from espalier.runtime.entrypoint import BadConfig
from espalier.runtime.fingerprints import model_fingerprint
from espalier.runtime.run_dir import name_of
from espalier.runtime.schemas import PredictConfig, TrainConfig
from espalier.training import checkpoint
from espalier.training.engine import TorchEngine
from espalier.training.predict import batches_by_length, find_checkpoints, load_checkpoint, predict
from espalier.training.scoring import Scorer

IDS = [5 + 7 * i % 200 for i in range(30)]
PAIRS = [PairExample(f"p{i}", IDS[: 3 + i], IDS[7 : 9 + i], IDS[4:9]) for i in range(6)]


def logprob_sum(model: Any, ids: list[int], start: int) -> float:
    """In float64, from one row without padding."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0].double()
    found = torch.log_softmax(logits, -1)
    return sum(float(found[place - 1, ids[place]]) for place in range(start, len(ids)))


@pytest.fixture(scope="module")
def policy(tiny_policy: Path) -> Any:
    return load_policy(str(tiny_policy)).eval()


@pytest.fixture(scope="module")
def moved(tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that is not its reference, with its tokenizer."""
    model, generator = load_policy(str(tiny_policy)), torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    folder = tmp_path_factory.mktemp("moved") / "run" / "model"
    model.save_pretrained(folder)
    load_tokenizer(str(tiny_policy)).save_pretrained(folder)
    return folder.parent


def test_log_probs_of_responses_are_those_of_a_row_alone(policy: Any) -> None:
    examples = [TokenExample(f"t{i}", IDS[: 8 + 2 * i], 3 + i) for i in range(5)]
    for example, row in zip(examples, Scorer(policy, 0, "fp32").score(examples), strict=True):
        assert isinstance(row, ResponseLogprobs)
        assert row.logprob == pytest.approx(logprob_sum(policy, example.ids, example.prompt_length), abs=1e-4)
        assert len(row.token_logprobs) == len(example.ids) - example.prompt_length
        assert sum(row.token_logprobs) == pytest.approx(row.logprob, abs=1e-4)


def test_rewards_and_margins_of_pairs_by_hand(policy: Any, moved: Path) -> None:
    other = load_policy(str(moved / "model")).eval()
    reference = {row.id: row for row in Scorer(policy, 0, "fp32").score(PAIRS)}
    rows = Scorer(other, 0, "fp32", beta=0.5, references=reference).score(PAIRS)
    means = Scorer(other, 0, "fp32", beta=0.5, is_length_normalised=True, references=reference).score(PAIRS)
    for pair, row, mean in zip(PAIRS, rows, means, strict=True):
        assert isinstance(row, PairLogprobs)
        assert isinstance(mean, PairLogprobs)
        ratios = []
        for side in (pair.chosen_ids, pair.rejected_ids):
            both = [logprob_sum(m, [*pair.prompt_ids, *side], len(pair.prompt_ids)) for m in (other, policy)]
            ratios.append(0.5 * (both[0] - both[1]))
        assert (row.num_chosen_tokens, row.num_rejected_tokens) == (len(pair.chosen_ids), 5)
        assert [row.chosen_reward, row.rejected_reward] == pytest.approx(ratios, abs=1e-4)
        assert row.margin == pytest.approx(ratios[0] - ratios[1], abs=1e-4)
        assert mean.margin == pytest.approx(ratios[0] / len(pair.chosen_ids) - ratios[1] / 5, abs=1e-4)


def test_the_margin_of_a_policy_that_is_its_reference_is_zero(policy: Any) -> None:
    reference = {row.id: row for row in Scorer(policy, 0, "bf16").score(PAIRS)}
    rows = Scorer(policy, 0, "bf16", references=reference).score(PAIRS)
    assert {row.margin for row in rows if isinstance(row, PairLogprobs)} == {0.0}


@pytest.mark.parametrize("num_labels", [1, 3])
def test_scores_of_steps_and_responses_are_read_where_they_stand(num_labels: int, tiny_policy: Path) -> None:
    model = load_process_reward(str(tiny_policy), num_labels).eval()
    torch.nn.init.normal_(model.get_submodule("score").weight, generator=torch.Generator().manual_seed(0))
    steps = [StepExample(f"s{i}", IDS[: 9 + i], [2, 6, 8 + i], [0.875, 0.0, 1.0]) for i in range(3)]
    outcomes = [OutcomeExample(f"o{i}", IDS[: 9 + i], 3, 0.5) for i in range(3)]
    scorer = Scorer(model, 0, "fp32")
    for i, (step, outcome) in enumerate(zip(scorer.score(steps), scorer.score(outcomes), strict=True)):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([IDS[: 9 + i]])).logits[0].double()
        shares = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
        want = torch.sigmoid(logits[:, 0]) if num_labels == 1 else torch.softmax(logits, -1) @ shares
        assert isinstance(step, StepPredictions)
        assert step.scores == pytest.approx([float(want[place]) for place in (2, 6, 8 + i)], abs=1e-5)
        assert step.targets == [0.875, 0.0, 1.0]
        assert isinstance(outcome, RewardPrediction)
        assert (outcome.score, outcome.target) == (pytest.approx(float(want[-1]), abs=1e-5), 0.5)
        assert outcome.reward == (pytest.approx(float(logits[-1, 0]), abs=1e-5) if num_labels == 1 else None)
    if num_labels == 1:
        row = scorer.score(PAIRS[:1])[0]
        assert isinstance(row, PairRewards)
        assert row.margin == pytest.approx(row.chosen_reward - row.rejected_reward, abs=2e-6) != 0
    else:
        with pytest.raises(BadInput, match="pairs are scored by a head of one label, not 3"):
            scorer.score(PAIRS)


def test_batches_keep_to_their_tokens_and_hold_every_example_once() -> None:
    places = batches_by_length(dict(enumerate(map(example_length, PAIRS))), 2, 60)
    batches = [[PAIRS[place] for place in batch] for batch in places]
    assert sorted(pair.id for batch in batches for pair in batch) == [f"p{i}" for i in range(6)]
    assert len(batches) > 1
    for batch in batches:
        longest = max(len(p.prompt_ids) + max(len(p.chosen_ids), len(p.rejected_ids)) for p in batch)
        assert len(batch) == 1 or 2 * len(batch) * longest <= 60


def record(pair: PairExample) -> PreferencePair:
    sides = (pair.prompt_ids, pair.chosen_ids, pair.rejected_ids)
    return PreferencePair(pair.id, "q", "outcome", "", "", "", *sides, 1.0, 0.0)


@pytest.fixture
def config(tiny_policy: Path, moved: Path, tmp_path: Path) -> TrainConfig:
    """Pairs scored with two checkpoints of the tiny policy."""
    write_records(tmp_path / "pairs.jsonl", map(record, PAIRS))
    reference = {"_target_": "espalier.models.load.load_reference", "path": str(tiny_policy), "attention": "eager"}
    objective = {"_target_": "espalier.training.objectives.dpo.DirectPreference", "beta": 0.5, "reference": reference}
    return TrainConfig(
        output_dir=str(tmp_path / "scores"),
        model={"_target_": "espalier.models.load.load_policy", "path": str(tiny_policy), "attention": "eager"},
        objective=objective,
        examples={
            "_target_": "espalier.data.examples.token_examples.PreferenceExamples",
            "path": f"{tmp_path}/pairs.jsonl",
            "max_length": 60,
        },
        optimizer={},
        precision="fp32",
        predict=PredictConfig({"first": str(tiny_policy), "moved": str(moved)}, batch_tokens=60),
    )


def rows_of(config: TrainConfig, name: str) -> list[PairLogprobs]:
    return read_records(PairLogprobs, Path(config.output_dir) / f"{name}.jsonl")


def test_many_checkpoints_make_a_file_each_beside_one_of_the_reference(config: TrainConfig, tiny_policy: Path) -> None:
    predict(config, load_tokenizer(str(tiny_policy)))
    names = sorted(path.name for path in Path(config.output_dir).iterdir())
    assert names == [f"{name}.{end}" for name in ("first", "moved", "reference") for end in ("jsonl", "meta.json")]
    assert [row.id for row in rows_of(config, "moved")] == [pair.id for pair in PAIRS], "in the order of the examples"
    assert {row.margin for row in rows_of(config, "first")} == {0.0}
    assert all(row.margin for row in rows_of(config, "moved"))
    meta = json.loads((Path(config.output_dir) / "moved.meta.json").read_text())
    assert meta["counts"] == {"rows": 6, "kind": "PairLogprobs", "resumed": 0, "ranks": 1}


def test_a_stopped_run_scores_only_what_is_missing(
    config: TrainConfig, tiny_policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, score = load_tokenizer(str(tiny_policy)), Scorer.score
    predict(config, tokenizer)
    want = {name: rows_of(config, name) for name in ("first", "moved")}
    shutil.rmtree(config.output_dir)
    scored: list[str] = []

    def killed(self: Scorer, examples: Any) -> Any:
        if len(scored) >= 9:
            raise KeyboardInterrupt
        scored.extend(example.id for example in examples)
        return score(self, examples)

    monkeypatch.setattr(Scorer, "score", killed)
    with pytest.raises(KeyboardInterrupt):
        predict(config, tokenizer)
    before = list(scored)
    part = Path(config.output_dir) / "first.parts" / "rank-0.jsonl"
    part.write_text(part.read_text() + '{"id":"p5","chosen_lo')  # torn by kill -9
    part.rename(part.with_name("rank-3.jsonl"))  # as if more ranks had been at it
    monkeypatch.setattr(Scorer, "score", lambda self, rows: scored.extend(r.id for r in rows) or score(self, rows))
    predict(config, tokenizer)
    assert len(before) >= 9
    assert sorted(scored) == sorted([pair.id for pair in PAIRS] * 3), "reference, first, moved: each row once"
    for name, rows in want.items():
        for one, other in zip(rows, rows_of(config, name), strict=True):
            assert (one.id, one.margin) == (other.id, pytest.approx(other.margin, abs=2e-5))
    scored.clear()
    predict(config, tokenizer)
    assert scored == [], "complete files are passed over"


def test_rows_of_other_data_or_weights_are_not_gone_on_with(config: TrainConfig, tiny_policy: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_policy))
    predict(config, tokenizer)
    with pytest.raises(BadInput, match=r"made otherwise \(objective.beta was 0.5, now 0.25\)"):
        predict(replace(config, objective={**config.objective, "beta": 0.25}), tokenizer)
    write_records(config.examples["path"], map(record, PAIRS[:5]))
    with pytest.raises(BadInput, match=r"made otherwise \(its input examples has changed\): choose another"):
        predict(config, tokenizer)


def test_a_process_reward_model_gives_scores_of_its_own_kind(tiny_policy: Path, tmp_path: Path) -> None:
    """Without a trained head there is nothing to score with."""
    write_records(tmp_path / "d.jsonl", [Demonstration("a", "1 + 1?", " 2")])
    config = TrainConfig(
        output_dir=str(tmp_path / "scores"),
        model={
            "_target_": "espalier.models.scalar_head.load_process_reward",
            "path": str(tiny_policy),
            "num_labels": 1,
        },
        objective={"_target_": "espalier.training.objectives.process_reward.ProcessRewardObjective"},
        examples={
            "_target_": "espalier.data.examples.token_examples.DemonstrationExamples",
            "path": f"{tmp_path}/d.jsonl",
            "max_length": 60,
        },
        optimizer={},
    )
    with pytest.raises(ValueError, match="is no process reward model: train one"):
        predict(config, load_tokenizer(str(tiny_policy)))
    load_process_reward(str(tiny_policy), 1).save_pretrained(tmp_path / "prm")
    config = replace(config, predict=PredictConfig([str(tmp_path / "prm")]))
    with pytest.raises(BadInput, match="a scalar head cannot score a TokenExample: set model=process_reward for step"):
        predict(config, load_tokenizer(str(tiny_policy)))


def test_checkpoints_are_named_and_found(tmp_path: Path) -> None:
    for name in ("a/checkpoints/step-1", "a/checkpoints/step-2", "run/model"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "run" / "model" / "config.json").write_text("{}")
    found = find_checkpoints([f"{tmp_path}/a/checkpoints/*", f"{tmp_path}/run"], tmp_path, "policy")
    assert [Path(row.path).name for row in found] == ["step-1", "step-2", "model"]
    assert [row.name for row in found][:2] == ["a-step-1", "a-step-2"]
    assert [row.name for row in find_checkpoints(None, tmp_path, "some/policy")] == [name_of("some/policy")]
    for wanted, message in (
        ({"reference": "a"}, "'reference' is no name"),
        (["x/a/model", "x/a"], "would both be 'x-a': give names"),
        ([f"{tmp_path}/b*"], "no folder matches"),
    ):
        with pytest.raises(BadInput, match=message):
            find_checkpoints(wanted, tmp_path, "policy")


def test_what_cannot_be_had_is_refused(config: TrainConfig, tiny_policy: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_policy))
    with pytest.raises(BadConfig, match="keeps a whole model on every rank: set deepspeed=none"):
        predict(replace(config, deepspeed={"zero_optimization": {}}), tokenizer)
    (tmp_path / "config.yaml").write_text("{}")
    with pytest.raises(BadConfig, match="holds a training run: choose another output_dir"):
        predict(replace(config, output_dir=str(tmp_path)), tokenizer)


def same_weights(one: Any, other: Any) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_checkpoint_of_a_run_and_an_adapter_are_read_too(config: TrainConfig, moved: Path, tmp_path: Path) -> None:
    model = load_policy(str(moved / "model"), "eager")
    engine = TorchEngine(model, torch.optim.AdamW(model.parameters()), torch.device("cpu"), 1.0)
    checkpoint.save(tmp_path / "run", engine, checkpoint.TrainState(3, "data"), keep=1)
    path = str(tmp_path / "run" / "checkpoints" / "step-00000003")
    found = load_checkpoint(config, path)
    assert same_weights(found, model)
    assert not found.training
    (row,) = find_checkpoints(path, tmp_path, "policy")
    assert row.name == "run-step-00000003"
    assert len(row.fingerprint()) == 64

    adapted = Lora(rank=2).wrap(load_policy(config.model["path"], "eager"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.constant_(parameter, 0.01)
    adapted.save_pretrained(tmp_path / "adapter")
    merged = adapted.merge_and_unload(safe_merge=True)
    assert same_weights(load_checkpoint(config, str(tmp_path / "adapter")), merged)


def shaken_adapter(base: str) -> Any:
    """Adapters that change what the policy says."""
    torch.manual_seed(0)
    adapted = Lora(rank=2, alpha=4.0).wrap(load_policy(base, "eager"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return adapted


def test_an_adapter_is_scored_on_one_base_alone(
    config: TrainConfig, moved: Path, tiny_policy: Path, tmp_path: Path
) -> None:
    tokenizer, adapter, base = load_tokenizer(str(tiny_policy)), tmp_path / "adapter", config.model["path"]
    shaken_adapter(base).save_pretrained(adapter)
    config = replace(config, objective={}, predict=PredictConfig({"a": str(adapter)}))
    other = replace(config, model={**config.model, "path": str(moved / "model")})
    predict(config, tokenizer)
    with pytest.raises(BadInput, match=r"a.jsonl was made otherwise \(its input base has changed\)"):
        predict(other, tokenizer)
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(tiny_policy, elsewhere)  # the same weights
    predict(replace(config, model={**config.model, "path": str(elsewhere)}), tokenizer)
    write_base(adapter, model_fingerprint(base))
    assert load_checkpoint(config, str(adapter)) is not None
    with pytest.raises(BadConfig, match=r"adapter was trained on another model than stands at .*/model now"):
        load_checkpoint(other, str(adapter))


def test_a_checkpoint_is_read_with_the_settings_of_its_run(
    config: TrainConfig, moved: Path, tiny_policy: Path, tmp_path: Path
) -> None:
    lora = {"_target_": "espalier.models.lora.Lora", "rank": 2, "alpha": 4.0, "dropout": 0.1}
    config, run, base = replace(config, objective={}, lora=lora), tmp_path / "run", config.model["path"]
    model = shaken_adapter(base)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine = TorchEngine(model, torch.optim.AdamW(trained), torch.device("cpu"), 1.0)
    checkpoint.save(run, engine, checkpoint.TrainState(3, "data"), keep=1)
    path = str(run / "checkpoints" / "step-00000003")
    asked = replace(config, predict=PredictConfig({"a": path}))
    predict(asked, load_tokenizer(str(tiny_policy)))  # a checkpoint that lies in no run
    with pytest.raises(BadInput, match=r"a.jsonl was made otherwise \(lora.alpha was 4.0, now 32.0\)"):
        predict(replace(asked, lora={**lora, "alpha": 32.0}), load_tokenizer(str(tiny_policy)))

    (run / "config.yaml").write_text(yaml.safe_dump({"model": config.model, "lora": lora}))
    (run / "provenance.yaml").write_text(yaml.safe_dump({"inputs": {base: model_fingerprint(base)}}))
    same = replace(config, lora={**lora, "dropout": 0.0}, model={**config.model, "attention": "sdpa"})
    assert same_weights(load_checkpoint(same, path), model)
    for changes, told in (
        ({"lora": {**lora, "alpha": 32.0}}, "its run has lora.alpha=4.0, not 32.0: give that run's settings of model"),
        ({"lora": {**lora, "is_dora": True}}, "its run has lora.is_dora="),
        ({"lora": None}, "its run has lora._target_=espalier.models.lora.Lora, not None"),
        ({"model": {**config.model, "path": str(moved / "model")}}, "step-00000003 was trained on another model than"),
    ):
        with pytest.raises(BadConfig, match=told):
            load_checkpoint(replace(config, **changes), path)


def test_a_damaged_checkpoint_is_refused(config: TrainConfig, moved: Path, tmp_path: Path) -> None:
    model = load_policy(str(moved / "model"), "eager")
    engine = TorchEngine(model, torch.optim.AdamW(model.parameters()), torch.device("cpu"), 1.0)
    checkpoint.save(tmp_path / "run", engine, checkpoint.TrainState(3, "data"), keep=1)
    folder = tmp_path / "run" / "checkpoints" / "step-00000003"
    (shard,) = (folder / "pieces").glob("shard-*")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1  # a number, which no reader of the format would miss
    shard.write_bytes(content)
    with pytest.raises(BadModel, match=r"step-00000003 is damaged: pieces/shard-.* has other bytes than were written"):
        load_checkpoint(config, str(folder))


def test_two_ranks_score_every_row_once(tiny_policy: Path, tmp_path: Path, config: TrainConfig) -> None:
    """The real program on two gloo ranks, against one process."""
    files = ["-cn", "train", "objective=dpo", "examples=preferences", f"model.path={tiny_policy}", "precision=fp32",
             f"examples.path={config.examples['path']}", "examples.max_length=60", "objective.beta=0.5",
             "model.attention=eager", "predict.batch_tokens=60", "mode=predict"]  # fmt: skip
    settings = [f"predict.checkpoints={{moved: {config.predict.checkpoints['moved']}}}", f"output_dir={tmp_path}/two"]
    codes = run_ranks("trainer_base_ds_mul.py", [*files, *settings], tmp_path / "log", 2)
    assert codes == [0, 0], (tmp_path / "log").read_text()[-3000:]
    predict(config, load_tokenizer(str(tiny_policy)))
    one = {row.id: row for row in rows_of(config, "moved")}
    two = read_records(PairLogprobs, tmp_path / "two" / "moved.jsonl")
    assert [row.id for row in two] == list(one)
    for row in two:
        assert row.margin == pytest.approx(one[row.id].margin, abs=2e-5)
    assert json.loads((tmp_path / "two" / "moved.meta.json").read_text())["counts"]["ranks"] == 2
