"""Logits of token rows by several engines: which rows go together, who gets them, and what becomes of them when an
engine fails. The engines are stand-ins without vLLM, but for the last tests."""

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from espalier.data.records import BadInput
from espalier.data.steps import TokenRow
from espalier.sampling.child_process import CannotStart
from espalier.sampling.client import Refused, ServerGone
from espalier.sampling.engine_scorer import EngineScorer, row_batches
from espalier.sampling.offline_client import OfflineClient
from tests.sampling.test_data_parallel_engines import Stood, request

ROOT = Path(__file__).resolve().parent.parent.parent


@contextmanager
def scorer(folder: Path, model: str = "prm", **settings: Any) -> Iterator[EngineScorer]:
    engines = EngineScorer(Stood(**settings), str(folder / "engine.log"))
    engines.open(model)
    try:
        yield engines
    finally:
        engines.close()


def rows_of(*names: str) -> list[TokenRow]:
    """Rows of ten tokens, the first 100 k + 0, 100 k + 1 ..., asked at the places 3 and 9."""
    return [TokenRow(name, [100 * k + token for token in range(10)], [3, 9]) for k, name in enumerate(names)]


def ask(engines: EngineScorer, rows: list[TokenRow], batch_tokens: int = 20) -> dict[int, list[list[float]]]:
    found: dict[int, list[list[float]]] = {}

    def on_batch(places: list[int], logits: list[list[list[float]]]) -> None:
        assert not found.keys() & set(places)
        found.update(zip(places, logits, strict=True))

    engines.token_logits(rows, batch_tokens, on_batch)
    return found


def test_neighbours_go_together_as_far_as_the_tokens_allow() -> None:
    rows = [TokenRow("", [0] * length, [0]) for length in (4, 4, 4, 30, 2, 6, 6)]  # 56 tokens
    assert row_batches(rows, 10, 1) == [[0, 1], [2], [3], [4, 5], [6]]
    assert row_batches(rows, 1000, 1) == [[0, 1, 2], [3], [4, 5, 6]]  # 14 at most: four for each engine
    assert row_batches([], 10, 2) == []


def test_every_row_gets_the_logits_of_its_own_places_and_both_engines_work(tmp_path: Path) -> None:
    rows = rows_of(*(f"row {k}" for k in range(16)))
    with scorer(tmp_path) as engines:
        found = ask(engines, rows)
        assert {place: [pair[0] for pair in pairs] for place, pairs in found.items()} == {
            k: [100.0 * k + 3, 100.0 * k + 9] for k in range(16)
        }
        assert {pair[1] for pairs in found.values() for pair in pairs} == {0.0, 1.0}
    assert (tmp_path / "engine-1.log").is_file()


def test_rows_of_a_lost_engine_go_to_the_other_and_it_is_started_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["die at 1" if k in (3, 4) else f"row {k}" for k in range(12)]
    with scorer(tmp_path, max_replaced=1) as engines, caplog.at_level(logging.WARNING):
        found = ask(engines, rows_of(*names))
        assert sorted(found) == list(range(12))
        assert engines.client.num_moved >= 1
    assert "engine 1 of 2" in caplog.text
    assert "another one is started" in caplog.text


def test_an_engine_that_hangs_is_given_up_and_its_rows_move(tmp_path: Path) -> None:
    with scorer(tmp_path, silence_seconds=0.4, probe_seconds=0.2) as engines:
        found = ask(engines, rows_of("hang at 0", "row", "hang at 0", *("row " + str(k) for k in range(9))))
    assert sorted(found) == list(range(12))
    assert {pair[1] for pairs in found.values() for pair in pairs} == {1.0}


def test_rows_that_kill_engines_end_the_run_with_their_name(tmp_path: Path) -> None:
    with scorer(tmp_path, num_engines=4) as engines:
        with pytest.raises(ServerGone, match="3 engines were gone while they had 1 rows from die on"):
            ask(engines, rows_of("row", "die"), 10)
        assert engines.client.num_engines == 4


def test_a_refused_row_is_named_and_what_came_before_is_kept(tmp_path: Path) -> None:
    found: list[int] = []
    rows = rows_of("row", "row", "row", "refused")
    refused = pytest.raises(BadInput, match="an engine refuses a row: too long")
    with scorer(tmp_path, num_engines=1) as engines, refused:
        engines.token_logits(rows, 10, lambda places, logits: found.extend(places))
    assert {0, 1} <= set(found) <= {0, 1, 2}  # two are under way at once


def test_one_scorer_loads_one_model_after_the_other(tmp_path: Path) -> None:
    engines = EngineScorer(Stood(num_engines=1), str(tmp_path / "engine.log"))
    for model in ("prm", "prm_other"):
        engines.open(model)
        assert engines.client.model == model
        assert len(ask(engines, rows_of("row"))) == 1
        engines.close()
    with pytest.raises(CannotStart, match="had for missing"):
        engines.open("missing")
    engines.close()


def test_a_client_without_engines_or_with_a_model_of_its_own_is_refused() -> None:
    with pytest.raises(BadInput, match="choose client=data_parallel_engines or client=ray_engines"):
        EngineScorer(OfflineClient("prm"), "")
    with pytest.raises(BadInput, match=r"client\.model=policy"):
        EngineScorer(Stood("policy"), "")


def test_engines_that_sample_give_no_logits(tmp_path: Path) -> None:
    client = Stood("policy", str(tmp_path / "engine.log"), num_engines=1)

    async def both() -> None:
        await client.open()
        try:
            with pytest.raises(ServerGone, match="it samples"):
                await client.token_logits(rows_of("row"))
        finally:
            await client.close()

    asyncio.run(both())
    assert request("r").prompt_ids == [1, 2]


class Pooled(OfflineClient):
    """An engine whose cache holds the first `num_cached` tokens; logits at a place are the token there."""

    def __init__(self, num_cached: int, lost: int = 0, value: float = 0.0):
        super().__init__("prm")
        self.num_cached, self.lost, self.value = num_cached, lost, value
        self.asked: list[bool] = []

    async def _pooled(self, ids: list[int], reads_cache: bool) -> Any:
        self.asked.append(reads_cache)
        start = self.num_cached if reads_cache else 0
        data = torch.tensor([[float(token)] for token in ids[start + self.lost :]]) + self.value
        return SimpleNamespace(num_cached_tokens=start, outputs=SimpleNamespace(data=data))


def test_places_are_counted_from_behind_the_prefix_cache() -> None:
    row = TokenRow("row", list(range(50, 60)), [4, 9])
    for num_cached, asked in ((0, [True]), (4, [True]), (5, [True, False])):
        client = Pooled(num_cached)
        assert asyncio.run(client.token_logits(row)) == [[54.0], [59.0]]
        assert client.asked == asked  # a place within the cache has no logits: the row is computed whole


def test_logits_that_are_too_few_or_no_numbers_are_refused() -> None:
    row = TokenRow("row", list(range(10)), [4])
    for client in (Pooled(0, lost=1), Pooled(2, lost=1), Pooled(0, value=float("nan"))):
        with pytest.raises(ServerGone, match="row: the vLLM engine gave logits of shape"):
            asyncio.run(client.token_logits(row))


def test_a_row_that_vllm_refuses_is_named() -> None:
    class Refusing(Pooled):
        async def _pooled(self, ids: list[int], reads_cache: bool) -> Any:
            raise Refused("out of vocabulary")

    with pytest.raises(Refused, match=r"^row: out of vocabulary$"):
        asyncio.run(Refusing(0).token_logits(TokenRow("row", [1], [0])))


@pytest.mark.slow
@pytest.mark.server
def test_a_real_engine_reads_a_head_of_several_labels_as_transformers_do(tiny_policy: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                   "PYTHONPATH": str(ROOT)}  # fmt: skip
    command = [sys.executable, "-m", "tests.support.scoring_engine", str(tiny_policy), "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
