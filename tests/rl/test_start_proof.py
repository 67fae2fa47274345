"""What an engine's log-probs say at the start of a run, against engines that are drawn: right, stale, stale in part."""

import weakref
from typing import Any

import pytest
import torch

from espalier.rl.delivery.policy_weights import PolicyWeights
from espalier.rl.delivery.receipts import StaleWeights
from espalier.rl.delivery.start_proof import Answer, Reading, Scratch, read_answer, scratch_copy
from espalier.rl.probes import canary
from espalier.rl.probes.canary import Canary, Scores, canary_scores, way_to

ROUNDING = 0.02
LIMIT = 5 * ROUNDING


def test_the_way_to_what_is_stale_is_measured_over_all_tokens() -> None:
    draws = torch.Generator().manual_seed(0)
    truth, way, noise = torch.randn(3, 400, generator=draws).double()
    for share in (0.0, 0.3, 1.0):
        found, unsure = way_to(truth + share * 0.2 * way + 0.5 * noise, truth, truth + 0.2 * way)
        assert abs(found - share) < 3 * unsure
        assert 0.05 < unsure < 0.2
    nan = way_to(torch.full((4,), float("nan")), truth[:4], way[:4])
    assert not abs(nan[0]) < 1e9


@pytest.mark.parametrize("most", [2**9, 2**12])
def test_canaries_are_scored_in_parts_as_at_once(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    draws = torch.Generator().manual_seed(0)
    table = torch.randn(50, 50, generator=draws)
    canaries = [Canary(torch.randint(0, 50, (size,), generator=draws).tolist(), 3) for size in (9, 20, 14, 7, 20)]
    calls: list[int] = []

    def logits(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        calls.append(len(input_ids))
        return table[input_ids]

    monkeypatch.setattr(canary, "_MAX_SCORES", 50 * 12)  # every fifth of 55 positions
    at_once = canary_scores(logits, torch.device("cpu"), canaries, 50)
    assert calls == [5]
    assert len(at_once.distributions) == 11
    monkeypatch.setattr(canary, "MAX_LOGITS", most)
    in_parts = canary_scores(logits, torch.device("cpu"), canaries, 50)
    assert calls[1:] == ([1] * 5 if most < 2000 else [4, 1])
    for one, other in zip(at_once, in_parts, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


class Drawn:
    """A scratch copy with 30 parameters, each just distinguished from rounding over `size` tokens."""

    def __init__(self, size: int, seed: int):
        self.draws = torch.Generator().manual_seed(seed)
        self.size = size
        truth, start = 1.5 * self.normal(), 1.5 * self.normal()
        self.ways = [way * (52 * ROUNDING / way.norm()) for way in (self.normal() for _ in range(30))]
        stale = {f"w{number}": truth + way for number, way in enumerate(self.ways)}
        weights: Any = None
        noise = self.normal()
        rounded = truth + ROUNDING * noise / noise.square().mean().sqrt()
        self.scratch = Scratch(weights, [], start, truth, rounded, stale)

    def normal(self) -> torch.Tensor:
        return torch.randn(self.size, generator=self.draws)

    def read(self, found: torch.Tensor, before: torch.Tensor | None = None, limit: float = LIMIT) -> Reading:
        return read_answer(Answer("engine 0", found, before), self.scratch, limit)


@pytest.mark.parametrize("size", [60, 400, 8000])
@pytest.mark.parametrize("noise", [0.7, 1.9])
def test_a_right_engine_is_proven_however_many_tokens_there_are(size: int, noise: float) -> None:
    for seed in range(10):
        drawn = Drawn(size, seed)
        assert all(drawn.scratch.seen(name) >= 1 for name in drawn.scratch.stale)
        found = drawn.scratch.truth + noise * ROUNDING * drawn.normal()
        reading = drawn.read(found, drawn.scratch.start + ROUNDING * drawn.normal())
        assert reading.is_fresh, reading


@pytest.mark.parametrize("size", [60, 400, 8000])
def test_a_stale_parameter_is_found_and_named_and_half_of_one_is_found(size: int) -> None:
    for seed in range(10):
        drawn = Drawn(size, seed)
        noise = ROUNDING * drawn.normal()
        reading = drawn.read(drawn.scratch.stale["w7"] + noise)
        assert (reading.is_fresh, reading.is_stale, reading.nearest) == (False, True, "w7"), reading
        assert reading.share == pytest.approx(1, abs=0.2)
        assert "from a stale w7's" in str(reading)
        assert not drawn.read(drawn.scratch.truth + 0.5 * drawn.ways[7] + noise).is_fresh


def test_an_engine_that_took_nothing_is_stale_whether_or_not_it_was_asked_before() -> None:
    drawn = Drawn(400, 0)
    old = drawn.scratch.start + ROUNDING * drawn.normal()
    other = drawn.scratch.truth.mean() + 1.5 * drawn.normal()
    for found, before in ((old, old), (old, None), (old, torch.full((400,), -torch.inf))):
        reading = drawn.read(found, before, limit=9.0)
        assert (reading.is_fresh, reading.is_stale) == (False, True), reading
    assert not drawn.read(other, None, limit=9.0).is_fresh, "another model"


def test_an_engine_that_only_computes_otherwise_is_not_called_stale_and_has_the_limit_that_is_given() -> None:
    drawn = Drawn(400, 0)
    found = drawn.scratch.truth + 8 * ROUNDING * drawn.normal()
    reading = drawn.read(found)
    assert (reading.is_fresh, reading.is_stale) == (False, False), reading
    shifted = drawn.scratch.truth + 3 * ROUNDING
    assert drawn.read(shifted).is_fresh
    assert not drawn.read(shifted, limit=2 * ROUNDING).is_fresh


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 0.0])
def test_an_engine_that_answers_the_same_everywhere_is_refused(value: float) -> None:
    assert not Drawn(400, 0).read(torch.full((400,), value), limit=9.0).is_fresh


class LinearWeights(PolicyWeights):
    """Every parameter moves the log-probs its own way, by its noise times its `effect`, from token `begins` on, behind
    which rounding is `late` times as much. Of every pass the number of canaries is kept in `passes`, of perturbed ones
    the most that there were at once in `most_alive`."""

    def __init__(self, effects: dict[str, float], begins: dict[str, int] | None = None, late: float = 1.0):
        self.effects, self.begins, self.late = effects, begins or {}, late
        self.noise: dict[str, float] = {}
        self.passes: list[int] = []
        self.alive: weakref.WeakSet[LinearWeights] = weakref.WeakSet()
        self.most_alive = [0]

    @property
    def kinds(self) -> Any:
        return dict.fromkeys(self.effects, ((3,), torch.float32))

    @property
    def first_names(self) -> Any:
        return {name: name for name in self.effects}

    def whole(self) -> Any:
        return []

    def on_all_ranks(self, call: Any) -> Any:
        return call()

    def scores(self, canaries: Any, precision: str, dtype: torch.dtype | None = None) -> Scores:
        self.passes.append(len(canaries))
        number = sum(len(one.ids) - one.start for one in canaries)
        draws = torch.Generator().manual_seed(0)
        found = torch.zeros(number)
        for name, effect in self.effects.items():
            way = self.noise.get(name, 0.0) * effect * torch.randn(1000, generator=draws)[:number]
            way[: self.begins.get(name, 0)] = 0.0
            found += way
        rounding = torch.randn(1000, generator=draws)[:number] if dtype else torch.zeros(number)
        rounding[160:] *= self.late
        return Scores(found + ROUNDING * rounding, torch.zeros(number), torch.zeros(0, 5))

    def perturbed(self, scales: Any, seed: int) -> "LinearWeights":
        found = self._with(dict(scales))
        self.alive.add(found)
        self.most_alive[0] = max(self.most_alive[0], len(self.alive))
        return found

    def without_noise(self, name: str) -> "LinearWeights":
        return self._with({**self.noise, name: 0.0})

    def _with(self, noise: dict[str, float]) -> "LinearWeights":
        other = LinearWeights(self.effects, self.begins, self.late)
        other.noise, other.passes, other.alive, other.most_alive = noise, self.passes, self.alive, self.most_alive
        return other


EIGHT = [Canary([*range(60)], 20)] * 8
"""Of which 4 have 160 response tokens."""


def test_a_copy_in_which_all_is_seen_costs_a_pass_of_few_canaries_per_parameter() -> None:
    weights = LinearWeights(dict.fromkeys("abc", 1.0))
    scratch = scratch_copy(weights, EIGHT, torch.bfloat16, 0)
    assert weights.passes == [8] + [4] * 5 + [8] * 2, "start; truth, rounded, a, b, c; truth and rounded of all"
    assert len(scratch.truth) == len(scratch.start) == len(scratch.rounded) == 320
    assert {name: len(values) for name, values in scratch.stale.items()} == dict.fromkeys("abc", 160)


def test_the_whole_answer_is_read() -> None:
    scratch = scratch_copy(LinearWeights(dict.fromkeys("abc", 1.0)), EIGHT, torch.bfloat16, 0)

    def is_fresh(tail: torch.Tensor) -> bool:
        found = torch.cat([scratch.truth[:160], tail])
        return read_answer(Answer("engine 0", found, torch.zeros(320)), scratch, LIMIT).is_fresh

    assert is_fresh(scratch.truth[160:])
    assert not is_fresh(scratch.start[160:]), "what served the second half took nothing"
    assert not is_fresh(torch.full((160,), float("nan")))


def test_what_is_hidden_gets_more_noise_until_it_shows() -> None:
    weights = LinearWeights({"a": 1.0, "b": 0.02, "c": 1.0})
    scratch = scratch_copy(weights, EIGHT, torch.bfloat16, 0)
    assert weights.passes == [8] + [4] * 5 + [4] * 5 + [8] * 2
    assert all(scratch.seen(name) >= 1 for name in "abc")
    assert weights.most_alive == [1], "each keeps passes"


def test_what_shows_in_later_canaries_alone_is_proven_by_all_with_no_more_noise_than_that_takes() -> None:
    """Such as an expert that the first responses are not routed to."""
    weights = LinearWeights(dict.fromkeys("abc", 1.0), begins={"b": 160})
    scratch = scratch_copy(weights, EIGHT, torch.bfloat16, 0)
    assert sorted(scratch.stale) == ["a", "b", "c"]
    assert isinstance(scratch.weights, LinearWeights)
    assert scratch.weights.noise == dict.fromkeys("abc", 0.4)
    assert weights.passes == [8] + [4] * 5 + [4] * 3 + [8] * 5, "of the second try only what was hidden"


def test_what_no_noise_shows_is_warned_of_and_the_rest_is_proven(caplog: pytest.LogCaptureFixture) -> None:
    for late in (1.0, 5.0):  # where later tokens round more, what the first ones show is hidden in all of them
        weights = LinearWeights({"a": 1.0, "dead": 0.0, "c": 1.0}, late=late)
        scratch = scratch_copy(weights, EIGHT, torch.bfloat16, 0)
        assert sorted(scratch.stale) == ["a", "c"]
        assert len(scratch.stale["a"]) == 320
        assert weights.most_alive == [1]
        assert "no delivery can be proven of dead" in caplog.text
        caplog.clear()
    with pytest.raises(StaleWeights, match="depend on no weight"):
        scratch_copy(LinearWeights({"a": 0.0, "b": 0.0}), EIGHT, torch.bfloat16, 0)
