"""Exact values: a tree by hand, brute force over all paths, simulation, and a network against its plain passes."""

import math
import random
from collections.abc import Hashable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM

from espalier.data.records import BadInput, Problem, Trajectory
from espalier.data.steps import Decoder
from espalier.data.tasks.enumerable import Position
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.values.exact.decision_values import (
    DecisionState,
    ExactValue,
    Transition,
    evaluate_policy,
    shares_leaving,
)
from espalier.values.exact.line_search import LineSearch, LineStart
from espalier.values.exact.merge_error import measure_merges, total_variation
from espalier.values.exact.state_values import ExactSettings, enumerable, exact_values
from tests.support.exact_cases import HoldsLetter, sharp_network, written_tokens

# state → decisions: (probability, the letter that is written)
Table = dict[str, list[tuple[float, str]]]


def path_state(path: str, key: Hashable = None) -> DecisionState:
    return DecisionState(len(path), path if key is None else key, path)


def walk(table: Table, length: int, reward: Any, key: Any = lambda path: path) -> Any:
    """Decide by a table of the last letter: responses of `length` letters, graded as a whole."""

    def decide(states: Sequence[DecisionState]) -> list[list[Transition]]:
        rows = []
        for state in states:
            path = str(state.prefix)
            rows.append([
                Transition(p, float(reward(path + letter)) if len(path) + 1 == length
                       else path_state(path + letter, key(path + letter)))
                for p, letter in table[path[-1:]]
            ])  # fmt: skip
        return rows

    return decide


def random_table(letters: str, seed: int) -> Table:
    rng = random.Random(seed)
    rows = {}
    for last in ["", *letters]:
        weights = [rng.random() for _ in letters]
        rows[last] = [(weight / sum(weights), letter) for weight, letter in zip(weights, letters, strict=True)]
    return rows


def brute_force(table: Table, length: int, reward: Any, path: str) -> float:
    """Sum over all paths of their probability times their reward."""
    total = 0.0
    for rest in product("abc", repeat=length - len(path)):
        whole, probability = path, 1.0
        for letter in rest:
            probability *= {name: p for p, name in table[whole[-1:]]}[letter]
            whole += letter
        total += probability * reward(whole)
    return total


def test_values_of_a_tree_by_hand() -> None:
    """Left (0.25) succeeds in 1 of 2, right (0.75) in 1 of 5: 0.125 + 0.15 = 0.275."""
    table = {"": [(0.25, "l"), (0.75, "r")], "l": [(0.5, "g"), (0.5, "b")], "r": [(0.2, "g"), (0.8, "b")]}
    asked = [path_state(""), path_state("l"), path_state("r")]
    nodes = evaluate_policy(asked, walk(table, 2, lambda path: path.endswith("g")))
    assert [nodes[state.node].value.mid for state in asked] == pytest.approx([0.275, 0.5, 0.2])
    assert nodes[asked[0].node].value.low == pytest.approx(nodes[asked[0].node].value.high)


@pytest.mark.parametrize("seed", range(3))
def test_every_state_has_the_value_of_brute_force_over_all_paths(seed: int) -> None:
    table, length = random_table("abc", seed), 4

    def reward(path: str) -> bool:
        return path.count("a") == 2 or path.startswith("bc")

    paths = ["".join(letters) for size in range(length) for letters in product("abc", repeat=size)]
    nodes = evaluate_policy([path_state(path) for path in paths], walk(table, length, reward))
    for path in paths:
        assert nodes[len(path), path].value.mid == pytest.approx(brute_force(table, length, reward, path), abs=1e-12)


def test_merged_states_have_the_values_of_the_tree_where_the_policy_reads_the_key_alone() -> None:
    """The policy reads the last letter, the reward the number of a's: both are in the key."""
    table, length = random_table("abc", 7), 6
    tree = evaluate_policy([path_state("")], walk(table, length, lambda path: path.count("a") == 2))
    merging = walk(table, length, lambda path: path.count("a") == 2, key=lambda path: (path[-1:], path.count("a")))
    merged = evaluate_policy([path_state("")], merging)
    assert merged[0, ""].value.mid == pytest.approx(tree[0, ""].value.mid, abs=1e-12)
    assert len(merged) < len(tree) / 5
    assert measure_merges(merged, merging, 50).total_variation == 0.0


def test_simulated_outcomes_agree_within_three_standard_errors() -> None:
    table, length, num = random_table("abc", 3), 5, 10_000
    nodes = evaluate_policy([path_state("")], walk(table, length, lambda path: "cc" in path))
    rng, right = random.Random(1), 0
    for _ in range(num):
        path = ""
        while len(path) < length:
            row = table[path[-1:]]
            path += rng.choices([letter for _, letter in row], [p for p, _ in row])[0]
        right += "cc" in path
    value = nodes[0, ""].value.mid
    assert abs(right / num - value) < 3 * math.sqrt(value * (1 - value) / num)


def test_states_that_are_not_followed_widen_the_bounds_by_their_probability() -> None:
    """The state "r" is reached by 0.1, less than 0.2: of 0.9 x 0.5 known success, 0.1 is open."""
    table = {"": [(0.9, "l"), (0.1, "r")], "l": [(0.5, "g"), (0.5, "b")], "r": [(1.0, "g")]}
    nodes = evaluate_policy([path_state("")], walk(table, 2, lambda path: path.endswith("g")), state_mass=0.2)
    assert nodes[0, ""].value.low == pytest.approx(0.45)
    assert nodes[0, ""].value.high == pytest.approx(0.55)
    assert nodes[1, "r"].value == ExactValue(0.0, 1.0)


def test_probabilities_above_one_and_decisions_that_lead_nowhere_are_refused() -> None:
    with pytest.raises(ValueError, match="more than 1"):
        evaluate_policy([path_state("")], lambda states: [[Transition(0.7, 1.0), Transition(0.7, 0.0)]])
    with pytest.raises(ValueError, match="leads to depth 0"):
        evaluate_policy([path_state("")], lambda states: [[Transition(1.0, path_state("", "elsewhere"))]])


def test_the_merge_error_is_the_total_variation_between_merged_prefixes() -> None:
    """ "ax" goes on to g by 0.8 and "bx" by 0.5, merged under "x": variation 0.3, values 0.8 and 0.5."""
    chances = {"": [(0.6, "a"), (0.4, "b")], "ax": [(0.8, "g"), (0.2, "h")], "bx": [(0.5, "g"), (0.5, "h")]}

    def decide(states: Sequence[DecisionState]) -> list[list[Transition]]:
        rows = []
        for state in states:
            path = str(state.prefix)
            if len(path) == 2:
                rows.append([Transition(p, float(letter == "g")) for p, letter in chances[path]])
            else:
                rows.append([Transition(p, path_state(path + letter, (path + letter)[1:] or None))
                             for p, letter in chances.get(path, [(1.0, "x")])])  # fmt: skip
        return rows

    nodes = evaluate_policy([path_state("")], decide)
    assert nodes[2, "x"].representative == "ax"
    error = measure_merges(nodes, decide, 10)
    assert (error.total_variation, error.most, error.value_gap) == pytest.approx((0.3, 0.3, 0.3))
    assert nodes[0, ""].value.mid == pytest.approx(0.8)  # the tree's value is 0.6 x 0.8 + 0.4 x 0.5


def test_the_share_that_leaves_the_grammar_by_hand() -> None:
    """ "" goes to a by 0.5, to x by 0.2 and ends outside by 0.1, a to ax by 0.3; what has an x is outside."""
    chances = {"": [(0.5, "a"), (0.2, "x")], "a": [(0.3, "x"), (0.7, "b")], "x": [(1.0, "a")]}

    def decide(states: Sequence[DecisionState]) -> list[list[Transition]]:
        paths = [str(state.prefix) for state in states]
        return [[Transition(p, path_state(path + letter)) for p, letter in chances.get(path, [])] for path in paths]

    nodes = evaluate_policy([path_state("")], decide)
    shares = shares_leaving(nodes, lambda path: 1.0 if "x" in str(path) else 0.1 if path == "" else 0.0)
    assert shares[0, ""] == pytest.approx(0.1 + 0.2 + 0.5 * 0.3)
    assert shares[1, "a"] == pytest.approx(0.3)
    assert shares[1, "x"] == 1.0


class WithoutSpaces(HoldsLetter):
    """Lines with a space are outside its grammar."""

    def position(self, problem: Problem, steps: Sequence[str]) -> Position | None:
        return None if " " in "".join(steps) else Position((len(steps),), False)


@pytest.mark.parametrize("merges", [False, True])
def test_the_share_of_responses_outside_the_grammar_is_that_of_brute_force(
    merges: bool, small: tuple[Any, Any]
) -> None:
    """Of responses of at most three tokens, the last an end token; cut ones are not followed by it."""
    model, tokenizer = small
    decode, prompt, letters = Decoder(tokenizer), tokenizer("Mia has 5").input_ids, written_tokens(tokenizer)[1:]
    reached: dict[tuple[int, ...], float] = {(): 1.0}
    outside = 0.0
    for _ in range(3):
        probs = plain_probs(model, [[*prompt, *ids] for ids in reached])
        ended = zip(reached.items(), probs[:, 1].tolist(), strict=True)
        outside += sum(
            mass * p for (ids, mass), p in ended if " " in decode(ids).strip("\n") and "\n" not in decode(ids)
        )
        rows = zip(reached.items(), probs[:, letters].tolist(), strict=True)
        reached = {(*ids, token): mass * p for (ids, mass), row in rows for token, p in zip(letters, row, strict=True)}
    trajectory = trajectory_of(tokenizer, "Mia has 5", [1], [1])
    settings = ExactSettings(3, line_mass=0.001, state_mass=0.0, max_width=100_000, merges=merges)
    found = exact_values(model, tokenizer, WithoutSpaces(), {"p": Problem("p", "", "")}, [trajectory], settings)
    assert outside > 0.01
    assert found.outside == pytest.approx(outside, abs=0.02)


def test_the_total_variation_counts_what_is_not_followed_as_one_decision() -> None:
    assert total_variation({"a": 0.5, "b": 0.5}, {"a": 0.5, "b": 0.3}) == pytest.approx(0.2)
    assert total_variation({"a": 1.0}, {"b": 1.0}) == pytest.approx(1.0)


# --- networks ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    return sharp_network(tmp_path_factory.mktemp("small") / "model")


def trajectory_of(tokenizer: Any, prompt: str, ids: Sequence[int], step_ends: Sequence[int]) -> Trajectory:
    decode, ends = Decoder(tokenizer), list(step_ends)
    steps = [decode(ids[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    prompt_ids = tokenizer(prompt).input_ids
    return Trajectory("p/0", "p", prompt, decode(ids), steps, prompt_ids, list(ids), ends, "stop", "", "", False)


def plain_probs(model: Any, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """[N, V] after rows of one length, by passes without a cache."""
    with torch.no_grad():
        parts = [model(input_ids=torch.tensor(list(rows[at : at + 4096]))).logits[:, -1]
                 for at in range(0, len(rows), 4096)]  # fmt: skip
    return torch.softmax(torch.cat(parts).double(), -1)


def test_the_value_of_a_prompt_is_that_of_brute_force_over_all_responses(small: tuple[Any, Any]) -> None:
    """Responses of at most four tokens, the last an end token: 20 x 20 x 20 beginnings by plain passes."""
    model, tokenizer = small
    decode, prompt, letters = Decoder(tokenizer), tokenizer("Mia has 5").input_ids, written_tokens(tokenizer)[1:]
    truth = total = 0.0
    reached: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(4):
        probs = plain_probs(model, [[*prompt, *ids] for ids in reached])
        for (ids, probability), ended in zip(reached.items(), probs[:, 1].tolist(), strict=True):
            truth += probability * ended * HoldsLetter.holds(decode(ids))
            total += probability * ended
        rows = zip(reached.items(), probs[:, letters].tolist(), strict=True)
        reached = {(*ids, token): mass * p for (ids, mass), row in rows for token, p in zip(letters, row, strict=True)}
    assert 0.05 < truth < total - 0.05
    trajectory = trajectory_of(tokenizer, "Mia has 5", [1], [1])
    settings = ExactSettings(4, line_mass=0.01, state_mass=0.0, max_width=100_000, merges=False)
    found = exact_values(model, tokenizer, HoldsLetter(), {"p": Problem("p", "", "")}, [trajectory], settings)
    value, outcome = found.values[0]
    assert value.low - 1e-6 <= truth <= value.high + 1e-6
    assert value.high - value.low < 0.021
    assert outcome == ExactValue(0.0, 0.0)


class OfLabelledLines(HoldsLetter):
    """A line that does not begin with an a goes with the step before it."""

    def split_steps(self, response: str) -> list[str]:
        steps: list[str] = []
        for line in super().split_steps(response):
            if steps and not line.startswith("a"):
                steps[-1] += line
            else:
                steps.append(line)
        return steps


def test_a_line_that_begins_no_step_leads_on_too(small: tuple[Any, Any]) -> None:
    model, tokenizer = small
    trajectory = trajectory_of(tokenizer, "Mia has 5", [1], [1])
    settings = ExactSettings(7, line_mass=0.5, state_mass=0.0, max_width=100, merges=False)
    values = [
        exact_values(model, tokenizer, task, {"p": Problem("p", "", "")}, [trajectory], settings).values
        for task in (HoldsLetter(), OfLabelledLines())
    ]
    assert values[0] == values[1]


def test_sampled_responses_agree_within_three_standard_errors(small: tuple[Any, Any]) -> None:
    """10,000 responses of at most 6 tokens, drawn from the network without a cache; merged states."""
    model, tokenizer = small
    num, room = 10_000, 5
    prompt = tokenizer("Mia has 5").input_ids
    draws = torch.Generator().manual_seed(0)
    ids = torch.tensor([prompt] * num)
    for _ in range(room):
        probs = plain_probs(model, ids.tolist())
        ids = torch.cat([ids, torch.multinomial(probs, 1, generator=draws)], dim=1)
    decode, right = Decoder(tokenizer), 0
    for row in ids[:, len(prompt) :].tolist():
        right += 1 in row and HoldsLetter.holds(decode(row[: row.index(1)]))
    trajectory = trajectory_of(tokenizer, "Mia has 5", [1], [1])
    settings = ExactSettings(room, line_mass=0.02, state_mass=1e-3, max_width=200)
    found = exact_values(model, tokenizer, HoldsLetter(), {"p": Problem("p", "", "")}, [trajectory], settings)
    value, rate = found.values[0][0], right / num
    error = 3 * math.sqrt(rate * (1 - rate) / num)
    assert 0.02 < rate < 0.98
    assert value.low - error <= rate <= value.high + error


def test_lines_have_the_probabilities_of_a_pass_over_the_whole(small: tuple[Any, Any]) -> None:
    """Also from keys and values that an earlier call kept."""
    model, tokenizer = small
    decode = Decoder(tokenizer)
    search = LineSearch(model, decode, [1], temperature=0.7, line_mass=0.3, max_width=60)
    prompts = [tuple(tokenizer(text).input_ids) for text in ("Mia", "Mia has 5 apples.")]
    before = search([LineStart(ids, 4) for ids in prompts])
    longer = [(*ids, lines[0].ids[0]) for ids, lines in zip(prompts, before, strict=True)]
    after = search([LineStart(ids, 3) for ids in longer])
    for start, lines in zip([*prompts, *longer], [*before, *after], strict=True):
        assert len(lines) > 3
        for line in lines[:5]:
            row = torch.tensor([[*start, *line.ids]])
            with torch.no_grad():
                logs = torch.log_softmax(model(input_ids=row).logits[0].double() / 0.7, -1)
            places = range(len(start) - 1, row.shape[1] - 1)
            logprob = sum(float(logs[at, row[0, at + 1]]) for at in places)
            assert math.log(line.probability) == pytest.approx(logprob, abs=1e-4)


def test_a_sliding_window_that_only_long_rows_reach_is_refused_too(small: tuple[Any, Any]) -> None:
    """Kept keys stand at other places in rows of unequal lengths, so that a window of places cuts other tokens off; a
    prompt of a few tokens shows nothing of a window of 40."""
    tokenizer = small[1]
    torch.manual_seed(0)
    config = MistralConfig(vocab_size=small[0].config.vocab_size, hidden_size=32, intermediate_size=32,
                           num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, sliding_window=40,
                           max_position_embeddings=256, initializer_range=0.3)  # fmt: skip
    prompt = tuple(tokenizer("Mia has 5 apples.").input_ids)
    assert len(prompt) < 18

    def search() -> LineSearch:
        return LineSearch(MistralForCausalLM(config).eval(), Decoder(tokenizer), [1], 1.0, line_mass=0.5, max_width=10)

    search()([LineStart(prompt, 2)])  # never as long as the window
    with pytest.raises(BadInput, match="other probabilities from cached keys and values"):
        search()([LineStart(prompt, 40)])
    both = search()
    both([LineStart(prompt, 2)])
    with pytest.raises(BadInput, match="other probabilities from cached keys and values"):
        both([LineStart(prompt, 40)])


def test_a_network_of_few_positions_is_checked_as_far_as_it_reads(small: tuple[Any, Any]) -> None:
    """Its lines end long before a response's room is used up, which is more than it has positions for."""
    tokenizer, num_words = small[1], small[0].config.vocab_size
    config = GPT2Config(vocab_size=num_words, n_positions=48, n_embd=32, n_layer=1, n_head=2)
    ends = list(range(num_words))  # a line is a token
    search = LineSearch(GPT2LMHeadModel(config).eval(), Decoder(tokenizer), ends, 1.0, line_mass=0.5, max_width=10)
    assert search([LineStart(tuple(tokenizer("Mia has 5 apples.").input_ids), 100)])[0]


def test_less_than_the_allowed_mass_of_a_line_is_given_up(small: tuple[Any, Any]) -> None:
    model, tokenizer = small
    search = LineSearch(model, Decoder(tokenizer), [1], 1.0, line_mass=0.1, max_width=100_000)
    lines = search([LineStart(tuple(tokenizer("Mia").input_ids), 2)])[0]
    assert 0.9 <= sum(line.probability for line in lines) <= 1 + 1e-9
    assert {line.ending for line in lines} <= {"line", "end", "cut"}


def test_a_task_without_positions_is_refused() -> None:
    class Other:
        name = "other"

    with pytest.raises(BadInput, match="other has no `position`"):
        enumerable(Other())  # type: ignore[arg-type]


def test_the_position_of_word_arithmetic_is_what_was_done_and_written() -> None:
    problem = Problem("p", "", "14", {"start": 6, "operations": [["doubles", 0], ["buys", 2]]})
    position = WordArithmetic().position
    assert position(problem, []) == Position((0, 6), True)
    assert position(problem, ["doubles: 6 + 2 = 8\n"]) == Position((1, 8), False)
    assert position(problem, ["doubles: 6 * 2 = 12\n"]) == Position((1, 12), True)
    right = ["doubles: 6 * 2 = 12\n", "buys: 12 + 2 = 14\n"]
    assert position(problem, [*right, "#### 14"]) == Position((3, 14), True, is_finished=True)
    assert position(problem, [*right, "#### 13"]) == Position((3, 13), False, is_finished=True)
    assert position(problem, ["buys: 6 + 2 = 8\n"]) is None
    assert position(problem, ["doubles: 12\n"]) is None


def test_a_trajectory_longer_than_max_tokens_is_refused(small: tuple[Any, Any]) -> None:
    model, tokenizer = small
    trajectory = trajectory_of(tokenizer, "Mia", [70, 71, 1], [3])
    with pytest.raises(BadInput, match="has 3 tokens"):
        exact_values(model, tokenizer, HoldsLetter(), {"p": Problem("p", "", "")}, [trajectory], ExactSettings(2))


def test_a_trajectory_of_a_problem_that_is_not_given_is_refused(small: tuple[Any, Any]) -> None:
    model, tokenizer = small
    trajectory = trajectory_of(tokenizer, "Mia", [70, 71, 1], [3])
    with pytest.raises(BadInput, match="its problem 'p' is not among the 0 that are given"):
        exact_values(model, tokenizer, HoldsLetter(), {}, [trajectory], ExactSettings(8))
