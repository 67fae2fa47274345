"""Rewards with networks on two gloo ranks: each scores about half of the tokens, and the scores are those of one
process; an error, or a signal, on one rank ends both."""

import asyncio
import json
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from benchmarks.processes.forked import run_ranks
from espalier.data.answers.stated_answers import Forecast
from espalier.data.records import Trajectory
from espalier.models.load import load_policy, load_tokenizer
from espalier.models.log_ratio_reward import Scale, write_log_ratio_reward
from espalier.rewards.calibration import LinguisticCalibrationReward
from espalier.rewards.composed import ComposedReward
from espalier.rewards.model_forecasts import ModelForecasts
from espalier.rewards.outcome import OutcomeReward
from espalier.rewards.outcome_model import OutcomeModelReward
from espalier.rewards.process import ProcessReward
from espalier.rewards.score import Score
from espalier.rewards.verifiers import VerifierReward
from espalier.rewards.written_verdicts import WrittenVerdictReward
from espalier.rl import rank_scores, trainer_from_config
from espalier.rl.rank_scores import RankScores, is_shared
from espalier.rl.trainer_from_config import check_who_scores
from espalier.runtime.background_loop import BackgroundLoop
from espalier.runtime.entrypoint import BadConfig
from espalier.runtime.errors import Stopped
from tests.support.rl_cases import read_metrics
from tests.support.slow import slow_unless
from tests.support.token_scorer import Engines


def run(folder: Path, scenario: str, num_ranks: int, policy: Path, prm: Path) -> tuple[list[int], list[str]]:
    """The exit codes, and what all ranks printed."""
    folder.mkdir(exist_ok=True)
    log = folder / f"{scenario}.log"
    settings = [f"input='{policy},{prm}'", f"output={folder / scenario}"]
    codes = run_ranks("tests/support/rank_scores.py", settings, log, num_ranks)
    return codes, log.read_text().splitlines()


def scored(folder: Path, scenario: str, num_ranks: int, policy: Path, prm: Path) -> list[tuple[int, dict[str, Any]]]:
    """What each rank has: the tokens that it has scored; on rank 0 the scores of all rollouts by their ids."""
    codes, lines = run(folder, scenario, num_ranks, policy, prm)
    assert codes == [0] * num_ranks, lines[-30:]
    found = [json.loads((folder / scenario / f"{number}.json").read_text()) for number in range(num_ranks)]
    return [(num_tokens, scores) for num_tokens, scores in found]


def both(scenario: str, policy: Path, prm: Path, folder: Path) -> tuple[int, list[int]]:
    """The tokens that one process scored, and each of two ranks, once scores and metrics are found equal."""
    ((alone, expected),) = scored(folder / "one", scenario, 1, policy, prm)
    first, second = scored(folder / "two", scenario, 2, policy, prm)
    assert len({value for row in expected.values() for value in row}) > (10 if scenario != "prof" else 1)
    assert first[1].keys() == expected.keys()
    for name, row in expected.items():
        assert first[1][name] == pytest.approx(row, abs=2e-6), name
    assert second[1] == {}, "no rollouts"
    rows = [[{name: value for name, value in row.items() if not name.startswith("queue/")}
             for row in read_metrics(folder / ranks / scenario)] for ranks in ("one", "two")]  # fmt: skip
    for one, two in zip(*rows, strict=True):
        assert two == pytest.approx(one, rel=1e-3, abs=1e-4)
    return alone, [first[0], second[0]]


@pytest.mark.parametrize(
    "scenario", slow_unless(lambda one: one == "plain", ["plain", "prof", "vineppo", "ahead", "vineppo_ahead"])
)
def test_each_of_two_ranks_scores_half_of_the_tokens_and_the_scores_are_those_of_one_process(
    scenario: str, tiny_policy: Path, tiny_prm: Path, tmp_path: Path
) -> None:
    alone, shares = both(scenario, tiny_policy, tiny_prm, tmp_path)
    assert sum(shares) == alone
    assert all(0.4 * alone < share < 0.6 * alone for share in shares), shares


def with_ratio(policy: Path, prm: Path, folder: Path) -> Path:
    """The reward model beside a log-ratio of the policy, changed, and itself."""
    own = folder / "prm"
    shutil.copytree(prm, own)
    model = load_policy(str(policy))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    model.save_pretrained(folder / "moved")
    load_tokenizer(str(policy)).save_pretrained(folder / "moved")
    write_log_ratio_reward(folder / "prm-ratio", str(folder / "moved"), str(policy), Scale(slope=0.1))
    return own


@pytest.mark.parametrize("scenario", slow_unless(lambda one: one == "cut", ["cut", "cut_ahead"]))
def test_reward_models_that_zero_3_cuts_over_two_ranks_score_as_whole_ones_do(
    scenario: str, tiny_policy: Path, tiny_prm: Path, tmp_path: Path
) -> None:
    alone, shares = both(scenario, tiny_policy, with_ratio(tiny_policy, tiny_prm, tmp_path), tmp_path)
    assert sum(shares) == alone
    assert all(0.4 * alone < share < 0.6 * alone for share in shares), shares


@pytest.mark.slow
def test_rank_0_alone_scores_batches_ahead_whose_groups_are_replaced_and_all_ranks_evaluations(
    tiny_policy: Path, tiny_prm: Path, tmp_path: Path
) -> None:
    alone, (first, second) = both("replaced_ahead", tiny_policy, tiny_prm, tmp_path)
    assert first + second == alone
    assert 0 < second < 0.4 * alone


@pytest.mark.slow
def test_a_reward_that_asks_elsewhere_too_is_rank_0s_alone(tiny_policy: Path, tiny_prm: Path, tmp_path: Path) -> None:
    alone, shares = both("beside", tiny_policy, tiny_prm, tmp_path)
    assert shares == [alone, 0]


@pytest.mark.parametrize(
    ("scenario", "expected", "line"),
    slow_unless(
        lambda case: case[0] == "nan",
        [
            ("nan_ahead", [1, 1], "error: rank 1: reward is not a number: the reward of trajectory rl-0/"),
            ("nan", [1, 1], "error: rank 1: reward is not a number: the reward of trajectory rl-0/"),
            ("refused", [2, 2], "error: rank 1: rl-0/"),
            ("cut_refused", [2, 2], "error: rank 1: rl-0/"),
            ("fails", [99, 1], "MemoryError: no room for a batch"),  # a traceback of the forked test
        ],
    ),
)
def test_an_error_of_one_rank_while_all_score_ends_both_in_one_line(
    scenario: str, expected: list[int], line: str, tiny_policy: Path, tiny_prm: Path, tmp_path: Path
) -> None:
    started = time.monotonic()
    prm = with_ratio(tiny_policy, tiny_prm, tmp_path) if scenario.startswith("cut") else tiny_prm
    codes, lines = run(tmp_path, scenario, 2, tiny_policy, prm)
    assert codes == expected, lines[-30:]
    assert time.monotonic() - started < 50
    (found,) = (one for one in lines if one.startswith(("error: ", "MemoryError: ")))
    assert found.startswith(line)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["stopped", "stopped_ahead"])
def test_a_signal_while_all_score_ends_the_run_with_a_checkpoint_and_the_same_command_goes_on(
    scenario: str, tiny_policy: Path, tiny_prm: Path, tmp_path: Path
) -> None:
    codes, lines = run(tmp_path, scenario, 2, tiny_policy, tiny_prm)
    assert codes == [143, 143], lines[-30:]
    assert any("stopped by a signal after iteration 1 of 2: the same command goes on" in line for line in lines)
    assert [path.name for path in (tmp_path / scenario / "checkpoints").iterdir()] == ["step-00000001"]
    codes, lines = run(tmp_path, scenario, 2, tiny_policy, tiny_prm)
    assert codes == [0, 0], lines[-30:]
    assert [row["step"] for row in read_metrics(tmp_path / scenario)] == [0, 1, 1, 2, 2]


# --- one process ----------------------------------------------------------------------------------------------------


TRAJECTORY = Trajectory("p/0", "p", "", "", [], [1], [2, 3], [], "stop", "1", None, False)


class Threads:
    """A reward that notes the threads which ask it."""

    def __init__(self) -> None:
        self.seen: list[threading.Thread] = []

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        self.seen.append(threading.current_thread())
        return [Score(float(len(trajectory.response_ids))) for trajectory in trajectories]


def test_the_main_thread_scores_what_the_event_loop_asks_for_as_often_as_it_asks() -> None:
    reward = Threads()
    with BackgroundLoop() as loop:
        ranks = RankScores[list[float]](loop)

        async def work() -> list[float]:
            first = await ranks.score([TRAJECTORY])
            await asyncio.sleep(0)
            return [*(score.total for score in first), *(score.total for score in await ranks.score([TRAJECTORY] * 2))]

        for _ in range(2):
            assert ranks.serve(work, reward) == [2.0, 2.0, 2.0]
        assert ranks.serve(partial(asyncio.sleep, 0, []), reward) == []
    assert reward.seen == [threading.main_thread()] * 4


def test_an_error_of_what_asks_rises_and_the_next_is_served() -> None:
    with BackgroundLoop() as loop:
        ranks = RankScores[float](loop)

        async def fail() -> float:
            await ranks.score([TRAJECTORY])
            raise ValueError("the engine has died")

        with pytest.raises(ValueError, match="the engine has died"):
            ranks.serve(fail, Threads())

        async def work() -> float:
            return (await ranks.score([TRAJECTORY]))[0].total

        assert ranks.serve(work, Threads()) == 2.0


def test_a_signal_while_rank_0_draws_ends_what_it_does_before_the_run_goes_on() -> None:
    ended: list[str] = []
    with BackgroundLoop() as loop:
        ranks = RankScores[None](loop)

        async def work() -> None:
            await ranks.score([TRAJECTORY])
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.01)
                ended.append("given up")

        @contextmanager
        def interrupted() -> Iterator[None]:
            if reward.seen:
                main = threading.main_thread().ident
                timer = threading.Timer(0.1, signal.pthread_kill, [main, signal.SIGUSR1])
                timer.start()
            yield

        def stop(number: int, frame: object) -> None:
            raise Stopped

        reward = Threads()
        loop.interrupts = interrupted
        before = signal.signal(signal.SIGUSR1, stop)
        try:
            with pytest.raises(Stopped):
                ranks.serve(work, reward)
            assert ended == ["given up"]
        finally:
            signal.signal(signal.SIGUSR1, before)


class Asks:
    """A model that is asked elsewhere, for texts or for verdicts."""

    has_engines = True

    def close(self) -> None: ...

    def __call__(self, asked: Sequence[Any]) -> list[Any]:
        return []


class AsksUnsaid:
    """A user's reward with engines that says nothing of them but how they are ended."""

    def close(self) -> None: ...

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Any]:
        return []


class Moved:
    """Networks of this process, which read for a calibration reward."""

    has_engines = False

    def to(self, device: torch.device) -> None: ...

    def close(self) -> None: ...

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[Forecast]:
        return []


def test_ranks_share_what_networks_of_this_process_score_and_nothing_that_asks_engines(
    tiny_prm: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    process, outcome = ProcessReward(str(tiny_prm)), OutcomeReward()
    assert not is_shared(process), "there is one rank"
    monkeypatch.setattr(rank_scores, "world_size", lambda: 8)
    assert is_shared(process)
    assert is_shared(OutcomeModelReward(str(tiny_prm), takes_last_step=True))
    assert not is_shared(outcome)
    assert is_shared(ComposedReward({"outcome": outcome, "process": process}))
    assert not is_shared(ProcessReward(str(tiny_prm), engines=Engines()))
    by_engines = ComposedReward({"one": process, "other": ProcessReward(str(tiny_prm), engines=Engines())})
    assert not is_shared(by_engines)
    assert is_shared(LinguisticCalibrationReward(Moved()))
    (tmp_path / "problems.jsonl").write_text('{"id": "p", "question": "Who sang?", "gold": "Ana"}\n')
    reader = ModelForecasts(Asks(), cast(Any, None), str(tmp_path / "problems.jsonl"))
    assert not is_shared(LinguisticCalibrationReward(reader)), "its extractor's engines would start on every rank"
    judged: Any = WrittenVerdictReward(cast(Any, None), cast(Any, None))
    assert not is_shared(ComposedReward({"judge": judged, "process": process}))
    assert not is_shared(ComposedReward({"judge": VerifierReward(judge=judged), "process": process}))
    assert is_shared(ComposedReward({"checked": VerifierReward(), "process": process}))
    own: Any = AsksUnsaid()
    assert not is_shared(ComposedReward({"own": own, "process": process}))
    monkeypatch.setattr(trainer_from_config, "world_size", lambda: 8)
    process.model.score.weight.ds_id = 1  # as ZeRO-3 cuts it
    check_who_scores(ComposedReward({"outcome": outcome, "process": process}))
    with pytest.raises(BadConfig, match=r"which ZeRO-3 cuts over all ranks, and another one asks .* deepspeed=zero2"):
        check_who_scores(ComposedReward({"own": own, "process": process}))
