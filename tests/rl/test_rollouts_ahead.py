"""Rollouts and completions that a checkpoint keeps of batches that are not trained on yet."""

import asyncio
import json
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from espalier.data.records import Completion, Problem, State, Trajectory
from espalier.data.tasks.word_arithmetic import WordArithmetic
from espalier.rl.begun_completions import BegunCompletions, token_key
from espalier.rl.rollouts_ahead import RolloutsAhead
from espalier.rl.types import Rollout, RolloutGroup
from espalier.runtime.background_loop import BackgroundLoop
from espalier.sampling.client import SamplingParams
from espalier.training.engine import BadCheckpoint
from tests.rl.test_staleness import Timed, timed_source

PARAMS = SamplingParams(n=2, temperature=0.7, max_tokens=9, stop=["\n\n"], return_logprobs=True)
PROBLEM = Problem("p-1", "1 + 2?", "3")
STATE = State("rl-4/p-1/0#1", "p-1", "rl-4/p-1/0", 1, "1 + 2?", "α\n", [5, 6], [7, 151935], "3")
COMPLETION = Completion(f"{STATE.id}/0", STATE.id, "p-1", "3\u2028", [8, 2], "stop", "3", True)


def group(version: int) -> RolloutGroup:
    """Two rollouts whose log-probs have all their bits; weights came while the second was drawn."""
    rows = [
        ([7, 151935, 8, 2], [-0.1, -1 / 3, -1e-300, 0.0], "α\n3\u2028"),
        ([9], [-2.5000000000000004], "😀"),
    ]
    rollouts = []
    for k, (ids, logprobs, text) in enumerate(rows):
        trajectory = Trajectory(
            f"rl-4/p-1/{k}", "p-1", "1 + 2?", text, [text], [5, 6], ids, [len(ids)], "stop", "3", "3", True
        )
        starts = ((0, version), (2, version + 1)) if k == 0 else ()
        rollouts.append(Rollout(trajectory, array("d", logprobs), version, version_starts=starts))
    return RolloutGroup(PROBLEM, rollouts, [])


def saved(folder: Path) -> None:
    ahead, begun = RolloutsAhead(1, "task"), BegunCompletions()
    ahead.add(3, "rl-3", group(2))  # which is trained on
    ahead.add(4, "rl-4", group(3))
    begun.keep(4, STATE.id, token_key(STATE), PARAMS, [COMPLETION])
    ahead.save(folder, ahead.look(4, PARAMS, begun), PARAMS, num_uncounted=5)


def loaded(folder: Path, max_staleness: int = 1, made_by: str = "task") -> tuple[RolloutsAhead, BegunCompletions]:
    ahead, begun = RolloutsAhead(max_staleness, made_by), BegunCompletions()
    ahead.load(folder, begun)
    return ahead, begun


def test_they_come_back_to_the_last_bit_and_once(tmp_path: Path) -> None:
    saved(tmp_path)
    ahead, begun = loaded(tmp_path)
    assert (ahead.num_tokens, ahead.num_uncounted) == ({4: 5}, 5)
    assert begun.waiting_tokens == 2
    assert ahead.take(4, "rl-4", PROBLEM, [5, 6], PARAMS) == group(3)
    assert ahead.take(4, "rl-4", PROBLEM, [5, 6], PARAMS) is None
    assert ahead.leave(4) == 0
    answer = begun.take(4, STATE, PARAMS)
    assert answer is not None
    assert asyncio.run(answer.wait()) == [COMPLETION]
    assert (begun.waiting_tokens, begun.dropped_tokens) == (0, 0)


@pytest.mark.parametrize("asked", [
    {"name": "rl-4-1"},
    {"prompt_ids": [5, 5]},
    {"params": replace(PARAMS, temperature=0.8)},
    {"problem": replace(PROBLEM, gold="4")},
    {"max_staleness": 0},
    {"made_by": "another task"},
])  # fmt: skip
def test_another_question_is_not_answered_by_them(asked: dict[str, Any], tmp_path: Path) -> None:
    saved(tmp_path)
    ahead, begun = loaded(tmp_path, asked.get("max_staleness", 1), asked.get("made_by", "task"))
    assert (begun.waiting_tokens == 0) is bool({"max_staleness", "made_by"} & set(asked))
    found = ahead.take(
        4, asked.get("name", "rl-4"), asked.get("problem", PROBLEM), asked.get("prompt_ids", [5, 6]),
        asked.get("params", PARAMS),
    )  # fmt: skip
    assert found is None
    assert ahead.leave(4) == 5, "and its tokens are drawn again"


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_completions_of_another_state_or_of_versions_that_are_too_old_are_dropped(
    max_staleness: int, tmp_path: Path
) -> None:
    saved(tmp_path)
    begun = loaded(tmp_path, max_staleness)[1]
    assert begun.take(4, replace(STATE, prefix_ids=[7, 7]), PARAMS) is None
    assert begun.dropped_tokens == 2 * max_staleness


def test_nothing_is_written_where_nothing_waits_and_a_folder_without_it_gives_nothing(tmp_path: Path) -> None:
    ahead, begun = RolloutsAhead(0), BegunCompletions()
    ahead.add(3, "rl-3", group(3))
    ahead.save(tmp_path, ahead.look(4, PARAMS, begun), PARAMS, num_uncounted=5)
    assert not list(tmp_path.iterdir())
    assert loaded(tmp_path)[0].num_tokens == {}


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    saved(tmp_path)
    path = tmp_path / "rollouts_ahead.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1]["rollouts"][0]["trajectory"]["response_ids"] = 400
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(
        BadCheckpoint, match=r"rollouts_ahead.jsonl cannot be read \(rollouts_ahead.safetensors has too few"
    ):
        loaded(tmp_path)


def test_what_nobody_has_asked_for_yet_stays_for_the_next_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path)
    ahead, begun = loaded(tmp_path)
    assert ahead.look(4, PARAMS, begun).num_tokens == 5 + 2
    assert ahead.look(4, replace(PARAMS, max_tokens=8), begun).num_tokens == 2
    ahead.take(4, "rl-4", PROBLEM, [5, 6], PARAMS)
    assert ahead.look(4, PARAMS, begun).num_tokens == 2


def test_where_drawing_is_cut_completions_that_have_come_stay_for_the_checkpoint() -> None:
    async def cut() -> tuple[list[tuple[int, str]], int]:
        begun = BegunCompletions()

        async def answers() -> list[Completion]:
            return [COMPLETION]

        async def hangs() -> list[Completion]:
            await asyncio.sleep(60)
            return []

        begun.begin(4, STATE, PARAMS, answers)
        begun.begin(4, replace(STATE, id="rl-4/p-2/0#1"), PARAMS, hangs)
        await asyncio.sleep(0)
        await begun.stop(4)
        come = [(turn, state_id) for turn, state_id, _ in begun.come_from(4)]
        return come, await begun.give_up(4)

    assert asyncio.run(cut()) == ([(4, STATE.id)], 2)


def test_tokens_that_stand_in_no_metrics_stay_so_over_a_second_checkpoint(
    tmp_path: Path, task: WordArithmetic, tokenizer: Any
) -> None:
    """As where the first start behind a signal writes its checkpoint anew, and is killed."""
    with BackgroundLoop() as loop:
        source = timed_source(Timed(tokenizer), task, loop, max_staleness=1)
        source.params, source._version = PARAMS, 4
        source.ahead.made_by = "task"
        saved(tmp_path)
        for _ in range(2):
            source.load(tmp_path)
            source.go_on(0, 0)
            source.save(tmp_path)
    assert json.loads((tmp_path / "rollouts_ahead.jsonl").read_text().splitlines()[0])["num_uncounted"] == 5
