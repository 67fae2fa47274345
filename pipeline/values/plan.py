"""Config → JSON: what process rewards will cost, before any request; afterwards, that estimate against the cost.

    python run_stage.py -cn values/plan task=word_arithmetic stage.policy=MODEL output=plan.json
    python run_stage.py -cn values/plan ... stage.pilot=trajectories.jsonl stage.measured=[trajectories.meta.json]
    python run_stage.py -cn values/plan ... stage.actual=[trajectories.meta.json,completions.meta.json] output=paid.json

Prompt lengths are those of the problems themselves, with the policy's own tokenizer. Lengths of solutions, their
steps, and how many states several of them share come from a `pilot` (some trajectories of the policy, which is best)
or else from the task's demonstrations. Where a problem of the pilot has fewer solutions than the plan, how many more
states the rest would reach is computed from how many were reached once and twice (Chao et al. 2014, eq. 9). Seconds
are tokens over measured rates, of solutions and of completions apart where both were measured, and a server's start
for each. Nothing is asked of any server.
"""

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, linear_regression
from typing import Any

from espalier.data.jsonl import read_records
from espalier.data.prefix_tree import least_prompt_tokens
from espalier.data.prompts import encode_prompt
from espalier.data.records import BadInput, Demonstration, Problem, State, Trajectory
from espalier.data.steps import Decoder
from espalier.data.token_text import encode_response, read_tokens, steps_on_tokens
from espalier.models.load import load_tokenizer
from espalier.pipeline.stage import StageContext
from espalier.pipeline.values.measured_runs import START_SECONDS, read_cost, read_run
from espalier.values.monte_carlo import StateKey, state_key
from espalier.values.state_sampling import StateSampler

log = logging.getLogger("stage")

METHODS = ("plain", "first_error")
_STATE_BYTES = 0.7  # a state, or a completion, against a trajectory
_ROW_BYTES = 320  # names of fields, ids, punctuation of one row
_ID_BYTES = 5.2  # a token id and its comma


@dataclass(frozen=True)
class _Cost:
    """What one problem of the pilot costs, as if it had `num_samples` trajectories; bytes are those of a row each."""

    prompt_length: int
    response_tokens: float
    response_bytes: float
    states: float
    prompt_tokens: float
    least_prompt_tokens: float
    generated_tokens: float  # of one completion of each state


@dataclass(frozen=True)
class Plan:
    """The plan of sampling `num_samples` solutions for problems `first` .. `first + num_problems - 1` (0: all) of a
    split and completing their states, `mean_completions` a state.

    `method` "plain" completes every state that the sampler's options keep, "first_error" those of a bisection over
    wrong trajectories. `tokens_per_second` 0 takes the rates of the `measured` sampling runs (their meta.json), and
    `start_seconds` 0 the mean start of their servers. Of a pilot that holds more problems than `max_pilot_problems`
    some are taken that lie evenly apart in the file: those that finished first are the short ones.
    Raises BadInput where nothing tells the length of a solution or the rate.
    """

    policy: str
    split: str = "train"
    first: int = 0
    num_problems: int = 0
    num_samples: int = 8
    mean_completions: float = 4.0
    method: str = "plain"
    first_step: int = 1
    start_ratio: float = 0.0
    end_ratio: float = 1.0
    keep_ratio: float = 1.0
    block_size: int = 16
    pilot: str = ""
    max_pilot_problems: int = 300
    tokens_per_second: float = 0.0
    prompt_tokens_per_second: float = 0.0
    start_seconds: float = 0.0
    measured: list[str] = field(default_factory=list)
    actual: list[str] = field(default_factory=list)

    def inputs(self) -> list[str]:
        """Return the pilot, and the provenance of measured and of finished runs."""
        return [*([self.pilot] if self.pilot else []), *self.measured, *self.actual]

    def run(self, input_path: str, context: StageContext) -> dict[str, Any]:
        """Return `{"stages": [...], "total": {...}, "basis": {...}}`, with `actual` and `error` where runs are given.

        Raises BadInput where there is no task, no such method, or no problem from `first` on.
        """
        if context.task is None:
            raise BadInput("values/plan needs a task: add task=NAME")
        if self.method not in METHODS:
            raise BadInput(f"there is no method '{self.method}': choose from {', '.join(METHODS)}")
        sample_rate, complete_rate, start = self._rates()
        tokenizer = load_tokenizer(self.policy)
        problems = context.task.problems(self.split)[self.first :]
        problems = problems[: self.num_problems] if self.num_problems else problems
        if not problems:
            raise BadInput(f"{context.task.name}/{self.split} has no problem from {self.first} on")
        pilot = self._pilot(context.task, tokenizer, problems)
        prompts = [encode_prompt(context.task, tokenizer, problem).ids for problem in problems]
        growth = self._growth(pilot)
        costs = [self._cost(rows, growth) for rows in pilot]
        lengths = [len(ids) for ids in prompts]
        mean = {name: _mean_for(costs, name, fmean(lengths)) for name in vars(costs[0])}
        scale, rows = len(problems), len(problems) * self.num_samples
        states = scale * mean["states"]
        stages = [
            self._stage("sample", sample_rate, start, requests=scale, rows=rows, prompt=sum(lengths),
                        least=least_prompt_tokens(prompts, self.num_samples, self.block_size),
                        generated=rows * mean["response_tokens"], size=rows * mean["response_bytes"]),
            self._stage("complete", complete_rate, start, requests=states, rows=states * self.mean_completions,
                        prompt=scale * mean["prompt_tokens"], least=scale * mean["least_prompt_tokens"],
                        generated=scale * mean["generated_tokens"] * self.mean_completions,
                        size=states * _STATE_BYTES * mean["response_bytes"] * (1 + self.mean_completions)),
        ]  # fmt: skip
        names = [name for name in stages[0] if name != "stage"]
        total = {name: sum(stage[name] for stage in stages) for name in names}
        basis = {"problems": scale, "pilot": self.pilot or "demonstrations", "pilot_problems": len(pilot),
                 "mean_response_tokens": round(mean["response_tokens"], 2),
                 "states_per_problem": round(mean["states"], 2),
                 "tokens_per_second": [round(sample_rate, 1), round(complete_rate, 1)],
                 "start_seconds": round(start, 1)}  # fmt: skip
        for stage in [*stages, {"stage": "total", **total}]:
            log.info("%s: %s", stage["stage"], ", ".join(f"{name} {stage[name]:,}" for name in names))
        context.counts.update(total)
        result = {"stages": stages, "total": total, "basis": basis}
        return result | ({"actual": self._actual(stages)} if self.actual else {})

    def _stage(
        self, name: str, rate: float, start: float, *, requests: float, rows: float, prompt: float, least: float,
        generated: float, size: float,
    ) -> dict[str, Any]:  # fmt: skip
        seconds = start + generated / rate
        if self.prompt_tokens_per_second:
            seconds += least / self.prompt_tokens_per_second
        return {"stage": name, "requests": round(requests), "rows": round(rows), "prompt_tokens": round(prompt),
                "least_prompt_tokens": round(least), "generated_tokens": round(generated), "seconds": round(seconds),
                "bytes": round(size)}  # fmt: skip

    def _rates(self) -> tuple[float, float, float]:
        """Return generated tokens per second of solutions and of completions, and the seconds of a server's start."""
        runs = [read_run(path, self.start_seconds) for path in self.measured]
        starts = [run.start_seconds for run in runs]
        start = self.start_seconds or (fmean(starts) if starts else START_SECONDS)
        if self.tokens_per_second > 0:
            return self.tokens_per_second, self.tokens_per_second, start
        if not runs:
            raise BadInput("no rate to compute seconds with: set stage.tokens_per_second, or stage.measured to the "
                           "meta.json files of earlier sampling runs")  # fmt: skip
        rates = []
        for is_completing in (False, True):
            kind = [run for run in runs if run.is_completing == is_completing] or runs
            tokens, seconds = sum(run.tokens for run in kind), sum(run.seconds for run in kind)
            if tokens <= 0 or seconds <= 0:
                raise BadInput(f"{self.measured[0]}: nothing was generated in these runs: measure another")
            rates.append(tokens / seconds)
        return rates[0], rates[1], start

    def _pilot(self, task: Any, tokenizer: Any, problems: Sequence[Problem]) -> list[list[Trajectory]]:
        """Return trajectories to count on: of every problem of the pilot, at most `num_samples`."""
        rows = (
            read_records(Trajectory, self.pilot) if self.pilot else self._from_demonstrations(task, tokenizer, problems)
        )
        groups: dict[str, list[Trajectory]] = {}
        for row in rows:
            if row.steps and len(row.step_ends) == len(row.steps):
                groups.setdefault(row.problem_id, []).append(row)
        every = [group[: self.num_samples] for group in groups.values()]
        step = max(1.0, len(every) / self.max_pilot_problems)
        pilot = [every[int(place * step)] for place in range(min(len(every), self.max_pilot_problems))]
        if not pilot:
            raise BadInput("nothing tells how long a solution is: give stage.pilot, some trajectories of the policy "
                           "with token ids")  # fmt: skip
        if self.num_samples > 1 and max(map(len, pilot)) == 1:
            log.warning("the pilot holds one solution per problem: states are counted as if no two shared any, and "
                        "a policy that repeats itself costs less: give stage.pilot some of its rows")  # fmt: skip
        return pilot

    def _from_demonstrations(self, task: Any, tokenizer: Any, problems: Sequence[Problem]) -> list[Trajectory]:
        """Return demonstrations of the same split as trajectories, all right."""
        decode, trajectories = Decoder(tokenizer), []
        groups: dict[str, list[Demonstration]] = {}
        for row in task.demonstrations(self.split):
            groups.setdefault(row.prompt, []).append(row)
        step = max(1.0, len(groups) / self.max_pilot_problems)
        chosen = [list(groups.values())[int(k * step)] for k in range(min(len(groups), self.max_pilot_problems))]
        for row in (row for group in chosen for row in group[: self.num_samples]):
            prompt = tokenizer(row.prompt, add_special_tokens=False).input_ids
            ids = [*encode_response(tokenizer, prompt, row.completion)[0], tokenizer.eos_token_id]
            tokens = read_tokens(prompt, ids, decode)
            steps, ends = steps_on_tokens(task.split_steps(tokens.text), tokens)
            trajectories.append(
                Trajectory(
                    row.id, row.prompt, row.prompt, tokens.text, steps, prompt, ids, ends, "stop", "", None, True
                )
            )
        return trajectories

    def _states(self, row: Trajectory) -> list[State]:
        """Return the states of a trajectory that are completed."""
        states = StateSampler(self.first_step, self.start_ratio, self.end_ratio, self.keep_ratio).states(row)
        if self.method == "first_error":
            return [] if row.is_correct else _spread(states)
        return states

    def _growth(self, pilot: Sequence[Sequence[Trajectory]]) -> dict[int, float]:
        """Of n trajectories per problem to `num_samples`: by how much the number of distinct states grows."""
        growth = {}
        for size in {len(rows) for rows in pilot if len(rows) < self.num_samples}:
            visits = Counter[int]()
            for rows in pilot:
                if len(rows) == size:
                    keys = Counter(state_key(s.problem_id, s.prefix_ids) for row in rows for s in self._states(row))
                    visits.update(keys.values())
            growth[size] = state_growth(visits, size, self.num_samples)
        return growth

    def _cost(self, rows: Sequence[Trajectory], growth: dict[int, float]) -> _Cost:
        """Return one problem; fewer trajectories than planned are scaled up."""
        rests: dict[StateKey, list[int]] = {}
        prompts: dict[StateKey, list[int]] = {}
        for row in rows:
            for state in self._states(row):
                key = state_key(state.problem_id, state.prefix_ids)
                rests.setdefault(key, []).append(len(row.response_ids) - len(state.prefix_ids))
                prompts[key] = state.prompt_ids + state.prefix_ids
        scale = growth.get(len(rows), 1.0)
        least = least_prompt_tokens(list(prompts.values()), max(1, round(self.mean_completions)), self.block_size)
        return _Cost(
            prompt_length=len(rows[0].prompt_ids),
            response_tokens=fmean(len(row.response_ids) for row in rows),
            response_bytes=fmean(map(_row_bytes, rows)),
            states=scale * len(rests),
            prompt_tokens=scale * sum(map(len, prompts.values())),
            least_prompt_tokens=scale * least,
            generated_tokens=scale * sum(map(fmean, rests.values())),
        )

    def _actual(self, stages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """List for every finished run, in the order of the stages, what it cost, and estimate / cost - 1."""
        if len(self.actual) > len(stages):
            raise BadInput(
                f"there are {len(stages)} stages and {len(self.actual)} finished runs: name one a stage, in order"
            )
        paid_stages = []
        for path, stage in zip(self.actual, stages, strict=False):
            counts, seconds = read_cost(path)
            paid = {**counts, "seconds": seconds}
            error = {name: round(stage[name] / value - 1, 4) if value else None for name, value in paid.items()}
            paid_stages.append({"stage": stage["stage"], "file": path, "paid": paid, "error": error})
            log.info(
                "%s: %s", stage["stage"], ", ".join(f"{name} {100 * (one or 0):+.1f} %" for name, one in error.items())
            )
        return paid_stages


def state_growth(visits: Mapping[int, int], size: int, wanted: int) -> float:
    """By how much distinct states grow from `size` trajectories per problem to `wanted`.

    `visits[v]` is the number of states that v of the `size` trajectories passed through. With F1 and F2 states passed
    once and twice F0 = (n - 1) / n * F1^2 / (2 F2) were not seen yet, and of these the next m trajectories reach the
    share 1 - (1 - F1 / (n F0 + F1))^m (Chao et al. 2014, eq. 9). One trajectory shows no sharing: growth is linear.
    """
    seen = sum(visits.values())
    once, twice = visits.get(1, 0), visits.get(2, 0)
    if not seen or size >= wanted:
        return 1.0
    if size == 1:
        return wanted / size
    unseen = (size - 1) / size * (once * once / (2 * twice) if twice else once * (once - 1) / 2)
    if not unseen:
        return 1.0
    reached = unseen * (1 - (1 - once / (size * unseen + once)) ** (wanted - size))
    return min(wanted / size, 1 + reached / seen)


def _mean_for(costs: Sequence[_Cost], name: str, length: float) -> float:
    """Return the mean of a cost, moved to problems whose prompts are `length` tokens long on average: longer problems
    have longer solutions, and a pilot's problems are not quite the plan's (regression estimator; at most by half)."""
    values = [float(getattr(cost, name)) for cost in costs]
    lengths = [float(cost.prompt_length) for cost in costs]
    mean = fmean(values)
    if len(costs) < 20 or len(set(lengths)) == 1:
        return mean
    moved = mean + linear_regression(lengths, values).slope * (length - fmean(lengths))
    return min(1.5 * mean, max(0.5 * mean, moved))


def _spread(states: Sequence[State]) -> list[State]:
    """As many states as a bisection over all of them asks, evenly spread: which ones, nobody knows before."""
    number = math.ceil(math.log2(len(states) + 1)) if states else 0
    return [states[(2 * place + 1) * len(states) // (2 * number)] for place in range(number)]


def _row_bytes(row: Trajectory) -> float:
    """About the size of the row on disk: prompt, response twice (steps), ids."""
    text = len(row.prompt.encode()) + 2 * len(row.response.encode())
    return _ROW_BYTES + text + _ID_BYTES * (len(row.prompt_ids) + len(row.response_ids))
