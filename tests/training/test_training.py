"""The loop on the tiny model: one gradient for every split, resume bit for bit, complete checkpoints."""

import json
import math
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForTokenClassification

from espalier.data.batches.batch import Batch
from espalier.data.batches.loader import Loader
from espalier.data.batches.packing import Layout
from espalier.data.examples.stored_examples import longest_of
from espalier.data.examples.token_examples import OutcomeExample, PairExample, StepExample, TokenExample
from espalier.data.records import BadInput
from espalier.models.load import load_policy, load_reference
from espalier.models.precision import BadPrecision
from espalier.models.scalar_head import load_process_reward, scores_from_logits
from espalier.runtime.schemas import TrainConfig
from espalier.training import checkpoint
from espalier.training.checkpoint import BadCheckpoint, TrainState, checkpoints, write_folder
from espalier.training.engine import TorchEngine
from espalier.training.loop import Loop
from espalier.training.loop_from_config import make_layout
from espalier.training.objectives.bradley_terry import BradleyTerry
from espalier.training.objectives.dpo import DirectPreference
from espalier.training.objectives.dpo_positive import PositivePreference
from espalier.training.objectives.implicit_ce import ImplicitCrossEntropy
from espalier.training.objectives.kto import KahnemanTversky
from espalier.training.objectives.objective import Loss
from espalier.training.objectives.outcome_reward import OutcomeRewardObjective
from espalier.training.objectives.process_reward import ProcessRewardObjective
from espalier.training.objectives.sft import SupervisedFineTuning
from espalier.training.reference_logprobs import FILE, ReferenceLogprobs
from espalier.training.schedule import rate_at
from espalier.training.sums import NotFinite, Sums
from tests.support.root_config import root_config
from tests.support.slow import slow_unless

PADDED = Layout("padded")
CPU = torch.device("cpu")


def tokens(start: int, length: int) -> list[int]:
    return [2 + (start + 3 * i) % 200 for i in range(length)]


DEMONSTRATIONS = [TokenExample(f"d{i}", tokens(i, 6 + i % 5), 2 + i % 3) for i in range(24)]
STEPS = [StepExample(f"s{i}", tokens(i, 8), [2, 4 + i % 3, 7], [0.5, (i % 4) / 4, i % 2]) for i in range(24)]
PAIRS = [PairExample(f"p{i}", tokens(i, 3), tokens(i + 50, 2 + i % 4), tokens(i + 90, 5)) for i in range(24)]


def train_config(**changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "output_dir": "", "model": {}, "objective": {}, "examples": {}, "optimizer": {},
        "precision": "fp32", "batch_size": 8, "micro_batch_size": 4, "max_steps": 6,
        "learning_rate": 1e-2, "warmup_steps": 2, "log_every": 1,
    }  # fmt: skip
    return root_config(TrainConfig, **{**settings, **changes})


OUTCOMES = [
    OutcomeExample(f"o{i}", tokens(i, 6 + i % 5), 3, float(i % 3 == 0), 1.0 + i % 2, tokens(i + 70, 2 + i % 3))
    for i in range(24)
]
WEIGHTED = [
    TokenExample(f"w{i}", tokens(i, 6 + i % 5), 3, [0.5 * (j % 4) - 0.5 for j in range(3 + i % 5)]) for i in range(24)
]
KINDS = ["sft", "sft by sequence", "process reward", "classes", "outcome", "bradley-terry", "dpo", "positive", "kto",
         "implicit ce"]  # fmt: skip


def parts(kind: str, policy: Path) -> tuple[Any, Any, list[Any]]:
    """(objective, model, examples)."""
    path = str(policy)
    if kind.startswith("sft"):
        is_token = kind == "sft"
        objective = SupervisedFineTuning("token" if is_token else "sequence")
        return objective, load_policy(path), DEMONSTRATIONS if is_token else WEIGHTED
    if kind == "dpo":
        return DirectPreference(load_reference(path), beta=0.5), load_policy(path), PAIRS
    if kind == "positive":
        return PositivePreference(load_reference(path), beta=0.5, sft_weight=0.5), load_policy(path), PAIRS
    if kind == "kto":
        return KahnemanTversky(_moved(load_reference(path)), beta=0.5), load_policy(path), OUTCOMES
    if kind == "implicit ce":
        return ImplicitCrossEntropy(load_reference(path), beta=0.5), load_policy(path), OUTCOMES
    if kind == "bradley-terry":
        return BradleyTerry(margin_scale=1.0, centring=0.1), load_process_reward(path, 1), PAIRS
    if kind == "outcome":
        return OutcomeRewardObjective(), load_process_reward(path, 2), OUTCOMES
    return ProcessRewardObjective(), load_process_reward(path, 5 if kind == "classes" else 1), STEPS


def _moved(model: Any) -> Any:
    """The model, away from the policy: a divergence above 0 from the first step on."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
    return model


def make_loop(policy: Path, run_dir: Path, kind: str = "sft", engine: Any = TorchEngine, **changes: Any) -> Loop:
    torch.manual_seed(0)
    config = train_config(**changes)
    objective, model, examples = parts(kind, policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.update.learning_rate, betas=(0.9, 0.95))
    sizes = (config.update.batch_size, config.update.micro_batch_size, config.seed)
    loader = Loader(examples, *sizes, micro_batch_tokens=config.update.micro_batch_tokens)
    made = engine(model, optimizer, CPU, config.update.max_grad_norm)
    layout = make_layout(config, objective, model, longest_of(examples), 0)
    return Loop(config, made, objective, loader, None, layout, run_dir)


def weights(loop: Loop) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in loop.engine.model.state_dict().items()}


def moments(loop: Loop) -> list[torch.Tensor]:
    state = loop.engine.optimizer.state_dict()["state"]  # type: ignore[attr-defined]
    return [row[key] for row in state.values() for key in sorted(row)]


def metric_rows(run_dir: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if "per_second" not in name} for row in rows]


class RecordingEngine(TorchEngine):
    """Keeps the gradients of the last step."""

    gradients: list[torch.Tensor]

    def step(self, learning_rate: float) -> float:
        self.gradients = [p.grad.clone() for p in self.parameters if p.grad is not None]
        return super().step(learning_rate)


@dataclass
class Spoilt:
    """SFT whose loss goes through `spoil(loss, call)`."""

    spoil: Callable[[torch.Tensor, int], torch.Tensor]
    inner: SupervisedFineTuning = field(default_factory=SupervisedFineTuning)
    calls: int = 0

    def collate(self, examples: Any, layout: Layout) -> Batch:
        return self.inner.collate(examples, layout)

    def count(self, batch: Batch) -> float:
        return self.inner.count(batch)

    def loss(self, model: Any, batch: Batch) -> Loss:
        self.calls += 1
        loss = self.inner.loss(model, batch)
        return Loss(self.spoil(loss.total, self.calls), loss.metrics)


@pytest.mark.parametrize("kind", ["sft", "dpo", "process reward"])
def test_the_gradient_does_not_depend_on_a_budget_of_tokens(kind: str, tiny_policy: Path, tmp_path: Path) -> None:
    found = []
    for changes in (
        {"micro_batch_size": 8},
        {"micro_batch_tokens": 24},
        {"micro_batch_tokens": 24, "layout": "padded"},
    ):
        loop = make_loop(tiny_policy, tmp_path, kind, RecordingEngine, **changes)
        values = loop.train_step(0)
        found.append((loop.engine.gradients, values["loss"]))  # type: ignore[attr-defined]
    for gradients, loss in found[1:]:
        assert loss == pytest.approx(found[0][1], abs=1e-5)
        for mine, want in zip(gradients, found[0][0], strict=True):
            torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "kind", slow_unless(lambda kind: kind in ("dpo", "kto"), ["dpo", "positive", "kto", "implicit ce"])
)
def test_a_reference_asked_once_trains_as_one_asked_in_every_step(kind: str, tiny_policy: Path, tmp_path: Path) -> None:
    ends = []
    for how in ("online", "precomputed"):
        (tmp_path / how).mkdir()
        loop = make_loop(tiny_policy, tmp_path / how, kind, max_steps=7, reference_logprobs=how)  # two epochs
        loop.run()
        ends.append((metric_rows(tmp_path / how), weights(loop)))
        asked = getattr(loop.objective, "reference", None)
        assert isinstance(asked, ReferenceLogprobs) == (how == "precomputed")
    first_steps = [rows[0] for rows, _ in ends]
    if kind != "kto":  # whose reference of these tests is another model
        assert [row["train/margin"] for row in first_steps] == [0.0, 0.0]
    for name, value in ends[0][1].items():
        torch.testing.assert_close(ends[1][1][name], value, rtol=1e-3, atol=1e-4)


def test_a_longer_run_asks_the_reference_only_for_the_steps_that_are_missing(
    tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Batch] = []
    others = [PairExample(f"e{i}", tokens(i + 7, 3), tokens(i + 20, 3), tokens(i + 30, 4)) for i in range(4)]
    add = ReferenceLogprobs._add
    monkeypatch.setattr(ReferenceLogprobs, "_add", lambda self, batch: asked.append(batch) or add(self, batch))

    def train(name: str, max_steps: int) -> dict[str, Any]:
        asked.clear()
        (tmp_path / name).mkdir(exist_ok=True)
        how = {"max_steps": max_steps, "save_every": 1, "reference_logprobs": "precomputed"}
        loop = make_loop(tiny_policy, tmp_path / name, "dpo", **how)
        loop.eval_loader = Loader(others, 8, 4, 0)
        loop.run()
        found: dict[str, Any] = json.loads((tmp_path / name / FILE).read_text())
        return found

    want = train("whole", 5)  # more than an epoch of 3 steps
    assert len(asked) == 3 * 2 + 1
    assert train("parted", 2)["steps"] == 2
    assert len(asked) == 2 * 2 + 1
    assert train("parted", 5) == want
    assert len(asked) == 2, "the third step"
    del want["steps"]
    (tmp_path / "parted" / FILE).write_text(json.dumps(want))  # as an earlier version wrote it
    assert train("parted", 6)["sums"] == want["sums"]
    assert len(asked) == 3 * 2 + 1


@pytest.mark.parametrize("call", [2, 8])  # 6 micro-batches of an epoch, then those of the evaluation
def test_a_signal_while_the_reference_reads_ends_the_run_with_143(
    call: int, tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, calls = make_loop(tiny_policy, tmp_path, "dpo", reference_logprobs="precomputed"), [0]
    loop.eval_loader = Loader(PAIRS, 8, 4, 0)
    collate = loop.objective.collate

    def signalled(examples: Any, layout: Layout) -> Batch:
        calls[0] += 1
        if calls[0] == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return collate(examples, layout)

    monkeypatch.setattr(loop.objective, "collate", signalled)
    with pytest.raises(SystemExit) as stopped:
        loop.run()
    assert stopped.value.code == 143
    assert call <= calls[0] <= call + 2
    assert not (tmp_path / FILE).exists()


def test_a_resumed_run_reads_the_log_probs_of_its_reference_back(tiny_policy: Path, tmp_path: Path) -> None:
    for name in ("whole", "parted", "other"):
        (tmp_path / name).mkdir()
    whole = make_loop(tiny_policy, tmp_path / "whole", "dpo", max_steps=8)
    whole.run()
    parted = make_loop(tiny_policy, tmp_path / "parted", "dpo", max_steps=8, save_every=5)
    parted.run()
    file = tmp_path / "parted" / FILE
    written = file.stat().st_mtime_ns
    again = make_loop(tiny_policy, tmp_path / "parted", "dpo", max_steps=8, save_every=5)
    again.run()  # from step 5
    assert file.stat().st_mtime_ns == written
    for name, value in weights(whole).items():
        assert torch.equal(value, weights(again)[name]), name
    other = make_loop(tiny_policy, tmp_path / "other", "dpo", max_steps=8)
    (other.run_dir / FILE).write_text(file.read_text())
    other.loader.examples = [*PAIRS[:-1], replace(PAIRS[-1], chosen_ids=[9, 9])]
    with pytest.raises(BadInput, match=r"does not hold all of .*: delete it, or choose another output_dir"):
        other.run()


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_does_not_depend_on_the_split_into_micro_batches(
    kind: str, tiny_policy: Path, tmp_path: Path
) -> None:
    found = []
    for size in (8, 4, 2, 1):
        loop = make_loop(tiny_policy, tmp_path, kind, RecordingEngine, micro_batch_size=size)
        values = loop.train_step(0)
        found.append((loop.engine.gradients, values["loss"], values["grad_norm"]))  # type: ignore[attr-defined]
    whole, loss, norm = found[0]
    assert sum(float(gradient.abs().sum()) for gradient in whole) > 0
    for gradients, other_loss, other_norm in found[1:]:
        for one, other in zip(whole, gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
        assert other_loss == pytest.approx(loss, abs=1e-6)
        assert other_norm == pytest.approx(norm, abs=1e-6)


@pytest.mark.parametrize(
    "kind",
    slow_unless(lambda kind: kind in ("sft", "kto"), ["sft", "process reward", "bradley-terry", "dpo", "kto"]),
)
def test_stopped_and_resumed_equals_never_stopped_bit_for_bit(kind: str, tiny_policy: Path, tmp_path: Path) -> None:
    straight = make_loop(tiny_policy, tmp_path / "straight", kind, save_every=3)
    (tmp_path / "straight").mkdir()
    straight.run()

    (tmp_path / "stopped").mkdir()
    stopped = make_loop(tiny_policy, tmp_path / "stopped", kind, save_every=3)
    run_step, done = stopped.train_step, []

    def stop_in_step_5(step: int) -> dict[str, float]:
        if step == 4:
            raise KeyboardInterrupt
        done.append(step)
        return run_step(step)

    stopped.train_step = stop_in_step_5  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        stopped.run()
    assert done == [0, 1, 2, 3]

    resumed = make_loop(tiny_policy, tmp_path / "stopped", kind, save_every=3)
    resumed.run()
    assert weights(resumed).keys() == weights(straight).keys()
    for name, value in weights(straight).items():
        assert torch.equal(value, weights(resumed)[name]), name
    for one, other in zip(moments(straight), moments(resumed), strict=True):
        assert torch.equal(one, other)
    assert metric_rows(tmp_path / "stopped") == metric_rows(tmp_path / "straight")
    assert [row["step"] for row in metric_rows(tmp_path / "stopped")] == [1, 2, 3, 4, 5, 6]


def test_the_random_state_goes_on_where_it_stopped(tiny_policy: Path, tmp_path: Path) -> None:
    loop = make_loop(tiny_policy, tmp_path)
    torch.manual_seed(7)
    checkpoint.save(tmp_path, loop.engine, TrainState(1, "data"), keep=1)
    want = torch.rand(3)
    torch.manual_seed(8)
    assert checkpoint.resume(tmp_path, loop.engine, "data") == 1
    assert torch.equal(torch.rand(3), want)


def test_a_run_keeps_the_newest_checkpoints(tiny_policy: Path, tmp_path: Path) -> None:
    make_loop(tiny_policy, tmp_path, save_every=1, checkpoints_keep=2).run()
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000004", "step-00000005"]
    names = sorted(path.name for path in checkpoints(tmp_path)[0].iterdir())
    assert names == ["manifest.json", "pieces", "random-0.json", "state.json"]


def test_a_checkpoint_is_complete_or_absent(tiny_policy: Path, tmp_path: Path) -> None:
    class DyingEngine(TorchEngine):
        def save_state(self, folder: Path) -> None:
            super().save_state(folder)
            raise KeyboardInterrupt  # as far as the folder knows, this is kill -9

    loop = make_loop(tiny_policy, tmp_path, engine=DyingEngine, save_every=3)
    with pytest.raises(KeyboardInterrupt):
        loop.run()
    assert list((tmp_path / "checkpoints" / "step-00000003.partial" / "pieces").iterdir())
    assert checkpoints(tmp_path) == []
    again = make_loop(tiny_policy, tmp_path, save_every=3)
    assert checkpoint.resume(tmp_path, again.engine, "any") == 0
    again.run()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]


def test_a_folder_is_replaced_only_by_a_complete_one(tmp_path: Path) -> None:
    write_folder(tmp_path / "model", lambda folder: (folder / "a").write_text("first") and None)

    def torn(folder: Path) -> None:
        (folder / "a").write_text("second")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_folder(tmp_path / "model", torn)
    assert (tmp_path / "model" / "a").read_text() == "first"
    write_folder(tmp_path / "model", lambda folder: (folder / "b").write_text("third") and None)
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["b", "manifest.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_resume_on_other_examples_is_refused(tiny_policy: Path, tmp_path: Path) -> None:
    make_loop(tiny_policy, tmp_path, save_every=3).run()
    other = make_loop(tiny_policy, tmp_path, save_every=3)
    other.loader.examples = [TokenExample("d0", tokens(99, 6), 2), *DEMONSTRATIONS[1:]]
    with pytest.raises(BadCheckpoint, match="was trained on other examples: choose another output_dir"):
        other.run()


def test_a_length_below_what_is_done_is_refused(tiny_policy: Path, tmp_path: Path) -> None:
    make_loop(tiny_policy, tmp_path, save_every=5).run()
    with pytest.raises(BadCheckpoint, match="has done 5 steps, more than 4"):
        make_loop(tiny_policy, tmp_path, max_steps=4).run()


def test_a_loss_that_is_not_a_number_stops_the_run_with_the_ids(tiny_policy: Path, tmp_path: Path) -> None:
    loop = make_loop(tiny_policy, tmp_path)
    # Two micro-batches a step: the fourth loss is the second micro-batch of step 2.
    loop.objective = Spoilt(lambda total, call: total * float("nan") if call == 4 else total)
    loop.train_step(0)
    before = weights(loop)
    with pytest.raises(NotFinite) as error:
        loop.train_step(1)
    bad = ", ".join(example.id for example in loop.loader.micro_batches(1)[1])
    assert str(error.value) == f"step 2: the loss is nan: examples {bad}"
    assert all(torch.equal(value, before[name]) for name, value in weights(loop).items())


def test_a_gradient_that_is_not_a_number_stops_the_run(tiny_policy: Path, tmp_path: Path) -> None:
    loop = make_loop(tiny_policy, tmp_path, save_every=1)
    loop.objective = Spoilt(lambda total, call: total + torch.sqrt(total * 0) if call == 3 else total)
    with pytest.raises(NotFinite, match="step 2: the gradient norm is nan: examples d"):
        loop.run()
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000001"]


def test_a_step_with_nothing_to_learn_from_stops_the_run(tiny_policy: Path, tmp_path: Path) -> None:
    loop = make_loop(tiny_policy, tmp_path)
    loop.loader.examples = [TokenExample(f"e{i}", [5, 6, 7], 3) for i in range(8)]
    with pytest.raises(NotFinite, match="step 1: nothing to learn from in e"):
        loop.run()


def test_the_baseline_of_kto_is_one_number_for_the_whole_step(tiny_policy: Path, tmp_path: Path) -> None:
    found = []
    for size in (8, 2):
        loop = make_loop(tiny_policy, tmp_path, "kto", micro_batch_size=size)
        values = loop.train_step(0)
        found.append((values["baseline"], values["margin"], loop.objective.step_mean))  # type: ignore[attr-defined]
    assert found[0] == pytest.approx(found[1], abs=1e-5)  # sums over other batches, in float32
    assert found[0][0] == max(0.0, found[0][2]) > 0


def test_a_baseline_of_kto_that_is_not_a_number_stops_the_run(
    tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mean in (math.nan, math.inf, -math.inf):
        loop = make_loop(tiny_policy, tmp_path, "kto")
        monkeypatch.setattr(loop.objective, "measure", lambda model, batch, mean=mean: (mean, 4.0))
        with pytest.raises(NotFinite, match="step 1: the loss is nan: examples o"):
            loop.train_step(0)


def test_the_baseline_of_kto_in_evaluation_is_that_of_all_its_examples(tiny_policy: Path, tmp_path: Path) -> None:
    loop = make_loop(tiny_policy, tmp_path, "kto")
    measured = [
        loop.objective.measure(loop.engine.model, loop.objective.collate(OUTCOMES[:7], PADDED))  # type: ignore[attr-defined]
    ]
    loss = loop.evaluate(Loader(OUTCOMES[:7], 8, 8, 0))["loss"]
    assert loop.evaluate(Loader(OUTCOMES[:7], 8, 2, 0))["loss"] == pytest.approx(loss, abs=1e-6)
    mean = measured[0][0] / measured[0][1]
    assert loop.objective.step_mean == pytest.approx(mean, abs=1e-5)  # type: ignore[attr-defined]


def test_what_is_logged_is_finished_from_its_parts(tiny_policy: Path, tmp_path: Path) -> None:
    values = make_loop(tiny_policy, tmp_path, "bradley-terry").train_step(0)
    assert {"margin", "margin_std", "reward_std", "accuracy", "calibration_error"} <= values.keys()
    assert not [name for name in values if "|" in name]


def test_evaluation_counts_every_example_once(tiny_policy: Path, tmp_path: Path) -> None:
    loop = make_loop(tiny_policy, tmp_path)
    held_out = Loader(DEMONSTRATIONS[:7], batch_size=8, micro_batch_size=4, seed=0)
    batch = loop.objective.collate(DEMONSTRATIONS[:7], PADDED)
    with torch.no_grad():
        total = float(loop.objective.loss(loop.engine.model.eval(), batch).total)
    assert loop.evaluate(held_out)["loss"] == pytest.approx(total / loop.objective.count(batch), abs=1e-6)


def test_a_rank_without_evaluation_examples_sums_the_same_names(
    tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, rows, means = make_loop(tiny_policy, tmp_path), [], Sums.means
    monkeypatch.setattr(Sums, "means", lambda self: rows.append(self.rows) or means(self))
    first, second = (Loader(DEMONSTRATIONS[:1], 2, 1, 0, rank, 2) for rank in (0, 1))
    assert loop.evaluate(first)["loss"] > 1
    assert loop.evaluate(second) == {}, "alone it has counted nothing"
    assert rows[0].keys() == rows[1].keys()
    assert set(rows[1].values()) == {(0.0, 0.0)}


def test_a_run_evaluates_at_its_end_and_logs_it(tiny_policy: Path, tmp_path: Path) -> None:
    loop = make_loop(tiny_policy, tmp_path, max_steps=4, evaluation_every=3, log_every=2)
    loop.eval_loader = Loader(DEMONSTRATIONS[:3], 4, 4, 0)
    loop.run()
    rows = [(row["step"], "eval/loss" in row) for row in metric_rows(tmp_path)]
    assert rows == [(1, False), (2, False), (3, True), (4, False), (4, True)]


def test_the_learning_rate_warms_up_and_falls() -> None:
    config = train_config(learning_rate=8.0, warmup_steps=2)
    config.update.schedule = "linear"
    assert [rate_at(step, 6, config) for step in range(7)] == [4.0, 8.0, 8.0, 6.0, 4.0, 2.0, 0.0]
    config.update.schedule = "constant"
    assert [rate_at(step, 6, config) for step in (0, 1, 2, 5)] == [4.0, 8.0, 8.0, 8.0]
    config.update.schedule = "cosine"
    assert rate_at(4, 6, config) == pytest.approx(4.0)
    assert rate_at(3, 6, config) == pytest.approx(4 * (1 + math.sqrt(0.5)))


def test_a_warm_up_may_be_a_share_of_all_steps() -> None:
    config = train_config(learning_rate=8.0, warmup_steps=5, warmup_share=0.35)
    config.update.schedule = "linear"
    assert [rate_at(step, 6, config) for step in range(7)] == [4.0, 8.0, 8.0, 6.0, 4.0, 2.0, 0.0]
    config.update.warmup_share = 1.0
    with pytest.raises(BadInput, match=r"warmup_share must be in \[0, 1\), got 1.0"):
        rate_at(0, 6, config)


def test_a_misspelt_schedule_or_precision_fails_in_the_first_step(tiny_policy: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="schedule must be one of constant, linear, cosine, got 'cosin'"):
        make_loop(tiny_policy, tmp_path, schedule="cosin").run()
    with pytest.raises(BadPrecision, match="precision must be auto, bf16 or fp32, got 'fp16'"):
        make_loop(tiny_policy, tmp_path, precision="fp16").run()


def test_the_number_of_steps_follows_from_the_epochs(tiny_policy: Path, tmp_path: Path) -> None:
    assert make_loop(tiny_policy, tmp_path, max_steps=0, num_epochs=2.0).max_steps == 6
    assert make_loop(tiny_policy, tmp_path, max_steps=0, num_epochs=0.5).max_steps == 2
    assert make_loop(tiny_policy, tmp_path, max_steps=0, num_epochs=0.01).max_steps == 1


@pytest.mark.parametrize(("max_grad_norm", "moved"), [(1.0, [0.6, 0.8]), (10.0, [3.0, 4.0]), (0.0, [3.0, 4.0])])
def test_a_gradient_is_clipped_to_its_norm_and_0_does_not_clip(max_grad_norm: float, moved: list[float]) -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    engine = TorchEngine(model, torch.optim.SGD(model.parameters(), lr=0.1), CPU, max_grad_norm)
    engine.backward((model.weight * torch.tensor([[3.0, 4.0]])).sum())
    assert engine.step(learning_rate=1.0) == pytest.approx(5.0)
    torch.testing.assert_close(model.weight.detach(), -torch.tensor([moved]))
    assert model.weight.grad is None


def test_a_trained_process_reward_model_is_a_standard_folder(tiny_policy: Path, tmp_path: Path) -> None:
    loop = make_loop(tiny_policy, tmp_path, "process reward", learning_rate=1e-3)
    loop.run()
    rows = metric_rows(tmp_path)
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]
    write_folder(tmp_path / "model", loop.engine.save_model)
    ids = torch.tensor([STEPS[0].ids])
    scores = []
    for model in (loop.engine.model, AutoModelForTokenClassification.from_pretrained(tmp_path / "model")):
        with torch.no_grad():
            scores.append(scores_from_logits(model.eval()(input_ids=ids).logits)[0, STEPS[0].positions])
    assert torch.equal(scores[0], scores[1])
    assert float((scores[0] - 0.5).abs().max()) > 1e-3
