"""The reinforcement-learning benchmark: intervals, rankings, shares and the peer's layout of rollouts, by hand."""

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks.rl.credit import Credit, _apart, curve_of, figures, interval, measure
from benchmarks.rl.rl import overhead
from benchmarks.rl.same_loss import for_peer, make_rollouts, own_loss
from benchmarks.rl.value_error import critic_estimates, mean_error, ranked_first, states_and_parents
from espalier.analysis.analyzers.action_ranking import siblings
from espalier.data.records import State, Trajectory
from espalier.models.scalar_head import load_critic

A, B, C = ("p", (1,)), ("p", (2,)), ("p", (3,))


def test_an_interval_over_three_seeds_is_students() -> None:
    mean, low, high = interval([1.0, 2.0, 3.0])  # standard deviation 1, t = 4.303
    assert (mean, high - mean) == pytest.approx((2.0, 4.303 / math.sqrt(3)))
    assert mean - low == pytest.approx(high - mean)
    assert math.isnan(interval([0.5])[1])


def test_a_difference_is_taken_seed_by_seed() -> None:
    runs = {"vineppo": {0: 0.5, 1: 0.7, 4: 0.9}, "ppo": {0: 0.4, 1: 0.6, 2: 0.1}, "sft": {7: 0.3}}
    found = figures(runs, [], "how")
    assert found["vineppo_minus_ppo"]["value"] == pytest.approx(0.1)  # of the seeds that both have
    assert found["vineppo_minus_ppo"]["low"] == pytest.approx(0.1)  # both gain the same
    assert "2 seeds" in found["vineppo_minus_ppo"]["unit"]
    assert "ppo_minus_sft" not in found


def test_curves_are_compared_seed_by_seed_at_every_step() -> None:
    def runs(*curves: list[float]) -> dict[int, dict[str, list[list[float]]]]:
        return {seed: {"curve": [[4, 1.0, one], [8, 2.0, two]]} for seed, (one, two) in enumerate(curves)}

    one, other = runs([0.5, 0.7], [0.4, 0.9], [0.0, 1.0]), runs([0.4, 0.7], [0.3, 0.8])
    assert _apart(one, other, 4) == "+10.0 [+10.0, +10.0]"  # both seeds gain the same
    assert _apart(one, other, 8) == "+5.0 [-58.5, +68.5]"  # gains 0 and 10: t = 12.706
    assert _apart(one, other, 12) == ""


def test_all_finished_runs_are_shown_whatever_was_asked_for(tmp_path: Path) -> None:
    for name, accuracy in (("sft-0", 0.3), ("grpo-0", 0.8), ("grpo-2", 0.9)):
        run = {"accuracy": accuracy, "curve": [[0, 0.0, 0.3], [4, 9.0, accuracy]], "seconds": 1.0}
        (tmp_path / f"{name}.json").write_text(json.dumps(run))
    errors = {name: {"error": 0.1, "better_first": 0.9} for name in ("critic", "k1", "k3", "k9")}
    (tmp_path / "values-3.json").write_text(json.dumps(errors))
    (tmp_path / "ppo-0.json").write_text(json.dumps({"accuracy": 0.5, "curve": [[8, 9.0, 0.5]]}))  # of other settings
    found, detail, tables = measure(Credit(tmp_path, tmp_path, 4, 10, 2), ["sft"], [0], "how")
    assert found["grpo_minus_sft"]["value"] == pytest.approx(0.55)
    assert sorted(detail["runs"]["grpo"]) == [0, 2]
    assert "ppo" not in detail["runs"]
    assert found["value_error_critic_over_k9"]["value"] == pytest.approx(1.0)  # of values measured earlier
    assert tables[1]["rows"] == [["grpo", "30.0 (0 s)", "85.0 (9 s)"]]


def test_the_better_of_two_steps_is_ranked_by_hand() -> None:
    truth = {A: 0.9, B: 0.5, C: 0.45}
    # pairs that differ by a tenth: (A, B), (A, C); the estimate has the first right and ties on the second
    assert ranked_first({A: 0.6, B: 0.1, C: 0.6}, truth, [[A, B, C]]) == (0.75, 2)
    assert mean_error({A: 0.8, B: 0.7, C: 0.45}, truth) == pytest.approx(0.1)


def test_siblings_are_states_one_step_behind_the_same_state() -> None:
    def trajectory(name: str, ids: list[int], ends: list[int]) -> Trajectory:
        steps = ["s"] * len(ends)
        return Trajectory(f"p/{name}", "p", "", "s" * len(ends), steps, [9], ids, ends, "stop", gold="1", answer="1",
                          is_correct=True)  # fmt: skip

    states, parents = states_and_parents([trajectory("0", [1, 5, 6], [1, 2, 3]), trajectory("1", [2, 7], [1, 2])])
    assert {key[1] for key in states} == {(1,), (1, 5), (2,)}
    assert siblings(states, parents) == [[A, B]]


def test_the_critic_is_read_at_the_last_token_of_a_state(tiny_policy: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    critic = load_critic(str(tiny_policy), "policy", "eager").eval()
    critic.save_pretrained(tmp_path / "critic")
    states = {("p", (7, 8)): State("p/0#1", "p", "p/0", 1, "", "", [5, 6], [7, 8], "1"),
              ("p", (7,)): State("p/0#2", "p", "p/0", 1, "", "", [5, 6], [7], "1")}  # fmt: skip
    found = critic_estimates(tmp_path / "critic", states)
    with torch.no_grad():
        direct = critic(input_ids=torch.tensor([[5, 6, 7, 8]])).logits[0, :, 0]
    assert [found[("p", (7, 8))], found[("p", (7,))]] == pytest.approx([float(direct[3]), float(direct[2])], abs=1e-5)


def test_the_loss_on_shared_rollouts_is_the_clipped_surrogate_over_all_tokens(
    tiny_policy: Path, tmp_path: Path
) -> None:
    experience = make_rollouts(str(tiny_policy), num_groups=2)
    for_peer(experience, tmp_path / "rollouts.pt")
    rows = torch.load(tmp_path / "rollouts.pt", weights_only=True)
    from espalier.models.load import load_policy

    model = load_policy(str(tiny_policy), "eager").eval()
    total, tokens = 0.0, 0
    for row in range(len(rows["advantages"])):
        prompt = rows["prompt_ids"][row][rows["prompt_mask"][row].bool()]
        mask = rows["completion_mask"][row].bool()
        answer = rows["completion_ids"][row][mask]
        with torch.no_grad():
            logits = model(input_ids=torch.cat([prompt, answer])[None]).logits[0]
        new = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1].gather(1, answer[:, None])[:, 0]
        ratio = (new - rows["old_per_token_logps"][row][mask]).exp()
        advantage = rows["advantages"][row]
        total -= float(torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum())
        tokens += len(answer)
    found = own_loss(str(tiny_policy), experience)
    assert found["loss"] == pytest.approx(total / tokens, rel=1e-4)
    assert found["clip_share"] > 0.01  # the rollouts' policy is another one


def test_overhead_is_what_is_no_generation_scoring_or_gradient() -> None:
    row = {"seconds/iteration": 10.0, "seconds/rollout": 4.0, "seconds/reward": 0.5, "seconds/forward": 1.0,
           "seconds/update": 4.0, "seconds/weight_sync": 0.1, "seconds/advantage": 0.2}  # fmt: skip
    assert overhead(row) == pytest.approx(0.05)


def test_a_curve_counts_seconds_of_iterations_alone() -> None:
    rows = [{"step": 0, "eval/accuracy": 0.3, "seconds/evaluate": 9.0}, {"step": 1, "seconds/iteration": 2.0},
            {"step": 2, "seconds/iteration": 3.0}, {"step": 2, "eval/accuracy": 0.5}]  # fmt: skip
    assert curve_of(rows) == [[0, 0.0, 0.3], [2, 5.0, 0.5]]
