"""Advantages: by hand, against float64 loops, and against brute force on trees small enough to enumerate."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from espalier.data.jsonl import read_records
from espalier.data.records import BadInput, Completion, Problem, SampledRollout, State, Trajectory
from espalier.data.token_text import read_tokens, token_step_ends
from espalier.models.scalar_head import load_process_reward
from espalier.rewards.outcome import OutcomeReward
from espalier.rewards.score import Score
from espalier.rl.advantages.gae import GAE, generalized_advantages, last_tokens
from espalier.rl.advantages.grpo import GRPO, group_advantages
from espalier.rl.advantages.process_values import ProcessValueAdvantage
from espalier.rl.advantages.reinforce_plus_plus import ReinforcePlusPlusAdvantage
from espalier.rl.advantages.remax import ReMaxAdvantage
from espalier.rl.advantages.rloo import RLOO, leave_one_out
from espalier.rl.advantages.spo import SPO
from espalier.rl.advantages.vineppo import VinePPO
from espalier.rl.credit.monte_carlo_credit import mean_rewards
from espalier.rl.credit.process_credit import lowest_to_come, process_advantages
from espalier.rl.credit.step_credit import fill_values, prompt_values, step_advantages
from espalier.rl.credit.token_maps import rewards_to_go, spread_steps
from espalier.rl.experience import token_rewards
from espalier.rl.losses import whiten
from espalier.rl.old_logprobs import OldLogprobs
from espalier.rl.samples import samples_path, write_samples
from espalier.rl.types import Experience, Rollout, RolloutGroup, are_alike
from espalier.sampling.client import SamplingParams
from espalier.values.monte_carlo import state_key

PARAMS = SamplingParams(n=2, temperature=1.0, max_tokens=8, return_logprobs=True)
NO_SAMPLER: Any = SimpleNamespace(asker="")


def make_rollout(name: str, tokens: str, is_correct: bool, prompt_ids: Sequence[int] = (1,)) -> Rollout:
    """Every character is a token and a step of its own; the end token 0 belongs to the last."""
    ids = [ord(letter) for letter in tokens] + [0]
    ends = [*range(1, len(tokens)), len(ids)]
    trajectory = Trajectory(
        name, name.split("/")[0], "?", tokens, list(tokens), list(prompt_ids), ids, ends, "stop", "", "", is_correct
    )
    return Rollout(trajectory, [-1.0] * len(ids), policy_version=3)


def make_group(rows: Sequence[tuple[str, bool]], problem: str = "p", prompt_ids: Sequence[int] = (1,)) -> RolloutGroup:
    rollouts = [make_rollout(f"{problem}/{k}", tokens, right, prompt_ids) for k, (tokens, right) in enumerate(rows)]
    return RolloutGroup(Problem(problem, "?", ""), rollouts, [Score(float(right)) for _, right in rows])


def make_experience(groups: Sequence[RolloutGroup], **changes: Any) -> Experience:
    """Masks and rewards of the groups; log-probs are 0."""
    trajectories = [rollout.trajectory for group in groups for rollout in group.rollouts]
    rows = [(len(t.prompt_ids), len(t.response_ids)) for t in trajectories]
    places = torch.arange(max(map(sum, rows)))
    mask = torch.stack([(places >= start) & (places < start + length) for start, length in rows])
    zeros = torch.zeros(mask.shape)
    long = zeros.long()
    return Experience(
        long, long, mask, zeros, OldLogprobs(zeros, zeros), rewards=token_rewards(groups, mask), **changes
    )


class Enumerated:
    """A context that answers every state with all its continuations, each as often as its probability says.

    Words are `length` letters of `letters`, drawn alike; `is_right` grades a whole word. K must be a multiple of
    the number of continuations.
    """

    def __init__(self, letters: str, length: int, is_right: Callable[[str], bool]):
        self.letters, self.length, self.is_right = letters, length, is_right
        self.params = PARAMS
        self.decode = lambda ids: "".join(chr(token) for token in ids if token)
        self.asked: list[tuple[str, int]] = []
        self.budgets: list[int] = []

    def words(self, prefix: str) -> list[str]:
        return ["".join(rest) for rest in product(self.letters, repeat=self.length - len(prefix))]

    def value(self, prefix: str) -> float:
        """Brute force: the share of right words."""
        words = self.words(prefix)
        return sum(self.is_right(prefix + word) for word in words) / len(words)

    def complete(
        self, states: Sequence[State], params: Sequence[SamplingParams], round_number: int
    ) -> list[list[Completion]]:
        found = []
        for state, how in zip(states, params, strict=True):
            self.asked.append((state.prefix, how.n))
            self.budgets.append(how.max_tokens)
            words = self.words(state.prefix)
            assert how.n % len(words) == 0
            found.append([
                Completion(f"{state.id}@{round_number}/{k}", state.id, state.problem_id, words[k % len(words)],
                           [ord(letter) for letter in words[k % len(words)]] + [0], "stop", "",
                           self.is_right(state.prefix + words[k % len(words)]))
                for k in range(how.n)
            ])  # fmt: skip
        return found

    def rollout(self, problems: Sequence[Problem], params: SamplingParams, name: str) -> list[RolloutGroup]:
        """The greedy word is the first letter over and over."""
        assert (params.n, params.temperature) == (1, 0.0)
        self.asked += [(f"{name}/{problem.id}", 1) for problem in problems]
        word = self.letters[0] * self.length
        return [make_group([(word, self.is_right(word))], problem.id) for problem in problems]

    def score(self, trajectories: Iterable[Trajectory]) -> list[Score]:
        return OutcomeReward()(list(trajectories))


# Three letters a or b; right with at least two b.
TREE = Enumerated("ab", 3, lambda word: word.count("b") >= 2)


def test_generalized_advantages_by_hand() -> None:
    # rewards 0 0 1, values 0.5 0.4 0.8, gamma 1, lam 0.5: deltas -0.1, 0.4, 0.2
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 0.4, 0.8]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    found = generalized_advantages(rewards, values, mask, last_tokens(mask), 1.0, 0.5)
    torch.testing.assert_close(found, torch.tensor([[-0.1 + 0.5 * 0.5, 0.4 + 0.1, 0.2]]))


def test_gae_with_lambda_one_and_gamma_one_is_reward_to_come_minus_value() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(4, 9, generator=generator), torch.randn(4, 9, generator=generator)
    mask = torch.zeros(4, 9, dtype=torch.bool)
    for row, (start, end) in enumerate([(0, 9), (2, 7), (3, 4), (5, 9)]):
        mask[row, start:end] = True
    rewards, values = rewards * mask, values * mask
    found = generalized_advantages(rewards, values, mask, last_tokens(mask), 1.0, 1.0)
    torch.testing.assert_close(found, (rewards_to_go(rewards, mask) - values) * mask)


def test_gae_with_lambda_zero_is_the_one_step_error() -> None:
    rewards, values = torch.tensor([[0.0, 2.0]]), torch.tensor([[1.0, 3.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    found = generalized_advantages(rewards, values, mask, last_tokens(mask), 0.5, 0.0)
    assert found.tolist() == [[0.5 * 3.0 - 1.0, 2.0 - 3.0]]


def reference_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """The definition, in python's float64: A_t = sum over l of (gamma lam)^l delta_{t + l}."""
    after = [*values[1:], 0.0]
    deltas = [r + gamma * v_next - v for r, v, v_next in zip(rewards, values, after, strict=True)]
    return [sum((gamma * lam) ** (j - i) * deltas[j] for j in range(i, len(deltas))) for i in range(len(deltas))]


def test_gae_packed_equals_padded_equals_a_float64_loop() -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = [5, 1, 12, 7]
    pieces = [torch.randn(2, length, generator=generator) for length in lengths]
    gamma, lam, prompt = 0.97, 0.9, 3
    padded = torch.zeros(2, 4, prompt + max(lengths))
    mask = torch.zeros(4, prompt + max(lengths), dtype=torch.bool)
    for row, piece in enumerate(pieces):
        padded[:, row, prompt : prompt + piece.shape[1]] = piece
        mask[row, prompt : prompt + piece.shape[1]] = True
    by_rows = generalized_advantages(padded[0], padded[1], mask, last_tokens(mask), gamma, lam)[mask]
    # one row: the four responses one behind the other, each after a prompt of three tokens
    parts = [torch.cat([torch.zeros(2, prompt), piece], dim=1) for piece in pieces]
    packed = torch.cat(parts, dim=1)[:, None]
    packed_mask = torch.cat([torch.arange(prompt + n) >= prompt for n in lengths])[None]
    ends = torch.cat([torch.arange(prompt + n) == prompt + n - 1 for n in lengths])[None]
    in_one_row = generalized_advantages(packed[0], packed[1], packed_mask, ends, gamma, lam)[packed_mask]
    expected = [value for piece in pieces for value in reference_gae(*piece.double().tolist(), gamma, lam)]
    assert by_rows.tolist() == pytest.approx(expected, abs=1e-6)
    assert torch.equal(by_rows, in_one_row)


def test_ppos_targets_are_advantage_plus_value_and_are_not_whitened() -> None:
    group = make_group([("ab", True), ("bb", False)])
    experience = make_experience([group])
    values = torch.rand(experience.response_mask.shape) * experience.response_mask
    experience = replace(experience, values=values)
    found = GAE(gamma=1.0, lam=1.0)([group], experience, NO_SAMPLER)
    assert found.returns is not None
    # with gamma = lambda = 1 the target of every token is the reward itself
    expected = torch.tensor([[1.0], [0.0]]) * experience.response_mask
    torch.testing.assert_close(found.returns, expected)
    torch.testing.assert_close(found.advantages, (expected - values) * experience.response_mask)
    apart = GAE(gamma=1.0, lam=0.3, critic_lam=1.0)([group], experience, NO_SAMPLER)
    assert apart.returns is not None
    torch.testing.assert_close(apart.returns, expected)
    assert not torch.allclose(apart.advantages, found.advantages)


def test_lambda_by_length_is_one_minus_the_inverse_length() -> None:
    group = make_group([("aaaa", True), ("b", False)])  # 5 and 2 tokens
    experience = replace(make_experience([group]), values=torch.zeros(2, 6))
    found = GAE(gamma=1.0, lam=1.0, length_alpha=0.5)([group], experience, NO_SAMPLER).advantages
    # lam 1 - 1 / 2.5 = 0.6 for the first, whose reward 1 comes last
    assert found[0, 1:].tolist() == pytest.approx([0.6**4, 0.6**3, 0.6**2, 0.6, 1.0])


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    assert leave_one_out([1, 0, 0, 1]) == pytest.approx([1 - 1 / 3, -2 / 3, -2 / 3, 1 - 1 / 3])
    assert leave_one_out([0.1 + 0.2, 0.3 + 0.0]) == pytest.approx([0.0, 0.0], abs=1e-12)
    assert leave_one_out([0.7, 0.7, 0.7]) == [0.0, 0.0, 0.0]
    # rewards of steps that come to 1/3 - 1/2 on two ways: rounding teaches nothing, with no estimator
    ways = [1 / 3 - 0.5, 0.5 + (1 / 3 - 1), 1 / 3 - 0.5]
    assert len(set(ways)) == 2
    assert leave_one_out(ways) == group_advantages(ways, True) == [0.0, 0.0, 0.0]
    assert are_alike(ways)
    # of tokens they are float32, whose sum would be off by 2e-6 here
    steps = [-0.6, -0.8, -0.6, 1.0, 0.2, -0.7, -0.6, -0.8, 12.9]
    group = make_group([("aaaaaaaa", True), ("aaaaaaaa", False)])
    experience = make_experience([group])
    experience = replace(experience, rewards=torch.zeros(experience.response_mask.shape))
    assert experience.rewards is not None
    experience.rewards[experience.response_mask] = torch.tensor([*steps, *[0.0] * 8, 10.0])
    assert not RLOO()([group], experience, NO_SAMPLER).advantages.any()
    assert not are_alike([0.0, 1e-5])
    assert are_alike([])


def test_rloo_counts_a_kl_penalty_that_stands_in_the_reward() -> None:
    group = make_group([("a", True), ("b", False)])
    experience = make_experience([group])
    assert experience.rewards is not None
    paid = experience.rewards - 0.1 * experience.response_mask * torch.tensor([[1.0], [3.0]])  # 2 tokens each
    found = RLOO()([group], replace(experience, rewards=paid), NO_SAMPLER)
    assert found.advantages[:, 1].tolist() == pytest.approx([0.8 + 0.6, -0.6 - 0.8])


def test_leave_one_out_and_group_mean_differ_by_g_over_g_minus_one() -> None:
    group = make_group([("a", True), ("b", False), ("a", False)])
    experience = make_experience([group])
    rloo = RLOO()([group], experience, NO_SAMPLER).advantages
    plain = GRPO(divide_by_std=False)([group], experience, NO_SAMPLER).advantages
    torch.testing.assert_close(rloo, plain * 3 / 2)


def test_negative_advantages_of_a_group_weigh_as_much_as_is_set() -> None:
    group = make_group([("a", True), ("b", False), ("a", False)])
    experience = make_experience([group])
    found = GRPO(divide_by_std=False, negative_weight=0.25)([group], experience, NO_SAMPLER).advantages
    assert found[:, 1].tolist() == pytest.approx([2 / 3, -1 / 12, -1 / 12])
    for weight in (-1.0, float("inf"), float("nan")):
        with pytest.raises(BadInput, match=f"must be a number of at least 0, got {weight:g}"):
            GRPO(True, weight)


def test_reinforce_plus_plus_whitens_rewards_to_come_over_all_tokens() -> None:
    groups = [make_group([("ab", True), ("a", False)], "p"), make_group([("abc", True), ("b", True)], "q")]
    experience = make_experience(groups)
    found = ReinforcePlusPlusAdvantage()(groups, experience, NO_SAMPLER).advantages
    # 3 tokens of reward 1, 2 of 0, 4 of 1, 2 of 1: mean 9/11, sample variance 11/10 * 9/11 * 2/11
    std = (11 / 10 * 9 / 11 * 2 / 11) ** 0.5
    expected = torch.tensor([[2 / 11], [-9 / 11], [2 / 11], [2 / 11]]) / std * experience.response_mask
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    centred = ReinforcePlusPlusAdvantage(has_group_baseline=True)(groups, experience, NO_SAMPLER).advantages
    before = torch.tensor([[0.5], [-0.5], [0.0], [0.0]]) * experience.response_mask
    torch.testing.assert_close(centred, whiten(before, experience.response_mask))


def test_discounted_rewards_to_come_by_hand() -> None:
    mask = torch.tensor([[False, True, True, True]])
    found = rewards_to_go(torch.tensor([[9.0, 1.0, 0.0, 4.0]]) * mask, mask, gamma=0.5)
    assert found.tolist() == [[0.0, 1 + 0.25 * 4, 2.0, 4.0]]


def test_remax_takes_the_greedy_responses_reward_off() -> None:
    greedy_is_right = Enumerated("ab", 1, lambda word: word == "a")
    groups = [make_group([("a", True), ("b", False)], "p"), make_group([("b", False), ("b", False)], "q")]
    found = ReMaxAdvantage()(groups, make_experience(groups), greedy_is_right)
    assert found.advantages[:, 1].tolist() == [0.0, -1.0, -1.0, -1.0]
    assert found.metrics["greedy_reward"] == 1.0
    assert greedy_is_right.asked == [("greedy-3/p", 1), ("greedy-3/q", 1)]


def test_with_step_rewards_remax_compares_with_what_the_greedy_response_had_to_come() -> None:
    # greedy "aa": tokens a, a, end; process rewards 1 at the first token and 2 at the last, outcome 4
    class Greedy(Enumerated):
        def rollout(self, problems: Sequence[Problem], params: SamplingParams, name: str) -> list[RolloutGroup]:
            found = super().rollout(problems, params, name)
            return [replace(group, scores=[Score(4.0, [1.0, 2.0])]) for group in found]

    group = make_group([("abc", True), ("b", False)])  # 4 and 2 tokens
    group = replace(group, scores=[Score(1.0, [0.5, 0.25, 0.125]), Score(0.0, [3.0])])
    found = ReMaxAdvantage()([group], make_experience([group]), Greedy("a", 2, bool))
    # baselines: 4 + 1 + 2 at the first token, 4 + 2 at the next two, and behind its end the outcome alone
    assert found.advantages[0, 1:].tolist() == [1.875 - 7, 1.375 - 6, 1.125 - 6, 1.125 - 4]
    assert found.advantages[1, 1:].tolist() == [3.0 - 7, 3.0 - 6, 0, 0]
    assert found.metrics["greedy_reward"] == 7.0


def test_with_step_rewards_reinforce_plus_plus_compares_what_was_still_to_come() -> None:
    group = make_group([("ab", True), ("b", False)])  # 3 and 2 tokens
    group = replace(group, scores=[Score(1.0, [0.5, 0.25]), Score(0.0, [3.0])])
    for gamma, to_come, others in (
        (1.0, [1.75, 1.25, 1.25], [3.0, 3.0, 0.0]),
        (0.5, [0.5 + 0.25 * 1.25, 0.5 * 1.25, 1.25], [1.5, 3.0, 0.0]),
    ):
        estimator = ReinforcePlusPlusAdvantage(gamma, has_group_baseline=True)
        found = estimator.before_whitening([group], make_experience([group]))
        expected = [(own - other) / 2 for own, other in zip(to_come, others, strict=True)]
        assert found[0, 1:].tolist() == pytest.approx(expected)
        assert found[1, 1:3].tolist() == pytest.approx([-value for value in expected[:2]])


class Process:
    """Words of four letters a or b, but "aa" ends after two. Every letter is a step, is drawn with a probability of its
    own after every prefix, and has process reward 1, for b 1.5; the outcome is 1 for words that end in b."""

    params = PARAMS
    greedy = "abba"

    def __init__(self) -> None:
        every = ["".join(letters) for letters in product("ab", repeat=4)]
        self.words = ["aa", *(word for word in every if not word.startswith("aa"))]
        prefixes = sorted({word[:i] for word in self.words for i in range(len(word))})
        theta = torch.randn(len(prefixes), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        scores: dict[str, list[torch.Tensor]] = {word: [] for word in self.words}  # gradients of a letter's log-prob
        self.share = dict.fromkeys(self.words, 1.0)
        for word in self.words:
            for i, letter in enumerate(word):
                place = prefixes.index(word[:i])
                is_b, share = float(letter == "b"), float(torch.sigmoid(theta[place]))  # of b
                self.share[word] *= share if is_b else 1 - share
                scores[word].append((is_b - share) * torch.eye(len(prefixes), dtype=torch.float64)[place])
        self.scores = scores

    def score(self, word: str) -> Score:
        return Score(float(word.endswith("b")), [1.5 if letter == "b" else 1.0 for letter in word])

    def group(self, words: Sequence[str]) -> RolloutGroup:
        group = make_group([(word, True) for word in words])
        return replace(group, scores=[self.score(word) for word in words])

    def gradient(self, word: str, advantages: Sequence[float]) -> torch.Tensor:
        """The policy gradient of one rollout; the end token has no choice and none."""
        return torch.stack([score * advantages[i] for i, score in enumerate(self.scores[word])]).sum(0)

    def exact(self) -> torch.Tensor:
        """Of the expected reward: the sum over words of share times total reward times gradient of the log-share."""
        rows = [self.share[word] * self.gradient(word, [self.score(word).total] * len(word)) for word in self.words]
        return torch.stack(rows).sum(0)

    def to_go(self, word: str) -> list[float]:
        score = self.score(word)
        return [score.outcome + sum(score.steps[i:]) for i in range(len(word))]

    def rollout(self, problems: Sequence[Problem], params: SamplingParams, name: str) -> list[RolloutGroup]:
        return [self.group([self.greedy])]


def moments(rows: Sequence[tuple[float, torch.Tensor]]) -> tuple[torch.Tensor, float]:
    """(mean, total variance) of (probability, gradient)."""
    mean = torch.stack([share * row for share, row in rows]).sum(0)
    return mean, sum(share * float((row - mean).square().sum()) for share, row in rows)


def test_remaxs_expected_gradient_is_exact_with_step_rewards_and_varies_less_than_with_the_whole_reward() -> None:
    process: Any = Process()
    new, old = [], []
    for word in process.words:
        share, group = process.share[word], process.group([word])
        found = ReMaxAdvantage()([group], make_experience([group]), process).advantages[0, 1:].tolist()
        new.append((share, process.gradient(word, found)))
        whole = process.score(process.greedy).total
        old.append((share, process.gradient(word, [value - whole for value in process.to_go(word)])))
    (mean, variance), (mean_before, variance_before) = moments(new), moments(old)
    assert sum(share for share, _ in new) == pytest.approx(1, abs=1e-12)
    torch.testing.assert_close(mean, process.exact(), rtol=0, atol=1e-6)
    torch.testing.assert_close(mean_before, process.exact(), rtol=0, atol=1e-6)
    assert variance < 0.5 * variance_before


def test_reinforce_plus_pluss_group_baseline_keeps_the_gradients_direction_and_varies_less() -> None:
    process = Process()
    estimator = ReinforcePlusPlusAdvantage(has_group_baseline=True)
    new, old = [], []
    for pair in product(process.words, repeat=2):
        share, group = process.share[pair[0]] * process.share[pair[1]], process.group(pair)
        found = estimator.before_whitening([group], make_experience([group]))[:, 1:].tolist()
        mean_reward = sum(group.rewards) / 2
        before = [[value - mean_reward for value in process.to_go(word)] for word in pair]
        for rows, advantages in ((new, found), (old, before)):
            gradients = [process.gradient(word, row) for word, row in zip(pair, advantages, strict=True)]
            rows.append((share, torch.stack(gradients).mean(0)))
    (mean, variance), (mean_before, variance_before) = moments(new), moments(old)
    # a mean that holds the rollout itself takes 1/G of the gradient away, at every token alike
    torch.testing.assert_close(mean, process.exact() / 2, rtol=0, atol=1e-6)
    torch.testing.assert_close(mean_before, process.exact() / 2, rtol=0, atol=1e-6)
    assert variance < 0.5 * variance_before


def test_values_behind_a_cap_are_the_outcome_and_their_steps_have_no_advantage() -> None:
    assert fill_values([0.5, 0.25, None, None], 1.0) == [0.5, 0.25, 1.0, 1.0, 1.0]
    assert step_advantages([0.5, 0.25, 1.0, 1.0, 1.0]) == [-0.25, 0.75, 0.0, 0.0]


def test_a_prompts_value_is_free_from_its_group() -> None:
    assert prompt_values([1, 0, 0, 1], "group") == [0.5] * 4
    assert prompt_values([1, 0, 0, 1], "leave_one_out") == pytest.approx([1 / 3, 2 / 3, 2 / 3, 1 / 3])


def test_vineppo_equals_brute_force_on_a_tree() -> None:
    context = Enumerated("ab", 3, TREE.is_right)
    words = ["abb", "bba", "aab", "abb"]
    group = make_group([(word, context.is_right(word)) for word in words])
    experience = make_experience([group])
    found = VinePPO(completions_per_state=8, prompt_value="sampled")([group], experience, context)
    for row, word in enumerate(words):
        values = [context.value(word[:i]) for i in range(3)] + [float(context.is_right(word))]
        assert found.state_values[row] == values
        steps = [after - before for before, after in pairwise(values)]
        # four response tokens: three letters, and the end token, which belongs to the last step
        assert found.advantages[row].tolist() == pytest.approx([0.0, *steps, steps[-1]])
    assert found.returns is None
    # the prompt, a, b, ab, bb, aa: each once, though "abb" came twice
    assert sorted(context.asked) == [("", 8), ("a", 8), ("aa", 8), ("ab", 8), ("b", 8), ("bb", 8)]
    assert found.metrics["num_states"] == 6
    assert found.metrics["num_completions"] == 48


def test_the_sum_over_steps_is_the_outcome_minus_the_prompts_value() -> None:
    context = Enumerated("ab", 3, TREE.is_right)
    group = make_group([("abb", True), ("baa", False)])
    found = VinePPO(completions_per_state=4)([group], make_experience([group]), context)
    assert found.advantages[:, 1:4].sum(-1).tolist() == pytest.approx([1 - 0.5, 0 - 0.5])  # the group's mean is 1/2
    assert ("", 4) not in context.asked


def test_states_behind_the_cap_are_not_completed() -> None:
    context = Enumerated("ab", 3, TREE.is_right)
    group = make_group([("abb", True), ("baa", False)])
    found = VinePPO(completions_per_state=4, max_step=1)([group], make_experience([group]), context)
    assert {prefix for prefix, _ in context.asked} == {"a", "b"}
    # V(a) = 1/4: the second step goes straight to the outcome, the third has nothing left to gain
    assert found.advantages[0].tolist() == pytest.approx([0.0, 0.25 - 0.5, 0.75, 0.0, 0.0])


def test_a_completion_gets_what_the_rollout_had_left_or_a_fresh_budget() -> None:
    group = make_group([("abb", True), ("baa", False)])
    for budget, expected in (("remaining", [7, 6, 7, 6]), ("fresh", [8] * 4)):
        context = Enumerated("ab", 3, TREE.is_right)
        VinePPO(completions_per_state=4, budget=budget)([group], make_experience([group]), context)
        assert context.budgets == expected  # states a, ab, b, ba under max_tokens 8


def test_groups_that_agree_are_left_out_where_that_is_asked_for() -> None:
    context = Enumerated("ab", 3, TREE.is_right)
    groups = [make_group([("abb", True), ("bba", True)], "p"), make_group([("abb", True), ("aab", False)], "q")]
    estimator = VinePPO(completions_per_state=4, completes_agreeing_groups=False)
    found = estimator(groups, make_experience(groups), context)
    assert found.advantages[:2].abs().sum() == 0
    assert found.advantages[2:].abs().sum() > 0
    assert {prefix for prefix, _ in context.asked} == {"a", "ab", "aa"}


@pytest.mark.parametrize("completes", [True, False])
def test_of_a_group_without_scores_nothing_is_begun_where_scores_say_whether_it_is_asked(completes: bool) -> None:
    context = Enumerated("ab", 3, TREE.is_right)
    group = replace(make_group([("abb", True), ("bba", True)]), scores=[])
    estimator = VinePPO(completions_per_state=4, completes_agreeing_groups=completes)
    assert bool(estimator.first_completions(group, context.decode, context.params)) == completes


def test_adaptive_completions_go_to_states_whose_interval_is_wide() -> None:
    context = Enumerated("ab", 3, lambda word: word[1:] == "bb")
    group = make_group([("abb", True), ("aaa", False)])
    estimator = VinePPO(completions_per_state=8, max_completions=24, round_completions=8, max_width=0.45)
    found = estimator([group], make_experience([group]), context)
    # of 8: state "a" is right 2 times (Wilson 0.07 to 0.59: wide), "ab" 4 (wide), "aa" never (0 to 0.32: closed)
    assert [number for prefix, number in context.asked if prefix == "aa"] == [8]
    assert [number for prefix, number in context.asked if prefix == "a"] == [8, 8]
    assert [number for prefix, number in context.asked if prefix == "ab"] == [8, 8]
    assert found.state_values[0] == [0.5, 0.25, 0.5, 1.0]


def test_the_values_scale_is_the_rewards() -> None:
    context = Enumerated("ab", 3, TREE.is_right)
    context.score = OutcomeReward(right=1.0, wrong=-1.0)  # type: ignore[method-assign]
    group = make_group([("abb", True), ("baa", False)])
    group = replace(group, scores=[Score(1.0), Score(-1.0)])
    found = VinePPO(completions_per_state=4)([group], make_experience([group]), context)
    assert found.state_values[0] == [0.0, 2 * 0.25 - 1, 2 * 0.5 - 1, 1.0]


def test_a_response_that_is_an_end_token_alone_is_one_step() -> None:
    context = Enumerated("ab", 3, TREE.is_right)
    empty = replace(make_rollout("p/1", "a", False).trajectory, response="", steps=[], step_ends=[], response_ids=[0])
    group = make_group([("abb", True), ("baa", False)])
    group = replace(group, rollouts=[group.rollouts[0], Rollout(empty, [-1.0], 3)])
    found = VinePPO(completions_per_state=4)([group], make_experience([group]), context)
    assert found.advantages[1].tolist() == [0.0, -0.5, 0.0, 0.0, 0.0]


def test_process_rewards_are_refused_by_monte_carlo_values() -> None:
    group = replace(make_group([("ab", True), ("b", False)]), scores=[Score(1.0, [0.1, 0.2]), Score(0.0, [0.3])])
    with pytest.raises(BadInput, match="without process terms"):
        VinePPO(completions_per_state=4)([group], make_experience([group]), TREE)


def test_cut_points_value_segments_and_mask_the_other_tokens() -> None:
    context = Enumerated("ab", 3, TREE.is_right)
    group = make_group([("abb", True), ("baa", False)])
    sure, unsure = -0.01, -1.0  # probabilities 0.99 and 0.37
    logprobs = [[sure, unsure, sure, sure], [unsure, sure, unsure, sure]]
    rollouts = [replace(r, logprobs=row) for r, row in zip(group.rollouts, logprobs, strict=True)]
    group = replace(group, rollouts=rollouts)
    estimator = SPO(completions_per_state=4, threshold=0.9, cut_points_per_segment=1, masks_other_tokens=True)
    found = estimator([group], make_experience([group]), context)
    # segments ab|b. and b|aa. (the end token has no text and joins): states ab and b
    assert found.state_values[0] == [0.5, 0.5, 1.0]
    assert found.state_values[1] == [0.5, 0.75, 0.0]
    assert found.advantages[0].tolist() == [0.0, 0.0, 0.0, 0.0, 0.0]
    assert found.advantages[1].tolist() == pytest.approx([0.0, 0.25, 0.0, -0.75, 0.0])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: VinePPO(4, max_completions=4), r"max_completions must be 0 or above .* \(4\), got 4"),
        (lambda: VinePPO(0), "completions_per_state must be at least 1"),
        (lambda: SPO(4, threshold=0.0), "threshold of cut points"),
        (lambda: SPO(4, num_segments=2, cut_points_per_segment=3), "not both"),
        (lambda: SPO(4, cut_points_per_segment=0), "cut_points_per_segment must be"),
        (lambda: ReinforcePlusPlusAdvantage(gamma=1.5), r"advantage\.gamma must be from 0 to 1"),
        (lambda: GAE(gamma=1.0, lam=-0.1), r"advantage\.lam must be from 0 to 1"),
    ],
)
def test_an_estimators_settings_are_refused_when_it_is_built(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        make()


def test_a_reward_of_another_scale_is_refused_beside_process_scores(tiny_policy: Path, tmp_path: Path) -> None:
    load_process_reward(str(tiny_policy), 1).save_pretrained(tmp_path / "prm")
    group = make_group([("ab", True), ("b", False)])
    group = replace(group, scores=[Score(1.0), Score(-1.0)])
    with pytest.raises(BadInput, match=r"advantage\.form=value .* these are -1 to 1"):
        ProcessValueAdvantage(str(tmp_path / "prm"), "value")([group], make_experience([group]), NO_SAMPLER)
    found = ProcessValueAdvantage(str(tmp_path / "prm"), "progress")([group], make_experience([group]), NO_SAMPLER)
    assert found.state_values[1][-1] == -1.0


def first_error_by_hand(shares: list[float], advantage: float) -> list[float]:
    """`shares`: a rollout's scores divided by the prompt's."""
    if advantage >= 0:
        return [advantage] * len(shares)
    lowest = [min([1.0, *shares[:i]]) for i in range(len(shares) + 1)]
    return [advantage * (lowest[i] - lowest[i + 1] + lowest[-1]) for i in range(len(shares))]


def test_the_step_at_which_scores_fall_takes_the_blame_and_no_step_of_a_wrong_rollout_is_paid() -> None:
    # prompts are worth the mean of the first scores, 0.5; three of four are wrong: (0 - 1/4) / 0.5, and (1 - 1/4) / 0.5
    rows = [[0.5, 0.9], [0.5, 0.4, 0.05, 0.3], [0.5, 0.6, 0.7], [0.5]]
    found = process_advantages(rows, [1.0, 0.0, 0.0, 0.0], "first_error", weight=1.0)
    assert found[0] == pytest.approx([1.5, 1.5])  # a right one as by GRPO, whatever the scores are
    # lowest shares 1, 0.8, 0.1, 0.1: the second and third steps fall, and 0.1 is left for all
    assert found[1] == pytest.approx([-0.05, -0.15, -0.4, -0.05])
    assert found[2] == pytest.approx([-0.5] * 3)  # a wrong one that looks right: as by GRPO
    assert found[3] == pytest.approx([-0.5])
    for row in found[1:]:  # no step of a wrong rollout is paid for, and it is blamed once at least
        assert max(row) <= 0
        assert sum(row) <= -0.5 + 1e-9
    alike = process_advantages([[0.1], [0.9], []], [0.0, 0.0, 0.0], "first_error", weight=1.0)
    assert alike == [[0.0], [0.0], [0.0]]
    # scores that are all next to 0 tell nothing apart: as by GRPO
    for tiny in (0.0, 1e-11):
        found = process_advantages([[tiny, tiny / 2], [tiny, tiny], []], [1.0, 0.0, 1.0], "first_error", weight=1.0)
        own = 3**-0.5
        assert [value for row in found for value in row] == pytest.approx([own, own, -2 * own, -2 * own, own])


def test_process_values_stand_in_for_monte_carlo_values() -> None:
    # leave-one-out: the prompt is worth 0 to the right rollout and 1 to the wrong one
    found = process_advantages([[0.5, 0.9], [0.2, 0.1, 0.3]], [1.0, 0.0], "value", weight=1.0)
    assert found[0] == pytest.approx([0.5 - 0.0, 1.0 - 0.5])
    assert found[1] == pytest.approx([0.2 - 1.0, 0.1 - 0.2, 0.0 - 0.1])


@pytest.mark.parametrize("form", ["value", "progress", "minimum", "first_error"])
def test_a_process_models_state_values_are_those_of_the_prompt_the_steps_and_the_outcome(
    form: str, tiny_policy: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    fresh = load_process_reward(str(tiny_policy), 1)
    torch.nn.init.normal_(fresh.get_parameter("score.weight"), std=0.1)
    fresh.save_pretrained(tmp_path / "prm")
    estimator = ProcessValueAdvantage(str(tmp_path / "prm"), form, weight=2.0)
    nothing = make_rollout("p/3", "", False)
    nothing = replace(nothing, trajectory=replace(nothing.trajectory, steps=[], step_ends=[]))  # an end token alone
    group = make_group([("abc", True), ("ba", False), ("c", True)])
    group = replace(group, rollouts=[*group.rollouts, nothing], scores=[*group.scores, Score(0.0)])
    experience = make_experience([group])
    found = estimator([group], experience, NO_SAMPLER)

    def score(prefix: str, is_whole: bool) -> float:
        ids = [1, *map(ord, prefix), *([0] if is_whole else [])]
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            logits = estimator.model(input_ids=torch.tensor([ids])).logits[0, -1]
        return float(torch.sigmoid(logits.float()))

    words, rewards = ["abc", "ba", "c", ""], [1.0, 0.0, 1.0, 0.0]
    scores = [[score(word[:i], i == len(word)) for i in range(1, len(word) + 1)] for word in words]
    firsts = sum(row[0] for row in scores[:3]) / 3
    for row, (own, reward) in enumerate(zip(scores, rewards, strict=True)):
        others = (sum(rewards) - reward) / 3
        start = firsts if form in ("progress", "first_error") else others
        expected = [start, *own[:-1], reward]
        assert found.state_values[row] == pytest.approx(expected, abs=0.01)
        assert found.state_values[row][-1] == reward
        # what the steps were credited with, from these values and the scores alone
        others_lowest = sum(min(other) for other in scores[:3] if other is not own) / 3
        credit = {
            "value": [after - before for before, after in pairwise(expected)],
            "progress": [reward - others + 2 * (after - before) for before, after in pairwise([start, *own])],
            "minimum": [reward - others + 2 * (min(own[i:]) - others_lowest) for i in range(len(own))],
            "first_error": first_error_by_hand([score / firsts for score in own], (2 * reward - 1) * (3 / 4) ** 0.5),
        }[form] or [reward - others if form != "first_error" else (2 * reward - 1) * (3 / 4) ** 0.5]
        steps = found.advantages[row, 1:][experience.response_mask[row, 1:]].tolist()
        assert steps == pytest.approx([*credit, credit[-1]] if own else credit, abs=0.02)
    assert len(found.state_values[0]) == len(group.rollouts[0].trajectory.steps) + 1
    experience = replace(experience, advantages=found.advantages)
    write_samples(tmp_path, 1, [group], experience, found, num_problems=1)
    (row_written,) = read_records(SampledRollout, samples_path(tmp_path, 1))
    assert row_written.step_values == pytest.approx(found.state_values[0][:-1], abs=1e-6)


def test_progress_adds_the_change_of_the_score_to_the_rollouts_own_advantage() -> None:
    found = process_advantages([[0.5, 0.9], [0.3]], [1.0, 0.0], "progress", weight=2.0)
    assert found[0] == pytest.approx([1.0 + 2 * (0.5 - 0.4), 1.0 + 2 * (0.9 - 0.5)])
    assert found[1] == pytest.approx([-1.0 + 2 * (0.3 - 0.4)])


def test_minimum_credits_a_step_with_the_lowest_score_from_it_on() -> None:
    assert lowest_to_come([0.9, 0.2, 0.7]) == [0.2, 0.2, 0.7]
    found = process_advantages([[0.9, 0.2, 0.7], [0.6]], [1.0, 1.0], "minimum", weight=1.0)
    assert found[0] == pytest.approx([0.2 - 0.6, 0.2 - 0.6, 0.7 - 0.6])
    assert found[1] == pytest.approx([0.6 - 0.2])


# Text → character ends of its steps, as published with VinePPO for GSM8K.
GOLDEN = [
    ("\nA=1\nB=2\n#### 3\n", ["\nA=1", "\nB=2\n#### 3\n"]),
    ("A\n\nB", ["A", "\n", "\nB"]),
]


@pytest.mark.parametrize(("text", "steps"), GOLDEN)
def test_tokens_get_the_advantage_of_the_step_that_holds_their_first_character(text: str, steps: list[str]) -> None:
    # tokens of one character: token i is in the step whose character ends lie around i
    ids = [ord(letter) for letter in text] + [0]
    ends = token_step_ends(steps, read_tokens([], ids, lambda row: "".join(chr(token) for token in row if token)))
    mask = torch.ones(1, len(ids), dtype=torch.bool)
    values = [float(number + 1) for number in range(len(steps))]
    found = spread_steps([ends], [values], mask)[0].tolist()
    expected = [value for step, value in zip(steps, values, strict=True) for _ in step]
    assert found == [*expected, expected[-1]]


def test_a_token_over_a_border_belongs_to_the_step_it_begins_in() -> None:
    pieces = {1: "4.", 2: "\nS", 3: "o", 4: " 5", 0: ""}  # steps "4.\n" and "So 5": token 2 holds the border
    ends = token_step_ends(
        ["4.\n", "So 5"], read_tokens([], [1, 2, 3, 4, 0], lambda row: "".join(pieces[token] for token in row))
    )
    found = spread_steps([ends], [[1.0, 2.0]], torch.ones(1, 5, dtype=torch.bool))
    assert found.tolist() == [[1.0, 1.0, 2.0, 2.0, 2.0]]


def test_steps_that_do_not_reach_the_last_token_are_an_error() -> None:
    with pytest.raises(ValueError, match="3 response tokens"):
        spread_steps([[1, 2]], [[0.1, 0.2]], torch.ones(1, 3, dtype=torch.bool))


def test_rewards_stand_at_last_tokens_and_at_step_ends() -> None:
    group = make_group([("ab", True), ("b", False)], prompt_ids=(1, 1))
    group = replace(group, scores=[Score(1.0, [0.25, -0.5]), Score(0.5)])
    rewards = make_experience([group]).rewards
    assert rewards is not None
    # "ab" has its second step's end at the end token, where the outcome is too
    assert rewards.tolist() == [[0, 0, 0.25, 0, 1.0 - 0.5], [0, 0, 0, 0.5, 0]]


def test_process_rewards_of_other_steps_are_an_error() -> None:
    group = replace(make_group([("ab", True)]), scores=[Score(1.0, [0.25])])
    with pytest.raises(ValueError, match="1 process rewards for 2 steps"):
        make_experience([group])


def test_completions_are_scored_with_the_state_that_they_are_of() -> None:
    """Rewards that fill in what is missing go by it (`rewards.written_verdicts`)."""
    states = {
        state_key("p", [step]): State(f"p/0#{step}", "p", "p/0", step, "", "", [1], [step], "1") for step in (1, 2)
    }
    completions = {
        state.id: [Completion(f"{state.id}@1/0", state.id, "p", "", [2], "stop", "1", True, None)]
        for state in states.values()
    }
    seen: list[Any] = []

    def score(rows: Iterable[Trajectory]) -> list[Score]:
        seen.extend(rows)
        return [Score(float(len(seen))) for _ in seen]

    context: Any = SimpleNamespace(score=score)
    assert [*mean_rewards(states, completions, context)] == [*states]
    assert [row.state_id for row in seen] == ["p/0#1", "p/0#2"]
