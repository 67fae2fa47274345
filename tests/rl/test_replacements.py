"""Dynamic sampling: which problems are asked in place of groups that agree, when, and what is trained on."""

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from espalier.data.records import BadInput, Problem
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.rewards.outcome import OutcomeReward
from espalier.rl.problem_order import draw_problems
from espalier.rl.replacements import Asked, num_to_ask
from espalier.rl.rollout_checks import Refusal
from espalier.rl.rollout_source import SampledGroups
from espalier.rl.types import RolloutGroup
from espalier.runtime.background_loop import BackgroundLoop
from espalier.sampling.client import Refused, Sample, SampleRequest, SamplingParams, ServerGone
from tests.rl.test_group_scores import NUM, OutcomesOfANetwork, source_of
from tests.support.rl_cases import PARAMS, FakeClient

SEED = 3  # of `source_of`


class Slow(FakeClient):
    """Answers after a time that (`seed`, request) draws; refuses the problems of `refused`; notes all requests."""

    def __init__(self, tokenizer: Any, seed: int, refused: Sequence[str] = ()):
        super().__init__(tokenizer)
        self.seed, self.refused, self.asked = seed, refused, list[str]()

    async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
        self.asked.append(request.id)
        await asyncio.sleep(0.02 * random.Random(f"{self.seed} {request.id}").random())
        if request.id.split("/", 1)[1] in self.refused:
            raise Refused("too long")
        return await super().sample(request, params)


def replacing(
    client: FakeClient, task: WordArithmetic, tokenizer: Any, reward: OutcomeReward, loop: BackgroundLoop, rounds: int
) -> SampledGroups:
    source = source_of(client, task, tokenizer, reward, loop)
    rollout = replace(source.config.rollout, dynamic_sampling_rounds=rounds, max_refused_share=0.5)
    source.config = replace(source.config, rollout=rollout)
    return source


def candidates(task: WordArithmetic, rounds: int) -> Iterator[tuple[str, str]]:
    """(request, problem) in order."""
    problems = list(task.problems("train"))[:20]
    for number in range(rounds + 1):
        for problem in draw_problems(problems, NUM, SEED, 0, number):
            yield f"rl-0-{number}/{problem.id}" if number else f"rl-0/{problem.id}", problem.id


def by_hand(task: WordArithmetic, tokenizer: Any, rounds: int, refused: Sequence[str]) -> tuple[list[str], list[str]]:
    """(requests of the shortest row of candidates with NUM groups that differ, or of all; the problems trained on)"""
    client, golds = FakeClient(tokenizer), {problem.id: problem.gold for problem in task.problems("train")}
    asked, different, alike = list[str](), list[str](), list[str]()
    for name, problem in candidates(task, rounds):
        if len(different) == NUM:
            break
        asked.append(name)
        if problem in refused:
            continue
        samples = asyncio.run(client.sample(SampleRequest(name, "", []), PARAMS))
        is_right = {sample.text == f"#### {golds[problem]}" for sample in samples}
        (different if len(is_right) == 2 else alike).append(problem)
    return asked, [*different, *alike][:NUM]


@pytest.mark.parametrize("num_refused", [0, 2])
@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("reward", [OutcomeReward(), OutcomesOfANetwork()])
def test_the_first_that_differ_are_trained_on_whatever_finishes_first(
    reward: OutcomeReward, rounds: int, num_refused: int, task: WordArithmetic, tokenizer: Any
) -> None:
    refused = [one.id for one in draw_problems(list(task.problems("train"))[:20], NUM, SEED, 0)[1 : 1 + num_refused]]
    asked, trained = by_hand(task, tokenizer, rounds, refused)
    order = [name for name, _ in candidates(task, rounds)]
    assert len(asked) > NUM
    seen = []
    for seed in range(4):
        client = Slow(tokenizer, seed, refused)
        with BackgroundLoop() as loop:
            source = replacing(client, task, tokenizer, reward, loop, rounds)
            groups = source(0)
        assert set(client.asked) == set(order[: len(client.asked)]) >= set(asked), "none is passed by"
        assert [group.problem.id for group in groups] == trained
        assert source.ledger.generated == sum(source.ledger.trained.values()) + source.ledger.agreeing
        measured = source.metrics.take()
        assert measured["rollout/num_groups"] == len(asked) - num_refused
        del measured["rollout/drawn_tokens"], measured["rollout/refused"]
        seen.append({name: value for name, value in measured.items() if not name.startswith("seconds/")})
    assert all(other == seen[0] for other in seen), "nor does surplus change a metric"


def simulated(wanted: int, share: float, seed: int) -> tuple[int, float]:
    """(rounds one behind the other, the share of good groups that is surplus) where all that are asked at once finish
    together and each differs with this probability."""
    rng, asked, scored, good, rounds = random.Random(seed), 0, 0, 0, 0
    while number := num_to_ask(wanted, asked, scored, good):
        rounds, asked, scored = rounds + 1, asked + number, scored + number
        good += sum(rng.random() < share for _ in range(number))
    return rounds, (good - wanted) / good


@pytest.mark.parametrize(("share", "most_rounds"), [(0.1, 6), (0.3, 5), (0.5, 4), (0.9, 3)])
def test_few_are_drawn_one_behind_the_other_and_few_in_vain(share: float, most_rounds: int) -> None:
    runs = [simulated(64, share, seed) for seed in range(100)]
    assert sum(rounds for rounds, _ in runs) / len(runs) < most_rounds
    assert sum(surplus for _, surplus in runs) / len(runs) < 0.03


@pytest.mark.parametrize(("agreeing_first", "most_surplus"), [(False, 0.05), (True, 0.3)])
def test_few_are_asked_in_vain_where_one_finishes_after_the_other(agreeing_first: bool, most_surplus: float) -> None:
    surplus = []
    for seed in range(50):
        rng, open_, asked, scored, good = random.Random(seed), list[bool](), 0, 0, 0
        while True:
            more = num_to_ask(64, asked, scored, good)
            open_ += [rng.random() < 0.5 for _ in range(more)]
            asked += more
            if not open_:
                break
            is_good = open_.pop(open_.index(min(open_)) if agreeing_first else rng.randrange(len(open_)))
            scored, good = scored + 1, good + is_good
        surplus.append((good - 64) / good)
    assert sum(surplus) / len(surplus) < most_surplus


def test_as_many_are_asked_as_are_wanted_and_none_where_enough_differ() -> None:
    assert num_to_ask(64, 0, 0, 0) == 64
    assert [num_to_ask(64, 64, scored, scored) for scored in (1, 30, 64)] == [0, 0, 0]
    assert num_to_ask(64, 70, 70, 64) == num_to_ask(64, 80, 70, 64) == 0
    assert num_to_ask(64, 64, 64, 32) == 54, "32 / ((32 + 16) / (64 + 16)) = 53.3"
    assert num_to_ask(4, 4, 4, 0) == 20, "4 / ((0 + 1) / (4 + 1))"
    assert num_to_ask(64, 64, 40, 8) == 32, "one for one until three of four are scored"


def test_a_group_that_agrees_is_replaced_while_others_are_drawn(task: WordArithmetic, tokenizer: Any) -> None:
    class Waits(FakeClient):
        """Answers the first candidate when a replacement has been asked for."""

        has_replacement = False

        async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
            self.has_replacement |= request.id.startswith("rl-0-1/")
            end = time.monotonic() + 10
            while request.id == first and not self.has_replacement:
                assert time.monotonic() < end, "nothing is replaced before all is drawn"
                await asyncio.sleep(0.005)
            return await super().sample(request, params)

    first = next(candidates(task, 1))[0]
    with BackgroundLoop() as loop:
        assert len(replacing(Waits(tokenizer), task, tokenizer, OutcomeReward(), loop, 1)(0)) == NUM


def test_a_replacement_that_fails_ends_the_run_and_what_is_still_drawn(task: WordArithmetic, tokenizer: Any) -> None:
    client = FakeClient(tokenizer, dies_at="rl-0-1")
    with BackgroundLoop() as loop:
        with pytest.raises(ServerGone, match="the server has died"):
            replacing(client, task, tokenizer, OutcomeReward(), loop, 1)(0)
        assert client.num_open == 0


def test_a_replacement_that_fails_is_not_waited_for_behind_a_long_answer(task: WordArithmetic, tokenizer: Any) -> None:
    class Hangs(FakeClient):
        """The first candidate is never answered."""

        async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
            if request.id == first:
                await asyncio.sleep(60)
            return await super().sample(request, params)

    first, started = next(candidates(task, 1))[0], time.monotonic()
    with BackgroundLoop() as loop, pytest.raises(ServerGone, match="the server has died"):
        replacing(Hangs(tokenizer, dies_at="rl-0-1"), task, tokenizer, OutcomeReward(), loop, 1)(0)
    assert time.monotonic() - started < 10


def test_a_run_that_is_given_up_scores_and_asks_nothing_more(task: WordArithmetic, tokenizer: Any) -> None:
    """The reward fails on the first group while the others are still drawn."""

    class Fails(OutcomeReward):
        num_calls = 0

        def __call__(self, trajectories: Sequence[Any]) -> list[Any]:
            self.num_calls += 1
            raise BadInput("the judge is gone")

    client, reward = Slow(tokenizer, 0), Fails()
    with BackgroundLoop() as loop:
        with pytest.raises(BadInput, match="the judge is gone"):
            replacing(client, task, tokenizer, reward, loop, 1)(0)
        asked, calls = len(client.asked), reward.num_calls
        deadline = time.monotonic() + 10
        while client.num_open and time.monotonic() < deadline:  # what was open ends by itself, on a busy machine later
            time.sleep(0.01)
        time.sleep(0.1)
        assert (len(client.asked), reward.num_calls, client.num_open) == (asked, calls, 0)


def test_refusals_are_judged_of_the_first_problems_and_of_the_whole_batch(task: WordArithmetic, tokenizer: Any) -> None:
    """2 of the first 6 and none behind: too many where 2 of 10 may be refused, although all of them are 2 of more."""
    refused = [problem for _, problem in list(candidates(task, 0))[:2]]
    with BackgroundLoop() as loop:
        source = replacing(Slow(tokenizer, 0, refused), task, tokenizer, OutcomeReward(), loop, 2)
        rollout = replace(source.config.rollout, max_refused_share=0.2)
        source.config = replace(source.config, rollout=rollout)
        with pytest.raises(BadInput, match="2 of 6"):
            source(0)


def test_refusals_of_what_was_asked_ahead_in_vain_are_not_judged() -> None:
    nothing: Any = None
    asked = Asked(2, iter(()), draw=nothing, is_good=nothing)
    asked.order += ["a", "b", "c", "d"]
    refused = [Refusal("a", "too long"), Refusal("d", "too long")]
    assert asked.up_to(RolloutGroup(Problem("c", "?", "1"), [], []), refused) == (refused[:1], 3)
