"""Functions for a training loop of your own: text, numbers and lists in, lists and small records out.

Each calls the code that Espalier's own programs run, and raises `espalier.BadInput` (a ValueError) in one line on
what it is not defined for. This module loads in milliseconds; what a function needs is loaded at its first call.
"""

import math
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any

from espalier.data.records import BadInput

if TYPE_CHECKING:
    from espalier.data.answers.grade import Gold, Grade
    from espalier.values.monte_carlo import StateValue


def split_steps(response: str, how: str = "lines") -> list[str]:
    r"""Cut a response into steps, which join to it exactly; "" has none.

    `how`: lines, paragraphs, gsm8k, math, react, sentences or sub_questions (see `espalier.data.splitters`; gsm8k and
    math follow VinePPO, Kazemnejad et al. 2024). Raises BadInput on any other.

    >>> import espalier
    >>> espalier.split_steps("3 + 4 = 7\n7 * 2 = 14\n#### 14")
    ['3 + 4 = 7\n', '7 * 2 = 14\n', '#### 14']
    >>> espalier.split_steps("Add them: 7. Double it: 14.", how="sentences")
    ['Add them: 7.', ' Double it: 14.']
    """
    from espalier.data.splitters import splitter

    _check_text(response, "response")
    return splitter(how)(response)


def grade(response: str, gold: "Gold", kind: str = "response_math", num_options: int = 0) -> "Grade":
    r"""Grade a response by its final answer, as the tasks do: right, wrong or unparseable.

    `kind`: response_math (a whole response, the gold answer in LaTeX or text), math (the answer alone),
    response_number, number, marked_number (what follows the last `####`), choice (the gold answer is a letter, of
    `num_options`), boolean3, short_answer or think_format. A list of gold answers means any of them. What comes back
    has `is_correct`, `answer` (what was read, None where nothing could be), `verdict` and `reason`.

    It never raises on what a model wrote, never runs it as code, and takes about a second at most; the first symbolic
    comparison starts processes that are killed at their deadline. Raises BadInput on an unknown kind, and on a response
    or a gold answer that is no text.

    >>> import espalier
    >>> espalier.grade(r"Half of it is left, so the answer is \boxed{\frac{1}{2}}.", "0.5").is_correct
    True
    >>> espalier.grade("3 + 4 = 8\n#### 8", "7", kind="marked_number").verdict
    'wrong'
    >>> espalier.grade("I do not know.", "7", kind="marked_number").verdict
    'unparseable'
    """
    from espalier.data.answers.grading import grade_answer

    _check_text(response, "response")
    if not isinstance(gold, str | list | tuple) or not all(isinstance(one, str) for one in gold):
        raise BadInput(f"gold must be a text or a list of texts, got {repr(gold)[:60]}")
    if not isinstance(num_options, int) or num_options < 0:
        raise BadInput(f"num_options must be a whole number of at least 0, got {repr(num_options)[:60]}")
    return grade_answer(prediction=response, gold=gold, kind=kind, num_options=num_options)


def same_answer(one: str, other: str) -> bool:
    r"""Say whether two answers are the same without a gold answer, as majority votes join them.

    They are the same as written (white space aside), as numbers, or by the grader's mathematics asked in both
    directions. It is not transitive: `7 cm` is `7`, and `7` is `7 m`.

    >>> import espalier
    >>> espalier.same_answer(r"\frac{1}{2}", "0.5"), espalier.same_answer("north", "south")
    (True, False)
    """
    from espalier.rewards.votes import is_one_vote

    _check_text(one, "one")
    _check_text(other, "other")
    return is_one_vote(one, other)


def monte_carlo_values(rewards: Sequence[Sequence[float]]) -> "list[StateValue]":
    """Return value intermediate states by their completions: V(s) is the mean reward of the K completions sampled from
    s.

    `rewards[i]` holds one number for each completion of state i: True or False, or any reward; K may differ. What
    comes back has `value`, `standard_error` (s / sqrt(K), s the standard deviation of a sample; not a number for K = 1)
    and `num_completions`. Wang et al. 2024 (Math-Shepherd), Kazemnejad et al. 2024 (VinePPO). Raises BadInput for a
    state without completions, and where a row is no list of numbers.

    >>> import espalier
    >>> espalier.monte_carlo_values([[True, True, False, True]])
    [StateValue(value=0.75, standard_error=0.25, num_completions=4)]
    """
    from espalier.values.monte_carlo import state_value

    if not _is_list(rewards):
        raise BadInput(f"rewards must be a list of lists of numbers, got {repr(rewards)[:60]}")
    return [state_value(_numbers(row, f"rewards[{place}]")) for place, row in enumerate(rewards)]


def vineppo_advantages(state_values: Sequence[float | None], outcome: float, step_ends: Sequence[int]) -> list[float]:
    """Turn the values of a response's states into advantages of its T tokens: A(step i) = V(s_{i+1}) - V(s_i).

    `state_values` holds V(s_0) ... V(s_{S-1}), one for the state that each of the S steps starts from (the first is the
    prompt's; None: not valued, it takes the value of the next); V(s_S) is `outcome`, the reward of the whole response.
    `step_ends` counts response tokens up to and including each step; the last is T. Kazemnejad et al. 2024 (VinePPO),
    gamma 1. Raises BadInput on lists of different lengths and on ends that fall.

    >>> import espalier
    >>> espalier.vineppo_advantages([0.5, 0.25], outcome=1.0, step_ends=[2, 5])
    [-0.25, -0.25, 0.75, 0.75, 0.75]
    """
    from espalier.rl.credit.step_credit import fill_values, step_advantages
    from espalier.rl.credit.token_maps import spread_over_tokens

    if not _is_list(state_values):
        raise BadInput(f"state_values must be a list of numbers, got {repr(state_values)[:60]}")
    known = iter(_numbers([value for value in state_values if value is not None], "state_values"))
    values = [None if value is None else next(known) for value in state_values]
    ends, (total,) = _numbers(step_ends, "step_ends"), _numbers([outcome], "outcome")
    if len(values) != len(ends):
        raise BadInput(f"{len(values)} state_values and {len(ends)} step_ends: one of each per step is wanted")
    if ends != sorted(ends) or any(end < 0 or not end.is_integer() for end in ends):
        raise BadInput(
            "step_ends count tokens from the start of the response, whole ones, and never fall, got "
            f"{list(step_ends)[:8]}"
        )
    return spread_over_tokens([int(end) for end in ends], step_advantages(fill_values(values, total)))


def grpo_advantages(rewards: Sequence[float]) -> list[float]:
    """Compare the G rollouts of one problem: A_i = (r_i - mean(r)) / std(r), std of a sample (G - 1 below).

    Every token of rollout i has advantage A_i. A group whose rewards are all equal (std below 1e-6) has zeros; nothing
    is added to std. Shao et al. 2024 (DeepSeekMath), section 4.1.2. Raises BadInput on fewer than 2 rewards.

    >>> import espalier
    >>> espalier.grpo_advantages([1, 0, 0, 0])
    [1.5, -0.5, -0.5, -0.5]
    """
    from espalier.rl.advantages.grpo import group_advantages

    return group_advantages(_group(rewards), divide_by_std=True)


def dr_grpo_advantages(rewards: Sequence[float]) -> list[float]:
    """Compare the G rollouts of one problem without a division: A_i = r_i - mean(r).

    Liu et al. 2025 (Dr. GRPO), section 3.2. Divide the loss by a constant number of tokens, too, not by each
    response's length. Raises BadInput on fewer than 2 rewards.

    >>> import espalier
    >>> espalier.dr_grpo_advantages([1, 0, 0, 0])
    [0.75, -0.25, -0.25, -0.25]
    """
    from espalier.rl.advantages.grpo import group_advantages

    return group_advantages(_group(rewards), divide_by_std=False)


def rloo_advantages(rewards: Sequence[float]) -> list[float]:
    """Compare each of the G rollouts of one problem with the others: A_i = r_i - mean of the other rewards.

    Ahmadian et al. 2024 (RLOO). Raises BadInput on fewer than 2 rewards.

    >>> import espalier
    >>> espalier.rloo_advantages([1, 0, 0])
    [1.0, -0.5, -0.5]
    """
    from espalier.rl.advantages.rloo import leave_one_out

    return leave_one_out(_group(rewards))


def gae(values: Sequence[float], rewards: Sequence[float], gamma: float = 1.0, lam: float = 1.0) -> list[float]:
    """Estimate the advantages of the T tokens of one response by generalized advantage estimation, in float64.

    `values[t]` is the critic's value of the state that token t is chosen in, `rewards[t]` the reward it got:
    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lam A_{t+1}; V and A are 0 behind the last token (the
    response has ended). A + V are the critic's targets. Schulman et al. 2016. Raises BadInput on lists of different
    lengths, and on gamma or lam outside 0 to 1.

    >>> import espalier
    >>> espalier.gae(values=[0.5, 0.5], rewards=[0.0, 1.0], gamma=1.0, lam=0.5)
    [0.25, 0.5]
    """
    import torch

    from espalier.rl.advantages.gae import exact_advantages, last_tokens

    before, got = _numbers(values, "values"), _numbers(rewards, "rewards")
    if len(before) != len(got):
        raise BadInput(f"{len(before)} values and {len(got)} rewards: one of each per token is wanted")
    for name, factor in (("gamma", gamma), ("lam", lam)):
        if not isinstance(factor, int | float) or not 0 <= factor <= 1:
            raise BadInput(f"{name} must be a number from 0 to 1, got {repr(factor)[:60]}")
    rows = torch.tensor([got, before], dtype=torch.float64)
    mask = torch.ones(1, len(before), dtype=torch.bool)
    found: list[float] = exact_advantages(rows[:1], rows[1:], mask, last_tokens(mask), gamma, lam)[0].tolist()
    return found


def aggregate_scores(scores: Sequence[float], how: str = "minimum") -> float:
    """Make one score of a solution from the scores of its S steps, each in [0, 1].

    `how`: product, minimum (Lightman et al. 2023), last, mean, geometric_mean, sum or log_odds (the sum of
    ln(p / (1 - p)), from minus to plus infinity). A solution without steps scores lowest: 0, for log_odds minus
    infinity. Raises BadInput on any other, and where geometric_mean or log_odds meet a score outside [0, 1].

    >>> import espalier
    >>> espalier.aggregate_scores([0.5, 1.0, 0.5], "product"), espalier.aggregate_scores([0.5, 1.0, 0.75], "minimum")
    (0.25, 0.5)
    """
    from espalier.rewards.aggregate import BadAggregate, aggregate

    numbers = _numbers(scores, "scores")
    try:
        return aggregate(numbers, how)
    except BadAggregate as error:
        raise BadInput(str(error)) from None


def _group(rewards: Sequence[float]) -> list[float]:
    """Return the rewards of one problem's rollouts. Raises BadInput on fewer than 2, or one that is not finite."""
    numbers = _numbers(rewards, "rewards")
    if len(numbers) < 2:
        raise BadInput(
            f"a rollout is compared with others of its problem: 2 rewards at least are wanted, got {len(numbers)}"
        )
    return numbers


def _check_text(value: object, name: str) -> None:
    """Raise BadInput where an argument is no text."""
    if not isinstance(value, str):
        raise BadInput(f"{name} must be a text, got {repr(value)[:60]}")


def _is_list(value: object) -> bool:
    """Say whether a value is a list or what one goes over like a list: a tuple, an array, a tensor of one dimension."""
    return isinstance(value, Sized) and isinstance(value, Iterable) and not isinstance(value, Mapping | bytes)


def _numbers(numbers: Sequence[Any], name: str) -> list[float]:
    """Return a list, an array or a tensor as a list of numbers. Raises BadInput, with the place, where there is no
    list, or something in it is no number or not finite."""
    if not _is_list(numbers):
        raise BadInput(f"{name} must be a list of numbers, got {repr(numbers)[:60]}")
    found = []
    for place, number in enumerate(numbers):
        try:
            is_finite = not isinstance(number, str) and math.isfinite(number)
        except (TypeError, ValueError, RuntimeError):
            is_finite = False
        if not is_finite:
            raise BadInput(f"{name}: number {place + 1} of {len(numbers)} is {repr(number)[:60]}: leave such rows out")
        found.append(float(number))
    return found
