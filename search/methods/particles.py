"""Particle filtering over steps (Puri et al. 2025, arXiv 2502.01618), and its entropic form (Giannone et al. 2025,
arXiv 2510.05825).

N particles each take a step, are weighted, and are drawn anew in proportion to their weights (systematic resampling).
`weights` "odds": r / (1 - r) of the state's score r, to the power 1 / temperature, at every step, as published.
"increments": r now over r before (1 at the prompt): the particles then follow the policy's solutions x in proportion to
p(x) r(x), and the product of the mean weights is an unbiased estimate of the sum of p(x) r(x), which the prompt's value
records (with another temperature than 1 it is one of r(x)^(1 / temperature), and is not recorded).

Entropic: where the entropy of the weights, as a share of log N, falls below a floor, they are resampled by w^b with the
largest b in [0, 1] that keeps it; the floor falls from `entropy_floor` to 0 within `floor_steps` steps. What was not
resampled by, w^(1 - b), stays with the particle as its weight, so that nothing becomes biased.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from espalier.data.records import BadInput
from espalier.search.asks import Growth, check_sizes, draw_each, rate
from espalier.search.choices import check_choice, choose_solution, share_of
from espalier.search.tree import Node, Tree

_SMALLEST = 1e-6
_LOWEST = -600.0  # nats below the largest weight: those of lower ones stay numbers whatever they are divided by


def entropy_share(weights: Sequence[float]) -> float:
    """Return the entropy of weights over that of equal ones, in [0, 1]."""
    total = math.fsum(weights)
    shares = [weight / total for weight in weights if weight > 0]
    return -math.fsum(share * math.log(share) for share in shares) / math.log(len(weights)) if len(weights) > 1 else 1.0


def power_for(weights: Sequence[float], floor: float) -> float:
    """Return the largest power in [0, 1] of the weights whose entropy share is at least `floor`, by bisection."""
    if entropy_share(weights) >= floor:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if entropy_share([w**middle for w in weights]) >= floor else (low, middle)
    return low


def resample(weights: Sequence[float], start: float) -> list[int]:
    """Return N places, place i on average N w_i / sum w times; `start` is uniform in [0, 1)."""
    total, edge, place = math.fsum(weights), 0.0, -1
    places: list[int] = []
    for k in range(len(weights)):
        while edge <= (k + start) / len(weights) * total and place < len(weights) - 1:
            place += 1
            edge += weights[place]
        places.append(place)
    return places


@dataclass(frozen=True)
class Particles:
    """`number` particles, resampled with random numbers of `seed` and the problem; see the module. Raises BadInput."""

    number: int = 16
    weights: str = "odds"
    temperature: float = 1.0
    entropy_floor: float = 0.0
    floor_steps: int = 8
    choice: str = "best"
    seed: int = 0

    def __post_init__(self) -> None:
        check_sizes(number=self.number, floor_steps=self.floor_steps)
        check_choice(self.choice)
        if self.weights not in ("odds", "increments") or self.temperature <= 0 or not 0 <= self.entropy_floor <= 1:
            raise BadInput("search.method: weights must be odds or increments, temperature above 0, entropy_floor in "
                           f"[0, 1]; got {self.weights}, {self.temperature:g}, {self.entropy_floor:g}")  # fmt: skip

    def grow(self, tree: Tree) -> Growth[None]:
        """Move, weigh and resample until every particle is finished."""
        rng = random.Random(f"{self.seed}/{tree.problem.id}")
        particles, carried = [tree.root] * self.number, [1.0] * self.number
        log_scale, step = 0.0, 0
        while not all(node.is_finished for node in particles):
            moved = [nodes[0] for nodes in (yield from draw_each(particles, 1))]
            yield from rate(list(dict.fromkeys(moved)))
            logs = [math.log(w) + self._gain(*pair) for w, *pair in zip(carried, particles, moved, strict=True)]
            new = [math.exp(max(weight - max(logs), _LOWEST)) for weight in logs]
            power = power_for(new, self.entropy_floor * max(0.0, 1 - step / self.floor_steps))
            bent = [weight**power for weight in new]
            places = resample(bent, rng.random())
            particles = [moved[place] for place in places]
            carried = [new[place] / bent[place] * math.fsum(bent) / self.number for place in places]
            scale = math.fsum(carried) / self.number
            carried, step = [weight / scale for weight in carried], step + 1
            log_scale += math.log(scale) + max(logs)
            for node in particles:
                node.visits += 1
        if self.weights == "increments" and self.temperature == 1:  # else of the scores to the power 1 / temperature
            tree.root.value = math.exp(log_scale)

    def _gain(self, old: Node, new: Node) -> float:
        rank = min(max(share_of(new), _SMALLEST), 1 - _SMALLEST)
        if self.weights == "odds":
            return math.log(rank / (1 - rank)) / self.temperature
        before = 1.0 if old.parent is None else min(max(share_of(old), _SMALLEST), 1 - _SMALLEST)
        return math.log(rank / before) / self.temperature

    def choose(self, tree: Tree) -> Node:
        """Return the chosen solution."""
        return choose_solution(tree, self.choice)
