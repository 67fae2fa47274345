"""The reinforcement-learning benchmark: rankings, shares and the peer's layout of rollouts, by hand."""

from pathlib import Path

import pytest
import torch

from benchmarks.credit.value_error import critic_estimates, mean_error, ranked_first, states_and_parents
from benchmarks.rl.drawn_rewards import drawn_reward
from benchmarks.rl.product import draw_rewards
from benchmarks.rl.rl import overhead
from benchmarks.rl.same_loss import for_peer, make_rollouts, own_loss
from espalier.analysis.analyzers.action_ranking import siblings
from espalier.data.records import State, Trajectory
from espalier.models.scalar_head import load_critic
from espalier.rewards.outcome import OutcomeReward


def test_rewards_are_drawn_by_the_tokens_of_an_answer_alone_on_our_side_as_on_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(OutcomeReward, "__call__", OutcomeReward.__call__)  # put back behind the test
    draw_rewards()
    rows = [Trajectory(f"p/{k}", "p", "", "4", ["4"], [9], ids, [len(ids)], "stop", gold="4", answer="4",
                       is_correct=True) for k, ids in enumerate(([1, 2], [97], [100, 4]))]  # fmt: skip
    assert [score.outcome for score in OutcomeReward()(rows)] == [3 / 97, 0.0, 7 / 97]
    assert [drawn_reward(row.response_ids) for row in rows] == [3 / 97, 0.0, 7 / 97]


A, B, C = ("p", (1,)), ("p", (2,)), ("p", (3,))


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
