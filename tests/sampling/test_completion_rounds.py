"""Completions in rounds: what is asked, when it stops, and that a run stopped anywhere ends as an undisturbed one.

The sampler is a function of the request's id: the samples of a state are one stream, whatever the rounds.
"""

import asyncio
import hashlib
import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from espalier.data.jsonl import read_records, write_records
from espalier.data.records import BadInput, Completion, State, Trajectory
from espalier.sampling.adaptive_completions import AdaptiveCompletions
from espalier.sampling.client import NotAnswered, Refused, Sample, SampleRequest, SamplingParams, ServerGone
from espalier.sampling.first_error_completions import FirstErrorCompletions
from espalier.sampling.requests import CompletionRequests
from espalier.sampling.rounds import Rounds, RoundSource, run_rounds
from espalier.sampling.runner import Runner, Tally, finished_requests
from espalier.values.labels import LabelRule
from espalier.values.monte_carlo import distinct_states

N = 3


@dataclass
class Grade:
    answer: str
    is_correct: bool


class Task:
    """Right is what says so."""

    def grade(self, gold: str, text: str, num_options: int) -> Grade:
        return Grade(text[-5:], text.endswith("right"))


@dataclass
class Policy:
    """Answers a state `p/0#v` right with probability v / 10; refuses `refused`; dies after `lives` answers."""

    values: dict[str, float]
    refused: tuple[str, ...] = ()
    lives: int = 10**9
    asked: list[str] = field(default_factory=list)
    num_opened: int = 0

    async def open(self) -> None:
        self.num_opened += 1

    async def close(self) -> None:
        self.num_opened -= 1

    async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
        assert self.num_opened == 1
        if len(self.asked) >= self.lives:
            raise ServerGone("gone")
        self.asked.append(request.id)
        state, _, number = request.id.partition("@")
        if state in self.refused:
            raise Refused("too long")
        places = [int(number or 0) * params.n + k for k in range(params.n)]
        return [Sample("right" if draw(state, place) < self.values[state] else "wrong", [], "stop") for place in places]


def draw(state: str, place: int) -> float:
    return int.from_bytes(hashlib.sha256(f"{state}/{place}".encode()).digest()[:8], "big") / 2**64


def ask(source: Any, policy: Policy, output: Path, num_samples: int = N) -> Tally:
    """What a sampling job does."""
    task: Any = Task()
    rounds = Rounds(source, output, num_samples)
    requests = rounds.begin(source.load(task, None))
    finished = finished_requests(output, requests, num_samples)
    requests = rounds.go_on(requests, finished)
    params = SamplingParams(n=num_samples, temperature=1.0, max_tokens=5)
    runner = Runner(policy, params, lambda request, samples: source.records(task, None, request, samples), output,
                    concurrency=1, stall_seconds=5.0, on_progress=lambda done, fields: None)  # fmt: skip
    return asyncio.run(run_rounds(runner, rounds, requests, finished))


def make_states(path: Path, values: list[float]) -> dict[str, float]:
    rows = [State(f"p{k}/0#1", f"p{k}", f"p{k}/0", 1, "Q", "a", [9], [k + 1], "right") for k in range(len(values))]
    write_records(path, rows)
    return {row.id: value for row, value in zip(rows, values, strict=True)}


def counts_of(output: Path) -> dict[str, list[bool]]:
    found: dict[str, list[bool]] = {}
    for row in read_records(Completion, output):
        found.setdefault(row.state_id, []).append(row.is_correct)
    return found


MIXED = [0.0, 1.0, 0.5, 0.9, 0.1, 0.5, 0.0, 1.0]


def adaptive(folder: Path, values: list[float] = MIXED, **settings: Any) -> tuple[AdaptiveCompletions, Policy, Path]:
    known = make_states(folder / "s.jsonl", values)
    return AdaptiveCompletions(str(folder / "s.jsonl"), **settings), Policy(known), folder / "c.jsonl"


def test_a_source_of_rounds_is_told_from_one_of_plain_requests(tmp_path: Path) -> None:
    assert isinstance(adaptive(tmp_path)[0], RoundSource)
    assert not isinstance(CompletionRequests("s.jsonl"), RoundSource)


def test_clear_states_are_asked_less_than_unclear_ones(tmp_path: Path) -> None:
    """Widths of Wilson's interval: 3 of 3 0.56, 6 of 6 0.39, 9 of 9 0.30; of 12 even at 6 0.49."""
    source, policy, output = adaptive(tmp_path, max_completions=12, max_width=0.4)
    tally = ask(source, policy, output)
    sizes = [len(rights) for rights in counts_of(output).values()]
    assert sizes[:3] == [6, 6, 12]
    assert sizes[6:] == [6, 6]
    assert (tally.done, policy.num_opened) == (sum(sizes) // N, 0)
    ids = [row.id for row in read_records(Completion, output) if row.state_id == "p2/0#1"]
    assert ids == [f"p2/0#1{r}/{k}" for r in ("", "@1", "@2", "@3") for k in range(N)]


@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_settled_hard_labels_are_those_of_plain_k_for_less(threshold: float, tmp_path: Path) -> None:
    values = [number / 40 for number in range(41)]
    settings = {"label": "hard", "threshold": threshold, "max_completions": 12, "max_width": 0.0}
    source, policy, output = adaptive(tmp_path, values, **settings)
    ask(source, policy, output)
    rule, asked = LabelRule("hard", threshold), 0
    for state, rights in counts_of(output).items():
        plain = sum(draw(state, place) < policy.values[state] for place in range(12)) / 12
        assert rule.label(sum(rights) / len(rights)) == rule.label(plain)
        asked += len(rights)
    assert asked < 0.8 * 12 * len(values)


def test_a_bound_on_completions_is_kept_and_spent_on_what_is_unclear(tmp_path: Path) -> None:
    values = [0.0, 0.5] * 20
    source, policy, output = adaptive(tmp_path, values, max_width=0.0, max_completions=30, mean_completions=7.5)
    ask(source, policy, output)
    sizes = [len(rights) for rights in counts_of(output).values()]
    assert sum(sizes) == 300
    assert sum(sizes[1::2]) > 1.2 * sum(sizes[::2])


def test_the_smoothed_estimator_knows_the_neighbours(tmp_path: Path) -> None:
    """Between two states that are always right a third needs hardly asking."""
    steps = ["a", "b", "c", "d"]
    rows = [Trajectory(f"p/{k}", "p", "Q", "abcd", steps, [9], [1, 2, 3, 4 + k], [1, 2, 3, 4], "stop", "7", "7", True)
            for k in range(6)]  # fmt: skip
    states = distinct_states(rows)
    write_records(tmp_path / "t.jsonl", rows)
    write_records(tmp_path / "s.jsonl", states)
    sizes = {}
    for estimator in ("counted", "smoothed"):
        source = AdaptiveCompletions(str(tmp_path / "s.jsonl"), trajectories=str(tmp_path / "t.jsonl"), max_width=0.35,
                                     estimator=estimator)  # fmt: skip
        output = tmp_path / f"{estimator}.jsonl"
        ask(source, Policy({state.id: 1.0 for state in states}), output)
        sizes[estimator] = len(read_records(Completion, output))
    assert sizes["counted"] == 27
    assert sizes["smoothed"] < 27


@pytest.mark.parametrize("lives", range(1, 26))
def test_a_run_that_dies_anywhere_ends_as_an_undisturbed_one(lives: int, tmp_path: Path) -> None:
    source, policy, output = adaptive(tmp_path, max_completions=12, max_width=0.4)
    ask(source, policy, output)
    want, journal = output.read_text(), (tmp_path / "c.rounds.jsonl").read_text()
    (tmp_path / "again").mkdir()
    num_total = len(policy.asked)
    source, policy, output = adaptive(tmp_path / "again", max_completions=12, max_width=0.4)
    policy.lives = min(lives, num_total - 1)
    with pytest.raises(ServerGone):
        ask(source, policy, output)
    with output.open("ab") as file:
        file.write(b'{"id":"torn')
    source, other, output = adaptive(tmp_path / "again", max_completions=12, max_width=0.4)
    ask(source, other, output)
    assert len(policy.asked) + len(other.asked) == num_total
    assert (output.read_text(), (tmp_path / "again" / "c.rounds.jsonl").read_text()) == (want, journal)
    source, nobody, output = adaptive(tmp_path / "again", max_completions=12, max_width=0.4)
    assert (ask(source, nobody, output).done, nobody.asked) == (0, [])


def test_a_journal_torn_at_the_end_is_mended(tmp_path: Path) -> None:
    source, policy, output = adaptive(tmp_path, max_completions=12, max_width=0.4)
    ask(source, policy, output)
    want, path = output.read_text(), tmp_path / "c.rounds.jsonl"
    path.write_bytes(path.read_bytes() + b'{"round":4,"requ')
    source, other, output = adaptive(tmp_path, max_completions=12, max_width=0.4)
    ask(source, other, output)
    assert (output.read_text(), other.asked) == (want, [])


def test_a_refused_state_is_asked_once_a_run_and_its_rows_join_later(tmp_path: Path) -> None:
    source, policy, output = adaptive(tmp_path, max_completions=6, max_width=0.0)
    policy.refused = ("p2/0#1",)
    tally = ask(source, policy, output)
    assert [key for key, _ in tally.failed] == ["p2/0#1"]
    assert policy.asked.count("p2/0#1") == 1
    assert all(len(rights) == 6 for rights in counts_of(output).values())
    source, policy, output = adaptive(tmp_path, max_completions=6, max_width=0.0)
    ask(source, policy, output)
    assert policy.asked == ["p2/0#1", "p2/0#1@2"]
    assert {state: len(rights) for state, rights in counts_of(output).items()} == dict.fromkeys(policy.values, 6)


@pytest.mark.parametrize(
    "line",
    ['{"round":0,"requests":["q/0#1"]}', '{"round":0}', '{"round":0,"requests":[7]}', '{"round":0,"requests":7}'],
)
def test_a_journal_of_another_run_is_refused(line: str, tmp_path: Path) -> None:
    source, policy, output = adaptive(tmp_path)
    output.write_text("")
    (tmp_path / "c.rounds.jsonl").write_text(line + "\n")
    with pytest.raises(BadInput, match=r"c.rounds.jsonl:1: these requests are not of this run"):
        ask(source, policy, output)


def test_a_journal_left_without_its_output_is_begun_anew(tmp_path: Path) -> None:
    source, policy, output = adaptive(tmp_path)
    (tmp_path / "c.rounds.jsonl").write_text('{"round":0,"requests":["q/0#1"]}\n')
    ask(source, policy, output)
    assert json.loads((tmp_path / "c.rounds.jsonl").read_text().splitlines()[0])["requests"] == list(policy.values)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_completions": 0}, "max_completions must be at least 1"),
        ({"max_width": 2.0}, "max_width must be from 0 to 1"),
        ({"estimator": "guessed"}, "there is no estimator 'guessed'"),
        ({"estimator": "smoothed"}, "needs requests.trajectories"),
        ({"mean_completions": -1.0}, "mean_completions must be at least 0"),
        ({"label": "hrad"}, "there are no labels of kind 'hrad'"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=message):
        adaptive(tmp_path, **settings)


def test_trajectories_that_the_states_were_not_cut_from_are_refused(tmp_path: Path) -> None:
    other = Trajectory("q/0", "q", "Q", "ab", ["a", "b"], [9], [1, 2], [1, 2], "stop", "7", "7", True)
    write_records(tmp_path / "t.jsonl", [other])
    source, policy, output = adaptive(tmp_path, trajectories=str(tmp_path / "t.jsonl"))
    with pytest.raises(BadInput, match="no trajectory passes through state 'p0/0#1'"):
        ask(source, policy, output)


# --- the first error by bisection ---------------------------------------------------------------------------


def solutions(folder: Path, num_steps: int, shared: int = 0) -> list[Trajectory]:
    """A right and a wrong trajectory of one-token steps that share the first `shared`."""

    def one(name: str, start: int, is_correct: bool) -> Trajectory:
        ids = [*range(1, shared + 1), *range(start, start + num_steps - shared)]
        ends = list(range(1, num_steps + 1))
        return Trajectory(
            name, "p", "Q", "s" * num_steps, ["s"] * num_steps, [9], ids, ends, "stop", "7", "7", is_correct
        )

    rows = [one("p/0", 100, True), one("p/1", 200, False)]
    write_records(folder / "t.jsonl", rows)
    write_records(folder / "s.jsonl", distinct_states(rows))
    return rows


def find_error(folder: Path, first_error: int, **settings: Any) -> tuple[Policy, Path]:
    """The states of the wrong trajectory before step `first_error` are always right, those from it on never."""
    source = FirstErrorCompletions(str(folder / "s.jsonl"), str(folder / "t.jsonl"), **settings)
    values = {
        row.id: float(row.step < first_error or row.trajectory_id == "p/0")
        for row in read_records(State, folder / "s.jsonl")
    }
    policy, output = Policy(values), folder / f"c{first_error}.jsonl"
    ask(source, policy, output)
    return policy, output


@pytest.mark.parametrize("num_steps", [1, 2, 3, 8, 13])
def test_bisection_finds_every_first_error_in_log_two_questions(num_steps: int, tmp_path: Path) -> None:
    from espalier.pipeline.stage import StageContext
    from espalier.pipeline.values.estimate_values import EstimateValues

    solutions(tmp_path, num_steps)
    for first_error in range(1, num_steps + 1):
        policy, output = find_error(tmp_path, first_error)
        assert len(policy.asked) <= math.ceil(math.log2(num_steps)) if num_steps > 1 else not policy.asked
        output.touch()
        stage = EstimateValues(str(tmp_path / "t.jsonl"), str(tmp_path / "s.jsonl"), estimator="first_error")
        rows = list(stage.run(str(output), StageContext(None, output, 10.0)))
        assert rows[1].labels == [1.0] * (first_error - 1) + [0.0] * (num_steps - first_error + 1)


def test_what_a_right_trajectory_passed_is_not_asked(tmp_path: Path) -> None:
    solutions(tmp_path, 16, shared=12)
    policy, _ = find_error(tmp_path, 15)
    assert policy.asked == ["p/1#14", "p/1#15@1"]


def test_unsolved_problems_are_left_out_unless_wanted(tmp_path: Path) -> None:
    rows = solutions(tmp_path, 8)
    write_records(tmp_path / "t.jsonl", [rows[1]])
    assert find_error(tmp_path, 3)[0].asked == []
    (tmp_path / "c3.jsonl").unlink(missing_ok=True)
    assert len(find_error(tmp_path, 3, needs_solved=False)[0].asked) == 3


def test_a_search_needs_every_state(tmp_path: Path) -> None:
    solutions(tmp_path, 8)
    write_records(tmp_path / "s.jsonl", [row for row in read_records(State, tmp_path / "s.jsonl") if row.step != 4])
    with pytest.raises(BadInput, match="there is no state after step 4 of 'p/1': cut every state"):
        find_error(tmp_path, 3)


def test_a_search_stops_at_a_refused_state(tmp_path: Path) -> None:
    solutions(tmp_path, 8)
    source = FirstErrorCompletions(str(tmp_path / "s.jsonl"), str(tmp_path / "t.jsonl"))
    policy = Policy({}, refused=("p/1#4",))
    assert ask(source, policy, tmp_path / "c.jsonl").failed == [("p/1#4", "too long")]
    assert policy.asked == ["p/1#4"]


def test_requests_that_were_never_answered_are_counted_in_every_round(tmp_path: Path) -> None:
    """One state of two is out of reach in round 0; the other goes on for three more rounds."""

    class OutOfReach(Policy):
        async def sample(self, request: SampleRequest, params: SamplingParams) -> list[Sample]:
            if request.id == "p0/0#1":
                raise NotAnswered("no answer")
            return await super().sample(request, params)

    source, policy, output = adaptive(tmp_path, [0.5, 0.5], max_completions=12, max_width=0.1)
    tally = ask(source, OutOfReach(policy.values), output)
    assert (tally.done, len(tally.failed), tally.unanswered) == (4, 1, 1)


# --- a whole job --------------------------------------------------------------------------------------------


def test_a_job_asks_in_rounds_and_goes_on_in_any(tmp_path: Path, tiny_policy: Path, completion_server: Any) -> None:
    from espalier.models.load import check_model_folder, load_tokenizer
    from espalier.runtime.schemas import SampleConfig
    from espalier.sampling.job import run_job

    tokenizer = load_tokenizer(str(tiny_policy))  # the states are in the policy's tokens, 10 to 13
    states = [
        State(f"p/{k}#1", "p", f"p/{k}", 1, "Q", tokenizer.decode([10 + k]), [9], [10 + k], "7") for k in range(4)
    ]
    write_records(tmp_path / "s.jsonl", states)
    output = tmp_path / "c.jsonl"

    def answer(prompt_ids: list[int], index: int) -> tuple[str, list[int]]:
        text = f"\n#### {7 if prompt_ids[-1] == 10 or (prompt_ids[-1] == 11 and index) else 8}"
        return text, [*tokenizer(text).input_ids, tokenizer.eos_token_id]

    with completion_server(answer=answer) as server:
        config = SampleConfig(
            output=str(output), policy=str(tiny_policy),
            task={"_target_": "espalier.data.tasks.word_arithmetic.WordArithmetic", "num_train": 12},
            requests={"_target_": "espalier.sampling.adaptive_completions.AdaptiveCompletions", "max_width": 0.6,
                      "max_completions": 8, "states": str(tmp_path / "s.jsonl")},
            params={"_target_": "espalier.sampling.client.SamplingParams", "n": 2, "temperature": 1.0,
                    "max_tokens": 20},
            client={"_target_": "espalier.sampling.vllm_client.VLLMClient", "base_url": server.base_url},
        )  # fmt: skip
        assert run_job(config, load_tokenizer, check_model_folder) == 0
    sizes = {state: len(rights) for state, rights in counts_of(output).items()}
    assert sizes == {"p/0#1": 4, "p/1#1": 8, "p/2#1": 4, "p/3#1": 4}
    meta = json.loads((tmp_path / "c.meta.json").read_text())
    assert (meta["is_complete"], meta["counts"]["requests"], meta["counts"]["rows"]) == (True, 10, 20)
    assert run_job(config, load_tokenizer, check_model_folder) == 0, "a complete file needs no server: this one is gone"
    with pytest.raises(BadInput, match=r"was made otherwise .requests.max_width was 0.6, now 0.3"):
        run_job(replace(config, requests={**config.requests, "max_width": 0.3}), load_tokenizer, check_model_folder)
