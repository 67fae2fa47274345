"""Gradient variance and distances of policies: by hand on small vectors, by plain autograd on the tiny policy."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import save_file

from espalier.analysis.analyzers.gradient_variance import (
    CreditedRollout,
    GradientMoments,
    MeasureGradientVariance,
    batch_gradient,
    credit,
    deal,
    token_advantages,
)
from espalier.analysis.analyzers.policy_distance import MeasurePolicyDistance, response_sums, weight_distance
from espalier.data.jsonl import write_json, write_records
from espalier.data.records import BadInput, StepValues, Trajectory
from espalier.data.steps import Decoder
from espalier.models.load import BadModel, load_policy, load_tokenizer
from espalier.pipeline.stage import StageContext
from espalier.runtime.fingerprints import model_fingerprint

Row = TypeVar("Row", StepValues, Trajectory)


def context(folder: Path) -> StageContext:
    return StageContext(None, folder / "out.json", 10.0)


def row(name: str, ids: list[int], values: list[float | None], is_correct: bool) -> StepValues:
    """One token per step."""
    size = len(ids)
    return StepValues(name, name.partition("/")[0], "Q", ["s"] * size, [5, 6], ids, list(range(1, size + 1)),
                      [*values, float(is_correct)], [0] * size, [0] * size, is_correct)  # fmt: skip


def in_words(folder: Path, rows: Sequence[Row]) -> list[Row]:
    """The rows with what their tokens read as, one step for all of them."""
    decode = Decoder(load_tokenizer(str(folder)))
    return [replace(row, steps=[decode(row.response_ids)] + [""] * (len(row.steps) - 1)) for row in rows]


def sampled(path: Path, policy: Path, temperature: float, top_p: float = 1.0) -> None:
    """The provenance of a file that this policy sampled."""
    config = {"policy": str(policy), "params": {"temperature": temperature, "top_p": top_p}}
    write_json(path.with_suffix(".meta.json"),
               {"config": config, "inputs": {str(policy): model_fingerprint(str(policy))}})  # fmt: skip


ROWS = [row("p/0", [7, 8, 9], [0.5, 0.75], True), row("p/1", [7, 9], [0.25], False), row("p/2", [8], [], False),
        row("q/0", [8, 8], [0.5], True)]  # fmt: skip


def test_step_credit_goes_from_the_baseline_to_the_outcome_by_the_values() -> None:
    """The baseline of p/0 is the mean of 0 and 0, that of the others of 1 and 0; q has one rollout and no baseline."""
    found = credit(ROWS, {"mc": {one.id: one.values for one in ROWS}})
    assert list(found) == ["p"]
    assert [rollout.advantages for rollout in found["p"]] == [
        {"outcome": [1.0, 1.0, 1.0], "mc": [0.5, 0.25, 0.25]},
        {"outcome": [-0.5, -0.5], "mc": [-0.25, -0.25]},
        {"outcome": [-0.5], "mc": [-0.5]},
    ]


def test_a_rollout_with_an_unknown_value_is_left_out_but_counts_in_the_baseline() -> None:
    rows = [ROWS[0], row("p/1", [7, 9], [None], False), ROWS[2]]
    found = credit(rows, {"mc": {one.id: one.values for one in rows}})["p"]
    assert [rollout.advantages["mc"] for rollout in found] == [[0.5, 0.25, 0.25], [-0.5]]


def test_tokens_have_their_steps_advantage_and_none_behind_the_last_step() -> None:
    rollout = CreditedRollout([1], [7, 8, 9, 2], [2, 3], {"mc": [0.5, -1.0]})
    assert token_advantages(rollout, "mc") == [0.5, 0.5, -1.0, 0.0]


def test_figures_of_three_gradients_by_hand() -> None:
    """(3, 0), (0, 4), (3, 4): their mean is (2, 8/3), of norm 100/9 squared; cosines 0, 3/5 and 4/5."""
    moments = GradientMoments()
    for gradient in ([3.0, 0.0], [0.0, 4.0], [3.0, 4.0]):
        moments.add(torch.tensor(gradient))
    found = moments.figures(num_rollouts=6)
    assert found["variance"] == pytest.approx((50 - 3 * 100 / 9) / 2)
    assert found["squared_norm"] == pytest.approx(100 / 9 - 25 / 9)
    assert found["noise_scale"] == pytest.approx(6.0)
    assert found["cosine"] == pytest.approx((0 + 3 / 5 + 4 / 5) / 3)
    assert found["norms"] == [3.0, 4.0, 5.0]
    other = GradientMoments()
    other.add(torch.tensor([0.0, 2.0]))
    assert other.cosine_to(moments) == pytest.approx((8 / 3) / (10 / 3))  # (2, 8/3) has the norm 10/3
    assert GradientMoments(total=torch.zeros(2)).cosine_to(moments) is None


def test_gradients_without_a_signal_have_no_noise_scale() -> None:
    opposite, still = GradientMoments(), GradientMoments()
    for sign in (1.0, -1.0):
        opposite.add(torch.tensor([sign]))
        still.add(torch.zeros(1))
    assert opposite.figures(1) == {"variance": 2.0, "squared_norm": -1.0, "noise_scale": None, "cosine": -1.0,
                                   "norms": [1.0, 1.0]}  # fmt: skip
    assert still.figures(1)["cosine"] is None
    with pytest.raises(BadInput, match="gradient of batch 3 is not finite"):
        still.add(torch.tensor([math.nan]))


def plain_logprob(model: Any, rollout: CreditedRollout | Trajectory) -> torch.Tensor:
    """Log-probs of the response tokens by one unpadded pass and a plain softmax."""
    ids = torch.tensor([[*rollout.prompt_ids, *rollout.response_ids]])
    logs = model(input_ids=ids).logits[0].double().log_softmax(-1)
    first = len(rollout.prompt_ids)
    return torch.stack([logs[at - 1, int(ids[0, at])] for at in range(first, ids.shape[1])])


def test_the_gradient_of_a_batch_is_that_of_plain_autograd(tiny_policy: Path) -> None:
    batch = credit(ROWS, {"mc": {one.id: one.values for one in ROWS}})["p"]
    model: Any = load_policy(str(tiny_policy)).eval()
    total = sum((plain_logprob(model, rollout) * torch.tensor(token_advantages(rollout, "mc"))).sum()
                for rollout in batch) / 3  # fmt: skip
    assert isinstance(total, torch.Tensor)
    grads = torch.autograd.grad(total, list(model.parameters()))
    expected = torch.cat([grad.flatten() for grad in grads])
    assert float(expected.norm()) > 0
    for size in (1, 2, 3):
        found = batch_gradient(model, batch, "mc", 1.0, size, 0)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_problems_are_dealt_whole_into_batches_of_one_size() -> None:
    rollout = CreditedRollout([1], [2], [1], {})
    batches = deal({str(number): [rollout] * 2 for number in range(5)}, 2, seed=0)
    assert [len(batch) for batch in batches] == [4, 4]
    with pytest.raises(BadInput, match="only 1 problems"):
        deal({"p": [rollout]}, 2, seed=0)


def test_the_stage_measures_both_kinds_of_credit_on_the_same_batches(tiny_policy: Path, tmp_path: Path) -> None:
    rows = [row(f"{problem}/{n}", [7, 8 + n], [0.5], n == 0) for problem in "abcd" for n in (0, 1)]
    write_records(tmp_path / "values.jsonl", in_words(tiny_policy, rows))
    paths = {"mc": str(tmp_path / "values.jsonl")}

    def stage(**settings: Any) -> MeasureGradientVariance:
        whole: dict[str, Any] = {"policy": str(tiny_policy), "estimates": paths, "num_batches": 2, "temperature": 1.0}
        return MeasureGradientVariance(**(whole | {"micro_batch_size": 8, "seed": 0} | settings))

    found = stage().run(paths["mc"], context(tmp_path))
    assert (found["batches"], found["rollouts_per_batch"]) == (2, 4.0)
    # every problem is alike, and so is every batch
    assert found["credit"]["outcome"]["cosine"] == pytest.approx(1.0, abs=1e-5)
    assert found["credit"]["mc"]["variance"] == pytest.approx(0.0, abs=1e-6)
    with pytest.raises(BadInput, match="num_batches must be at least 2"):
        stage(num_batches=1).run(paths["mc"], context(tmp_path))
    with pytest.raises(BadInput, match="choose another name"):
        stage(estimates={"outcome": paths["mc"]}).run(paths["mc"], context(tmp_path))


def test_gradients_of_rollouts_of_another_policy_temperature_or_tokenizer_are_refused(
    tiny_policy: Path, moved_policy: Path, tmp_path: Path
) -> None:
    rows = [row(f"{problem}/{n}", [7, 8 + n], [0.5], n == 0) for problem in "abcd" for n in (0, 1)]
    values, trajectories = tmp_path / "values.jsonl", tmp_path / "trajectories.jsonl"
    write_records(values, in_words(tiny_policy, rows))
    write_json(tmp_path / "values.meta.json", {"config": {"stage": {"trajectories": str(trajectories)}}})

    def run(temperature: float = 1.0) -> None:
        stage = MeasureGradientVariance(str(tiny_policy), {"mc": str(values)}, 2, temperature, 8, 0)
        stage.run(str(values), context(tmp_path))

    sampled(trajectories, tiny_policy, 0.7)
    run(0.7)
    with pytest.raises(BadInput, match=r"sampled at temperature 0\.7, and .* is 1: set stage\.temperature=0\.7"):
        run()
    sampled(trajectories, tiny_policy, 1.0, top_p=0.5)
    with pytest.raises(BadInput, match=r"was sampled with top_p 0\.5, without the policy's less likely tokens"):
        run()
    sampled(trajectories, moved_policy, 1.0)
    with pytest.raises(BadInput, match=r"trajectories\.jsonl was sampled by .*moved, and .* has other weights"):
        run()
    write_records(values, rows)
    with pytest.raises(BadInput, match="reads the sampled ids of 'a/0': its tokens do not read as its text"):
        run()


def weights(folder: Path, **tensors: list[float]) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({}))
    save_file({name: torch.tensor(values) for name, values in tensors.items()}, folder / "model.safetensors")
    return str(folder)


def test_the_distance_of_weights_by_hand(tmp_path: Path) -> None:
    start = weights(tmp_path / "start", a=[1.0, 2.0], b=[2.0])
    moved = weights(tmp_path / "moved", a=[4.0, 2.0], b=[6.0])
    assert weight_distance(moved, start) == pytest.approx((5.0, 5.0 / 3.0))
    assert weight_distance(start, start) == (0.0, 0.0)


def test_folders_of_different_networks_are_refused_in_one_line(tmp_path: Path) -> None:
    start = weights(tmp_path / "start", a=[1.0, 2.0])
    with pytest.raises(BadInput, match="only one of them has the tensor b"):
        weight_distance(weights(tmp_path / "more", a=[1.0, 2.0], b=[1.0]), start)
    with pytest.raises(BadInput, match=r"a has the shapes \(1,\) and \(2,\)"):
        weight_distance(weights(tmp_path / "other", a=[1.0]), start)
    with pytest.raises(BadModel, match=r"no config\.json"):
        weight_distance(str(tmp_path), start)


@pytest.fixture
def moved_policy(tiny_policy: Path, tmp_path: Path) -> Path:
    """The tiny policy with other weights in its first layer."""
    model: Any = load_policy(str(tiny_policy))
    with torch.no_grad():
        for parameter in model.model.layers[0].parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    model.save_pretrained(tmp_path / "moved")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "moved" / name).write_bytes((tiny_policy / name).read_bytes())
    return tmp_path / "moved"


def test_kl_from_the_start_is_the_mean_log_ratio_of_whole_responses(
    tiny_policy: Path, moved_policy: Path, tmp_path: Path
) -> None:
    rows = [Trajectory(f"{name}/0", name, "Q", "ab", ["ab"], [5, 6], ids, [len(ids)], "stop", "1", "1", True)
            for name, ids in (("p", [7, 8, 9]), ("q", [10]))]  # fmt: skip
    write_records(tmp_path / "samples.jsonl", in_words(tiny_policy, rows))
    policy, start = load_policy(str(moved_policy)), load_policy(str(tiny_policy))
    with torch.no_grad():
        gaps = [float((plain_logprob(policy, one) - plain_logprob(start, one)).sum()) for one in rows]
    for size in (1, 2):
        sums = [response_sums(str(folder), rows, 1.0, size) for folder in (moved_policy, tiny_policy)]
        assert [own - other for own, other in zip(*sums, strict=True)] == pytest.approx(gaps, abs=1e-4)
    policies, samples = {"moved": str(moved_policy)}, {"moved": str(tmp_path / "samples.jsonl")}
    found = MeasurePolicyDistance(str(tiny_policy), policies, samples, 1.0, 8).run("", context(tmp_path))
    assert found["policies"]["moved"]["kl"]["mean"] == pytest.approx(sum(gaps) / 2, abs=1e-4)
    assert found["policies"]["moved"]["l2"] > 1
    without = MeasurePolicyDistance(str(tiny_policy), policies, "", 1.0, 8).run("", context(tmp_path))
    assert without["policies"]["moved"]["kl"] is None
    with pytest.raises(BadInput, match="there is no policy 'other'"):
        MeasurePolicyDistance(str(tiny_policy), policies, {"other": "f"}, 1.0, 8).run("", context(tmp_path))
    with pytest.raises(BadInput, match="must map policies"):
        MeasurePolicyDistance(str(tiny_policy), policies, "f.jsonl", 1.0, 8).inputs()


def test_samples_of_another_policy_or_temperature_say_nothing_of_the_distance(
    tiny_policy: Path, moved_policy: Path, tmp_path: Path
) -> None:
    path = tmp_path / "samples.jsonl"
    write_records(
        path, in_words(tiny_policy, [Trajectory("p/0", "p", "Q", "", [""], [5], [7], [1], "stop", "", "", True)])
    )

    def kl() -> Any:
        stage = MeasurePolicyDistance(str(tiny_policy), {"m": str(moved_policy)}, {"m": str(path)}, 1.0, 8)
        return stage.run("", context(tmp_path))["policies"]["m"]["kl"]

    sampled(path, moved_policy, 1.0)
    assert kl() is not None
    sampled(path, moved_policy, 0.0)
    with pytest.raises(BadInput, match=r"sampled at temperature 0, .* greedy ones are no draws"):
        kl()
    sampled(path, tiny_policy, 1.0)
    with pytest.raises(BadInput, match="has other weights: name the samples of that policy"):
        kl()
