"""Trees of rollouts: where they are cut, that every sampled token is trained once, and that the gradient is true."""

import asyncio
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.data.records import BadInput, Problem, Trajectory
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.rewards.score import Score
from espalier.rl.advantages.grpo import GRPO
from espalier.rl.advantages.tree import TreeAdvantage
from espalier.rl.combinations import check_tree
from espalier.rl.credit.rollout_trees import PROMPT, Segment, segment_shares, segment_values, segments_by_state
from espalier.rl.experience import make_experience
from espalier.rl.rollout import Sampler
from espalier.rl.tree_rollouts import TreeRollouts
from espalier.rl.types import Branch, Experience, Rollout, RolloutGroup
from espalier.rl.update import steps_per_iteration
from espalier.runtime.background_loop import BackgroundLoop
from espalier.runtime.entrypoint import BadConfig
from espalier.runtime.schemas import RLConfig
from espalier.sampling.client import Sample, SampleRequest, SamplingParams
from tests.support.rl_cases import PARAMS, FakeClient, make_trainer, read_metrics
from tests.support.root_config import root_config

NO_CONTEXT: Any = None
NO_POLICY: Any = None


def make_rollout(tokens: str, branch: Branch | None = None) -> Rollout:
    """A rollout of letters, behind a prompt of one token."""
    ids = [ord(letter) for letter in tokens]
    trajectory = Trajectory("p/0", "p", "?", tokens, [tokens], [1], ids, [len(ids)], "stop", "", None, is_correct=False)
    return Rollout(trajectory, [-1.0] * len(ids), 0, branch)


def make_group(rows: Sequence[tuple[str, Branch | None, float]]) -> RolloutGroup:
    rollouts = [make_rollout(tokens, branch) for tokens, branch, _ in rows]
    return RolloutGroup(Problem("p", "?", ""), rollouts, [Score(reward) for _, _, reward in rows])


def experience_of(groups: Sequence[RolloutGroup]) -> Experience:
    return make_experience(groups, NO_POLICY, pad_id=0, micro_batch_size=4, precision="fp32", temperature=1.0)[0]


# Rollout 0 is cut behind "ab" and behind "abcd", rollout 1 behind "xy", rollout 2 (a branch) behind "abgh":
#   prompt ─ ab ┬ cd ┬ e (1)                    V(abcd) = (1 + 0) / 2 = 1/2
#          │    │    └ f (0), rollout 4
#          │    └ gh ┬ i (1)  rollout 2         V(abgh) = (1 + 1) / 2 = 1        V(ab) = (1/2 + 1) / 2 = 3/4
#          │         └ j (1)  rollout 5
#          ├ xy ┬ z (0)                         V(xy) = (0 + 1) / 2 = 1/2
#          │    └ w (1)  rollout 3
#          └ q  (0)  rollout 6, which ended at once                              V(prompt) = (3/4 + 1/2 + 0) / 3 = 5/12
GROUP = make_group([
    ("abcde", None, 1.0), ("xyz", None, 0.0), ("abghi", Branch(0, 2), 1.0), ("xyw", Branch(1, 2), 1.0),
    ("abcdf", Branch(0, 4), 0.0), ("abghj", Branch(2, 4), 1.0), ("q", None, 0.0),
])  # fmt: skip


def test_a_state_is_worth_the_mean_of_its_children_not_of_its_leaves() -> None:
    tree = segments_by_state(GROUP.rollouts)
    assert tree[PROMPT] == [Segment(0, 0, 2), Segment(1, 0, 2), Segment(6, 0, 1)]
    assert tree[0, 2] == [Segment(0, 2, 4), Segment(2, 2, 4)]
    assert tree[2, 4] == [Segment(2, 4, 5), Segment(5, 4, 5)]
    values = segment_values(tree, GROUP.rewards)
    assert [values[segment] for segment in tree[PROMPT]] == [0.75, 0.5, 0.0]
    assert [values[segment] for segment in tree[0, 2]] == [0.5, 1.0]
    shares = segment_shares(tree)
    assert [shares[one] for one in (Segment(0, 0, 2), Segment(6, 0, 1))] == [1.0, 1.0]
    assert [shares[one] for one in (Segment(2, 2, 4), Segment(5, 4, 5), Segment(1, 2, 3))] == [0.5, 0.25, 0.5]


def test_advantages_of_a_tree_by_hand() -> None:
    experience = experience_of([GROUP])
    found = TreeAdvantage("parent", node_weights="equal")([GROUP], experience, NO_CONTEXT)
    row = [0.0] + [0.75 - 5 / 12] * 2 + [0.5 - 0.75] * 2 + [1.0 - 0.5]  # V(c) - V(s) along rollout 0
    torch.testing.assert_close(found.advantages[0], torch.tensor(row))
    # a branch has its own tokens alone, behind the prompt and what it shares
    torch.testing.assert_close(found.advantages[2], torch.tensor([0.0, 0.0, 0.0, 0.25, 0.25, 0.0]))
    torch.testing.assert_close(found.advantages[4], torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, -0.5]))
    assert found.state_values[0] == [pytest.approx(5 / 12), 0.75, 0.5, 1.0]
    assert found.state_values[2] == [0.75, 1.0, 1.0]
    assert found.metrics == {"num_leaves": 7.0, "num_siblings": 5.0, "siblings_that_agree": 0.2}  # V(abgh)'s children

    # against the other children alone: 3/4 against (1/2 + 0) / 2; of two children twice the difference to their mean
    found = TreeAdvantage("others", node_weights="equal")([GROUP], experience, NO_CONTEXT)
    torch.testing.assert_close(found.advantages[0], torch.tensor([0.0, 0.5, 0.5, -0.5, -0.5, 1.0]))
    # and divided by the branches above: 1, 2 and 4
    found = TreeAdvantage("others")([GROUP], experience, NO_CONTEXT)
    torch.testing.assert_close(found.advantages[0], torch.tensor([0.0, 0.5, 0.5, -0.25, -0.25, 0.25]))
    # the standard deviation of a sample of two is their difference / sqrt(2)
    found = TreeAdvantage("parent", divide_by_std=True, node_weights="equal")([GROUP], experience, NO_CONTEXT)
    torch.testing.assert_close(found.advantages[0, 3:], torch.tensor([-(0.5**0.5), -(0.5**0.5), 0.5**0.5]))


def test_equal_weights_divide_by_nothing_and_leaves_by_the_branches_above() -> None:
    """V(c) - V(s) of every segment of the tree, and the branches above it: of those of the prompt none."""
    segments = [
        [("ab", 3 / 4 - 5 / 12, 1), ("cd", 1 / 2 - 3 / 4, 2), ("e", 1 - 1 / 2, 4)],
        [("xy", 1 / 2 - 5 / 12, 1), ("z", 0 - 1 / 2, 2)],
        [("gh", 1 - 3 / 4, 2), ("i", 1 - 1, 4)],
        [("w", 1 - 1 / 2, 2)],
        [("f", 0 - 1 / 2, 4)],
        [("j", 1 - 1, 4)],
        [("q", 0 - 5 / 12, 1)],
    ]
    experience = experience_of([GROUP])
    for node_weights in ("equal", "leaves"):
        found = TreeAdvantage("parent", node_weights=node_weights)([GROUP], experience, NO_CONTEXT).advantages
        for row, mask, parts in zip(found, experience.response_mask, segments, strict=True):
            expected = [advantage / (above if node_weights == "leaves" else 1)
                        for letters, advantage, above in parts for _ in letters]  # fmt: skip
            assert row[mask].tolist() == pytest.approx(expected)
            assert not row[~mask].any()


def test_a_tree_of_one_level_is_rloo() -> None:
    group = make_group([("a", None, 1.0), ("b", None, 0.0), ("c", None, 0.0)])
    found = TreeAdvantage()([group], experience_of([group]), NO_CONTEXT)
    torch.testing.assert_close(found.advantages[:, 1], torch.tensor([1.0, -0.5, -0.5]))


# --- a policy of two decisions: the first ends at once ("e") or goes on ("a", "b"); the second is "c" or "d" ----------

REWARDS = {"e": 0.3, "ac": 1.0, "ad": 0.2, "bc": 0.0, "bd": 0.9}
LOGITS = {"": {"a": 0.4, "b": -0.3, "e": 0.1}, "a": {"c": 0.7, "d": -0.2}, "b": {"c": -0.5, "d": 0.6}}


def log_policy() -> tuple[list[torch.Tensor], dict[tuple[str, str], torch.Tensor]]:
    """(logits per state, log-prob of every decision in its state, with its graph); float64."""
    leaves: list[torch.Tensor] = []
    found: dict[tuple[str, str], torch.Tensor] = {}
    for state, logits in LOGITS.items():
        leaf = torch.tensor(list(logits.values()), dtype=torch.float64, requires_grad=True)
        leaves.append(leaf)
        found |= {(state, letter): value for letter, value in zip(logits, leaf.log_softmax(0), strict=True)}
    return leaves, found


def flat_gradient(loss: torch.Tensor, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(torch.autograd.grad(loss, leaves))


def true_gradient() -> torch.Tensor:
    """Of the expected reward, by enumeration of all words."""
    leaves, logprobs = log_policy()
    terms = [reward * torch.stack([logprobs[word[:k], word[k]] for k in range(len(word))]).sum().exp()
             for word, reward in REWARDS.items()]  # fmt: skip
    return flat_gradient(torch.stack(terms).sum(), leaves)


def twins_of(word: str) -> list[str]:
    """What else may come of a word's first letter; nothing of a word that ended there."""
    return [other for other in REWARDS if len(other) == len(word) == 2 and other[0] == word[0]] or [""]


def mean_gradient(estimator: TreeAdvantage) -> torch.Tensor:
    """E[sum over drawn tokens of A x grad log-prob] over all trees of two rollouts, each with two children behind its
    first decision where it goes on."""
    leaves, logprobs = log_policy()
    terms, mass = [], 0.0
    for words in product(REWARDS, repeat=2):
        for twins in product(*map(twins_of, words)):
            rows: list[tuple[str, Branch | None, float]] = [(word, None, REWARDS[word]) for word in words]
            rows += [(twin, Branch(k, 1), REWARDS[twin]) for k, twin in enumerate(twins) if twin]
            group = make_group(rows)
            experience = experience_of([group])
            mask = experience.response_mask
            advantages = estimator([group], experience, NO_CONTEXT).advantages[mask].double()
            # column t of a row is letter t - 1: before it stands the prompt's one token
            drawn = torch.stack([logprobs[rows[n][0][: t - 1], rows[n][0][t - 1]] for n, t in mask.nonzero().tolist()])
            prob = drawn.detach().sum().exp()
            mass += float(prob)
            terms.append(prob * (advantages * drawn).sum())
    assert mass == pytest.approx(1.0, abs=1e-9)
    return flat_gradient(torch.stack(terms).sum(), leaves)


def test_the_expected_gradient_of_a_tree_is_the_policy_gradient() -> None:
    true = true_gradient()
    torch.testing.assert_close(
        mean_gradient(TreeAdvantage("others", node_weights="leaves")), 2 * true, rtol=0, atol=1e-7
    )
    # against the parent, which holds the child itself: one half of it, with two children
    torch.testing.assert_close(mean_gradient(TreeAdvantage("parent", node_weights="leaves")), true, rtol=0, atol=1e-7)
    # with tokens alike the second decision counts twice
    equal = mean_gradient(TreeAdvantage("others", node_weights="equal"))
    torch.testing.assert_close(equal[:3], 2 * true[:3], rtol=0, atol=1e-7)
    torch.testing.assert_close(equal[3:], 4 * true[3:], rtol=0, atol=1e-7)
    assert float(true.abs().min()) > 0.01


def test_settings_and_rewards_that_a_tree_cannot_have_are_refused() -> None:
    with pytest.raises(BadInput, match=r"advantage\.baseline must be one of parent, others, got 'mean'"):
        TreeAdvantage("mean")
    with pytest.raises(BadInput, match=r"advantage\.divide_by_std=true .* advantage\.baseline=parent"):
        TreeAdvantage("others", divide_by_std=True)
    by_steps = RolloutGroup(GROUP.problem, GROUP.rollouts, [Score(0.0, [1.0]) for _ in GROUP.rollouts])
    with pytest.raises(BadInput, match="without process terms"):
        TreeAdvantage()([by_steps], experience_of([GROUP]), NO_CONTEXT)
    tree = {"_target_": "espalier.rl.advantages.tree.TreeAdvantage"}
    grpo = {"_target_": "espalier.rl.advantages.grpo.GRPO", "divide_by_std": True}
    check_tree(root_config(RLConfig, advantage=tree, branches=[2, 3]))
    check_tree(root_config(RLConfig, advantage=grpo))
    refused: list[tuple[dict[str, Any], str]] = [
        ({"advantage": tree}, "TreeAdvantage compares the branches of a tree: set rollout.branches"),
        ({"advantage": grpo, "branches": [2]}, "GRPO takes rollouts for independent"),
        ({"advantage": tree, "branches": [2, 1]}, "at least 2, got .2, 1.: one child is the rollout itself"),
        ({"advantage": tree, "branches": [2], "segment_steps": 0}, "segment_steps must be at least 1"),
    ]
    for changes, words in refused:
        with pytest.raises(BadConfig, match=words):
            check_tree(root_config(RLConfig, **changes))
    # 3 problems of 2 rollouts and at most 2 x 3 times as many leaves, in minibatches of 10
    config = root_config(RLConfig, branches=[2, 3], group_size=2, rollout_num_problems=3, minibatch_size=10)
    assert steps_per_iteration(config) == 4


# --- sampled ----------------------------------------------------------------------------------------------------------


class CountingClient(FakeClient):
    """Remembers what it was asked and every token it drew; whole responses have two lines before the answer, those
    behind a state one."""

    def __init__(self, tokenizer: Any):
        super().__init__(tokenizer)
        self.drawn: list[tuple[tuple[int, ...], int, int]] = []  # (context, tokens drawn, max_tokens)

    async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
        await asyncio.sleep(0)
        found = []
        for k in range(params.n):
            number = len(self.drawn)
            text = "".join(f"{number} + {line}\n" for line in range(1 if "#" in request.id else 2)) + f"#### {number}"
            ids = [*self.tokenizer(text).input_ids, self.tokenizer.eos_token_id]
            self.drawn.append(((*request.prompt_ids, *ids), len(ids), params.max_tokens))
            found.append(Sample(text, ids, "stop", [-0.01 * (k + 1)] * len(ids)))
        return found


def grow(task: WordArithmetic, tokenizer: Any, tree: TreeRollouts) -> tuple[list[RolloutGroup], CountingClient]:
    client = CountingClient(tokenizer)
    sampler = Sampler(client, task, tokenizer, concurrency=4, stall_seconds=60)
    params = SamplingParams(n=2, temperature=1.0, max_tokens=48, return_logprobs=True)

    async def draw() -> list[RolloutGroup]:
        groups, _ = await sampler.draw(task.problems("train")[:2], params, "rl-0", 7)
        return await tree.grow(groups, sampler, params)

    with BackgroundLoop() as loop:
        return loop.run(draw()), client


def test_every_sampled_token_is_trained_once_with_what_it_was_sampled_with(
    task: WordArithmetic, tokenizer: Any
) -> None:
    groups, client = grow(task, tokenizer, TreeRollouts([2, 3], segment_steps=1))
    # two rollouts are cut behind their first step; the four that are there then have three steps, the branches one of
    # them shared: all are cut behind their second
    assert [len(group.rollouts) for group in groups] == [2 * 2 * 3] * 2
    experience = experience_of(groups)
    rows = [(tuple(ids[mask.bool()].tolist()), int(kept.sum()))
            for ids, mask, kept in zip(experience.ids, experience.attention_mask, experience.response_mask,
                                       strict=True)]  # fmt: skip
    assert sorted(rows) == sorted((row, number) for row, number, _ in client.drawn)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    for rollout, logprobs in zip(rollouts, experience.rollout_logprobs, strict=True):
        start = len(rollout.context_ids)
        assert logprobs[start : start + len(rollout.drawn_ids)].tolist() == pytest.approx(
            list(rollout.logprobs[-len(rollout.drawn_ids) :])
        )
        assert int((logprobs != 0).sum()) == len(rollout.drawn_ids)
        assert len(rollout.logprobs) == len(rollout.trajectory.response_ids)
        assert rollout.policy_version == 7
    budgets = {row: max_tokens for row, _, max_tokens in client.drawn}
    for rollout in rollouts:  # what the cut leaves
        assert budgets[*rollout.context_ids, *rollout.drawn_ids] == 48 - rollout.num_shared


def test_a_branch_is_a_whole_solution_with_the_steps_of_all_of_it(task: WordArithmetic, tokenizer: Any) -> None:
    groups, _ = grow(task, tokenizer, TreeRollouts([2], segment_steps=2))
    first, _, branch, _ = groups[0].rollouts
    assert branch.branch == Branch(0, first.trajectory.step_ends[1])
    assert branch.trajectory.id == f"{first.trajectory.id}#2/0"
    assert branch.trajectory.steps[:2] == first.trajectory.steps[:2]
    assert len(branch.trajectory.steps) == 4
    assert "".join(branch.trajectory.steps) == branch.trajectory.response
    assert branch.trajectory.answer == branch.trajectory.response.rpartition("#### ")[2]
    assert branch.trajectory.prompt_ids == first.trajectory.prompt_ids
    # three steps, and cuts behind the third: nothing is left to cut
    groups, _ = grow(task, tokenizer, TreeRollouts([2], segment_steps=3))
    assert [len(group.rollouts) for group in groups] == [2, 2]


def test_a_run_on_trees_is_resumed_and_ends_with_equal_parameters(
    tiny_policy: Path, task: WordArithmetic, tokenizer: Any, tmp_path: Path
) -> None:
    def make(folder: str, **changes: Any) -> Any:
        settings: dict[str, Any] = {"estimator": TreeAdvantage(), "num_lines": 2, "branches": [2, 2]}
        settings |= {"num_iterations": 3, "num_epochs": 1, "evaluation_every": 0, "save_every": 2}
        settings |= {"rollout_num_problems": 2}
        return make_trainer(tiny_policy, task, tokenizer, tmp_path / folder, "", **{**settings, **changes})

    whole, cut = make("whole"), make("cut", stop_after=2)
    whole.run()
    cut.run()
    resumed = make("cut")
    resumed.run()
    assert read_metrics(tmp_path / "cut") == read_metrics(tmp_path / "whole")
    first, second = (trainer.policy.engine.model.state_dict() for trainer in (whole, resumed))
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    rows = read_metrics(tmp_path / "whole")
    # 4 rollouts of 3 steps: cut behind the first; the 4 branches are an answer, and the 4 others are cut once more
    assert [row["estimate/num_leaves"] for row in rows] == [12.0] * 3
    assert all(row["rollout/tokens"] < row["rollout/response_length"] * 2 * 12 for row in rows)
    assert all(row["rollout/tokens"] == row["rollout/drawn_tokens"] for row in rows)
    assert rows[-1]["update/grad_norm"] > 0


def test_rollouts_without_branches_are_as_before() -> None:
    rollout = make_rollout("abc")
    assert rollout.context_ids == [1]
    assert rollout.drawn_ids == [97, 98, 99]
    group = make_group([("abc", None, 1.0), ("abd", None, 0.0)])
    assert GRPO(False)([group], experience_of([group]), NO_CONTEXT).advantages[0].tolist() == [0.0, 0.5, 0.5, 0.5]
    assert PARAMS.n == 4
