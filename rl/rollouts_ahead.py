"""What has come of batches that are not trained on yet, kept in checkpoints: a resume takes it and asks for the rest.

`rollouts_ahead.jsonl` has a line per group and one per completed state; their token ids and log-probs stand one behind
the other in `rollouts_ahead.safetensors`. A group is taken where its problem is asked again under the same name, with
the same prompt and sampling parameters, and none of its tokens is older than the run allows by then; none where the
task that cuts and grades is another one, or engines compute otherwise. Rewards are made anew. The branches of trees are
not kept.
"""

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from espalier.data.jsonl import iter_rows, write_records
from espalier.data.records import BadInput, Completion, Problem, Trajectory, parse_record
from espalier.rl.begun_completions import Begun, BegunCompletions
from espalier.rl.ledger import tokens_of
from espalier.rl.types import Rollout, RolloutGroup
from espalier.sampling.client import SamplingParams
from espalier.training.engine import BadCheckpoint

_ROWS, _TOKENS = "rollouts_ahead.jsonl", "rollouts_ahead.safetensors"
Key = tuple[str, str]  # (name of the request, problem)


@dataclass(frozen=True)
class Come:
    """Groups and completions of states, each behind its iteration and its key."""

    groups: list[tuple[int, Key, RolloutGroup]]
    completions: list[tuple[int, str, Begun]]

    @property
    def num_tokens(self) -> int:
        """Of all of them."""
        completions = sum(begun.num_tokens for *_, begun in self.completions)
        return tokens_of(group for *_, group in self.groups) + completions


@dataclass
class RolloutsAhead:
    """On rank 0, which draws. `max_staleness`: how many versions a token may be behind. `made_by`: the task and what
    engines compute in, as a text."""

    max_staleness: int
    made_by: str = ""
    num_uncounted: int = field(default=0, init=False)
    """Of the tokens that came with a checkpoint, those that stand in no metrics yet."""
    _come: dict[int, dict[Key, RolloutGroup]] = field(default_factory=dict, init=False)  # by iteration
    _kept: dict[int, dict[Key, RolloutGroup]] = field(default_factory=dict, init=False)  # from a checkpoint
    _of_params: SamplingParams | None = field(default=None, init=False)  # those of `_kept`

    def add(self, iteration: int, name: str, group: RolloutGroup) -> None:
        """Remember a group that has been drawn for this iteration (from 0)."""
        self._come.setdefault(iteration, {})[name, group.problem.id] = group

    def take(
        self, iteration: int, name: str, problem: Problem, prompt_ids: Sequence[int], params: SamplingParams
    ) -> RolloutGroup | None:
        """Return what the checkpoint has for this request, each once; None: it has to be asked."""
        kept = self._kept.get(iteration, {})
        group = kept.get((name, problem.id))
        if group is None or self._of_params != params:
            return None
        for rollout in group.rollouts:
            if rollout.trajectory.prompt_ids != list(prompt_ids) or rollout.trajectory.gold != problem.gold:
                return None
            if iteration - rollout.policy_version > self.max_staleness:
                return None
        del kept[name, problem.id]
        return RolloutGroup(problem, group.rollouts, [])

    def has(self, iteration: int) -> bool:
        """Say whether the checkpoint has anything for this iteration that nobody took yet."""
        return bool(self._kept.get(iteration))

    def leave(self, iteration: int) -> int:
        """Forget what the checkpoint has for this iteration and nobody took; return its tokens."""
        return tokens_of(self._kept.pop(iteration, {}).values())

    def forget_before(self, iteration: int) -> None:
        """Forget what came for earlier iterations: they are trained on."""
        for number in [number for number in self._come if number < iteration]:
            del self._come[number]

    @property
    def num_tokens(self) -> dict[int, int]:
        """The tokens of the groups that came with a checkpoint, by iteration."""
        return {iteration: tokens_of(groups.values()) for iteration, groups in self._kept.items()}

    def look(self, first: int, params: SamplingParams, begun: BegunCompletions) -> Come:
        """Return what has come for the iterations from `first` on, and what a checkpoint has that may still be taken;
        in the thread that draws."""
        both = [self._come, self._kept] if self._of_params == params else [self._come]
        found = [(number, row) for groups in both for number, rows in groups.items() for row in rows.items()]
        return Come([(number, *row) for number, row in found if number >= first], begun.come_from(first))

    def save(self, folder: Path, come: Come, params: SamplingParams, num_uncounted: int = 0) -> None:
        """Write it; nothing where no group has come. `num_uncounted`: of its tokens, those that stand in no metrics."""
        if not come.groups:
            return
        tokens = _Tokens()
        rows: list[dict[str, Any]] = [{"params": asdict(params), "max_staleness": self.max_staleness,
                                       "made_by": self.made_by, "num_uncounted": num_uncounted}]  # fmt: skip
        rows += [_group_row(*row, tokens) for row in come.groups]
        rows += [_completions_row(*row, tokens) for row in come.completions]
        write_records(folder / _ROWS, rows)
        tokens.save(folder / _TOKENS)

    def load(self, folder: Path, begun: BegunCompletions) -> None:
        """What `save` wrote, nothing where it wrote nothing. Raises BadCheckpoint where it cannot be read."""
        self._kept = {}
        if not (folder / _ROWS).is_file():
            return
        try:
            tokens = _Tokens.load(folder / _TOKENS)
            rows = (row for _, row in iter_rows(folder / _ROWS))
            first = next(rows)
            self.num_uncounted = int(first["num_uncounted"])
            self._of_params = SamplingParams(**first["params"]) if first["made_by"] == self.made_by else None
            for row in rows:
                if "name" in row:
                    key = row["name"], row["problem_id"]
                    self._kept.setdefault(row["iteration"], {})[key] = _group_of(row, tokens, str(folder / _ROWS))
                # else they may be older than is allowed now
                elif first["max_staleness"] <= self.max_staleness and first["made_by"] == self.made_by:
                    params = SamplingParams(**row["params"])
                    found = list(_completions_of(row, tokens, str(folder / _ROWS)))
                    begun.keep(row["iteration"], row["state_id"], row["state_key"], params, found)
        except (BadInput, KeyError, TypeError, ValueError, StopIteration, OSError, SafetensorError) as error:
            raise BadCheckpoint(f"{folder}/{_ROWS} cannot be read ({error}): remove the folder") from None


@dataclass
class _Tokens:
    """Token ids and log-probs of rollouts (completions have ids alone), written and read one behind the other."""

    ids: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: "array[float]" = field(default_factory=lambda: array("d"))
    _num_read: Counter[str] = field(default_factory=Counter)

    def save(self, path: Path) -> None:
        ids: Any = np.asarray(self.ids, np.int32)
        save_file({"ids": ids, "logprobs": np.asarray(self.logprobs, np.float64)}, path)

    @classmethod
    def load(cls, path: Path) -> "_Tokens":
        found = load_file(path)
        return cls(array("i", found["ids"].tobytes()), array("d", found["logprobs"].tobytes()))

    def next_ids(self, number: int) -> list[int]:
        return self._next("ids", self.ids, number).tolist()

    def next_logprobs(self, number: int) -> "array[float]":
        return self._next("logprobs", self.logprobs, number)

    def _next(self, name: str, numbers: Any, number: int) -> Any:
        first = self._num_read[name]
        self._num_read[name] += number
        if len(found := numbers[first : first + number]) < number:
            raise ValueError(f"{_TOKENS} has too few {name}")
        return found


def _row_of(record: Trajectory | Completion, tokens: _Tokens) -> dict[str, Any]:
    """Return the record's fields without its tokens."""
    tokens.ids.extend(record.response_ids)
    return {**vars(record), "response_ids": len(record.response_ids)}


def _group_row(iteration: int, key: Key, group: RolloutGroup, tokens: _Tokens) -> dict[str, Any]:
    rollouts = []
    for rollout in group.rollouts:
        tokens.logprobs.extend(rollout.logprobs)
        versions = {"policy_version": rollout.policy_version, "version_starts": rollout.version_starts}
        rollouts.append({"trajectory": _row_of(rollout.trajectory, tokens), **versions})
    return {"iteration": iteration, "name": key[0], "problem_id": key[1], "rollouts": rollouts}


def _group_of(row: dict[str, Any], tokens: _Tokens, place: str) -> RolloutGroup:
    rollouts = []
    for found in row["rollouts"]:
        number = found["trajectory"]["response_ids"]
        fields = {**found["trajectory"], "response_ids": tokens.next_ids(number)}
        starts = tuple((int(first), int(version)) for first, version in found["version_starts"])
        trajectory = parse_record(Trajectory, fields, place)
        rollouts.append(
            Rollout(trajectory, tokens.next_logprobs(number), int(found["policy_version"]), version_starts=starts)
        )
    return RolloutGroup(Problem(row["problem_id"], "", ""), rollouts, [])


def _completions_row(iteration: int, state_id: str, begun: Begun, tokens: _Tokens) -> dict[str, Any]:
    completions = [_row_of(completion, tokens) for completion in begun.found]
    asked = {"state_id": state_id, "state_key": begun.key, "params": asdict(begun.params)}
    return {"iteration": iteration, **asked, "completions": completions}


def _completions_of(row: dict[str, Any], tokens: _Tokens, place: str) -> Iterator[Completion]:
    for found in row["completions"]:
        yield parse_record(Completion, {**found, "response_ids": tokens.next_ids(found["response_ids"])}, place)
