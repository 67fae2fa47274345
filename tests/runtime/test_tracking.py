"""Where metrics go: one set of names in JSONL, TensorBoard and W&B; the live line with rates, time left and memory."""

import json
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from espalier.runtime import tracking
from espalier.runtime.entrypoint import BadConfig
from espalier.runtime.run_dir import code_commit
from espalier.runtime.schemas import TrackingConfig, TrainConfig
from espalier.runtime.tracking import Metrics, Progress, as_written, check_tracking, clock_time, peak_memory

ROWS: list[tuple[int, dict[str, float]]] = [
    (1, {"train/loss": 2.5, "train/learning_rate": 1e-3}),
    (2, {"train/loss": 2.0, "train/learning_rate": 2e-3}),
    (2, {"eval/loss": 2.25, "eval/accuracy": float("nan")}),
]
POINTS = {"train/loss": [(1, 2.5), (2, 2.0)], "train/learning_rate": [(1, 1e-3), (2, 2e-3)], "eval/loss": [(2, 2.25)]}


def write(
    folder: Path, settings: TrackingConfig, rows: list[tuple[int, dict[str, float]]] = ROWS, first: int = 0
) -> None:
    metrics = Metrics(folder, settings, first, TrainConfig(seed=5))
    for step, values in rows:
        metrics.log(step, values)
    metrics.close()


def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Name → (step, value) of metrics.jsonl."""
    found: dict[str, list[tuple[int, float]]] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        step = row.pop("step")
        for name, value in row.items():
            found.setdefault(name, []).append((step, value))
    return found


def test_the_jsonl_file_holds_what_is_finite(tmp_path: Path) -> None:
    write(tmp_path, TrackingConfig())
    assert points(tmp_path) == POINTS
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_small_numbers_keep_their_digits_and_whole_ones_all(tmp_path: Path) -> None:
    values = {
        "train/learning_rate": 5e-7 / 150,
        "update/kl_old": 4.123456789123e-9,
        "tokens": 123456789012.0,
        "x": 1 / 3,
    }
    write(tmp_path, TrackingConfig(), [(1, values)])
    assert {name: rows[0][1] for name, rows in points(tmp_path).items()} == {
        "train/learning_rate": 3.33333333e-9, "update/kl_old": 4.12345679e-9, "tokens": 123456789012.0,
        "x": 0.333333333,
    }  # fmt: skip


def test_a_number_that_is_read_again_is_the_one_that_was_kept() -> None:
    """Patience compares what evaluations found before a resume with what they find after it."""
    for value in (1 / 3, 2e-9 / 3, 123456.78901234, 0.5, 7.0):
        assert json.loads(json.dumps(as_written(value))) == as_written(value) == as_written(as_written(value))
    assert as_written(1 / 3) != 1 / 3


def test_a_resumed_run_drops_what_it_does_again(tmp_path: Path) -> None:
    write(tmp_path, TrackingConfig())
    write(tmp_path, TrackingConfig(), [(2, {"train/loss": 1.0})], first=1)
    assert points(tmp_path)["train/loss"] == [(1, 2.5), (2, 1.0)]
    assert "eval/loss" not in points(tmp_path)


def test_tensorboard_has_the_same_names_and_values(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, TrackingConfig(tensorboard=True))
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}
    assert found == {name: [(step, pytest.approx(value)) for step, value in rows] for name, rows in POINTS.items()}
    assert points(tmp_path) == POINTS
    (text,) = events.Tensors("settings/text_summary")
    (said,) = text.tensor_proto.string_val
    assert f"commit {code_commit()}" in said.decode()


def wandb_records(path: Path) -> Iterator[bytes]:
    """The records of an offline file: LevelDB's log format (blocks of 32 KiB; CRC, length, kind) behind 7 bytes."""
    data, place, record = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # no room for a header
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def offline_history(folder: Path) -> tuple[dict[str, list[tuple[int, float]]], set[str], dict[str, Any]]:
    """What the offline files of W&B hold: name → (step, value), ids of runs, the config."""
    from wandb.proto import wandb_internal_pb2

    found: dict[str, list[tuple[int, float]]] = {}
    ids: set[str] = set()
    config: dict[str, Any] = {}
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for data in wandb_records(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                ids.add(record.run.run_id)
                config["tags"] = list(record.run.tags)
                config |= {item.key: json.loads(item.value_json) for item in record.run.config.update if item.key}
            if record.HasField("history"):
                row = {item.nested_key[0] if item.nested_key else item.key: json.loads(item.value_json)
                       for item in record.history.item}  # fmt: skip
                for name in [name for name in row if not name.startswith("_")]:
                    found.setdefault(name, []).append((row["_step"], row[name]))
    return found, ids, config


def test_wandb_offline_has_the_same_names_and_values(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="an extra: requirements-wandb.txt")
    settings = TrackingConfig(wandb="offline", project="test")
    write(tmp_path, settings)
    write(tmp_path, settings, [(3, {"train/loss": 1.0})], first=2)
    deadline = time.monotonic() + 20  # W&B's own process writes the file a moment later
    while len(offline_history(tmp_path)[0].get("train/loss", [])) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    found, ids, config = offline_history(tmp_path)
    assert found == {**POINTS, "train/loss": [(1, 2.5), (2, 2.0), (3, 1.0)]} == points(tmp_path)
    assert ids == {(tmp_path / "wandb_id").read_text().strip()}, "both starts are one run"
    assert config["seed"] == 5
    assert config["tags"] == [code_commit()]


def test_wandb_that_is_not_installed_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    check_tracking(TrackingConfig())
    with pytest.raises(BadConfig) as error:
        check_tracking(TrackingConfig(wandb="offline"))
    assert str(error.value) == (
        "tracking.wandb=offline needs the package wandb, which is not installed: pip install -r "
        "requirements-wandb.txt, or set tracking.wandb=null"
    )
    with pytest.raises(BadConfig, match="wandb must be null, offline or online, got 'on'"):
        check_tracking(TrackingConfig(wandb="on"))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.4, "59 s"), (60, "1:00"), (185, "3:05"), (7385, "2:03:05"), (4 * 86400 + 7385, "4 d 2:03:05")],
)
def test_a_duration_is_short(seconds: float, text: str) -> None:
    assert clock_time(seconds) == text


def test_peak_memory_grows_with_what_is_held() -> None:
    before = peak_memory()["rss_gib"]
    held = bytearray(b"x") * (1 << 28)
    after = peak_memory()["rss_gib"]
    assert len(held) == 1 << 28
    assert 0.05 < before <= after < 64
    assert after >= 0.25


def test_the_live_line_has_rates_time_left_and_memory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(tracking.time, "monotonic", lambda: clock[0])  # type: ignore[attr-defined]
    monkeypatch.setattr(tracking, "peak_memory", lambda: {"rss_gib": 1.5, "gpu_gib": 70.25})
    assert not sys.stderr.isatty()
    with Progress("train", 100, "step", initial=10) as progress:
        clock[0] += 20
        progress.update(20, loss=0.5, tokens_per_second=1234.5)
    assert capsys.readouterr().err.splitlines()[0] == (
        "train: 20/100 steps  0.5/s  2:40 left  loss 0.5  tokens/s 1234  rss_gib 1.5  gpu_gib 70.25"
    )


def test_only_the_main_rank_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    write(tmp_path, replace(TrackingConfig(), tensorboard=True))
    assert list(tmp_path.iterdir()) == []
